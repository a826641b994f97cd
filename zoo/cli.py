"""The command line: a bare first word is a subcommand, everything else describes runs."""

from __future__ import annotations

import argparse
import ctypes
import importlib
import importlib.util
import io
import os
import shlex
import shutil
import signal
import sys
import textwrap
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO, cast

from zoo.config import ConfigError, RunConfig
from zoo.measure.progress import Courtesy

if TYPE_CHECKING:
    from omegaconf import DictConfig

USAGE = 2  # exit status of a mistake in the command, as of any Unix tool
MAX_ERROR_LINES = 12

# word → (module, function, what it does)
SUBCOMMANDS = {
    "evaluate": ("zoo.evaluate.cli", "main", "score a saved policy: zoo evaluate model=PATH"),
    "report": ("zoo.report", "main", "tables and figures from run folders"),
    "runs": ("zoo.report", "runs_main", "list the runs under outputs/"),
    "fetch": ("zoo.models.fetch", "main", "get a model where no hub is reachable"),
    "audit": ("zoo.rewards.audit", "main", "check a verifier on answers that are known"),
    "doctor": ("zoo.doctor", "main", "check this installation and every algorithm found"),
    "algorithms": ("zoo.cli", "algorithms_main", "list the algorithms with their settings"),
}


class RunFailed(Exception):
    """A run that stopped by an unexpected error; its traceback lies in the run folder."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run `zoo` with these arguments (default: the process's own) and return the exit status.

    0: done; 1: a run failed, or what a subcommand printed could not be written; 2: a mistake in the
    command, told in one short block; 130: Ctrl-C.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    out, err = Courtesy(sys.stdout), Courtesy(sys.stderr)
    with redirect_stdout(cast(TextIO, out)), redirect_stderr(cast(TextIO, err)):
        try:
            status = _main(arguments)
        except SystemExit as left:  # a subcommand's --help
            if isinstance(left.code, str):
                raise
            status = left.code or 0
        out.flush()
        err.flush()
        if out.failed is None or status != 0:
            return status
        if not isinstance(out.failed, BrokenPipeError):  # zoo --help | head
            print_error(f"standard output cannot be written: {out.failed}")
        return 1


def _main(arguments: list[str]) -> int:
    parent = os.environ.pop("ZOO_PARENT", "")  # who waits for this process
    if parent.isdecimal():
        _die_with(int(parent))
    from zoo.compose import FOLDERS, put_working_directory_on_path

    folders = os.environ.get(FOLDERS)
    raw, warnings.formatwarning = warnings.formatwarning, _format_warning
    try:
        put_working_directory_on_path()
        arguments = _subcommand_first(arguments)
        return _dispatch(arguments)
    except ConfigError as error:
        if _may_tell():
            print_error(str(error))
        return USAGE
    except RunFailed as error:
        print_error(str(error))
        return 1
    except KeyboardInterrupt as interrupt:
        words = ["Interrupted.", *([str(interrupt)] if str(interrupt) else [])]
        if "resume=" not in words[-1]:  # it says itself how to go on
            anew = bool(arguments) and arguments[0] in SUBCOMMANDS
            how = "begins anew" if anew else "goes on where this one ended"
            words.append(f"The same command {how}.")
        sys.stderr.write(f"\n{' '.join(words)}\n")
        return 130
    except Exception as error:
        if not type(error).__module__.startswith("zoo."):
            raise  # a mistake of ours: its traceback is wanted
        print_error(str(error))
        return 1
    finally:
        warnings.formatwarning = raw
        os.environ.pop(FOLDERS, None)
        if folders is not None:
            os.environ[FOLDERS] = folders


def _format_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    line: str | None = None,
    raw: Any = warnings.formatwarning,
) -> str:
    """As a run prints its own; those of other libraries keep their place in the code."""
    package = str(Path(__file__).parent)
    if category.__module__.startswith("zoo.") or filename.startswith(package):
        return f"warning: {message}\n"
    return raw(message, category, filename, lineno, line)


def _may_tell() -> bool:
    """Whether this process of several tells of a mistake, which mostly all of them make.

    The first one does at once. One of another may be its own (a file that its machine lacks): it
    waits, and where the first one fails too, the launcher ends it meanwhile.
    """
    if os.environ.get("RANK", "0") != "0":
        time.sleep(2)
    return True


def run_composed(cfg: DictConfig) -> dict[str, Any]:
    """One run from a composed configuration: check everything, then train; the summary.

    Raises:
        ConfigError: the configuration cannot run; nothing was loaded.
        RunFailed: an unexpected error; its traceback is in the folder of the run.
    """
    from zoo.compose import put_working_directory_on_path
    from zoo.instantiate import interrupt_behind, run_dir, structured

    put_working_directory_on_path()  # a launcher's worker process starts without it
    with _exit_is_a_failure():
        config = structured(cfg)
        folder = run_dir(config)
    try:
        from zoo.train.run import run

        return run(config)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        foreign = not type(error).__module__.startswith("zoo.")  # ours tell of a reward's own
        if foreign and (stop := interrupt_behind(error)):
            raise stop from error
        raise RunFailed(_record_failure(error, config, folder)) from error


@contextmanager
def _exit_is_a_failure() -> Iterator[None]:
    """Code that a configuration names may call exit(): zoo would end as if all were well."""
    try:
        yield
    except SystemExit as error:
        own = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.line]
        raise ConfigError(
            f"code that the configuration names ended the program with exit({error.code!r}) (at "
            f"{own[-1].filename}:{own[-1].lineno}). Let it raise an error, or go on."
        ) from error


def check_job(
    overrides: list[str],
    config_name: str = "config",
    folders: dict[Path, tuple[str, list[str]]] | None = None,
    own_launcher: bool = False,
) -> Path | None:
    """Refuse a job of a sweep that cannot run, before any job starts.

    Args:
        folders: (configuration's hash, overrides) by folder of the jobs before; this one is added.
        own_launcher: the sweep runs by zoo's launcher, and not by one of hydra's.
    Returns:
        the folder of a job that is finished already, else None.
    Raises:
        ConfigError: what is wrong, with the overrides of the job.
    """
    from zoo.compose import compose
    from zoo.instantiate import config_hash, run_dir, structured
    from zoo.launch import swept
    from zoo.train.inputs import come_and_gone
    from zoo.train.run import finished

    try:
        with _exit_is_a_failure():
            config = structured(compose(overrides, config_name, own_launcher))
        folder, identity = Path(os.path.realpath(run_dir(config))), config_hash(config)
        this = (identity, overrides)
        known, first = this if folders is None else folders.setdefault(folder, this)
        if known != identity:
            raise ConfigError(
                f"two jobs ({' and '.join(swept([first, overrides]))}) differ in more than their "
                f"seeds and share the folder {folder}. Leave name={config.name} out: the default "
                "tells them apart."
            )
        if first != overrides:
            raise ConfigError(
                f"two jobs ({' and '.join(swept([first, overrides]))}) are one and the same run "
                f"in {folder}: what they differ in cannot move a result. Give it one value."
            )
        # A folder that cannot be used is this job's own failure: the others may run.
        with suppress(ConfigError):
            if finished(folder, identity, config) is not None:
                other = come_and_gone(folder, config)
                told = f"since a finished run in {folder.parent} began, {other}."
                if other and told not in _TOLD:
                    _TOLD.add(told)
                    warnings.warn(
                        f"{told} Its results are of the files as they were; another name or output "
                        "trains on those of now.",
                        stacklevel=1,
                    )
                return folder
        if identity not in _CHECKED:
            from zoo.build import check

            try:
                with _exit_is_a_failure():
                    check(config)
            except ConfigError:
                raise
            except Exception:  # in code of the user's: the job says where, and the others may run
                pass
            _CHECKED.add(identity)
    except ConfigError as error:
        raise ConfigError(f"{error}\nIn the job: {' '.join(overrides)}") from error
    return None


# Jobs that differ by their seeds alone are checked once, and what became of their files told once
_CHECKED: set[str] = set()
_TOLD: set[str] = set()


def print_error(message: str) -> None:
    """One block on standard error, of at most a dozen lines."""
    width = min(100, shutil.get_terminal_size().columns) if sys.stderr.isatty() else 100
    lines = [
        line
        for paragraph in message.strip().splitlines()
        for line in textwrap.wrap(
            paragraph, width - 2, break_long_words=False, break_on_hyphens=False
        )
    ]
    if len(lines) > MAX_ERROR_LINES - 1:
        lines = [*lines[: MAX_ERROR_LINES - 2], "…"]
    title = "\033[1;31mzoo: error\033[0m" if sys.stderr.isatty() else "zoo: error"
    sys.stderr.write("\n".join([title, *(f"  {line}" for line in lines)]) + "\n")


# ---------------------------------------------------------------------------------- dispatch


def _dispatch(arguments: list[str]) -> int:
    if arguments and arguments[0] in SUBCOMMANDS:
        return _subcommand(arguments[0], arguments[1:])
    if arguments and _is_bare_word(arguments[0]):
        raise ConfigError(_unknown_word(arguments[0]))
    options = _parse(arguments)
    if options.version:
        from zoo import __version__

        print(f"zoo {__version__}")
        return 0
    overrides = _add_folders(options)
    if options.help or not arguments:
        print_help()
        return 0
    if options.overrides and (word := options.overrides[0]) in SUBCOMMANDS:
        raise ConfigError(
            f"{word} stands behind a flag of runs ({arguments[0]}). Write the subcommand first, as "
            f"in zoo {word} …; `zoo {word} --help` says what it takes."
        )
    if options.shell_completion:
        if _check_completion(overrides) == "query":
            return _complete(overrides)
    elif options.cfg or options.info:
        _check_shown(options, overrides)
    if options.shell_completion or options.hydra_help or options.info or options.cfg:
        return _show(options, overrides)
    if options.multirun:
        with _whoever_reads():
            return _sweep(options, overrides)
    if options.jobs is not None:
        raise ConfigError(
            f"--jobs={options.jobs} is how many runs of a sweep go at once. Add -m, or leave it "
            f"out."
        )
    from zoo.compose import compose

    cfg = compose(overrides, options.config_name or "config")
    with _sigterm_as_interrupt(), _whoever_reads():
        run_composed(cfg)
    return 0


@contextmanager
def _whoever_reads() -> Iterator[None]:
    """For runs: their results are files, so none fails where its output could not be written."""
    yield
    if isinstance(sys.stdout, Courtesy):
        sys.stdout.flush()
        sys.stdout.failed = None


def _subcommand_first(arguments: list[str]) -> list[str]:
    """`--config-dir DIR evaluate …` as `evaluate --config-dir DIR …`."""
    if not arguments or not arguments[0].startswith("-"):
        return arguments
    folders, rest = _folders_among(arguments)
    if not rest or rest[0] not in SUBCOMMANDS:
        return arguments
    return [rest[0], *(f"--config-dir={folder}" for folder in folders), *rest[1:]]


def _subcommand(word: str, arguments: list[str]) -> int:
    module, function, _ = SUBCOMMANDS[word]
    if not _exists(module) or not hasattr(importlib.import_module(module), function):
        raise ConfigError(
            f"`zoo {word}` is not part of this version ({module}.{function} is missing). "
            f"`zoo --help` lists what there is."
        )
    if word != "evaluate" and os.environ.get("RANK", "0") != "0":
        return 0  # one process of several tells, and writes
    call: Callable[[list[str]], int | None] = getattr(importlib.import_module(module), function)
    return call(arguments) or 0


def _present() -> dict[str, str]:
    """word → what it does, of the subcommands that this installation has."""
    return {word: what for word, (module, _, what) in SUBCOMMANDS.items() if _exists(module)}


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _is_bare_word(argument: str) -> bool:
    return argument.isidentifier() or (argument[:1].isalnum() and "=" not in argument)


def _unknown_word(word: str) -> str:
    from zoo.compose import explain_bare_word, is_option_or_group
    from zoo.instantiate import nearest

    near = nearest(word, SUBCOMMANDS)
    if near and not is_option_or_group(word):
        return (
            f"there is no subcommand {word!r}. Did you mean `zoo {near[0]}`? "
            f"Subcommands: {', '.join(_present())}."
        )
    return explain_bare_word(word) + f" Subcommands: {', '.join(_present())}."


class Parser(argparse.ArgumentParser):
    """Arguments whose mistakes are told in one block, with the nearest flag."""

    def error(self, message: str) -> NoReturn:
        from zoo.instantiate import did_you_mean

        flags = [flag for flag in self._option_string_actions if flag.startswith("--")]
        hint = ""
        if message.startswith("unrecognized arguments: "):
            word = message.split(": ", 1)[1].split()[0].split("=")[0]
            hint = did_you_mean(word, flags) or f" Flags: {', '.join(flags)}."
            message = f"there is no flag {word}"
        raise ConfigError(f"{message.rstrip('.')}.{hint} `{self.prog} --help` explains the flags.")


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(prog="zoo", add_help=False, allow_abbrev=False)
    for flags in (
        ("-h", "--help"),
        ("--version",),
        ("-m", "--multirun"),
        ("-r", "--run"),
        ("-sc", "--shell-completion"),
        ("--hydra-help",),
        ("--resolve",),
    ):
        parser.add_argument(*flags, action="store_true")
    parser.add_argument("-c", "--cfg", choices=["job", "hydra", "all"])
    parser.add_argument("-p", "--package")
    info = ["all", "config", "defaults", "defaults-tree", "plugins", "searchpath"]
    parser.add_argument("-i", "--info", nargs="?", const="all", choices=info)
    parser.add_argument("-cd", "--config-dir", action="append", default=[])
    parser.add_argument("-cn", "--config-name")
    parser.add_argument("--jobs")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_intermixed_args(arguments)
    if options.resolve and not options.cfg:
        raise ConfigError("--resolve belongs to --cfg. Write zoo --cfg job --resolve.")
    if options.package and not options.cfg:
        raise ConfigError(
            f"--package {options.package} belongs to --cfg. Write zoo --cfg job --package "
            f"{options.package}."
        )
    if options.config_name == "":
        raise ConfigError("--config-name is empty. Give a name, or leave it out for zoo's own.")
    given = [flag for flag in _ONE_OF if getattr(options, flag.replace("-", "_"))]
    if options.multirun and not (options.cfg or options.info):  # those have words of their own
        given.append("multirun")
    if len(given) > 1:
        named = " and ".join(f"--{flag}" for flag in given)
        raise ConfigError(f"{named} are different things to do. Give one of them.")
    return options


_ONE_OF = ("run", "cfg", "info", "shell-completion", "hydra-help")  # what a command does


def with_folders(arguments: Sequence[str]) -> list[str]:
    """The arguments of a subcommand without its folders of options, which are added as for runs.

    Raises:
        ConfigError: a folder does not exist.
    """
    folders, rest = _folders_among(arguments)
    return _add_folders(argparse.Namespace(config_dir=folders, overrides=rest))


def _folders_among(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """(what --config-dir names, the other arguments)."""
    parser = Parser(prog="zoo", add_help=False, allow_abbrev=False)
    parser.add_argument("-cd", "--config-dir", action="append", default=[])
    options, rest = parser.parse_known_args(arguments)
    return options.config_dir, rest


def _add_folders(options: argparse.Namespace) -> list[str]:
    """Folders of options, for this process and those that it starts; the other overrides.

    `hydra.searchpath` is read here too: hydra knows it only while it composes, but the help page,
    suggestions and the recipe behind a model need it as well.
    """
    from zoo.compose import FOLDERS, check_config_dir, take_folders

    for folder in options.config_dir:
        check_config_dir(folder)
    overrides, folders = take_folders(options.overrides)
    named = [str(Path(folder).absolute()) for folder in [*options.config_dir, *folders]]
    for folder in named:
        if os.pathsep in folder:
            raise ConfigError(
                f"the folder of options {folder!r} has {os.pathsep!r} in its name, which separates "
                f"folders in {FOLDERS}. Rename it, or link to it from a folder without."
            )
    if named:
        before = [os.environ[FOLDERS]] if os.environ.get(FOLDERS) else []
        os.environ[FOLDERS] = os.pathsep.join([*named, *before])
    return overrides


def _check_completion(overrides: list[str]) -> str:
    """What is asked for: install, uninstall, or query."""
    what, _, shell = " ".join(overrides).partition("=")
    known = what in ("install", "uninstall", "query") and shell in ("bash", "zsh", "fish")
    if not known or (what == "query" and "COMP_LINE" not in os.environ):
        raise ConfigError(
            f"--shell-completion takes install=SHELL or uninstall=SHELL (bash, zsh, fish), got "
            f"{' '.join(overrides) or 'nothing'}; query=SHELL is the shell's own question. Write "
            'eval "$(zoo --shell-completion install=bash)".'
        )
    return what


def _complete(question: list[str]) -> int:
    """Print what may follow the line so far. No word about mistakes: it would stand in that line.

    hydra knows groups and settings, but neither zoo's flags nor its subcommands.
    """
    from zoo.compose import fill_in, prepare

    line = os.environ["COMP_LINE"]
    head, _, word = line.rpartition(" ")
    try:
        with redirect_stderr(io.StringIO()):
            settled = _subcommand_first(shlex.split(head)[1:])  # after the name of the program
            if word.startswith("-") or (settled and settled[0] in SUBCOMMANDS):
                return 0
            options = _parse(settled)
            # hydra splits at spaces; a text that holds one changes nothing that can follow.
            overrides = [one for one in _add_folders(options) if not any(map(str.isspace, one))]
            os.environ["COMP_LINE"] = " ".join(["zoo", "-m", *fill_in(prepare(overrides)), word])
            name = [f"--config-name={options.config_name}"] if options.config_name else []
            return _through_hydra(["--shell-completion", *name, *question])
    except (Exception, SystemExit):
        return 0
    finally:
        os.environ["COMP_LINE"] = line


def _check_shown(options: argparse.Namespace, overrides: list[str]) -> None:
    """Refuse to print what a run would refuse: hydra by itself does not see all of it."""
    from omegaconf import OmegaConf

    from zoo.compose import compose
    from zoo.instantiate import did_you_mean

    if options.multirun:
        flag = "--cfg" if options.cfg else "--info"
        raise ConfigError(
            f"{flag} shows one configuration, and -m runs several. Leave -m out and give each "
            f"setting one value, as in zoo {flag} {options.cfg or options.info} seed=0."
        )
    if not options.cfg:
        return
    cfg = compose(overrides, options.config_name or "config")
    package = options.package
    if options.cfg != "job" or package in (None, "_global_"):
        return
    if OmegaConf.select(cfg, package, throw_on_missing=False) is None:
        near = did_you_mean(package, [str(key) for key in cfg], "--package ")
        raise ConfigError(
            f"--package {package}: the configuration has no such part, or it is null.{near} "
            f"It has: {', '.join(str(key) for key in cfg)}."
        )


def _show(options: argparse.Namespace, overrides: list[str]) -> int:
    """What hydra prints itself; the words where it finds no such part are ours."""
    arguments = _hydra_arguments(options, overrides)
    if not options.package:
        return _through_hydra(arguments)
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            status = _through_hydra(arguments)
        sys.stderr.write(said.getvalue())
        return status
    except SystemExit as error:
        if "not found in config" not in said.getvalue():
            raise
        raise ConfigError(
            f"--package {options.package}: `zoo --cfg {options.cfg}` has no such part, or it is "
            "null. Leave --package out to see what there is."
        ) from error


def _hydra_arguments(options: argparse.Namespace, overrides: list[str]) -> list[str]:
    flags: list[str] = []
    for flag in ("multirun", "shell_completion", "hydra_help", "resolve"):
        if getattr(options, flag):
            flags.append(f"--{flag.replace('_', '-')}")
    for flag in ("cfg", "package", "info", "config_name"):
        if getattr(options, flag) is not None:
            flags.append(f"--{flag.replace('_', '-')}={getattr(options, flag)}")
    return [*flags, *overrides]


def _sweep(options: argparse.Namespace, overrides: list[str]) -> int:
    if not overrides:
        raise ConfigError(
            "-m runs all combinations of values given by commas, and none are given. Write, for "
            "example, zoo -m algorithm=ppo,grpo seed=0,1,2."
        )
    from zoo.distributed import expected_processes
    from zoo.launch import expand, sweep, swept

    if (processes := expected_processes()) > 1:
        raise ConfigError(
            f"-m starts a process for each of its runs, and {processes} processes are here already "
            f"(WORLD_SIZE={processes}, from torchrun or the like): each would start the whole "
            "sweep. Run zoo -m … without torchrun, or give torchrun one run at a time: "
            f"torchrun --nproc_per_node {processes} -m zoo seed=0 …"
        )
    folders: dict[Path, tuple[str, list[str]]] = {}
    check = partial(check_job, config_name=options.config_name or "config", folders=folders)
    launchers = [one for one in overrides if one.startswith("hydra/launcher=")]
    if launchers and _option(launchers[-1]) != "basic":
        if options.jobs is not None:
            raise ConfigError(
                f"--jobs={options.jobs} is for zoo's own launcher; {launchers[-1]} has a setting "
                f"of its own, as in hydra.launcher.n_jobs={options.jobs}."
            )
        jobs: list[list[str]] = []
        sweepers = [one for one in overrides if one.lstrip("+").startswith("hydra/sweeper=")]
        if not sweepers or _option(sweepers[-1]) == "basic":  # another one chooses as it goes
            jobs = expand([one for one in overrides if not one.startswith("hydra")])
        began = time.time()
        for job in jobs:
            check(job)
        try:
            return _through_hydra(_hydra_arguments(options, overrides))
        except Exception as error:
            lost = type(error).__module__.partition(".")[0] in ("joblib", "submitit")
            if _before_any_job(error):
                raise ConfigError(
                    f"{launchers[-1]} started no job: {type(error).__name__}: {_reason(error)}\n"
                    "Correct its settings (hydra.launcher.NAME=VALUE), or leave it out for zoo's "
                    "own launcher (-m --jobs N); hydra/launcher=submitit_local needs no cluster."
                ) from error
            told = isinstance(error, ConfigError | RunFailed) and "return_value" in _calls(error)
            if not lost and not told:  # by a job
                raise
            labels = zip(jobs, swept(jobs), strict=True)
            unfinished = [(job, label) for job, label in labels if check(job) is None]
            named = "; ".join(label for _, label in unfinished[:6])
            named += "; …" if len(unfinished) > 6 else ""
            without = f"Without a summary: {len(unfinished)} of {len(jobs)} jobs ({named})."
            without = without if jobs else "Which jobs have no summary only the sweeper knows."
            if lost:
                left = [job for job, _ in unfinished]
                own = [folder / "error.txt" for folder, (_, job) in folders.items() if job in left]
                raise RunFailed(_died(error, launchers[-1], without, own, began)) from error
            if len(unfinished) > 1:  # of which hydra raises the first one's error
                raise type(error)(f"{without} The first one:\n{error}") from error
            raise
    command = [sys.executable, "-m", "zoo"]
    if options.config_name:
        command.append(f"--config-name={options.config_name}")
    at_once = [] if options.jobs is None else [f"--jobs={options.jobs}"]
    rest = [one for one in overrides if one not in launchers]
    check = partial(check, own_launcher=True)
    return sweep([*at_once, *rest], check=check, command=command)


def _option(override: str) -> str:
    return override.partition("=")[2].strip("'\"")


def _reason(error: Exception) -> str:
    return (str(error).strip() or "no message").splitlines()[0][:300]


def _before_any_job(error: Exception) -> bool:
    """Whether a launcher's plugin raised this while it made ready: no job, no wait for one."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    modules = {str(frame.f_globals.get("__name__")).partition(".")[0] for frame in frames}
    runs_or_waits = "joblib" in modules or _calls(error) & {"run_job", "results"}
    return "hydra_plugins" in modules and not runs_or_waits


def _calls(error: Exception) -> set[str]:
    return {frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)}


def _died(
    error: Exception, launcher: str, without: str, errors: Sequence[Path], began: float
) -> str:
    """What to do where a launcher lost the process of a job.

    Args:
        errors: where jobs without a summary leave an error of their own, if they have one.
        began: when the sweep did; what is older is of another one.
    """
    own = [str(path) for path in errors if path.is_file() and path.stat().st_mtime >= began]
    more = f"; and {len(own) - 3} more" if len(own) > 3 else ""
    failed = f"Jobs that failed by themselves: {'; '.join(own[:3])}{more}\n" if own else ""
    submitit = type(error).__module__.startswith("submitit")
    limit = "Each job has hydra.launcher.timeout_min minutes. " if submitit else ""
    return (
        f"{launcher} lost a process that ran a job, and ended: {type(error).__name__}: "
        f"{_reason(error)}\n{without}\n{failed}"
        f"{limit}The same command goes on. zoo's own launcher (-m --jobs N) keeps the other jobs "
        "where one dies."
    )


def _through_hydra(arguments: list[str]) -> int:
    """hydra's own main: what it shows (--cfg, --info, completion), and sweeps by its launchers."""
    import hydra

    from zoo.compose import config_dir, fill_in, prepare, register, translated

    launcher = os.getpid()

    def job(cfg: DictConfig) -> dict[str, Any]:
        if os.getppid() == launcher:  # else this process, or one of another machine
            _die_with(launcher)
        return run_composed(cfg)

    overrides = [one for one in arguments if not one.startswith("--")]
    old_argv, old_setting = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = ["zoo", *arguments]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # raise, so that the message is ours
    try:
        with translated(overrides):
            if "--shell-completion" not in arguments:
                flags = [one for one in arguments if one.startswith("--")]
                sys.argv = ["zoo", *flags, *fill_in(prepare(overrides))]
            register()
            decorate = hydra.main(
                version_base="1.3", config_path=str(config_dir()), config_name="config"
            )
            decorate(job)()
    finally:
        sys.argv = old_argv
        if old_setting is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = old_setting
    return 0


def _die_with(parent: int) -> None:
    """Let Linux kill this process when its parent dies, even by SIGKILL."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # it died before the line above
            os._exit(1)


@contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """A scheduler's SIGTERM ends a run as Ctrl-C does: with a checkpoint and a word on stderr."""

    def interrupt(_number: int, _frame: object) -> NoReturn:
        raise KeyboardInterrupt("(SIGTERM)")

    if threading.current_thread() is not threading.main_thread():
        yield  # Python delivers signals to the main thread only
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _record_failure(error: BaseException, config: RunConfig, folder: Path) -> str:
    """Write the traceback into the run folder and say in two lines what happened."""
    from zoo.claim import claim, claimed
    from zoo.measure.files import RecordError
    from zoo.train.lock import FolderLock

    text = "".join(traceback.format_exception(error))
    gone = ""
    if "torch" in sys.modules:
        from zoo.distributed import without_peer

        gone = without_peer(error)
        text += f"\n{gone}\n" * bool(gone)
    rank = os.environ.get("RANK", "0")
    path = folder / ("error.txt" if rank == "0" else f"error.rank{rank}.txt")
    lock, begun = FolderLock(folder), claimed(folder)
    try:
        if not isinstance(error, RecordError):  # else it may have been moved, and come back
            folder.mkdir(parents=True, exist_ok=True)
        if rank == "0" and folder.is_dir():
            lock.acquire()
            if not begun and (folder / "meta.json").exists():
                raise ConfigError("a run is there, and this one had not begun")
            claim(folder)
        elif rank != "0" and not begun:  # whether process 0 has it is not known
            raise ConfigError("the run had not begun there")
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
        where = f"The traceback is in {path}."
    except (OSError, ConfigError) as problem:
        sys.stderr.write(text)
        where = f"The traceback is above: {path} cannot be written ({problem})."
    finally:
        lock.release()
    # The first line of a foreign error says most; ours are written to be read whole.
    lines = (str(error).strip() or "(no message)").splitlines()
    ours = type(error).__module__.startswith("zoo.")
    message = "\n".join(lines[:6]) if ours else lines[0]
    message = gone or _ended_by_launcher(error) or message
    if len(message) > 600:
        message = message[:597] + "…"
    told = f"the run stopped: {type(error).__name__}: {message}\n{where}"
    # What the folder holds may be another's; and what ends every resume says itself what to do.
    if not begun or getattr(error, "again", False):
        return told
    how = "goes on from the last checkpoint"
    if folder.is_dir() and not any(folder.glob("checkpoints/step_*")):
        how = "begins anew, as there is no checkpoint yet"
    how = "starts anew" if config.resume.name == "never" else how
    return f"{told}\nWith resume={config.resume.name} the same command {how}."


def _ended_by_launcher(error: BaseException) -> str:
    """Why submitit ended a job, which it does by exit() in the midst of it; "" for other errors."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    last = str(frames[-1].f_globals.get("__name__")) if frames else ""
    if not isinstance(error, SystemExit) or last.partition(".")[0] != "submitit":
        return ""
    return (
        "the launcher ended the job, whose time was over (hydra.launcher.timeout_min, in minutes) "
        "or whose place was wanted"
    )


# ---------------------------------------------------------------------------------- help


_EXAMPLES = (
    ("zoo algorithm=grpo model=tiny data=arithmetic seed=1", "group relative policy optimisation"),
    ("zoo algorithm=ppo algorithm.kl_coef=0.02", "with a learned critic"),
    ("zoo algorithm=dpo algorithm.beta=0.1", "offline, on pairs of the start's own samples"),
    ("zoo algorithm=sft model=tiny_random train.steps=400", "supervised, on demonstrations"),
    ("zoo experiment=smollm2_gsm8k algorithm=grpo", "a recipe: several choices at once"),
    ("zoo -m algorithm=ppo,dpo,grpo seed=0,1,2", "a sweep: nine runs, finished ones skipped"),
)


def print_help() -> None:
    """The help page; options are read from the search path, a stranger's included."""
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    from zoo.compose import GROUPS, hydra_session, options, translated

    console = Console(highlight=False)
    console.width = min(console.width, 100)

    def prose(text: str) -> None:
        console.print(Padding(Text(text), (0, 0, 0, 2)))

    def heading(text: str) -> None:
        console.print(Text(f"\n{text}", style="bold"))

    def rows(pairs: Sequence[tuple[str, str]], style: str = "cyan") -> None:
        table = Table.grid(padding=(0, 2))
        table.add_column(style=style, no_wrap=False, overflow="fold")
        table.add_column(overflow="fold")
        for left, right in pairs:
            table.add_row(Text(left), Text(right))
        console.print(Padding(table, (0, 0, 0, 2)))

    console.print(Text("zoo [subcommand | flags] group=option group.setting=value …", style="bold"))
    prose(
        "Trains PPO, DPO and GRPO (and relatives) for language models on one shared "
        "infrastructure, so that they can be compared."
    )
    heading("Examples")
    rows(_EXAMPLES)
    heading("Groups and their options (group=option; * is the default)")
    with hydra_session(), translated([]):
        defaults = _default_choices()
        pairs = []
        for group in GROUPS:
            names = [option.name for option in options(group)]
            marked = [f"{n}*" if defaults.get(group) == n else n for n in names]
            pairs.append((group, ", ".join(marked) or "(none found)"))
    rows(pairs)
    prose("Every setting with its value: zoo --cfg job [algorithm=ppo …]")
    heading("Subcommands")
    rows([(f"zoo {word}", what) for word, what in _present().items()])
    heading("Flags")
    rows(
        [
            ("-m, --multirun", "run all combinations of values given by commas; see Sweeps"),
            ("--jobs N", "with -m: so many runs at once (default 1)"),
            ("--cfg job", "print the configuration instead of running; --package train: a part"),
            ("--config-dir DIR", "also look in DIR for options: DIR/algorithm/mine.yaml, …"),
            ("--shell-completion", 'eval "$(zoo --shell-completion install=bash)" (or zsh, fish)'),
            ("--version, --help", ""),
        ]
    )
    heading("Where results go")
    prose(
        "outputs/<experiment>/<name>/seed_<n>/: config.yaml, metrics.jsonl, evals.jsonl, "
        "checkpoints/, policy/ (a transformers folder) and, written last, summary.json. The "
        "default name is the algorithm and a hash of all settings that can move a result. The "
        "same command again goes on from the last checkpoint, or finds the run finished. Change "
        "the place with output=DIR, experiment=WORD, name=WORD."
    )
    heading("Sweeps")
    prose(
        "zoo -m algorithm=ppo,grpo train.lr=1e-4,2e-4 seed=0,1,2 makes a process and a folder "
        "for each of the twelve runs and prints one table at the end. A failing run leaves the "
        "others alone; the same command again does what is missing. hydra's launchers work as "
        "well: zoo -m hydra/launcher=joblib … (pip install 'zoo-rl[sweep]')."
    )
    heading("Your own algorithm, reward or data")
    prose(
        "Write mine.py here and DIR/algorithm/mine.yaml with _target_: mine.Mine, then: "
        "zoo --config-dir DIR algorithm=mine"
    )


def _default_choices() -> dict[str, str]:
    from hydra.core.global_hydra import GlobalHydra
    from hydra.types import RunMode

    found = GlobalHydra.instance().config_loader().compute_defaults_list("config", [], RunMode.RUN)
    choices: dict[str, Any] = found.overrides.known_choices
    return {group: str(name) for group, name in choices.items() if name is not None}


def algorithms_main(argv: Sequence[str]) -> int:
    """`zoo algorithms [--config-dir DIR]`: every algorithm on the search path."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from zoo.compose import compose_here, hydra_session, options, translated

    given = _parse(list(argv))
    if given.help:
        print(
            "zoo algorithms [--config-dir DIR]: every algorithm on the search path, its settings."
        )
        return 0
    flags = (*_ONE_OF, "multirun", "jobs", "config-name", "version")
    refused = [f"--{flag}" for flag in flags if getattr(given, flag.replace("-", "_"))]
    overrides = _add_folders(given)
    chosen = [one for one in overrides if "=" in one or one.startswith("~")]  # others are no words
    for word in [*refused, *(one for one in chosen if "hydra.searchpath=" not in one)]:
        raise ConfigError(
            f"zoo algorithms lists them all and takes no {word}. One alone is shown by zoo --cfg "
            "job --package algorithm algorithm=NAME."
        )
    table = Table(show_edge=False)
    for column in ("algorithm=", "what it is", "settings"):
        table.add_column(column, overflow="fold")
    broken = 0
    with hydra_session(), translated(overrides):
        compose_here(overrides)  # a mistake in the command is told once
        for option in options("algorithm"):
            try:
                cfg = compose_here([*overrides, f"algorithm={option.name}"])
                names = ", ".join(
                    str(key) for key in cfg.get("algorithm") or {} if key != "_target_"
                )
            except ConfigError as error:  # the others can be listed all the same
                names, broken = str(error), 1
            table.add_row(Text(option.name), Text(option.description), Text(names))
    Console(highlight=False).print(table)
    return broken
