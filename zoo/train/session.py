"""What surrounds the loop: records, evaluations, checkpoints, and going on where a run stopped."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from zoo.batch import Batch
from zoo.build import Run
from zoo.distributed import barrier, from_main, gathered, is_main, rank, world_size
from zoo.evaluate.best import better, score_of
from zoo.evaluate.evaluator import Evaluated
from zoo.measure.cost import ModelCost
from zoo.measure.files import RecordError, remove, way_out, write_json
from zoo.measure.memory import PhaseMemory
from zoo.measure.memory_table import sizes, text
from zoo.measure.recorder import Recorder
from zoo.models.loading import cache_folder
from zoo.models.lora import load_trained_state, trained_state
from zoo.models.saved import BEST, TOKENS, hashes_of, record_hashes
from zoo.rewards.score import FAILED, module_of
from zoo.rollout.source import Sampled
from zoo.train.bad_batch import (
    bad_batch_name,
    bad_rows,
    describe_rows,
    forget_bad_batches,
    save_bad_batch,
)
from zoo.train.checkpoint import Checkpoint, save_checkpoint
from zoo.train.figures import (
    bytes_by_component,
    reward_metrics,
    rollout_rows,
    step_flops,
    value_metrics,
)
from zoo.train.interrupt import Interrupt
from zoo.train.metrics import Pool
from zoo.train.probe import Peaks, probe
from zoo.train.progress import Progress
from zoo.train.summary import summarize
from zoo.train.update import Updated

KEPT = ".best.kept"  # the last checkpoint's best policy, once a later one is in best/


class TrainingError(RuntimeError):
    """Training cannot go on; says what happened and where to look."""


class ResumeError(TrainingError):
    """A checkpoint is not of what the run would go on with; the same command meets it again."""

    again = True


class Session:
    """A run's way through its steps; the loop calls its verbs and knows nothing of files."""

    def __init__(
        self,
        run: Run,
        folder: Path,
        recorder: Recorder,
        memory: PhaseMemory,
        config_hash: str,
        checkpoint: Checkpoint | None,
        interrupt: Interrupt | None = None,
        check_lock: Callable[[], None] = lambda: None,
    ) -> None:
        self.run = run
        self.folder = folder
        self.recorder = recorder
        self.memory = memory
        self.config_hash = config_hash
        self.interrupt = interrupt or Interrupt()
        self._check_lock = check_lock
        self.progress = Progress()
        self._saved: list[int] = []  # the steps that have checkpoints
        self._saved_best: dict[str, Any] | None = None  # of the last of them
        self.components: dict[str, dict[str, int]] = {}
        self._step_seconds = 0.0
        self._version = 0  # of the policy at the step's start: its updates
        self._trained_before = 0
        self._costs = {"policy": run.start_cost}
        for role in run.trainables:
            if role != "policy":
                self._costs[role] = ModelCost.of(getattr(run.models, role))
        if (scorer := module_of(run.config.reward)) is not None:
            self._costs["scorer"] = ModelCost.of(scorer)
        if checkpoint is not None:
            self._restore(checkpoint)
        elif run.presampled is not None:
            self._count_presampled()
        self._check_best()
        if is_main():
            forget_bad_batches(folder, self.progress.step)

    # what the loop asks ----------------------------------------------------------------------

    @property
    def updates(self) -> int:
        return self.progress.updates

    @property
    def decay_from(self) -> int | None:
        return self.progress.decay_from

    def steps(self) -> Iterator[int]:
        """The steps still to do, from 1.

        Raises:
            KeyboardInterrupt: the run was asked to end.
            RecordError: the folder is no longer this process's own.
        """
        total = self.run.config.train.steps
        if self.progress.owes_evaluation:
            self.evaluate_if_due(self.progress.step)
        while self.progress.step < (self.progress.stop_step or total):
            if self.interrupt.due():
                raise KeyboardInterrupt
            self._check_lock()
            yield self.progress.step + 1

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Times a step; one that was left before its updates has taken no prompts."""
        started = time.perf_counter()
        before, self._version = self.run.source.state_dict(), self.progress.updates
        try:
            yield
        except KeyboardInterrupt:
            self.run.source.load_state_dict(before)
            raise
        self.progress.step = step
        self._step_seconds = time.perf_counter() - started
        self.progress.seconds += self._step_seconds

    def updated(self, done: Updated, batch: Batch, step: int) -> None:
        """Count an update, or a refused one, and stop after too many of those.

        Raises:
            TrainingError: too many refused updates in a row.
        """
        progress, train = self.progress, self.run.config.train
        progress.updates += 1
        progress.idle_updates += done.idle
        if done.applied:
            progress.bad_updates = 0
            progress.tokens_trained += done.tokens
            return
        progress.bad_updates += 1
        progress.skipped_updates += 1
        parts = gathered(self._bad_batch(done, batch, step))
        named = [part for part, rows in parts if rows]  # of others all rows are only suspects
        told = "; ".join(named or [part for part, _ in parts])
        self.recorder.warning(
            "refused_update", f"step {step}: update refused, {done.reason}; {told}"
        )
        if progress.bad_updates >= train.max_bad_updates:
            raise TrainingError(
                f"{progress.bad_updates} updates in a row were refused, the last because "
                f"{done.reason}. Look at {told} in {self.folder}, then start a new run with a "
                f"lower {self._learning_rates(done.broken)} or train.max_grad_norm."
            )

    def _bad_batch(self, done: Updated, batch: Batch, step: int) -> tuple[str, bool]:
        """Keep this process's part of a refused batch: which rows and file; whether it knows."""
        rows = bad_rows(batch, self.run.policy)
        name = bad_batch_name(step, self.progress.updates, rank())
        try:
            save_bad_batch(self.folder / name, batch, done.reason, rows)
        except (OSError, RuntimeError) as error:  # torch reports a full disk as RuntimeError
            told = f"{describe_rows(batch, rows)} ({name} could not be written: {error})"
            return told, bool(rows)
        return f"{describe_rows(batch, rows)} of {name}", bool(rows)

    def record(self, step: int, sampled: Sampled, pool: Pool) -> None:
        """One line of metrics, and some completions to read."""
        progress, run = self.progress, self.run
        seen = sampled.pool.over_processes()
        counts = {
            "tokens/prompt": sampled.tokens_prompt,
            "tokens/generated": sampled.tokens_generated,
            "tokens/wasted": sampled.tokens_wasted,
            "completions": sampled.completions,
            "flops": step_flops(run, self._costs, sampled),
        }
        parts = gathered((counts, sampled.rewards))
        counts = {name: sum(values) for name, values in _columns([c for c, _ in parts]).items()}
        rewards = [reward for _, part in parts for reward in part]
        metrics = reward_metrics(seen, rewards, progress.reasons)
        metrics |= value_metrics(pool.means())
        progress.tokens_generated += int(counts["tokens/generated"])
        progress.tokens_wasted += int(counts["tokens/wasted"])
        progress.completions += int(counts["completions"])
        progress.flops += counts.pop("flops")
        trained = progress.tokens_trained - self._trained_before
        self._trained_before = progress.tokens_trained
        phases = run.timer.drain()
        for name, seconds in phases.items():
            progress.phases[name] = progress.phases.get(name, 0.0) + seconds
        metrics |= counts
        metrics |= {
            "tokens/trained": trained,
            "tokens/sampled_total": progress.tokens_generated,
            "tokens/trained_total": progress.tokens_trained,
            "completions_total": progress.completions,
            "skipped_updates": progress.skipped_updates,
            "empty_batch": float(sampled.batch is None),
            "flops": progress.flops,
            "seconds/step": self._step_seconds,
            "seconds/total": progress.seconds,
            "tokens_per_second": (counts["tokens/generated"] or trained) / self._step_seconds,
        }
        metrics |= {f"seconds/{name}": seconds for name, seconds in phases.items()}
        metrics |= {f"state/{name}": value for name, value in run.models.state.items()}
        metrics |= self.memory.drain()
        self.components = bytes_by_component(self.run)  # a dead batch made no optimizer states
        self._warn(metrics)
        self.recorder.step(step, progress.updates, metrics)
        wanted = self.recorder.rollouts_wanted(step)
        if wanted and sampled.batch is not None and sampled.batch.rewards is not None:
            self.recorder.rollouts(step, list(rollout_rows(run, sampled, wanted, self._version)))

    def evaluate_if_due(self, step: int) -> None:
        """Evaluate on schedule, and look whether the target of `train.stop_at` is reached."""
        self.progress.owes_evaluation = True  # until it is done, should it be interrupted
        every = self.run.config.evaluate.every
        stop = self.run.config.train.stop_at
        heldout = self.run.heldout
        reached = self.progress.decay_from is not None
        if stop.metric and heldout and not reached and step % stop.every == 0:
            with self.run.timer("evaluate"), self._quietly(), self.interrupt.at_once():
                value, unscored = self.run.evaluator.greedy_accuracy(heldout, stop.problems)
            if unscored:
                self.recorder.warning("unscored", unscored)
            if value is not None:
                self.recorder.display.accuracy(value)
            if value is not None and value >= stop.value:
                self.progress.decay_from = self.progress.updates
                last = min(step + stop.decay_steps, self.run.config.train.steps)
                self.progress.stop_step = last
        last = step >= (self.progress.stop_step or self.run.config.train.steps)
        if every and step % every == 0 and not last:
            self.evaluate()
        self.progress.owes_evaluation = False

    def checkpoint_if_due(self, step: int) -> None:
        every = self.run.config.train.checkpoint_every
        if every and step % every == 0:
            self.checkpoint()

    # evaluation ------------------------------------------------------------------------------

    def evaluate(self) -> None:
        """All sets, now; the best policy by the chosen metric is saved."""
        run, step = self.run, self.progress.step
        if self.progress.evaluated_at == step:
            return
        timed = run.timer("evaluate"), self.memory.phase("evaluate")
        with timed[0], timed[1], self._quietly(), self.interrupt.at_once():
            results = run.evaluator.evaluate(run.made, progress=self._task_progress)
        self.progress.evaluated_at = step
        common = {
            "updates": self.progress.updates,
            "tokens/sampled_total": self.progress.tokens_generated,
            "tokens/trained_total": self.progress.tokens_trained,
            "completions_total": self.progress.completions,
            "seconds/total": self.progress.seconds,
        }
        for result in results:
            self.recorder.evaluation(step, {**result.record, **common})
            self.recorder.eval_samples(step, result.samples)
            if result.unscored:
                self.recorder.warning("unscored", result.unscored)
        self._keep_best(results)

    @contextmanager
    def _quietly(self) -> Iterator[None]:
        """The engine holds the policy's present weights while evaluating."""
        if self.run.engine is not None:
            self.run.engine.sync(self.run.policy)
        yield

    def _task_progress(self, name: str, total: int) -> Callable[[int], None]:
        shown = self.recorder.display.task(f"evaluating {name}", total)
        advance = shown.__enter__()
        done = 0

        def step(n: int) -> None:
            nonlocal done
            n = min(n, total - done)  # of several processes the last may have fewer
            done += n
            advance(n)
            if done >= total:
                shown.__exit__(None, None, None)

        return step

    def _keep_best(self, results: list[Evaluated]) -> None:
        name, best = self.run.best_metric, self.progress.best
        found = [score_of(result.record, name) for result in results]
        value = next((value for value in found if value is not None), None)
        if value is None and results:
            self.recorder.warning(
                "best_metric",
                f"no evaluation has a number for {name}, so no best checkpoint is kept. Set "
                "evaluate.best_metric to one that evals.jsonl has.",
            )
        if value is not None and (best is None or better(value, best["value"], name)):
            self.progress.best = {"step": self.progress.step, "metric": name, "value": value}
            self._save("best")
            if is_main():
                write_json(self.folder / BEST, self.progress.best)

    def _save(self, name: str) -> None:
        """What the run makes, as a transformers folder; the old one stays until it is whole.

        The best policy of the last checkpoint stays until the next one: whoever resumes from it
        goes back to that one.
        """
        if is_main():
            temporary, target = self.folder / f".{name}.tmp", self.folder / name
            try:
                remove(temporary)
                if self.run.policy is None and self.progress.evaluated_at != self.progress.step:
                    self.run.made.forget()  # what an evaluation said was of earlier weights
                self.run.save(temporary)
                if name != "best":
                    record_hashes(temporary)
                else:
                    record_hashes(temporary, BEST, **(self.progress.best or {}))
                    if self._saved_best is not None and _best_in(target) == self._saved_best:
                        remove(self.folder / KEPT)
                        target.rename(self.folder / KEPT)
                remove(target)
                temporary.rename(target)
            except (OSError, RuntimeError, SafetensorError) as error:
                shutil.rmtree(temporary, ignore_errors=True)  # it holds the space that is missing
                if isinstance(error, RecordError):  # which says all that follows
                    raise
                raise RecordError(
                    f"{target} cannot be written: {error}. {way_out(error)}, then run the same "
                    "command again."
                ) from error
        barrier()

    # checkpoints -----------------------------------------------------------------------------

    def checkpoint(self) -> None:
        """Everything that the rest of the run depends on, at this step's end.

        Raises:
            TrainingError: weights that are not finite, which no later step could mend.
        """
        run = self.run
        self._check_weights()
        self._check_lock()
        with run.timer("checkpoint"):
            if is_main():
                tensors: dict[str, Any] = {}
                for name, trainable in run.trainables.items():
                    module = run.accelerator.unwrap_model(trainable.module)
                    tensors[name] = trained_state(module)
                    tensors[f"optimizer_{name}"] = trainable.optimizer.state_dict()
                save_checkpoint(
                    self.folder / "checkpoints",
                    self.progress.step,
                    tensors,
                    {
                        "progress": asdict(self.progress),
                        "source": run.source.state_dict(),
                        "algorithm": run.models.state,
                        "start_hash": run.start_hash,
                        "reward_hash": run.reward_hash,
                        "components": self.components,
                    },
                    offsets=self.recorder.offsets(),
                    hashes=self.recorder.hashes(),
                    config_hash=self.config_hash,
                    seed=run.config.seed,
                    before=self._saved,
                    keep=run.config.train.keep_checkpoints,
                )
            barrier()
        self._saved = [*(s for s in self._saved if s < self.progress.step), self.progress.step]
        self._saved_best = self.progress.best
        if is_main():
            with suppress(OSError):  # what may not be removed harms nobody
                remove(self.folder / KEPT)

    def _check_weights(self) -> None:
        for name, trainable in self.run.trainables.items():
            for key, weight in trainable.module.named_parameters():
                if not bool(torch.isfinite(weight).all()):
                    raise TrainingError(
                        f"after step {self.progress.step} the {name}'s weights {key} are not "
                        f"finite, so no checkpoint was written; the one before stays. Lower "
                        f"{self._learning_rates(name)} or train.max_grad_norm."
                    )

    def _learning_rates(self, broken: str) -> str:
        """The settings that move a part, with their values; of all parts where none is told."""
        train, policy = self.run.config.train, f"train.lr (now {self.run.config.train.lr})"
        if "critic" not in self.run.trainables or train.critic_lr is None:
            return policy
        critic = f"train.critic_lr (now {train.critic_lr})"
        return {"policy": policy, "critic": critic}.get(broken, f"{policy}, {critic}")

    def leave(self) -> str:
        """Save the last whole step of an interrupted run; a sentence that says where it stands."""
        step, total = self.progress.step, self.run.config.train.steps
        if step == 0:
            return "No step was done yet."
        if step not in self._saved:
            self.checkpoint()
        return f"Step {step} of {total} is saved in {self.folder / 'checkpoints'}."

    def _restore(self, checkpoint: Checkpoint) -> None:
        run, state = self.run, checkpoint.state
        if state["start_hash"] != run.start_hash:
            raise ResumeError(
                f"{checkpoint.folder} started from other weights (hash {state['start_hash']}, now "
                f"{run.start_hash}): the model at model.path changed. Restore it, or start anew "
                "with resume=never in another output folder."
            )
        if state.get("reward_hash", run.reward_hash) != run.reward_hash:
            raise ResumeError(
                f"{checkpoint.folder} was trained on another reward (hash {state['reward_hash']}, "
                f"now {run.reward_hash}): the reward model at reward.path changed. Restore it, or "
                "start anew with resume=never in another output folder."
            )
        rows = run.source.content_hash
        if state["source"].get("content_hash", rows) != rows:  # older versions kept none
            why = (
                "the training data, or the code that makes them, changed, or they come in another "
                "order, as what is taken from a set does"
            )
            if run.presampled is not None:
                why = (
                    f"the pairs or labels sampled for it are gone from {cache_folder() / 'pairs'} "
                    "and were sampled anew, or the reward or the data changed"
                )
            raise ResumeError(
                f"{checkpoint.folder} was trained on other rows (hash "
                f"{state['source']['content_hash']}, now {rows}): {why}. Restore them, or start "
                "anew with resume=never in another output folder."
            )
        for name, trainable in run.trainables.items():
            module = run.accelerator.unwrap_model(trainable.module)
            load_trained_state(module, checkpoint.load(name))
            trainable.optimizer.load_state_dict(checkpoint.load(f"optimizer_{name}"))
        self.progress = Progress(**state["progress"])
        self._saved = checkpoint.steps
        self._trained_before = self.progress.tokens_trained
        self.components = state["components"]
        run.source.load_state_dict(state["source"])
        run.models.state = dict(state["algorithm"])
        if run.engine is not None:
            run.engine.sync(run.policy)

    def _check_best(self) -> None:
        """Keep the best policy so far; one of steps that were thrown away makes room for it.

        Where it is gone or damaged the best is sought anew.
        """
        best, target, kept = self.progress.best, self.folder / "best", self.folder / KEPT
        places = (target, kept) if best and is_main() else ()
        there = from_main(next((place for place in places if _best_in(place, True) == best), None))
        if best and there is None:
            self.recorder.warning(
                "best_gone",
                f"{target}, the best policy so far ({best['metric']} {best['value']:.4g} at step "
                f"{best['step']}), is gone or damaged: the best from here on is kept in its place.",
            )
            self.progress.best = None
        self._saved_best = self.progress.best
        if not is_main():
            return
        if there != target:
            remove(target)
        if there == kept:
            kept.rename(target)
        remove(kept)
        remove(self.folder / ".best.tmp")  # half written, or of steps that were thrown away
        if there:
            write_json(self.folder / BEST, best or {})
        else:
            remove(self.folder / BEST)

    def _count_presampled(self) -> None:
        """Own samples that became pairs cost what they cost, in this run's budget."""
        made = self.run.presampled
        assert made is not None
        self.progress.tokens_generated = made.tokens_generated
        self.progress.completions = made.completions
        self.progress.seconds = made.seconds
        self.progress.phases["pairs"] = made.seconds
        if made.failed:
            self.recorder.warning(
                "reward_failed",
                f"the reward failed on {made.failed} of the {made.completions} completions that "
                "were sampled for training, which are left out (train.reward_on_error=abstain).",
            )
        if made.unscored > made.completions / 2:
            self.recorder.warning(
                "abstained",
                f"the reward could not score {made.unscored} of the {made.completions} completions "
                "that were sampled for training, which are left out.",
            )
        if is_main():
            lengths = [made.tokens_generated], [made.tokens_prompt]
            self.progress.flops = float(
                self._costs["policy"].forward([1], 1) * (lengths[0][0] + lengths[1][0])
            )

    # the end ---------------------------------------------------------------------------------

    def finish(self) -> dict[str, Any]:
        """Last evaluation and checkpoint, what was made, memory.json, and the summary."""
        evaluate = self.run.config.evaluate
        if evaluate.last or (evaluate.first and self.progress.step == 0):
            self.evaluate()
        self.checkpoint()
        self._save(self.run.role)
        record = {
            **self.memory.record(),
            "components": self.components or bytes_by_component(self.run),
        }
        summary: dict[str, Any] = {}
        if is_main():
            summary = summarize(self.run, self.progress, self.folder, self.config_hash, record)
        started = time.perf_counter()
        if probes := self._probe():
            summary["memory"] = {"size": sizes(record["components"]), **probes[-1]}
            summary.get("seconds", {})["probe"] = time.perf_counter() - started
        self._check_lock()
        self.recorder.memory({**record, "probes": probes})
        self.recorder.summary(summary)
        self.interrupt.finished = True
        self.recorder.display.message(self._last_words(summary) if is_main() else "")
        return from_main(summary)

    def _probe(self) -> list[Peaks]:
        """Metered steps, now that nothing can be spoilt; a table is not worth a finished run."""
        if not self.run.config.measure.memory or self.progress.step == 0:
            return []
        try:
            with self.interrupt.at_once():
                return probe(self.run, cold=self._step_seconds == 0)
        except Exception as error:
            if world_size() > 1:  # the others wait in the middle of it
                raise
            self.recorder.warning(
                "memory_probe",
                f"the memory table is missing: its steps ended in {type(error).__name__}: {error}. "
                "measure.memory=false leaves them out.",
            )
            return []

    def _last_words(self, summary: Mapping[str, Any]) -> str:
        """What changed on the held-out problems, the memory table, and where everything is."""
        words = []
        before, after = (summary[k].get(self.run.heldout_name, {}) for k in ("first", "final"))
        for key in ("accuracy", "greedy"):
            if after.get(key) is not None:
                moved = before.get("step") != after.get("step") and before.get(key) is not None
                start = f"{before[key]:.3f} → " if moved else ""
                words.append(f"{key} {start}{after[key]:.3f}")
        seconds = summary["seconds"]["total"]
        words.append(f"{summary['steps']} steps in {seconds:.0f} s of training")
        judged = "held-out " if len(words) > 1 else ""
        table = f"{text(summary['memory'])}\n" if "memory" in summary else ""
        refused, idle = self.progress.skipped_updates, self.progress.idle_updates
        if summary["steps"] and refused + idle == summary["updates"]:
            why = f"all {refused} were refused" if refused else "no step carried a signal"
            why = f"{refused} were refused, {idle} without a signal" if refused and idle else why
            judged = f"without one update of the weights ({why}), {judged}"
        return f"finished: {judged}{', '.join(words)}\n{table}{self.folder}"

    def _warn(self, metrics: Mapping[str, float]) -> None:
        truncated = metrics.get("truncated", 0.0)
        if truncated > 0.5:
            self.recorder.warning(
                "truncated",
                f"{truncated:.0%} of the completions were cut at "
                f"{self.run.max_completion_length} new tokens. A cut answer cannot be right: raise "
                "rollout.max_new_tokens.",
            )
        timeouts = metrics.get("reason/timeout", 0.0)
        if timeouts > 0.05:
            self.recorder.warning(
                "reward_timeout", f"{timeouts:.0%} of the verdicts ran into their time limit."
            )
        failed = metrics.get("reward/failed", 0.0)
        if failed:
            self.recorder.warning(
                "reward_failed",
                f"the reward failed on {failed:.1%} of the completions, which are left unscored "
                f"(train.reward_on_error=abstain); rollouts.jsonl gives them the reason {FAILED}.",
            )
        abstained = metrics.get("reward/abstained", 0.0)
        if abstained > 0.5:
            self.recorder.warning(
                "abstained",
                f"the reward could not score {abstained:.0%} of the completions, which are left "
                "out of training. Read their reasons in rollouts.jsonl.",
            )
        idle = [value for name, value in metrics.items() if name.startswith("idle_updates/")]
        if metrics.get("empty_batch") or (idle and min(idle) == 1):
            self.recorder.warning(
                "empty_batch", "no group carried a signal, so the step changed no weights."
            )


def _best_in(folder: Path, unaltered: bool = False) -> dict[str, Any] | None:
    """Which best policy is in a folder; None where its weights, or that, cannot be read.

    Args:
        unaltered: None, too, where its weights or settings are not those whose hashes were saved.
    """
    # Older versions told it only beside the folder.
    file = next((p for p in (folder / BEST, folder.parent / BEST) if p.exists()), None)
    try:
        found = json.loads(file.read_text(encoding="utf-8")) if file else None
        if not isinstance(found, dict) or not _has_weights(folder):
            return None
        hashes = found.pop("sha256", None) or {}  # older versions kept none
        model = {name: known for name, known in hashes.items() if name not in TOKENS}
        return None if unaltered and model != hashes_of(folder, model) else found
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def _has_weights(folder: Path) -> bool:
    """Whether there are weights in a saved policy's folder, and all files of them are whole."""
    files = list(folder.glob("*.safetensors"))
    try:
        for file in files:
            with safe_open(file, "pt"):  # compares the length with the header's
                pass
    except (OSError, SafetensorError):
        return False
    return bool(files)


def _columns(rows: list[dict[str, float]]) -> dict[str, list[float]]:
    return {name: [row[name] for row in rows] for name in rows[0]}
