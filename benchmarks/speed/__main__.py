"""zoo beside TRL and transformers on the same work: python -m benchmarks.speed.

    python -m benchmarks.speed.peers            # once: TRL in an environment of its own
    python -m benchmarks.speed [--only CONTEST …] [--steps 5] [--out results/speed]
        [--peers FOLDER | --no-peers] [--model FOLDER] [--prompts FILE] [--threads N] [--anyway]

Contests are held one after the other, each with its record in OUT/records; those that are there
are not held again (delete them to start anew), so the command goes on where it was stopped. The
page, table and chart are made from all records. Other work on the machine makes it refuse, or
with --anyway note that the figures are not to be judged; without it such a contest is held again.
So is one with fewer steps than asked for, or whose record does not show that the work was the same.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.speed.contests import (
    BUSY,
    CONTESTS,
    REPOSITORY,
    Died,
    Place,
    hold,
    waited_until_quiet,
)
from benchmarks.speed.peers import OLDER, TRL, default_folder, older_of, python_of
from benchmarks.speed.records import check, check_search
from benchmarks.speed.table import Judged, disturbed, lacking, table, write
from benchmarks.speed.workloads import W1, W2, Workload, prepare
from zoo.measure.files import write_text
from zoo.measure.provenance import meta
from zoo.models.loading import cache_folder


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0 when every bar is met, 1 when one is missed or not judged, 2 on refusal."""
    options = _options(arguments)
    place = Place(
        cache_folder() / "speed", python_of(options.peers), older_of(options.peers), options.threads
    )
    unknown = [name for name in options.only if name not in _names()]
    if unknown:
        return _refuse(f"no contest {unknown[0]!r}: there are {', '.join(_names())}.")
    if not place.peers.exists() and not options.no_peers:
        return _refuse(
            f"no TRL in {options.peers}: run `python -m benchmarks.speed.peers` first, or say "
            "--no-peers."
        )
    print(f"load average before: {', '.join(f'{x:.2f}' for x in os.getloadavg())}", flush=True)
    import torch

    torch.set_num_threads(options.threads)
    records_folder = options.out / "records"
    try:
        records_folder.mkdir(parents=True, exist_ok=True)
        _read(records_folder)
        for workload in _needed(options.only):
            prepare(workload, place.folder, options.model, options.prompts)
    except (OSError, ValueError) as error:
        return _refuse(str(error))
    for name in options.only or _names():
        if not _held_before(name, _read(records_folder), options):
            share = waited_until_quiet()
            if share > BUSY and not options.anyway:
                return _refuse(
                    f"other work uses {share:.0%} of this machine, so nothing would be comparable. "
                    "Stop it and give the command again, or say --anyway."
                )
            print(f"{name}", flush=True)
            try:
                record = _held(name, place, options, _read(records_folder))
            except Died as problem:
                print(f"    failed: {problem}", file=sys.stderr, flush=True)
                continue
            quiet = share <= BUSY and record.get("others", 0) <= BUSY
            record |= {"judged": quiet, **_facts(options)}
            path = records_folder / f"{name}.json"
            write_text(path, json.dumps(record, indent=1) + "\n")
            _write(records_folder, options.out)
    bars = _write(records_folder, options.out)
    print(table(bars))
    failed = [n for n in options.only or _names() if not (records_folder / f"{n}.json").exists()]
    if failed:
        return _refuse(f"not held: {', '.join(failed)}.")
    return 0 if all(bar.met for bar in bars) else 1


def _write(folder: Path, out: Path) -> list[Judged]:
    """Page, table and chart of all records; the bars."""
    records = _read(folder)
    return write(records, _origin(records), out) if records else []


def _needed(names: Sequence[str]) -> list[Workload]:
    """The workloads of some contests, or of all."""
    used = {one.workload for one in CONTESTS if not names or one.name in names}
    return [w for w in (W1, W2) if "checks" in names or w.name in used]


def _held_before(name: str, records: dict[str, Any], options: argparse.Namespace) -> bool:
    """Whether there is a record that can be judged of all that were to take part."""
    contest = next((one for one in CONTESTS if one.name == name), None)
    record = records.get(name)
    if record is None or (disturbed(record) and not options.anyway):
        return False
    if lacking(name, record, options.steps, peers=not options.no_peers):
        return False
    if contest is None or options.no_peers or not contest.peers:
        return True
    if record.get("search_of", "") not in ("", contest.searched):
        return False
    return set(contest.sides) <= set(record["contenders"])


def _held(
    name: str, place: Place, options: argparse.Namespace, records: dict[str, Any]
) -> dict[str, Any]:
    if name != "checks":
        contest = next(one for one in CONTESTS if one.name == name)
        contest = replace(contest, peers=()) if options.no_peers else contest
        found = options.out / "records" / f"{name}.search.json"
        return hold(contest, place, options.steps, records, found)
    models = [str(place.folder / workload.name / "model") for workload in (W1, W2)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.speed.checks", *models],
        capture_output=True, text=True, cwd=REPOSITORY, env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    if done.returncode:
        raise Died(done.stderr[-2000:])
    return {"contest": name, "load": round(os.getloadavg()[0], 2), **json.loads(done.stdout)}


def _names() -> list[str]:
    return ["checks", *(contest.name for contest in CONTESTS)]


def _read(folder: Path) -> dict[str, Any]:
    """The records of a folder, in the order of the contests.

    Raises:
        ValueError: a record or a search is damaged; file and field are named.
    """
    found = {}
    for name in _names():
        for path in (folder / f"{name}.json", folder / f"{name}.search.json"):
            if not path.exists():
                continue
            try:
                read = json.loads(path.read_text(encoding="utf-8"))
                if path.suffixes == [".json"]:
                    check(name, read)
                    found[name] = read
                else:
                    check_search(read)
            except (OSError, ValueError, RecursionError) as error:
                raise ValueError(
                    f"{path} is no record ({error}). Delete it: the command, without --only or "
                    f"with --only {name}, makes it again."
                ) from error
    return found


def _facts(options: argparse.Namespace) -> dict[str, Any]:
    found = meta()
    machine = found["machine"]
    return {
        "command": shlex.join(["python", "-m", "benchmarks.speed", *_told(options)]),
        "machine": f"{machine['cpu']}, {machine['cores']} cores, {machine['system']}",
        "versions": ", ".join(f"{k} {v}" for k, v in found["versions"].items()),
        **{key: found[key] for key in ("commit", "dirty", "started")},
    }


def _origin(records: dict[str, Any]) -> dict[str, Any]:
    """Commits, machines and versions of the records, the distinct ones of each."""

    def distinct(key: str) -> list[str]:
        return sorted({str(record[key]) for record in records.values()})

    return {
        "commit": ", ".join(distinct("commit")),
        "dirty": any(record["dirty"] for record in records.values()),
        "machines": distinct("machine"),
        "versions": distinct("versions"),
        "peers": f"{TRL} ({OLDER} for PPO)",
        "not_judged": [name for name, record in records.items() if not record["judged"]],
    }


def _told(options: argparse.Namespace) -> list[str]:
    """The command line without paths of this machine."""
    words = [f"--steps={options.steps}"] if options.steps != 5 else []
    words += ["--threads", str(options.threads)] if options.threads != os.cpu_count() else []
    words += ["--no-peers"] if options.no_peers else []
    return words + (["--anyway"] if options.anyway else [])


def _refuse(message: str) -> int:
    print(message, file=sys.stderr)
    return 2


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    shared = Path(os.environ.get("ZOO_SHARED", REPOSITORY.parent / "shared"))
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.speed",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", nargs="+", default=[], help=f"of {', '.join(_names())}")
    parser.add_argument("--steps", type=_count, default=5, help="timed steps of each contender")
    parser.add_argument("--out", type=Path, default=Path("results/speed"))
    parser.add_argument("--peers", type=Path, default=default_folder())
    parser.add_argument("--no-peers", action="store_true", help="zoo and transformers alone")
    parser.add_argument("--model", type=Path, default=cache_folder() / "models" / "smollm2_135m")
    parser.add_argument("--prompts", type=Path, default=shared / "data" / "gsm8k" / "train.jsonl")
    parser.add_argument("--threads", type=_count, default=os.cpu_count() or 1)
    parser.add_argument("--anyway", action="store_true", help="measure beside other work")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
