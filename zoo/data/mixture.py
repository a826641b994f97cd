"""Several data sets in one run, in given shares, each prompt judged by its own set's check."""

from __future__ import annotations

import hashlib
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import Any, TypeVar

from zoo.config import ConfigError, member, settle_choices
from zoo.data.left_out import LeftOut, remembered
from zoo.data.offered import rows_of, sets_of
from zoo.data.rows import (
    another_answer,
    content_of,
    of_them,
    without_duplicates,
    without_overlap,
)
from zoo.data.table import missing_golds, report_contradictions, repr_of
from zoo.rewards.check import RESERVED
from zoo.rewards.score import Patience, fingerprint, load, score
from zoo.types import (
    Completion,
    EvaluationSet,
    Example,
    LabelledCompletion,
    PreferencePair,
    Prompt,
    Reward,
    RewardOutput,
)

T = TypeVar("T")
_VERBS = ("offers", "max_new_tokens", "evaluation_sets")  # of every data set
LOCATIONS = ("path", "name", "heldout_path", "gsm8k", "svamp")  # settings of zoo's own data
# Readings of a row in an epoch: in pretraining, as many are worth nearly as much as new rows
# (Muennighoff et al. 2023, arXiv:2305.16264).
FEW = 4
MOST_AGAIN = 2_000_000  # rows that a mixture's list may hold again


class Until(StrEnum):
    """When a mixture ends."""

    shortest = "shortest"  # as soon as a part that is due is used up: nothing is there twice
    longest = "longest"  # when all parts are used up: till then those that are begin again


@dataclass(frozen=True)
class BySource:
    """Each prompt judged by the reward of its own source.

    The components are the scores by source, None for the rows of the others, so that each source
    has a curve; what a reward has for components of its own is not kept.

    Raises:
        RewardError: (when called) a reward's output is wrong.
        ValueError: (when called) a prompt whose column `source` is none of them.
    """

    rewards: Mapping[str, Reward]  # by the column `source`

    def load(self, device: Any) -> None:
        """Load what the rewards load (models), before the first step."""
        for reward in self.rewards.values():
            load(reward, device)

    def fingerprint(self) -> str:
        """What the rewards say of models that their settings only point at."""
        return fingerprint(self.rewards.values())

    def __call__(self, prompts: list[Prompt], completions: list[Completion]) -> RewardOutput:
        rows: dict[str, list[int]] = {}
        for row, prompt in enumerate(prompts):
            rows.setdefault(self._source(prompt), []).append(row)
        total: list[float | None] = [None] * len(prompts)
        reasons = [""] * len(prompts)
        components: dict[str, list[float | None]] = {}
        for source in sorted(rows):
            own = rows[source]
            texts = [completions[row] for row in own]
            asked = [prompts[row] for row in own]
            output = score(self.rewards[source], asked, texts, Patience(seconds=None), source, own)
            components[source] = [None] * len(prompts)
            for place, row in enumerate(own):
                components[source][row] = total[row] = output.total[place]
                reasons[row] = output.reasons[place] if output.reasons else ""
        return RewardOutput(total=total, components=components, reasons=reasons)

    def _source(self, prompt: Prompt) -> str:
        source = prompt.columns.get("source")
        if source not in self.rewards:
            raise ValueError(
                f"prompt {prompt.id!r} has the source {source!r}, and there are rewards for "
                f"{', '.join(self.rewards)}. Use the mixture's own prompts with its verifier."
            )
        return str(source)


@dataclass(frozen=True)
class Part:
    """One data set of a mixture."""

    name: str
    weight: float
    data: Any  # a Data
    reward: Reward | None  # instead of the data's own verifier in training

    @property
    def where(self) -> str:
        return f"data.parts.{self.name}"


@dataclass(frozen=True)
class Mixture:
    """Prompts of several data sets, of which each part has its share by weight.

    Every part is a data set with a `weight`, and perhaps a `reward` of its own that replaces its
    verifier in training. A prompt's column `source` and its id begin with the part's name. From a
    part that has more than its share the prompts are taken in an order that depends on their ids
    alone, because published files are often sorted by subject. A prompt (or pair, …) that two
    parts have counts for the first, and a prompt that any part judges on is trained on by none.

    A run visits all rows of the list once an epoch, in an order that is new each time, so an epoch
    has the weights' shares. With until=shortest no row is there twice, and what the larger parts
    have left is not read. With until=longest every row is read: a part that is used up before the
    others begins again, in the same order, so its rows are there several times (a warning tells
    of more than a few), as with `stopping_strategy="all_exhausted"` of `datasets`.

    Evaluation: `heldout` is the union of the parts' held-out problems, none of them twice, each
    judged by its own part's check, in the shares of the weights for as long as all parts last (the
    first `evaluate.problems` of it are judged). Other sets keep their names where all parts mean
    the same one, and else have the part's name in front: `math_independent`.

    Raises:
        ValueError: no parts, or one that cannot be used.
        ConfigError: a part's own errors; (when read) a part without a verifier or a reward, or too
            many rows that would be there again.
    """

    parts: dict[str, Any] = field(default_factory=dict)  # name → {weight, _target_, …, reward}
    until: Until = Until.shortest  # shortest: no row twice; longest: every row, small parts again
    data_seed: int = 0  # of the choice and order of each part's prompts; not the run's seed

    def __post_init__(self) -> None:
        settle_choices(self, "data")
        if not self.parts:
            raise ValueError(
                "data.parts is empty: there would be nothing to mix. Name at least one part, as in "
                "conf/data/mixture.yaml."
            )
        if not self.offers:
            each = "; ".join(f"{p.name}: {', '.join(sorted(p.data.offers))}" for p in self._parts)
            raise ValueError(
                f"data.parts have no kind of rows in common ({each}). Mix sets that all offer "
                "prompts, or all examples, or all pairs."
            )

    @property
    def offers(self) -> frozenset[str]:
        """What all parts offer."""
        return frozenset.intersection(*(frozenset(part.data.offers) for part in self._parts))

    @property
    def max_new_tokens(self) -> int:
        """The largest limit of any part."""
        return max(part.data.max_new_tokens for part in self._parts)

    def prompts(self) -> list[Prompt]:
        return self._mixed("prompts")

    def examples(self) -> list[Example]:
        return self._mixed("examples")

    def pairs(self) -> list[PreferencePair]:
        return self._mixed("pairs")

    def rankings(self) -> list[Any]:
        return self._mixed("rankings")

    def labelled(self) -> list[LabelledCompletion]:
        return self._mixed("labelled")

    def verifier(self) -> Reward | None:
        """Each prompt's own part's reward, else its verifier; None where no part has any."""
        return self._verifier

    def evaluation_sets(self) -> list[EvaluationSet]:
        return list(self._sets())

    # parts -----------------------------------------------------------------------------------

    @cached_property
    def _parts(self) -> tuple[Part, ...]:
        return tuple(_part(name, node) for name, node in self.parts.items())

    @cached_property
    def _verifier(self) -> Reward | None:
        # One object, whoever asks: what a reward has loaded stays loaded.
        if "prompts" not in self.offers:
            return None
        own: dict[str, Reward | None] = {}
        for part in self._parts:
            with _named(part.where):
                own[part.name] = part.reward or part.data.verifier()
        bare = [name for name, reward in own.items() if reward is None]
        if len(bare) == len(own):
            return None
        if bare:
            part = next(part for part in self._parts if part.name == bare[0])
            hint = missing_golds(part.data).replace("data.", f"{part.where}.")
            raise ConfigError(
                f"{part.where} has no verifier, so its prompts could not be judged. Give it one: "
                f"'+{part.where}.reward={{_target_: …}}'; or set reward=NAME, which then judges "
                f"all parts alike.{hint}"
            )
        return BySource({name: reward for name, reward in own.items() if reward is not None})

    def _places(self) -> list[Any]:
        """Where the parts' data may be."""
        return [getattr(part.data, field, None) for part in self._parts for field in LOCATIONS]

    @cached_property
    def _sets(self) -> Callable[[], tuple[EvaluationSet, ...]]:
        return remembered(self._made_sets, self._places)

    def _made_sets(self) -> tuple[EvaluationSet, ...]:
        """heldout first, then the others."""
        problems: dict[str, list[Prompt]] = {}
        checks: dict[str, Reward] = {}
        others: dict[str, dict[str, EvaluationSet]] = {}
        seen: dict[str, Any] = {}
        for part in self._parts:
            with _named(part.where):
                items = sets_of(part.data)
            for item in items:
                if item.name == "heldout" and item.kind == "accuracy" and item.verifier is not None:
                    marked = [_marked(p, part.name) for p in item.prompts]
                    own = _of_its_own(marked, seen, part.where, "held-out problems")
                    if own:
                        problems[part.name], checks[part.name] = own, item.verifier
                else:
                    others.setdefault(item.name, {})[part.name] = item
        sets = []
        if problems:
            weights = {p.name: p.weight for p in self._parts if p.name in problems}
            union = tuple(interleave_once(problems, weights))
            sets.append(EvaluationSet("heldout", "accuracy", union, BySource(checks)))
        for name, by_part in others.items():
            first = next(iter(by_part.values()))
            if all(item == first for item in by_part.values()) and not first.prompts:
                sets.append(first)
                continue
            for part, item in by_part.items():
                prompts = tuple(_marked(p, part) for p in item.prompts)
                sets.append(replace(item, name=f"{part}_{name}", prompts=prompts))
        return tuple(sets)

    def _mixed(self, kind: str) -> list[Any]:
        if kind not in self.offers:
            raise ConfigError(
                f"data=mixture was asked for {kind}, and its parts have in common: "
                f"{', '.join(sorted(self.offers))}."
            )
        return list(self._rows(kind))

    @cached_property
    def _rows(self) -> Callable[[str], list[Any]]:
        return remembered(self._woven, self._places)

    def _woven(self, kind: str) -> list[Any]:
        rows: dict[str, list[Any]] = {}
        for part in self._parts:
            with _named(part.where):
                own = rows_of(part.data, kind)
            _tell_of_sources([_prompt_of(row) for row in own], part)
            rows[part.name] = [_marked(row, part.name) for row in own]
        rows = self._without_repeats(rows)
        ordered = {
            name: sorted(own, key=lambda row: _order(self.data_seed, _prompt_of(row).id))
            for name, own in rows.items()
        }
        weights = {part.name: part.weight for part in self._parts}
        if self.until is Until.shortest:
            return interleave(ordered, weights, self.until)
        _check_repeats({name: len(own) for name, own in rows.items()}, weights)
        woven = interleave(ordered, weights, self.until)
        _tell_of_repeats(woven, rows)
        return woven

    def _without_repeats(self, rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
        """Nothing that is judged on, and nothing that an earlier part has; both are reported."""
        judged = [p for item in self._sets() if item.kind == "accuracy" for p in item.prompts]
        found: dict[str, list[Any]] = {}
        seen: dict[str, Any] = {}
        for name, own in rows.items():
            where = f"data.parts.{name}"
            prompts = [_prompt_of(row) for row in own]
            kept = {id(p) for p in without_overlap(prompts, judged, where)}
            own = [row for row, prompt in zip(own, prompts, strict=True) if id(prompt) in kept]
            if own and isinstance(own[0], Prompt):
                own = without_duplicates(own, content_of, where)
            new = _of_its_own(own, seen, where, "rows")
            if not new:
                raise ConfigError(f"{where} has nothing of its own to train on. Leave it out.")
            found[name] = new
        report_contradictions(
            [row for own in found.values() for row in own],
            "data=mixture",
            whose=lambda prompt: prompt.columns["source"],
        )
        return found


def _of_its_own(own: Sequence[Any], seen: dict[str, Any], where: str, what: str) -> list[Any]:
    """The rows of a part that no earlier one has, as `seen` tells and goes on to tell."""
    says = [content_of(row) if isinstance(row, Prompt) else repr_of(row) for row in own]
    new = [row for row, said in zip(own, says, strict=True) if said not in seen]
    if len(new) < len(own):
        told = [
            another_answer(row, seen[said])
            for row, said in zip(own, says, strict=True)
            if isinstance(row, Prompt) and said in seen
        ]
        warnings.warn(
            f"{where}: left out {len(own) - len(new)} of {len(own)} {what} that an earlier part "
            f"has as well{of_them([*filter(None, told)])}.",
            LeftOut,
            stacklevel=2,
        )
    for row, said in zip(own, says, strict=True):
        seen.setdefault(said, row)
    return new


# interleaving ------------------------------------------------------------------------------------


def interleave(
    items: Mapping[str, Sequence[T]], weights: Mapping[str, float], until: Until | str
) -> list[T]:
    """The lists woven into one, of which every beginning has the shares as nearly as can be.

        next part = argmin_k (n_k + ½) / w_k,   n_k taken so far

    The rule of Sainte-Laguë. After t items of K parts |n_k − t·w_k/Σw| ≤ ½ + K/2 · w_k/Σw: for one
    side, sum (n_i − ½)/w_i ≤ (n_k + ½)/w_k over i. Ties go to the part named first. A part that
    is due and used up ends it (until=shortest), or begins again until all have been used up once
    (until=longest).

    Args:
        items: one list a name; empty ones are passed over from the start.
        weights: above 0, by the same names.
    Raises:
        ValueError: an unknown `until`.
    """
    until = member("until", until, Until)
    taken = {name: 0 for name, own in items.items() if own}
    unread = set(taken)
    woven: list[T] = []
    while unread:
        name = _due(taken, weights)
        own = items[name]
        if until is Until.shortest and name not in unread:
            break
        woven.append(own[taken[name] % len(own)])
        taken[name] += 1
        if taken[name] == len(own):
            unread.remove(name)
    return woven


def interleave_once(items: Mapping[str, Sequence[T]], weights: Mapping[str, float]) -> list[T]:
    """All items once, by the rule of `interleave`; parts that are used up are passed over."""
    taken = {name: 0 for name, own in items.items() if own}
    woven: list[T] = []
    while taken:
        name = _due(taken, weights)
        woven.append(items[name][taken[name]])
        taken[name] += 1
        if taken[name] == len(items[name]):
            del taken[name]
    return woven


def _due(taken: Mapping[str, int], weights: Mapping[str, float]) -> str:
    return min(taken, key=lambda name: (taken[name] + 0.5) / weights[name])


def _order(seed: int, identity: str) -> bytes:
    return hashlib.blake2b(f"{seed}\x1f{identity}".encode(), digest_size=8).digest()


# parts -------------------------------------------------------------------------------------------


def _part(name: Any, node: Any) -> Part:
    """A part from {weight, _target_, …, reward}, {weight, data, reward}, or an instance."""
    # Here, not at the top: the builder knows all groups.
    from zoo.instantiate import build

    where = f"data.parts.{name}"
    if not isinstance(name, str) or name in RESERVED or not name.isidentifier():
        plain = re.sub(r"\W+", "_", str(name)).strip("_")
        if not isinstance(name, str) or not plain.isidentifier():
            plain = f"part_{plain}".rstrip("_")  # 1, and `on`, which YAML reads as true
        elif plain in RESERVED:
            plain = f"{plain}_1"
        raise ValueError(
            f"{where}: a part's name must be a plain word that names no other curve "
            f"({', '.join(RESERVED)}), got {name!r}. Try {plain}."
        )
    settings = dict(node) if isinstance(node, Mapping) else {"data": node, "weight": 1.0}
    weight = settings.pop("weight", None)
    if isinstance(weight, bool) or not isinstance(weight, int | float):
        raise ValueError(
            f"{where}.weight must be a number, got {weight!r}. Try {where}.weight=1.0."
        )
    if not 1e-100 <= weight <= 1e100:  # beyond, counts divided by weights are no numbers
        raise ValueError(
            f"{where}.weight must be above 0 (1e-100 to 1e100), got {weight!s:.40}. Leave the part "
            f"out with ~{where}, or try {where}.weight=1.0."
        )
    reward: Any = settings.pop("reward", None)
    if isinstance(reward, str):
        told = how_to_reward(where, reward)
        raise ValueError(f"{where}.reward is {reward!r}, the name of an option perhaps. {told}")
    if reward is not None:
        reward = build(reward, f"{where}.reward")
        if not isinstance(reward, Reward):
            raise ValueError(f"{where}.reward is a {type(reward).__name__}, which scores nothing.")
    data = settings
    if "_target_" not in settings and "data" in settings:
        data = settings.pop("data")
        if settings:
            raise ValueError(
                f"{where} has data and {', '.join(sorted(settings))}: settings belong to a "
                "mapping with _target_. Give one or the other."
            )
    with _named(where):
        data = build(data, where)
    missing = [verb for verb in _VERBS if not hasattr(data, verb)]
    if missing:
        raise ValueError(
            f"{where} is a {type(data).__name__}, and no data set: it has no "
            f"{' and no '.join(missing)} (see zoo/types.py)."
        )
    if isinstance(data, Mixture):
        raise ValueError(f"{where} is a mixture itself. Name its parts among these instead.")
    if getattr(data, "pair_with_gold", False):
        raise ValueError(
            f"{where}.pair_with_gold is for the set alone: parts without a gold solution could "
            f"make no such pairs. Set {where}.pair_with_gold=false."
        )
    return Part(name, float(weight), data, reward)


def how_to_reward(where: str, name: str) -> str:
    """How to give a part a reward on the command line, where its option's name was given for it."""
    # Here, not at the top: options are hydra's.
    from zoo.compose import target_of

    target = target_of("reward", name) or "package.module.Class"
    return (
        f"A part's reward is a mapping: write '+{where}.reward={{_target_: {target}, …}}' with its "
        f"settings, behind ~{where}.reward where the part has one already."
    )


@contextmanager
def _named(where: str) -> Iterator[None]:
    """A data set calls its settings data.path and the like; as a part it has a longer name."""
    try:
        yield
    except ConfigError as error:
        message = re.sub(r"(?<![\w./])data\.(?!parts\.)", f"{where}.", str(error))
        message = message.removeprefix(f"{where}: ")
        raise ConfigError(message if where in message else f"{where}: {message}") from error


def _prompt_of(row: Any) -> Prompt:
    return row if isinstance(row, Prompt) else row.prompt


def _check_repeats(rows: Mapping[str, int], weights: Mapping[str, float]) -> None:
    """Refuse shares that would take too many readings of the other parts to use one up."""
    slowest = max(rows, key=lambda name: rows[name] / weights[name])
    total = rows[slowest] * (sum(weights.values()) / weights[slowest])  # give or take one a part
    own = sum(rows.values())
    if total - own <= MOST_AGAIN:
        return
    where = f"data.parts.{slowest}"
    raise ConfigError(
        f"data.until=longest would read the other parts again until {where} ({rows[slowest]} rows, "
        f"{weights[slowest] / sum(weights.values()):.2g} of an epoch) is used up: an epoch would "
        f"have {total:.2g} rows, of which {own} are different ones. Raise {where}.weight (now "
        f"{weights[slowest]:g}), or use data.until=shortest."
    )


def _tell_of_repeats(woven: Sequence[Any], rows: Mapping[str, Sequence[Any]]) -> None:
    """Say which parts have their rows in the list more than a few times."""
    read = Counter(_prompt_of(row).columns["source"] for row in woven)
    told = [
        f"data.parts.{name} {read[name] / len(own):.1f} times ({len(own)} rows)"
        for name, own in rows.items()
        if read[name] > FEW * len(own)
    ]
    if told:
        warnings.warn(
            f"data.until=longest: an epoch of {len(woven)} rows reads {', '.join(told)}. Lower "
            "the weight of what is too small for it, or use data.until=shortest.",
            LeftOut,
            stacklevel=2,
        )


def _tell_of_sources(prompts: Sequence[Prompt], part: Part) -> None:
    own = [p for p in prompts if p.columns.get("source") not in (None, part.name)]
    if own:
        warnings.warn(
            f"{part.where}: {len(own)} of {len(prompts)} prompts have a column source of their own "
            f"({own[0].columns['source']!r:.40} in {own[0].id}), which gives way to the part's "
            f"name {part.name}. Rename the column where a reward is to read it.",
            LeftOut,
            stacklevel=2,
        )


def _marked(row: Any, source: str) -> Any:
    """The row with its source in its prompt: the column, and the beginning of the id."""
    prompt = _prompt_of(row)
    columns = {**prompt.columns, "source": source}
    marked = replace(prompt, id=f"{source}/{prompt.id}", columns=columns)
    return marked if row is prompt else replace(row, prompt=marked)
