"""Rows that share a forward pass stay apart, and passes of one module agree."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.models.tiny import MODELS, gpt2, ragged_batch
from zoo.batch import collate
from zoo.models import head
from zoo.models.critic import Critic
from zoo.models.packing import Layout
from zoo.models.policy import Policy
from zoo.models.reference import load_reference
from zoo.models.reward_model import from_policy

FIRST, SECOND = [7, 9, 20, 33, 5, 41], [12, 3, 8, 60]


def documents(*texts: list[int]) -> Any:
    """Texts to learn by heart: the first token of each is its prompt, all others are targets."""
    return collate(
        [text[:1] for text in texts],
        [text[1:] for text in texts],
        group_size=1,
        prompt_ids=[str(i) for i in range(len(texts))],
    )


@pytest.mark.parametrize("name", MODELS)
def test_B73_packed_documents_do_not_see_each_other(name: str) -> None:
    # learned positions among the models: rotary ones hide a position that was not reset
    policy = Policy(MODELS[name](), packed=True)
    both, alone = documents(FIRST, SECOND), documents(SECOND)
    layout = Layout.of(both, torch.float32)
    assert layout.input_ids.shape[0] == 1 and layout.tokens == len(FIRST) + len(SECOND)
    assert int(both.completion_mask.sum()) == len(FIRST) - 1 + len(SECOND) - 1
    with torch.no_grad():
        together, by_itself = policy(both).logprobs, policy(alone).logprobs
    assert policy.trunk.packed
    assert (together[1, : len(SECOND)] - by_itself[0]).abs().max() < 1e-5
    # and another first document moves nothing in the second
    with torch.no_grad():
        other = policy(documents([50, 51, 52], SECOND)).logprobs
    assert (other[1, : len(SECOND)] - by_itself[0]).abs().max() < 1e-5


@pytest.mark.parametrize("make", ["critic", "reward model", "reference"])
def test_B33_dropout_is_off_in_every_role(make: str, tmp_path: Any) -> None:
    model: Any = gpt2()  # its description says 0.1
    assert model.config.resid_pdrop == 0.1
    batch = ragged_batch()
    if make == "critic":
        module: Any = Critic(model.base_model, 32)
        with torch.no_grad():
            module.head.weight.copy_(torch.linspace(-1, 1, 32))
        read = lambda: module(batch).values  # noqa: E731
    elif make == "reward model":
        module = from_policy(model, 0)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(0.01)
        read = lambda: module(batch)  # noqa: E731
    else:
        from zoo.config import ModelConfig

        model.save_pretrained(tmp_path)
        module = load_reference(ModelConfig(path=str(tmp_path)), 0, 1.0, "cpu")
        read = lambda: module(batch).logprobs  # noqa: E731
    module.train()
    first, second = read(), read()
    assert torch.equal(first, second) and bool(first.any())
    module.eval()
    assert torch.equal(first, read())


GIB = 2**30


class Largest(TorchDispatchMode):
    """The bytes of the largest tensor that any operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.bytes = max(self.bytes, tensor.numel() * tensor.element_size())
        return out


def test_B100_logits_of_a_large_vocabulary_exist_a_chunk_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # B = 8, T = 1024, V = 151,936, in float32, on tensors that have a shape and no memory
    monkeypatch.setattr(head, "_chunks", lambda logits: head._pieces(len(logits), 1024))
    with FakeTensorMode():
        states = torch.empty(8 * 1024, 8, requires_grad=True)
        weight = torch.empty(151_936, 8, requires_grad=True)
        targets = torch.zeros(8 * 1024, dtype=torch.long)
        with Largest() as whole:
            (states @ weight.t()).log_softmax(-1)
        with Largest() as chunked:
            logprobs, _ = head.chunked_logprobs(states, weight, None, targets)
            logprobs.sum().backward()
    assert whole.bytes / GIB == pytest.approx(4.63672, rel=1e-5)
    assert chunked.bytes / GIB == pytest.approx(0.579590, rel=1e-5)
