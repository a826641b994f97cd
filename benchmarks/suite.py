"""A suite: named arms, each a list of overrides and seeds, read from benchmarks/suites/*.yaml."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from zoo.config import ConfigError
from zoo.instantiate import did_you_mean
from zoo.launch import expand

SUITES = Path(__file__).parent / "suites"
KEYS = ("title", "description", "minutes", "overrides", "seeds", "arms")
ARM_KEYS = ("overrides", "seeds")


@dataclass(frozen=True)
class SuiteArm:
    label: str
    overrides: tuple[str, ...]
    seeds: tuple[int, ...]


@dataclass(frozen=True)
class Suite:
    """A comparison that can be repeated by its name."""

    name: str
    title: str
    description: str
    minutes: float  # an estimate, on two cores
    overrides: tuple[str, ...]  # of every arm
    arms: tuple[SuiteArm, ...]

    def experiment(self, extra: Sequence[str] = ()) -> str:
        """The folder of its runs: another one for other settings, so that runs never mix."""
        arms = [[arm.label, arm.overrides] for arm in self.arms]
        text = json.dumps([self.overrides, arms, list(extra)])
        return f"{self.name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"

    def jobs(self, extra: Sequence[str] = ()) -> tuple[list[str], list[list[str]]]:
        """Labels and overrides of every run; the first seed of all arms comes first, so that an
        interrupted suite can already be read."""
        labels, jobs = [], []
        for rank in range(max(len(arm.seeds) for arm in self.arms)):
            for arm in self.arms:
                if rank >= len(arm.seeds):
                    continue
                labels.append(f"{arm.label}, seed {arm.seeds[rank]}")
                jobs.append(
                    [
                        *self.overrides,
                        *arm.overrides,
                        f"experiment={self.experiment(extra)}",
                        f"name={arm.label}",
                        f"seed={arm.seeds[rank]}",
                        *extra,
                    ]
                )
        return labels, jobs


def suite_names() -> list[str]:
    return sorted(path.stem for path in SUITES.glob("*.yaml"))


def read_suite(name: str) -> Suite:
    """Reads and checks a suite by its name.

    Raises:
        ConfigError: no such suite, or a mistake in its file.
    """
    path = SUITES / f"{name}.yaml"
    if name not in suite_names():
        raise ConfigError(
            f"There is no suite {name!r}.{did_you_mean(name, suite_names(), 'suite=')} "
            f"Suites: {', '.join(suite_names())}."
        )
    values: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    _check_keys(path, values, KEYS)
    arms = []
    for label, arm in (values.get("arms") or {}).items():
        _check_keys(path, arm, ARM_KEYS, f"arms.{label}.")
        seeds = arm.get("seeds", values.get("seeds", [0]))
        if not seeds or not all(isinstance(seed, int) for seed in seeds):
            raise ConfigError(f"{path}: arms.{label} needs a list of whole seeds, got {seeds!r}.")
        arms.append(SuiteArm(label, tuple(arm.get("overrides", [])), tuple(seeds)))
    if not arms:
        raise ConfigError(f"{path}: the suite has no arms.")
    return Suite(
        name=name,
        title=values.get("title", name),
        description=values.get("description", ""),
        minutes=float(values.get("minutes", 0)),
        overrides=tuple(values.get("overrides", [])),
        arms=tuple(arms),
    )


def check_extra(extra: Sequence[str]) -> None:
    """Refuses further overrides that are not of one value each, or that a suite sets itself."""
    if len(expand(extra)) != 1:
        raise ConfigError(
            f"A suite has its own arms and takes no sweep, got {' '.join(extra)}. "
            "For sweeps: zoo -m …"
        )
    for text in extra:
        key = text.split("=")[0].lstrip("+~")
        if key in ("name", "seed", "experiment"):
            raise ConfigError(
                f"{text}: a suite sets {key} itself. Edit benchmarks/suites/, or use zoo -m."
            )


def _check_keys(path: Path, values: Any, known: Sequence[str], prefix: str = "") -> None:
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: {prefix or 'the file'} must be a mapping, got {values!r}.")
    for key in values:
        if key not in known:
            raise ConfigError(
                f"{path} has no key {prefix}{key}.{did_you_mean(key, known, prefix)} "
                f"Keys: {', '.join(known)}."
            )
