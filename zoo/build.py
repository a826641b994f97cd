"""From a checked configuration to the parts of a run: the only file that wires."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import inspect
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from torch.nn.parallel import DistributedDataParallel

from zoo.algorithms.base import Algorithm, DataKind, check_verbs, checked_state, needs_of
from zoo.allocator import keep_freed_memory
from zoo.config import ConfigError, ModelConfig, OnError, RunConfig, Schedule, TooLong, TrainConfig
from zoo.data.fitting import (
    MAX_ROW_TOKENS,
    SHARE,
    context_of,
    cut_groups,
    cut_texts,
    distinct_groups,
    fitting,
    fitting_prompts,
    more_room,
)
from zoo.data.left_out import heard
from zoo.data.offered import check_golds, check_offers, overlap, rows_of, sets_of, verifier_of
from zoo.data.reference_cache import reference_logprobs
from zoo.data.source import DatasetSource, Group, groups_hash
from zoo.data.table import missing_golds, unjudged, without_problems
from zoo.data.tokenize import (
    Truncation,
    decode_completion,
    encode_completions,
    stop_token_ids,
    tokenize_prompts,
)
from zoo.distributed import (
    barrier,
    buffers_not_told,
    check_launcher,
    check_rank,
    expected_processes,
    is_main,
    leave_at_exit,
    meet,
    waiting_told,
    world_size,
)
from zoo.evaluate.best import check_best_metric
from zoo.evaluate.evaluator import Evaluator, TokenizedSet, tokenized_sets
from zoo.evaluate.preferences import PreferenceEvaluator, held_out
from zoo.identity import identity
from zoo.instantiate import resolved
from zoo.measure.cost import ModelCost
from zoo.measure.timing import Timer
from zoo.models.critic import Critic
from zoo.models.loading import (
    cache_folder,
    check_model_config,
    load_base,
    load_model,
    load_tokenizer,
    load_trained,
    reading,
    save_policy,
)
from zoo.models.lora import add_adapter, branch, is_adapter, merge_into
from zoo.models.models import Models
from zoo.models.policy import Policy, recompute
from zoo.models.recipe import check_untouched, resolve_start
from zoo.models.reference import load_reference, shared_reference
from zoo.models.reward_model import from_policy, merged_reward_model
from zoo.models.trunk import backbone_of
from zoo.rewards.score import Patience, fingerprint, load
from zoo.rollout.engine import Sampling
from zoo.rollout.pairs import PairSet, cached_pairs, sample_pairs
from zoo.rollout.source import RolloutSource
from zoo.train.gradients import Trainable
from zoo.train.inputs import check_same_rows, record
from zoo.train.optimizer import make_optimizer, offload_states
from zoo.types import LabelledCompletion, PreferencePair, Prompt, Reward

Task = Callable[[str, int | None], Any]  # a progress context that yields advance(n)


@dataclass
class Run:
    """The parts of a run, ready for the loop."""

    config: RunConfig
    algorithm: Algorithm
    accelerator: Accelerator
    tokenizer: Any
    models: Models
    trainables: dict[str, Trainable]
    source: Any  # RolloutSource or DatasetSource
    evaluator: Any  # Evaluator, or PreferenceEvaluator where no policy is trained
    engine: Any  # None: nothing is sampled
    timer: Timer
    start_hash: str
    reward_hash: str  # of a learned reward's model; "" where there is none
    start_model: ModelConfig  # where the weights came from
    max_completion_length: int
    policy: Policy | None  # unwrapped; None: only a reward model is trained
    start_cost: ModelCost
    heldout: TokenizedSet | None = None
    presampled: PairSet | None = None  # what pair sampling cost, if the data are own samples
    notes: list[tuple[str, str]] = field(default_factory=list)  # (kind, message) of warnings

    @property
    def role(self) -> str:
        """What the run makes, which is also the name of its folder."""
        return "reward_model" if self.policy is None else "policy"

    @property
    def made(self) -> Any:
        """The unwrapped module that the run makes, judges and saves."""
        if self.policy is not None:
            return self.policy
        return self.accelerator.unwrap_model(self.models.reward_model)

    @property
    def heldout_name(self) -> str:
        """The evaluation set that says how good it is."""
        return "heldout" if self.policy is not None else "heldout_pairs"

    @property
    def best_metric(self) -> str:
        """`evaluate.best_metric`, where `heldout` is whatever this run is held to."""
        name, slash, key = self.config.evaluate.best_metric.partition("/")
        return (self.heldout_name if name == "heldout" else name) + slash + key

    def save(self, folder: Path) -> None:
        """What the run makes, as an ordinary transformers folder, or an adapter as one of peft.

        Merging reads the base again in `model.dtype`, since the run may hold it in less. A reward
        model is always merged: whatever reads it looks for its head in an ordinary folder.
        """
        lora = self.start_model.adapter
        if self.policy is None:
            made = self.made
            if lora is not None:
                made = merged_reward_model(made, load_base(self.start_model, self.config.seed))
            made.save(folder, self.tokenizer)
            return
        model = self.policy.model
        if lora is not None and lora.merge_on_save:
            model = merge_into(load_base(self.start_model, self.config.seed), model)
        save_policy(model, self.tokenizer, folder)


@heard()  # what data leaves out is among the notes of `build`
def check(config: RunConfig) -> None:
    """What concerns several groups at once, before any weight loads.

    Raises:
        ConfigError: a combination that cannot run, with the way out.
    """
    check_model_config(config.model)
    algorithm, data, train = config.algorithm, config.data, config.train
    needs, offers = needs_of(algorithm), check_offers(data)
    check_verbs(algorithm)
    name = algorithm.name or type(algorithm).__name__
    data_name = type(data).__name__
    reward = _reward(config)
    kind = str(needs.data)
    if needs.data is DataKind.rankings and kind not in offers:
        kind = str(DataKind.pairs)  # groups of two
    if kind not in offers:
        sampled = needs.data is not DataKind.examples and "prompts" in offers
        if not sampled:
            raise ConfigError(
                f"algorithm={name} reads {kind}, but data {data_name} offers only "
                f"{', '.join(sorted(offers))}. Choose a data set that offers {kind}, or an "
                f"algorithm that reads {' or '.join(sorted(offers))}."
            )
        if reward is None:
            raise ConfigError(
                f"algorithm={name} reads {kind} and data {data_name} offers prompts without a "
                "verifier, so nothing could say which sample is better. Set reward=…, or use "
                f"data that offers {kind}.{missing_golds(data)}"
            )
    if needs.data is DataKind.prompts and reward is None:
        raise ConfigError(
            f"data {data_name} has no verifier of its own, so algorithm={name} needs a reward. "
            f"Set reward=…; `zoo --help` lists them.{missing_golds(data)}"
        )
    samples = needs.data is DataKind.prompts or kind not in offers
    group_size = config.rollout.group_size
    if samples and group_size < needs.min_group_size:
        raise ConfigError(
            f"rollout.group_size must be at least {needs.min_group_size} for algorithm={name}, "
            f"got {group_size}: a group of one has no baseline. Try rollout.group_size=8."
        )
    if train.groups % world_size():
        near = max(1, round(train.groups / world_size()))
        raise ConfigError(
            f"train.groups={train.groups} is not a multiple of the {world_size()} processes: "
            f"whole groups are dealt to each. Try train.groups={near * world_size()}."
        )
    if train.groups // world_size() < algorithm.minibatches:
        raise ConfigError(
            f"algorithm.minibatches={algorithm.minibatches} exceeds the "
            f"{train.groups // world_size()} groups that each process has a step "
            f"(train.groups={train.groups}). Lower it, or raise train.groups."
        )
    if train.stop_at.metric is not None and "policy" not in needs.trains:
        raise ConfigError(
            f"train.stop_at.metric={train.stop_at.metric} is about a policy's answers, and "
            f"algorithm={name} trains none. Leave train.stop_at out (metric=null, value=0)."
        )
    if not 0 <= config.evaluate.heldout_pairs < 1:
        raise ConfigError(
            "evaluate.heldout_pairs must be a share of the prompts, at least 0 and below 1, got "
            f"{config.evaluate.heldout_pairs}. Try 0.1."
        )
    if train.stop_at.metric not in (None, "heldout/greedy"):
        raise ConfigError(
            f"train.stop_at.metric must be heldout/greedy or null, got {train.stop_at.metric!r}: "
            "the check while training is a quick greedy one."
        )
    rows = _training_rows(config)  # so that a missing file is not found after the weights loaded
    if train.reward_on_error is OnError.stop and samples:
        check_golds((row for row in rows if isinstance(row, Prompt)), reward)
    evaluate = config.evaluate
    trains_policy = "policy" in needs.trains
    sets = sets_of(data) if trains_policy else []
    if train.reward_on_error is OnError.stop:
        for one in sets:
            check_golds(one.prompts, one.verifier)
    check_best_metric(evaluate.best_metric, sets, evaluate.pass_k, trains_policy)
    heldout = [one for one in sets if one.name == "heldout" and one.kind == "accuracy"]
    if train.stop_at.metric is not None and not any(one.prompts for one in heldout):
        raise ConfigError(
            f"train.stop_at.metric={train.stop_at.metric}, but {without_problems(data, heldout)} "
            "No answer could reach the target: leave train.stop_at out (metric=null, value=0), or "
            "use data that hold out prompts with right answers."
        )


@heard()
def check_judging(config: RunConfig) -> None:
    """What `zoo evaluate` needs of a configuration, before any weight loads.

    Raises:
        ConfigError: what cannot run, or data without anything to judge.
    """
    check_model_config(config.model)
    check_offers(config.data)
    _check_limit(config)
    sets = sets_of(config.data)
    if not any(one.prompts or one.texts for one in sets):
        raise ConfigError(f"{without_problems(config.data, sets)} Nor has it texts to measure.")


def _training_rows(config: RunConfig) -> list[Any]:
    """What the run reads of its data: rows of the kind that is needed, or prompts to sample."""
    data, kind = config.data, str(config.algorithm.needs.data)
    wanted = (kind, "pairs", "prompts") if kind in ("pairs", "rankings") else (kind, "prompts")
    offered = next((name for name in wanted if name in set(data.offers)), None)
    _check_limit(config)
    return [] if offered is None else rows_of(data, offered)


def _check_limit(config: RunConfig) -> None:
    data = config.data
    limit = config.rollout.max_new_tokens or getattr(data, "max_new_tokens", None)
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        raise ConfigError(
            f"data {type(data).__name__}: max_new_tokens must be a whole number of at least 1, got "
            f"{limit!r}: it is how much the model may write. Set rollout.max_new_tokens=256, say."
        )


# What torchrun and accelerate set, and what accelerate reads
_LAUNCHER = re.compile(r"ACCELERATE_|(LOCAL_)?(WORLD_SIZE|RANK)$|MASTER_(ADDR|PORT)$|FSDP_")


def make_accelerator(config: RunConfig) -> Accelerator:
    """Devices and data parallelism; precision stays ours.

    Raises:
        ConfigError: a launcher that was asked for several processes started one, accelerate does
            not let them train together, there is no such device, the variables of a launcher ask
            for what cannot be, or not all processes came within PATIENCE.
    """
    check_launcher()
    check_rank()
    check_model_config(config.model)
    torch.set_float32_matmul_precision(config.model.matmul_precision)
    ddp = DistributedDataParallelKwargs(broadcast_buffers=False)
    wanted = config.train.device
    # Not told that it is on a CPU, accelerate makes each process of torchrun one of its own.
    together = expected_processes() > 1 and not torch.accelerator.is_available()
    cpu = wanted == "cpu" or (wanted == "auto" and together)
    leave_at_exit()
    # Listed first: accelerate adds some itself.
    told = [f"{name}={os.environ[name]}" for name in sorted(os.environ) if _LAUNCHER.match(name)]
    meets = expected_processes() > 1 or "LOCAL_RANK" in os.environ
    try:
        with waiting_told() if meets else contextlib.nullcontext():
            # Held until the process group has its own, which is served at the same place.
            met = meet() if meets and (cpu or torch.accelerator.is_available()) else None
            made = Accelerator(mixed_precision="no", cpu=cpu or None, kwargs_handlers=[ddp])  # pyright: ignore
            del met
    except Exception as error:
        if not told:
            raise
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]:.300}"
        raise ConfigError(
            "the processes and the device cannot be set up as these variables ask: "
            f"{', '.join(told)}. {reason}\nUnset those that no launcher set, or start zoo with "
            "torchrun --nproc_per_node N -m zoo …"
        ) from error
    if made.num_processes != (processes := expected_processes()):
        raise ConfigError(
            f"{processes} processes were started to train together (WORLD_SIZE), but accelerate "
            f"counts {made.num_processes} on {made.device}: each would train a model of its own. "
            f"Start them with torchrun --nproc_per_node {processes} -m zoo …, and train.device=cpu "
            "where they do not have a GPU each; or unset WORLD_SIZE for a single process."
        )
    if wanted not in ("auto", made.device.type) or made.device.type == "meta":
        raise ConfigError(
            f"train.device={wanted}, but accelerate found {made.device.type}: no such device is "
            "here, PyTorch was built without it, or ACCELERATE_USE_CPU or ACCELERATE_TORCH_DEVICE "
            "is set. Unset them, use train.device=auto, or install a PyTorch for the device "
            "(pytorch.org/get-started)."
        )
    if made.device.type == "cpu":
        keep_freed_memory()
    return made


@dataclass
class Start:
    """A policy with what belongs to it: tokenizer, stop tokens, engine."""

    model: ModelConfig  # without a recipe: where the weights really came from
    tokenizer: Any
    policy: Policy
    engine: Any
    stops: tuple[int, ...]
    pad: int
    limit: int  # of new tokens
    hash: str  # of the weights
    notes: list[tuple[str, str]] = field(default_factory=list)  # (kind, message) of warnings

    def fitting(self, prompts: list[Prompt], what: str, share: float = SHARE) -> list[Prompt]:
        """The prompts that fit the model's context; those left out become a note."""
        context = context_of(self.policy.model)
        kept, note = fitting_prompts(prompts, self.limit, context, what, share)
        self.notes += [("too_long", note)] if note else []
        return kept

    def fitting_groups(self, groups: list[Group], train: TrainConfig) -> list[Group]:
        """The groups to train on, within the model's context; those cut or left out are noted."""
        limits = (context_of(self.policy.model), train.max_row_tokens)
        limit = min((limit for limit in limits if limit is not None), default=None)
        limit_name = "the model's context" if limit == limits[0] else MAX_ROW_TOKENS
        if train.too_long is not TooLong.drop and limit is not None and groups:
            kept, note = cut_groups(groups, limit, Truncation(train.too_long.value), limit_name)
            self.notes += [("cut", note)] if note else []
        else:
            kept, note = fitting(
                groups,
                tokens=lambda g: len(g.prompt.token_ids) + max(map(len, g.completions)),
                name=lambda g: g.prompt.id,
                context=limit,
                what="training rows",
                way_out="Cut them (train.too_long=keep_start, or keep_end), leave them out, or "
                f"{more_room(limit_name)}.",
                limit_name=limit_name,
            )
            self.notes += [("too_long", note)] if note else []
        kept, note = distinct_groups(kept)
        self.notes += [("left_out", note)] if note else []
        return kept


def load_start(config: RunConfig, device: torch.device, temperature: float, task: Task) -> Start:
    """The starting policy, on its device, with an engine that holds its weights.

    Raises:
        ConfigError: nothing to load, or a tokenizer and a model that do not fit together.
    """
    found = resolve_start(config.model, task)
    tokenizer: Any = load_tokenizer(found)
    # The others wait for the main process, so that a hub is asked once.
    if not is_main():
        barrier()
    model, start_hash = load_trained(found, config.seed)
    if is_main():
        barrier()
    if config.model.recipe is not None:
        check_untouched(config.model.recipe, Path(found.path or ""), start_hash)
    _check_vocabulary(tokenizer, model)
    stops = stop_token_ids(tokenizer, getattr(model, "generation_config", None))
    policy = Policy(model, temperature, **reading(found)).to(device)
    policy.check_head()
    pad = int(tokenizer.pad_token_id)
    engine = config.rollout.engine(lambda ids: decode_completion(tokenizer, ids, stops), pad)
    engine.sync(policy)
    limit = config.rollout.max_new_tokens or config.data.max_new_tokens
    return Start(found, tokenizer, policy, engine, stops, pad, limit, start_hash)


def make_evaluator(
    config: RunConfig, start: Start, again: Callable[[], Policy] | None = None
) -> Evaluator:
    """The evaluator of the data's sets; `again` loads the start afresh to measure drift from it."""
    settings = config.evaluate
    context = context_of(start.policy.model)
    sets = [
        replace(item, texts=cut_texts(item.texts, context, f"texts of the set {item.name}"))
        for item in tokenized_sets(
            start.tokenizer, config.data.evaluation_sets(), settings.problems
        )
    ]
    for item in sets:
        if item.prompts:  # none may be left out: a score would be of another set
            start.fitting(list(item.prompts), f"problems of the set {item.name}", share=0.0)
    return Evaluator(
        sets=sets,
        engine=start.engine,
        samples=settings.samples,
        pass_k=settings.pass_k,
        greedy=settings.greedy,
        max_new_tokens=start.limit,
        stop_token_ids=start.stops,
        seed=config.seed,
        pad_token_id=start.pad,
        texts_written=settings.texts_written,
        micro_batch_tokens=config.train.micro_batch_tokens,
        load_start=again if settings.kl_to_start else None,
        patience=_patience(config),
        device=next(start.policy.parameters()).device,
    )


def build(config: RunConfig, accelerator: Accelerator, task: Task) -> Run:
    """Load what the algorithm needs, and nothing else; what data leaves out becomes a note.

    Raises:
        ConfigError: models, data or tokenizer that do not fit together.
    """
    with heard() as said:
        run = _build(config, accelerator, task)
    run.notes += [("data", " ".join(said))] if said else []
    return run


def _build(config: RunConfig, accelerator: Accelerator, task: Task) -> Run:
    algorithm = config.algorithm
    needs = algorithm.needs
    device = accelerator.device
    on_policy = needs.data is DataKind.prompts
    temperature = config.rollout.temperature if on_policy else 1.0
    start = load_start(config, device, temperature, task)
    start_hash = start.hash
    start_cost = ModelCost.of(start.policy)
    if needs.value_head:
        start.policy.add_value_head()
    timer = Timer(device)

    from_adapter = is_adapter(start.model.path)
    shared = None
    if start.model.adapter is not None:  # its base is the policy's: nothing is loaded twice
        shared = shared_reference(start.policy, start.model, from_adapter)

    def again() -> Policy:
        if shared is not None:
            return shared
        return load_reference(start.model, config.seed, temperature, str(device))

    reward_hash = ""
    asked = on_policy or str(needs.data) not in config.data.offers
    if asked and load(_reward(config), device):  # a learned one's errors come before the first step
        reward_hash = fingerprint([_reward(config)])
    models = Models(policy=start.policy, micro_batch_tokens=config.train.micro_batch_tokens)
    models.state = checked_state(algorithm, algorithm.initial_state(), "initial_state")
    precisions = {config.rollout.dtype, config.model.compute_dtype}
    models.sampler_is_policy = precisions <= {None, config.model.dtype}
    presampled, judged = None, []
    if on_policy:
        source: Any = _rollouts(config, start, timer)
    else:
        groups, presampled = _groups(config, start, start_hash, task)
        groups = start.fitting_groups(groups, config.train)
        if "policy" not in needs.trains:
            groups, judged = held_out(groups, config.evaluate.heldout_pairs)
        source = DatasetSource(groups, config.train.groups, config.seed, start.pad)
    check_same_rows(source.content_hash)
    if needs.reference and (on_policy or needs.reference_live):
        models.reference = again()
    elif needs.reference:
        source.ref_logprobs = _cached_reference(
            config, source, again, start_hash, temperature, models, task
        )
    if needs.critic:
        models.critic = _critic(config, start).to(device)
    if "reward_model" in needs.trains:
        own = None if "policy" in needs.trains else start.policy.model
        model = own if own is not None else load_trained(start.model, config.seed)[0]
        made = from_policy(model, config.seed, **reading(start.model))
        models.reward_model = made.to(device)
    start.notes += _offload_reference(config, models, device)
    start.notes += without_effect(config)
    if "policy" in needs.trains and (told := overlap(_training_rows(config), sets_of(config.data))):
        start.notes.append(("overlap", told))
    if "policy" in needs.trains and (told := unjudged(config.data)):
        start.notes.append(("unjudged", told))
    policy: Policy | None = start.policy
    if "policy" in needs.trains:
        evaluator: Any = make_evaluator(config, start, again)
    else:  # its weights live on in what is trained; the rest is freed
        policy = models.policy = start.engine = None
        evaluator = PreferenceEvaluator(
            groups=judged,
            collate=source.collate,
            micro_batch_tokens=config.train.micro_batch_tokens,
            texts_written=config.evaluate.texts_written,
            device=device,
        )
    held = [*(one.content_hash for one in evaluator.sets), groups_hash(judged)]
    check_same_rows(" ".join(held), "problems of an evaluation")
    return Run(
        config=config,
        algorithm=algorithm,
        accelerator=accelerator,
        tokenizer=start.tokenizer,
        models=models,
        trainables=_trainables(config, models, accelerator),
        source=source,
        evaluator=evaluator,
        engine=start.engine,
        timer=timer,
        start_hash=start_hash,
        reward_hash=reward_hash,
        start_model=start.model,
        max_completion_length=start.limit,
        policy=policy,
        start_cost=start_cost,
        heldout=_target_problems(config, start) if config.train.stop_at.metric else None,
        presampled=presampled,
        notes=start.notes,
    )


def _target_problems(config: RunConfig, start: Start) -> TokenizedSet:
    """The held-out problems of `train.stop_at`: those after the reported ones, if there are any."""
    found = next(s for s in config.data.evaluation_sets() if s.name == "heldout")
    apart = found.prompts[config.evaluate.problems :][: config.train.stop_at.problems]
    prompts = apart or found.prompts[: config.train.stop_at.problems]
    made = tokenized_sets(start.tokenizer, [replace(found, prompts=prompts)], len(prompts))
    return made[0]


def _trainables(
    config: RunConfig, models: Models, accelerator: Accelerator
) -> dict[str, Trainable]:
    """An optimizer for each trained module, both prepared by accelerate."""
    trainables = {}
    for role in config.algorithm.needs.trains:
        module = getattr(models, role)
        lr = config.train.lr
        if role == "critic" and config.train.critic_lr is not None:
            lr = config.train.critic_lr
        if config.model.activation_checkpointing:
            recompute(module)
        made = make_optimizer(module, config.train, lr)
        if config.train.offload_optimizer and accelerator.device.type != "cpu":
            offload_states(made, torch.device("cpu"))
        with buffers_not_told():
            wrapped, optimizer = accelerator.prepare(module, made)
        plain = getattr(wrapped, "_orig_mod", wrapped)  # within torch.compile
        if world_size() > 1 and not isinstance(plain, DistributedDataParallel):
            raise ConfigError(
                f"the processes would not share the gradients of the {role}: accelerate made it a "
                f"{type(plain).__name__}, not a DistributedDataParallel. Start them with torchrun, "
                "without settings of accelerate such as ACCELERATE_USE_FSDP."
            )
        trainables[role] = Trainable(wrapped, optimizer, lr)
        setattr(models, role, wrapped)
    return trainables


def _rollouts(config: RunConfig, start: Start, timer: Timer) -> RolloutSource:
    return RolloutSource(
        start.fitting(tokenize_prompts(start.tokenizer, config.data.prompts()), "training prompts"),
        start.engine,
        _reward(config),
        groups=config.train.groups,
        group_size=config.rollout.group_size,
        sampling=Sampling(config.rollout.temperature, start.limit, start.stops),
        seed=config.seed,
        pad_token_id=start.pad,
        keep=config.algorithm.keep,
        group_is_baseline=config.algorithm.needs.min_group_size > 1,
        max_rounds=config.rollout.max_rounds,
        patience=_patience(config),
        timer=timer,
    )


def _reward(config: RunConfig) -> Any:
    """The configured reward, else the data's own verifier, else None."""
    if config.reward is not None:
        return config.reward
    return verifier_of(config.data) if "prompts" in config.data.offers else None


def _patience(config: RunConfig) -> Patience:
    return Patience(config.train.reward_timeout, config.train.reward_on_error)


def _check_vocabulary(tokenizer: Any, model: Any) -> None:
    size = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > size:
        raise ConfigError(
            f"the tokenizer has {len(tokenizer)} tokens and the model only {size} embeddings, so "
            "some ids have none. Use the tokenizer that belongs to the model (model.tokenizer)."
        )


def without_effect(config: RunConfig) -> Iterator[tuple[str, str]]:
    """What is set and does nothing in this run, where a sweep or a short trial may well do it."""
    train, algorithm = config.train, config.algorithm
    updates = train.steps * algorithm.updates_per_step
    constant = train.schedule is Schedule.constant
    if constant and train.lr_end != TrainConfig.lr_end:
        yield (
            "lr_end",
            f"train.lr_end={train.lr_end:g} has no effect with train.schedule=constant. Use "
            "train.schedule=linear or cosine, or leave lr_end out.",
        )
    if 0 < updates <= train.warmup_updates:
        yield (
            "warmup",
            f"train.warmup_updates={train.warmup_updates} is not below the run's {updates} updates"
            ": the learning rate never reaches train.lr. Lower it, or raise train.steps.",
        )
    if train.stop_at.metric is not None and 0 < train.steps < train.stop_at.every:
        yield (
            "stop_at",
            f"train.stop_at.every={train.stop_at.every} is above train.steps={train.steps}: "
            "whether the target is reached is never looked at. Lower it.",
        )
    if train.max_row_tokens is not None and str(algorithm.needs.data) == "prompts":
        yield (
            "max_row_tokens",
            f"train.max_row_tokens={train.max_row_tokens} is about the rows of a data set, and "
            "prompts are sampled from here: rollout.max_new_tokens limits what is written.",
        )
    if getattr(algorithm, "kl_stop", None) is not None and not constant:
        yield (
            "kl_stop",
            f"train.schedule={train.schedule} spans {updates} updates, and those that "
            "algorithm.kl_stop skips do not count: the learning rate may not come down to "
            "train.lr_end. train.schedule=constant is the same however many are skipped.",
        )


def _offload_reference(
    config: RunConfig, models: Models, device: torch.device
) -> list[tuple[str, str]]:
    """Send the reference to main memory if it is to wait there; notes of what does nothing."""
    asked = {
        "model.offload_reference": config.model.offload_reference,
        "train.offload_optimizer": config.train.offload_optimizer,
    }
    if device.type == "cpu":
        return [
            ("offload", f"{name}=true does nothing on a CPU: all is in main memory already.")
            for name, wanted in asked.items()
            if wanted
        ]
    if config.model.offload_reference and models.reference is not None:
        if config.model.adapter is not None:
            reason = "the reference has no weights of its own: they are the policy's."
            return [("offload", f"model.offload_reference=true does nothing here: {reason}")]
        models.reference_home = torch.device("cpu")
        models.reference.to(models.reference_home)
    return []


def _check_reads(name: str, source: ModelConfig, model: Any, tokenizer: Any) -> None:
    """Refuse a critic to which the policy's token ids mean something else, or nothing."""
    size = model.get_input_embeddings().weight.shape[0]
    way_out = "Choose a critic with the policy's tokenizer, or model.critic=null."
    if len(tokenizer) > size:
        raise ConfigError(
            f"model.critic={name} has {size} embeddings and the policy's tokenizer {len(tokenizer)}"
            f" tokens, so some ids have none. {way_out}"
        )
    own = tokenizer
    with contextlib.suppress(OSError, ValueError):  # a folder of weights alone has no tokenizer
        own = load_tokenizer(replace(source, tokenizer=None, chat_template=None), "model.critic")
    if own.get_vocab() != tokenizer.get_vocab():
        raise ConfigError(
            f"model.critic={name} has another tokenizer than the policy, whose token ids it would "
            f"misread. {way_out}"
        )


def _critic(config: RunConfig, start: Start) -> Critic:
    """A backbone of its own, from the policy's start unless the config names another.

    With adapters it has one of its own, and shares the frozen weights below it with the policy.
    """
    source = start.model
    if config.model.critic is not None:
        source = replace(source, path=config.model.critic, architecture=None, recipe=None)
        model, _ = load_trained(source, config.seed, "model.critic")
        _check_reads(config.model.critic, source, model, start.tokenizer)
    elif source.adapter is not None:
        trained_already = is_adapter(source.path)
        model = branch(start.policy.model, trained_already)
        if not trained_already:
            add_adapter(model, source, config.seed, "critic")
    else:
        model = load_model(source, config.seed)
    width = int(model.config.get_text_config().hidden_size)
    return Critic(backbone_of(model), width, **reading(source))


def _groups(
    config: RunConfig, start: Start, start_hash: str, task: Task
) -> tuple[list[Group], PairSet | None]:
    """The groups of an offline run: from the data, or sampled from the start."""
    data, tokenizer, stops = config.data, start.tokenizer, start.stops
    kind = config.algorithm.needs.data
    if kind is DataKind.examples:
        examples = data.examples()
        prompts = tokenize_prompts(tokenizer, [e.prompt for e in examples])
        texts = [e.completion for e in examples]
        encoded = encode_completions(tokenizer, prompts, texts, stops)
        return [
            Group(prompt, (tuple(ids),), (text,))
            for prompt, ids, text in zip(prompts, encoded, texts, strict=True)
        ], None
    if kind is DataKind.labelled and "labelled" in data.offers:
        rows = data.labelled()
        start.notes += _one_label(rows, "Add rows of the other kind")
        return _labelled_groups(tokenizer, rows, stops), None
    if kind is DataKind.labelled:
        made = _sampled_pairs(config, start, start_hash, task)
        if not made.labelled:
            raise ConfigError(
                f"{_unscored(made)}, so none can be labelled. Use a reward that scores them."
            )
        way_out = "Use easier or harder prompts, a reward with finer steps, or another start"
        start.notes += _one_label(made.labelled, way_out)
        return _labelled_groups(tokenizer, made.labelled, stops), made
    if kind is DataKind.rankings and "rankings" in data.offers:
        return _ranking_groups(tokenizer, data.rankings(), stops), None
    if "pairs" in data.offers:
        return _pair_groups(tokenizer, data.pairs(), stops, kind), None
    made = _sampled_pairs(config, start, start_hash, task)
    if not made.pairs:
        if made.unscored == made.completions:
            raise ConfigError(f"{_unscored(made)}, so no pair could be made. Correct the reward.")
        others = f"{_unscored(made)}; of the others, " if made.unscored else ""
        raise ConfigError(
            f"none of the {made.completions} sampled completions made a pair: {others}in every "
            "group all scores were equal (all right or all wrong). Use easier or harder prompts, a "
            "reward with finer steps, or a larger rollout.group_size."
        )
    return _pair_groups(tokenizer, made.pairs, stops, kind), made


def _unscored(made: PairSet) -> str:
    failed = f" (the reward failed on {made.failed}, train.reward_on_error=abstain)"
    return f"{made.unscored} of {made.completions} sampled completions were not scored" + (
        failed if made.failed else ""
    )


def _one_label(rows: list[LabelledCompletion], way_out: str) -> list[tuple[str, str]]:
    """A note of labels that tell nothing apart."""
    good = sum(row.desirable for row in rows)
    if good not in (0, len(rows)):
        return []
    kind, other = ("desirable", "undesirable") if good else ("undesirable", "desirable")
    moves = "likelier" if good else "less likely"
    note = (
        f"all {len(rows)} completions to train on are labelled {kind} and none {other}: each only "
        f"becomes {moves}, whatever it says, and nothing tells good from bad. {way_out}"
    )
    return [("one_label", note + (", or imitate them (algorithm=sft)." if good else "."))]


def _labelled_groups(tokenizer: Any, rows: list[LabelledCompletion], stops: Any) -> list[Group]:
    prompts = tokenize_prompts(tokenizer, [r.prompt for r in rows])
    given = [r.completion_ids for r in rows]
    missing = [i for i, ids in enumerate(given) if ids is None]
    texts = [rows[i].completion for i in missing]
    encoded = encode_completions(tokenizer, [prompts[i] for i in missing], texts, stops)
    for i, ids in zip(missing, encoded, strict=True):
        given[i] = tuple(ids)
    return [
        Group(prompt, (tuple(ids or ()),), (row.completion,), labels=(float(row.desirable),))
        for prompt, ids, row in zip(prompts, given, rows, strict=True)
    ]


def _ranking_groups(tokenizer: Any, rankings: list[Any], stops: Any) -> list[Group]:
    """Groups of the largest K; where fewer were ranked, the places left over are empty."""
    prompts = tokenize_prompts(tokenizer, [r.prompt for r in rankings])
    texts = [text for r in rankings for text in r.completions]
    repeated = [p for p, r in zip(prompts, rankings, strict=True) for _ in r.completions]
    encoded = iter(encode_completions(tokenizer, repeated, texts, stops))
    size = max(len(r.completions) for r in rankings)
    groups = []
    for prompt, ranking in zip(prompts, rankings, strict=True):
        count = len(ranking.completions)
        ids = [tuple(next(encoded)) for _ in range(count)]
        spare = size - count
        # Both become float32, which cannot tell 100000001 from 100000000: so not the scores
        # themselves, but their places in the order and what they have above the lowest.
        levels = {score: float(i) for i, score in enumerate(sorted(set(ranking.scores)))}
        above = [score - min(levels) for score in ranking.scores]
        groups.append(
            Group(
                prompt,
                (*ids, *[()] * spare),
                (*ranking.completions, *[""] * spare),
                labels=(*(levels[score] for score in ranking.scores), *[0.0] * spare),
                strengths=(*above, *[0.0] * spare),
                present=(*[True] * count, *[False] * spare),
            )
        )
    return groups


def _pair_groups(
    tokenizer: Any, pairs: list[PreferencePair], stops: Any, kind: DataKind
) -> list[Group]:
    prompts = tokenize_prompts(tokenizer, [p.prompt for p in pairs])
    sides = []
    for ids_name, text_name in (("chosen_ids", "chosen"), ("rejected_ids", "rejected")):
        texts = [getattr(p, text_name) for p in pairs]
        given = [getattr(p, ids_name) for p in pairs]
        missing = [i for i, ids in enumerate(given) if ids is None]
        encoded = encode_completions(
            tokenizer, [prompts[i] for i in missing], [texts[i] for i in missing], stops
        )
        for i, ids in zip(missing, encoded, strict=True):
            given[i] = tuple(ids)
        sides.append((given, texts))
    (chosen, chosen_texts), (rejected, rejected_texts) = sides
    ranked = kind is DataKind.rankings
    margins = ranked and any(p.margin is not None for p in pairs)
    return [
        Group(
            prompts[i],
            (chosen[i], rejected[i]),
            (chosen_texts[i], rejected_texts[i]),
            labels=(1.0, 0.0) if ranked else (),
            # A pair without a margin among others with one: its order.
            strengths=(1.0 if (m := pairs[i].margin) is None else m, 0.0) if margins else (),
        )
        for i in range(len(pairs))
    ]


def _sampled_pairs(config: RunConfig, start: Start, start_hash: str, task: Task) -> PairSet:
    """The start's own samples, paired or labelled, under the budget of an on-policy run."""
    data, rollout, engine = config.data, config.rollout, start.engine
    reward: Reward = _reward(config)
    sampling = Sampling(rollout.temperature, start.limit, start.stops)
    prompts = start.fitting(tokenize_prompts(start.tokenizer, data.prompts()), "training prompts")
    budget = rollout.pair_completions
    if budget is None:
        budget = max(config.train.steps, 1) * config.train.groups * rollout.group_size
    gold = None
    labels = config.algorithm.needs.data is DataKind.labelled
    if getattr(data, "pair_with_gold", False) and not labels:
        gold = _gold(start.tokenizer, data, start.stops)
    described = resolved(config)
    key = {
        "start": start_hash,
        "content": _content_hash(prompts, reward, gold),
        "data": described["data"],
        "reward": described["reward"] or "verifier",
        "sampling": [sampling.temperature, sampling.max_new_tokens, list(start.stops)],
        "dtype": rollout.dtype or config.model.compute_dtype,
        "group_size": rollout.group_size,
        "groups": config.train.groups,
        "completions": budget,
        "seed": config.seed,
        "gold": gold is not None,
    }
    files = record(config)["files"]
    if judging := {name: found for name, found in files.items() if name.startswith("reward.")}:
        key["files"] = judging
    if labels:
        key["labels"] = True
    if config.train.reward_on_error is OnError.abstain:
        key["reward_on_error"] = "abstain"
    if config.model.matmul_precision != "highest":
        key["matmul_precision"] = config.model.matmul_precision

    def make() -> PairSet:
        what = config.algorithm.needs.data if labels else DataKind.pairs
        with task(f"sampling {what} from the start", budget // rollout.group_size) as advance:
            seen = 0

            def progress(done: int, total: int) -> None:
                nonlocal seen
                advance(done - seen)
                seen = done

            return sample_pairs(
                prompts,
                engine,
                reward,
                completions=budget,
                groups=config.train.groups,
                group_size=rollout.group_size,
                sampling=sampling,
                seed=config.seed,
                gold=gold,
                labels=labels,
                patience=_patience(config),
                progress=progress,
            )

    return cached_pairs(cache_folder() / "pairs", json.loads(json.dumps(key)), prompts, make)


def _gold(
    tokenizer: Any, data: Any, stops: tuple[int, ...]
) -> dict[str, tuple[tuple[int, ...], str]]:
    examples = data.examples()
    prompts: list[Prompt] = tokenize_prompts(tokenizer, [e.prompt for e in examples])
    encoded = encode_completions(tokenizer, prompts, [e.completion for e in examples], stops)
    return {
        example.prompt.id: (tuple(ids), example.completion)
        for example, ids in zip(examples, encoded, strict=True)
        if ids
    }


def _cached_reference(
    config: RunConfig,
    source: DatasetSource,
    start: Callable[[], Policy],
    start_hash: str,
    temperature: float,
    models: Models,
    task: Task,
) -> dict[int, torch.Tensor]:
    """Reference log-probs of the rows that the run reads; the reference is freed afterwards."""
    reference: Policy | None = None

    def compute(batch: Any) -> torch.Tensor:
        nonlocal reference
        if reference is None:
            reference = start()
        models.reference = reference
        device = next(reference.parameters()).device
        return models.reference_logprobs(batch.to(device))

    precision = config.model.compute_dtype  # another arithmetic gives other log-probs
    name = start_hash if precision in (None, config.model.dtype) else f"{start_hash}:{precision}"
    if config.model.matmul_precision != "highest":
        name += f":{config.model.matmul_precision}"
    seen = 0

    def progress(done: int, total: int) -> None:
        nonlocal seen
        advance(done - seen)
        seen = done

    with task("reference log-probs", len(source.visited(config.train.steps))) as advance:
        found = reference_logprobs(
            source,
            config.train.steps,
            cache_folder() / "reference",
            name,
            temperature,
            compute,
            progress,
        )
    models.reference = None
    del reference
    gc.collect()
    return found


def _content_hash(prompts: Sequence[Prompt], reward: Any, gold: Any) -> str:
    """Of what the settings only point at: prompts with their columns, golds, a reward's code."""
    rows = [[p.id, p.token_ids, sorted(p.columns.items(), key=str)] for p in prompts]
    code = ""
    with contextlib.suppress(OSError, TypeError):  # built in an interactive session
        code = inspect.getsource(type(reward))
    text = json.dumps([rows, code, sorted((gold or {}).items())], default=str)
    text += identity(reward) + fingerprint([reward])
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _is_of_a_run(meta: Path) -> bool:
    with contextlib.suppress(OSError):
        return b'"config_hash"' in meta.read_bytes()
    return False


def output_folder(run_dir: Path) -> Path:
    """Creates a run's folder.

    Raises:
        ConfigError: it cannot be created or written, or lies in the folder of another run.
    """
    for above in run_dir.parents:
        if (above / "config.yaml").is_file() and _is_of_a_run(above / "meta.json"):
            raise ConfigError(
                f"the run folder {run_dir} would lie in the folder of another run, {above}. Set "
                "output=FOLDER to one outside of it."
            )
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        probe = run_dir / f".write_test_{os.getpid()}"  # each process its own
        probe.touch()
        probe.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(
            f"the run folder {run_dir} cannot be written: {error}. Set output=FOLDER to one that "
            "can."
        ) from error
    return run_dir
