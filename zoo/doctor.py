"""`zoo doctor`: does this installation work, and does every algorithm on it keep the contract?

    zoo doctor                    # all algorithms, about two seconds each
    zoo doctor grpo mine          # these
    zoo doctor --full             # one process against two as well

An algorithm is whatever hydra's search path offers in the group `algorithm`: zoo's own, those of a
folder (`--config-dir`), and those of installed packages with an entry point in `zoo.conf`. The exit
status is 1 if an algorithm breaks a clause or the installation cannot train.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from zoo.cli import Parser
from zoo.config import ConfigError


class Mark(StrEnum):
    good = "ok"
    note = "note"  # works without it; what is lost is said
    bad = "BAD"


STYLES = {Mark.good: "green", Mark.note: "yellow", Mark.bad: "bold red"}


@dataclass(frozen=True)
class Finding:
    """One line about the installation."""

    what: str
    mark: Mark
    detail: str


def main(argv: Sequence[str] | None = None) -> int:
    """`zoo doctor [--full] [--config-dir DIR] [algorithm …]`; 1 if anything is broken."""
    from zoo.compose import FOLDERS, check_config_dir, more_folders

    options = _parser().parse_args(list(sys.argv[1:] if argv is None else argv))
    for folder in options.config_dir or ():
        check_config_dir(folder)
    if options.config_dir:
        # Absolute, since what follows may change the working directory.
        more = [str(Path(folder).absolute()) for folder in options.config_dir]
        before = os.environ.get(FOLDERS, "")
        os.environ[FOLDERS] = os.pathsep.join([*more, *([before] if before else [])])
        more_folders()  # a folder that does not exist is refused before anything is checked
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 110)
    # First, so that a mistaken name is told at once.
    found = {} if options.installation_only else installed_algorithms(options.names)
    findings = [] if options.algorithms_only else list(installation())
    if findings:
        console.print(_installation_table(findings))
    sick = any(finding.mark is Mark.bad for finding in findings)
    if options.installation_only:
        return int(sick)
    return int(_algorithms(found, options.full, console) or sick)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="zoo doctor",
        description="Check this installation, and the contract of every algorithm found.",
    )
    parser.add_argument("names", nargs="*", metavar="algorithm", help="only these (default: all)")
    parser.add_argument("--full", action="store_true", help="also compare one process with two")
    parser.add_argument(
        "--config-dir",
        action="append",
        metavar="DIR",
        help="a folder of options of your own, with algorithm/NAME.yaml in it",
    )
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--installation-only", action="store_true", help="no algorithms")
    only.add_argument("--algorithms-only", action="store_true", help="no installation")
    return parser


# algorithms --------------------------------------------------------------------------------------


def installed_algorithms(names: Sequence[str] = ()) -> dict[str, Any]:
    """name → the algorithm as its option configures it, or the error that building it gave.

    Raises:
        ConfigError: one of `names` is not on the search path.
    """
    from zoo.compose import (
        compose_here,
        hydra_session,
        options,
        put_working_directory_on_path,
        translated,
    )
    from zoo.instantiate import build, did_you_mean, plain

    put_working_directory_on_path()
    found: dict[str, Any] = {}
    with hydra_session():
        there = [option.name for option in options("algorithm")]
        for name in names:
            if name not in there:
                raise ConfigError(
                    f"there is no algorithm {name!r}.{did_you_mean(name, there)} "
                    f"Known: {', '.join(there)}."
                )
        for name in names or there:
            try:
                overrides = [f"algorithm={name}"]
                with translated(overrides):  # reading a value is what finds a wrong ${…}
                    node = plain(compose_here(overrides).get("algorithm"))
                found[name] = build(node, "algorithm")
            except ConfigError as error:
                found[name] = error
    return found


def _algorithms(found: dict[str, Any], full: bool, console: Console) -> bool:
    """Checks and prints; whether anything is broken."""
    from zoo.contract import Report, check_algorithms

    sound = {name: each for name, each in found.items() if not isinstance(each, ConfigError)}
    started, total = time.perf_counter(), len(sound)
    done = 0

    def progress(report: Report) -> None:
        nonlocal done
        done += 1
        if console.is_terminal:
            console.print(f"[dim]{done}/{total} {report.algorithm}[/]", end="\r")

    reports = check_algorithms(list(sound.values()), full=full, progress=progress)
    table = Table(title="Algorithms", show_edge=False, title_justify="left")
    for column in ("algorithm", "contract", "holds", "skipped", "seconds"):
        table.add_column(column, justify="right" if column in ("holds", "skipped") else "left")
    broken: list[tuple[str, list[tuple[str, str]]]] = []
    for name, error in found.items():
        if isinstance(error, ConfigError):
            table.add_row(name, Text("cannot be built", style=STYLES[Mark.bad]))
            broken.append((name, [("its option", str(error))]))
    for name, report in zip(sound, reports, strict=True):
        held = sum(clause.passed and not clause.skipped for clause in report.clauses)
        skipped = sum(clause.skipped for clause in report.clauses)
        verdict = Text("ok", style=STYLES[Mark.good])
        if not report.passed:
            verdict = Text(f"broken: {', '.join(report.broken)}", style=STYLES[Mark.bad])
            details = [(c.name, c.detail) for c in report.clauses if not c.passed]
            broken.append((name, details))
        table.add_row(name, verdict, str(held), str(skipped), f"{report.seconds:.1f}")
    console.print(table)
    for name, clauses in broken:
        for clause, detail in clauses:
            console.print(Text.assemble((f"{name}, {clause}: ", "bold"), detail))
    sick = len(broken)
    seconds = time.perf_counter() - started
    console.print(
        f"{len(found) - sick} of {len(found)} algorithms keep the contract ({seconds:.0f} s)."
        + (" The clauses are described in zoo/contract.py." if sick else "")
    )
    return bool(sick)


# installation ------------------------------------------------------------------------------------


def installation() -> Iterator[Finding]:
    """What this machine and this environment offer, and what to do about what is missing."""
    for check in (
        _versions,
        _device,
        _threads,
        _bf16,
        _memory,
        _folders,
        _hub,
        _fetched,
        _wandb,
        _sandbox,
        _extras,
        _packages,
    ):
        try:
            yield from check()
        except Exception as error:  # one check that fails must not hide the others
            yield Finding(check.__name__.strip("_"), Mark.note, f"{type(error).__name__}: {error}")


def _versions() -> Iterator[Finding]:
    from zoo.measure.provenance import PACKAGES, versions

    found = versions()
    missing = [name for name in PACKAGES if name not in found]
    shown = ", ".join(f"{name} {version}" for name, version in found.items())
    yield Finding("versions", Mark.good, shown)
    if missing:
        yield Finding(
            "versions",
            Mark.bad,
            f"missing: {', '.join(missing)}. Run: pip install -e . in the checkout.",
        )
    if not (3, 11) <= sys.version_info[:2] < (3, 14):
        yield Finding("python", Mark.bad, "zoo needs Python 3.11, 3.12 or 3.13")


def _device() -> Iterator[Finding]:
    import torch

    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        yield Finding("device", Mark.good, f"cuda: {', '.join(names)}")
    elif torch.backends.mps.is_available():
        yield Finding("device", Mark.good, "mps")
    else:
        yield Finding("device", Mark.good, "cpu alone: fine for model=tiny and small models")


def _threads() -> Iterator[Finding]:
    import torch

    from zoo.measure.provenance import machine

    facts = machine()
    threads, cores = torch.get_num_threads(), facts["cores"]
    detail = f"{threads} threads on {cores} cores ({facts['cpu']})"
    if threads > cores:
        detail += f". More threads than cores slow each other: set OMP_NUM_THREADS={cores}."
        yield Finding("threads", Mark.note, detail)
    else:
        yield Finding("threads", Mark.good, detail)


def _bf16() -> Iterator[Finding]:
    """Measured: a processor that has to emulate bfloat16 is slower with it, not faster."""
    import torch

    if torch.cuda.is_available():
        good = torch.cuda.is_bf16_supported()
        yield Finding("bfloat16", Mark.good if good else Mark.note, "yes" if good else "emulated")
        return

    def seconds(dtype: torch.dtype) -> float:
        a, b = (torch.randn(384, 384).to(dtype) for _ in range(2))
        torch.matmul(a, b)
        started = time.perf_counter()
        for _ in range(5):
            torch.matmul(a, b)
        return time.perf_counter() - started

    ratio = seconds(torch.float32) / seconds(torch.bfloat16)
    if ratio > 1.2:
        yield Finding("bfloat16", Mark.good, f"{ratio:.1f}× as fast as float32 in a product")
    else:
        yield Finding(
            "bfloat16",
            Mark.note,
            f"no gain here ({ratio:.1f}× the speed of float32): leave rollout.dtype=null",
        )


def _memory() -> Iterator[Finding]:
    import psutil

    memory = psutil.virtual_memory()
    gib = 1 << 30
    low = memory.available < 2 * gib
    yield Finding(
        "memory",
        Mark.note if low else Mark.good,
        f"{memory.available / gib:.1f} of {memory.total / gib:.1f} GiB free"
        + (": enough for model=tiny; lower train.micro_batch_tokens beyond it" if low else ""),
    )


def _folders() -> Iterator[Finding]:
    from zoo.models.loading import cache_folder

    for what, folder, setting in (
        ("cache", cache_folder(), "set ZOO_CACHE to a folder that can be"),
        ("outputs", Path("outputs").absolute(), "set output=FOLDER, or start zoo elsewhere"),
    ):
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        try:
            with tempfile.TemporaryFile(dir=existing):
                pass
        except OSError as error:
            problem = f"{folder} cannot be written ({error.strerror}): {setting}."
            yield Finding(what, Mark.bad, problem)
        else:
            yield Finding(what, Mark.good, str(folder))


def _hub() -> Iterator[Finding]:
    from zoo.models.loading import hub_reachable

    if hub_reachable(2.0):
        yield Finding("model hub", Mark.good, "answers")
        return
    offline = os.environ.get("HF_HUB_OFFLINE") in ("1", "true", "True")
    why = "HF_HUB_OFFLINE is set" if offline else "no answer within 2 s"
    detail = f"{why}: model=tiny needs none; `zoo fetch` gets models elsewhere"
    yield Finding("model hub", Mark.note, detail)


def _fetched() -> Iterator[Finding]:
    from zoo.models.fetch import PACKAGED, check_fetched, fetched_folder, is_fetched

    for name in PACKAGED:
        if not is_fetched(name):
            continue
        try:
            check_fetched(name, full=True)
        except ConfigError as error:
            yield Finding("fetched model", Mark.bad, str(error))
        else:
            yield Finding("fetched model", Mark.good, f"{name} in {fetched_folder(name)}")


def _wandb() -> Iterator[Finding]:
    if find_spec("wandb") is None:
        yield Finding("wandb", Mark.note, "missing: runs keep their own metrics all the same")
        return
    signed_in = bool(os.environ.get("WANDB_API_KEY")) or _in_netrc("api.wandb.ai")
    how = "measure.wandb=online works" if signed_in else "offline alone; `wandb login` for online"
    yield Finding("wandb", Mark.good, f"{metadata.version('wandb')}: {how}")


def _in_netrc(host: str) -> bool:
    """Whether a login for the host exists; only its presence is looked at."""
    import netrc

    try:
        return host in netrc.netrc().hosts
    except (OSError, netrc.NetrcParseError):
        return False


def _sandbox() -> Iterator[Finding]:
    if sys.platform != "linux":
        yield Finding("sandbox", Mark.note, "needs Linux: rewards that run code are refused here")
        return
    from zoo.rewards.sandbox import isolation_report

    layers = isolation_report()
    off = [layer.name for layer in layers if not layer.active]
    backend = layers[0]
    holding = [layer.name for layer in layers[1:] if layer.active]
    detail = f"{backend.detail}; {len(layers) - len(off)} of {len(layers)} layers hold"
    detail += f": {', '.join(holding)}"
    if off:
        detail += f"; not: {', '.join(off)}. Only rewards that run code use it."
    yield Finding("sandbox", Mark.note if off else Mark.good, detail)


# module → (extra that brings it, what it is for)
EXTRAS = {
    "peft": ("lora", "adapters"),
    "gguf": ("gguf", "models from .gguf files"),
    "hydra_plugins.hydra_joblib_launcher": ("sweep", "hydra/launcher=joblib"),
    "hydra_plugins.hydra_submitit_launcher": ("sweep", "hydra/launcher=submitit_local"),
    "trl": ("peers", "the comparison with TRL in the tests"),
}


def _extras() -> Iterator[Finding]:
    here, absent = [], []
    for module, (extra, purpose) in EXTRAS.items():
        name = module.rpartition(".")[2].removeprefix("hydra_").replace("_", "-")
        if _has(module):
            here.append(name)
        else:
            absent.append(f"{name} ({purpose}): pip install 'zoo-rl[{extra}]'")
    if here:
        yield Finding("extras", Mark.good, ", ".join(here))
    for line in absent:
        yield Finding("extras", Mark.note, f"without {line}")


def _packages() -> Iterator[Finding]:
    from zoo.compose import broken_packages, installed_folders

    if found := installed_folders():
        shown = ", ".join(f"{name} in {folder}" for name, folder in found)
        yield Finding("packages", Mark.good, shown)
    for problem in broken_packages():
        yield Finding("packages", Mark.bad, problem)


def _has(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _installation_table(findings: Sequence[Finding]) -> Table:
    table = Table(title="Installation", show_edge=False, title_justify="left")
    for column in ("what", "", "found"):
        table.add_column(column, overflow="fold")
    for finding in findings:
        mark = Text(finding.mark.value, style=STYLES[finding.mark])
        table.add_row(finding.what, mark, Text(finding.detail))
    return table
