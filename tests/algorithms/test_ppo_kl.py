"""PPO's price of drift that steers itself, and the early end of a step that drifted."""

from __future__ import annotations

import pytest
import torch

from zoo.algorithms.ppo import PPO
from zoo.models.models import Models
from zoo.testing import BanditCritic, BanditPolicy, bandit_batch


def test_price_rises_and_falls_with_the_measured_drift() -> None:
    steered = PPO(kl_coef=0.1, kl_target=4.0, kl_horizon=10)
    state = steered.initial_state()
    assert state == {"kl_coef": 0.1}
    # (4.4 − 4)/4 = 0.1 → × (1 + 0.1/10); beyond a fifth of the target the error is cut to ±0.2.
    for kl, expected in ((4.4, 0.1 * 1.01), (9.0, 0.1 * 1.02), (0.0, 0.1 * 0.98), (4.0, 0.1)):
        after = steered.next_state(state, {"kl_ref_sequence": kl})
        assert after["kl_coef"] == pytest.approx(expected, rel=1e-12)
    assert state == {"kl_coef": 0.1}


def test_step_without_an_update_leaves_the_price() -> None:
    assert PPO(kl_target=4.0).next_state({"kl_coef": 0.3}, {}) == {"kl_coef": 0.3}


def test_fixed_price_is_no_state() -> None:
    assert PPO().initial_state() == {}
    assert PPO().next_state({}, {"kl_ref_sequence": 9.0}) == {}


def prepared(algorithm: PPO, state: dict[str, float]) -> tuple[torch.Tensor, float]:
    """Returns of one completion of token 1, and its mean KL, on a policy off its reference."""
    reference = BanditPolicy()  # π(1) = ½
    policy = BanditPolicy((0.0, 1.386294))  # π(1) = 0.8: log 0.8 − log 0.5 = 0.470004 nats
    models = Models(policy=policy, reference=reference, critic=BanditCritic(), state=state)
    batch = bandit_batch([1, 1], 1).replace(
        rewards=torch.tensor([1.0, 1.0]), scored=torch.tensor([True, True])
    )
    batch = algorithm.prepare(batch, models)
    batch = batch.replace(scale=batch.local_scale(8))
    policy_term, _ = algorithm.losses(batch, models)
    total, count = policy_term.metrics["kl_ref_sequence"]
    assert batch.returns is not None
    return batch.returns[:, 1], float(total) / float(count)


def test_price_of_the_state_is_what_is_paid() -> None:
    algorithm = PPO(kl_coef=0.1, kl_target=1.0, whiten_advantages=False)
    for price in (0.1, 0.3):
        returns, kl = prepared(algorithm, {"kl_coef": price})
        assert returns.tolist() == pytest.approx([1 - price * 0.470004] * 2, abs=1e-5)
        assert kl == pytest.approx(0.470004, abs=1e-5)


def test_step_ends_once_the_drift_from_the_sampler_is_above_the_limit() -> None:
    algorithm = PPO(epochs=4, kl_stop=0.02)
    assert not algorithm.enough({"kl_old_k3": 0.02})
    assert algorithm.enough({"kl_old_k3": 0.021})
    assert not algorithm.enough({})  # a refused update measured nothing
    assert not PPO(epochs=4).enough({"kl_old_k3": 100.0})


def test_drift_from_the_sampler_is_measured_on_its_samples() -> None:
    # From π(1) = ½ to 0.8 on samples 1 and 0: r − 1 − log r with r = 1.6 and 0.4 is 0.129996 and
    # 0.316291, on average 0.223144.
    algorithm = PPO(kl_coef=0.0, kl_stop=0.1, epochs=3)
    models = Models(policy=BanditPolicy(), critic=BanditCritic())
    batch = bandit_batch([1, 0], 1).replace(
        rewards=torch.tensor([1.0, 0.0]), scored=torch.tensor([True, True])
    )
    batch = algorithm.prepare(batch, models)
    batch = batch.replace(scale=batch.local_scale(8))
    models.policy = BanditPolicy((0.0, 1.386294))
    policy_term, _ = algorithm.losses(batch, models)
    total, count = policy_term.metrics["kl_old_k3"]
    assert float(total) / float(count) == pytest.approx(0.223144, abs=1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kl_target": 0.0}, r"kl_target must be above 0 or null"),
        ({"kl_target": 6.0, "kl_coef": 0.0}, r"steers kl_coef, which is 0"),
        ({"kl_horizon": 0}, r"kl_horizon must be at least 1 step"),
        ({"kl_stop": -1.0, "epochs": 2}, r"kl_stop must be above 0 or null"),
        ({"kl_stop": 0.1}, r"nothing to skip with fewer than 3 updates a step"),
        ({"kl_stop": 0.1, "epochs": 2}, r"nothing to skip with fewer than 3 updates a step"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PPO(**settings)
