"""The contract that every algorithm keeps, a stranger's included, clause by clause.

Each clause is a fact about one optimizer step, or about twenty steps on a bandit, measured on
models of a few thousand weights through the same `update` that trains. What is checked follows from
what the algorithm `needs`, never from its name; a clause that has nothing to look at is skipped and
says why. It takes about a second on one core, offline. `zoo.testing.check_algorithm` is the way in.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zoo.algorithms.base import (
    Algorithm,
    DataKind,
    Needs,
    absent_model,
    check_verbs,
    checked_batch,
    needs_of,
)
from zoo.batch import Batch
from zoo.config import ConfigError, place_in
from zoo.distributed import buffers_not_told
from zoo.models.models import Models
from zoo.testing import (
    ROLES,
    BanditPolicy,
    BanditRewardModel,
    Littered,
    Outcome,
    bandit_batch,
    bandit_models,
    bandit_run,
    frozen,
    group_size_for,
    littered,
    make_batch,
    moved_models,
    one_step,
    one_step_untrimmed,
    scaled,
    seeded,
    tiny_models,
    token_gradients,
    train_on,
    widened,
    with_logprobs,
    with_roles,
)

# Gradients of one step in float32, relative to the largest entry; a mean of means is off by 1e-1.
TOLERANCE = 5e-5


# results -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Clause:
    """One line of a report."""

    name: str
    passed: bool
    detail: str = ""  # why it is broken, or why there was nothing to look at
    skipped: bool = False

    def __str__(self) -> str:
        mark = "skipped" if self.skipped else "holds" if self.passed else "BROKEN"
        return f"{mark:8} {self.name}" + (f": {self.detail}" if self.detail else "")


@dataclass(frozen=True)
class Report:
    """What `check_algorithm` found."""

    algorithm: str
    clauses: tuple[Clause, ...]
    seconds: float

    @property
    def passed(self) -> bool:
        return not self.broken

    @property
    def broken(self) -> tuple[str, ...]:
        """Names of the broken clauses."""
        return tuple(clause.name for clause in self.clauses if not clause.passed)

    def __str__(self) -> str:
        head = f"{self.algorithm}: " + ("keeps the contract" if self.passed else "BREAKS it")
        return "\n  ".join([f"{head} ({self.seconds:.1f} s)", *map(str, self.clauses)])


class _BrokenError(Exception):
    """A clause does not hold; the message says what was seen."""


class _SkipError(Exception):
    """A clause has nothing to look at; the message says why."""


# checking ------------------------------------------------------------------------------------


def check_algorithms(
    algorithms: Sequence[Algorithm],
    *,
    full: bool = False,
    progress: Callable[[Report], None] = lambda report: None,
) -> list[Report]:
    """`check_algorithm` for several; with `full` two processes serve them all."""
    alone: dict[int, Clause] = {}
    if full:
        alone = dict(enumerate(_two_processes(algorithms)))
    reports = []
    for index, algorithm in enumerate(algorithms):
        report = _check(algorithm, alone.get(index))
        reports.append(report)
        progress(report)
    return reports


def _check(algorithm: Algorithm, processes: Clause | None) -> Report:
    started = time.perf_counter()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # models this small only lose by sharing
    try:
        contract = _Contract(algorithm)
        clauses: list[Clause] = []
        for name, check in CLAUSES.items():
            clause = _clause(name, check, contract)
            clauses.append(clause)
            if name in PREMISES and not clause.passed:  # the others would say the same once more
                rest = list(CLAUSES)[len(clauses) :]
                why = f"not looked at: {name!r} is broken"
                clauses += [Clause(other, True, why, skipped=True) for other in rest]
                break
    finally:
        torch.set_num_threads(threads)
    if processes is not None:
        clauses.append(processes)
    name = algorithm.name or type(algorithm).__name__
    return Report(name, tuple(clauses), time.perf_counter() - started)


def _clause(name: str, check: Callable[[_Contract], str | None], contract: _Contract) -> Clause:
    try:
        return Clause(name, True, check(contract) or "")
    except _SkipError as reason:
        return Clause(name, True, str(reason), skipped=True)
    except _BrokenError as reason:
        return Clause(name, False, str(reason))
    except (Exception, SystemExit) as error:
        # Whatever a stranger's code raises is a finding, not a crash of the checker.
        if told := absent_model(error, contract.algorithm):
            return Clause(name, False, told)
        where = place_in(type(contract.algorithm).__module__, error)
        return Clause(name, False, f"{type(error).__name__}: {str(error)[:200]}{where}")


class _Contract:
    """An algorithm with what its clauses share."""

    def __init__(self, algorithm: Algorithm) -> None:
        self.algorithm = algorithm

    @property
    def needs(self) -> Needs:
        return self.algorithm.needs

    @property
    def on_policy(self) -> bool:
        return self.needs.data is DataKind.prompts

    def variants(self) -> Iterator[tuple[str, Algorithm]]:
        """As configured, and with a second epoch, in which the policy has moved."""
        yield "", self.algorithm
        if self.on_policy and self.algorithm.updates_per_step == 1:
            yield " in a second epoch", dataclasses.replace(self.algorithm, epochs=2)

    def models(self, drift: float = 0.02, **changes: Any) -> Models:
        return tiny_models(self.needs, drift=drift, **changes)

    def batch(self, models: Models, **changes: Any) -> Batch:
        return with_logprobs(make_batch(self.needs, **changes), self.needs, self._source(models))

    def _source(self, models: Models) -> Models:
        return Models(policy=models.policy, reference=models.reference)

    def ready(self, models: Models) -> Models:
        """As the loop has them: a data set's reference is gone once its log-probs are known."""
        ready = with_roles(models)
        if not self.on_policy and not self.needs.reference_live:
            ready.reference = None
        ready.state = self.algorithm.initial_state()
        return ready

    def step(
        self,
        algorithm: Algorithm,
        batch: Batch,
        models: Models,
        *,
        moved: bool = False,
        micro_batch_tokens: int = 1 << 20,
    ) -> Outcome:
        """Prepare and compute one step; `moved`: the policy changes in between."""
        models = self.ready(models)
        prepared = algorithm.prepare(batch, models)
        if moved:
            models = moved_models(models, self.needs)
        return _accepted(one_step(algorithm, prepared, models, micro_batch_tokens))


def _accepted(outcome: Outcome) -> Outcome:
    if outcome.refused:
        raise _BrokenError(f"not finite: {outcome.refused}")
    return outcome


def _gap(one: Tensor, other: Tensor) -> float:
    """The largest difference, relative to the largest entry of either."""
    assert one.shape == other.shape and one.numel(), f"{tuple(one.shape)}, {tuple(other.shape)}"
    size = max(float(one.abs().max()), float(other.abs().max()), 1e-6)
    return float((one - other).abs().max()) / size


def _same(one: Outcome, other: Outcome, what: str) -> None:
    """Both outcomes have the same losses and gradients.

    Raises:
        _BrokenError: with the first difference.
    """
    for name in sorted(one.metrics | other.metrics):
        if name.startswith("loss/"):
            a, b = one.metrics.get(name, math.nan), other.metrics.get(name, math.nan)
            if not abs(a - b) <= TOLERANCE * max(abs(a), abs(b), 1.0):
                raise _BrokenError(f"{what}: {name} is {a:.6g} and {b:.6g}")
    for role, gradient in one.gradients.items():
        gap = _gap(gradient, other.gradients[role])
        if not gap <= TOLERANCE:
            raise _BrokenError(f"{what}: the {role}'s gradient differs by {gap:.2g} of its largest")


# clauses -----------------------------------------------------------------------------------------


def _states_needs(c: _Contract) -> None:
    try:
        needs = needs_of(c.algorithm)
        check_verbs(c.algorithm)
    except ConfigError as error:
        raise _BrokenError(str(error)) from error
    if not dataclasses.is_dataclass(c.algorithm):
        raise _BrokenError("it is not a dataclass: its settings could not come from a yaml")
    batch = make_batch(needs)
    kept = c.algorithm.keep(batch)
    if kept.dtype != torch.bool or kept.shape != (batch.n_groups,):
        raise _BrokenError(
            f"keep gives {kept.dtype} {tuple(kept.shape)} for {batch.n_groups} groups, not bool [N]"
        )


def _prepare_returns_a_batch(c: _Contract) -> None:
    for _, algorithm in c.variants():
        models = c.models()
        try:
            checked_batch(algorithm, algorithm.prepare(c.batch(models), c.ready(models)))
        except ConfigError as error:
            raise _BrokenError(str(error)) from error


def _trains_what_it_says(c: _Contract) -> None:
    models = c.models()
    outcome = c.step(c.algorithm, c.batch(models), models)
    for role in ROLES:
        module = getattr(models, role)
        if module is None:
            continue
        if role in c.needs.trains:
            if not bool((outcome.gradients[role] != 0).any()):
                raise _BrokenError(f"needs.trains names the {role}, but its gradient is 0")
        elif any(p.grad is not None for p in module.parameters()):
            raise _BrokenError(f"the {role} gets a gradient, but needs.trains does not name it")


def _leaves_reference(c: _Contract) -> None:
    if "reference" in c.needs.trains:
        raise _BrokenError("needs.trains names the reference: nothing would hold the policy")
    if not c.needs.reference:
        raise _SkipError("no reference")
    models = c.models()
    before = [p.clone() for p in models.reference.parameters()]
    batch = c.batch(models)
    train_on(c.algorithm, [batch, batch], c.ready(models))
    for old, new in zip(before, models.reference.parameters(), strict=True):
        if new.requires_grad or new.grad is not None:
            raise _BrokenError("the reference takes part in the gradient")
        if not torch.equal(old, new):
            raise _BrokenError("two steps of training changed the reference's weights")


def _reads_declared_models(c: _Contract) -> None:
    needs = c.needs
    declared = {"policy", *needs.trains}
    declared |= {"reference"} if needs.reference else set()
    declared |= {"critic"} if needs.critic else set()
    for _, algorithm in c.variants():
        models = c.models()
        batch = c.batch(models)
        models = c.ready(models)
        models.__dict__["touched"] = set()
        prepared = scaled(algorithm.prepare(batch, models)).trim()
        for term in algorithm.losses(prepared, models):
            term.loss.backward()
        extra = sorted(models.__dict__["touched"] - declared)
        if extra:
            raise _BrokenError(f"it reads {', '.join(extra)}, which its needs do not declare")


def _calls_modules_once(c: _Contract) -> None:
    models = c.models()
    batch = c.batch(models)
    models = c.ready(models)
    prepared = scaled(c.algorithm.prepare(batch, models)).trim()
    calls = dict.fromkeys(c.needs.trains, 0)
    hooks = []
    for role in c.needs.trains:

        def count(*_: Any, role: str = role) -> None:
            calls[role] += 1

        hooks.append(getattr(models, role).register_forward_hook(count))
    for term in c.algorithm.losses(prepared, models):
        term.loss.backward()
    for hook in hooks:
        hook.remove()
    many = [role for role, count in calls.items() if count > 1]
    if many:
        raise _BrokenError(
            f"losses calls the {', '.join(many)} {calls[many[0]]} times: data parallelism allows "
            "one forward of a module for each backward"
        )


def _prepare_is_pure(c: _Contract) -> None:
    for label, algorithm in c.variants():
        models = c.models()
        batch = c.batch(models)
        before = {name: value.clone() for name, value in batch._tensors()}
        prepared = algorithm.prepare(batch, c.ready(models))
        for name, value in prepared._tensors():
            if value.requires_grad:
                raise _BrokenError(f"{name} of the prepared batch carries a graph{label}")
        for name, value in batch._tensors():
            if not torch.equal(before[name], value):
                raise _BrokenError(f"prepare changed {name} of its argument{label}")


def _finite(**changes: Any) -> Callable[[_Contract], None]:
    def check(c: _Contract) -> None:
        if "abstained" in changes and not c.on_policy:
            raise _SkipError("nothing is scored")
        if "rewards" in changes and not c.on_policy:
            raise _SkipError("no rewards")
        for _, algorithm in c.variants():
            models = c.models()
            outcome = c.step(algorithm, c.batch(models, **changes), models, moved=True)
            for role, gradient in outcome.gradients.items():
                if not bool(gradient.isfinite().all()):
                    raise _BrokenError(f"the {role}'s gradient is not finite")

    return check


def _finite_abstained(c: _Contract) -> None:
    _finite(abstained="some")(c)
    _finite(abstained="all")(c)


def _micro_batches(c: _Contract) -> None:
    for label, algorithm in c.variants():
        models = c.models()
        batch = c.batch(models)
        whole = c.step(algorithm, batch, models, moved=True)
        for budget in (1, 40):
            cut = c.step(algorithm, batch, models, moved=True, micro_batch_tokens=budget)
            _same(whole, cut, f"whole and in micro-batches of {budget} tokens{label}")


def _right_padding(c: _Contract) -> None:
    for label, algorithm in c.variants():
        models = c.models()
        batch = c.batch(models)
        ready = c.ready(models)
        later = moved_models(ready, c.needs)
        narrow = one_step_untrimmed(algorithm, algorithm.prepare(batch, ready), later)
        wide = one_step_untrimmed(algorithm, algorithm.prepare(widened(batch, 7), ready), later)
        _same(narrow, wide, f"with 0 and 7 columns of padding{label}")


def _neighbours(c: _Contract) -> None:
    if "policy" not in c.needs.trains:
        raise _SkipError("no policy is trained")
    models = c.models(drift=0.0)  # at the start, where statistics of drift are 0 in every row
    ready = c.ready(models)
    found = []
    for last in (4, 15):  # length of the last group's prompt
        batch = c.batch(models, prompt_lengths=(3, 6, 1, 4, 2, last), groups=6)
        prepared = c.algorithm.prepare(batch, ready)
        found.append(token_gradients(c.algorithm, prepared, batch, ready))
    rows = 5 * batch.group_size
    width = min(grad.shape[1] for grad in found)
    one, other = (grad[:rows, :width] for grad in found)
    gap = _gap(one, other)
    if not gap <= TOLERANCE:
        raise _BrokenError(
            f"a longer prompt in another group changes a row's token gradients by {gap:.2g}"
        )


def _group_order(c: _Contract) -> None:
    for label, algorithm in c.variants():
        models = c.models()
        batch = c.batch(models)
        one = c.step(algorithm, batch, models, moved=True)
        order = torch.arange(batch.n_groups).roll(1).flip(0)
        other = c.step(algorithm, batch.select_groups(order), models, moved=True)
        _same(one, other, f"groups in another order{label}")


def _row_order(c: _Contract) -> None:
    if c.needs.data is DataKind.pairs:
        raise _SkipError("the order in a pair is its meaning")
    models = c.models()
    batch = c.batch(models)
    size = batch.group_size
    if size == 1:
        raise _SkipError("groups of one row")
    for label, algorithm in c.variants():
        one = c.step(algorithm, batch, models, moved=True)
        inside = torch.arange(batch.n_rows).view(-1, size).roll(1, dims=1).flip(1).reshape(-1)
        other = c.step(algorithm, batch.select_rows(inside, size), models, moved=True)
        _same(one, other, f"rows of each group in another order{label}")


def _groups_do_not_mix(c: _Contract) -> None:
    """Equal rewards inside each group say nothing, whatever other groups got."""
    if not c.on_policy or c.needs.min_group_size < 2:
        raise _SkipError("no baseline from a group")
    models = c.models()
    differ = c.step(c.algorithm, c.batch(models, rewards="dead"), models)
    equal = c.step(c.algorithm, c.batch(models, rewards="zero"), models)
    with _unless_levels_count(c):
        _same(equal, differ, "groups of equal rewards, all 0, and 0 or 1 by group")


@contextlib.contextmanager
def _unless_levels_count(c: _Contract) -> Iterator[None]:
    """An algorithm without advantages may select by the level of a reward, as a threshold does."""
    try:
        yield
    except _BrokenError as reason:
        models = c.models()
        if c.algorithm.prepare(c.batch(models), c.ready(models)).advantages is None:
            raise _SkipError("it has no advantages, and reads the level of the rewards") from reason
        raise


def _rewards_shifted(c: _Contract) -> str:
    if not c.on_policy or c.needs.min_group_size < 2:
        raise _SkipError("no baseline from a group")
    models = c.models()
    batch = c.batch(models)
    assert batch.rewards is not None

    def with_rewards(scale: float, shift: float) -> Outcome:
        assert batch.rewards is not None
        return c.step(c.algorithm, batch.replace(rewards=scale * batch.rewards + shift), models)

    plain = with_rewards(1, 0)
    with _unless_levels_count(c):
        _same(plain, with_rewards(1, 3), "rewards and rewards + 3")
    scaled = with_rewards(4, 0)
    gap = max(_gap(plain.gradients[role], scaled.gradients[role]) for role in plain.gradients)
    if gap <= TOLERANCE:
        return "scaled rewards give the same step"
    if gap < 0.02:
        raise _BrokenError(
            f"rewards times 4 change the gradient by {gap:.2g}: an epsilon too large for its spread"
        )
    return "the step grows with the rewards: they are not normalised"


def _garbage(c: _Contract) -> None:
    for label, algorithm in c.variants():
        models = c.models()
        changes: dict[str, Any] = {"abstained": "some"} if c.on_policy else {}
        batch = c.batch(models, **changes)
        ready = c.ready(models)
        later = moved_models(ready, c.needs)
        clean = one_step(algorithm, algorithm.prepare(batch, ready), later)
        for garbage in (math.nan, 1e4):
            dirty_start, dirty_later = _litter(ready, garbage), _litter(later, garbage)
            prepared = algorithm.prepare(littered(batch, garbage), dirty_start)
            dirty = one_step(algorithm, littered(prepared, garbage), dirty_later)
            what = f"clean, and with {garbage:g} under the masks{label}"
            _same(_accepted(clean), _accepted(dirty), what)
            for name, value in clean.metrics.items():
                seen = dirty.metrics.get(name, math.nan)
                if not abs(seen - value) <= 1e-4 * max(abs(value), 1.0):
                    raise _BrokenError(f"{what}: the metric {name} is {value:.6g} and {seen:.6g}")


def _litter(models: Models, garbage: float) -> Models:
    modules = {role: getattr(models, role) for role in ROLES}
    return with_roles(
        models, **{role: Littered(m, garbage) for role, m in modules.items() if m is not None}
    )


# What a metric of this name is before the first update, whatever the data.
START = {"ratio": 1.0, "clip_high": 0.0, "clip_low": 0.0, "kl_ref": 0.0, "kl_old": 0.0}


def _start_identities(c: _Contract) -> str:
    seen: set[str] = set()
    for label, algorithm in c.variants():
        models = c.models(drift=0.0)
        outcome = c.step(algorithm, c.batch(models), models)
        expected = dict(START)
        if c.on_policy:
            expected["mismatch/sampler"] = 0.0
        if c.needs.reference:
            expected |= {"margin": 0.0, "kl_baseline": 0.0}
        for name, value in expected.items():
            if name not in outcome.metrics:
                continue
            seen.add(name)
            if not abs(outcome.metrics[name] - value) < 1e-5:
                raise _BrokenError(
                    f"{name} is {outcome.metrics[name]:.6g} before the first update{label}, "
                    f"not {value:g}"
                )
        # A likelihood that is mixed in depends on the pairs, and says so as the metric nll.
        mixed = "nll" in outcome.metrics
        if c.needs.data is DataKind.pairs and c.needs.reference and not mixed:
            other = c.step(algorithm, c.batch(models, seed=5), models)
            one, two = outcome.metrics["loss/policy"], other.metrics["loss/policy"]
            if not abs(one - two) < 1e-5:
                raise _BrokenError(
                    f"the policy is the reference, yet the loss depends on the pairs: {one:.6g} "
                    f"and {two:.6g}"
                )
            seen.add(f"loss {one:.4g} for any pairs")
    if not seen:
        raise _SkipError("it reports no metric with a known first value")
    return ", ".join(sorted(seen))


def _eos_trained(c: _Contract) -> None:
    grad, batch = _token_view(c)
    ends = torch.zeros_like(batch.completion_mask)
    ends[torch.arange(batch.n_rows), batch.lengths - 1] = True
    ends &= ~batch.truncated[:, None]
    if not bool((grad[ends] != 0).any()):
        raise _BrokenError("the stop token gets no gradient in any row: the policy never learns it")
    # A row may train some of its tokens only; all but the last one is no such choice.
    rest = batch.completion_mask & ~ends
    left_out = ((grad != 0) | ~rest).all(1) & (rest.sum(1) > 2) & ~batch.truncated
    left_out &= ~((grad != 0) & ends).any(1)
    if bool(left_out.any()):
        raise _BrokenError(
            f"the stop token gets no gradient in {int(left_out.sum())} rows that train all others"
        )


def _only_trained_tokens(c: _Contract) -> None:
    grad, batch = _token_view(c)
    outside = (grad != 0) & ~batch.completion_mask
    if bool(outside.any()):
        raise _BrokenError(
            f"{int(outside.sum())} log-probs outside completion_mask (prompt or padding) count"
        )
    first = batch.completion_mask & (batch.completion_mask.long().cumsum(1) == 1)
    if not bool((grad[first] != 0).any()):
        raise _BrokenError("the first token of a completion counts in no row")


def _token_view(c: _Contract) -> tuple[Tensor, Batch]:
    if "policy" not in c.needs.trains:
        raise _SkipError("no policy is trained")
    models = c.models()
    batch = c.batch(models)
    ready = c.ready(models)
    return token_gradients(c.algorithm, c.algorithm.prepare(batch, ready), batch, ready), batch


class _Raised(nn.Module):
    """A critic (or a policy with a value head) with 1 added to the values at one place."""

    def __init__(self, inner: nn.Module, place: Tensor) -> None:
        super().__init__()
        self.inner = inner
        self.place = place  # [B, T] by row key
        self.keys: list[int] = []

    def forward(self, batch: Batch) -> Any:
        out = self.inner(batch)
        rows = [self.keys.index(key) for key in batch.row_keys.tolist()]
        added = self.place[rows, : batch.input_ids.shape[1]].float()
        return dataclasses.replace(out, values=out.values + added)


def _values_precede(c: _Contract) -> None:
    """The value of a prefix is the baseline of the token that follows it."""
    role = "critic" if c.needs.critic else "policy"
    if not (c.needs.critic or c.needs.value_head):
        raise _SkipError("no values")
    models = c.models()
    batch = c.batch(models)
    ready = c.ready(models)
    before = c.algorithm.prepare(batch, ready).advantages
    if before is None:
        raise _SkipError("prepare gives no advantages")
    mask = batch.completion_mask
    count = mask.long().cumsum(1)
    long = int(batch.completion_lengths.argmax())
    for which, index in (("first", 1), ("third", 3), ("last", int(count[long, -1]))):
        place = torch.zeros_like(mask)
        place[long] = mask[long] & (count[long] == index)
        raised = _Raised(getattr(ready, role), place)
        raised.keys = batch.row_keys.tolist()
        after = c.algorithm.prepare(batch, with_roles(ready, **{role: raised})).advantages
        assert after is not None
        change = torch.where(mask, after - before, 0.0)
        lowest = change[place]
        if not (bool(lowest < -1e-3) and bool((change >= lowest - 1e-6).all())):
            raise _BrokenError(
                f"a larger value before the {which} token does not lower that token's advantage "
                f"most (it changes by {float(lowest):.3g}): values are read at another place"
            )


def _old_policy_frozen(c: _Contract) -> str:
    if not c.on_policy:
        raise _SkipError("no old policy")
    algorithm = dataclasses.replace(c.algorithm, epochs=2)
    models = c.models()
    batch = c.batch(models)
    ready = c.ready(models)
    prepared = algorithm.prepare(batch, ready)
    later = moved_models(ready, c.needs)
    outcome = _accepted(one_step(algorithm, prepared, later))
    if "ratio" not in outcome.metrics and prepared.old_logprobs is None:
        raise _SkipError("it uses no ratio to an old policy")
    ratio = outcome.metrics.get("ratio")
    if ratio is not None and abs(ratio - 1) < 1e-5:
        raise _BrokenError(
            "in a second epoch, with the policy moved, the ratio is still 1: it is not taken to "
            "the policy that sampled"
        )
    fresh = one_step(algorithm, algorithm.prepare(batch, later), later)
    if _gap(outcome.gradients["policy"], fresh.gradients["policy"]) < TOLERANCE:
        raise _BrokenError("the gradient in a second epoch does not depend on the old policy")
    return "" if ratio is None else f"ratio {ratio:.4f} once the policy has moved"


def _drift_priced(c: _Contract) -> None:
    """With rewards that favour neither token, a policy that left its reference goes back."""
    if not (c.on_policy and c.needs.reference):
        raise _SkipError("no price of drift while sampling")
    size = 2 * math.ceil(group_size_for(c.needs) / 2)
    tokens = torch.arange(4 * size) % 2
    odd = torch.arange(4 * size) // size % 2 == 1  # groups in which token 0 is the better one
    batch = bandit_batch(tokens.tolist(), size)
    batch = batch.replace(
        rewards=torch.where(odd, 1 - tokens, tokens).float(), scored=torch.ones_like(odd)
    )
    models = bandit_models(c.algorithm, logits=(0.0, 1.386294))  # π(1) = 0.8
    models.reference = frozen(BanditPolicy())
    batch = batch.replace(sampling_logprobs=models.policy_logprobs(batch))
    outcome = _accepted(one_step(c.algorithm, c.algorithm.prepare(batch, models), models))
    slope = float(outcome.gradients["policy"][1])  # descent lowers logit 1 where this is positive
    if abs(slope) < 1e-9:
        raise _BrokenError("a reference is loaded, but drift from it costs nothing")
    if slope < 0:
        raise _BrokenError("drift from the reference is paid for, not priced: the sign of the KL")


def _temperature(c: _Contract) -> None:
    """A policy at temperature 2 is the policy with halved logits."""
    if "policy" not in c.needs.trains:
        raise _SkipError("no policy is trained")
    outcomes = []
    for temperature in (2.0, 1.0):
        models = c.models(temperature=temperature)
        if temperature == 1.0:
            with torch.no_grad():
                for policy in (models.policy, models.reference):
                    if policy is not None:
                        policy.model.lm_head.weight /= 2
        outcomes.append(c.step(c.algorithm, c.batch(models), models))
    for name, value in outcomes[0].metrics.items():
        other = outcomes[1].metrics[name]
        if name.startswith("loss/") and abs(value - other) > 1e-4 * max(abs(value), 1.0):
            raise _BrokenError(
                f"{name} is {value:.6g} at temperature 2 and {other:.6g} with halved logits: the "
                "log-probs are not the policy's at its temperature"
            )
    # The head's own gradient doubles; every other weight's is the same.
    same = torch.cat(
        [
            torch.full((p.numel(),), "lm_head" not in name)
            for name, p in models.policy.named_parameters()
        ]
    )
    gap = _gap(*(o.gradients["policy"][same] for o in outcomes))
    if gap > TOLERANCE:
        raise _BrokenError(f"the gradient differs by {gap:.2g} between the two")


def _bandit_learnt(c: _Contract) -> str:
    return _bandit(c, 1.0)


def _bandit_unlearnt(c: _Contract) -> str:
    return _bandit(c, -1.0)


def _bandit(c: _Contract, sign: float) -> str:
    model = bandit_run(c.algorithm, sign=sign)
    if isinstance(model, BanditRewardModel):
        better, worse = (1, 0) if sign > 0 else (0, 1)
        lead = float(model.strengths.detach()[better] - model.strengths.detach()[worse])
        if not lead > 0.1:
            raise _BrokenError(f"after 20 steps the preferred token leads by {lead:.3f}, not > 0.1")
        return f"the preferred token leads by {lead:.2f}"
    if sign < 0 and model.probability == 0.5:  # perhaps it learns from rewards above 0 alone
        model = bandit_run(c.algorithm, sign=sign, shift=1.0)
    chance = model.probability
    if not (chance > 0.6 if sign > 0 else chance < 0.4):
        wanted = "above 0.6" if sign > 0 else "below 0.4"
        raise _BrokenError(f"π(1) is {chance:.3f} after 20 steps, not {wanted}")
    return f"π(1) = {chance:.2f} after 20 steps"


def _same_seed_same_run(c: _Contract) -> None:
    ends = []
    for seed in (1, 2):  # of the global generator, which training may neither read nor move
        with seeded(seed):
            before = torch.random.get_rng_state()
            models = c.ready(m := c.models())
            batches = [c.batch(m, seed=step) for step in (0, 1)]
            torch.random.set_rng_state(before)
            train_on(c.algorithm, batches, models)
            if not torch.equal(before, torch.random.get_rng_state()):
                raise _BrokenError("training draws from the global random generator; use zoo.seeds")
        ends.append([getattr(models, role).state_dict() for role in c.needs.trains])
    for one, other in zip(*ends, strict=True):
        for name, value in one.items():
            if not torch.equal(value, other[name]):
                raise _BrokenError(f"two runs with one seed end with different {name}")


def _state_is_pure(c: _Contract) -> None:
    first, again = c.algorithm.initial_state(), c.algorithm.initial_state()
    if first != again or (first is again and first):
        raise _BrokenError("initial_state gives another or the same object the second time")
    try:
        restored = json.loads(json.dumps(first))
    except TypeError as error:
        raise _BrokenError(f"the state cannot be checkpointed: {error}") from error
    if restored != first:
        raise _BrokenError("the state does not survive a checkpoint: use floats by name")
    models = c.models()
    metrics = c.step(c.algorithm, c.batch(models), models).metrics
    kept = (dict(first), dict(metrics))
    one, two = (c.algorithm.next_state(first, metrics) for _ in range(2))
    if (first, metrics) != kept:
        raise _BrokenError("next_state changes its arguments")
    if one != two:
        raise _BrokenError("next_state gives different answers to the same arguments")
    if set(one) != set(first):
        raise _BrokenError(f"next_state changes the names {sorted(first)} to {sorted(one)}")


CLAUSES: dict[str, Callable[[_Contract], str | None]] = {
    "needs are stated": _states_needs,
    "prepare returns a batch": _prepare_returns_a_batch,
    "reads declared models": _reads_declared_models,
    "trains what it says": _trains_what_it_says,
    "reference untouched": _leaves_reference,
    "each module called once": _calls_modules_once,
    "prepare is pure": _prepare_is_pure,
    "finite: one-token rows": _finite(completion_lengths=(1,), truncated="none"),
    "finite: dead groups": _finite(rewards="dead"),
    "finite: all truncated": _finite(truncated="all"),
    "finite: abstained": _finite_abstained,
    "micro-batches": _micro_batches,
    "right padding": _right_padding,
    "neighbours' lengths": _neighbours,
    "order of groups": _group_order,
    "order of rows": _row_order,
    "groups do not mix": _groups_do_not_mix,
    "rewards shifted": _rewards_shifted,
    "garbage under masks": _garbage,
    "start identities": _start_identities,
    "EOS is trained": _eos_trained,
    "only trained tokens": _only_trained_tokens,
    "values precede tokens": _values_precede,
    "old policy frozen": _old_policy_frozen,
    "drift is priced": _drift_priced,
    "temperature": _temperature,
    "bandit learnt": _bandit_learnt,
    "bandit unlearnt": _bandit_unlearnt,
    "same seed, same run": _same_seed_same_run,
    "state is pure": _state_is_pure,
}
# Where one is broken, nothing else can hold.
PREMISES = ("needs are stated", "prepare returns a batch", "reads declared models")
TWO_PROCESSES = "one or two processes"


# two processes -----------------------------------------------------------------------------------


def _two_processes(algorithms: Sequence[Algorithm]) -> list[Clause]:
    """The gradients of one step, alone and with the groups dealt to two processes over gloo."""
    name = TWO_PROCESSES
    try:
        job = pickle.dumps(list(algorithms))
    except Exception as error:
        reason = f"it cannot be sent to another process: {error}"
        return [Clause(name, True, reason, skipped=True) for _ in algorithms]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "job.pkl").write_bytes(job)
        failure = _run_pair(Path(folder))
        if failure:
            return [Clause(name, False, failure) for _ in algorithms]
        shared: list[Any] = torch.load(Path(folder) / "result.pt", weights_only=False)
    return [
        _clause(name, lambda c, found=found: _compare_processes(c, found), _Contract(algorithm))
        for algorithm, found in zip(algorithms, shared, strict=True)
    ]


def _compare_processes(c: _Contract, found: Outcome | str) -> None:
    if isinstance(found, str):
        raise _BrokenError(f"in two processes: {found}")
    models = c.models()
    _same(c.step(c.algorithm, c.batch(models), models, moved=True), found, "one and two processes")


def _run_pair(folder: Path) -> str:
    """Starts two ranks; what went wrong, or nothing."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    environment["GLOO_SOCKET_IFNAME"] = environment.get("GLOO_SOCKET_IFNAME", "lo")
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _RANK, str(folder), str(rank)],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=(folder / f"stderr_{rank}").open("w"),
        )
        for rank in (0, 1)
    ]
    try:
        for process in ranks:
            process.wait(timeout=300)
    except subprocess.TimeoutExpired:
        return "two processes did not finish in 300 s"
    finally:
        for process in ranks:
            process.kill()
    for rank, process in enumerate(ranks):
        if process.returncode:
            lines = (folder / f"stderr_{rank}").read_text(encoding="utf-8").strip().splitlines()
            return f"rank {rank} failed: {lines[-1] if lines else process.returncode}"
    return ""


_RANK = "import sys; from zoo.contract import _rank; _rank(sys.argv[1], int(sys.argv[2]))"


def _rank(folder: str, rank: int) -> None:
    """One of two processes: its half of the groups of each algorithm's batch."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    store = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    algorithms: list[Algorithm] = pickle.loads((Path(folder) / "job.pkl").read_bytes())
    found: list[Outcome | str] = []
    for algorithm in algorithms:
        contract = _Contract(algorithm)
        try:
            models = contract.models()
            batch = contract.batch(models)
            half = torch.arange(batch.n_groups).tensor_split(2)[rank]
            ready = contract.ready(models)
            prepared = algorithm.prepare(batch.select_groups(half).trim(), ready)
            later = moved_models(ready, contract.needs)
            for role in contract.needs.trains:
                with buffers_not_told():
                    module = DistributedDataParallel(getattr(later, role), broadcast_buffers=False)
                setattr(later, role, module)
            # A module's gradients are complete after the backward of the step's last micro-batch.
            found.append(one_step(algorithm, prepared, later, 60))
        except (Exception, SystemExit) as error:
            found.append(f"{type(error).__name__}: {error}")
    if rank == 0:
        torch.save(found, Path(folder) / "result.pt")
    dist.destroy_process_group()
