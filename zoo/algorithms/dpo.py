"""Direct preference optimisation: preferences without a reward model, offline on pairs.

    m = β [(log π(y_w|x) − log π_ref(y_w|x)) − (log π(y_l|x) − log π_ref(y_l|x))]
    L = −(1 − ε) log σ(m) − ε log σ(−m), averaged over the pairs of the optimizer step

with log-probs summed over completion tokens. ε = 0 is DPO (Rafailov et al. 2023,
arXiv:2305.18290, eq. 7); ε > 0 assumes a share ε of flipped labels (cDPO, eq. 3 of Mitchell's
note, 2023). At the start m = 0 and L = ln 2. Other losses of the same margin:

    loss=robust   L = (−(1 − ε) log σ(m) + ε log σ(−m)) / (1 − 2ε)       (arXiv:2403.00409)
    loss=hinge    L = max(0, 1 − m), 1 at the start                      (arXiv:2305.10425)

and with `nll_coef` = α any of them has α · −log π(y_w|x)/|y_w| added to it (Pang et al. 2024,
arXiv:2404.19733, eq. 1), which keeps the chosen completion's likelihood up.

The reference log-probs are the start's; a data-set source computes them once, caches them by
content and model hash and frees the reference, so that training holds one model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from einops import rearrange
from torch import Tensor

from zoo.algorithms.base import Algorithm, DataKind, LossTerm, Needs
from zoo.batch import Batch
from zoo.functional import (
    dpo_robust,
    dpo_sigmoid,
    hinge,
    masked_sum,
    nll_mixed,
    sequence_logprobs,
)
from zoo.models.models import Models


class PairLoss(StrEnum):
    """What is made of the margin of a pair."""

    sigmoid = "sigmoid"
    robust = "robust"
    hinge = "hinge"


@dataclass(frozen=True)
class DPO(Algorithm):
    beta: float = 0.1  # β; higher: stay closer to the reference
    label_smoothing: float = 0.0  # ε; assumed share of flipped preferences, below 0.5
    loss: PairLoss = PairLoss.sigmoid
    nll_coef: float = 0.0  # α; weight of the chosen completion's mean negative log-likelihood

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
        if self.loss is PairLoss.hinge and self.label_smoothing:
            raise ValueError(
                f"algorithm.label_smoothing={self.label_smoothing} has no effect with "
                "algorithm.loss=hinge. Leave it out, or use loss=sigmoid or loss=robust."
            )
        if not self.nll_coef >= 0:
            raise ValueError(
                f"algorithm.nll_coef must be at least 0, got {self.nll_coef}. Use 0 for none."
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
        loss = self._loss(chosen, rejected, ref_chosen, ref_rejected)
        metrics = {}
        if self.nll_coef:
            lengths = rearrange(mask.sum(1), "(n two) -> two n", two=2)[0]  # [N] of the chosen
            loss = nll_mixed(loss, chosen, lengths, self.nll_coef)
            metrics = {"nll": (-(chosen.detach() / lengths).sum(), batch.n_groups)}
        rewards_chosen = self.beta * (chosen - ref_chosen).detach()
        rewards_rejected = self.beta * (rejected - ref_rejected).detach()
        margin = rewards_chosen - rewards_rejected
        pairs = batch.n_groups
        yield LossTerm(
            "policy",
            loss.sum() / batch.scale.groups,
            {
                **metrics,
                "margin": (margin.sum(), pairs),
                "preference_accuracy": ((margin > 0).float().sum(), pairs),
                "implicit_reward/chosen": (rewards_chosen.sum(), pairs),
                "implicit_reward/rejected": (rewards_rejected.sum(), pairs),
                "logprob/chosen": (chosen.detach().sum(), pairs),
                "logprob/rejected": (rejected.detach().sum(), pairs),
                "entropy": (masked_sum(out.entropy, mask), mask.sum()),
            },
        )

    def _loss(self, *logprobs: Tensor) -> Tensor:
        if self.loss is PairLoss.hinge:
            return hinge(*logprobs, beta=self.beta)
        function = dpo_robust if self.loss is PairLoss.robust else dpo_sigmoid
        return function(*logprobs, beta=self.beta, label_smoothing=self.label_smoothing)
