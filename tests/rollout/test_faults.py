"""What a sampler may do to the numbers of its trainer: renormalise, round, or miss an end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.models.tiny import gpt2, llama
from tests.train.modules import captured
from zoo.algorithms.grpo import GRPO
from zoo.batch import collate
from zoo.compose import compose
from zoo.config import ConfigError
from zoo.data.tokenize import cut_at_stop
from zoo.instantiate import structured
from zoo.models.models import Models
from zoo.models.policy import Policy
from zoo.rewards.composite import Weighted
from zoo.rewards.shaping import MissingEnd
from zoo.rollout.engine import Sampling
from zoo.rollout.source import rollout_batch
from zoo.rollout.torch_engine import TorchEngine
from zoo.train.metrics import Pool
from zoo.train.update import update
from zoo.types import Completion, Prompt, RewardOutput


def always(logits: Sequence[float], vocabulary: int) -> Policy:
    """A policy with the same logits after every prefix; −30 for the tokens not given."""
    model: Any = gpt2(vocab_size=vocabulary, tie_word_embeddings=False)
    with torch.no_grad():
        model.transformer.ln_f.weight.zero_()
        model.transformer.ln_f.bias.zero_()
        model.transformer.ln_f.bias[0] = 1.0  # the last hidden state is the first unit vector
        model.lm_head.weight.zero_()
        model.lm_head.weight[:, 0] = -30.0
        model.lm_head.weight[: len(logits), 0] = torch.tensor(list(logits))
    return Policy(model)


def engine_of(policy: Policy, **settings: Any) -> Any:
    made = TorchEngine(**settings).engine(lambda ids: "", 0)
    made.sync(policy)
    return made


# --- top-k, top-p ---------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", ["top_k=2", "top_p=0.9", "min_p=0.1", "repetition_penalty=1.1"])
def test_B48_sampling_that_renormalises_is_refused(setting: str) -> None:
    with pytest.raises(ConfigError, match=f"no setting rollout.{setting.partition('=')[0]}"):
        structured(compose([f"+rollout.{setting}"]))


def test_B48_generation_config_of_a_model_renormalises_nothing() -> None:
    # logits (1, 2, 3): log p = −2.407606, −1.407606, −.407606; of the best two alone they would be
    # log .268941 = −1.313262 and log .731059 = −.313262, each .0943443 more
    policy = always([1.0, 2.0, 3.0], 3)
    policy.model.generation_config.update(top_k=2, top_p=0.5, temperature=0.1, do_sample=True)  # pyright: ignore
    made = engine_of(policy).generate([[0]], ["k"], 4000, Sampling(1.0, 1, ()))[0]
    drawn = torch.bincount(torch.tensor([c.token_ids[0] for c in made]), minlength=3) / 4000
    # p = .090031, .244728, .665241; three standard deviations of 4000 draws are below .023
    assert drawn.tolist() == pytest.approx([0.0900306, 0.2447285, 0.6652410], abs=0.023)
    wanted = [-2.4076060, -1.4076060, -0.4076060]
    for completion in made[:50]:
        assert completion.logprobs[0] == pytest.approx(wanted[completion.token_ids[0]], abs=1e-5)
    batch = collate([[0]] * 2, [[1], [2]], group_size=2, prompt_ids=["p"])
    trainer = policy(batch).logprobs[:, 1].detach()
    assert trainer.tolist() == pytest.approx(wanted[1:], abs=1e-5)
    kept = torch.tensor([2.0, 3.0]).log_softmax(0)  # what top-k 2 would have reported
    assert (kept - trainer).tolist() == pytest.approx([0.0943443] * 2, abs=1e-5)


# --- where a completion ends ----------------------------------------------------------------------


@pytest.mark.parametrize(("favourite", "penalty"), [(42, 0.0), (6, -1.0)])
@pytest.mark.parametrize("prompt", [[7], [2, 42], [42, 2, 7]])
def test_B35_missing_end_is_judged_by_the_samplers_stops_in_the_completion(
    favourite: int, penalty: float, prompt: list[int]
) -> None:
    logits = [-30.0] * 64
    logits[favourite] = 30.0
    made = engine_of(always(logits, 64)).generate([prompt], ["k"], 2, Sampling(1.0, 3, (42,)))[0]
    assert made[0].token_ids == ((42,) if favourite == 42 else (6, 6, 6))
    asked = [Prompt("p", token_ids=tuple(prompt))] * 2
    assert MissingEnd()(asked, made).total == [penalty] * 2
    summed = Weighted({"ends": {"weight": 2.0, "reward": MissingEnd(size=1.5)}})
    assert summed(asked, made).total == [3 * penalty] * 2


def test_B78_missing_end_can_only_cost() -> None:
    with pytest.raises(ValueError, match=r"reward.size must be at least 0 and finite, got -1"):
        MissingEnd(size=-1.0)
    with pytest.raises(ValueError, match=r"weight must be at least 0, got -1.*is a penalty"):
        Weighted({"ends": {"weight": -1.0, "reward": MissingEnd()}})


def test_B68_B66_row_ends_with_its_first_stop_token_though_the_filler_is_the_same() -> None:
    # [a, E, x, y] → m [1, 1, 0, 0] and [a, b, E] → m [1, 1, 1, 0], padded with E
    ids, ended = cut_at_stop([5, 2, 8, 9], (2,))
    other, _ = cut_at_stop([5, 6, 2], (2,))
    assert ended
    prompt = Prompt("p", token_ids=(7,))
    made = [Completion("", tuple(c), (-1.0,) * len(c), truncated=False) for c in (ids, other)]
    batch = rollout_batch([prompt], made, RewardOutput([1.0, 0.0]), 2, pad_token_id=2)
    assert batch.input_ids.tolist() == [[7, 5, 2, 2], [7, 5, 6, 2]]
    assert batch.completion_mask.int().tolist() == [[0, 1, 1, 0], [0, 1, 1, 1]]
    assert batch.attention_mask.int().tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert batch.completion_lengths.tolist() == [2, 3]


# --- precision ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "low", "high"), [(None, 0.0, 1e-5), ("bfloat16", 1e-5, 0.5)])
def test_B46_gap_between_sampler_and_trainer_is_a_metric(
    dtype: str | None, low: float, high: float
) -> None:
    policy = Policy(llama())
    prompts = [Prompt(str(i), token_ids=tuple(range(5, 7 + i))) for i in range(4)]
    sampler = engine_of(policy, dtype=dtype)
    made = sampler.generate(
        [p.token_ids for p in prompts], [p.id for p in prompts], 4, Sampling(1.0, 8, (9,))
    )
    completions = [c for group in made for c in group]
    batch = rollout_batch(prompts, completions, RewardOutput([1.0, 0.0] * 8), 4, 0)
    models, pool = Models(policy=policy), Pool()
    algorithm = GRPO()
    update(
        algorithm.prepare(batch, models),
        algorithm,
        models,
        captured(policy=policy),
        max_completion_length=8,
        micro_batch_tokens=10**6,
        max_grad_norm=None,
        pool=pool,
    )
    assert low <= pool.means()["mismatch/sampler"] < high
