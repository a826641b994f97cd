"""Gold answers that the verifier can read, checked when data is loaded."""

from __future__ import annotations

from collections.abc import Iterable

from zoo.config import ConfigError
from zoo.rewards.math import check_gold
from zoo.types import Prompt


def check_golds(prompts: Iterable[Prompt], source: str) -> None:
    """Every gold verifies against itself.

    A gold that does not would score every answer wrong, and the curve would blame the model.

    Raises:
        ConfigError: the first golds that do not, with their prompts.
    """
    golds = [prompt for prompt in prompts if prompt.columns.get("answer") is not None]
    bad = []
    for prompt in golds:
        fault = check_gold(str(prompt.columns["answer"]), prompt.columns.get("style") or "math")
        if fault is not None:
            bad.append(f"{prompt.id}: {str(prompt.columns['answer'])[:60]!r} ({fault})")
    if bad:
        raise ConfigError(
            f"{source}: {len(bad)} of {len(golds)} gold answers cannot be verified against "
            f"themselves, so no answer could ever be right: {'; '.join(bad[:3])}. Correct them."
        )
