"""Run folders read into plain dataclasses: the only thing a comparison knows about a run."""

from __future__ import annotations

import json
import math
import operator
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from itertools import combinations, product
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from zoo.config import PEER_GONE, by_dotted_name, member
from zoo.functional.rewards import pass_at_k

START = "start"  # the label of what all arms began from
T = TypeVar("T")
LAST_STEPS = 10  # the training reward of a run is the mean of its last steps
READING = (  # what a damaged record ends in
    ArithmeticError,
    AttributeError,
    LookupError,
    TypeError,
    ValueError,
    OSError,
    RecursionError,
)


class RunStatus(StrEnum):
    finished = "finished"
    failed = "failed"
    unfinished = "unfinished"  # running, killed or interrupted: the folder does not say which


class Measure(StrEnum):
    """What one evaluation says about each problem."""

    accuracy = "accuracy"  # share of the sampled completions that are right, at T = 1
    greedy = "greedy"  # whether the greedy completion is right
    pass_k = "pass@k"  # chance that one of k samples is right


@dataclass(frozen=True)
class Evaluation:
    """One line of evals.jsonl: one set of problems or texts, at one step."""

    step: int
    set: str
    kind: str  # "accuracy" or "perplexity"
    seed: int
    record: dict[str, Any] = field(repr=False)

    def number(self, key: str) -> float | None:
        """A number of the record, or None where there is none."""
        return _finite(self.record.get(key))

    @property
    def content(self) -> tuple[str, ...]:
        """Tells what was judged apart; empty in an older record."""
        whole = self.record.get("content_hash")
        return (str(whole),) if whole else tuple(map(str, self.record.get("problem_hashes") or []))

    @property
    def conditions(self) -> tuple[Any, ...]:
        """What was judged, from which tokens (of a template, say), and with which limit: the scores
        of one policy may differ between any two of these."""
        return (self.content, self.record.get("prompts_hash"), self.record.get("max_new_tokens"))

    @property
    def problems(self) -> dict[str, str]:
        """Problem id → hash of what it says; empty in an older record."""
        ids, hashes = self.record.get("problem_ids") or [], self.record.get("problem_hashes") or []
        return dict(zip(map(str, ids), map(str, hashes), strict=bool(hashes)))

    @property
    def pass_at(self) -> dict[int, float]:
        """pass@k by k, as the run computed it."""
        return {int(k): float(v) for k, v in (self.record.get("pass@k") or {}).items()}

    def per_problem(self, measure: Measure | str, k: int | None = None) -> dict[str, float]:
        """The measure of each problem by its id; a verifier's abstention counts as not right.

        Empty where the record holds no outcomes.
        """
        measure = member("measure", measure, Measure)
        ids = [str(i) for i in self.record.get("problem_ids") or []]
        if measure is Measure.greedy:
            outcomes = [[outcome] for outcome in self.record.get("greedy_outcomes") or []]
        else:
            outcomes = self.record.get("outcomes") or []
        if not outcomes:
            return {}
        if len(ids) != len(outcomes):
            raise ValueError(
                f"the evaluation of {self.set} at step {self.step} has {len(outcomes)} outcomes "
                f"for {len(ids)} problem ids."
            )
        scored = {
            name: [float(o) for o in samples if o is not None]
            for name, samples in zip(ids, outcomes, strict=True)
        }
        if measure is Measure.pass_k:
            assert k is not None
            return {
                name: float(pass_at_k(len(samples), round(sum(samples)), k))
                for name, samples in scored.items()
                if len(samples) >= k
            }
        return {name: fmean(samples) for name, samples in scored.items() if samples}

    def mean(self, measure: Measure | str, k: int | None = None) -> float | None:
        """The measure averaged over the problems."""
        measure = member("measure", measure, Measure)
        if measure is Measure.pass_k:
            return self.pass_at.get(k or 1)
        return self.number(measure.value)


@dataclass(frozen=True)
class Run:
    """One run folder."""

    folder: Path
    config: dict[str, Any] = field(repr=False)
    meta: dict[str, Any] = field(repr=False)
    metrics: tuple[dict[str, Any], ...] = field(repr=False)
    evaluations: tuple[Evaluation, ...] = field(repr=False)
    memory: dict[str, Any] = field(repr=False)
    summary: dict[str, Any] | None = field(repr=False)
    error: str = ""
    inputs: dict[str, str] = field(default_factory=dict, repr=False)  # file or code → hash

    @property
    def status(self) -> RunStatus:
        if self.summary is not None:
            return RunStatus.finished
        return RunStatus.failed if self.error else RunStatus.unfinished

    @property
    def name(self) -> str:
        # The folder's may be that of what a link led to; older records have no name elsewhere.
        recorded = (self.summary or {}).get("name") or self.meta.get("name")
        return str(recorded or self.folder.parent.name)

    @property
    def experiment(self) -> str:
        return str(self.config.get("experiment") or self.folder.parent.parent.name)

    @property
    def seed(self) -> int:
        return int(self.config.get("seed", self.meta.get("seed", 0)))

    @property
    def algorithm(self) -> str:
        """The algorithm's file name: ppo, dpo, grpo …"""
        if self.summary is not None and self.summary.get("algorithm"):
            return str(self.summary["algorithm"])
        target = str((self.config.get("algorithm") or {}).get("_target_", ""))
        parts = target.split(".")
        return parts[-2] if len(parts) > 1 else "unknown"

    @property
    def steps(self) -> int:
        """The steps that the configuration asks for."""
        return int((self.config.get("train") or {}).get("steps", 0))

    @property
    def step(self) -> int:
        """The last step that was recorded."""
        return int(self.metrics[-1]["step"]) if self.metrics else 0

    @property
    def config_hash(self) -> str:
        """The hash of all but the seed and what cannot move a result; empty in an older record."""
        return str(self.meta.get("config_hash") or (self.summary or {}).get("config_hash") or "")

    @property
    def start_hash(self) -> str:
        return str(self.meta.get("start_hash") or (self.summary or {}).get("start_hash") or "")

    def progress(self) -> str:
        """The status in words: «finished», «unfinished at step 12 of 45»."""
        if self.status is RunStatus.finished:
            return "finished"
        return f"{self.status} at step {self.step} of {self.steps}"

    @cached_property
    def sets(self) -> list[str]:
        """Names of the evaluated sets, in the order in which they were first evaluated."""
        return list(dict.fromkeys(evaluation.set for evaluation in self.evaluations))

    def evaluation(self, name: str, *, first: bool = False) -> Evaluation | None:
        """The last evaluation of a set, or the one at step 0."""
        of_set = [e for e in self.evaluations if e.set == name]
        if first:
            return next((e for e in of_set if e.step == 0), None)
        return max(of_set, key=lambda e: e.step, default=None)

    def series(self, key: str) -> list[tuple[int, float]]:
        """(step, value) of one metric; steps without a finite value are left out."""
        pairs = ((int(m["step"]), m.get(key)) for m in self.metrics)
        return [
            (step, float(value))
            for step, value in pairs
            if isinstance(value, int | float) and math.isfinite(value)
        ]

    def reward(self) -> float | None:
        """Mean training reward of the last ten steps."""
        values = [value for _, value in self.series("reward/total")[-LAST_STEPS:]]
        return fmean(values) if values else None

    def total(self, *keys: str) -> float | None:
        """A number of the summary by its path: `total("tokens", "generated")`."""
        value: Any = self.summary
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        return _finite(value)

    def model_bytes(self) -> float | None:
        """Bytes of all weights, gradients and optimizer states, exact; None before training."""
        parts = (self.memory.get("components") or {}).values()
        total = sum(value for kinds in parts for value in kinds.values())
        return float(total) or None

    @property
    def probe(self) -> dict[str, dict[str, int]]:
        """Live tensor bytes by phase and owner in the last metered step; empty where none was."""
        probes = self.memory.get("probes") or [{}]
        return probes[-1]

    def tensor_bytes(self) -> float | None:
        """The highest of those peaks: exact, where the process's RSS is not."""
        return max((float(split["total"]) for split in self.probe.values()), default=None)

    def peak_bytes(self) -> tuple[str, float] | None:
        """The phase of training with the highest peak and its bytes; ("rss", …) where no phase was
        metered. Evaluation, which loads the start for a moment, is not training."""
        peaks = dict((self.summary or {}).get("peak_bytes") or {})
        if not peaks:
            peaks = {**(self.memory.get("phases") or {}), "rss": self.memory.get("rss_peak")}
        peaks = {k: float(v) for k, v in peaks.items() if isinstance(v, int | float) and v > 0}
        phases = {k: v for k, v in peaks.items() if k not in ("rss", "evaluate")} or peaks
        return max(phases.items(), key=lambda item: item[1]) if phases else None

    def samples(self) -> list[dict[str, Any]]:
        """The completions that were written for reading."""
        return read_jsonl(self.folder / "eval_samples.jsonl")


@dataclass(frozen=True)
class Arm:
    """Runs that differ in their seed alone."""

    label: str
    runs: tuple[Run, ...]  # one a seed
    repeats: tuple[tuple[Run, Run], ...] = ()  # left out, and the run of its seed that counts

    @property
    def finished(self) -> tuple[Run, ...]:
        return tuple(run for run in self.runs if run.status is RunStatus.finished)

    @property
    def untrained(self) -> bool:
        """The control that only evaluates the start."""
        return all(run.steps == 0 for run in self.runs)

    def last(self, name: str) -> list[Evaluation]:
        """The final evaluation of a set, one for each finished run that has it."""
        found = (run.evaluation(name) for run in self.finished)
        return [evaluation for evaluation in found if evaluation is not None]


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file; a last line that was cut off by a kill is left out.

    Raises:
        ValueError: a broken line before the last.
    """
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    objects = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            objects.append(json.loads(line))
        except json.JSONDecodeError as error:
            if any(rest.strip() for rest in lines[number:]):
                raise ValueError(
                    f"{path}, line {number} is not JSON ({error.msg}), and lines follow it: "
                    "the file was damaged by something other than a kill."
                ) from None
    return objects


def read_run(folder: Path) -> Run:
    """Reads one run folder, finished or not.

    Raises:
        FileNotFoundError: no config.yaml: not a run folder.
        ValueError: a damaged file, named.
    """
    if not (folder / "config.yaml").exists():
        raise FileNotFoundError(f"{folder} is not a run folder: it has no config.yaml.")
    try:
        run = _read_run(folder)
        _ask(run)
        _check_summary(run)
    except READING as error:
        reason = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
        raise ValueError(f"the run {folder} is damaged: {reason}") from error
    return run


def _ask(run: Run) -> None:
    """Asks what the tables and the page ask: a file may be whole and hold something else.

    Raises:
        ValueError: with the file's name.
    """
    asked: dict[str, Callable[[], object]] = {
        "config.yaml": lambda: (run.seed, run.steps, run.algorithm),
        "meta.json": lambda: dict(run.meta.get("machine") or {}),
        "metrics.jsonl": lambda: (run.step, run.reward()),
        "summary.json": lambda: _ask_summary(run.summary or {}),
        "memory.json": lambda: (run.model_bytes(), run.tensor_bytes(), run.peak_bytes()),
        "evals.jsonl": lambda: [_ask_evaluation(evaluation) for evaluation in run.evaluations],
    }
    for name, ask in asked.items():
        with _in_file(name):
            ask()


def _check_summary(run: Run) -> None:
    """Refuses the summary of another run; of older records nothing is known.

    Raises:
        ValueError: it is of another configuration or seed.
    """
    begun = {"config_hash": run.meta.get("config_hash"), "seed": run.seed}
    for key, value in begun.items():
        found = (run.summary or {}).get(key)
        if None not in (found, value) and found != value:
            raise ValueError(
                f"summary.json is of another run: its {key} is {found!r}, and the run began with "
                f"{value!r}. Restore it, or delete it: the same command writes it anew."
            )


@contextmanager
def _in_file(name: str) -> Iterator[None]:
    try:
        yield
    except READING as error:
        what = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
        raise ValueError(f"{name} holds what zoo does not write: {what.rstrip('.')}.") from error


def _ask_summary(summary: dict[str, Any]) -> None:
    _ = dict(summary.get("peak_bytes") or {})
    for value in (summary.get("seconds") or {}).values():
        _ = float(value or 0)
    for scores in (summary.get("final") or {}).values():
        _ = int(scores.get("step", 0))


def _ask_evaluation(evaluation: Evaluation) -> None:
    shares = [evaluation.record.get("accuracy"), evaluation.record.get("greedy")]
    shares += evaluation.pass_at.values()
    for measure in (Measure.accuracy, Measure.greedy):
        shares += evaluation.per_problem(measure).values()
    for share in shares:
        if share is not None and not 0 <= share <= 1:
            raise ValueError(
                f"the evaluation of {evaluation.set} at step {evaluation.step} has the share "
                f"{share}, which does not lie between 0 and 1."
            )
    for k in evaluation.pass_at:
        _ = evaluation.per_problem(Measure.pass_k, k)


def _read_run(folder: Path) -> Run:
    config = _read_config(folder / "config.yaml")
    meta = _read_json(folder / "meta.json") or {}
    with _in_file("config.yaml" if "seed" in config else "meta.json"):
        seed = int(config.get("seed", meta.get("seed", 0)))
    records = read_jsonl(folder / "evals.jsonl")
    with _in_file("evals.jsonl"):
        evaluations = {
            (int(r["step"]), str(r["set"])): Evaluation(  # of a repeated step, the later one
                int(r["step"]), str(r["set"]), str(r.get("kind", "accuracy")), seed, r
            )
            for r in records
        }
    return Run(
        folder=folder,
        config=config,
        meta=meta,
        metrics=tuple(read_jsonl(folder / "metrics.jsonl")),
        evaluations=tuple(evaluations.values()),
        memory=_read_json(folder / "memory.json") or {},
        summary=_read_json(folder / "summary.json"),
        error=_read_error(folder),
        inputs=_read_inputs(folder / "inputs.json", by_dotted_name(config)),
    )


def _read_inputs(path: Path, settings: dict[str, Any]) -> dict[str, str]:
    """File or code of the user's, with the setting's value → hash; a damaged record tells nothing,
    and is named where the run goes on.
    """
    with suppress(ValueError, TypeError, KeyError, AttributeError):
        known = _read_json(path) or {"files": {}, "code": {}}
        found = {what: str(hashed) for what, hashed in known["code"].items()}
        for what, hashed in known["files"].items():
            setting = re.split(": | → ", what)[0]
            value = f"={settings[setting]}" if setting in settings else ""
            found[f"{setting}{value}{what.removeprefix(setting)}"] = str(hashed)
        return found
    return {}


def _read_error(folder: Path) -> str:
    """The traceback that ended a run; of several processes that of one that failed by itself."""
    found = ""
    for path in (folder / "error.txt", *sorted(folder.glob("error.rank*.txt"))):
        if path.exists():
            text = path.read_text(encoding="utf-8", errors="replace")
            if PEER_GONE not in text:
                return text
            found = found or text
    return found


def _read_config(path: Path) -> dict[str, Any]:
    try:
        found = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except (OmegaConfBaseException, YAMLError, UnicodeDecodeError, RecursionError) as error:
        first = str(error).splitlines()[0]
        raise ValueError(f"{path} is not yaml: {first}. The same command writes it anew.") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds no settings. The same command writes it anew.")
    return {str(key): value for key, value in found.items()}


def _read_json(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}. Delete the file or the run.") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds no object. Delete the file or the run.")
    return found


_BESIDE = ("inputs.json", "meta.json", "metrics.jsonl", "summary.json")  # a run has one at least


def find_runs(root: Path) -> list[Path]:
    """Run folders at or below a folder, by path; links are followed, and each run is found once."""
    found: list[Path] = []
    links: list[Path] = []
    seen: set[str] = set()
    found += _walk(root, links, seen)
    while links:  # last, so that a run is named by its own path
        with suppress(OSError):  # as of any folder that nobody may read
            found += _walk(links.pop(0), links, seen)
    return sorted(found)


def _walk(folder: Path, links: list[Path], seen: set[str]) -> Iterator[Path]:
    if (place := os.path.realpath(folder)) in seen:
        return
    seen.add(place)
    if (folder / "config.yaml").exists() and any((folder / name).exists() for name in _BESIDE):
        yield folder  # what lies below (checkpoints, policy) is part of this run
        return
    for child in sorted(folder.iterdir()):
        with suppress(OSError):  # another's folder, or one that is gone by now: the others count
            if child.is_dir() and not child.name.startswith("."):
                if child.is_symlink():
                    links.append(child)
                else:
                    yield from _walk(child, links, seen)


def read_runs(folders: Iterable[Path], damaged: dict[Path, str] | None = None) -> list[Run]:
    """Reads the folders that hold a run, each once; folders of jobs that never began are left out.

    Order is kept. Two paths of one folder are one run, read by the first.

    Args:
        damaged: gets the reason for each folder that cannot be read.
    Raises:
        ValueError: a damaged run, where `damaged` is None.
    """
    runs = []
    unique: dict[str, Path] = {}
    for folder in folders:
        unique.setdefault(os.path.realpath(folder), Path(folder))
    for folder in unique.values():
        if not (folder / "config.yaml").exists():
            continue
        try:
            runs.append(read_run(folder))
        except ValueError as error:
            if damaged is None:
                raise
            damaged[folder] = str(error)
    return runs


def arms_of(runs: Sequence[Run]) -> list[Arm]:
    """Runs gathered into arms by experiment, name and configuration, in the order in which they
    come.

    An arm's label is its run name; `grpo-1a2b3c` is shortened to `grpo` where that is unambiguous,
    the experiment is put in front where several experiments are compared, and the hash behind where
    runs of several configurations have one name. Of two runs of one seed a finished one counts,
    else the first.
    """
    hashes: dict[tuple[str, str], set[str]] = {}
    for run in runs:
        hashes.setdefault((run.experiment, run.name), set()).add(run.config_hash)
    groups: dict[tuple[str, str, str], list[Run]] = {}
    for run in runs:
        shared = len(hashes[run.experiment, run.name] - {""}) > 1
        suffix = f" ({run.config_hash or 'unknown'})" if shared else ""
        groups.setdefault((run.experiment, run.name, suffix), []).append(run)
    several = len({key[0] for key in groups}) > 1
    full = {
        (experiment, name, suffix): f"{experiment}/{name}{suffix}" if several else name + suffix
        for experiment, name, suffix in groups
    }
    short = {key: re.sub(r"[-_][0-9a-f]{6,}$", "", label) for key, label in full.items()}
    unique = [label for label in short.values() if list(short.values()).count(label) == 1]
    labels = {key: short[key] if short[key] in unique else full[key] for key in groups}
    return [
        # The table has a row of that name.
        _arm("start (trained)" if labels[key] == START and group[0].steps else labels[key], group)
        for key, group in groups.items()
    ]


def _arm(label: str, runs: Sequence[Run]) -> Arm:
    by_seed: dict[int, Run] = {}
    for run in sorted(runs, key=lambda run: run.status is not RunStatus.finished):
        by_seed.setdefault(run.seed, run)
    repeats = [(run, by_seed[run.seed]) for run in runs if run is not by_seed[run.seed]]
    return Arm(label, tuple(by_seed[seed] for seed in sorted(by_seed)), tuple(repeats))


def different_settings(arms: Sequence[Arm]) -> dict[str, list[str]]:
    """The settings in which arms differ: dotted name → the value of each arm."""
    flat = [by_dotted_name(arm.runs[0].config) for arm in arms]
    names = dict.fromkeys(name for values in flat for name in values)
    found = {
        name: [str(values.get(name, "–")) for values in flat]
        for name in names
        if name not in ("name", "seed", "output", "experiment")
    }
    return {name: values for name, values in found.items() if len(set(values)) > 1}


def _finite(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def by_start_time(runs: Iterable[Run]) -> list[Run]:
    """Runs in the order in which they were started."""
    return sorted(runs, key=lambda run: (str(run.meta.get("started", "")), str(run.folder)))


def different_starts(arms: Sequence[Arm]) -> dict[str, list[str]]:
    """Hash of a start → the arms that began from it, where arms did not begin from the same."""
    found: dict[str, dict[str, None]] = {}
    starts = [{run.seed: run.start_hash for run in arm.runs if run.start_hash} for arm in arms]
    for (arm_1, starts_1), (arm_2, starts_2) in combinations(zip(arms, starts, strict=True), 2):
        for value_1, value_2 in _unlike(starts_1, starts_2, operator.eq)[:1]:
            found.setdefault(value_1, {})[arm_1.label] = None
            found.setdefault(value_2, {})[arm_2.label] = None
    return {value: [*labels] for value, labels in found.items()}


def _unlike(
    first: dict[int, T], second: dict[int, T], alike: Callable[[T, T], bool]
) -> list[tuple[T, T]]:
    """What two arms have that is not alike, by seed: a start, or problems, may be drawn by it.

    Where they have no seed in common, all is compared with all.
    """
    pairs = [(first[seed], second[seed]) for seed in first if seed in second]
    if pairs:
        return [pair for pair in pairs if not alike(*pair)]
    pairs = list(product(first.values(), second.values()))
    return [] if any(alike(*pair) for pair in pairs) else pairs


def start_evaluations(arms: Sequence[Arm], name: str) -> list[Evaluation]:
    """Evaluations of a set at step 0, one for each start and seed: arms that share both would only
    repeat the same samples.

    There are none where the start has no one score: arms began from different ones, or were judged
    under different conditions.
    """
    arms = that_count(arms)
    by_arm = [
        {run.seed: e for run in arm.runs if (e := run.evaluation(name, first=True))} for arm in arms
    ]
    if different_starts(arms) or any(
        _unlike(one, other, judged_alike) for one, other in combinations(by_arm, 2)
    ):
        return []
    return [evaluation for _, evaluation in first_evaluations(arms, name)]


def start_of(arm: Arm, arms: Sequence[Arm], name: str) -> list[Evaluation]:
    """Evaluations of an arm's own start, under the conditions that the arm was judged under."""
    own = [e for run in arm.finished if (e := run.evaluation(name, first=True))] or arm.last(name)
    starts = {run.start_hash for run in arm.finished}
    return [
        evaluation
        for start, evaluation in first_evaluations(arms, name)
        if start in starts and any(judged_alike(evaluation, one) for one in own)
    ]


def first_evaluations(arms: Sequence[Arm], name: str) -> list[tuple[str, Evaluation]]:
    """(start, evaluation of a set at step 0), one for each start, seed and conditions."""
    found: list[tuple[str, Evaluation]] = []
    for run in (run for arm in that_count(arms) for run in arm.runs):
        evaluation = run.evaluation(name, first=True)
        if evaluation is not None and not any(
            (start, other.seed) == (run.start_hash, run.seed) and judged_alike(other, evaluation)
            for start, other in found
        ):
            found.append((run.start_hash, evaluation))
    return found


def that_count(arms: Sequence[Arm]) -> list[Arm]:
    """The arms with their finished runs, or with all where none is finished."""
    if not any(arm.finished for arm in arms):
        return [*arms]
    return [replace(arm, runs=arm.finished) for arm in arms if arm.finished]


def judged_alike(first: Evaluation, second: Evaluation) -> bool:
    """Whether two evaluations are of one set, judged in one way, as far as both records say."""
    pairs = zip(first.conditions, second.conditions, strict=True)
    return all(one == other for one, other in pairs if one and other)
