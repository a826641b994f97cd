"""Direct preference optimisation: preferences without a reward model, offline on pairs.

    m = β [(log π(y_w|x) − log π_ref(y_w|x)) − (log π(y_l|x) − log π_ref(y_l|x))]
    L = −(1 − ε) log σ(m) − ε log σ(−m), averaged over the pairs of the optimizer step

with log-probs summed over completion tokens. ε = 0 is DPO (Rafailov et al. 2023,
arXiv:2305.18290, eq. 7); ε > 0 assumes a share ε of flipped labels (cDPO, eq. 3 of Mitchell's
note, 2023). At the start m = 0 and L = ln 2.

The reference log-probs are the start's; a data-set source computes them once, caches them by
content and model hash and frees the reference, so that training holds one model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from einops import rearrange

from zoo.algorithms.base import Algorithm, DataKind, LossTerm, Needs
from zoo.batch import Batch
from zoo.functional import dpo_sigmoid, masked_sum, sequence_logprobs
from zoo.models.models import Models


@dataclass(frozen=True)
class DPO(Algorithm):
    beta: float = 0.1  # β; higher: stay closer to the reference
    label_smoothing: float = 0.0  # ε; assumed share of flipped preferences, below 0.5

    name: ClassVar[str] = "dpo"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.beta > 0:
            raise ValueError(f"algorithm.beta must be above 0, got {self.beta}. Try 0.1.")
        if not 0 <= self.label_smoothing < 0.5:
            raise ValueError(
                f"algorithm.label_smoothing must lie in [0, 0.5), got {self.label_smoothing}: "
                "at 0.5 the labels carry no information. Try 0."
            )

    @property
    def needs(self) -> Needs:
        return Needs(data=DataKind.pairs, reference=True, min_group_size=2, rows_coupled=True)

    def prepare(self, batch: Batch, models: Models) -> Batch:
        return batch.replace(ref_logprobs=models.reference_logprobs(batch))

    def losses(self, batch: Batch, models: Models) -> Iterator[LossTerm]:
        assert batch.scale is not None and batch.ref_logprobs is not None
        mask = batch.completion_mask
        out = models.policy(batch)
        policy = sequence_logprobs(out.logprobs, mask, average=False)  # [B]
        reference = sequence_logprobs(batch.ref_logprobs, mask, average=False)
        chosen, rejected = rearrange(policy, "(n two) -> two n", two=2)  # [N] each
        ref_chosen, ref_rejected = rearrange(reference, "(n two) -> two n", two=2)
        loss = dpo_sigmoid(
            chosen,
            rejected,
            ref_chosen,
            ref_rejected,
            beta=self.beta,
            label_smoothing=self.label_smoothing,
        )
        rewards_chosen = self.beta * (chosen - ref_chosen).detach()
        rewards_rejected = self.beta * (rejected - ref_rejected).detach()
        margin = rewards_chosen - rewards_rejected
        pairs = batch.n_groups
        yield LossTerm(
            "policy",
            loss.sum() / batch.scale.groups,
            {
                "margin": (margin.sum(), pairs),
                "preference_accuracy": ((margin > 0).float().sum(), pairs),
                "implicit_reward/chosen": (rewards_chosen.sum(), pairs),
                "implicit_reward/rejected": (rewards_rejected.sum(), pairs),
                "logprob/chosen": (chosen.detach().sum(), pairs),
                "logprob/rejected": (rejected.detach().sum(), pairs),
                "entropy": (masked_sum(out.entropy, mask), mask.sum()),
            },
        )
