"""zoo: PPO, DPO and GRPO for language models on one shared infrastructure.

    import zoo

    config = zoo.RunConfig(algorithm=…, data=…, reward=…, rollout=…)
    summary = zoo.run(config)

Names are imported when they are first used, so that `import zoo` loads no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zoo.config import (
        ConfigError,
        EvaluateConfig,
        MeasureConfig,
        ModelConfig,
        RunConfig,
        StopAt,
        TrainConfig,
    )
    from zoo.instantiate import build, config_hash, run_dir
    from zoo.train.run import run

__version__ = "0.1.0"

_HOMES = {
    "ConfigError": "zoo.config",
    "EvaluateConfig": "zoo.config",
    "MeasureConfig": "zoo.config",
    "ModelConfig": "zoo.config",
    "RunConfig": "zoo.config",
    "StopAt": "zoo.config",
    "TrainConfig": "zoo.config",
    "build": "zoo.instantiate",
    "config_hash": "zoo.instantiate",
    "run_dir": "zoo.instantiate",
    "run": "zoo.train.run",
}

__all__ = [
    "ConfigError",
    "EvaluateConfig",
    "MeasureConfig",
    "ModelConfig",
    "RunConfig",
    "StopAt",
    "TrainConfig",
    "build",
    "config_hash",
    "run",
    "run_dir",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'zoo' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
