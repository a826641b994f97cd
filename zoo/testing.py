"""Models of a few thousand weights, batches of every kind, and `check_algorithm`.

    from zoo.testing import check_algorithm

    def test_mine_keeps_the_contract():
        report = check_algorithm(Mine())
        assert report.passed, report

The contract is in `zoo.contract`; what it is measured with is here, for tests of one's own.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from zoo.algorithms.base import Algorithm, DataKind, Needs, checked_batch
from zoo.batch import Batch, collate
from zoo.models.critic import Critic, CriticOutput
from zoo.models.models import Models
from zoo.models.policy import Policy, PolicyOutput, over_mask, trained_positions
from zoo.seeds import torch_generator
from zoo.train.gradients import Trainable
from zoo.train.metrics import Pool
from zoo.train.update import update

if TYPE_CHECKING:
    from zoo.contract import Report

VOCABULARY = 24
STOP = 2  # the end of a completion, and the filler too: masks come from lengths, never from ids
MAX_COMPLETION = 12  # Scale.max_completion_length of every check
ROLES = ("policy", "reference", "critic", "reward_model")


# tiny models -------------------------------------------------------------------------------------


class BanditPolicy(nn.Module):
    """A policy without context: one logit for each of two tokens, whatever the prompt.

    logprobs[b, t] = log softmax(logits / temperature)[input_ids[b, t]] under completion_mask
    """

    def __init__(
        self,
        logits: Sequence[float] = (0.0, 0.0),
        temperature: float = 1.0,
        value_head: bool = False,
    ) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.tensor(list(logits)))
        self.temperature = temperature
        self.value = nn.Parameter(torch.zeros(())) if value_head else None

    @property
    def probability(self) -> float:
        """π(token 1)."""
        return float(torch.softmax(self.logits.detach() / self.temperature, 0)[1])

    def forward(self, batch: Batch) -> PolicyOutput:
        logprobs = torch.log_softmax(self.logits / self.temperature, 0)
        rows, columns = trained_positions(batch)
        entropy = -(logprobs.exp() * logprobs).sum().detach()
        output = PolicyOutput(
            over_mask(logprobs[batch.input_ids[rows, columns]], batch),
            torch.where(batch.completion_mask, entropy, 0.0),
        )
        if self.value is None:
            return output
        values = torch.where(batch.completion_mask, self.value, 0.0)
        return dataclasses.replace(output, values=values, final=self.value.expand(batch.n_rows))


class BanditCritic(nn.Module):
    """One number: the value of every prefix."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.zeros(()))

    def forward(self, batch: Batch) -> CriticOutput:
        values = torch.where(batch.completion_mask, self.value, 0.0)
        return CriticOutput(values, self.value.expand(batch.n_rows))


class BanditRewardModel(nn.Module):
    """A score for each of two tokens, read at the row's last token."""

    def __init__(self) -> None:
        super().__init__()
        self.strengths = nn.Parameter(torch.zeros(2))

    def forward(self, batch: Batch) -> Tensor:
        rows = torch.arange(batch.n_rows)
        return self.strengths[batch.input_ids[rows, batch.lengths - 1]]


class TinyRewardModel(nn.Module):
    """RewardModel(Batch) → scores [B], a linear map of the hidden state of the last real token."""

    def __init__(self, backbone: nn.Module, hidden_size: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = nn.Linear(hidden_size, 1)

    def forward(self, batch: Batch) -> Tensor:
        hidden = self.backbone(
            input_ids=batch.input_ids, attention_mask=batch.attention_mask.long(), use_cache=False
        ).last_hidden_state
        return self.head(hidden[torch.arange(batch.n_rows), batch.lengths - 1]).squeeze(-1)


def tiny_llama(seed: int = 0) -> Any:
    """A Llama of one layer and width 16, from its description; initialised wide."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=STOP,
        pad_token_id=None,
    )
    with seeded(seed):
        return AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()


def tiny_policy(seed: int = 0, temperature: float = 1.0) -> Policy:
    """The real `Policy` around `tiny_llama`."""
    return Policy(tiny_llama(seed), temperature)


def tiny_models(
    needs: Needs, *, seed: int = 0, drift: float = 0.0, temperature: float = 1.0
) -> Models:
    """The models that `needs` names; the policy stands `drift` away from the reference.

    What is not needed is None, as in a run. A reference is loaded for prompts, and where
    `needs.reference_live`; otherwise the batches carry its log-probs, as a data set's do.
    """
    policy = tiny_policy(seed, temperature)
    if needs.value_head:
        policy.add_value_head()
    models = WatchedModels(policy=policy)
    if needs.reference:
        models.reference = frozen(tiny_policy(seed, temperature))
    if needs.critic:
        with seeded(seed + 1):
            models.critic = Critic(tiny_llama(seed).base_model, 16)
    if "reward_model" in needs.trains:
        with seeded(seed + 1):
            models.reward_model = TinyRewardModel(tiny_llama(seed).base_model, 16)
    if drift:
        nudge(policy, drift, seed + 2)
        if models.critic is not None:
            nudge(models.critic, drift, seed + 3)
    return models


def nudge(module: nn.Module, size: float, seed: int) -> None:
    """Adds normal noise of this size to every weight."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += size * torch.randn(parameter.shape, generator=generator)


class WatchedModels(Models):
    """Models that remember which roles were read."""

    def __getattribute__(self, name: str) -> Any:
        if name in ROLES:
            object.__getattribute__(self, "__dict__").setdefault("touched", set()).add(name)
        return object.__getattribute__(self, name)


# batches -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """What a made batch looks like."""

    groups: int = 6
    group_size: int = 4
    prompt_lengths: tuple[int, ...] = (3, 6, 1, 4)
    completion_lengths: tuple[int, ...] = (5, 2, 8, 3, 4, 7, 1, 6, 9, 2)
    truncated: str = "some"  # some, all, none
    abstained: str = "none"  # none, some, all (prompts alone)
    rewards: str = "varied"  # varied, dead (equal in each group, groups differ), zero
    seed: int = 0


def group_size_for(needs: Needs) -> int:
    """Rows a group in the checks: 4 samples of a prompt, 2 of a pair, 3 of a ranking, 1 otherwise,
    or what is needed."""
    usual = {DataKind.prompts: 4, DataKind.pairs: 2, DataKind.rankings: 3}.get(needs.data, 1)
    return max(usual, needs.min_group_size)


def make_batch(needs: Needs, shape: Shape | None = None, **changes: Any) -> Batch:
    """A ragged batch of the kind that `needs.data` names, with random tokens.

    A completion ends with the stop token unless it is truncated, and the filler is that same
    token. Prompts come with rewards and who was scored, rankings with their order and which places
    hold an output; labelled rows with labels 1 and 0.
    """
    shape = shape or Shape(group_size=group_size_for(needs))
    shape = dataclasses.replace(shape, **changes)
    rows = shape.groups * shape.group_size

    def tokens(count: int, *place: int) -> list[int]:
        # Each list from a generator of its own, so that a longer one leaves the others alone.
        generator = torch_generator("testing", shape.seed, *place)
        return torch.randint(3, VOCABULARY, (count,), generator=generator).tolist()

    prompts = [
        tokens(shape.prompt_lengths[i % len(shape.prompt_lengths)], 0, i)
        for i in range(shape.groups)
    ]
    completions, truncated = [], []
    for i in range(rows):
        length = shape.completion_lengths[i % len(shape.completion_lengths)]
        cut = shape.truncated == "all" or (shape.truncated == "some" and i % 5 == 3)
        completions.append(tokens(length, 1, i) if cut else [*tokens(length - 1, 1, i), STOP])
        truncated.append(cut)
    batch = collate(
        [prompts[i // shape.group_size] for i in range(rows)],
        completions,
        group_size=shape.group_size,
        prompt_ids=[f"prompt {i}" for i in range(shape.groups)],
        pad_token_id=STOP,
        truncated=truncated,
    )
    if needs.data is DataKind.labelled:
        labels = (torch.arange(rows) % 2).float()
        return batch.replace(rewards=labels, scored=torch.ones(rows, dtype=torch.bool))
    if needs.data is DataKind.rankings:  # some with a place less
        there = torch.arange(rows) % 8 != 5
        return batch.replace(rewards=_rewards(shape), scored=there)
    if needs.data is not DataKind.prompts:
        return batch
    return batch.replace(rewards=_rewards(shape), scored=_scored(shape))


def _rewards(shape: Shape) -> Tensor:
    rows = shape.groups * shape.group_size
    if shape.rewards == "zero":
        return torch.zeros(rows)
    if shape.rewards == "dead":
        return (torch.arange(shape.groups) % 2).float().repeat_interleave(shape.group_size)
    # Multiples of a sixteenth: sums of them, shifted by a whole number, are exact.
    generator = torch_generator("testing", shape.seed, 2)
    return torch.randint(0, 9, (rows,), generator=generator) / 8 + (torch.arange(rows) % 2) / 16


def _scored(shape: Shape) -> Tensor:
    rows = torch.arange(shape.groups * shape.group_size)
    if shape.abstained == "none":
        return torch.ones_like(rows, dtype=torch.bool)
    if shape.abstained == "all":
        return torch.zeros_like(rows, dtype=torch.bool)
    return (rows % 3 != 1) & (rows >= shape.group_size)  # and one group without any score


def with_logprobs(batch: Batch, needs: Needs, models: Models) -> Batch:
    """What a source adds: the sampler's log-probs, or a data set's reference log-probs."""
    if needs.data is DataKind.prompts:
        return batch.replace(sampling_logprobs=models.policy_logprobs(batch))
    if needs.reference and not needs.reference_live:
        return batch.replace(ref_logprobs=models.reference_logprobs(batch))
    return batch


def widened(batch: Batch, columns: int) -> Batch:
    """The same rows with more padding on the right."""
    width = batch.input_ids.shape[1]

    def wide(name: str, value: Tensor) -> Tensor:
        if value.dim() < 2 or value.shape[1] != width:
            return value
        fill = STOP if name == "input_ids" else 0
        return torch.nn.functional.pad(value, (0, columns), value=fill)

    changed = {n: wide(n, v) for n, v in batch._tensors() if not n.startswith("extra[")}
    return batch.replace(**changed, extra={n: wide(n, v) for n, v in batch.extra.items()})


def bandit_batch(tokens: Sequence[int], group_size: int) -> Batch:
    """One-token completions; every group has a prompt of its own."""
    groups = len(tokens) // group_size
    return collate(
        [[i // group_size] for i in range(len(tokens))],
        [[token] for token in tokens],
        group_size=group_size,
        prompt_ids=[f"arm {i}" for i in range(groups)],
    )


# one step ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """One optimizer step that was computed and not taken."""

    metrics: dict[str, float]  # pooled; losses as loss/<term>
    gradients: dict[str, Tensor]  # role → all its gradients, flat; absent ones are 0
    refused: str = ""  # why `update` would not apply it


class _NoStep:
    """An optimizer that keeps the gradients instead of stepping."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.gradients = torch.zeros(0)

    def step(self) -> None:
        self.gradients = _flat_gradients(self.module)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.module.zero_grad(set_to_none=set_to_none)


def one_step(
    algorithm: Algorithm, prepared: Batch, models: Models, micro_batch_tokens: int = 1 << 20
) -> Outcome:
    """Loss, metrics and gradients of one optimizer step on a prepared batch."""
    keepers = {role: _NoStep(getattr(models, role)) for role in algorithm.needs.trains}
    pool = Pool()
    done = update(
        prepared,
        algorithm,
        models,
        {role: Trainable(keeper.module, keeper, 0.0) for role, keeper in keepers.items()},
        max_completion_length=MAX_COMPLETION,
        micro_batch_tokens=micro_batch_tokens,
        max_grad_norm=None,
        pool=pool,
        step_on_zero_gradient=True,  # a gradient of zeros is looked at too
    )
    gradients = {role: keeper.gradients for role, keeper in keepers.items()}
    return Outcome(pool.means(), gradients, "" if done.applied else done.reason)


def one_step_untrimmed(algorithm: Algorithm, prepared: Batch, models: Models) -> Outcome:
    """`one_step` with every column of padding left in place."""
    pool = Pool()
    modules = {role: getattr(models, role) for role in algorithm.needs.trains}
    for term in algorithm.losses(scaled(prepared), models):
        pool.add(f"loss/{term.name}", term.loss.detach())
        pool.add_all(term.metrics)
        term.loss.backward()
    gradients = {role: _flat_gradients(module) for role, module in modules.items()}
    for module in modules.values():
        module.zero_grad(set_to_none=True)
    return Outcome(pool.means(), gradients)


def scaled(batch: Batch) -> Batch:
    return batch.replace(scale=batch.local_scale(MAX_COMPLETION))


def _flat_gradients(module: nn.Module) -> Tensor:
    return torch.cat(
        [
            (torch.zeros_like(p) if p.grad is None else p.grad.detach().clone()).reshape(-1)
            for p in module.parameters()
        ]
    )


class _ProbedPolicy(nn.Module):
    """A policy with a free number added to each log-prob, to see which tokens a loss looks at."""

    def __init__(self, policy: Any, batch: Batch) -> None:
        super().__init__()
        self.inner = policy
        self.rows = {key: i for i, key in enumerate(batch.row_keys.tolist())}
        self.offsets = nn.Parameter(torch.zeros(batch.n_rows, batch.input_ids.shape[1]))

    def forward(self, batch: Batch) -> Any:
        out = self.inner(batch)
        found = [self.rows.get(key, -1) for key in batch.row_keys.tolist()]
        known = torch.tensor([i >= 0 for i in found])
        rows = self.offsets[torch.tensor(found).clamp(min=0), : batch.input_ids.shape[1]]
        offsets = torch.where(known[:, None], rows, 0.0)
        return dataclasses.replace(out, logprobs=out.logprobs + offsets)


def token_gradients(algorithm: Algorithm, prepared: Batch, batch: Batch, models: Models) -> Tensor:
    """[B, T] derivative of the step's loss by each log-prob of `batch`'s rows."""
    probe = _ProbedPolicy(models.policy, batch)
    models = with_roles(models, policy=probe)
    for term in algorithm.losses(scaled(prepared).trim(), models):
        if term.loss.requires_grad:
            term.loss.backward()
    grad = probe.offsets.grad
    for module in (probe, models.critic):
        if module is not None:
            module.zero_grad(set_to_none=True)
    return torch.zeros_like(probe.offsets) if grad is None else grad


class Littered(nn.Module):
    """A model whose outputs hold garbage wherever they do not count."""

    def __init__(self, inner: nn.Module, garbage: float) -> None:
        super().__init__()
        self.inner = inner
        self.garbage = garbage

    def forward(self, batch: Batch) -> Any:
        out = self.inner(batch)
        if isinstance(out, Tensor):
            return out
        changed = {}
        for item in dataclasses.fields(out):
            value = getattr(out, item.name)
            if isinstance(value, Tensor) and value.shape == batch.completion_mask.shape:
                changed[item.name] = torch.where(batch.completion_mask, value, self.garbage)
        return dataclasses.replace(out, **changed)


def littered(batch: Batch, garbage: float) -> Batch:
    """The batch with garbage in every entry outside its masks."""
    ids = torch.where(batch.attention_mask, batch.input_ids, VOCABULARY - 1)
    names = ("sampling_logprobs", "old_logprobs", "ref_logprobs", "values", "advantages", "returns")
    changed: dict[str, Tensor] = {"input_ids": ids}
    for name in names:
        value = getattr(batch, name)
        if value is not None:
            changed[name] = torch.where(batch.completion_mask, value, garbage)
    if batch.rewards is not None and batch.scored is not None:
        changed["rewards"] = torch.where(batch.scored, batch.rewards, garbage)
    return batch.replace(**changed)


def moved_models(models: Models, needs: Needs, size: float = 0.05) -> Models:
    """Copies of the trained modules, somewhere else."""
    changed = {}
    for index, role in enumerate(needs.trains):
        changed[role] = copy.deepcopy(getattr(models, role))
        nudge(changed[role], size, 77 + index)
    return with_roles(models, **changed)


def with_roles(models: Models, **roles: Any) -> Models:
    other = copy.copy(models)
    for role, module in roles.items():
        setattr(other, role, module)
    other.__dict__["touched"] = set()
    return other


def frozen(module: Any) -> Any:
    return module.requires_grad_(False).eval()


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


# many steps --------------------------------------------------------------------------------------


def bandit_run(
    algorithm: Algorithm,
    *,
    sign: float = 1.0,
    shift: float = 0.0,
    steps: int = 20,
    groups: int = 4,
    lr: float = 0.05,
    optimizer: str = "Adam",
    seed: int = 0,
) -> Any:
    """Twenty steps on two tokens, from π = (½, ½); the trained policy (or reward model).

    Token 1 is rewarded with `sign` and token 0 with 0, both plus `shift`. By what the algorithm
    needs: completions of the policy (groups of 8); pairs and rankings with that token ahead; that
    token as example; both tokens, labelled. Adam by default, since its steps do not
    depend on a loss's scale, which differs by design (a preference loss has β in its slope).
    """
    models = bandit_models(algorithm)
    needs = algorithm.needs
    trained = {role: getattr(models, role) for role in needs.trains}
    kind = getattr(torch.optim, optimizer)
    trainables = {
        role: Trainable(module, kind(module.parameters(), lr=lr), lr)
        for role, module in trained.items()
    }
    models.state = algorithm.initial_state()
    for step in range(steps):
        generator = torch.Generator().manual_seed(seed * 1000 + step)
        batch = _bandit_data(needs, models, sign, shift, groups, generator)
        if needs.data is DataKind.prompts:
            kept = algorithm.keep(batch)
            if not bool(kept.any()):
                continue
            batch = batch.select_groups(kept)
        take_step(algorithm, batch, models, trainables, generator)
    return next(iter(trained.values()))


def bandit_models(algorithm: Algorithm, logits: Sequence[float] = (0.0, 0.0)) -> Models:
    """The models that an algorithm needs, on two tokens."""
    needs = algorithm.needs
    models = Models(policy=BanditPolicy(logits, value_head=needs.value_head))
    if needs.reference:
        models.reference = frozen(BanditPolicy(logits))
    if needs.critic:
        models.critic = BanditCritic()
    if "reward_model" in needs.trains:
        models.reward_model = BanditRewardModel()
    models.state = algorithm.initial_state()
    return models


def _bandit_data(
    needs: Needs,
    models: Models,
    sign: float,
    shift: float,
    groups: int,
    generator: torch.Generator,
) -> Batch:
    better = 1 if sign > 0 else 0
    if needs.data is DataKind.prompts:
        size = max(8, needs.min_group_size)
        rows = groups * size
        chance = models.policy.probability
        drawn = (torch.rand(rows, generator=generator) < chance).long()
        batch = bandit_batch(drawn.tolist(), size)
        return batch.replace(
            rewards=sign * drawn.float() + shift,
            scored=torch.ones(rows, dtype=torch.bool),
            sampling_logprobs=models.policy_logprobs(batch),
        )
    if needs.data is DataKind.labelled:
        batch = bandit_batch([0, 1] * groups, 1)
        good = batch.input_ids[:, 1] == better
        return batch.replace(rewards=good.float(), scored=torch.ones_like(good))
    if needs.data in (DataKind.pairs, DataKind.rankings):
        batch = bandit_batch([better, 1 - better] * groups, 2)
        if needs.data is DataKind.rankings:
            order = (torch.arange(batch.n_rows) % 2 == 0).float()
            batch = batch.replace(rewards=order, scored=torch.ones_like(order).bool())
    else:
        batch = bandit_batch([better] * groups, 1)
    return with_logprobs(batch, needs, models)


def take_step(
    algorithm: Algorithm,
    batch: Batch,
    models: Models,
    trainables: dict[str, Trainable],
    generator: torch.Generator,
) -> None:
    """What the loop does with a batch: prepare, then epochs × minibatches updates."""
    pool = Pool()
    prepared = checked_batch(algorithm, algorithm.prepare(batch, models))
    for _ in range(algorithm.epochs):
        for minibatch in prepared.minibatches(algorithm.minibatches, generator):
            update(
                minibatch,
                algorithm,
                models,
                trainables,
                max_completion_length=MAX_COMPLETION,
                micro_batch_tokens=1 << 20,
                max_grad_norm=None,
                pool=pool,
            )
    models.state = algorithm.next_state(models.state, pool.means())


def train_on(algorithm: Algorithm, batches: Sequence[Batch], models: Models) -> None:
    """A step on each batch with AdamW, the models changed in place."""
    trainables = {}
    for role in algorithm.needs.trains:
        module = getattr(models, role)
        parameters = [p for p in module.parameters() if p.requires_grad]
        trainables[role] = Trainable(module, torch.optim.AdamW(parameters, lr=1e-2), 1e-2)
    for step, batch in enumerate(batches):
        generator = torch.Generator().manual_seed(step)
        take_step(algorithm, batch, models, trainables, generator)


# the contract ------------------------------------------------------------------------------------


def check_algorithm(algorithm: Algorithm, *, full: bool = False) -> Report:
    """Whether an algorithm keeps the contract, clause by clause.

    Args:
        algorithm: an instance with the hyperparameters to check.
        full: also compare one process with two (starts two more, about ten seconds).
    Returns:
        The report; nothing raises because an algorithm is wrong.
    """
    from zoo.contract import check_algorithms

    return check_algorithms([algorithm], full=full)[0]
