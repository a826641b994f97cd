"""A tensor of a wrong shape or dtype raises in every public function: nothing broadcasts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from enum import EnumMeta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import zoo.functional as F

B, T, N, K = 3, 5, 4, 3
SCALE = SimpleNamespace(tokens=9, sequences=3, groups=3, max_completion_length=5)


def tokens() -> Tensor:
    return -torch.rand(B, T) - 0.1


def mask() -> Tensor:
    return torch.ones(B, T, dtype=torch.bool)


def rows(n: int = N) -> Tensor:
    return -torch.rand(n) - 0.1


def yes(n: int = N) -> Tensor:
    return torch.ones(n, dtype=torch.bool)


def pair() -> dict[str, Tensor]:
    return {"policy_chosen": rows(), "policy_rejected": rows()}


def quartet() -> dict[str, Tensor]:
    return {**pair(), "ref_chosen": rows(), "ref_rejected": rows()}


def surrogate() -> dict[str, Tensor]:
    return {
        "logprobs": tokens(),
        "old_logprobs": tokens(),
        "advantages": tokens(),
        "mask": mask(),
    }


def kl() -> dict[str, Tensor]:
    return {"logprobs": tokens(), "ref_logprobs": tokens(), "mask": mask()}


# One call of each function that takes tensors, every optional tensor given.
CALLS: dict[str, Callable[[], dict[str, Any]]] = {
    "aggregate": lambda: {
        "values": tokens(),
        "mask": mask(),
        "scale": SCALE,
        "average": "sequence",
    },
    "aggregate_rows": lambda: {"values": rows(), "count": 4, "rows": yes()},
    "bradley_terry": lambda: {"chosen": rows(), "rejected": rows(), "margin": rows()},
    "bradley_terry_ranked": lambda: {
        "scores": torch.rand(N, K),
        "ranks": torch.arange(N * K).view(N, K),
        "present": torch.ones(N, K, dtype=torch.bool),
        "margin": torch.rand(N, K, K),
    },
    "cispo": surrogate,
    "clipped_surrogate": surrogate,
    "dead_groups": lambda: {"rewards": rows(), "group_size": 2, "scored": yes()},
    "dpo_robust": lambda: {**quartet(), "beta": 0.1, "label_smoothing": 0.1},
    "dpo_sigmoid": lambda: {**quartet(), "beta": 0.1},
    "entropy": lambda: {"logits": torch.rand(B, T, 7)},
    "gae": lambda: {
        "token_rewards": tokens(),
        "values": tokens(),
        "mask": mask(),
        "bootstrap": rows(B),
    },
    "group_advantages": lambda: {"rewards": rows(), "group_size": 2, "scored": yes()},
    "group_advantages_by_id": lambda: {
        "rewards": rows(),
        "prompt_ids": torch.tensor([0, 0, 1, 1]),
        "scored": yes(),
    },
    "hinge": lambda: {**quartet(), "beta": 0.1},
    "importance_weights": lambda: {
        "logprobs_trainer": tokens(),
        "logprobs_sampler": tokens(),
        "mask": mask(),
    },
    "ipo": lambda: {**quartet(), "beta": 0.1},
    "k1": kl,
    "k2": kl,
    "k3": kl,
    "kl_penalty": lambda: {**kl(), "estimator": "k3_ratio", "old_logprobs": tokens()},
    "kl_token_rewards": lambda: {
        "scores": rows(B),
        "kl": tokens(),
        "mask": mask(),
        "kl_coef": 0.1,
    },
    "kto": lambda: {
        "policy": rows(),
        "reference": rows(),
        "desirable": yes(),
        "kl_baseline": rows(),
        "beta": 0.1,
    },
    "kto_baseline": lambda: {"policy": rows(), "reference": rows()},
    "leave_one_out": lambda: {"rewards": rows(), "group_size": 2, "scored": yes()},
    "masked_mean": lambda: {"values": tokens(), "mask": mask()},
    "masked_sum": lambda: {"values": tokens(), "mask": mask()},
    "missing_eos_penalty": lambda: {
        "completion_ids": torch.ones(B, T, dtype=torch.long),
        "mask": mask(),
        "stop_ids": [2],
        "penalty": 1.0,
    },
    "moments": lambda: {"values": tokens(), "mask": mask()},
    "nll": lambda: {"logprobs": tokens(), "mask": mask()},
    "nll_mixed": lambda: {
        "losses": rows(),
        "policy_chosen": rows(),
        "chosen_lengths": torch.ones(N, dtype=torch.long),
        "nll_coef": 0.1,
    },
    "orpo": pair,
    "overlong_penalty": lambda: {"lengths": torch.arange(N), "max_length": 8, "cache": 2},
    "preference_margins": lambda: {**quartet(), "beta": 0.1},
    "ranked_pairs": lambda: {
        "ranks": torch.arange(N * K).view(N, K),
        "present": torch.ones(N, K, dtype=torch.bool),
    },
    "sequence_logprobs": lambda: {"logprobs": tokens(), "mask": mask(), "average": True},
    "simpo": lambda: {**pair(), "beta": 2.0, "margin": 0.5},
    "sum_and_count": lambda: {"values": tokens(), "mask": mask()},
    "terminal_rewards": lambda: {"scores": rows(B), "mask": mask()},
    "value_loss": lambda: {
        "values": tokens(),
        "returns": tokens(),
        "old_values": tokens(),
        "mask": mask(),
        "clip": 0.2,
    },
    "whiten": lambda: {"values": tokens(), "mask": mask(), "total": torch.tensor([4.0, 0, 4])},
}

ANY_SHAPE = {("entropy", "logits")}
# The only tensor that has this dimension: fewer columns or rows are another call, and no mistake.
ANY_SIZE = {("overlong_penalty", "lengths"), ("terminal_rewards", "mask")}
# Ranks and strengths may be of either kind; a metric may be of bools; a total is a list's tensor.
OTHER_DTYPES = {
    ("bradley_terry_ranked", "ranks"): {torch.float32},
    ("ranked_pairs", "ranks"): {torch.float32},
    ("sum_and_count", "values"): {torch.bool},
    ("whiten", "total"): {torch.int64, torch.bool},
}


def tensors() -> Iterator[tuple[str, str]]:
    for name, arguments in CALLS.items():
        for key, value in arguments().items():
            if isinstance(value, Tensor):
                yield name, key


def call(name: str, **changed: Any) -> Any:
    return getattr(F, name)(**{**CALLS[name](), **changed})


def test_every_public_function_of_tensors_is_here() -> None:
    taking = {
        name
        for name in F.__all__
        if callable(getattr(F, name))
        and not isinstance(getattr(F, name), (type, EnumMeta))
        and "Tensor" in str(inspect.signature(getattr(F, name)))
    }
    # Statistics take any sequence of numbers, in float64.
    assert taking - {"paired_bootstrap"} == set(CALLS)


@pytest.mark.parametrize("name", CALLS)
def test_the_call_itself_is_accepted(name: str) -> None:
    call(name)


@pytest.mark.parametrize(("name", "key"), list(tensors()))
def test_a_dtype_of_another_kind_raises(name: str, key: str) -> None:
    given = CALLS[name]()[key]
    kinds = {torch.float32, torch.int64, torch.bool} - {given.dtype}
    for dtype in kinds - OTHER_DTYPES.get((name, key), set()):
        with pytest.raises(ValueError, match=r"must (be floating point|be bool|hold integers)"):
            call(name, **{key: given.to(dtype)})


@pytest.mark.parametrize(("name", "key"), sorted(set(tensors()) - ANY_SHAPE))
def test_a_shape_that_would_broadcast_raises(name: str, key: str) -> None:
    given = CALLS[name]()[key]
    wrong = [given[None], given[..., None]]
    wrong += [given[..., :1]] if (name, key) not in ANY_SIZE else []
    wrong += [given[:1]] if given.dim() > 1 else [given[0]]
    for changed in wrong:
        if key == "kl_baseline" and not changed.dim():
            continue  # one number for all rows is what it is
        with pytest.raises(ValueError, match=r"shape|dimension|number of|whole groups|at least"):
            call(name, **{key: changed})


@pytest.mark.parametrize(("name", "key"), list(tensors()))
def test_what_is_no_tensor_raises(name: str, key: str) -> None:
    if (name, key) in {("group_advantages_by_id", "prompt_ids"), ("whiten", "total")}:
        return  # any sequence will do
    given = CALLS[name]()[key]
    with pytest.raises(ValueError, match=r"must be a torch\.Tensor, got list"):
        call(name, **{key: given.tolist()})
