"""From a checked configuration to the parts of a run: the only file that wires."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from transformers import PreTrainedTokenizerBase

from zoo.algorithms.base import Algorithm, DataKind
from zoo.config import ConfigError, RunConfig
from zoo.data.reference_cache import reference_logprobs
from zoo.data.source import DatasetSource, Group
from zoo.data.tokenize import (
    decode_completion,
    encode_completions,
    stop_token_ids,
    tokenize_prompts,
)
from zoo.distributed import barrier, is_main, world_size
from zoo.evaluate.evaluator import Evaluator, TokenizedSet, tokenized_sets
from zoo.instantiate import resolved
from zoo.measure.timing import Timer
from zoo.models.critic import Critic
from zoo.models.loading import (
    cache_folder,
    check_model_config,
    load_model,
    load_tokenizer,
    weights_hash,
)
from zoo.models.models import Models
from zoo.models.policy import Policy
from zoo.models.recipe import resolve_start
from zoo.models.reference import load_reference
from zoo.rollout.engine import Sampling
from zoo.rollout.pairs import PairSet, cached_pairs, sample_pairs
from zoo.rollout.source import RolloutSource
from zoo.train.optimizer import make_optimizer
from zoo.train.update import Trainable
from zoo.types import PreferencePair, Prompt, Reward

Task = Callable[[str, int | None], Any]  # a progress context that yields advance(n)


@dataclass
class Run:
    """The parts of a run, ready for the loop."""

    config: RunConfig
    algorithm: Algorithm
    accelerator: Accelerator
    tokenizer: PreTrainedTokenizerBase
    models: Models
    trainables: dict[str, Trainable]
    source: Any  # RolloutSource or DatasetSource
    evaluator: Evaluator
    engine: Any
    timer: Timer
    start_hash: str
    max_completion_length: int
    policy: Policy  # unwrapped
    heldout: TokenizedSet | None = None
    presampled: PairSet | None = None  # what pair sampling cost, if the data are own samples
    facts: dict[str, Any] = field(default_factory=dict)


def check(config: RunConfig) -> None:
    """What concerns several groups at once, before any weight loads.

    Raises:
        ConfigError: a combination that cannot run, with the way out.
    """
    check_model_config(config.model)
    algorithm, data, train = config.algorithm, config.data, config.train
    needs = algorithm.needs
    offers = set(data.offers)
    name = algorithm.name or type(algorithm).__name__
    data_name = type(data).__name__
    reward = config.reward or (data.verifier() if "prompts" in offers else None)
    kind = str(needs.data)
    if kind not in offers:
        sampled = needs.data is DataKind.pairs and "prompts" in offers
        if not sampled:
            raise ConfigError(
                f"algorithm={name} reads {kind}, but data {data_name} offers only "
                f"{', '.join(sorted(offers))}. Choose a data set that offers {kind}, or an "
                f"algorithm that reads {' or '.join(sorted(offers))}."
            )
        if reward is None:
            raise ConfigError(
                f"algorithm={name} reads pairs and data {data_name} offers prompts without a "
                "verifier, so nothing could say which sample is better. Set reward=…, or use "
                "data that offers pairs."
            )
    if needs.data is DataKind.prompts and reward is None:
        raise ConfigError(
            f"data {data_name} has no verifier of its own, so algorithm={name} needs a reward. "
            "Set reward=…; `zoo --help` lists them."
        )
    samples = needs.data is DataKind.prompts or kind not in offers
    group_size = config.rollout.group_size
    if samples and group_size < needs.min_group_size:
        raise ConfigError(
            f"rollout.group_size must be at least {needs.min_group_size} for algorithm={name}, "
            f"got {group_size}: a group of one has no baseline. Try rollout.group_size=8."
        )
    if train.groups % world_size():
        raise ConfigError(
            f"train.groups={train.groups} is not a multiple of the {world_size()} processes: "
            f"whole groups are dealt to each. Try train.groups={world_size() * 8}."
        )
    if train.groups // world_size() < algorithm.minibatches:
        raise ConfigError(
            f"algorithm.minibatches={algorithm.minibatches} exceeds the "
            f"{train.groups // world_size()} groups that each process has a step "
            f"(train.groups={train.groups}). Lower it, or raise train.groups."
        )
    if train.stop_at.metric not in (None, "heldout/greedy"):
        raise ConfigError(
            f"train.stop_at.metric must be heldout/greedy or null, got {train.stop_at.metric!r}: "
            "the check while training is a quick greedy one."
        )
    if config.evaluate.samples and max(config.evaluate.pass_k, default=1) > config.evaluate.samples:
        raise ConfigError(
            f"evaluate.pass_k={config.evaluate.pass_k} needs at least "
            f"{max(config.evaluate.pass_k)} samples a problem, got evaluate.samples="
            f"{config.evaluate.samples}. Raise it, or drop the larger k."
        )


def make_accelerator(config: RunConfig) -> Accelerator:
    """Devices and data parallelism; precision stays ours."""
    ddp = DistributedDataParallelKwargs(broadcast_buffers=False)
    cpu = config.train.device == "cpu"
    return Accelerator(mixed_precision="no", cpu=cpu or None, kwargs_handlers=[ddp])  # pyright: ignore


def build(config: RunConfig, accelerator: Accelerator, task: Task) -> Run:
    """Load what the algorithm needs, and nothing else.

    Raises:
        ConfigError: models, data or tokenizer that do not fit together.
    """
    algorithm, data = config.algorithm, config.data
    needs = algorithm.needs
    device = accelerator.device
    model_config = resolve_start(config.model, task)
    tokenizer = load_tokenizer(model_config)
    # All processes but one wait, so that a hub is asked once.
    if not is_main():
        barrier()
    model = load_model(model_config, config.seed)
    if is_main():
        barrier()
    start_hash = weights_hash(model)
    _check_vocabulary(tokenizer, model)
    stops = stop_token_ids(tokenizer, getattr(model, "generation_config", None))
    pad = int(tokenizer.pad_token_id)  # pyright: ignore
    limit = config.rollout.max_new_tokens or data.max_new_tokens
    timer = Timer(device)
    on_policy = needs.data is DataKind.prompts
    temperature = config.rollout.temperature if on_policy else 1.0
    policy = Policy(model, temperature).to(device)
    policy.check_head()
    engine = config.rollout.engine(lambda ids: decode_completion(tokenizer, ids, stops), pad)
    engine.sync(policy)
    sampling = Sampling(config.rollout.temperature, limit, stops)

    def start() -> Policy:
        return load_reference(model_config, config.seed, temperature, str(device))

    models = Models(policy=policy, micro_batch_tokens=config.train.micro_batch_tokens)
    models.state = algorithm.initial_state()
    reward = config.reward or (data.verifier() if "prompts" in data.offers else None)
    presampled = None
    if on_policy:
        prompts = tokenize_prompts(tokenizer, data.prompts())
        source: Any = RolloutSource(
            prompts,
            engine,
            reward,
            groups=config.train.groups,
            group_size=config.rollout.group_size,
            sampling=sampling,
            seed=config.seed,
            pad_token_id=pad,
            keep=algorithm.keep,
            max_rounds=config.rollout.max_rounds,
            timer=timer,
        )
    else:
        groups, presampled = _groups(
            config, tokenizer, stops, engine, reward, sampling, start_hash, task
        )
        source = DatasetSource(groups, config.train.groups, config.seed, pad)
    if needs.reference and on_policy:
        models.reference = start()
    elif needs.reference:
        source.ref_logprobs = _cached_reference(
            config, source, start, start_hash, temperature, models, task
        )

    critic = None
    if needs.critic:
        critic = _critic(config, model_config)
        critic.to(device)
    trainables: dict[str, Trainable] = {}
    modules = {"policy": policy, "critic": critic}
    for role in needs.trains:
        module = modules.get(role)
        if module is None:
            raise ConfigError(
                f"algorithm={algorithm.name} trains {role!r}, which this version cannot build."
            )
        lr = config.train.lr
        if role == "critic" and config.train.critic_lr is not None:
            lr = config.train.critic_lr
        optimizer = make_optimizer(module, config.train, lr)
        wrapped, optimizer = accelerator.prepare(module, optimizer)
        trainables[role] = Trainable(wrapped, optimizer, lr)
        setattr(models, role, wrapped)
    sets = tokenized_sets(tokenizer, data.evaluation_sets(), config.evaluate.problems)
    evaluator = Evaluator(
        sets=sets,
        engine=engine,
        samples=config.evaluate.samples,
        pass_k=config.evaluate.pass_k,
        greedy=config.evaluate.greedy,
        max_new_tokens=limit,
        stop_token_ids=stops,
        seed=config.seed,
        pad_token_id=pad,
        texts_written=config.evaluate.texts_written,
        micro_batch_tokens=config.train.micro_batch_tokens,
        load_start=start if config.evaluate.kl_to_start else None,
        device=device,
    )
    return Run(
        config=config,
        algorithm=algorithm,
        accelerator=accelerator,
        tokenizer=tokenizer,
        models=models,
        trainables=trainables,
        source=source,
        evaluator=evaluator,
        engine=engine,
        timer=timer,
        start_hash=start_hash,
        max_completion_length=limit,
        policy=policy,
        heldout=next((s for s in sets if s.name == "heldout"), None),
        presampled=presampled,
    )


def _check_vocabulary(tokenizer: Any, model: Any) -> None:
    size = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > size:
        raise ConfigError(
            f"the tokenizer has {len(tokenizer)} tokens and the model only {size} embeddings, so "
            "some ids have none. Use the tokenizer that belongs to the model (model.tokenizer)."
        )


def _critic(config: RunConfig, start: Any) -> Critic:
    """A backbone of its own, from the policy's start unless the config names another."""
    source = start
    if config.model.critic is not None:
        source = replace(start, path=config.model.critic, architecture=None, recipe=None)
    model = load_model(source, config.seed)
    return Critic(model.base_model, int(model.config.get_text_config().hidden_size))


def _groups(
    config: RunConfig,
    tokenizer: Any,
    stops: tuple[int, ...],
    engine: Any,
    reward: Reward | None,
    sampling: Sampling,
    start_hash: str,
    task: Task,
) -> tuple[list[Group], PairSet | None]:
    """The groups of an offline run: from the data, or pairs sampled from the start."""
    data = config.data
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
    if kind is DataKind.labelled:
        rows = data.labelled()
        prompts = tokenize_prompts(tokenizer, [r.prompt for r in rows])
        encoded = encode_completions(tokenizer, prompts, [r.completion for r in rows], stops)
        return [
            Group(prompt, (tuple(ids),), (row.completion,), labels=(float(row.desirable),))
            for prompt, ids, row in zip(prompts, encoded, rows, strict=True)
        ], None
    if "pairs" in data.offers:
        pairs: list[PreferencePair] = data.pairs()
        return _pair_groups(tokenizer, pairs, stops), None
    assert reward is not None
    made = _sampled_pairs(config, tokenizer, stops, engine, reward, sampling, start_hash, task)
    if not made.pairs:
        raise ConfigError(
            f"none of the {made.completions} sampled completions made a pair: in every group all "
            "scores were equal (all right or all wrong). Use easier or harder prompts, a reward "
            "with finer steps, or a larger rollout.group_size."
        )
    return _pair_groups(tokenizer, made.pairs, stops), made


def _pair_groups(tokenizer: Any, pairs: list[PreferencePair], stops: Any) -> list[Group]:
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
    return [
        Group(prompts[i], (chosen[i], rejected[i]), (chosen_texts[i], rejected_texts[i]))
        for i in range(len(pairs))
    ]


def _sampled_pairs(
    config: RunConfig,
    tokenizer: Any,
    stops: tuple[int, ...],
    engine: Any,
    reward: Reward,
    sampling: Sampling,
    start_hash: str,
    task: Task,
) -> PairSet:
    data, rollout = config.data, config.rollout
    prompts = tokenize_prompts(tokenizer, data.prompts())
    budget = rollout.pair_completions
    if budget is None:
        budget = max(config.train.steps, 1) * config.train.groups * rollout.group_size
    gold = None
    if getattr(data, "chosen_is_gold", False):
        gold = _gold(tokenizer, data, stops)
    described = resolved(config)
    key = {
        "start": start_hash,
        "data": described["data"],
        "reward": described["reward"],
        "sampling": [sampling.temperature, sampling.max_new_tokens, list(stops)],
        "dtype": rollout.dtype,
        "group_size": rollout.group_size,
        "groups": config.train.groups,
        "completions": budget,
        "seed": config.seed,
        "gold": gold is not None,
    }

    def make() -> PairSet:
        with task("sampling pairs from the start", budget // rollout.group_size) as advance:
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

    with task("reference log-probs", None) as advance:
        found = reference_logprobs(
            source,
            config.train.steps,
            cache_folder() / "reference",
            start_hash,
            temperature,
            compute,
            lambda done, total: advance(0),
        )
    models.reference = None
    del reference
    gc.collect()
    return found


def output_folder(run_dir: Path) -> Path:
    """Creates a run's folder.

    Raises:
        ConfigError: it cannot be created or written.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        probe = run_dir / ".write_test"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"the run folder {run_dir} cannot be written: {error}. Set output=FOLDER to one that "
            "can."
        ) from error
    return run_dir
