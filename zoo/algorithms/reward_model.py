"""A reward model by Bradley–Terry: what is preferred should score higher.

    P(i beats j) = σ(r_i − r_j)
    L = (1/N) Σ_groups 1/P · Σ_{(i,j): i preferred to j} [−log σ(r_i − r_j − μ·(s_i − s_j))
                                                         + c·(r_i + r_j)²]

A group is K completions of one prompt in an order (`batch.rewards`: higher is better, equal ones
are ties): one forward an output, all P pairs of unequal rank, divided by their number. Pairs are
K = 2. s is how strongly the data prefer one, where they say so (a pair's margin, a ranking's
scores), and else the order itself (1 and 0 in a pair). `batch.scored` is False for places without
an output, where fewer than K were ranked. At scores of 0, L = ln 2.

The reward model starts from the policy's start; no policy is loaded beside it.

Source: Bradley and Terry 1952; groups of K: Ouyang et al. 2022, arXiv:2203.02155, Eq. 1 and §3.5;
margin: Touvron et al. 2023, arXiv:2307.09288, Eq. 2; centring: Eisenstein et al. 2023,
arXiv:2312.09244.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from einops import rearrange
from torch import Tensor

from zoo.algorithms.base import Algorithm, DataKind, LossTerm, Needs
from zoo.batch import Batch
from zoo.functional import bradley_terry_ranked, masked_sum, ranked_pairs
from zoo.models.models import Models


@dataclass(frozen=True)
class BradleyTerry(Algorithm):
    margin: float = 0.0  # μ; lead asked for, per unit of the data's strength; 0: only who wins
    centre: float = 0.0  # c; pulls scores to mean 0, which the likelihood leaves free; try 0.01

    name: ClassVar[str] = "reward_model"

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("margin", "centre"):
            if not getattr(self, key) >= 0:
                raise ValueError(
                    f"algorithm.{key} must be at least 0, got {getattr(self, key)}. Use 0 to leave "
                    "it out."
                )

    @property
    def needs(self) -> Needs:
        return Needs(
            data=DataKind.rankings,
            min_group_size=2,
            trains=("reward_model",),
            rows_coupled=True,
        )

    def losses(self, batch: Batch, models: Models) -> Iterator[LossTerm]:
        assert batch.scale is not None
        scores = by_group(models.reward_model(batch), batch)  # [N, K]
        ranks, present = ranks_of(batch)
        strength = None
        if self.margin:
            given = by_group(batch.extra.get("strength", -ranks.reshape(-1)), batch)
            strength = self.margin * (given[:, :, None] - given[:, None, :])
        loss = bradley_terry_ranked(
            scores, ranks, present=present, margin=strength, centre=self.centre
        )
        yield LossTerm(
            "reward_model", loss.sum() / batch.scale.groups, pair_metrics(scores, ranks, present)
        )


def by_group(values: Tensor, batch: Batch) -> Tensor:
    """[B] → [N, K]."""
    return rearrange(values, "(n k) -> n k", k=batch.group_size)


def ranks_of(batch: Batch) -> tuple[Tensor, Tensor]:
    """[N, K] ranks, smaller is better, and [N, K] bool: which places hold an output."""
    assert batch.rewards is not None
    present = torch.ones_like(batch.truncated) if batch.scored is None else batch.scored
    rewards = torch.where(present, batch.rewards, 0.0)
    return by_group(-rewards, batch), by_group(present, batch)


def pair_metrics(
    scores: Tensor, ranks: Tensor, present: Tensor
) -> dict[str, tuple[Tensor, Tensor | float]]:
    """(sum, count) of who scores higher in a pair, by how much, and of the scores themselves."""
    scores = scores.detach()
    wins = ranked_pairs(ranks, present)
    lead = torch.where(wins, scores[:, :, None] - scores[:, None, :], 0.0)
    # A group counts once however many pairs it has, as in the loss.
    pairs, rows = wins.sum((1, 2)), present.sum()
    groups, each = (pairs > 0).sum(), pairs.clamp(min=1)
    return {
        "preference_accuracy": (((lead > 0).sum((1, 2)) / each).sum(), groups),
        "margin": ((lead.sum((1, 2)) / each).sum(), groups),
        "score": (masked_sum(scores, present), rows),
        "score_squared": (masked_sum(scores.square(), present), rows),
    }
