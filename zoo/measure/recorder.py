"""The record of a run: everything it writes into its directory, but for weights."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from zoo.config import MeasureConfig
from zoo.measure.files import JsonLines, RecordError, check_length, read_lines, strict, write_json
from zoo.measure.progress import Display, Silent, display
from zoo.measure.wandb_sink import TABLES, WandbSink

METRICS = "metrics.jsonl"
ROLLOUTS = "rollouts.jsonl"
EVALS = "evals.jsonl"
EVAL_SAMPLES = "eval_samples.jsonl"
WARNINGS = "warnings.jsonl"
FILES = (METRICS, ROLLOUTS, EVALS, EVAL_SAMPLES, WARNINGS)

# Columns of the tables in wandb; the files hold more.
ROLLOUT_COLUMNS = ("prompt", "text", "answer", "reward", "reason", "length", "truncated")
SAMPLE_COLUMNS = ("set", "prompt", "text", "answer", "score", "reason")


class Recorder:
    """Writes metrics, rollouts, evaluations and warnings as JSON lines, and wandb and a display.

    A line is handed to the operating system before its verb returns, so SIGKILL loses nothing.
    Numbers that are not finite are written as null and counted in the line's `nonfinite`.
    On processes other than the main one every verb does nothing.

    Args:
        run_dir: the run's folder, created where it is absent.
        config: how much is recorded.
        meta: the content of meta.json, see `zoo.measure.provenance.meta`; a resumed run keeps the
            first one and lists its own under `resumed`.
        resume_offsets: `offsets()` as the checkpoint kept them: files are cut back to these bytes.
            None starts anew: files are emptied.
        is_main: False on all processes but one.
        total_steps: steps of the whole run.
        title: the run's name on the terminal and in wandb.
        group: of runs that differ in their seed, in wandb.
    Raises:
        RecordError: a file is shorter than its offset or was altered there, or cannot be written.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        config: MeasureConfig,
        meta: Mapping[str, Any],
        resume_offsets: Mapping[str, int] | None,
        is_main: bool = True,
        total_steps: int,
        title: str,
        group: str | None = None,
    ):
        self.run_dir = Path(run_dir)
        self.is_main = is_main
        self._config = config
        self._files: dict[str, JsonLines] = {}
        self._warned: set[str] = set()
        self._counts: Counter[str] = Counter()
        self._rollout_table_every = max(1, -(-total_steps // (TABLES // 2)))
        self._last_step = 0
        self._sink: WandbSink | None = None
        self.display: Display = Silent()
        if not is_main:
            return
        self.run_dir.mkdir(parents=True, exist_ok=True)
        offsets = resume_offsets or {}
        check_offsets(self.run_dir, offsets)  # all of them before the first is cut
        self._files = {n: JsonLines(self.run_dir / n, offsets.get(n, 0)) for n in FILES}
        resumed = resume_offsets is not None
        _write_meta(self.run_dir / "meta.json", meta, resumed)
        for line in read_lines(self.run_dir / WARNINGS):
            if line["counted"]:
                self._counts[line["kind"]] += 1
        history = read_lines(self.run_dir / METRICS)
        self._last_step = history[-1]["step"] if history else 0
        self.display = display(
            total_steps, title, first_step=self._last_step, enabled=config.progress
        )
        evaluations = read_lines(self.run_dir / EVALS)
        for record in evaluations:
            self._show_accuracy(record)
        self._sink = WandbSink(
            self.run_dir,
            mode=config.wandb,
            project=config.wandb_project,
            title=title,
            group=group,
            config={**_run_config(self.run_dir), "meta": strict(meta)[0]},
            resumed=resumed,
            warn=self._warn_uncounted,
        )
        if self._sink.starts_empty:
            self._replay(history, evaluations)

    # the verbs of the loop -------------------------------------------------------------------

    def step(self, step: int, updates: int, metrics: Mapping[str, Any]) -> None:
        """One line of metrics.jsonl: `metrics` after step `step` (1-based) and `updates` updates.

        The counts of all warnings so far are added as `warnings/<kind>`.
        """
        if not self.is_main:
            return
        numbers, nonfinite = strict(metrics)
        line = {"step": step, "updates": updates, "time": time.time(), **numbers}
        if nonfinite:
            line["nonfinite"] = nonfinite
        line |= {f"warnings/{kind}": n for kind, n in sorted(self._counts.items())}
        self._files[METRICS].append([line])
        self._last_step = step
        self._log_metrics(line)
        self.display.step(step, line)

    def rollouts_wanted(self, step: int) -> int:
        """How many completions of `step` are kept, so that no more need be decoded."""
        config = self._config
        due = self.is_main and config.rollouts_every > 0 and step % config.rollouts_every == 0
        return config.rollouts_per_step if due else 0

    def rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Sampled completions of a step, the first `rollouts_wanted(step)` of `rows`."""
        rows = [{"step": step, **row} for row in rows[: self.rollouts_wanted(step)]]
        if self.is_main and rows:
            self._files[ROLLOUTS].append(rows)
            self._table_rollouts(rows)

    def evaluation(self, step: int, record: Mapping[str, Any]) -> None:
        """One line of evals.jsonl: the scores of one set after `step`; late ones are welcome."""
        if not self.is_main:
            return
        line, nonfinite = strict({"step": step, **record})
        if nonfinite:
            line["nonfinite"] = nonfinite
        self._files[EVALS].append([line])
        self._log_evaluation(line)
        self._show_accuracy(line)

    def eval_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Outputs of an evaluation, kept for reading."""
        rows = [{"step": step, **row} for row in rows]
        if self.is_main and rows:
            self._files[EVAL_SAMPLES].append(rows)
            self._table_samples(rows)

    def warning(self, kind: str, message: str) -> None:
        """Record a warning; the first of each kind is shown on the terminal."""
        self._warn(kind, message, counted=True)

    def memory(self, record: Mapping[str, Any]) -> None:
        """Write memory.json."""
        if self.is_main:
            write_json(self.run_dir / "memory.json", record)

    def summary(self, record: Mapping[str, Any]) -> None:
        """Write summary.json, whose presence says that the run is finished: call it last."""
        if self.is_main:
            for file in self._files.values():
                file.sync()
            write_json(self.run_dir / "summary.json", record)

    def offsets(self) -> dict[str, int]:
        """Bytes of each file, on the disk when this returns; for the checkpoint's manifest."""
        return {name: file.sync() for name, file in self._files.items()}

    def hashes(self) -> dict[str, str]:
        """SHA-256 of each file's bytes so far; for the checkpoint's manifest."""
        return {name: file.sha256() for name, file in self._files.items()}

    def close(self, exit_code: int = 0) -> None:
        """Close files, display and wandb; harmless when called twice."""
        self.display.close()
        if self._sink is not None:
            self._sink.close(exit_code)
        for file in self._files.values():
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(exit_code=0 if kind is None else 1)

    # sinks -----------------------------------------------------------------------------------

    def _warn_uncounted(self, kind: str, message: str) -> None:
        # Of the surroundings, not of the run: a resumed run's metrics must equal the others'.
        self._warn(kind, message, counted=False)

    def _warn(self, kind: str, message: str, counted: bool) -> None:
        if not self.is_main:
            return
        if counted:
            self._counts[kind] += 1
        line = {"after_step": self._last_step, "time": time.time(), "kind": kind}
        self._files[WARNINGS].append([{**line, "counted": counted, "message": message}])
        if kind not in self._warned:
            self._warned.add(kind)
            self.display.message(f"warning ({kind}): {message}")

    def _show_accuracy(self, record: Mapping[str, Any]) -> None:
        value = record.get("accuracy")
        if record.get("set") == "heldout" and isinstance(value, int | float):
            self.display.accuracy(value)

    def _replay(
        self, history: Sequence[Mapping[str, Any]], evaluations: Sequence[Mapping[str, Any]]
    ) -> None:
        for line in history:
            self._log_metrics(line)
        for line in evaluations:
            self._log_evaluation(line)
        for rows in _by_step(read_lines(self.run_dir / ROLLOUTS)):
            self._table_rollouts(rows)
        for rows in _by_step(read_lines(self.run_dir / EVAL_SAMPLES)):
            self._table_samples(rows)

    def _log_metrics(self, line: Mapping[str, Any]) -> None:
        if self._sink is not None:
            self._sink.log(line["step"], line)

    def _log_evaluation(self, line: Mapping[str, Any]) -> None:
        if self._sink is not None:
            self._sink.log(line["step"], flat_scores(line))

    def _table_rollouts(self, rows: Sequence[Mapping[str, Any]]) -> None:
        if self._sink is not None and rows[0]["step"] % self._rollout_table_every == 0:
            self._sink.table(rows[0]["step"], "completions", _columns(rows, ROLLOUT_COLUMNS))

    def _table_samples(self, rows: Sequence[Mapping[str, Any]]) -> None:
        if self._sink is not None:
            self._sink.table(rows[0]["step"], "samples", _columns(rows, SAMPLE_COLUMNS))


def check_offsets(
    run_dir: Path, offsets: Mapping[str, int], hashes: Mapping[str, str] | None = None
) -> None:
    """Refuse offsets up to which the files of `run_dir` are no longer whole; nothing is changed.

    Args:
        hashes: `hashes()` as the checkpoint kept them; those of older versions kept none.
    Raises:
        RecordError: names the file.
    """
    for name, keep in offsets.items():
        check_length(Path(run_dir) / name, keep, (hashes or {}).get(name))


def offsets_problem(run_dir: Path, manifest: Mapping[str, Any]) -> str:
    """Why the files of `run_dir` do not fit a checkpoint's manifest; "" where they do."""
    try:
        check_offsets(run_dir, manifest["offsets"], manifest.get("hashes"))
    except (RecordError, TypeError, AttributeError) as error:
        return str(error)
    return ""


def flat_scores(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of an evaluation as flat names: heldout/accuracy, heldout/pass@4, …"""
    scores: dict[str, float] = {}
    for name, value in record.items():
        if name == "pass@k" and isinstance(value, Mapping):
            found = {f"pass@{k}": share for k, share in value.items()}
        elif name == "reasons" and isinstance(value, Mapping):
            found = {f"reason/{reason}": share for reason, share in value.items()}
        elif name in ("by_source", "greedy_by_source") and isinstance(value, Mapping):
            found = {f"{name}/{source}": share for source, share in value.items()}
        else:
            found = {} if name == "step" else {name: value}
        for key, number in found.items():
            if isinstance(number, int | float) and not isinstance(number, bool):
                scores[f"{record.get('set', 'eval')}/{key}"] = number
    return scores


def _columns(rows: Sequence[Mapping[str, Any]], columns: tuple[str, ...]) -> list[dict[str, Any]]:
    return [{"step": row["step"], **{c: row.get(c) for c in columns}} for row in rows]


def _by_step(rows: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    groups: dict[tuple[Any, Any], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["step"], row.get("set")), []).append(row)
    return list(groups.values())


def _write_meta(path: Path, meta: Mapping[str, Any], resumed: bool) -> None:
    if resumed and path.exists():
        first = json.loads(path.read_text())
        meta = {**first, "resumed": [*first.get("resumed", []), strict(meta)[0]]}
    write_json(path, meta)


def _run_config(run_dir: Path) -> dict[str, Any]:
    from omegaconf import OmegaConf

    path = run_dir / "config.yaml"
    if not path.exists():
        return {}
    config = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    return {str(k): v for k, v in config.items()} if isinstance(config, dict) else {}
