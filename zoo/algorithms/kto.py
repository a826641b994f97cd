"""KTO: single completions labelled good or bad; gains and losses saturate, as people feel them.

    h  = log π(y|x) − log π_ref(y|x)
    z₀ = max(0, mean over the batch of log π(y'|x) − log π_ref(y'|x)),   y' another prompt's answer
    L  = mean of   λ_D (1 − σ(β (h − z₀)))   where y is desirable
                   λ_U (1 − σ(β (z₀ − h)))   where it is not

z₀ is an estimate of the drift KL(π‖π_ref): only what a completion gains beyond it counts. It is a
statistic of the whole step over all processes, without gradient, taken once a batch. The mismatched
completion of a row is that of the next row, in the order of the rows' content, whose prompt
differs: the order in the batch does not matter, nor how it is dealt. They are no rows of the data,
so the reference stays loaded.

Source: Ethayarajh et al. 2024, arXiv:2402.01306, eq. 8 and §4.1. Deviation: with several updates a
batch, z₀ stays that of the first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from zoo.algorithms import common
from zoo.algorithms.base import Algorithm, DataKind, LossTerm, Needs
from zoo.batch import Batch, collate
from zoo.distributed import gathered
from zoo.functional import aggregate_rows, kto, kto_baseline, masked_sum, sequence_logprobs
from zoo.models.models import Models


@dataclass(frozen=True)
class KTO(Algorithm):
    beta: float = 0.1  # β; higher: stay closer to the reference
    desirable_weight: float = 1.0  # λ_D
    undesirable_weight: float = 1.0  # λ_U; λ_D·n_D/(λ_U·n_U) between 1 and 4/3 is recommended

    name: ClassVar[str] = "kto"

    def __post_init__(self) -> None:
        super().__post_init__()
        common.check_positive(
            beta=self.beta,
            desirable_weight=self.desirable_weight,
            undesirable_weight=self.undesirable_weight,
        )

    @property
    def needs(self) -> Needs:
        return Needs(data=DataKind.labelled, reference=True, reference_live=True)

    def prepare(self, batch: Batch, models: Models) -> Batch:
        batch = batch.replace(ref_logprobs=models.reference_logprobs(batch))
        other = mismatched(batch)
        policy = sequence_logprobs(models.policy_logprobs(other), other.completion_mask, False)
        reference = sequence_logprobs(
            models.reference_logprobs(other), other.completion_mask, False
        )
        everywhere = [torch.stack(pair) for pair in gathered((policy.cpu(), reference.cpu()))]
        baseline = kto_baseline(*torch.cat(everywhere, dim=1))
        return batch.with_extra(kl_baseline=baseline.to(batch.device).expand(batch.n_rows))

    def losses(self, batch: Batch, models: Models) -> Iterator[LossTerm]:
        assert batch.scale is not None and batch.rewards is not None
        assert batch.ref_logprobs is not None
        mask, baseline = batch.completion_mask, batch.extra["kl_baseline"]
        out = models.policy(batch)
        policy = sequence_logprobs(out.logprobs, mask, average=False)  # [B]
        reference = sequence_logprobs(batch.ref_logprobs, mask, average=False)
        desirable = batch.rewards > 0.5
        loss = kto(
            policy,
            reference,
            desirable,
            baseline,
            beta=self.beta,
            desirable_weight=self.desirable_weight,
            undesirable_weight=self.undesirable_weight,
        )
        gain = self.beta * (policy - reference).detach()
        metrics = {
            "kl_baseline": (baseline.sum(), batch.n_rows),
            "implicit_reward/desirable": (masked_sum(gain, desirable), desirable.sum()),
            "implicit_reward/undesirable": (masked_sum(gain, ~desirable), (~desirable).sum()),
            "entropy": (masked_sum(out.entropy, mask), mask.sum()),
        }
        yield LossTerm("policy", aggregate_rows(loss, batch.scale.groups), metrics)


def mismatched(batch: Batch) -> Batch:
    """Each prompt of this process with a completion that belongs to another prompt, of any."""
    rows = [_tokens(batch, i) for i in range(batch.n_rows)]
    keys = batch.row_keys.tolist()
    everyone = sorted(
        (key, *row) for part in gathered(list(zip(keys, rows, strict=True))) for key, row in part
    )
    start = {key: i for i, (key, _, _) in enumerate(everyone)}
    completions = []
    for key, (prompt, _) in zip(keys, rows, strict=True):
        ahead = (everyone[(start[key] + j) % len(everyone)] for j in range(1, len(everyone) + 1))
        # A step with a single prompt has no other: the row's successor stands in.
        others = list(ahead)
        completions.append(next((c for _, p, c in others if p != prompt), others[0][2]))
    return collate(
        [prompt for prompt, _ in rows],
        completions,
        group_size=batch.group_size,
        prompt_ids=batch.prompt_ids,
    ).to(batch.device)


def _tokens(batch: Batch, row: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    start, end = int(batch.prompt_lengths[row]), int(batch.lengths[row])
    ids: Tensor = batch.input_ids[row, :end]
    return tuple(ids[:start].tolist()), tuple(ids[start:].tolist())
