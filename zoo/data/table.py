"""What data sets made of rows have in common, wherever the rows come from."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

from zoo.config import ConfigError
from zoo.data.golds import check_golds
from zoo.data.left_out import LeftOut
from zoo.data.plain_texts import PLAIN_TEXTS
from zoo.data.rows import (
    REQUIRED,
    Kind,
    Malformed,
    Ranking,
    Reader,
    content_of,
    side_digests,
    without_duplicates,
)
from zoo.rewards.math import STYLES
from zoo.rewards.verifiable import Verifier
from zoo.types import EvaluationSet, Example, LabelledCompletion, PreferencePair, Prompt, Reward


def offers(kind: Kind) -> frozenset[str]:
    if kind is Kind.rankings:
        return frozenset({"rankings", "pairs"})
    return frozenset({kind.value})


def check_reader_settings(
    heldout: float, max_malformed: float, max_new_tokens: int, style: str
) -> None:
    if style not in STYLES:
        raise ValueError(
            f"data.style must be one of {', '.join(STYLES)}, got {style!r}. Try data.style=math."
        )
    for name, value in (("heldout", heldout), ("max_malformed", max_malformed)):
        if not 0.0 <= value < 1.0:
            raise ValueError(
                f"data.{name} must be a share of the rows, at least 0 and below 1, got {value}. "
                f"Try data.{name}={0.1 if name == 'heldout' else 0.01}."
            )
    if max_new_tokens < 1:
        raise ValueError(
            f"data.max_new_tokens must be at least 1, got {max_new_tokens}: the model could write "
            "nothing. Try data.max_new_tokens=256."
        )


def check_heldout(name: str, value: str | None, kind: Kind) -> None:
    if value is not None and kind is not Kind.prompts:
        raise ValueError(
            f"data.{name}={value} is read for data.kind=prompts alone, and data.kind={kind}: no "
            f"row would be held out by it. Leave data.{name} out, or set data.kind=prompts."
        )


def wrong_kind(have: Kind, want: Kind, data: str) -> None:
    if have is not want:
        raise ConfigError(
            f"data={data} was asked for {want}, but data.kind={have}. Set data.kind={want}, whose "
            f"rows have the columns {', '.join(REQUIRED[want])}."
        )


def has_golds(prompts: tuple[Prompt, ...]) -> bool:
    return bool(prompts) and all("answer" in prompt.columns for prompt in prompts)


def check_heldout_golds(
    train: tuple[Prompt, ...], heldout: tuple[Prompt, ...], source: str, setting: str
) -> None:
    """Refuse held-out prompts without the golds that the training prompts have.

    Args:
        setting: name and value of what says where the held-out prompts are.
    Raises:
        ConfigError: nothing could be judged on them.
    """
    if has_golds(train) and not has_golds(heldout):
        raise ConfigError(
            f"{setting}: its prompts have no answer, and those of {source} have, so the policy "
            f"could not be judged on them. Give them the same column, or leave "
            f"{setting.partition('=')[0]} out."
        )


def missing_golds(data: Any) -> str:
    """Why data of prompts has no verifier: the columns that it has instead of `answer`; or ""."""
    from zoo.instantiate import nearest  # here, not at the top: it imports every group

    if not isinstance(data, Table) or data.kind is not Kind.prompts:
        return ""
    others = sorted({name for prompt in data.prompts() for name in prompt.columns})
    if not others:
        return " Its prompts have no column answer, nor any other."
    for kind in (Kind.pairs, Kind.rankings, Kind.labelled, Kind.examples):
        own = REQUIRED[kind][1:]
        if {*own} <= {*others}:
            return (
                f" Its rows have the columns prompt, {', '.join(own)}: set data.kind={kind} to "
                "read them as such."
            )
    near = (nearest("answer", others) or ["NAME"])[0]
    return (
        f" Its prompts have no column answer, but {', '.join(others)}. If one of them holds the "
        f"right answers, set data.columns.answer={near}."
    )


def without_problems(data: Any, sets: Sequence[EvaluationSet]) -> str:
    """Why no answer to a problem of the data can be judged; or ""."""
    if any(item.kind == "accuracy" and item.prompts for item in sets):
        return ""
    told = f"no problem can be judged: data {type(data).__name__}"
    if "prompts" not in data.offers:
        return (
            f"{told} offers {', '.join(sorted(data.offers))} and no prompts whose answers are "
            "right or wrong."
        )
    if data.verifier() is None:
        told += " has no verifier of its own, so there is no right or wrong to count."
        return f"{told}{missing_golds(data)}"
    return f"{told} holds out no prompts."


def unjudged(data: Any) -> str:
    """What to say of held-out prompts that nothing judges; or ""."""
    if not isinstance(data, Table) or data.kind is not Kind.prompts:
        return ""
    heldout = data._split()[1]
    if not heldout or has_golds(heldout):
        return ""
    own = [key for key in ("heldout_path", "heldout_split") if getattr(data, key, None)]
    way_out = f"Leave data.{own[0]} out." if own else "data.heldout=0 trains on them."
    return (
        f"{len(heldout)} held-out prompts are judged by nothing: data {type(data).__name__} has no "
        f"verifier of its own, and a reward judges training alone. {way_out}"
    )


def evaluation_sets(heldout: tuple[Prompt, ...]) -> list[EvaluationSet]:
    """heldout, where there are golds, and the guard."""
    sets = [EvaluationSet("guard", "perplexity", texts=PLAIN_TEXTS)]
    if has_golds(heldout):
        sets.insert(0, EvaluationSet("heldout", "accuracy", heldout, Verifier()))
    return sets


def split_by_content(
    prompts: tuple[Prompt, ...], share: float
) -> tuple[tuple[Prompt, ...], tuple[Prompt, ...]]:
    """Train and held out; a prompt's side depends on nothing but what it says.

    Raises:
        ConfigError: one side would be empty.
    """
    sides: tuple[list[Prompt], list[Prompt]] = ([], [])
    for prompt, digest in zip(prompts, side_digests(prompts), strict=True):
        sides[int.from_bytes(digest, "big") / 2**64 < share].append(prompt)
    if not sides[0] or (share > 0 and not sides[1]):
        raise ConfigError(
            f"data.heldout={share} of {len(prompts)} prompts leaves {len(sides[0])} to train on "
            f"and {len(sides[1])} to hold out. Give more rows, or data.heldout_path."
        )
    return tuple(sides[0]), tuple(sides[1])


def finish(
    found: list[Any], total: int, malformed: Malformed, reader: Reader, max_malformed: float
) -> tuple[Any, ...]:
    """The last checks of all rows: malformed ones, duplicates, golds."""
    malformed.settle(total, max_malformed, "data.max_malformed")
    if reader.kind is Kind.prompts:
        found = without_duplicates(found, content_of, reader.source)
        with_golds = [prompt for prompt in found if "answer" in prompt.columns]
        if 0 < len(with_golds) < len(found):
            bare = next(prompt.id for prompt in found if "answer" not in prompt.columns)
            raise ConfigError(
                f"{reader.source}: {len(found) - len(with_golds)} of {len(found)} prompts have no "
                f"answer (the first is {bare}). Give all of them one, or none."
            )
        check_golds(found, reader.source)
    else:
        found = without_duplicates(found, repr_of, reader.source)
    report_contradictions(found, reader.source)
    if reader.kind is not Kind.prompts:
        _report_repeated_prompts(found, reader)
    return tuple(found)


def _report_repeated_prompts(rows: list[Any], reader: Reader) -> None:
    """Say where completions begin with the prompt, which then is there twice in each row."""
    repeating = []
    for row in rows:
        prompt, replies = row.prompt, _replies(row)
        asked = prompt.messages[-1]["content"] if prompt.messages else prompt.text or ""
        asked = asked.removesuffix(f"\n\n{reader.instruction}").strip()
        if asked and replies and all(reply.lstrip().startswith(asked) for reply in replies):
            repeating.append(prompt.id)
    if len(repeating) > len(rows) / 2:
        warnings.warn(
            f"{reader.source}: in {len(repeating)} of {len(rows)} rows the completion begins with "
            f"the prompt's own text (the first is {repeating[0]}), so the model would learn to "
            "repeat the prompt. Take it out of the completions, or out of the prompts.",
            LeftOut,
            stacklevel=2,
        )


def _replies(row: Any) -> tuple[str, ...]:
    """The completions of a row that are not empty."""
    if isinstance(row, PreferencePair):
        found = (row.chosen, row.rejected)
    else:
        found = row.completions if isinstance(row, Ranking) else (row.completion,)
    return tuple(text for text in found if text)


def report_contradictions(
    rows: Sequence[Any], source: str, whose: Callable[[Prompt], Any] | None = None
) -> None:
    """Say what is preferred to itself the other way round, or labelled true and false.

    Args:
        whose: only what rows of two owners say counts; None: what any two rows say.
    """
    first: dict[Any, tuple[Any, Prompt]] = {}  # what is judged → the verdict and the row
    both, labelled = [], False
    for row in rows:
        for judged, verdict in _verdicts(row):
            key = (content_of(row.prompt), judged)
            said, kept = first.setdefault(key, (verdict, row.prompt))
            if said != verdict and (whose is None or whose(kept) != whose(row.prompt)):
                both.append(f"{kept.id} and {row.prompt.id}")
                labelled = isinstance(row, LabelledCompletion)
    if both:
        more = f"; and {len(both) - 3} more" if len(both) > 3 else ""
        what = (
            "completions are labelled true and false alike"
            if labelled
            else "pairs are there both ways round"
        )
        warnings.warn(
            f"{source}: {len(both)} {what} ({'; '.join(both[:3])}{more}). Both are trained on; "
            "take one of each out.",
            LeftOut,
            stacklevel=2,
        )


def _verdicts(row: Any) -> list[tuple[Any, Any]]:
    """(what is judged, the verdict) of a row: the better one of two, or whether one is good."""
    if isinstance(row, LabelledCompletion):
        return [(row.completion, row.desirable)]
    pairs = [row] if isinstance(row, PreferencePair) else []
    pairs += row.pairs() if isinstance(row, Ranking) else []
    return [(frozenset((pair.chosen, pair.rejected)), pair.chosen) for pair in pairs]


class Table:
    """What rows of one kind offer, wherever they are read from.

    A data set inherits the verbs and says how its rows are read: `_only` gives all rows of the kind
    and refuses another kind, `_split` gives training and held-out prompts.
    """

    kind: Kind

    def _split(self) -> tuple[tuple[Prompt, ...], tuple[Prompt, ...]]:
        raise NotImplementedError

    def _only(self, kind: Kind) -> list[Any]:
        raise NotImplementedError

    @property
    def offers(self) -> frozenset[str]:
        return offers(self.kind)

    def prompts(self) -> list[Prompt]:
        return list(self._split()[0])

    def examples(self) -> list[Example]:
        return self._only(Kind.examples)

    def pairs(self) -> list[PreferencePair]:
        """The pairs; of rankings, all pairs of unequal score."""
        if self.kind is Kind.rankings:
            return [pair for ranking in self.rankings() for pair in ranking.pairs()]
        return self._only(Kind.pairs)

    def rankings(self) -> list[Ranking]:
        return self._only(Kind.rankings)

    def labelled(self) -> list[LabelledCompletion]:
        return self._only(Kind.labelled)

    def verifier(self) -> Reward | None:
        """The check against `answer`, where every prompt has one."""
        if self.kind is not Kind.prompts:
            return None
        return Verifier() if has_golds(self._split()[0]) else None

    def evaluation_sets(self) -> list[EvaluationSet]:
        return evaluation_sets(self._split()[1] if self.kind is Kind.prompts else ())


def repr_of(item: Any) -> str:
    values = {name: value for name, value in vars(item).items() if name != "prompt"}
    return f"{content_of(item.prompt)}\x1f{values!r}"


def reader_key(reader: Reader) -> tuple[Any, ...]:
    columns = tuple(sorted(reader.columns.items()))
    return (reader.kind, columns, reader.source, reader.style, reader.instruction, reader.chat)
