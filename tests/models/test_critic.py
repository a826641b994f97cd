"""The critic: a value is read before the action that it judges."""

from __future__ import annotations

import pytest
import torch

from tests.models.tiny import MODELS, llama, ragged_batch, tokens
from zoo.batch import collate
from zoo.models.critic import Critic
from zoo.models.models import Models


def critic(name: str = "tied", seed: int = 0, dtype: torch.dtype = torch.float32) -> Critic:
    """A critic whose head is not at its start: it has an opinion."""
    made = Critic(MODELS[name](dtype=dtype).base_model, 32).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        made.head.weight.copy_(torch.randn(1, 32, generator=generator))
        made.head.bias.fill_(0.25)
    return made


def test_a_new_critic_says_zero_everywhere() -> None:
    out = Critic(llama().base_model, 32)(ragged_batch())
    assert not bool(out.values.any()) and not bool(out.final.any())
    assert out.values.dtype == out.final.dtype == torch.float32


def test_values_are_the_head_on_the_hidden_state_before_each_token() -> None:
    module, batch = critic(dtype=torch.float64), ragged_batch()
    with torch.no_grad():
        out = module(batch)
        for i in range(batch.n_rows):
            n, start = int(batch.lengths[i]), int(batch.prompt_lengths[i])
            # the row by itself, and a plain loop over its positions
            hidden = module.backbone(input_ids=batch.input_ids[i : i + 1, :n]).last_hidden_state[0]
            said = [float(hidden[t] @ module.head.weight[0] + 0.25) for t in range(n)]
            for t in range(start, n):
                assert float(out.values[i, t]) == pytest.approx(said[t - 1], rel=1e-9)
            assert float(out.final[i]) == pytest.approx(said[n - 1], rel=1e-9)
    assert not bool(out.values[~batch.completion_mask].any())


@pytest.mark.parametrize("name", MODELS)
def test_the_value_of_a_token_does_not_depend_on_it_or_on_what_follows(name: str) -> None:
    module = critic(name)
    prompt, completion = [5, 6, 7], [10, 11, 12, 13, 14, 15]
    with torch.no_grad():
        before = module(collate([prompt], [completion], group_size=1, prompt_ids=["p"]))
        for t in range(len(completion)):
            changed = [*completion[:t], *(63 - c for c in completion[t:])]
            after = module(collate([prompt], [changed], group_size=1, prompt_ids=["p"]))
            at = len(prompt) + t
            torch.testing.assert_close(
                after.values[:, : at + 1], before.values[:, : at + 1], rtol=1e-5, atol=1e-5
            )
            if t + 1 < len(completion):
                assert (after.values[0, at + 1] - before.values[0, at + 1]).abs() > 1e-3
            assert (after.final - before.final).abs() > 1e-3


def test_padding_and_neighbours_change_no_value() -> None:
    module, batch = critic(), ragged_batch()
    with torch.no_grad():
        together = module(batch)
        for i in range(batch.n_rows):
            alone = module(batch.select_rows(torch.tensor([i]), 1).trim())
            n = int(batch.lengths[i])
            assert (alone.values[0] - together.values[i, :n]).abs().max() < 1e-5
            assert (alone.final[0] - together.final[i]).abs() < 1e-5


def test_B23_B43_the_final_value_is_read_at_the_last_real_token_though_pad_is_eos() -> None:
    module, generator = critic(), torch.Generator().manual_seed(1)
    row, long = [4, 9, 2], tokens(generator, 9)  # ends with EOS = 2, padded with 2
    padded = collate([row[:1], long[:1]], [row[1:], long[1:]], group_size=2, prompt_ids=["p"],
                     pad_token_id=2)  # fmt: skip
    alone = collate([row[:1]], [row[1:]], group_size=1, prompt_ids=["p"])
    with torch.no_grad():
        assert (module(padded).final[0] - module(alone).final[0]).abs() < 1e-5
        assert not bool(module(padded).values[0, 3:].any())


def test_values_in_micro_batches_are_those_of_the_whole_batch() -> None:
    module, batch = critic(), ragged_batch()
    with torch.no_grad():
        whole = module(batch)
    values, final = Models(policy=None, critic=module, micro_batch_tokens=20).critic_values(batch)
    assert values.shape == batch.input_ids.shape and not values.requires_grad
    torch.testing.assert_close(values, whole.values, rtol=0, atol=1e-5)
    torch.testing.assert_close(final, whole.final, rtol=0, atol=1e-5)


def test_only_the_first_forward_of_a_new_critic_is_without_gradient_below_its_head() -> None:
    """The zero head blocks the backbone's gradient for one step, not for ever."""
    module, batch = Critic(llama().base_model, 32), ragged_batch()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

    def gradient() -> float:
        module.zero_grad()
        out = module(batch)
        ((out.values - 1).square() * batch.completion_mask).sum().backward()
        return sum(float(p.grad.abs().sum()) for p in module.backbone.parameters())  # pyright: ignore

    assert gradient() == 0
    optimizer.step()
    assert gradient() > 0
