"""Chunked log-probs: the same numbers and gradients as the whole logits, without keeping them."""

from __future__ import annotations

import math

import pytest
import torch

from tests.models.tiny import VOCABULARY, llama, ragged_batch
from zoo.models import head
from zoo.models.head import chunked_logprobs
from zoo.models.policy import Policy


def inputs(
    rows: int, hidden: int, vocabulary: int, dtype: torch.dtype, bias: bool, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    states = normal(rows, hidden).requires_grad_()
    weight = (normal(vocabulary, hidden) * 0.7).requires_grad_()
    offset = normal(vocabulary).requires_grad_() if bias else None
    targets = torch.randint(vocabulary, (rows,), generator=generator)
    return states, weight, offset, targets, normal(rows)


def whole_logprobs(states, weight, offset, targets, scale, softcap):
    logits = torch.nn.functional.linear(states, weight, offset)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logprobs = (logits * scale).log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(1, targets[:, None]).squeeze(1), entropy.detach()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_second_backward_pass_has_the_gradient_of_the_first(dtype: torch.dtype) -> None:
    """The first one writes over the logits that were kept for it."""
    states, weight, _, targets, direction = inputs(20, 8, 33, dtype, False)
    ours, _ = chunked_logprobs(states, weight, None, targets)
    loss = (ours * direction).sum()
    first = torch.autograd.grad(loss, [states, weight], retain_graph=True)
    second = torch.autograd.grad(loss, [states, weight])
    for one, two in zip(first, second, strict=True):
        assert one.abs().max() > 0.1
        torch.testing.assert_close(one, two, rtol=0, atol=0)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.float32, 1e-5)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("scale", "softcap"), [(1.0, None), (1 / 0.7, None), (0.5, 3.0)])
@pytest.mark.parametrize("chunk", [3, 7, 512])
def test_B100_chunked_equals_whole_in_value_and_gradient(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    tolerance: float,
    bias: bool,
    scale: float,
    softcap: float | None,
    chunk: int,
) -> None:
    # 20 rows: blocks of 6 (in two chunks), of 14, or one; the last ones ragged
    monkeypatch.setattr(head, "_chunks", lambda logits: head._pieces(len(logits), chunk))
    monkeypatch.setattr(head, "BLOCK", 2 * chunk)
    states, weight, offset, targets, direction = inputs(20, 8, 33, dtype, bias)
    leaves = [t for t in (states, weight, offset) if t is not None]
    ours, entropy = chunked_logprobs(states, weight, offset, targets, scale=scale, softcap=softcap)
    assert ours.dtype == dtype
    mine = torch.autograd.grad((ours * direction).sum(), leaves)
    # The reference is float64 always: the tolerance is then that of our arithmetic alone.
    wide = [t.detach().double().requires_grad_() for t in leaves]
    theirs, their_entropy = whole_logprobs(
        wide[0], wide[1], wide[2] if bias else None, targets, scale, softcap
    )
    right = torch.autograd.grad((theirs * direction.double()).sum(), wide)
    assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max()
    assert (entropy - their_entropy).abs().max() <= tolerance * their_entropy.abs().max()
    for got, wanted in zip(mine, right, strict=True):
        assert got.dtype == dtype
        assert (got - wanted).abs().max() <= tolerance * wanted.abs().max()


def test_B100_gradient_agrees_with_finite_differences() -> None:
    states, weight, offset, targets, _ = inputs(4, 3, 5, torch.float64, bias=True)

    def logprobs(*leaves: torch.Tensor) -> torch.Tensor:
        return chunked_logprobs(*leaves, targets, scale=0.8, softcap=2.0)[0]

    assert torch.autograd.gradcheck(logprobs, (states, weight, offset))


def test_half_precision_weights_give_float32_log_probs() -> None:
    states, weight, _, targets, _ = inputs(6, 8, 33, torch.bfloat16, bias=False)
    ours, entropy = chunked_logprobs(states, weight, None, targets)
    assert ours.dtype == entropy.dtype == torch.float32
    # The logits are rounded to bfloat16 by the product; from there on float32.
    logits = torch.nn.functional.linear(states, weight).float()
    wanted = logits.log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
    torch.testing.assert_close(ours, wanted, rtol=0, atol=1e-5)
    grads = torch.autograd.grad(ours.sum(), [states, weight])
    assert [g.dtype for g in grads] == [torch.bfloat16, torch.bfloat16]


def test_a_frozen_head_passes_its_gradient_on_and_gets_none() -> None:
    states, weight, _, targets, _ = inputs(6, 8, 33, torch.float64, bias=False)
    frozen = weight.detach()
    chunked_logprobs(states, frozen, None, targets)[0].sum().backward()
    assert frozen.grad is None and states.grad is not None
    assert float(states.grad.abs().max()) > 0


def test_no_rows_are_no_error() -> None:
    weight = torch.randn(5, 3, requires_grad=True)
    logprobs, entropy = chunked_logprobs(
        torch.zeros(0, 3, requires_grad=True), weight, None, torch.zeros(0, dtype=torch.long)
    )
    logprobs.sum().backward()
    assert logprobs.shape == entropy.shape == (0,)
    assert weight.grad is not None and float(weight.grad.abs().max()) == 0


# --- entropy --------------------------------------------------------------------------------------


def test_B36_entropy_of_a_uniform_distribution_over_four() -> None:
    states = torch.zeros(2, 3)
    _, entropy = chunked_logprobs(states, torch.randn(4, 3), None, torch.tensor([0, 3]))
    assert entropy.tolist() == pytest.approx([1.386294, 1.386294], rel=1e-6)  # ln 4


def test_B36_entropy_is_that_of_the_sampling_temperature() -> None:
    # logits (0, ln 3) at T = 0.5 are (0, ln 9): p = (0.1, 0.9)
    weight = torch.tensor([[0.0], [math.log(3.0)]])
    _, entropy = chunked_logprobs(torch.ones(1, 1), weight, None, torch.tensor([0]), scale=1 / 0.5)
    assert float(entropy) == pytest.approx(-(0.1 * math.log(0.1) + 0.9 * math.log(0.9)), rel=1e-6)


def test_B36_entropy_is_never_negative_in_float32() -> None:
    # Nearly deterministic rows, where log Z − Σ p·z cancels.
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(200, 16, generator=generator) * 30
    weight = torch.randn(64, 16, generator=generator)
    _, entropy = chunked_logprobs(states, weight, None, torch.zeros(200, dtype=torch.long))
    assert float(entropy.min()) >= -1e-6


def test_entropy_can_be_left_out() -> None:
    states, weight, _, targets, _ = inputs(6, 8, 33, torch.float32, bias=False)
    with_, entropy = chunked_logprobs(states, weight, None, targets)
    without, zeros = chunked_logprobs(states, weight, None, targets, with_entropy=False)
    assert torch.equal(with_, without)
    assert float(entropy.min()) > 0 and not bool(zeros.any())
    assert not entropy.requires_grad


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
def test_B100_no_tensor_with_a_vocabulary_dimension_is_kept_for_the_backward(tied: bool) -> None:
    policy = Policy(llama(tie_word_embeddings=tied))
    weights = {p.data_ptr() for p in policy.parameters()}
    batch = ragged_batch()
    kept: list[tuple[int, ...]] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in weights:
            kept.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = policy(batch).logprobs.sum()
    assert kept, "the hook saw nothing"
    assert not [shape for shape in kept if VOCABULARY in shape]
    # The same hook does see the logits of an ordinary forward, so it would have told.
    kept.clear()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        policy.model(input_ids=batch.input_ids).logits.log_softmax(-1).sum()
    assert [shape for shape in kept if VOCABULARY in shape]
    loss.backward()


def test_B100_sizes_of_the_largest_tensor_are_those_of_one_chunk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No tensor made inside the head, forward or backward, exceeds a chunk of logits."""
    from torch.utils._python_dispatch import TorchDispatchMode

    monkeypatch.setattr(head, "_chunks", lambda logits: head._pieces(len(logits), 4))
    monkeypatch.setattr(head, "BLOCK", 4)
    states, weight, _, targets, direction = inputs(64, 8, 1000, torch.float32, bias=False)
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                largest = max(largest, out.numel())
            return out

    with Watch():
        logprobs, _ = chunked_logprobs(states, weight, None, targets)
        (logprobs * direction).sum().backward()
    # The gradient of the weight has 1000·8 numbers; one chunk of logits 4·1000; all logits 64,000.
    assert 4 * 1000 <= largest <= 1000 * 8
