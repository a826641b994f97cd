"""Algorithms with one deliberate mistake each, and the clause that has to name it.

Each mistake is one that public code has made. They are written out from the same parts as the real
ones, so that nothing but the mistake is wrong.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange, repeat

from zoo.algorithms.base import Algorithm, DataKind, LossTerm, Needs
from zoo.algorithms.common import over_tokens, surrogate_metrics
from zoo.algorithms.dpo import DPO
from zoo.algorithms.grpo import GRPO
from zoo.algorithms.ppo import PPO
from zoo.algorithms.sft import SFT
from zoo.batch import Batch
from zoo.functional import aggregate, clipped_surrogate, group_advantages, kl_penalty, masked_sum
from zoo.models.models import Models

# class → the clause whose name the report must hold
BROKEN: dict[type[Algorithm], str] = {}


def breaks(clause: str) -> Any:
    def mark(kind: type[Algorithm]) -> type[Algorithm]:
        BROKEN[kind] = clause
        return kind

    return mark


class Scaled:
    """A stand-in for Scale with one size changed."""

    def __init__(self, scale: Any, **changes: Any) -> None:
        self.__dict__.update(dataclasses.asdict(scale), **changes)


@breaks("bandit learnt")
@dataclass(frozen=True)
class AdvantageSign(GRPO):
    """Minimises what should be maximised."""

    def prepare(self, batch: Batch, models: Models) -> Batch:
        batch = super().prepare(batch, models)
        assert batch.advantages is not None
        return batch.replace(advantages=-batch.advantages)


@breaks("drift is priced")
@dataclass(frozen=True)
class KlSign(GRPO):
    """Pays for drift."""

    kl_coef: float = 0.1

    def losses(self, batch: Batch, models: Models) -> Iterator[LossTerm]:
        assert batch.advantages is not None and batch.scale is not None
        assert batch.ref_logprobs is not None
        mask, out = batch.completion_mask, models.policy(batch)
        surrogate = clipped_surrogate(out.logprobs, batch.old_logprobs, batch.advantages, mask)
        kl = kl_penalty(out.logprobs, batch.ref_logprobs, mask, self.kl_estimator)
        loss = surrogate.loss - self.kl_coef * kl
        yield LossTerm("policy", aggregate(loss, mask, batch.scale, self.average))


@breaks("drift is priced")
@dataclass(frozen=True)
class KlWithoutEffect(GRPO):
    """Loads a reference and never uses it."""

    @property
    def needs(self) -> Needs:
        return Needs(DataKind.prompts, reference=True, min_group_size=2)


@breaks("EOS is trained")
@dataclass(frozen=True)
class MaskFromPadId(SFT):
    """Takes every token equal to the filler for filler: the stop token among them."""

    def losses(self, batch: Batch, models: Models) -> Iterator[LossTerm]:
        mask = batch.completion_mask & (batch.input_ids != 2)
        yield from super().losses(batch.replace(completion_mask=mask), models)


@breaks("EOS is trained")
@dataclass(frozen=True)
class EosUntrained(GRPO):
    """Stops one token early."""

    def losses(self, batch: Batch, models: Models) -> Iterator[LossTerm]:
        assert batch.advantages is not None
        last = batch.completion_mask.clone()
        last[torch.arange(batch.n_rows), batch.lengths - 1] = False
        yield from super().losses(
            batch.replace(advantages=torch.where(last, batch.advantages, 0.0)), models
        )


@breaks("micro-batches")
@dataclass(frozen=True)
class MeanOfMeans(GRPO):
    """Divides each micro-batch by its own number of tokens."""

    def losses(self, batch: Batch, models: Models) -> Iterator[LossTerm]:
        scale = Scaled(batch.scale, tokens=int(batch.completion_mask.sum()))
        local = dataclasses.replace(self, average="token")
        yield from GRPO.losses(local, batch.replace(scale=scale), models)


@breaks("values precede tokens")
@dataclass(frozen=True)
class ValuesOffByOne(PPO):
    """Judges a token with the value of the prefix that holds it."""

    def prepare(self, batch: Batch, models: Models) -> Batch:
        class Late(Models):
            def critic_values(self, batch: Batch) -> Any:
                values, final = super().critic_values(batch)
                return torch.cat([values[:, 1:], values[:, -1:] * 0], 1), final

        return super().prepare(batch, Late(**_fields(models)))


@breaks("old policy frozen")
@dataclass(frozen=True)
class RatioFromCurrentPass(GRPO):
    """Takes the old log-probs from the pass whose ratio they should judge."""

    def losses(self, batch: Batch, models: Models) -> Iterator[LossTerm]:
        yield from super().losses(batch.replace(old_logprobs=None), models)


@breaks("prepare is pure")
@dataclass(frozen=True)
class OldLogprobsWithGraph(GRPO):
    """Computes the old log-probs with a graph and keeps it."""

    def prepare(self, batch: Batch, models: Models) -> Batch:
        batch = super().prepare(batch, models)
        return batch.replace(old_logprobs=models.policy(batch).logprobs)


@breaks("bandit learnt")
@dataclass(frozen=True)
class OldLogprobsUndetached(GRPO):
    """Divides π by π with both gradients: they cancel, nothing is learnt."""

    def losses(self, batch: Batch, models: Models) -> Iterator[LossTerm]:
        assert batch.advantages is not None and batch.scale is not None
        mask, out = batch.completion_mask, models.policy(batch)
        old = out.logprobs if batch.old_logprobs is None else batch.old_logprobs
        ratio = torch.where(mask, out.logprobs - old, 0.0).exp()
        loss = -ratio * torch.where(mask, batch.advantages, 0.0)
        yield LossTerm("policy", aggregate(loss, mask, batch.scale, self.average))


@breaks("reference untouched")
@dataclass(frozen=True)
class ReferenceTrained(GRPO):
    """Gives the reference an optimizer."""

    kl_coef: float = 0.1

    @property
    def needs(self) -> Needs:
        return dataclasses.replace(super().needs, trains=("policy", "reference"))


@breaks("reference untouched")
@dataclass(frozen=True)
class ReferenceMoved(GRPO):
    """Keeps the reference close to the policy, and forgets the start."""

    kl_coef: float = 0.1

    def prepare(self, batch: Batch, models: Models) -> Batch:
        pairs = zip(models.reference.parameters(), models.policy.parameters(), strict=True)
        for old, new in pairs:
            old.data.lerp_(new.data, 0.1)
        return super().prepare(batch, models)


@breaks("temperature")
@dataclass(frozen=True)
class TemperatureIgnored(SFT):
    """Reaches past the policy for the logits, which are at temperature 1."""

    def losses(self, batch: Batch, models: Models) -> Iterator[LossTerm]:
        assert batch.scale is not None
        mask = batch.completion_mask
        if not hasattr(models.policy, "model"):
            yield from super().losses(batch, models)
            return
        logits = models.policy.model(
            input_ids=batch.input_ids, attention_mask=batch.attention_mask.long()
        ).logits
        logprobs = logits[:, :-1].log_softmax(-1).gather(2, batch.input_ids[:, 1:, None])[..., 0]
        logprobs = torch.nn.functional.pad(logprobs, (1, 0))
        yield LossTerm("policy", aggregate(-logprobs, mask, batch.scale, self.average))


@breaks("groups do not mix")
@dataclass(frozen=True)
class GroupsAcrossPrompts(GRPO):
    """Forms its groups by a reshape the wrong way round."""

    def prepare(self, batch: Batch, models: Models) -> Batch:
        assert batch.rewards is not None
        grouped = rearrange(batch.rewards, "(g n) -> n g", g=batch.group_size)
        mean, std = grouped.mean(1, keepdim=True), grouped.std(1, keepdim=True)
        advantages = rearrange((grouped - mean) / (std + 1e-6), "n g -> (g n)")
        return batch.replace(advantages=over_tokens(advantages, batch))


@breaks("order of groups")
@dataclass(frozen=True)
class GroupsAcrossPromptsByOrder(GroupsAcrossPrompts):
    """The same, seen from the order of the groups."""


@breaks("right padding")
@dataclass(frozen=True)
class PaddingCounted(SFT):
    """Averages over the columns of the tensor."""

    def losses(self, batch: Batch, models: Models) -> Iterator[LossTerm]:
        assert batch.scale is not None
        out = models.policy(batch)
        loss = torch.where(batch.completion_mask, -out.logprobs, 0.0).mean(1).sum()
        yield LossTerm("policy", loss / batch.scale.sequences)


@breaks("neighbours' lengths")
@dataclass(frozen=True)
class PaddingCountedByNeighbours(PaddingCounted):
    """The same, seen from the rows beside a long one."""


@breaks("garbage under masks")
@dataclass(frozen=True)
class MaskByMultiplication(SFT):
    """0 · NaN is NaN."""

    def losses(self, batch: Batch, models: Models) -> Iterator[LossTerm]:
        assert batch.scale is not None
        loss = -(models.policy(batch).logprobs * batch.completion_mask).sum()
        yield LossTerm("policy", loss / batch.scale.tokens)


@breaks("finite: dead groups")
@dataclass(frozen=True)
class DeadGroupsDivided(GRPO):
    """0 / 0 in a group of equal rewards."""

    def prepare(self, batch: Batch, models: Models) -> Batch:
        assert batch.rewards is not None
        grouped = rearrange(batch.rewards, "(n g) -> n g", g=batch.group_size)
        scaled = (grouped - grouped.mean(1, keepdim=True)) / grouped.std(1, keepdim=True)
        return batch.replace(advantages=over_tokens(scaled.reshape(-1), batch))


@breaks("finite: one-token rows")
@dataclass(frozen=True)
class RowDeviation(SFT):
    """Scales by the deviation in a row, which one token does not have."""

    def losses(self, batch: Batch, models: Models) -> Iterator[LossTerm]:
        assert batch.scale is not None
        logprobs, mask = models.policy(batch).logprobs, batch.completion_mask
        total = logprobs.new_zeros(())
        for row, counted in zip(logprobs, mask, strict=True):
            own = row[counted]
            total = total - (own / own.detach().var(correction=1).sqrt()).sum()
        yield LossTerm("policy", total / batch.scale.tokens)


@breaks("finite: abstained")
@dataclass(frozen=True)
class AbstentionsRead(GRPO):
    """Writes NaN for a reward that was not given."""

    def prepare(self, batch: Batch, models: Models) -> Batch:
        assert batch.rewards is not None and batch.scored is not None
        rewards = torch.where(batch.scored, batch.rewards, torch.nan)
        return super().prepare(batch.replace(rewards=rewards, scored=None), models)


@breaks("rewards shifted")
@dataclass(frozen=True)
class RewardsUncentred(GRPO):
    """Needs a group, and does not take its mean off."""

    def prepare(self, batch: Batch, models: Models) -> Batch:
        assert batch.rewards is not None
        return batch.replace(advantages=over_tokens(batch.rewards, batch))


@breaks("start identities")
@dataclass(frozen=True)
class ReferenceForgotten(DPO):
    """DPO that compares with nothing."""

    def losses(self, batch: Batch, models: Models) -> Iterator[LossTerm]:
        assert batch.ref_logprobs is not None
        nothing = torch.zeros_like(batch.ref_logprobs)
        yield from super().losses(batch.replace(ref_logprobs=nothing), models)


@breaks("bandit learnt")
@dataclass(frozen=True)
class PairsSwapped(DPO):
    """Prefers the rejected completion."""

    def losses(self, batch: Batch, models: Models) -> Iterator[LossTerm]:
        index = torch.arange(batch.n_rows).view(-1, 2).flip(1).reshape(-1)
        yield from super().losses(batch.select_rows(index, 2), models)


@breaks("reads declared models")
@dataclass(frozen=True)
class UndeclaredCritic(GRPO):
    """Looks for a critic that it never asked for."""

    def prepare(self, batch: Batch, models: Models) -> Batch:
        if models.critic is not None:
            raise AssertionError("none is loaded")
        return super().prepare(batch, models)


@breaks("trains what it says")
@dataclass(frozen=True)
class CriticNeverTrained(PPO):
    """Says that it trains a critic and yields no term for it."""

    def losses(self, batch: Batch, models: Models) -> Iterator[LossTerm]:
        yield next(super().losses(batch, models))


@breaks("each module called once")
@dataclass(frozen=True)
class TwoForwards(GRPO):
    """A second forward of the policy, for a metric."""

    def losses(self, batch: Batch, models: Models) -> Iterator[LossTerm]:
        entropy = masked_sum(models.policy(batch).entropy, batch.completion_mask)
        for term in super().losses(batch, models):
            yield dataclasses.replace(term, metrics={"again": (entropy, 1)})


@breaks("same seed, same run")
@dataclass(frozen=True)
class GlobalRandom(GRPO):
    """Draws from the generator that everything shares."""

    def prepare(self, batch: Batch, models: Models) -> Batch:
        batch = super().prepare(batch, models)
        assert batch.advantages is not None
        return batch.replace(advantages=batch.advantages * torch.rand(()))


@breaks("only trained tokens")
@dataclass(frozen=True)
class PromptTrained(GRPO):
    """Spreads the advantage over the prompt as well."""

    def losses(self, batch: Batch, models: Models) -> Iterator[LossTerm]:
        assert batch.advantages is not None and batch.scale is not None
        out = models.policy(batch)
        mask = batch.attention_mask
        advantages = repeat(batch.advantages.sum(1), "b -> b t", t=mask.shape[1])
        surrogate = clipped_surrogate(out.logprobs, None, advantages, mask)
        metrics = surrogate_metrics(surrogate, out, batch)
        yield LossTerm("policy", aggregate(surrogate.loss, mask, batch.scale, "token"), metrics)


@breaks("order of rows")
@dataclass(frozen=True)
class FirstRowIsBaseline(GRPO):
    """Compares every completion with the first of its group."""

    def prepare(self, batch: Batch, models: Models) -> Batch:
        assert batch.rewards is not None
        grouped = rearrange(batch.rewards, "(n g) -> n g", g=batch.group_size)
        return batch.replace(advantages=over_tokens((grouped - grouped[:, :1]).reshape(-1), batch))


@breaks("state is pure")
@dataclass(frozen=True)
class StateInPlace(GRPO):
    """Counts its steps in the argument."""

    def initial_state(self) -> dict[str, float]:
        return {"steps": 0.0}

    def next_state(self, state: dict[str, float], metrics: dict[str, Any]) -> dict[str, float]:
        state["steps"] += 1
        return state


@breaks("one or two processes")
@dataclass(frozen=True)
class LocalStatistics(GRPO):
    """A deviation over the batch, of each process by itself."""

    def prepare(self, batch: Batch, models: Models) -> Batch:
        assert batch.rewards is not None
        advantages = group_advantages(
            batch.rewards, batch.group_size, scored=batch.scored, std_over="batch"
        )
        return super().prepare(batch, models).replace(advantages=over_tokens(advantages, batch))


def _fields(models: Models) -> dict[str, Any]:
    return {item.name: getattr(models, item.name) for item in dataclasses.fields(Models)}
