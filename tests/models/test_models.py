"""The container of a run's models: passes without gradient, and who may be asked what."""

from __future__ import annotations

import pytest
import torch

from tests.models.tiny import llama, ragged_batch
from zoo.config import ConfigError
from zoo.models.models import Models
from zoo.models.policy import Policy


def test_micro_batches_change_no_log_prob_and_build_no_graph() -> None:
    policy, batch = Policy(llama()), ragged_batch()
    whole = policy(batch).logprobs
    for budget in (1, 20, 40, 10_000):
        found = Models(policy=policy, micro_batch_tokens=budget).policy_logprobs(batch)
        assert not found.requires_grad
        assert found.shape == batch.input_ids.shape
        torch.testing.assert_close(found, whole.detach(), rtol=0, atol=1e-5)


def test_reference_log_probs_that_a_batch_carries_are_not_recomputed() -> None:
    batch = ragged_batch()
    given = torch.full(batch.input_ids.shape, -3.0)
    models = Models(policy=None, reference=Policy(llama()))
    assert models.reference_logprobs(batch.replace(ref_logprobs=given)) is given
    assert not torch.equal(models.reference_logprobs(batch), given)


def test_asking_for_a_model_that_was_not_loaded_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"Needs\(reference=True\)"):
        Models(policy=Policy(llama())).reference_logprobs(ragged_batch())
    with pytest.raises(ConfigError, match=r"Needs\(critic=True\)"):
        Models(policy=Policy(llama())).critic_values(ragged_batch())
