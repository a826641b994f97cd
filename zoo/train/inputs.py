"""Whether what the settings of a run point at is still what the run was made of."""

from __future__ import annotations

import contextlib
import hashlib
import json
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

from zoo.config import ConfigError, RunConfig, by_dotted_name
from zoo.data.rows import content_of
from zoo.distributed import gathered, world_size
from zoo.identity import CODE_KEYS, edited_since_import, identity
from zoo.instantiate import locate, resolved
from zoo.types import Prompt

RECORD = "inputs.json"  # in a run's folder
THEN = ", "  # between the hashes of code that changed on the way
GROUPS = ("algorithm", "data", "model", "reward", "rollout", "evaluate")  # that may name a file
# Settings whose plain words are folders, where there is one: data.split=test names none
FOLDER_KEYS = ("path", "paths", "gsm8k", "tokenizer", "critic", "name")
FOLDER_KEYS += ("folder", "folders", "dir", "dirs", "root", "corpus", "file", "files")
# In names of what code writes
WRITTEN = {"cache", "cachedir", "log", "logs", "logdir", "out", "outdir", "output", "outputs"}
WRITTEN |= {"scratch", "temp", "tmp", "work"}
# Files and folders of a folder that no run reads; a report's pages lie beside what it is of
NOTES = (".md", ".log", ".ipynb", ".lock", ".html", ".pdf", ".png", ".svg")
REPORT = {"record.json", "table.csv"}
MOST_FILES = 10_000  # of a folder, in the order of their names
BASE = " → its base "  # in what a record calls the files below an adapter
# A text that is no path, or a file that nobody may read, is told by its reader
_UNREAD = (OSError, ValueError, RuntimeError)
WHOLE = 64 * 2**20  # bytes; of larger files SAMPLES blocks are read
BLOCK, SAMPLES = 2**20, 16

# "files" and "code": what → hash; of code that changed on the way all its hashes, "first, …, last"
Record = dict[str, dict[str, str]]


def record(config: RunConfig) -> Record:
    """Hashes of the local files that settings name, and of code that is not zoo's own.

    Only what can change behind an unchanged configuration is here: `files` holds one entry for
    each file ("data.path: train.jsonl"), `code` one for each class and function of the user's
    ("reward.function=mine.score"). A folder counts with the folders in it, up to 10,000 files; of
    one that holds the working directory, the home or the output, only the files in itself.
    Files beyond 64 MiB are told by their length and sixteen blocks spread over them.
    """
    code: dict[str, str] = {}
    for setting, key, value in _named(config):
        if key in CODE_KEYS:
            code |= _source(setting, value)
    return {"files": _files_now(config), "code": code}


def _files_now(config: RunConfig) -> dict[str, str]:
    files: dict[str, str] = {}
    outputs = Path(config.output).expanduser().resolve()
    for what, path in _places(config):
        with contextlib.suppress(*_UNREAD):
            for name, file in _files(what, path, outputs):
                files[name] = _file_hash(file)
    return files


def _places(config: RunConfig) -> Iterator[tuple[str, Path]]:
    """The files and folders that settings name, and the base models of adapters among them."""
    for setting, key, value in _named(config):
        if key in CODE_KEYS or not WRITTEN.isdisjoint(key.split("_")):
            continue
        with contextlib.suppress(*_UNREAD):
            path = Path(value).expanduser()
            if path.is_file() or (value.strip("./") and "/" in value) or key.endswith(FOLDER_KEYS):
                yield setting, path
                if base := _adapted(path):
                    yield f"{setting}{BASE}{base}", base


def _named(config: RunConfig) -> Iterator[tuple[str, str, str]]:
    """The texts among the settings that may name a file or code: setting, its last word, text."""
    values = resolved(config)
    for group in GROUPS:
        for setting, value in _strings(values.get(group), group):
            key = next(part for part in reversed(setting.split(".")) if not part.isdigit())
            yield setting, key, value


def altered(run_dir: Path, config: RunConfig) -> Record:
    """What the record in `run_dir` knows otherwise: `files` and `code`, each setting → "old → new".

    Files that are gone, or that were added, are no alteration: whoever needs one says so, and
    `come_and_gone` tells of them. A folder without a record knows nothing.

    Raises:
        ConfigError: the record is damaged.
    """
    old, new = _known(run_dir), record(config)
    return {
        kind: {
            what: f"{_last(old[kind][what])} → {hashed}"
            for what, hashed in new[kind].items()
            if _last(old[kind].get(what, hashed)) != hashed
        }
        for kind in old
    }


def come_and_gone(run_dir: Path, config: RunConfig) -> str:
    """Which files that settings name, or of their folders, came or went since the run began.

    An older record holds no files of folders within folders; where it has none of a setting, those
    tell nothing. Nor do files that came to a folder of which not all were recorded, nor those of a
    new kind in one that holds the working directory, the home or the output.

    Returns:
        the first three of them and how many more, or "" for none.
    """
    known, new = _known(run_dir)["files"], _files_now(config)
    places = {setting: value for setting, _, value in _named(config)}
    for setting in {_setting_of(what) for what in known.keys() ^ new.keys()}:
        if BASE in setting:
            places[setting] = setting.partition(BASE)[2]
    sizes = Counter(_setting_of(what) for what in known)
    whole = {_folder_of(what) for what in known if sizes[_setting_of(what)] < MOST_FILES}
    outputs, kinds = Path(config.output).expanduser().resolve(), set(map(_kind_of, known))
    broad = {
        setting
        for setting in {_setting_of(what) for what in new.keys() - known.keys()}
        if _is_broad(Path(places[setting]).expanduser(), outputs)
    }
    added = [
        what
        for what in new.keys() - known.keys()
        if _folder_of(what) in whole and (_kind_of(what) in kinds or _setting_of(what) not in broad)
    ]
    gone = []
    for what in known.keys() - new.keys():
        setting, _, file = what.partition(": ")
        if setting in places and not (Path(places[setting]).expanduser() / file).exists():
            gone.append(what)
    told = [f"{what} was added" for what in sorted(added)]
    told += [f"{what} is gone" for what in sorted(gone)]
    return "; ".join(told[:3]) + (f"; and {len(told) - 3} more" if len(told) > 3 else "")


def _folder_of(what: str) -> tuple[str, bool]:
    """The setting of a file in a record, and whether it lies in a folder of that folder."""
    return _setting_of(what), "/" in what.partition(": ")[2]


def _setting_of(what: str) -> str:
    return what.partition(": ")[0]


def _kind_of(what: str) -> tuple[str, str]:
    return _setting_of(what), Path(what).suffix


def follow_code(run_dir: Path, config: RunConfig) -> dict[str, str]:
    """Add to the record in `run_dir` the hashes of code that is another now, as the run goes on.

    Returns:
        The code that was ever another in this run, what → all its hashes in their order.
    Raises:
        ConfigError: the record is damaged.
        RecordError: it cannot be written.
    """
    from zoo.measure.files import write_text  # here, not at the top: a sweep's check needs none

    known, new = _known(run_dir), record(config)["code"]
    added = {
        what: f"{known['code'][what]}{THEN}{hashed}"
        for what, hashed in new.items()
        if _last(known["code"].get(what, hashed)) != hashed
    }
    known["code"] |= added
    if added:
        write_text(run_dir / RECORD, json.dumps(known, indent=1))
    return {what: hashes for what, hashes in known["code"].items() if THEN in hashes}


def outdated(config: RunConfig) -> list[str]:
    """Files of the code that settings name which were edited after this process imported them."""
    found = set[str]()
    for _, key, value in _named(config):
        if key in CODE_KEYS and not value.startswith("zoo."):
            with contextlib.suppress(ConfigError):  # somebody else's error to name
                found.update(edited_since_import(locate(value)))
    return sorted(found)


def unlike_siblings(run_dir: Path, identity: str, new: Record) -> str:
    """What runs of other seeds beside `run_dir` were made of that this one is not; "" for nothing.

    A sibling of another configuration or without a good record tells nothing, nor does one that
    would start anew.

    Args:
        identity: hash of the configuration.
        new: the record of this run.
    """
    told = []
    for sibling in sorted(run_dir.parent.glob("seed_*")):
        begun = (sibling / "summary.json").exists() or any(sibling.glob("checkpoints/step_*"))
        if not begun or sibling.name == run_dir.name:
            continue
        with contextlib.suppress(ConfigError, OSError, ValueError, TypeError, KeyError):
            if json.loads((sibling / "meta.json").read_bytes())["config_hash"] != identity:
                continue
            told += [
                f"{what} in {sibling.name} (hash {hashes} there, {new[kind][what]} here)"
                for kind, known in _known(sibling).items()
                for what, hashes in known.items()
                if new[kind].get(what, hashes) != hashes
            ]
    more = f"; and {len(told) - 3} more" if len(told) > 3 else ""
    return "; ".join(told[:3]) + more


def _known(run_dir: Path) -> Record:
    """What the record in a run's folder says; a folder without one knows nothing."""
    path = run_dir / RECORD
    if not path.exists():
        return {"files": {}, "code": {}}
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
        return {
            kind: {what: str(hashes) for what, hashes in dict(known[kind]).items()}
            for kind in ("files", "code")
        }
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"{path} is damaged ({type(error).__name__}: {error}). Delete it to go on without "
            "knowing whether the run's data and models are the ones it began with."
        ) from None


def _last(hashes: str) -> str:
    return hashes.rpartition(THEN)[2]


def check_alike(config: RunConfig, known: Mapping[str, Any]) -> None:
    """Refuse processes that were started for different runs: ranks would train as one and differ.

    Args:
        known: what tells runs apart (hash, seed, folder), beside the files and the code.
    Raises:
        ConfigError: names the process and what differs, settings first.
    """
    if world_size() == 1:
        return
    files = record(config)
    mine = {
        "settings": {k: str(v) for k, v in by_dotted_name(resolved(config)).items()},
        "all": {**known, **files["files"], **files["code"]},
    }
    first, *others = gathered(mine)
    for rank, other in enumerate(others, 1):
        if differing := _differing(first["all"], other["all"]):
            shown = _differing(first["settings"], other["settings"]) or differing
            more = f" (and {len(shown) - 3} more)" if len(shown) > 3 else ""
            raise ConfigError(
                f"process {rank} was started for another run than process 0: "
                f"{'; '.join(shown[:3])}{more}. Start all processes with the same command, code "
                "and files."
            )


def prompts_hash(prompts: Iterable[Prompt]) -> str:
    """Of prompts in their order, with ids and columns."""
    digest = hashlib.blake2b(digest_size=8)
    for prompt in prompts:
        told = (prompt.id, len(prompt.token_ids), _plain_columns(prompt))
        digest.update(repr(told).encode())
        digest.update(array("q", prompt.token_ids))
    return digest.hexdigest()


def problem_hash(prompt: Prompt, *outputs: Any) -> str:
    """Of what a problem says and is judged by, whatever tokenizer reads it: 8 hexadecimal digits.

    Args:
        outputs: what belongs to it beside the prompt, as the texts of a preference.
    """
    told = (content_of(prompt), _plain_columns(prompt), outputs)
    return hashlib.blake2b(repr(told).encode(), digest_size=4).hexdigest()


def _plain_columns(prompt: Prompt) -> list[tuple[str, Any]]:
    # Other values need not read alike in another process.
    return sorted(
        ((k, v) for k, v in prompt.columns.items() if _is_plain(v)), key=lambda pair: pair[0]
    )


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(_is_plain(part) for pair in value.items() for part in pair)
    return value is None or isinstance(value, str | int | float)


def check_same_rows(content_hash: str, what: str = "training rows") -> None:
    """Refuse processes whose data are not the same rows in the same order: each takes its share.

    Args:
        content_hash: of this process's.
        what: the rows' name in messages.
    Raises:
        ConfigError: names the process and what to do.
    """
    first, *others = gathered(content_hash)
    for rank, other in enumerate(others, 1):
        if other != first:
            raise ConfigError(
                f"process {rank} made other {what} than process 0, or in another order "
                f"(hash {other} there and {first} on process 0). Let the data be the same in every "
                "process: seed what they draw, and sort what they take from a set."
            )


def _differing(first: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    return [
        f"{what} is {other[what]!s:.60} there and {value!s:.60} on process 0"
        for what, value in first.items()
        if what in other and other[what] != value
    ]


def _strings(value: Any, setting: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _strings(inner, f"{setting}.{key}")
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _strings(inner, f"{setting}.{index}")
    elif isinstance(value, str) and value:
        yield setting, value


def _source(setting: str, name: str) -> dict[str, str]:
    if name.startswith("zoo."):  # the commit in meta.json tells
        return {}
    # Code whose import fails is somebody else's error to name.
    with contextlib.suppress(ConfigError):
        return {f"{setting}={name}": identity(locate(name))}
    return {}


def _files(what: str, path: Path, outputs: Path) -> Iterator[tuple[str, Path]]:
    if path.is_file():
        yield what, path
        return
    deep = not _is_broad(path, outputs)
    for file in islice(_inside(path, deep, seen=set()), MOST_FILES):
        yield f"{what}: {file.relative_to(path).as_posix()}", file


def _is_broad(folder: Path, outputs: Path) -> bool:
    """Whether files come and go in a folder that have nothing to do with a run."""
    places = [place.resolve() for place in (Path.cwd(), Path.home(), outputs)]
    return any(place.is_relative_to(folder.resolve()) for place in places)


def _inside(folder: Path, deep: bool, seen: set[Path]) -> Iterator[Path]:
    """The files of a folder, and of those in it, but for notes, runs and what is hidden."""
    seen.add(folder.resolve())  # links may lead in a circle
    for item in _listed(folder):
        if item.is_file() and item.suffix not in NOTES:
            yield item
        elif deep and item.is_dir() and item.resolve() not in seen:
            names = {inner.name for inner in _listed(item)}
            run = names >= {"meta.json", "config.yaml"}
            if not (run or names >= REPORT or "pyvenv.cfg" in names):
                yield from _inside(item, deep, seen)


def _listed(folder: Path) -> list[Path]:
    with contextlib.suppress(OSError):  # no folder, or one that nobody may read
        found = sorted(folder.iterdir())
        return [item for item in found if not item.name.startswith((".", "__pycache__"))]
    return []


def _adapted(folder: Path) -> Path | None:
    """The local model that an adapter of peft in a folder adapts."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        facts = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        return Path(facts["base_model_name_or_path"]).expanduser()
    return None


def _file_hash(path: Path) -> str:
    status = path.stat()
    return _hash(str(path.resolve()), status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=4 * MOST_FILES)
def _hash(path: str, size: int, stamp: int) -> str:
    """`stamp` is in the key so that a changed file is read anew; jobs of a sweep share the rest."""
    digest = hashlib.sha256(str(size).encode())
    with open(path, "rb") as source:
        if size <= WHOLE:
            digest.update(source.read())
        else:
            for index in range(SAMPLES):
                source.seek((size - BLOCK) * index // (SAMPLES - 1))
                digest.update(source.read(BLOCK))
    return _short(digest)


def _short(digest: Any) -> str:
    return digest.hexdigest()[:8]
