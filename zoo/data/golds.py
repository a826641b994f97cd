"""Gold answers that the verifier can read, checked when data is loaded."""

from __future__ import annotations

from collections.abc import Iterable

from zoo.config import ConfigError
from zoo.types import Prompt


def check_golds(prompts: Iterable[Prompt], source: str) -> None:
    """Every gold verifies against itself.

    A gold that does not would score every answer wrong, and the curve would blame the model.

    Raises:
        ConfigError: the first golds that do not, with their prompts.
    """
    from zoo.rewards.math import check_gold

    bad = []
    count = 0
    for prompt in prompts:
        gold = prompt.columns.get("answer")
        if gold is None:
            continue
        count += 1
        reason = check_gold(str(gold), prompt.columns.get("style") or "math")
        if reason is not None:
            bad.append(f"{prompt.id}: {str(gold)[:40]!r} ({reason})")
    if bad:
        raise ConfigError(
            f"{source}: {len(bad)} of {count} gold answers cannot be verified against themselves "
            f"({'; '.join(bad[:3])}). Correct or remove these rows."
        )
