"""Log-probs and entropy of the sampled tokens: TRL's helpers beside zoo's policy and functions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.peers.common import assert_differ, assert_same, llama, sampled_batch
from zoo.functional import entropy
from zoo.models.policy import Policy

pytestmark = pytest.mark.peers


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_selective_log_softmax_and_entropy_agree_with_the_policy(
    tiny: Path, temperature: float
) -> None:
    from trl.trainer.utils import entropy_from_logits, selective_log_softmax

    model, batch = llama(tiny), sampled_batch()
    out = Policy(model, temperature)(batch)
    ids, mask = batch.input_ids, batch.attention_mask
    logits = model(input_ids=ids, attention_mask=mask.long()).logits[:, :-1] / temperature
    trained = batch.completion_mask[:, 1:]
    theirs = selective_log_softmax(logits, ids[:, 1:])
    assert_same(out.logprobs[:, 1:][trained], theirs[trained])
    assert_same(out.entropy[:, 1:][trained], entropy_from_logits(logits)[trained])


def test_entropy_agrees_on_any_logits_at_any_temperature() -> None:
    from trl.trainer.utils import entropy_from_logits

    logits = 5 * torch.randn(3, 7, 11)
    assert_same(entropy(logits, 0.5), entropy_from_logits(logits / 0.5))


def test_a_forbidden_token_gives_nan_in_trl_and_nothing_in_zoo() -> None:
    from trl.trainer.utils import entropy_from_logits

    logits = torch.tensor([[0.0, 0.0, -torch.inf]])
    assert bool(entropy_from_logits(logits).isnan())  # 0 · (−∞)
    assert float(entropy(logits)) == pytest.approx(torch.tensor(2.0).log().item())


def test_bfloat16_logits_are_widened_in_zoo_and_not_in_trl() -> None:
    from trl.trainer.utils import entropy_from_logits

    logits = (5 * torch.randn(4, 50)).bfloat16()
    exact = entropy(logits.double())
    assert entropy(logits).dtype == torch.float32
    assert_same(entropy(logits), exact)
    assert_differ(entropy_from_logits(logits).double(), exact, 1e-4)
