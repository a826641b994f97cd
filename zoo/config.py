"""The run's configuration: plain dataclasses, usable from Python without hydra."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Schedule(StrEnum):
    constant = "constant"
    linear = "linear"
    cosine = "cosine"


class Resume(StrEnum):
    auto = "auto"  # go on from the last good checkpoint where there is one
    never = "never"  # refuse a folder that holds a run
    must = "must"  # refuse to start anew


class Device(StrEnum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"
    mps = "mps"


@dataclass
class ModelConfig:
    """Where the policy comes from. Exactly one of path, architecture, recipe is set."""

    path: str | None = None  # hub name, local folder, or a .gguf file
    revision: str | None = None
    architecture: dict[str, Any] | None = None  # transformers config with model_type: from scratch
    tokenizer: str | None = None  # hub name or folder; "arithmetic": made for data=arithmetic
    recipe: str | None = None  # an experiment whose trained policy is the start (built once)
    fetch: str | None = None  # what `zoo fetch` can convert where no hub is reachable
    chat_template: str | None = None  # replaces the tokenizer's own
    dtype: str = "float32"  # of the trained (master) weights
    compute_dtype: str | None = None  # of forward and backward: bfloat16 for speed; null: dtype
    matmul_precision: str = "highest"  # of float32 products; medium: bfloat16 inside, for speed
    packed: bool = True  # a prompt once for all its completions, no padding
    attention: str = "sdpa"  # transformers' attn_implementation
    gradient_checkpointing: bool = False
    trust_remote_code: bool = False
    critic: str | None = None  # backbone of the critic; null: the policy's own start


@dataclass
class StopAt:
    """End training early, once a metric of the held-out set reaches a target (SFT to a start)."""

    metric: str | None = None  # for example heldout/greedy; null: train all steps
    value: float = 0.0
    problems: int = 100  # of the held-out set, checked greedily
    every: int = 40  # steps between checks
    decay_steps: int = 30  # learning rate to zero over these last steps, once reached


@dataclass
class TrainConfig:
    steps: int = 45  # batches from the source
    groups: int = 16  # N: prompts (or pairs, examples) a step, over all ranks
    lr: float = 2e-4
    critic_lr: float | None = None  # null: the same as lr
    schedule: Schedule = Schedule.linear
    lr_end: float = 0.1  # share of lr left at the last update
    warmup_updates: int = 0
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    adam_eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float | None = 1.0  # each module by itself; null: no clipping
    micro_batch_tokens: int = 8192  # rows × padded length of one forward and backward
    checkpoint_every: int = 15  # steps; 0: only at the end
    keep_checkpoints: int = 2  # the last ones; the best is kept besides
    step_on_zero_gradient: bool = False  # True: momentum moves weights though nothing was learnt
    max_bad_updates: int = 5  # refused (non-finite) updates in a row before the run stops
    stop_at: StopAt = field(default_factory=StopAt)
    device: Device = Device.auto


@dataclass
class EvaluateConfig:
    every: int = 0  # steps; 0: first and last only
    first: bool = True  # at step 0
    last: bool = True
    problems: int = 200  # at most, from each set
    samples: int = 4  # at T = 1 for each problem: accuracy and pass@k
    pass_k: list[int] = field(default_factory=lambda: [1, 4])
    greedy: bool = True
    kl_to_start: bool = True  # drift on sampled completions; loads the start for a moment
    heldout_pairs: float = 0.1  # share of the prompts whose pairs judge a reward model
    best_metric: str = "heldout/accuracy"  # never the training reward
    texts_written: int = 16  # completions kept for reading, from each set


@dataclass
class MeasureConfig:
    rollouts_per_step: int = 4  # completions written a step
    rollouts_every: int = 1
    memory: bool = True
    progress: bool = True
    wandb: str = "offline"  # offline | online | disabled
    wandb_project: str = "zoo"


@dataclass
class RunConfig:
    """One run. The four groups hold an instance, or a mapping with `_target_`."""

    algorithm: Any = None
    data: Any = None
    reward: Any = None  # null: the data's own verifier
    rollout: Any = None
    model: ModelConfig = field(default_factory=ModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    measure: MeasureConfig = field(default_factory=MeasureConfig)
    seed: int = 0
    experiment: str = "default"
    name: str | None = None  # null: the algorithm and a short hash of this configuration
    output: str = "outputs"
    resume: Resume = Resume.auto


class ConfigError(ValueError):
    """A configuration that cannot run: what is wrong, the value, what to do."""
