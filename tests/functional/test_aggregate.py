"""Reductions: the micro-batches' shares add up to the loss of the step, however it was cut."""

import math
from dataclasses import dataclass

import pytest
import torch

from zoo.functional import (
    Average,
    aggregate,
    aggregate_rows,
    clipped_surrogate,
    k3,
    masked_mean,
    masked_sum,
    nll,
    sum_and_count,
    value_loss,
)

F64 = torch.float64
NAN = math.nan


@dataclass(frozen=True)
class Scale:
    tokens: int
    sequences: int
    groups: int = 1
    max_completion_length: int = 10


def mask_of(lengths, width=None):
    return torch.arange(width or max(lengths)) < torch.tensor(lengths)[:, None]


def per_token(row_values, lengths, garbage=NAN):
    mask = mask_of(lengths)
    values = torch.tensor(row_values, dtype=F64)[:, None].expand(mask.shape)
    return torch.where(mask, values, garbage), mask


def loss_of(advantages, lengths):
    """The surrogate at ratio 1, which is −A for every token."""
    values, mask = per_token(advantages, lengths, garbage=1e4)
    return clipped_surrogate(torch.zeros_like(values), None, values, mask).loss, mask


def in_parts(values, mask, scale, average, size):
    return sum(
        aggregate(v, m, scale, average)
        for v, m in zip(values.split(size), mask.split(size), strict=True)
    )


@pytest.mark.parametrize("size", [1, 2])
def test_B01_token_and_sequence_mean_do_not_depend_on_accumulation(size):
    # token: (−1·2 + 1·8)/10 = .6;  sequence: (−1 + 1)/2 = 0
    loss, mask = loss_of([1.0, -1.0], [2, 8])
    scale = Scale(tokens=10, sequences=2)
    assert in_parts(loss, mask, scale, "token", size).item() == pytest.approx(0.6)
    assert in_parts(loss, mask, scale, "sequence", size).item() == pytest.approx(0.0, abs=1e-12)


def test_B03_masked_rows_leave_numerator_and_denominator():
    loss, mask = loss_of([1.0, -1.0], [3, 5])
    mask = mask & torch.tensor([[True], [False]])  # the second was truncated and is masked
    assert aggregate(loss, mask, Scale(tokens=3, sequences=1), "token").item() == -1.0
    assert aggregate(loss, mask, Scale(tokens=3, sequences=1), "sequence").item() == -1.0


def test_the_mean_of_a_row_of_one_token_is_that_token():
    values, mask = per_token([3.0, 5.0], [1, 4])
    # (3/1 + 20/4)/2
    assert aggregate(values, mask, Scale(5, 2), "sequence").item() == 4.0


@pytest.mark.parametrize("average", list(Average))
@pytest.mark.parametrize("garbage", [100.0, 1e4, NAN, math.inf])
def test_B05_right_padding_does_not_enter(average, garbage):
    values, mask = per_token([1.0, -3.0], [2, 3], garbage=0.0)
    scale = Scale(tokens=5, sequences=2)
    expected = {"token": (2 - 9) / 5, "sequence": (1 - 3) / 2, "constant": (2 - 9) / 20}[average]
    padded = torch.full((2, 10), garbage, dtype=F64)
    padded[:, :3] = torch.where(mask, values, garbage)
    padded.requires_grad_()
    wide = torch.zeros(2, 10, dtype=torch.bool)
    wide[:, :3] = mask
    total = aggregate(padded, wide, scale, average)
    assert total.item() == pytest.approx(expected, rel=1e-12)
    total.backward()
    assert padded.grad is not None and padded.grad.isfinite().all()
    assert (padded.grad[~wide] == 0).all() and (padded.grad[wide] != 0).all()


def test_B08_token_mean_does_not_depend_on_order():
    scale = Scale(tokens=20, sequences=4)
    for advantages, lengths in (
        ([1.0, -1.0, 1.0, -1.0], [2, 8, 4, 6]),
        ([1.0, 1.0, -1.0, -1.0], [2, 4, 8, 6]),
    ):
        loss, mask = loss_of(advantages, lengths)
        for size in (1, 2, 4):
            # (−2 + 8 − 4 + 6)/20 = .4
            assert in_parts(loss, mask, scale, "token", size).item() == pytest.approx(0.4)


def test_B10_constant_divides_by_sequences_too():
    loss, mask = loss_of([1.0, -1.0], [2, 8])
    # (−2 + 8)/(2·10) = .3
    assert aggregate(loss, mask, Scale(10, 2), "constant").item() == pytest.approx(0.3)
    twice = aggregate(loss.repeat(2, 1), mask.repeat(2, 1), Scale(20, 4), "constant")
    assert twice.item() == pytest.approx(0.3)
    other = aggregate(loss, mask, Scale(10, 2, max_completion_length=20), "constant")
    assert other.item() == pytest.approx(0.15)


@pytest.mark.parametrize("size", [1, 2])
def test_B11_value_loss_is_normalised_like_the_policy_loss(size):
    errors, mask = per_token([1.0, 2.0], [2, 8])
    loss = value_loss(errors, torch.zeros_like(errors), None, mask).loss
    # ½·(2·1 + 8·4)/10 = 1.7
    assert in_parts(loss, mask, Scale(10, 2), "token", size).item() == pytest.approx(1.7)


def test_B13_dead_groups_pull_on_the_kl_term_only_if_asked():
    logprobs, ref = torch.tensor([[-1.0, -1.0]], dtype=F64), torch.full((1, 2), -1.5, dtype=F64)
    mask = torch.ones(1, 2, dtype=torch.bool)
    advantages, dead = torch.zeros(1, 2, dtype=F64), torch.tensor([True])
    policy = clipped_surrogate(logprobs, None, advantages, mask).loss
    for kl_on_dead, expected in ((True, 0.00532653), (False, 0.0)):
        kl_mask = mask if kl_on_dead else mask & ~dead[:, None]
        loss = policy + 0.05 * k3(logprobs, ref, kl_mask)
        assert aggregate(loss, mask, Scale(2, 1), "token").item() == pytest.approx(
            expected, rel=1e-5
        )


@pytest.mark.parametrize("average", list(Average))
@pytest.mark.parametrize("size", [1, 2, 3])
def test_shares_add_up_to_a_slow_loop_in_value_and_gradient(average, size):
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(6, 5, generator=generator, dtype=F64, requires_grad=True)
    mask = torch.rand(6, 5, generator=generator) > 0.4
    mask[2] = False  # a row without trained tokens
    scale = Scale(int(mask.sum()), 6, 3, 7)
    total, weights = 0.0, torch.zeros(6, 5, dtype=F64)
    for i in range(6):
        n = int(mask[i].sum())
        for t in range(5):
            if mask[i, t]:
                weight = {
                    "token": 1 / scale.tokens,
                    "sequence": 1 / n / 6,
                    "constant": 1 / (6 * 7),
                }[average]
                weights[i, t] = weight
                total += weight * values[i, t].item()
    out = in_parts(values, mask, scale, average, size)
    assert out.item() == pytest.approx(total, rel=1e-12)
    out.backward()
    assert values.grad is not None
    torch.testing.assert_close(values.grad, weights)


@pytest.mark.parametrize("average", list(Average))
def test_an_empty_step_is_zero_with_a_graph(average):
    values = torch.full((2, 3), NAN, requires_grad=True)
    mask = torch.zeros(2, 3, dtype=torch.bool)
    out = aggregate(values, mask, Scale(tokens=0, sequences=0), average)
    assert out.item() == 0.0
    out.backward()
    assert values.grad is not None and (values.grad == 0).all()


def test_average_by_name_and_dtype():
    values, mask = torch.ones(1, 2).bfloat16(), torch.ones(1, 2).bool()
    assert aggregate(values, mask, Scale(2, 1), Average.token).dtype == torch.float32
    assert aggregate(values.double(), mask, Scale(2, 1), "token").dtype == F64
    assert [each.value for each in Average] == ["token", "sequence", "constant"]


def test_negative_log_likelihood_per_token():
    logprobs = torch.tensor([[-1.0, -2.0, NAN]], dtype=F64, requires_grad=True)
    mask = torch.tensor([[True, True, False]])
    loss = nll(logprobs, mask)
    assert loss.tolist() == [[1.0, 2.0, 0.0]]
    aggregate(loss, mask, Scale(2, 1), "token").backward()
    assert logprobs.grad is not None and logprobs.grad.tolist() == [[-0.5, -0.5, 0.0]]
    with pytest.raises(ValueError, match=r"^logprobs must have 2 dimension\(s\), got 1"):
        nll(logprobs[0], mask[0])
    with pytest.raises(ValueError, match=r"^mask must have shape \(1, 3\), got \(1, 1\)"):
        nll(logprobs, mask[:, :1])


def test_rows_are_divided_by_the_steps_count():
    values = torch.tensor([1.0, 5.0, NAN], dtype=F64, requires_grad=True)
    rows = torch.tensor([True, True, False])
    out = aggregate_rows(values, 4, rows)
    assert out.item() == 1.5
    out.backward()
    assert values.grad is not None and values.grad.tolist() == [0.25, 0.25, 0.0]
    assert aggregate_rows(torch.tensor([1.0, 2.0]), 2).item() == 1.5
    empty = torch.tensor([3.0], requires_grad=True)
    out = aggregate_rows(empty, 0)
    assert out.item() == 0.0 and out.requires_grad


def test_masked_sum_and_mean_over_any_shape():
    values = torch.tensor([[[1.0, NAN], [4.0, 7.0]]], dtype=F64)
    mask = torch.tensor([[[True, False], [True, True]]])
    assert masked_sum(values, mask).item() == 12.0
    assert masked_mean(values, mask).item() == 4.0
    assert masked_mean(values, torch.zeros_like(mask)).item() == 0.0
    assert masked_mean(values[0, 1:, 1], mask[0, 1:, 1]).item() == 7.0
    assert masked_sum(torch.ones(2).half(), torch.ones(2).bool()).dtype == torch.float32


def test_B90_metrics_are_pooled_sums_and_counts():
    first = torch.tensor([True] * 3 + [False] * 9)  # 3 of 12 on one rank
    second = torch.tensor([True] * 3 + [False])  # 3 of 4 on the other
    everything = [torch.ones_like(each) for each in (first, second)]
    parts = [sum_and_count(v, m) for v, m in zip((first, second), everything, strict=True)]
    assert (sum(p[0] for p in parts) / sum(p[1] for p in parts)).item() == 0.375
    values = torch.tensor([2.0, NAN, 3.0], dtype=F64, requires_grad=True)
    total, count = sum_and_count(values, torch.tensor([True, False, True]))
    assert (total.item(), count.item()) == (5.0, 2.0)
    assert total.dtype == count.dtype == F64 and not total.requires_grad


def test_errors():
    good, mask, scale = torch.zeros(2, 3), torch.ones(2, 3).bool(), Scale(6, 2)
    with pytest.raises(
        ValueError, match=r"^values must have 2 dimension\(s\), got 1: shape \(3,\)"
    ):
        aggregate(good[0], mask[0], scale, "token")
    with pytest.raises(
        ValueError, match=r"^mask must have shape \(2, 3\), got \(1, 3\): nothing is"
    ):
        aggregate(good, mask[:1], scale, "token")
    with pytest.raises(
        ValueError, match=r"^mask must be bool, got torch.float32 of shape \(2, 3\)\. Conv"
    ):
        aggregate(good, mask.float(), scale, "token")
    with pytest.raises(
        ValueError, match=r"^average must be one of token, sequence, constant; got 'mean'"
    ):
        aggregate(good, mask, scale, "mean")
    with pytest.raises(
        ValueError, match=r"^scale.max_completion_length must be at least 1 .* got 0"
    ):
        aggregate(good, mask, Scale(6, 2, max_completion_length=0), "constant")
    assert aggregate(good + 1, mask, Scale(6, 2, max_completion_length=1), "constant").item() == 3.0
    with pytest.raises(ValueError, match=r"^values must have 1 dimension\(s\), got 2"):
        aggregate_rows(good, 2)
    with pytest.raises(ValueError, match=r"^rows must have shape \(3,\), got \(2,\)"):
        aggregate_rows(good[0], 2, mask[:, 0])
    with pytest.raises(ValueError, match=r"^rows must be bool"):
        aggregate_rows(good[0], 2, good[0])
    for function in (masked_sum, masked_mean, sum_and_count):
        with pytest.raises(ValueError, match=r"^mask must have shape \(2, 3\), got \(3,\)"):
            function(good, mask[0])
        with pytest.raises(ValueError, match=r"^values must be floating point, got torch.int64"):
            function(good.long(), mask)
        with pytest.raises(ValueError, match=r"^values must be a torch.Tensor, got float"):
            function(1.0, mask)
