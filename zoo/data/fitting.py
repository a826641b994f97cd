"""Rows against the model's context: what is too long is found before training, by name."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from zoo.config import ConfigError, member
from zoo.data.left_out import LeftOut
from zoo.data.source import Group
from zoo.data.tokenize import Truncation, truncate_row
from zoo.types import Prompt

T = TypeVar("T")
SHARE = 0.01  # of the rows that may be left out for their length
NAMED = 4
MAX_ROW_TOKENS = "train.max_row_tokens"


def context_of(model: Any) -> int | None:
    """Tokens that the model's positions reach; None where its configuration does not say.

    With `longrope` (Phi-3 and -4) that is where the first of its two scales ends: beyond, one long
    row turns the positions of all that are read beside it, and numbers depend on the batch.
    """
    config = model.config.get_text_config()
    limits = [getattr(config, "max_position_embeddings", None)]
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in (ropes, *(r for r in ropes.values() if isinstance(r, dict))):
        if rope.get("rope_type") == "longrope":
            limits.append(rope.get("original_max_position_embeddings"))
    return min((int(limit) for limit in limits if limit), default=None)


def fitting(
    rows: Sequence[T],
    *,
    tokens: Callable[[T], int],
    name: Callable[[T], str],
    context: int | None,
    what: str,
    way_out: str,
    share: float = SHARE,
    limit_name: str = "the model's context",
) -> tuple[list[T], str]:
    """The rows that fit the model's context, and a sentence about those left out ("" for none).

    Args:
        tokens: of a row, new ones included.
        context: of the model, in tokens.
        what: the rows' name in messages.
        share: the largest that may be left out.
        limit_name: what `context` is, in messages.
    Raises:
        ConfigError: no rows at all, or more than `share` of them too long; names the first.
    """
    if not rows:
        raise ConfigError(f"there are no {what}: nothing to work on. Look at the data settings.")
    long = [row for row in rows if context is not None and tokens(row) > context]
    if not long:
        return list(rows), ""
    named = ", ".join(f"{name(row)} ({tokens(row)})" for row in long[:NAMED])
    more = f" and {len(long) - NAMED} more" if len(long) > NAMED else ""
    told = (
        f"{len(long)} of {len(rows)} {what} need more tokens than {limit_name} of "
        f"{context}: {named}{more}"
    )
    if len(long) > share * len(rows):
        raise ConfigError(f"{told}. {way_out}")
    return [row for row in rows if tokens(row) <= (context or 0)], f"{told}. They are left out."


def fitting_prompts(
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    context: int | None,
    what: str,
    share: float = SHARE,
) -> tuple[list[Prompt], str]:
    """`fitting` for prompts with `max_new_tokens` after them."""
    longest = max((len(p.token_ids) for p in prompts), default=0)
    room = (context or 0) - longest
    way_out = (
        f"Set rollout.max_new_tokens to at most {room} (now {max_new_tokens}), or use a model with "
        "a longer one."
        if room > 0
        else "Prompts alone fill it: use a model with a longer one (from scratch, raise "
        "model.architecture.max_position_embeddings), or data without them."
    )
    return fitting(
        prompts,
        tokens=lambda prompt: len(prompt.token_ids) + max_new_tokens,
        name=lambda prompt: prompt.id,
        context=context,
        what=what,
        way_out=way_out,
        share=share,
    )


def cut_texts(
    texts: Sequence[tuple[int, ...]], context: int | None, what: str
) -> tuple[tuple[int, ...], ...]:
    """The texts as far as the context reaches; a warning says what was cut."""
    longest = max(map(len, texts), default=0)
    if context is not None and longest > context:
        warnings.warn(
            f"{sum(len(text) > context for text in texts)} of {len(texts)} {what} are longer than "
            f"the model's context of {context} tokens (the longest has {longest}): only their "
            f"first {context} tokens are scored, so compare the perplexity with that of models of "
            "this context alone.",
            LeftOut,
            stacklevel=2,
        )
    return tuple(text[:context] for text in texts)


def cut_groups(
    groups: Sequence[Group],
    max_length: int,
    how: Truncation | str,
    limit_name: str = MAX_ROW_TOKENS,
) -> tuple[list[Group], str]:
    """The groups with rows of at most `max_length` tokens, and a sentence about them ("" for none).

    The rows of a group go on sharing one prompt: keep_end takes as much of it as the longest
    completion leaves room for. A group with a row of which nothing would be left to train, or
    nothing of the prompt, is left out whole: half a pair says nothing.

    Args:
        limit_name: what `max_length` is, in messages.
    Raises:
        ConfigError: none is left.
    """
    found = [cut_group(group, max_length, how) for group in groups]
    kept = [group for group in found if group is not None]
    cut = sum(new is not None and new is not old for old, new in zip(groups, found, strict=True))
    dropped = [old.prompt.id for old, new in zip(groups, found, strict=True) if new is None]
    told = f"{cut} of {len(groups)} training rows were cut to {max_length} tokens ({how})"
    if dropped:
        # What `cut_group` leaves out has one reason for each end.
        start = how == Truncation.keep_start
        alone, other = ("prompt", "keep_end") if start else ("completion", "keep_start")
        named = ", ".join(dropped[:NAMED])
        more = f" and {len(dropped) - NAMED} more" if len(dropped) > NAMED else ""
        told += (
            f", and {len(dropped)} left out, where a {alone} alone fills {limit_name}={max_length} "
            f"({named}{more}): {more_room(limit_name)}, or use train.too_long={other}"
        )
    if not kept:
        raise ConfigError(f"{told}.")
    return kept, f"{told}." if cut or dropped else ""


def more_room(limit_name: str) -> str:
    """What to do where a limit of that name is too low."""
    return "raise it" if limit_name == MAX_ROW_TOKENS else "use a model with a longer one"


def distinct_groups(groups: Sequence[Group]) -> tuple[list[Group], str]:
    """The groups that training can tell apart, and a sentence about the others ("" for none).

    Left out are groups with rows of unequal rank and equal ids, which train on rounding alone, and
    those with a completion that the tokenizer cannot write.

    Raises:
        ConfigError: none is left.
    """
    kept, unwritten, same = list[Group](), list[Group](), list[Group]()
    for group in groups:
        (unwritten if _unwritten(group) else same if _same(group) else kept).append(group)
    told = [
        f"{len(found)} of {len(groups)} training rows {why}: "
        + ", ".join(group.prompt.id for group in found[:NAMED])
        + (f" and {len(found) - NAMED} more" if len(found) > NAMED else "")
        for found, why in (
            (unwritten, "spell a stop token that the tokenizer cannot read as text"),
            (same, "have the same tokens for what is preferred and what is not"),
        )
        if found
    ]
    if groups and not kept:
        raise ConfigError(
            f"{'. '.join(told)}. Nothing is left to train on: correct the data, or, where rows "
            "were cut (train.too_long), raise train.max_row_tokens or keep the other end."
        )
    return kept, f"{'. '.join(told)}. They are left out." if told else ""


def _there(group: Group) -> list[int]:
    return [i for i in range(len(group.completions)) if not group.present or group.present[i]]


def _unwritten(group: Group) -> bool:
    return not all(group.completions[i] for i in _there(group))


def _same(group: Group) -> bool:
    """Whether two rows of unequal rank have the same ids; without labels each place is a rank."""
    ranks: dict[tuple[int, ...], float] = {}
    order = group.labels or range(len(group.completions))
    return any(ranks.setdefault(group.completions[i], order[i]) != order[i] for i in _there(group))


def cut_group(group: Group, max_length: int, how: Truncation | str) -> Group | None:
    """One group, cut (the same object where all of it fits); None: nothing to train is left."""
    how = member("how", how, Truncation)
    prompt = group.prompt.token_ids
    longest = max(group.completions, key=len)
    if len(prompt) + len(longest) <= max_length:
        return group
    if how is Truncation.keep_start:
        rows = [truncate_row(prompt, c, max_length, how) for c in group.completions if c]
        if None in rows:
            return None
        cut = iter(row[1] for row in rows if row is not None)
        completions = [next(cut) if c else () for c in group.completions]  # (): an empty place
    else:
        row = truncate_row(prompt, longest, max_length, how)
        several = len(group.completions) > 1
        if row is None or (several and len(longest) >= max_length):
            return None  # several rows would have no prompt in common
        prompt = tuple(row[0])
        completions = group.completions if several else [row[1]]
    return replace(
        group,
        prompt=replace(group.prompt, token_ids=prompt),
        completions=tuple(tuple(c) for c in completions),
    )
