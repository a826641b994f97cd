"""What an algorithm is: a frozen dataclass of hyperparameters with three verbs."""

from __future__ import annotations

import contextlib
import linecache
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from zoo.batch import Batch
from zoo.config import ConfigError, check_method, member, settle_choices
from zoo.distributed import gathered

if TYPE_CHECKING:
    from zoo.models.models import Models


AS_IN = 'Write `yield LossTerm("policy", loss, {"entropy": (sum, count)})`.'


class DataKind(StrEnum):
    """What a source yields: prompts to sample from, or groups of rows that exist already."""

    prompts = "prompts"
    pairs = "pairs"
    rankings = "rankings"  # groups of K, `rewards` orders them; pairs will do, as K = 2
    examples = "examples"
    labelled = "labelled"


@dataclass(frozen=True)
class Needs:
    """What must exist for an algorithm to run; nothing else is loaded."""

    data: DataKind
    reference: bool = False
    # Offline: rows that are not in the data are read too, so the reference stays loaded (KTO)
    reference_live: bool = False
    critic: bool = False
    value_head: bool = False  # the policy's output has values too, read from its own backbone
    min_group_size: int = 1
    trains: tuple[str, ...] = ("policy",)
    # DPO, IPO, Bradley–Terry: the loss couples the rows of a group, so a micro-batch never cuts one
    rows_coupled: bool = False
    # The loss is advantages × something and nothing else: a group whose advantages are all 0 adds
    # nothing to it, so its forward and backward pass may be left out
    silent_without_advantage: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "data", member("needs.data", self.data, DataKind))
        roles = ("policy", "critic", "reward_model", "reference")
        named = isinstance(self.trains, tuple) and all(role in roles for role in self.trains)
        if not named or not self.trains:
            raise ValueError(
                "needs.trains must be a tuple of modules to train, policy, critic or reward_model, "
                f'got {self.trains!r}. Write, for example, trains=("policy",).'
            )
        if not isinstance(self.min_group_size, int) or self.min_group_size < 1:
            raise ValueError(
                "needs.min_group_size must be a whole number of at least 1, got "
                f"{self.min_group_size!r}."
            )


def called(algorithm: object) -> str:
    """What messages call an algorithm."""
    name = getattr(algorithm, "name", "") or getattr(algorithm, "__name__", "")
    return f"algorithm={name or type(algorithm).__name__}"


def needs_of(algorithm: Algorithm) -> Needs:
    """What an algorithm needs.

    Raises:
        ConfigError: it says something else, or what cannot be.
    """
    try:
        needs: object = algorithm.needs
    except ValueError as error:
        raise ConfigError(f"{called(algorithm)}: {error}") from error
    except Exception as error:
        raise ConfigError(
            f"{called(algorithm)}: `needs` must be a property that returns Needs(…), and raised "
            f"{type(error).__name__}: {error!s:.200}."
        ) from error
    if not isinstance(needs, Needs):
        raise ConfigError(
            f"{called(algorithm)}: `needs` must be a property that returns Needs(…), got "
            f"{needs!r:.80}."
        )
    for role, loaded in (("critic", needs.critic), ("reference", False)):
        if role in needs.trains and not loaded:
            way_out = "Return Needs(critic=True) too." if role == "critic" else "It stays frozen."
            raise ConfigError(
                f"{called(algorithm)} trains {role!r}, which its `needs` do not load as a module "
                f"under training. {way_out}"
            )
    return needs


# The verbs with what the loop gives them, by position.
CALLS = {
    "keep": ("batch",),
    "prepare": ("batch", "models"),
    "losses": ("batch", "models"),
    "initial_state": (),
    "next_state": ("state", "metrics"),
    "enough": ("metrics",),
}


def check_verbs(algorithm: Algorithm) -> None:
    """Refuse an algorithm whose verbs could not be called, before anything loads.

    Raises:
        ConfigError: no `losses`, or a verb that takes other arguments than it is given.
    """
    if getattr(type(algorithm), "losses", None) is Algorithm.losses:
        others = [name for name in dir(algorithm) if not name.startswith("_") and "loss" in name]
        found = sorted({*others} - {"losses"})
        hint = f" It has {', '.join(found)}: was that meant?" if found else ""
        raise ConfigError(
            f"{called(algorithm)} has no method losses(self, batch, models), so nothing would be "
            f"trained.{hint} {AS_IN}"
        )
    for verb, given in CALLS.items():
        check_method(algorithm, verb, given, called(algorithm))


def absent_model(error: BaseException, algorithm: Algorithm) -> str:
    """What to say of a use of a model that an algorithm's needs do not load; "" of other errors.

    Args:
        error: with its traceback, of which the line that failed is read.
    """
    wrong = isinstance(error, TypeError | AttributeError) and "'NoneType' object " in str(error)
    if not wrong or error.__traceback__ is None:
        return ""
    last = error.__traceback__
    while last.tb_next is not None:
        last = last.tb_next
    frame, code = last.tb_frame, last.tb_frame.f_code
    lines = linecache.getlines(code.co_filename)
    first, end, left, right = [*code.co_positions()][last.tb_lasti // 2]
    if first is None or left is None or first > len(lines):  # no positions were kept
        return ""
    block = [line.encode() for line in lines[first - 1 : end]]
    block[-1] = block[-1][:right]
    block[0] = block[0][left:]
    failed = "".join(b"".join(block).decode(errors="replace").split())
    called_none = isinstance(error, TypeError)
    none = failed.partition("(")[0] if called_none else failed.rpartition(".")[0]
    above = "".join(lines[code.co_firstlineno - 1 : first])
    before = above.removesuffix(lines[first - 1]) + lines[first - 1].encode()[:left].decode()
    if chain := re.search(r"(\w+\s*\.\s*)+$", before):  # a call on a line of its own begins there
        none = "".join(chain[0].split()) + none
    for role, way_out in _absent(algorithm.needs).items():
        # `ref = models.reference`, and then ref(batch)
        held = none in frame.f_locals and re.search(
            rf"\b{none}\s*=\s*(?!self\.)[\w.]+\.{role}\b", above
        )
        if held or re.fullmatch(rf"(?!self\.)[\w.]+\.{role}", none):
            return (
                f"{called(algorithm)}: it calls models.{role} (`{lines[first - 1].strip():.80}`: "
                f"{error!s:.80}), and its `needs` load none. {way_out}"
            )
    return ""


def _absent(needs: Needs) -> dict[str, str]:
    """role → what to do, of the models that are None in a run."""
    found = {}
    if not needs.reference:
        found["reference"] = "Return Needs(…, reference=True) from `needs`."
    elif needs.data is not DataKind.prompts and not needs.reference_live:
        found["reference"] = (
            "Read models.reference_logprobs(batch), which the data's rows have, or return "
            "Needs(…, reference_live=True) for others."
        )
    if not needs.critic:
        found["critic"] = "Return Needs(…, critic=True) from `needs`."
    for role in {"policy", "reward_model"} - {*needs.trains}:
        found[role] = f"Return Needs(…, trains={(*needs.trains, role)!r}) to train one."
    if "reward_model" in found:
        found["reward_model"] += " The scores of `reward` are batch.rewards."
    return found


@contextlib.contextmanager
def absent_models_named(algorithm: Algorithm) -> Iterator[None]:
    """A use of a model that was not loaded ends in a ConfigError that names it."""
    try:
        yield
    except (TypeError, AttributeError) as error:
        if told := absent_model(error, algorithm):
            raise ConfigError(told) from error
        raise


PER_TOKEN = ("sampling_logprobs", "old_logprobs", "ref_logprobs", "values", "advantages", "returns")


def checked_batch(algorithm: Algorithm, made: object) -> Batch:
    """What `prepare` returned.

    Raises:
        ConfigError: no batch, or one whose tensors do not belong to its tokens.
    """
    if not isinstance(made, Batch):
        raise ConfigError(
            f"{called(algorithm)}: prepare must return the batch, got {made!r:.80}. End it with, "
            "for example, `return batch.replace(advantages=advantages)`."
        )
    shape = made.input_ids.shape
    for name in PER_TOKEN:
        value = getattr(made, name)
        if value is None:
            continue
        got: object = f"{value!r:.80}"
        if isinstance(value, Tensor):
            if value.shape == shape and value.is_floating_point():
                continue
            got = list(value.shape) if value.shape != shape else f"{value.dtype}, which is no float"
        raise ConfigError(
            f"{called(algorithm)}: prepare must return {name} of the shape of input_ids, "
            f"{list(shape)}, got {got}. zoo.algorithms.common.over_tokens(value, batch) gives each "
            "token its row's value."
        )
    if made.advantages is None and algorithm.needs.silent_without_advantage:
        raise ConfigError(
            f"{called(algorithm)}: its `needs` say silent_without_advantage, and prepare returned "
            "no advantages. Set them, or leave silent_without_advantage out."
        )
    return made


def checked_state(algorithm: Algorithm, state: Any, verb: str) -> dict[str, float]:
    """What `initial_state` or `next_state` returned.

    Raises:
        ConfigError: no finite numbers by name, so that no checkpoint or metric could hold them, or
            other numbers on another process.
    """
    if getattr(type(algorithm), verb) is getattr(Algorithm, verb):  # nothing of its own
        return state
    named = isinstance(state, dict) and all(isinstance(name, str) for name in state)
    fit = named and all(_is_finite(value) for value in state.values())
    # Gathered before any is refused: a process that ended here would leave the others waiting
    states = gathered(state if fit else f"{state!r:.80}")
    for unfit in (one for one in states if isinstance(one, str)):
        raise ConfigError(
            f"{called(algorithm)}: {verb} must return finite numbers by name, got {unfit}. "
            'Return, for example, {"kl_coef": 0.1}, or {} for none.'
        )
    if any(other != states[0] for other in states):
        told = ", ".join(f"rank {i} {one!r:.80}" for i, one in enumerate(states))
        raise ConfigError(
            f"{called(algorithm)}: {verb} returned another state on another process ({told:.200}), "
            "so they would train by different losses. Use nothing but its arguments, which are "
            "the same on all."
        )
    return state


def _is_finite(value: object) -> bool:
    try:
        return isinstance(value, int | float) and math.isfinite(value)
    except OverflowError:  # 10**400
        return False


@dataclass(frozen=True)
class LossTerm:
    """One scalar to backpropagate, already divided by `batch.scale`, with what to log about it."""

    name: str
    loss: Tensor
    # name → (sum, count); pooled over micro-batches and ranks before the division
    metrics: Mapping[str, tuple[Tensor | float, Tensor | float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Algorithm:
    """Base of all algorithms; a subclass states `needs` and implements `losses`.

    The hyperparameters are the dataclass fields. `epochs` passes over a batch, each cut into
    `minibatches`, give epochs × minibatches optimizer steps (updates) for one batch.
    """

    epochs: int = 1
    minibatches: int = 1

    name: ClassVar[str] = ""

    def __post_init__(self) -> None:
        settle_choices(self, "algorithm")
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, float) and not math.isfinite(value):
                key = f"algorithm.{item.name}"
                raise ValueError(f"{key} must be finite, got {value}. Leave it out.")
        for key in ("epochs", "minibatches"):
            if getattr(self, key) < 1:
                raise ValueError(
                    f"algorithm.{key} must be at least 1, got {getattr(self, key)}: "
                    f"every batch is used at least once. Try algorithm.{key}=1."
                )

    @property
    def needs(self) -> Needs:
        raise NotImplementedError(f"{type(self).__name__} must state what it needs")

    @property
    def updates_per_step(self) -> int:
        return self.epochs * self.minibatches

    def keep(self, batch: Batch) -> Tensor:
        """[N] bool: the groups worth training on (default: all).

        A process that keeps fewer than another is given groups without a score and without a token
        under training in their place: they must add nothing to the loss.
        """
        return batch.completion_mask.new_ones(batch.n_groups)

    def prepare(self, batch: Batch, models: Models) -> Batch:
        """Once for each batch: baselines, log-probs, and what `models.learn` can learn already."""
        return batch

    def losses(self, batch: Batch, models: Models) -> Iterator[LossTerm]:
        """The scalars to minimise; each is backpropagated before the next one's forward."""
        raise NotImplementedError(f"{type(self).__name__} must yield its losses")

    def initial_state(self) -> dict[str, float]:
        """State across steps, such as an adaptive coefficient; kept in `models.state`."""
        return {}

    def next_state(self, state: dict[str, float], metrics: dict[str, Any]) -> dict[str, float]:
        """The state after a step, from metrics pooled over ranks; pure."""
        return state

    def enough(self, metrics: Mapping[str, float]) -> bool:
        """Whether an update with these metrics (pooled over ranks) is the last on its batch."""
        return False
