"""Rows against the model's context: what is too long is found before training, by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from zoo.config import ConfigError
from zoo.types import Prompt

T = TypeVar("T")
SHARE = 0.01  # of the rows that may be left out for their length
NAMED = 4


def context_of(model: Any) -> int | None:
    """Tokens that the model's positions reach; None where its configuration does not say."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def fitting(
    rows: Sequence[T],
    *,
    tokens: Callable[[T], int],
    name: Callable[[T], str],
    context: int | None,
    what: str,
    way_out: str,
    share: float = SHARE,
) -> tuple[list[T], str]:
    """The rows that fit the model's context, and a sentence about those left out ("" for none).

    Args:
        tokens: of a row, new ones included.
        context: of the model, in tokens.
        what: the rows' name in messages.
        share: the largest that may be left out.
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
        f"{len(long)} of {len(rows)} {what} need more tokens than the model's context of "
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
    lower = f"Set rollout.max_new_tokens to at most {room} (now {max_new_tokens})"
    first = lower if room > 0 else "Leave the longest out"
    return fitting(
        prompts,
        tokens=lambda prompt: len(prompt.token_ids) + max_new_tokens,
        name=lambda prompt: prompt.id,
        context=context,
        what=what,
        way_out=f"{first}, or use a model with a longer one.",
        share=share,
    )
