"""The run's configuration: plain dataclasses, usable from Python without hydra."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum, StrEnum
from pathlib import Path
from typing import Any, TypeVar

E = TypeVar("E", bound=Enum)


class Schedule(StrEnum):
    constant = "constant"
    linear = "linear"
    cosine = "cosine"


class Resume(StrEnum):
    auto = "auto"  # go on from the last good checkpoint where there is one
    never = "never"  # refuse a folder that holds a run
    must = "must"  # refuse to start anew


class OnError(StrEnum):
    stop = "stop"  # a reward's failure ends the run, with the row that caused it
    abstain = "abstain"  # that row is left unscored, the others are kept


class TooLong(StrEnum):
    """What happens to a row of data that is longer than it may be."""

    drop = "drop"  # left out, at most one in a hundred
    keep_start = "keep_start"  # the end of its completion is cut
    keep_end = "keep_end"  # the beginning of its prompt is cut


class Wandb(StrEnum):
    offline = "offline"
    online = "online"  # falls back to offline where no server answers
    disabled = "disabled"


class Device(StrEnum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"
    mps = "mps"


@dataclass
class LoraConfig:
    """Low-rank adapters: y = W·x + (alpha/rank)·B·A·x, where W is frozen and A, B are trained.

    B starts at 0, so the start is the model itself. Hu et al. 2021, arXiv:2106.09685, section 4.1.
    """

    rank: int | None = None  # of A and B; null: no adapter, every weight is trained
    alpha: float = 16.0  # the adapter's output is scaled by alpha / rank
    dropout: float = 0.0  # of the adapter's input, where gradients are made and nowhere else
    targets: list[str] | None = None  # names of linear maps ([q_proj, v_proj]); null: all of them
    merge_on_save: bool = False  # save an ordinary model instead of an adapter folder


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
    activation_checkpointing: bool = False  # recompute activations: less memory, more time
    offload_reference: bool = False  # on a GPU the reference waits in main memory while not used
    lora: LoraConfig | None = field(default_factory=LoraConfig)
    trust_remote_code: bool = False
    critic: str | None = None  # backbone of the critic; null: the policy's own start

    @property
    def adapter(self) -> LoraConfig | None:
        """The settings of the adapter, where there is one."""
        return self.lora if self.lora is not None and self.lora.rank is not None else None


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
    max_row_tokens: int | None = None  # of a data set's rows, with prompt; null: the context
    too_long: TooLong = TooLong.drop  # rows above that
    checkpoint_every: int = 15  # steps; 0: only at the end
    keep_checkpoints: int = 2  # the last ones; the best is kept besides
    offload_optimizer: bool = False  # on a GPU its states wait in main memory between updates
    step_on_zero_gradient: bool = False  # True: momentum moves weights though nothing was learnt
    max_bad_updates: int = 5  # refused (non-finite) updates in a row before the run stops
    reward_timeout: float | None = 1800.0  # seconds for a round's rewards; null: for ever
    reward_on_error: OnError = OnError.stop  # a reward that raises, hangs or returns nonsense
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
    memory: bool = True  # bytes by component and phase, in two metered steps after the last one
    progress: bool = True
    wandb: Wandb = Wandb.offline
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


PEER_GONE = "another process ended first"  # begins what a run says whose peer is gone


class ConfigError(ValueError):
    """A configuration that cannot run: what is wrong, the value, what to do."""


def place_in(module: str, error: BaseException) -> str:
    """The last line of a module's own in a traceback, as " (mine.py:12)"; "" without one."""
    frames = traceback.walk_tb(error.__traceback__)
    own = [(f.f_code.co_filename, n) for f, n in frames if f.f_globals.get("__name__") == module]
    return f" ({Path(own[-1][0]).name}:{own[-1][1]})" if own else ""


def member(name: str, value: object, kind: type[E]) -> E:
    """The member of an enumeration with this value.

    A name that stayed a text would be none of the members that code compares with, and would
    silently choose something else.

    Raises:
        ValueError: there is none; names `name`, the value and the choices.
    """
    try:
        return kind(value)
    except ValueError:
        names = ", ".join(str(each.value) for each in kind)
        raise ValueError(f"{name} must be one of {names}; got {value!r}.") from None


def settle_choices(settings: Any, group: str) -> None:
    """Make members of the choices that a dataclass was given by name (see `member`).

    Raises:
        ValueError: no member has that name.
    """
    for item in fields(settings):
        if isinstance(item.default, Enum):
            value = getattr(settings, item.name)
            found = member(f"{group}.{item.name}", value, type(item.default))
            object.__setattr__(settings, item.name, found)


def check_method(owner: object, verb: str, given: tuple[str, ...], name: str) -> None:
    """Refuse what could not be called as a method of a class of somebody else's.

    Args:
        given: what it is called with, by position.
        name: what messages call the owner.
    Raises:
        ConfigError: a property, no method at all, or one that takes other arguments.
    """
    told = f"{name}: {verb} must be a method {verb}({', '.join(('self', *given))})"
    if isinstance(getattr(type(owner), verb, None), property):
        raise ConfigError(f"{told}, and is a property. Take @property away.")
    method = getattr(owner, verb, None)
    if not callable(method):
        raise ConfigError(f"{told}, got {method!r:.80}.")
    try:
        signature = inspect.signature(method)
    except ValueError:  # none to be had: the call itself will tell
        return
    try:
        signature.bind(*given)
    except TypeError as error:
        raise ConfigError(f"{told}, and it takes {signature}: {error}.") from error


def by_dotted_name(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as one level: `train.lr` → its value."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            found |= by_dotted_name(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found
