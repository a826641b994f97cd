"""DAPO: GRPO that drops groups without signal, clips higher above than below, counts tokens alike.

    keep: groups whose largest reward exceeds their smallest; the source samples more in their place
    A_i = (r_i − mean(r)) / (std(r) + 1e-6)
    L   = Σ_i Σ_t −min(ρ_t A_i, clip(ρ_t, 1 − ε_low, 1 + ε_high) A_i) / Σ_i n_i

Refilling is the source's: `rollout.max_rounds` rounds at most, then it goes on with fewer groups;
what the dropped ones cost is counted as wasted. The soft punishment of long completions is a reward
(`zoo.rewards.shaping.LengthPenalty`, as in reward=verifier_overlong), so that it is logged as one.
`mask_truncated` is the other choice, overlong filtering: a completion that was cut leaves the loss,
numerator and denominator alike, while its reward stays in its group's statistics.
No reference: the paper drops the KL price.

Source: Yu et al. 2025, arXiv:2503.14476, eq. 8 and 11 (loss, dynamic sampling), §3.4 (overlong).
Deviation: a group is dropped for equal *rewards*; the paper looks at accuracy alone, which is the
same where the reward is right or wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from zoo.algorithms import common
from zoo.algorithms.base import Algorithm, DataKind, LossTerm, Needs
from zoo.batch import Batch
from zoo.functional import Average, aggregate, clipped_surrogate, dead_groups, group_advantages
from zoo.models.models import Models


@dataclass(frozen=True)
class DAPO(Algorithm):
    clip_eps: float = 0.2  # ε_low
    clip_eps_high: float | None = 0.28  # ε_high; room for rare tokens to grow
    drop_equal_groups: bool = True  # dynamic sampling; see rollout.max_rounds
    mask_truncated: bool = False  # overlong filtering: a completion that was cut is in no loss
    average: Average = Average.token

    name: ClassVar[str] = "dapo"

    def __post_init__(self) -> None:
        super().__post_init__()
        common.check_clip(self.clip_eps, self.clip_eps_high, 0.0)

    @property
    def needs(self) -> Needs:
        return Needs(DataKind.prompts, min_group_size=2, silent_without_advantage=True)

    def keep(self, batch: Batch) -> Tensor:
        if not self.drop_equal_groups or batch.rewards is None:
            return super().keep(batch)
        return ~dead_groups(batch.rewards, batch.group_size, batch.scored).dead

    def prepare(self, batch: Batch, models: Models) -> Batch:
        batch = common.without_truncated(batch) if self.mask_truncated else batch
        assert batch.rewards is not None
        advantages = group_advantages(batch.rewards, batch.group_size, scored=batch.scored)
        return batch.replace(
            advantages=common.over_tokens(advantages, batch),
            old_logprobs=common.old_logprobs(self, batch, models),
        )

    def losses(self, batch: Batch, models: Models) -> Iterator[LossTerm]:
        assert batch.advantages is not None and batch.scale is not None
        mask = batch.completion_mask
        out = models.policy(batch)
        surrogate = clipped_surrogate(
            out.logprobs,
            batch.old_logprobs,
            batch.advantages,
            mask,
            clip_eps=self.clip_eps,
            clip_eps_high=self.clip_eps_high,
        )
        metrics = common.surrogate_metrics(surrogate, out, batch)
        yield LossTerm(
            "policy", aggregate(surrogate.loss, mask, batch.scale, self.average), metrics
        )
