"""wandb as a sink of the record: offline by default, one step axis, never the end of a run."""

from __future__ import annotations

import contextlib
import http.client
import math
import os
import shutil
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

MODES = ("offline", "online", "disabled")
SECONDS_TO_CONNECT = 15.0
SECONDS_TO_FINISH = 60.0
ROWS_OF_A_TABLE = 16
TABLES = 50  # of a run, training completions and evaluation samples together
CHARACTERS_OF_A_CELL = 2000
ID_FILE = "wandb_id.txt"
REPORTS = "WANDB_ERROR_REPORTING"

Warn = Callable[[str, str], None]


class WandbSink:
    """Curves and a bounded table of completions in wandb; the run's own files remain the truth.

    The step is logged as a value and is the axis of every curve, so an evaluation of an earlier
    step that comes late is kept: wandb drops values only when its own counter goes backwards.
    Whatever wandb raises becomes one warning, and the run goes on without it.

    Args:
        run_dir: wandb writes below `run_dir/wandb`; `run_dir/wandb_id.txt` keeps the run's id.
        mode: "offline", "online" (falls back to offline after 15 s) or "disabled".
        project: wandb's project.
        title: wandb's name of the run.
        group: wandb's group of it.
        config: shown beside the curves.
        resumed: keep the id of the run before. Offline files of before are deleted: they lost their
            tail when the run was killed, and the caller logs the whole history again, as always
            when wandb knows nothing of the run (`starts_empty`).
        warn: called with (kind, message).
    Raises:
        ValueError: an unknown mode.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        mode: str,
        project: str,
        title: str,
        group: str | None = None,
        config: Mapping[str, Any],
        resumed: bool,
        warn: Warn,
    ):
        if mode not in MODES:
            raise ValueError(f"measure.wandb must be one of {', '.join(MODES)}, got {mode!r}")
        self._warn = warn
        self._run: Any = None
        self._tables = 0
        self._wandb: Any = None
        self.starts_empty = False
        if mode == "disabled":
            return
        # wandb reports on itself, of offline runs too, and waits for a silent server to listen.
        os.environ.setdefault(REPORTS, "false")
        with self._guard():
            import wandb  # half a second, and not needed when disabled

            self._wandb = wandb
            run_id = _run_id(run_dir) if resumed else _new_id(run_dir)
            common = {
                "project": project,
                "name": title,
                "group": group,
                "dir": str(run_dir),
                "config": dict(config),
                "settings": _settings(wandb),
            }
            failure = ""
            if mode == "online":
                self._run, failure = self._connect(run_id, common)
                if failure:
                    for empty in (run_dir / "wandb").glob(f"run-*-{run_id}"):
                        shutil.rmtree(empty, ignore_errors=True)
                    run_id = _new_id(run_dir)  # wandb's process holds on to the one that failed
            if self._run is None:
                self._run = self._offline(run_id, common)
            if failure:  # only now is it true that it logs offline
                self._warn(
                    "wandb",
                    f"measure.wandb=online {failure}. Logging offline into {run_dir}/wandb; send "
                    "it later with `wandb sync`.",
                )
            self.starts_empty = not getattr(self._run, "resumed", False)
            if self.starts_empty:
                # Each offline file stands for the whole run: one file to sync, no step twice.
                for old in (run_dir / "wandb").glob("offline-run-*"):
                    if old.resolve() != Path(self._run.dir).resolve().parent:
                        shutil.rmtree(old, ignore_errors=True)
            self._run.define_metric("step", hidden=True)
            self._run.define_metric("*", step_metric="step")

    @property
    def active(self) -> bool:
        return self._run is not None

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Log the finite numbers among `values` at `step`, in any order of steps."""
        numbers = {
            # Half a character in a name, as of an older record's reason, would end the sink.
            name.encode(errors="backslashreplace").decode(): value
            for name, value in values.items()
            if isinstance(value, int | float) and math.isfinite(value)
        }
        if self._run is None or not numbers:
            return
        with self._guard():
            self._run.log({**numbers, "step": step})

    def table(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Log the first 16 rows as a table; after 50 tables of a run nothing more is kept."""
        if self._run is None or not rows or self._tables >= TABLES:
            return
        self._tables += 1
        columns = list(rows[0])
        with self._guard():
            cells = [[_cell(row.get(column)) for column in columns] for row in rows]
            table = self._wandb.Table(columns=columns, data=cells[:ROWS_OF_A_TABLE])
            self._run.log({name: table, "step": step})

    def close(self, exit_code: int = 0) -> None:
        if self._run is not None:
            with self._guard():
                self._run.finish(exit_code=exit_code)
            self._run = None

    def _connect(self, run_id: str, common: Mapping[str, Any]) -> tuple[Any, str]:
        """An online run and "", or None and what went wrong."""
        wandb, began = self._wandb, time.monotonic()
        try:
            made = wandb.setup(settings=common["settings"])
            if not _has_key(wandb):  # wandb would ask on the terminal and wait for an answer
                raise ConnectionError("no API key is configured (`wandb login`)")
            _ask(made.settings)
            return wandb.init(mode="online", id=run_id, resume="allow", **common), ""
        except Exception as error:
            waited = time.monotonic() - began >= 0.9 * SECONDS_TO_CONNECT
            within = f" within {SECONDS_TO_CONNECT:.0f} s" if waited else ""
            return None, f"did not connect{within} ({_short(error)})"

    def _offline(self, run_id: str, common: Mapping[str, Any]) -> Any:
        """An offline run; without WANDB_* where wandb refuses what they say, of a server mostly."""
        start = partial(self._wandb.init, mode="offline", id=run_id, **common)
        try:
            return start()
        except Exception:
            names = [name for name in os.environ if name.startswith("WANDB_") and name != REPORTS]
            if not names:
                raise
            theirs = {name: os.environ.pop(name) for name in names}
            try:
                return start()
            finally:
                os.environ.update(theirs)

    @contextlib.contextmanager
    def _guard(self):
        try:
            yield
        except Exception as error:
            self._run = None
            self._warn(
                "wandb",
                f"wandb failed ({_short(error)}). The run goes on without it; its own files are "
                "complete. measure.wandb=disabled turns wandb off.",
            )


def _settings(wandb: Any) -> Any:
    """Nothing of wandb on the terminal, and nothing collected that the run records itself."""
    wanted = {
        "console": "off",
        "silent": True,
        "quiet": True,
        "disable_git": True,
        "disable_code": True,
        "save_code": False,
        "reinit": "create_new",  # a run that starts inside another keeps out of its record
        "disable_job_creation": True,
        "x_save_requirements": False,
        "x_disable_stats": True,
        "x_disable_meta": True,
        "x_disable_machine_info": True,
        "init_timeout": SECONDS_TO_CONNECT,
        "login_timeout": SECONDS_TO_CONNECT,
        "finish_timeout": SECONDS_TO_FINISH,
        "finish_timeout_raises": False,
    }
    known = wandb.Settings.model_fields  # they come and go between versions
    return wandb.Settings(**{name: value for name, value in wanted.items() if name in known})


def _ask(settings: Any) -> None:
    """Refuse a server that takes calls and never answers: wandb would wait for it at the end, too.

    Whatever else is wrong with it, wandb finds and says itself.

    Raises:
        TimeoutError: no answer in time.
    """
    if getattr(settings, "http_proxy", None) or getattr(settings, "https_proxy", None):
        return  # wandb's own, which only wandb knows how to ask
    late = TimeoutError(f"{settings.base_url} gives no answer")
    try:
        urllib.request.urlopen(settings.base_url, timeout=SECONDS_TO_CONNECT).close()
    except urllib.error.URLError as error:  # an HTTPError is an answer
        if isinstance(error.reason, TimeoutError):
            raise late from None
    except TimeoutError:
        raise late from None
    except (OSError, ValueError, http.client.HTTPException):
        return


def _has_key(wandb: Any) -> bool:
    try:
        return bool(wandb.login(prompt=False, verify=False))
    except TypeError:  # versions that cannot be told not to ask
        return bool(wandb.api.api_key)


def _run_id(run_dir: Path) -> str:
    file = run_dir / ID_FILE
    known = file.read_text().strip() if file.exists() else ""
    return known or _new_id(run_dir)


def _new_id(run_dir: Path) -> str:
    fresh = uuid.uuid4().hex[:8]  # the operating system's randomness: training's is untouched
    (run_dir / ID_FILE).write_text(fresh + "\n")
    return fresh


def _cell(value: Any) -> str | int | float | bool | None:
    if value is None or isinstance(value, int | float | bool):
        return value
    return str(value)[:CHARACTERS_OF_A_CELL]


def _short(error: BaseException) -> str:
    text = " ".join(str(error).split())[:200]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
