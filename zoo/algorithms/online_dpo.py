"""Online DPO: DPO on pairs of the policy's own fresh samples, the best and the worst of a group.

    y_w, y_l = the completions of largest and of smallest reward among G samples of one prompt
    m = β [(log π(y_w|x) − log π_ref(y_w|x)) − (log π(y_l|x) − log π_ref(y_l|x))]
    L = −log σ(m), averaged over the groups of the optimizer step

A group of equal rewards has no pair: `keep` drops it. G = 2 is the published form; with more
samples the pair is clearer and G − 2 completions teach nothing. The reference stays the start's.

Source: Guo et al. 2024, arXiv:2402.04792 (there an LLM judges two samples); Rafailov et al. 2023,
arXiv:2305.18290, eq. 7. Completions of equal reward are told apart by their content, never by
their place in the group.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from zoo.algorithms import common
from zoo.algorithms.base import Algorithm, DataKind, LossTerm, Needs
from zoo.batch import Batch
from zoo.functional import aggregate_rows, dead_groups, dpo_sigmoid
from zoo.models.models import Models


@dataclass(frozen=True)
class OnlineDPO(Algorithm):
    beta: float = 0.1  # β; higher: stay closer to the reference

    name: ClassVar[str] = "online_dpo"

    def __post_init__(self) -> None:
        super().__post_init__()
        common.check_positive(beta=self.beta)

    @property
    def needs(self) -> Needs:
        return Needs(DataKind.prompts, reference=True, min_group_size=2, rows_coupled=True)

    def keep(self, batch: Batch) -> Tensor:
        if batch.rewards is None:
            return super().keep(batch)
        return ~dead_groups(batch.rewards, batch.group_size, batch.scored).dead

    def prepare(self, batch: Batch, models: Models) -> Batch:
        alive = ~common.in_dead_group(batch)  # [B]
        batch = batch.with_extra(alive=alive)
        # Always one pair a group, so that every process has as many; a dead one weighs nothing.
        pairs = batch.select_rows(common.best_and_worst(batch).reshape(-1), 2)
        return pairs.replace(ref_logprobs=models.reference_logprobs(pairs))

    def losses(self, batch: Batch, models: Models) -> Iterator[LossTerm]:
        out = models.policy(batch)
        alive = batch.extra["alive"]  # [B]; a dead pair may have no token to compare
        out = replace(out, logprobs=out.logprobs[alive], entropy=out.entropy[alive])
        batch = batch.select_groups(alive[::2])
        assert batch.scale is not None and batch.ref_logprobs is not None
        chosen, rejected = common.pair_logprobs(out.logprobs, batch, average=False)
        reference = common.pair_logprobs(batch.ref_logprobs, batch, average=False)
        loss = dpo_sigmoid(chosen, rejected, *reference, beta=self.beta)
        margin = self.beta * ((chosen - reference[0]) - (rejected - reference[1]))
        metrics = common.preference_metrics(margin, chosen, rejected, out, batch)
        drift = torch.where(batch.completion_mask, out.logprobs.detach() - batch.ref_logprobs, 0.0)
        metrics["kl_ref"] = (drift.sum(), batch.completion_mask.sum())
        yield LossTerm("policy", aggregate_rows(loss, batch.scale.groups), metrics)
