"""Shaping by length and ending, and pass@k."""

import itertools

import pytest
import torch

from zoo.functional import missing_eos_penalty, overlong_penalty, pass_at_k


def test_B86_soft_overlong_punishment():
    out = overlong_penalty(torch.tensor([0, 79, 80, 90, 100, 101, 1000]), 100, 20)
    assert out.tolist() == pytest.approx([0, 0, 0, -0.5, -1, -1, -1])
    assert out.dtype == torch.float32
    assert overlong_penalty(torch.tensor([85]), 100, 20).item() == -0.25
    # a cache as long as the limit: a slope from the first token on
    assert overlong_penalty(torch.tensor([3]), 4, 4).item() == -0.75
    assert overlong_penalty(torch.tensor([4, 5]), 5, 1).tolist() == [0.0, -1.0]


def test_overlong_errors():
    lengths = torch.tensor([1, 2])
    with pytest.raises(
        ValueError, match=r"^lengths must hold integers, got torch.float32 of shape \(2,\)\. Conv"
    ):
        overlong_penalty(lengths.float(), 10, 2)
    with pytest.raises(ValueError, match=r"^lengths must hold integers, got torch.bool"):
        overlong_penalty(lengths.bool(), 10, 2)
    with pytest.raises(ValueError, match=r"^lengths must hold integers, got torch.complex64"):
        overlong_penalty(lengths.to(torch.complex64), 10, 2)
    with pytest.raises(ValueError, match=r"^lengths must have 1 dimension\(s\), got 2"):
        overlong_penalty(lengths[None], 10, 2)
    for cache in (0, 11, -1):
        with pytest.raises(ValueError, match=rf"^cache must lie in \[1, 10\], got {cache}"):
            overlong_penalty(lengths, 10, cache)


def test_B35_missing_end_looks_only_at_the_completion_and_the_stops():
    eos, stop, pad = 2, 42, 2
    ids = torch.tensor(
        [
            [eos, 5, stop, pad],  # stopped at a custom token
            [eos, 5, 6, pad],  # did not: neither the prompt's EOS nor the pad counts
            [eos, stop, 6, pad],  # a stop token that is not the last one
            [eos, 5, 6, eos],  # stopped at EOS
            [eos, eos, eos, eos],  # an empty completion
        ]
    )
    mask = torch.tensor(
        [[0, 1, 1, 0], [0, 1, 1, 0], [0, 1, 1, 0], [0, 1, 1, 1], [0, 0, 0, 0]]
    ).bool()
    assert missing_eos_penalty(ids, mask, [stop], 1.0).tolist() == [0, -1, -1, -1, -1]
    assert missing_eos_penalty(ids, mask, [stop, eos], 2.5).tolist() == [0, -2.5, -2.5, 0, -2.5]
    assert missing_eos_penalty(ids, mask, (eos,), 0).tolist() == [0.0] * 5
    assert missing_eos_penalty(ids, mask, (eos,), 1).dtype == torch.float32


def test_B78_a_penalty_can_only_lower_the_reward():
    ids, mask = torch.tensor([[5]]), torch.ones(1, 1).bool()
    assert missing_eos_penalty(ids, mask, [1], 1).item() == -1.0
    with pytest.raises(ValueError, match=r"^penalty must be at least 0, got -1: .* Try penalty=1"):
        missing_eos_penalty(ids, mask, [1], -1)
    with pytest.raises(ValueError, match=r"^penalty must be at least 0, got nan"):
        missing_eos_penalty(ids, mask, [1], float("nan"))


def test_missing_end_errors():
    ids, mask = torch.tensor([[5, 6]]), torch.ones(1, 2).bool()
    with pytest.raises(ValueError, match=r"^stop_ids is empty"):
        missing_eos_penalty(ids, mask, [], 1.0)
    with pytest.raises(ValueError, match=r"^mask must have shape \(1, 2\), got \(2,\)"):
        missing_eos_penalty(ids, mask[0], [1], 1.0)
    with pytest.raises(ValueError, match=r"^completion_ids must have 2 dimension\(s\), got 1"):
        missing_eos_penalty(ids[0], mask[0], [1], 1.0)
    with pytest.raises(ValueError, match=r"^completion_ids must hold integers"):
        missing_eos_penalty(ids.float(), mask, [1], 1.0)


def test_pass_at_k_is_the_share_of_subsets_with_a_right_one():
    for n in range(1, 7):
        for c in range(n + 1):
            for k in range(1, n + 1):
                right = [True] * c + [False] * (n - c)
                subsets = list(itertools.combinations(right, k))
                expected = sum(any(s) for s in subsets) / len(subsets)
                assert pass_at_k(n, c, k) == pytest.approx(expected, rel=1e-12)
    assert pass_at_k(200, 1, 1) == pytest.approx(0.005)


@pytest.mark.parametrize("n,c,k", [(4, 1, 5), (4, 1, 0), (0, 0, 0)])
def test_pass_at_k_refuses_k(n, c, k):
    with pytest.raises(
        ValueError, match=rf"^k must lie in 1 … n, got k={k} and n={n}: sample more"
    ):
        pass_at_k(n, c, k)


@pytest.mark.parametrize("c", [-1, 5])
def test_pass_at_k_refuses_c(c):
    with pytest.raises(ValueError, match=rf"^c must lie in 0 … n, got c={c} and n=4"):
        pass_at_k(4, c, 1)
