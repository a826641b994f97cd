"""A start that a recipe makes: built once by an ordinary run, kept in the cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from zoo.claim import RUN_DIR_FILE, announced
from zoo.config import ConfigError, ModelConfig
from zoo.data.cache import locked
from zoo.models.loading import cache_folder, with_fetched

# Left over from a launcher of several processes; the recipe is one process of its own.
LAUNCHER_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    RUN_DIR_FILE,
)


def resolve_start(config: ModelConfig, task: Any = None) -> ModelConfig:
    """The model section with `recipe` replaced by the folder that the recipe's run made.

    The recipe is an experiment: `zoo experiment=NAME`, run in a process of its own, its folder
    named by the experiment and the hash of its configuration, behind a file lock.

    Raises:
        ConfigError: the recipe's run failed.
    """
    if config.recipe is None:
        return with_fetched(config)
    folder = build_recipe(config.recipe)
    return replace(config, recipe=None, path=str(folder), tokenizer=None)


def check_untouched(name: str, policy: Path, found: str) -> None:
    """Refuse a recipe's policy whose weights are no longer those that its run saved.

    Raises:
        ConfigError: names the folder to delete.
    """
    try:
        summary = json.loads((policy.parent / "summary.json").read_text(encoding="utf-8"))
        saved = summary.get("policy_hash") or found
    except (OSError, ValueError, AttributeError):
        saved = "unreadable"
    if saved != found:
        raise ConfigError(
            f"the weights of model.recipe={name} in {policy} were altered (hash {found}, its run "
            f"saved {saved}). Delete {policy.parent}: the next run makes it anew."
        )


def build_recipe(name: str) -> Path:
    """The policy folder of a recipe, made now if it is not in the cache."""
    home = cache_folder() / "models"
    pointer = home / f"{name}.run"
    with locked(home / name):
        pointer.unlink(missing_ok=True)  # what it says is told anew
        environment = {k: v for k, v in os.environ.items() if k not in LAUNCHER_VARIABLES}
        environment[RUN_DIR_FILE] = str(pointer)
        environment["ZOO_PARENT"] = str(os.getpid())  # an orphan would train on, without the lock
        overrides = [f"experiment={name}", f"output={home}", "measure.wandb=disabled"]
        # A finished run says so and returns at once, so this is also how the folder is found.
        command = [sys.executable, "-m", "zoo", *overrides]
        done = subprocess.run(command, env=environment)
        if done.returncode != 0:
            raise ConfigError(
                f"model.recipe={name} could not be built: `zoo {' '.join(overrides)}` ended with "
                f"status {done.returncode}; its messages stand above."
            )
        try:
            run_dir, _ = announced(pointer)
        except OSError as error:
            raise ConfigError(
                f"model.recipe={name} was run but left no word where ({error}). Set the "
                "environment variable ZOO_CACHE to a folder that can be written."
            ) from error
    policy = run_dir / "policy"
    if not (policy / "config.json").exists():
        raise ConfigError(f"model.recipe={name} made no policy in {policy}. Delete {run_dir}.")
    return policy
