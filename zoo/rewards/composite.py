"""Several rewards, each with its weight and its name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from zoo.rewards.check import wrong_name
from zoo.rewards.score import Patience, fingerprint, load, score
from zoo.types import Completion, Prompt, Reward, RewardOutput


@dataclass(frozen=True)
class Weighted:
    """The weighted sum of named components.

        r = Σ_k w_k · r_k

    A component that cannot score a completion leaves the whole unscored (None), because a sum
    without it would be on another scale. The components are logged unweighted, under their names;
    the reasons are those of the first component that gives any.

    Each component is a reward (weight 1), a mapping `{weight, _target_, …}`, or a mapping
    `{weight, reward}` around a reward.

    Raises:
        ValueError: no components, a reserved name, a weight that is not finite, or a negative
            weight on a penalty.
    """

    components: dict[str, Any] = field(default_factory=dict)  # name → {weight, _target_, …}

    def __post_init__(self) -> None:
        if not self.components:
            raise ValueError(
                "reward.components is empty: there would be nothing to learn from. "
                "Name at least one, as in conf/reward/gsm8k_shaped.yaml."
            )
        for name, (weight, reward) in self.parts.items():
            if wrong := wrong_name(name):
                raise ValueError(f"reward.components: a component is called {wrong}")
            if not math.isfinite(weight):
                raise ValueError(
                    f"reward.components.{name}.weight must be finite, got {weight}. Try 1.0."
                )
            if weight < 0 and getattr(reward, "penalty", False) is True:
                raise ValueError(
                    f"reward.components.{name}.weight must be at least 0, got {weight}: "
                    f"{type(reward).__name__} is a penalty (at most 0) already, so a negative "
                    f"weight would pay for what it punishes. Try {-weight}."
                )

    @cached_property
    def parts(self) -> dict[str, tuple[float, Reward]]:
        """name → (weight, reward), built."""
        return {name: _part(name, node) for name, node in self.components.items()}

    def load(self, device: Any) -> None:
        """Load what components load (models), before the first step."""
        for _, reward in self.parts.values():
            load(reward, device)

    def fingerprint(self) -> str:
        """What the components say of models that their settings only point at."""
        return fingerprint(reward for _, reward in self.parts.values())

    def __call__(self, prompts: list[Prompt], completions: list[Completion]) -> RewardOutput:
        values: dict[str, list[float | None]] = {}
        reasons: list[str] = []
        for name, (_, reward) in self.parts.items():
            # The deadline is the whole's; what fails is told by the component's name.
            output = score(reward, prompts, completions, Patience(seconds=None), name)
            values[name] = output.total
            reasons = reasons or output.reasons
        weights = [weight for weight, _ in self.parts.values()]
        total = [_sum(weights, row) for row in zip(*values.values(), strict=True)]
        return RewardOutput(total=total, components=values, reasons=reasons)


def _part(name: str, node: Any) -> tuple[float, Reward]:
    if not isinstance(node, Mapping):
        return 1.0, node
    settings = dict(node)
    weight = settings.pop("weight", None)
    if isinstance(weight, bool) or not isinstance(weight, int | float):
        raise ValueError(
            f"reward.components.{name}.weight must be a number, got {weight!r}. "
            f"Write {name}: {{weight: 1.0, …}}."
        )
    reward = settings.pop("reward", None) if "_target_" not in settings else settings
    if reward is None or (reward is not settings and settings):
        raise ValueError(
            f"reward.components.{name} needs _target_ (a class and its settings) or reward (an "
            f"instance) beside weight, got {sorted(node)}."
        )
    if isinstance(reward, Mapping):
        # Here, not at the top: the builder knows all groups, a reward knows none.
        from zoo.instantiate import build

        reward = build(dict(reward), f"reward.components.{name}")
    return float(weight), reward


def _sum(weights: list[float], values: tuple[float | None, ...]) -> float | None:
    scored = [w * v for w, v in zip(weights, values, strict=True) if v is not None]
    return sum(scored) if len(scored) == len(values) else None
