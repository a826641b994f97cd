"""benchmarks.memory: predictions equal measurements, and what they are extended by is a line."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.memory.runs import ARMS, MEASURED, QWEN
from benchmarks.memory.table import extended
from benchmarks.memory.vocabulary import BLOCK, LARGE, SMALL, peak
from benchmarks.memory.workers import Job, results

# As published: 0.49, 1.54, 7.62, 32.8 and 72.7 billion
PARAMETERS = {
    "0.5B": 494_032_768,
    "1.5B": 1_543_714_304,
    "7B": 7_615_616_512,
    "32B": 32_763_876_352,
    "72B": 72_706_203_648,
}


@pytest.mark.parametrize("name", QWEN)
def test_shapes_have_the_published_number_of_weights(name: str) -> None:
    values = dict(QWEN[name])
    described = AutoConfig.for_model(values.pop("model_type"), **values)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(described)
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]


def test_predictions_equal_what_is_measured() -> None:
    arms = ["PPO", "GRPO, β = 0"]
    jobs = [Job("tiny", arm, fake) for arm in arms for fake in (False, True)]
    found = results(jobs)
    for arm in arms:
        real, fake = (found[Job("tiny", arm, kind)] for kind in (False, True))
        # A few bytes of numbers that only one of both asks for
        for phase in ("prepare", "update"):
            assert fake[phase]["total"] == pytest.approx(real[phase]["total"], rel=1e-5)
            assert _owned(fake[phase]) == _owned(real[phase])
        # Two tokens are decoded in the place of all.
        assert fake["rollout"]["total"] == pytest.approx(real["rollout"]["total"], rel=0.03)


def _owned(split: dict[str, int]) -> dict[str, int]:
    return {label: n for label, n in split.items() if "/" in label}


def test_the_arms_are_those_of_the_comparison() -> None:
    assert len({arm.name for arm in ARMS}) == len(ARMS) == 8
    assert [shape.name for shape in MEASURED] == ["tiny", "SmolLM2-135M"]


def test_a_line_through_two_models_reaches_the_large_one() -> None:
    few = {"update": {"total": 100 + 6 * 7, "policy/parameters": 6 * 7}}
    more = {"update": {"total": 100 + 8 * 7, "policy/parameters": 8 * 7}}
    assert extended(few, more, 80) == {"update": {"total": 660, "policy/parameters": 560}}


def test_the_loss_has_no_term_of_tokens_times_vocabulary() -> None:
    few, many = 2 * BLOCK, 4 * BLOCK
    added = [peak(LARGE, tokens) - peak(SMALL, tokens) for tokens in (few, many)]
    # Twice the tokens, the same price of a larger vocabulary
    assert added[1] == pytest.approx(added[0], rel=1e-3)
    # Weights (tied, width 64), their gradient, and a few temporaries of what the head takes at once
    weights, chunk = 40_960 * 64 * 4, 40_960 * BLOCK * 4
    assert 2 * weights < added[0] <= 3 * weights + chunk
    # All logits at once grow by at least their size: tokens × 40,960 × 4 bytes
    plain = peak(LARGE, few, plain=True) - peak(SMALL, few, plain=True)
    assert plain >= few * 40_960 * 4
