"""One run from its configuration to its summary, resumed where it was stopped."""

from __future__ import annotations

import contextlib
import json
import os
import traceback
from pathlib import Path
from typing import Any

from zoo.claim import announce, claim
from zoo.config import ConfigError, Resume, RunConfig
from zoo.instantiate import complete, config_hash, resolved, run_dir, run_name
from zoo.train.inputs import (
    RECORD,
    altered,
    check_alike,
    come_and_gone,
    follow_code,
    outdated,
    record,
    unlike_siblings,
)
from zoo.train.lock import FolderLock


def run(config: RunConfig) -> dict[str, Any]:
    """Train one run and return its summary; a finished one is returned as it is.

    Everything is in the run's folder, `outputs/<experiment>/<name>/seed_<n>/`. A run that was
    stopped at any moment goes on from its last good checkpoint.

    Args:
        config: groups may hold instances or mappings with `_target_`.
    Raises:
        ConfigError: a configuration or a folder that cannot be used, before any weight loads.
        TrainingError: training went wrong beyond repair.
    """
    config = complete(config)
    # Not Path.resolve, to which a link in a circle is a fault of the program.
    folder, identity = Path(os.path.realpath(run_dir(config))), config_hash(config)
    announce(folder)
    summary = finished(folder, identity, config)
    if summary is not None:
        from zoo.measure.progress import display

        gone = "" if _made(folder) else " (what it made is gone; delete the folder to train anew)"
        told = display(0, "", enabled=False)
        if other := come_and_gone(folder, config):
            told.message(
                f"warning: since this run began, {other}. Its results are of the files as they "
                "were; another name or output trains on those of now."
            )
        told.message(f"finished already: {folder}{gone}")
        return summary

    from zoo.build import check, make_accelerator, output_folder
    from zoo.distributed import done_by_main, is_main
    from zoo.measure.files import RecordError

    accelerator = make_accelerator(config)
    check(config)
    known = {"the configuration": identity, "the seed": config.seed, "the folder": folder}
    check_alike(config, known)
    lock = FolderLock(output_folder(folder))

    def begin() -> dict[str, Any] | None:
        lock.acquire()
        return finished(folder, identity, config)  # another process may have run meanwhile

    try:
        summary = done_by_main(begin)
        if summary is None:
            claim(folder, tell=is_main())
    except BaseException:
        lock.release()
        raise
    try:
        return summary or _train(config, folder, identity, accelerator, lock)
    except KeyboardInterrupt as stop:
        if config.resume is Resume.never:
            raise KeyboardInterrupt(f"{stop} It goes on with resume=auto.".strip()) from None
        raise
    except BaseException:
        if is_main():
            # A full disk, or a text that no file can hold, must not hide what went wrong.
            with contextlib.suppress(OSError, ValueError, RecordError):
                lock.check()  # the folder may be another run's by now
                (folder / "error.txt").write_text(
                    traceback.format_exc(), encoding="utf-8", errors="backslashreplace"
                )
        raise
    finally:
        lock.release()


def _unread(what: str, folder: Path) -> str:
    """What to do where a file lies in a folder that a setting names, and no run reads it."""
    inside = ": " in what
    return f" Where the run does not read it, delete {folder / RECORD}." if inside else ""


def finished(folder: Path, identity: str, config: RunConfig) -> dict[str, Any] | None:
    """The summary of a finished run in this folder, or None.

    One whose policy is gone is none where a checkpoint is left, whose resume writes it again.

    A run that ended before it recorded a step or an evaluation is none either: whatever comes takes
    its place.

    Raises:
        ConfigError: the folder holds a run of another configuration, one made from files or code
            that changed since, a damaged record, or a run where resume=never.
    """
    known = folder / "meta.json"
    if known.exists() and _began(folder):
        facts = _facts(known, _ANEW)
        found = facts.get("config_hash")
        if found != identity:
            raise ConfigError(
                f"{folder} holds a run of another configuration (hash {found}, this one has "
                f"{identity}). Choose another name or output, or delete the folder."
            )
        if facts.get("seed", config.seed) != config.seed:
            raise ConfigError(
                f"{folder} holds a run of seed {facts['seed']}, not of seed {config.seed}: it was "
                "copied or renamed. Give it its name back, or delete it."
            )
        if config.resume is Resume.never:
            raise ConfigError(
                f"{folder} holds a run and resume=never. Use resume=auto to go on, another seed, "
                "name or output, or delete the folder."
            )
    summary = folder / "summary.json"
    if known.exists() and summary.exists():
        found = altered(folder, config)
        for what, hashes in {**found["files"], **found["code"]}.items():
            raise ConfigError(
                f"{folder} holds a finished run of what {what} was before it changed (hash "
                f"{hashes}). Choose another name or output for a run of what it is now, or delete "
                f"the folder.{_unread(what, folder)}"
            )
        facts = _facts(summary, _ANEW)
        wanted = {"status": "finished", "config_hash": identity, "seed": config.seed}
        for key, value in wanted.items():
            if facts.get(key) != value:
                raise ConfigError(
                    f"{summary} is not of this run: its {key} is {facts.get(key)!r}, not "
                    f"{value!r}. {_ANEW}"
                )
        if not _made(folder) and any(folder.glob("checkpoints/step_*")):
            return None
        _mend_config(folder / "config.yaml", config)
        return facts
    return None


def _began(folder: Path) -> bool:
    """Whether there is more of a run than what one leaves that was refused as it began."""
    from zoo.measure.recorder import EVALS, METRICS

    lines = (folder / name for name in (METRICS, EVALS))
    if any(os.path.lexists(path) and (not path.is_file() or path.stat().st_size) for path in lines):
        return True
    kept = ("summary.json", "checkpoints/*", "*/*.safetensors", "bad_batch*")
    return any(any(folder.glob(name)) for name in kept)


_ANEW = "Delete it: the same command writes it anew."


def _mend_config(path: Path, config: RunConfig) -> None:
    """Writes the configuration of a finished run again where it is lost: reports start from it."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    from zoo.measure.files import RecordError, write_text

    # Whatever is in its place may be of any kind, and the folder one that nobody may write to.
    with contextlib.suppress(OSError, OmegaConfBaseException, YAMLError, ValueError):
        if OmegaConf.is_dict(found := OmegaConf.load(path)) and found:
            return
    with contextlib.suppress(RecordError):
        write_text(path, OmegaConf.to_yaml(OmegaConf.create(resolved(config))))


def _made(folder: Path) -> bool:
    """Whether the weights that a finished run saved at its end are still there."""
    found = {path.parent.name for path in folder.glob("*/*.safetensors")}
    return any(name != "best" and not name.startswith(".") for name in found)


def _facts(path: Path, way_out: str) -> dict[str, Any]:
    """The object in a JSON file of the run."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError("no object")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is damaged ({error}). {way_out}") from None
    return found


def _train(
    config: RunConfig, folder: Path, identity: str, accelerator: Any, lock: FolderLock
) -> dict[str, Any]:
    from omegaconf import OmegaConf

    from zoo.build import build
    from zoo.distributed import is_main, world_size
    from zoo.measure.files import read_lines, remove, write_text
    from zoo.measure.memory import PhaseMemory
    from zoo.measure.provenance import meta
    from zoo.measure.recorder import WARNINGS, Recorder, offsets_problem
    from zoo.train.checkpoint import last_good_checkpoint
    from zoo.train.interrupt import Interrupt
    from zoo.train.loop import train
    from zoo.train.session import Session

    place = folder / "checkpoints"
    if os.path.lexists(place) and not place.is_dir():  # also a link that leads nowhere
        raise ConfigError(
            f"{place} is no folder, so no checkpoint could be written. Delete what is in its place."
        )
    checkpoint, refused = last_good_checkpoint(
        place,
        identity,
        config.seed,
        lambda manifest: offsets_problem(folder, manifest),
    )
    if checkpoint is None and refused:  # to start anew in its place would lose what is there
        reasons = "".join(f"\n  {line.replace(f'{folder}/', '')}" for line in refused[:2])
        reasons += "\n  …" if len(refused) > 2 else ""
        raise ConfigError(
            f"{folder} has checkpoints, but no good one, so the run cannot go on:{reasons}\n"
            "Restore what they lack from a copy, or start anew: with another name or output, or "
            "here, by moving checkpoints/ away (the records are then written anew)."
        )
    if checkpoint is None and config.resume is Resume.must:
        raise ConfigError(
            f"resume=must, but {folder} has no good checkpoint. Use resume=auto to start anew."
        )
    found = altered(folder, config) if checkpoint else {"files": {}, "code": {}}
    for what, hashes in found["files"].items():
        raise ConfigError(
            f"{folder} stopped at step {checkpoint.step if checkpoint else 0}, and {what} changed "
            f"since it began (hash {hashes}). Restore it to go on, or choose another name or "
            f"output, or delete the folder, to start anew.{_unread(what, folder)}"
        )
    changed, unlike, made_of, older = {}, "", {}, []
    if is_main():
        made_of, older = record(config), outdated(config)  # before any of the user's code has run
        # Before the first step of new code: what a checkpoint is of must be in the record.
        if checkpoint is not None:
            changed = follow_code(folder, config)
        else:
            unlike = unlike_siblings(run_dir(config), identity, made_of)
            write_text(folder / RECORD, json.dumps(made_of, indent=1))
        write_text(folder / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(resolved(config))))
        for error in (folder / "error.txt", *folder.glob("error.rank*.txt")):
            remove(error)
    name = run_name(config, identity)
    facts = {
        **meta(str(accelerator.device)),
        "name": name,
        "config_hash": identity,
        "seed": config.seed,
        "n_processes": world_size(),
    }
    memory = PhaseMemory(accelerator.device)
    recorder = Recorder(
        folder,
        config=config.measure,
        meta=facts,
        resume_offsets=checkpoint.manifest["offsets"] if checkpoint else None,
        is_main=is_main(),
        total_steps=config.train.steps,
        title=f"{config.experiment}/{name}/seed_{config.seed}",
        group=name,
    )
    status, session = 1, None
    with Interrupt() as interrupt:
        try:
            for line in refused:
                recorder.warning("checkpoint_refused", f"not used: {line}")
            if unlike:
                recorder.warning(
                    "other_inputs",
                    f"runs beside this one were made of another {unlike}: they are no seeds of one "
                    "arm",
                )
            # To resume cuts off warnings behind the checkpoint; those before it are there.
            told = [line["message"] for line in read_lines(folder / WARNINGS)] if changed else []
            for what, hashes in changed.items():  # mended after an error, say
                message = (
                    f"the code of {what} changed since this run began (hashes {hashes}): steps "
                    "before may be of the older"
                )
                if message not in told:
                    recorder.warning("code_changed", message)
            for file in older:
                recorder.warning(
                    "stale_code",
                    f"{file} was edited after this process had imported it: the older code runs, "
                    "and is recorded. For the new one restart Python, or reload the module "
                    "(importlib.reload), and give the run another name",
                )
            with memory.phase("load"):
                parts = build(config, accelerator, recorder.display.task)
            session = Session(
                parts, folder, recorder, memory, identity, checkpoint, interrupt, lock.check
            )
            interrupt.begin()
            if checkpoint is None:  # a resumed run has them among its warnings
                for kind, message in parts.notes:
                    recorder.warning(kind, message)
            if checkpoint is not None:
                recorder.display.message(f"resumed from step {session.progress.step} of {folder}")
                if is_main() and not (folder / RECORD).exists():  # deleted; what there is will do
                    write_text(folder / RECORD, json.dumps(made_of, indent=1))
            elif config.evaluate.first:
                session.evaluate()
            train(parts, session)
            summary = session.finish()
            status = 0
            return summary
        except KeyboardInterrupt:
            if interrupt.killed or not interrupt.asked:
                raise
            words = session.leave() if session is not None else "No step was done yet."
            raise KeyboardInterrupt(words) from None
        finally:
            recorder.close(status)
