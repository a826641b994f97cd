"""Set up the peers' environment: python -m benchmarks.speed.peers [FOLDER].

TRL 1.16.0 over the torch and transformers of this environment's versions, and beside it TRL
1.12.0, the last release with PPO. FOLDER is where `python -m benchmarks.speed` looks: by default
`peers` in zoo's cache.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import venv
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from zoo.models.loading import cache_folder

TRL, OLDER = "1.16.0", "1.12.0"


def default_folder() -> Path:
    return cache_folder() / "peers"


def python_of(folder: Path) -> Path:
    return folder / "trl" / "bin" / "python"


def older_of(folder: Path) -> Path:
    return folder / f"trl-{OLDER}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", metavar="FOLDER", type=Path, nargs="?", default=default_folder())
    folder: Path = parser.parse_args(arguments).folder
    venv.create(folder / "trl", with_pip=True)
    python = str(python_of(folder))
    pins = [
        f"{name}=={metadata.version(name).partition('+')[0]}" for name in ("torch", "transformers")
    ]
    for command in (
        [*pins, f"trl=={TRL}"],
        ["--no-deps", "--target", str(older_of(folder)), f"trl=={OLDER}"],
    ):
        status = subprocess.call([python, "-m", "pip", "install", "-q", *command])
        if status:
            return status
    print(f"peers are in {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
