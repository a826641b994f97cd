"""TRL's GRPO losses and advantages beside zoo's: equal where they agree, apart by a stated term."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.peers.common import (
    COMPLETIONS,
    LIMIT,
    PROMPTS,
    REWARDS,
    assert_differ,
    assert_same,
    gradient,
    llama,
    moved,
    only_term,
    plain,
    sampled_batch,
    tokenizer,
    with_scale,
    words,
    zoo_models,
)
from zoo.algorithms.cispo import CISPO
from zoo.algorithms.dapo import DAPO
from zoo.algorithms.grpo import GRPO
from zoo.algorithms.gspo import GSPO
from zoo.functional import (
    Average,
    ImportanceKind,
    KLEstimator,
    aggregate,
    clipped_surrogate,
    group_advantages,
    importance_weights,
)

pytestmark = pytest.mark.peers

ROWS = len(COMPLETIONS)


class Side:
    """One trainer of TRL, its batch and zoo's batch of the same tokens, a few updates later."""

    def __init__(
        self,
        folder: Path,
        rewards: Sequence[float | None] = REWARDS,
        *,
        sampler: Sequence[Sequence[float]] | None = None,
        importance: str | None = None,
        env_mask: Sequence[Sequence[int]] | None = None,
        completions: Sequence[Sequence[int]] = COMPLETIONS,
        drift: float = 0.02,
        clip_max: float = 3.0,
        group_size: int = 4,
        **settings: Any,
    ) -> None:
        from datasets import Dataset
        from trl import GRPOConfig, GRPOTrainer

        def replay(prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
            extra = {} if env_mask is None else {"env_mask": [list(row) for row in env_mask]}
            return {
                "prompt_ids": [list(PROMPTS[i // group_size]) for i in range(ROWS)],
                "completion_ids": [list(row) for row in completions],
                "logprobs": None if sampler is None else [list(row) for row in sampler],
                **extra,
            }

        given = {
            "num_generations": group_size,
            "per_device_train_batch_size": ROWS,
            "num_iterations": 2,
        }
        given |= {"steps_per_generation": 1, "max_completion_length": LIMIT, "beta": 0.0}
        # Python's None would be read as 0; TRL's rewards abstain with None.
        self.trainer = GRPOTrainer(
            model=llama(folder),
            reward_funcs=lambda completions, **_: list(rewards),
            args=GRPOConfig(**plain(folder, **(given | settings))),
            train_dataset=Dataset.from_dict({"prompt": [words(p) for p in PROMPTS]}),
            processing_class=tokenizer(),
            rollout_func=replay,
        )
        trainer: Any = self.trainer
        self.model, self.reference = trainer.model, trainer.ref_model
        self.model.train()  # TRL divides by its accumulation steps in training alone
        if importance is not None:  # the correction is computed beside vLLM alone
            trainer.use_vllm = True
            trainer.vllm_importance_sampling_correction = True
            trainer.vllm_importance_sampling_mode = importance
            trainer.vllm_importance_sampling_clip_min = None
            trainer.vllm_importance_sampling_clip_max = clip_max
            trainer._last_loaded_step = trainer.state.global_step
        self.inputs = trainer._generate_and_score_completions(
            [{"prompt": words(PROMPTS[i // group_size])} for i in range(ROWS)]
        )
        trainer.current_gradient_accumulation_steps = 1
        trained = None
        if env_mask is not None:
            trained = [[bool(x) for x in row] for row in env_mask]
        self.batch = sampled_batch(rewards, completions, trained, group_size)
        temperature = settings.get("temperature", 1.0)
        self.models = zoo_models(self.model, self.reference, temperature)
        self.drift = drift

    def zoo(self, algorithm: Any) -> tuple[Tensor, Tensor]:
        """Loss and gradient, with TRL's advantages, so that only the loss is compared."""
        term = only_term(algorithm, self.prepared, self.models)
        return term.loss, gradient(self.model, term.loss)

    def trl(self, inputs: Any = None) -> tuple[Tensor, Tensor]:
        loss = self.trainer.compute_loss(self.model, self.inputs if inputs is None else inputs)
        return loss, gradient(self.model, loss)

    def prepare(self, algorithm: Any) -> Side:
        """zoo's half of the rollout, then some updates: both have the same old log-probs."""
        self.prepared = algorithm.prepare(self.batch, self.models)
        given = self.inputs["advantages"]
        self.prepared = self.prepared.replace(
            advantages=torch.where(self.prepared.completion_mask, given[:, None], 0.0)
        )
        moved(self.model, self.drift)
        return self

    def agree(self, algorithm: Any) -> None:
        for ours, theirs in zip(self.zoo(algorithm), self.trl(), strict=True):
            assert_same(ours, theirs)


# losses ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss_type", "algorithm"),
    [
        ("grpo", GRPO(epochs=2)),
        ("bnpo", GRPO(epochs=2, average=Average.token)),
        ("dapo", GRPO(epochs=2, average=Average.token)),
        ("dapo", DAPO(epochs=2, clip_eps_high=None)),
        ("dr_grpo", GRPO(epochs=2, average=Average.constant, scale_by_std=False)),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_clipped_losses_and_their_gradients_agree(
    tiny: Path, loss_type: str, algorithm: Any
) -> None:
    side = Side(tiny, loss_type=loss_type, drift=0.1).prepare(algorithm)
    ratio = side.trainer._metrics["train"]
    side.agree(algorithm)
    assert ratio["clip_ratio/region_mean"][-1] > 0.1, "nothing was clipped: a weak comparison"


def test_clip_higher_and_the_plain_k3_price_agree(tiny: Path) -> None:
    algorithm = GRPO(epochs=2, clip_eps_high=0.28, kl_coef=0.3)
    given = {"epsilon_high": 0.28, "beta": 0.3, "use_bias_correction_kl": False, "drift": 0.1}
    side = Side(tiny, loss_type="grpo", **given).prepare(algorithm)
    side.agree(algorithm)


def test_trls_default_kl_is_the_ratio_corrected_k3_and_zoos_is_the_plain_one(tiny: Path) -> None:
    algorithm = GRPO(epochs=2, kl_coef=0.3, kl_estimator=KLEstimator.k3_ratio)
    side = Side(tiny, loss_type="grpo", beta=0.3, drift=0.1).prepare(algorithm)
    side.agree(algorithm)
    assert_differ(side.zoo(replace(algorithm, kl_estimator=KLEstimator.k3))[1], side.trl()[1], 1e-3)


def test_both_train_the_distribution_that_was_sampled_at_a_temperature(tiny: Path) -> None:
    algorithm = GRPO(epochs=2, kl_coef=0.3, kl_estimator=KLEstimator.k3_ratio)
    side = Side(tiny, loss_type="grpo", beta=0.3, temperature=0.7, drift=0.1).prepare(algorithm)
    side.agree(algorithm)


def test_sequence_level_ratio_agrees_with_gspo(tiny: Path) -> None:
    algorithm = GSPO(epochs=2)
    side = Side(
        tiny,
        loss_type="grpo",
        importance_sampling_level="sequence",
        epsilon=3e-4,
        epsilon_high=4e-4,
        drift=0.01,
    )
    side.prepare(algorithm).agree(algorithm)
    assert 0 < side.trainer._metrics["train"]["clip_ratio/region_mean"][-1] < 1


def test_cispo_in_trl_caps_the_weight_at_epsilon_high_and_not_at_one_plus_it(tiny: Path) -> None:
    # zoo and the paper (Eq. 5): clip(ρ, ·, 1 + ε_high); TRL: min(ρ, epsilon_high).
    same, other = CISPO(epochs=2, clip_eps_high=0.2), CISPO(epochs=2, clip_eps_high=1.2)
    side = Side(tiny, loss_type="cispo", epsilon_high=1.2, drift=0.1).prepare(same)
    side.agree(same)
    assert_differ(side.zoo(other)[1], side.trl()[1], 1e-4)


def test_delta_is_the_dual_clip_where_it_lies_above_the_upper_bound(tiny: Path) -> None:
    algorithm = GRPO(epochs=2, average=Average.sequence)
    side = Side(tiny, loss_type="grpo", delta=1.5, drift=0.2).prepare(algorithm)
    out = side.models.policy(side.prepared)
    mask = side.prepared.completion_mask
    given = (out.logprobs, side.prepared.old_logprobs, side.prepared.advantages, mask)
    surrogate = clipped_surrogate(*given, dual_clip=1.5)
    assert bool(((surrogate.ratio > 1.5) & (side.prepared.advantages < 0)).any())
    scaled = with_scale(side.prepared)
    loss = aggregate(surrogate.loss, mask, scaled.scale, Average.sequence)
    theirs, their_gradient = side.trl()
    assert_same(loss, theirs)
    assert_same(gradient(side.model, loss), their_gradient)
    # Below 1 + ε_high TRL's delta caps positive advantages too; zoo's c leaves them alone.
    low = Side(tiny, loss_type="grpo", delta=1.05, drift=0.2).prepare(algorithm)
    out = low.models.policy(low.prepared)
    given = (out.logprobs, low.prepared.old_logprobs, low.prepared.advantages, mask)
    surrogate = clipped_surrogate(*given, dual_clip=1.05)
    capped = torch.minimum(surrogate.ratio, torch.tensor(1.05)) * low.prepared.advantages
    both = torch.minimum(capped, surrogate.ratio.clamp(0.8, 1.2) * low.prepared.advantages)
    loss = aggregate(-both, mask, scaled.scale, Average.sequence)
    assert_same(loss, low.trl()[0])
    ours = aggregate(surrogate.loss, mask, scaled.scale, Average.sequence)
    assert_differ(ours, low.trl()[0], 1e-3)


def test_tokens_of_a_tool_are_masked_alike(tiny: Path) -> None:
    # The second and third token of each long completion came from a tool.
    masks = [[int(len(row) < 5 or t not in (1, 2)) for t in range(len(row))] for row in COMPLETIONS]
    for loss_type, average in [("grpo", Average.sequence), ("dapo", Average.token)]:
        algorithm = GRPO(epochs=2, average=average)
        side = Side(tiny, loss_type=loss_type, env_mask=masks).prepare(algorithm)
        side.agree(algorithm)


# reductions --------------------------------------------------------------------------------------


def halves(inputs: dict[str, Any]) -> list[dict[str, Any]]:
    """TRL's batch in two micro-batches of unlike token counts: five rows and seven."""
    parts = []
    for rows in (slice(0, 5), slice(5, None)):
        parts.append({k: v[rows] if v.dim() else v for k, v in inputs.items()})
    return parts


def test_trls_bnpo_is_a_mean_of_micro_batch_means_and_dapo_is_not(tiny: Path) -> None:
    algorithm = GRPO(epochs=2, average=Average.token)
    token_means = {}
    for loss_type in ("bnpo", "dapo"):
        side = Side(tiny, loss_type=loss_type, gradient_accumulation_steps=1).prepare(algorithm)
        whole = side.zoo(algorithm)[1]
        side.trainer.current_gradient_accumulation_steps = 2
        side.trainer.args.steps_per_generation = 2
        parts = [side.trl(part)[1] for part in halves(side.inputs)]
        token_means[loss_type] = (whole, sum(parts))
    whole, theirs = token_means["dapo"]
    assert_same(whole, theirs)
    # bnpo: ½ Σ_m (Σ_{i∈m} l / Σ_{i∈m} n_i); zoo adds up the micro-batches' sums first.
    whole, theirs = token_means["bnpo"]
    assert_differ(whole, theirs, 1e-4)
    side = Side(tiny, loss_type="bnpo").prepare(algorithm)
    each = []
    for rows in (torch.arange(5), torch.arange(5, ROWS)):
        part = side.prepared.select_rows(rows, 1)
        each.append(gradient(side.model, only_term(algorithm, part, side.models).loss))
    assert_same((each[0] + each[1]) / 2, theirs)


def test_trls_dapo_divides_by_the_generation_batch_where_zoo_divides_by_the_step(
    tiny: Path,
) -> None:
    # One generation batch serves two optimizer steps: TRL divides each by half of all tokens.
    algorithm = GRPO(epochs=2, average=Average.token)
    side = Side(tiny, loss_type="dapo").prepare(algorithm)
    side.trainer.args.steps_per_generation = 2
    tokens = float(side.batch.completion_mask.sum())
    for rows, part in zip(
        (torch.arange(5), torch.arange(5, ROWS)), halves(side.inputs), strict=True
    ):
        step = side.prepared.select_rows(rows, 1)
        ours = only_term(algorithm, step, side.models).loss
        own = float(step.completion_mask.sum())
        assert own != tokens / 2
        assert_same(side.trl(part)[0] * (tokens / 2), ours * own)


def test_rows_without_trained_tokens_count_in_trls_means_and_not_in_zoos(tiny: Path) -> None:
    # Overlong filtering empties the two rows that were cut: TRL still divides by all twelve.
    for loss_type, average in [("grpo", Average.sequence), ("dr_grpo", Average.constant)]:
        algorithm = GRPO(epochs=2, average=average, mask_truncated=True)
        side = Side(tiny, loss_type=loss_type, mask_truncated_completions=True).prepare(algorithm)
        assert int(side.prepared.completion_mask.any(1).sum()) == ROWS - 2
        ours, theirs = side.zoo(algorithm), side.trl()
        assert_same(theirs[0] * ROWS, ours[0] * (ROWS - 2))
        assert_same(theirs[1] * ROWS, ours[1] * (ROWS - 2))


# advantages --------------------------------------------------------------------------------------


def zoo_advantages(side: Side, **options: Any) -> Tensor:
    batch = side.batch
    rewards = torch.where(batch.scored, batch.rewards, 0.0)
    return group_advantages(rewards, 4, scored=batch.scored, **options)


@pytest.mark.parametrize("scale_rewards", ["group", "batch", "none"])
@pytest.mark.parametrize("abstained", [False, True])
def test_advantages_agree_at_trls_epsilon(tiny: Path, scale_rewards: str, abstained: bool) -> None:
    rewards: list[float | None] = list(REWARDS)
    if abstained:
        rewards[1] = rewards[6] = None
    side = Side(tiny, rewards, scale_rewards=scale_rewards)
    options: dict[str, Any] = {"scale_by_std": scale_rewards != "none"}
    if scale_rewards == "batch":
        options["std_over"] = "batch"
    ours = zoo_advantages(side, **options, eps=1e-4)
    assert_same(ours, side.inputs["advantages"])


def test_the_epsilons_differ_by_a_factor_that_the_deviation_gives(tiny: Path) -> None:
    side = Side(tiny)
    ours, theirs = zoo_advantages(side), side.inputs["advantages"]
    std = torch.tensor(REWARDS).view(3, 4).std(dim=1).repeat_interleave(4)  # ddof 1 in both
    assert_same(theirs, ours * (std + 1e-6) / (std + 1e-4))
    assert_differ(theirs, ours, 1e-4)


def test_a_group_of_equal_rewards_is_rounding_noise_in_trl_and_zero_in_zoo(tiny: Path) -> None:
    # The mean of twelve times 70.1 is off by one float32 ulp, 7.6e-6; TRL divides that by
    # (a deviation of the same size + 1e-4), so every completion of a dead group moves the policy.
    side = Side(tiny, [70.1] * ROWS, group_size=ROWS)
    theirs = side.inputs["advantages"]
    assert 1e-2 < float(theirs.abs().min()) <= float(theirs.abs().max()) < 0.1
    assert group_advantages(side.batch.rewards, ROWS).tolist() == [0.0] * ROWS


# sampler and trainer -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "kind"),
    [
        ("token_truncate", ImportanceKind.truncated),
        ("token_mask", ImportanceKind.masked),
        ("sequence_truncate", ImportanceKind.sequence_truncated),
        ("sequence_mask", ImportanceKind.sequence_masked),
    ],
)
def test_importance_weights_between_sampler_and_trainer_agree(
    tiny: Path, mode: str, kind: ImportanceKind
) -> None:
    generator = torch.Generator().manual_seed(3)
    noise = [(torch.rand(len(r), generator=generator) - 3.2).tolist() for r in COMPLETIONS]
    side = Side(tiny, sampler=noise, importance=mode, clip_max=1.2)
    theirs = side.inputs["importance_sampling_ratio"]
    mask = side.batch.completion_mask
    trainer = side.models.policy_logprobs(side.batch)
    sampler = torch.zeros_like(trainer)
    sampler[mask] = torch.tensor([x for row in noise for x in row])
    ours = importance_weights(trainer, sampler, mask, kind=kind, cap=1.2)
    completion = side.inputs["completion_mask"].bool()
    theirs = theirs.expand(completion.shape)[completion]
    assert_same(ours[mask], theirs)
    assert 0 < int((theirs == (0.0 if "mask" in mode else 1.2)).sum()) < theirs.numel()
