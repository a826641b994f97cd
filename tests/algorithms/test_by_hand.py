"""One number by hand for each algorithm, and what its options refuse."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn

from zoo.algorithms.base import Algorithm, LossTerm
from zoo.algorithms.cispo import CISPO
from zoo.algorithms.dapo import DAPO
from zoo.algorithms.gspo import GSPO
from zoo.algorithms.ipo import IPO
from zoo.algorithms.kto import KTO, mismatched
from zoo.algorithms.online_dpo import OnlineDPO
from zoo.algorithms.orpo import ORPO
from zoo.algorithms.ppo_shared import SharedPPO
from zoo.algorithms.reinforce_pp import ReinforcePP
from zoo.algorithms.rejection_sampling import RejectionSampling
from zoo.algorithms.rloo import RLOO
from zoo.algorithms.simpo import SimPO
from zoo.batch import Batch, collate
from zoo.compose import config_dir
from zoo.instantiate import build
from zoo.models.models import Models
from zoo.models.policy import PolicyOutput
from zoo.testing import BanditPolicy, bandit_batch

LIMIT = 10  # Scale.max_completion_length


class Says(nn.Module):
    """A policy whose log-prob of every completion token of row i is a given number."""

    def __init__(self, *logprobs: float) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.tensor(logprobs))

    def forward(self, batch: Batch) -> PolicyOutput:
        # Rows are told apart by their first completion token.
        first = batch.input_ids[torch.arange(batch.n_rows), batch.prompt_lengths]
        logprobs = torch.where(batch.completion_mask, self.rows[first][:, None], 0.0)
        return PolicyOutput(logprobs, torch.zeros_like(logprobs))


def rows(lengths: Sequence[int], group_size: int, rewards: Sequence[float] = ()) -> Batch:
    """Row i has a completion of lengths[i] tokens i."""
    batch = collate(
        [[7, i // group_size] for i in range(len(lengths))],
        [[i] * length for i, length in enumerate(lengths)],
        group_size=group_size,
        prompt_ids=[str(i) for i in range(len(lengths) // group_size)],
    )
    if not rewards:
        return batch
    return batch.replace(
        rewards=torch.tensor(list(rewards), dtype=torch.float32),
        scored=torch.ones(len(rewards), dtype=torch.bool),
    )


def configured(name: str) -> Any:
    text = (config_dir() / "algorithm" / f"{name}.yaml").read_text(encoding="utf-8")
    return build(yaml.safe_load(text), "algorithm")


def prepared(algorithm: Algorithm, batch: Batch, policy: Any, reference: Any = None) -> Batch:
    batch = algorithm.prepare(batch, Models(policy=policy, reference=reference))
    return batch.replace(scale=batch.local_scale(LIMIT))


def term(algorithm: Algorithm, batch: Batch, policy: Any, reference: Any = None) -> LossTerm:
    ready = prepared(algorithm, batch, policy, reference)
    (only,) = algorithm.losses(ready, Models(policy=policy))
    return only


def value(algorithm: Algorithm, batch: Batch, policy: Any, reference: Any = None) -> float:
    return float(term(algorithm, batch, policy, reference).loss.detach())


def in_rows(values: Tensor | None, batch: Batch) -> Tensor:
    """The value at the first trained token of each row."""
    assert values is not None
    return values[torch.arange(batch.n_rows), batch.prompt_lengths]


# sampled -----------------------------------------------------------------------------------------


def test_rloo_sums_over_tokens_with_the_others_as_baseline() -> None:
    batch = rows([4, 1, 1, 1], 4, [1, 0, 0, 0])
    # A = 1 − 0 and 0 − 1/3; the sum over tokens is 4·1 − 3·1/3 = 3, over 4 completions × 10.
    policy = Says(-1.0, -1.0, -1.0, -1.0)
    assert value(RLOO(), batch, policy) == pytest.approx(-3 / 40)
    ready = prepared(RLOO(), batch, policy)
    expected = [1, -1 / 3, -1 / 3, -1 / 3]
    assert in_rows(ready.advantages, ready).tolist() == pytest.approx(expected)


def test_rloo_takes_the_price_of_a_whole_completion_off_its_reward() -> None:
    batch = rows([4, 1], 2, [1, 1])
    # Drift is 0.5 nats a token: 4·0.5·0.1 = 0.2 and 0.05 off; the difference is ∓0.15.
    ready = prepared(RLOO(kl_coef=0.1), batch, Says(-0.5, -0.5), Says(-1.0, -1.0))
    assert in_rows(ready.advantages, ready).tolist() == pytest.approx([-0.15, 0.15])


def test_reinforce_pp_whitens_rewards_over_all_tokens() -> None:
    batch = rows([2, 1, 1], 1, [1, 0, 0])
    # Tokens hold 1, 1, 0, 0: mean ½, deviation √(4·¼/3) = 0.577350, so ±0.866025.
    ready = prepared(ReinforcePP(), batch, Says(-1.0, -1.0, -1.0))
    expected = [0.866025, -0.866025, -0.866025]
    assert in_rows(ready.advantages, ready).tolist() == pytest.approx(expected, abs=1e-6)


def test_reinforce_pp_charges_each_token_for_the_drift_still_to_come() -> None:
    batch = rows([2, 1], 1, [0, 0])
    # Row 0 drifts 1 nat a token: −2β, then −β; row 1 not at all: 0. Mean −β, deviation β.
    ready = prepared(ReinforcePP(kl_coef=0.1), batch, Says(-0.5, -2.0), Says(-1.5, -2.0))
    assert ready.advantages is not None
    assert ready.advantages[0, 2:].tolist() == pytest.approx([-1.0, 0.0], abs=1e-6)
    assert float(ready.advantages[1, 2]) == pytest.approx(1.0)


def test_reinforce_pp_baseline_takes_the_group_off_first() -> None:
    batch = rows([2, 1], 2, [1, 0])
    # Centred ½, ½, −½: mean 1/6; squares 1/9 + 1/9 + 4/9 = 2/3, deviation √(1/3) = 0.577350.
    ready = prepared(configured("reinforce_pp_baseline"), batch, Says(-1.0, -1.0))
    expected = [0.577350, -1.154701]
    assert in_rows(ready.advantages, ready).tolist() == pytest.approx(expected, abs=1e-6)


def test_dr_grpo_divides_by_nothing_that_depends_on_the_rewards_or_lengths() -> None:
    # A = ±½; −(2·½ − 8·½) = 3, over 2 completions × 10.
    batch = rows([2, 8], 2, [1, 0])
    assert value(configured("dr_grpo"), batch, Says(-1.0, -1.0)) == pytest.approx(3 / 20)


def test_dapo_counts_tokens_alike_and_drops_groups_without_signal() -> None:
    # A = ±½/0.707107 = ±0.707106; −(2 − 8)·0.707106/10.
    batch = rows([2, 8], 2, [1, 0])
    assert value(DAPO(), batch, Says(-1.0, -1.0)) == pytest.approx(0.424264, abs=1e-5)
    groups = rows([1] * 6, 2, [1, 1, 0, 1, 0, 0])
    assert DAPO().keep(groups).tolist() == [False, True, False]
    assert DAPO(drop_equal_groups=False).keep(groups).all()


@pytest.mark.parametrize(("high", "expected"), [(0.28, -1.25), (None, -1.2)])
def test_dapo_clips_higher_above(high: float | None, expected: float) -> None:
    algorithm = DAPO(epochs=2, clip_eps_high=high)
    batch = rows([1, 1], 2, [1, 0])
    ready = prepared(algorithm, batch, Says(-1.0, -1.0))
    assert ready.advantages is not None
    # Row 0 alone: ratio 1.25, advantage 1.
    alone = torch.zeros_like(ready.advantages)
    alone[0] = 1.0
    later = Models(policy=Says(-1.0 + math.log(1.25), -1.0))
    (only,) = algorithm.losses(ready.replace(advantages=alone), later)
    assert float(only.loss.detach()) == pytest.approx(expected / 2)


def test_gspo_clips_the_geometric_mean_of_a_completion() -> None:
    algorithm = GSPO(epochs=2, clip_eps=0.1, clip_eps_high=0.2)
    batch = rows([3, 2], 2, [1, 0])
    ready = prepared(algorithm, batch, Says(-1.0, -1.0))
    # Row 0: every ratio e^0.3 = 1.35, mean 1.35 > 1.2, A = 0.707106 → −1.2·A.
    # Row 1: ratio e^−0.05 = 0.951229 within 0.9, A negative → +0.951229·A. Mean of the two rows.
    (only,) = algorithm.losses(ready, Models(policy=Says(-0.7, -1.05)))
    expected = (-1.2 + math.exp(-0.05)) * 0.707106 / 2
    assert float(only.loss.detach()) == pytest.approx(expected, abs=1e-5)


def test_gspo_is_sequence_grpo_on_the_first_update() -> None:
    batch = rows([3, 2], 2, [1, 0])
    one, other = Says(-1.0, -1.0), Says(-1.0, -1.0)
    term(GSPO(), batch, one).loss.backward()
    term(configured("grpo"), batch, other).loss.backward()
    assert one.rows.grad is not None and other.rows.grad is not None
    assert torch.allclose(one.rows.grad, other.rows.grad)


def test_cispo_keeps_the_gradient_of_a_token_beyond_the_clip() -> None:
    algorithm = CISPO(epochs=2, clip_eps_high=0.5)
    batch = rows([1, 1], 2, [1, 0])
    ready = prepared(algorithm, batch, Says(-1.0, -1.0))
    policy = Says(-0.5, -1.0)
    (only,) = algorithm.losses(ready, Models(policy=policy))
    # Row 0: ratio e^0.5 = 1.65 is cut to 1.5; −1.5·A·(−0.5). Row 1: ratio 1; −1·(−A)·(−1).
    a = 0.5 / (math.sqrt(0.5) + 1e-6)
    assert float(only.loss.detach()) == pytest.approx((0.75 * a - a) / 2, abs=1e-6)
    only.loss.backward()
    assert policy.rows.grad is not None
    assert policy.rows.grad.tolist() == pytest.approx([-1.5 * a / 2, a / 2], abs=1e-6)


def test_shared_ppo_adds_the_value_loss_to_the_policy_loss_in_one_term() -> None:
    batch = bandit_batch([1, 0], 1).replace(
        rewards=torch.tensor([1.0, 0.0]), scored=torch.ones(2, dtype=torch.bool)
    )
    policy = BanditPolicy(value_head=True)
    # Values are 0, so A = R̂ = 1 and 0, whitened ±0.707107, which cancel in the policy loss at
    # ρ = 1; ½·(1² + 0²)/2 = 0.25 is left, times 0.1.
    only = term(SharedPPO(kl_coef=0.0), batch, policy)
    assert float(only.loss.detach()) == pytest.approx(0.025)
    only.loss.backward()
    assert policy.value is not None and policy.value.grad is not None
    # d/dV: 0.1·((0 − 1) + (0 − 0))/2; d/dlogit 1: −(0.707107·½ + 0.707107·½)/2.
    assert float(policy.value.grad) == pytest.approx(-0.05)
    assert policy.logits.grad is not None
    assert float(policy.logits.grad[1]) == pytest.approx(-0.353553, abs=1e-6)


def test_values_asked_of_a_policy_without_a_value_head_are_refused() -> None:
    with pytest.raises(ValueError, match="value_head"):
        Models(policy=BanditPolicy()).policy_values(bandit_batch([1, 0], 1))


def test_online_dpo_pairs_the_best_with_the_worst() -> None:
    batch = rows([2, 3, 1, 4], 4, [0.2, 0.9, 0.1, 0.5])
    reference = Says(-1.0, -1.0, -1.0, -1.0)
    ready = prepared(OnlineDPO(), batch, reference, reference)
    assert ready.row_keys.tolist() == batch.row_keys[[1, 2]].tolist()
    assert value(OnlineDPO(), batch, reference, reference) == pytest.approx(math.log(2))
    # Row 1 gains 3·0.5, row 2 loses 1·0.5: m = 0.1·2, −log σ(0.2) = 0.598139.
    moved = Says(-1.0, -0.5, -1.5, -1.0)
    assert value(OnlineDPO(), batch, moved, reference) == pytest.approx(0.598139, abs=1e-6)


def test_online_dpo_gives_no_pair_of_an_unscored_completion() -> None:
    batch = rows([1, 2, 3, 4], 4, [0.9, 0.2, 0.4, 0.1])
    batch = batch.replace(scored=torch.tensor([False, True, True, False]))
    reference = Says(-1.0, -1.0, -1.0, -1.0)
    ready = prepared(OnlineDPO(), batch, reference, reference)
    assert ready.row_keys.tolist() == batch.row_keys[[2, 1]].tolist()


def test_rejection_sampling_imitates_the_best_alone() -> None:
    batch = rows([1, 2, 1, 1, 1, 1], 3, [0.1, 0.9, 0.5, 1, 1, 1])
    policy = Says(-1.0, -0.3, -2.0, -4.0, -4.0, -4.0)
    # The second group has no best: two tokens of row 1 are all there is.
    assert RejectionSampling().keep(batch).tolist() == [True, False]
    assert value(RejectionSampling(), batch, policy) == pytest.approx(0.3)


# preferences -------------------------------------------------------------------------------------

# FAULTS, part 6: π_c −10, π_r −12, reference −11 and −11; lengths 4 and 2, so −2.5, −6 a token.
PAIR = rows([4, 2], 2)
POLICY, REFERENCE = (-2.5, -6.0), (-2.75, -5.5)


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        (IPO(), 9.0),  # h = 2; (2 − 5)²
        (IPO(average_logprobs=True), 18.0625),  # h = 0.25 + 0.5; (0.75 − 5)²
        (configured("cdpo"), 0.618139),  # −0.9·log σ(0.2) − 0.1·log σ(−0.2)
        (SimPO(), math.log1p(math.exp(-6))),  # 2·(−2.5 + 6) − 1 = 6
    ],
    ids=["ipo", "ipo of means", "cdpo", "simpo"],
)
def test_preference_loss_by_hand(algorithm: Algorithm, expected: float) -> None:
    ready = PAIR.replace(ref_logprobs=Says(*REFERENCE)(PAIR).logprobs.detach())
    assert value(algorithm, ready, Says(*POLICY)) == pytest.approx(expected, abs=1e-6)


def test_orpo_by_hand() -> None:
    # p = ½ and ¼: odds 1 and ⅓, their ratio 3; −log σ(log 3) = log(4/3); plus −log ½.
    loss = value(ORPO(odds_coef=0.1), PAIR, Says(math.log(0.5), math.log(0.25)))
    assert loss == pytest.approx(math.log(2) + 0.1 * math.log(4 / 3))


def test_kto_by_hand() -> None:
    """π(1) = ¾ against ½. The bandit has no context, so any mismatch gives the same mean."""
    batch = bandit_batch([1, 1, 0], 1)
    good = batch.input_ids[:, 1] == 1
    batch = batch.replace(rewards=good.float(), scored=torch.ones_like(good))
    policy, reference = BanditPolicy((0.0, math.log(3))), BanditPolicy()
    # h = log 1.5 twice, log 0.5 once; z₀ = their mean = 0.039261, above 0.
    gain, loss = math.log(1.5), math.log(0.5)
    z = (2 * gain + loss) / 3
    assert z == pytest.approx(0.039261, abs=1e-6)

    def sigma(x: float) -> float:
        return 1 / (1 + math.exp(-x))

    expected = (2 * (1 - sigma(0.1 * (gain - z))) + (1 - sigma(0.1 * (z - loss)))) / 3
    assert expected == pytest.approx(0.487797, abs=1e-6)
    only = term(KTO(), batch, policy, reference)
    assert float(only.loss.detach()) == pytest.approx(expected, abs=1e-6)
    total, count = only.metrics["kl_baseline"]
    assert float(total) / float(count) == pytest.approx(z, abs=1e-6)


def test_kto_gives_every_prompt_the_completion_of_another_prompt_in_any_order() -> None:
    batch = rows([1, 2, 3, 4, 5], 1)

    def matched(batch: Batch) -> dict[tuple[int, ...], tuple[int, ...]]:
        other = mismatched(batch)
        return {
            tuple(other.input_ids[i, :2].tolist()): tuple(
                other.input_ids[i, 2 : int(other.lengths[i])].tolist()
            )
            for i in range(other.n_rows)
        }

    found = matched(batch)
    own = {(7, i): (i,) * length for i, length in enumerate([1, 2, 3, 4, 5])}
    assert set(found.values()) <= set(own.values())
    assert all(found[prompt] != own[prompt] for prompt in own)
    assert matched(batch.select_groups(torch.tensor([3, 0, 4, 2, 1]))) == found


# options -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: RLOO(kl_coef=-1), "kl_coef"),
        (lambda: ReinforcePP(clip_eps=0), "clip_eps"),
        (lambda: DAPO(clip_eps_high=0), "clip_eps_high"),
        (lambda: GSPO(clip_eps=1), "clip_eps"),
        (lambda: CISPO(clip_eps_high=0), "clip_eps_high"),
        (lambda: CISPO(clip_eps_low=2), "clip_eps_low"),
        (lambda: IPO(beta=0), "beta"),
        (lambda: SharedPPO(value_coef=0), "value_coef"),
        (lambda: SharedPPO(gamma=2), "gamma"),
        (lambda: SharedPPO(value_clip=0), "value_clip"),
        (lambda: SimPO(margin=-1), "margin"),
        (lambda: ORPO(odds_coef=0), "odds_coef"),
        (lambda: KTO(desirable_weight=0), "desirable_weight"),
        (lambda: OnlineDPO(beta=-1), "beta"),
    ],
)
def test_setting_that_makes_no_sense_is_refused_by_name(make: Any, word: str) -> None:
    with pytest.raises(ValueError, match=rf"algorithm\.{word} must"):
        make()
