"""Policy and critic losses, importance weights: hand arithmetic, loops, exact gradients."""

import math

import pytest
import torch

from zoo.functional import (
    ImportanceKind,
    RatioLevel,
    cispo,
    clipped_surrogate,
    importance_weights,
    value_loss,
)

F64 = torch.float64
NAN = math.nan


def f64(values):
    return torch.tensor(values, dtype=F64)


def close(actual, expected, tolerance=1e-9):
    torch.testing.assert_close(
        actual, torch.as_tensor(expected, dtype=actual.dtype), rtol=tolerance, atol=tolerance
    )


def row(ratios, advantages, **options):
    """The surrogate of one row with these ratios."""
    old = torch.full((1, len(ratios)), -1.0, dtype=F64)
    logprobs = old + f64([ratios]).log()
    mask = torch.ones(1, len(ratios), dtype=torch.bool)
    return clipped_surrogate(logprobs, old, f64([advantages]), mask, **options)


# --- clipped surrogate ----------------------------------------------------------------------------


def test_B45_old_logprobs_are_used():
    one = torch.ones(1, 1, dtype=torch.bool)
    out = clipped_surrogate(f64([[-0.5]]), f64([[-1.0]]), f64([[1.0]]), one)
    close(out.ratio, [[1.648721]], 1e-6)
    close(out.loss, [[-1.2]])
    assert out.clipped_high.float().mean() == 1.0 and not out.clipped_low.any()


def test_B55_table_of_clipping():
    out = row([1.5, 1.5, 0.5, 0.5], [1.0, -1.0, 1.0, -1.0])
    close(out.loss, [[-1.2, 1.5, -0.5, 0.8]])
    assert out.clipped_high.tolist() == [[True, False, False, False]]
    assert out.clipped_low.tolist() == [[False, False, False, True]]
    assert out.clipped_high.float().mean() == 0.25 and out.clipped_low.float().mean() == 0.25
    close(row([1.25], [1.0], clip_eps_high=0.28).loss, [[-1.25]])
    close(row([1.25], [1.0]).loss, [[-1.2]])
    close(row([5.0], [-1.0], dual_clip=3.0).loss, [[3.0]])
    close(row([5.0], [-1.0]).loss, [[5.0]])


def test_bounds_are_asymmetric_and_by_default_fifths():
    out = row([1.3, 0.7, 1.3, 0.7], [1.0, -1.0, -1.0, 1.0], clip_eps=0.1, clip_eps_high=0.4)
    close(out.loss, [[-1.3, 0.9, 1.3, -0.7]])
    assert out.clipped_high.tolist() == [[False] * 4]
    assert out.clipped_low.tolist() == [[False, True, False, False]]
    out = row([1.3, 0.7], [1.0, -1.0], clip_eps=0.4, clip_eps_high=0.1)
    close(out.loss, [[-1.1, 0.7]])
    out = row([1.3, 0.7], [1.0, -1.0], clip_eps=0.4)
    close(out.loss, [[-1.3, 0.7]])
    out = row([1.3, 0.7], [1.0, -1.0], clip_eps=0.0, clip_eps_high=0.0)
    close(out.loss, [[-1.0, 1.0]])
    # A ratio on the bound keeps its gradient: it is not clipped.
    out = row([1.0, 1.0], [1.0, -1.0], clip_eps=0.0)
    assert not out.clipped_high.any() and not out.clipped_low.any()


def test_zero_advantage_or_ratio_inside_is_not_clipped():
    out = row([1.5, 0.5, 1.1, 0.9], [0.0, 0.0, 1.0, -1.0])
    assert not out.clipped_high.any() and not out.clipped_low.any()
    close(out.loss, [[0.0, 0.0, -1.1, 0.9]])


def test_dual_clip_caps_only_negative_advantages():
    out = row([5.0, 5.0, 2.0, 0.5], [1.0, -2.0, -2.0, -2.0], dual_clip=3.0, clip_eps=10.0)
    # A > 0: −5 untouched; A < 0: min(10, 6), min(4, 6), min(1, 6)
    close(out.loss, [[-5.0, 6.0, 4.0, 1.0]])
    # Far below the bound with A > 0 the dual clip must not lift the objective to c·A.
    close(row([0.1], [1.0], dual_clip=1.5).loss, [[-0.1]])


def test_without_old_logprobs_the_ratio_is_one_with_the_policy_gradient():
    logprobs = f64([[-0.3, -2.0, NAN]]).requires_grad_()
    mask = torch.tensor([[True, True, False]])
    advantages = f64([[2.0, -3.0, NAN]])
    out = clipped_surrogate(logprobs, None, advantages, mask)
    assert out.ratio.tolist() == [[1.0, 1.0, 1.0]]
    assert out.loss.tolist() == [[-2.0, 3.0, 0.0]]
    out.loss.sum().backward()
    assert logprobs.grad is not None and logprobs.grad.tolist() == [[-2.0, 3.0, 0.0]]


def test_gradient_is_cut_exactly_where_clipping_says():
    old = torch.full((1, 4), -1.0, dtype=F64)
    logprobs = (old + f64([[1.5, 1.5, 0.5, 0.5]]).log()).requires_grad_()
    advantages = f64([[1.0, -1.0, 1.0, -1.0]])
    mask = torch.ones(1, 4, dtype=torch.bool)
    out = clipped_surrogate(logprobs, old, advantages, mask)
    (gradient,) = torch.autograd.grad(out.loss.sum(), logprobs)
    close(gradient, [[0.0, 1.5, -0.5, 0.0]])  # −ρA where not clipped
    assert ((gradient == 0) == (out.clipped_high | out.clipped_low)).all()
    out = clipped_surrogate(logprobs, old, advantages, mask, dual_clip=1.25)
    (gradient,) = torch.autograd.grad(out.loss.sum(), logprobs)
    close(gradient, [[0.0, 0.0, -0.5, 0.0]])


def test_old_logprobs_and_advantages_are_constants_and_outputs_detached():
    tensors = [torch.zeros(1, 2, requires_grad=True) for _ in range(3)]
    mask = torch.ones(1, 2, dtype=torch.bool)
    for function in (clipped_surrogate, cispo):
        out = function(tensors[0], tensors[1], tensors[2] + 1, mask)
        out.loss.sum().backward()
        assert tensors[1].grad is None and tensors[2].grad is None
        assert out.loss.requires_grad and not out.ratio.requires_grad
        assert out.clipped_high.dtype == out.clipped_low.dtype == torch.bool
    assert tensors[0].grad is not None


@pytest.mark.parametrize("function", [clipped_surrogate, cispo])
@pytest.mark.parametrize("options", [{}, {"ratio_level": "sequence", "dual_clip": 2.0}])
@pytest.mark.parametrize("garbage", [1e4, -1e4, NAN, math.inf])
def test_crosscheck_3_garbage_outside_the_mask(function, options, garbage):
    if function is cispo:
        options = {"clip_eps_low": 0.1} if options else {}
    mask = torch.tensor([[False, True, True, False], [True, False, True, False], [False] * 4])
    generator = torch.Generator().manual_seed(0)
    clean = [torch.randn(3, 4, generator=generator, dtype=F64) for _ in range(3)]

    def run(fill, width=0):
        bad = torch.tensor(fill, dtype=F64)
        pads = torch.full((3, width), fill, dtype=F64)
        logprobs, old, advantages = (
            torch.cat([torch.where(mask, each, bad), pads], dim=1) for each in clean
        )
        wide = torch.cat([mask, torch.zeros(3, width, dtype=torch.bool)], dim=1)
        logprobs.requires_grad_()
        out = function(logprobs, old, advantages, wide, **options)
        (gradient,) = torch.autograd.grad(out.loss.sum(), logprobs)
        return [*(each[:, :4] for each in out), gradient[:, :4]]

    for one, two, three in zip(run(0.0), run(garbage), run(garbage, width=7), strict=True):
        assert torch.equal(one, two) and torch.equal(one, three)
    loss, ratio, high, low, gradient = run(garbage)
    assert not loss[~mask].any() and not gradient[~mask].any() and gradient[mask].any()
    assert (ratio[~mask] == 1).all() and not high[~mask].any() and not low[~mask].any()


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_huge_ratio_stays_finite_in_value_and_gradient(sign):
    logprobs = torch.tensor([[0.0, -200.0]], requires_grad=True)
    old = torch.tensor([[-200.0, 0.0]])
    mask = torch.ones(1, 2, dtype=torch.bool)
    for options in ({}, {"ratio_level": "sequence"}):
        out = clipped_surrogate(logprobs, old, torch.full((1, 2), sign), mask, **options)
        (gradient,) = torch.autograd.grad(out.loss.sum(), logprobs)
        assert out.loss.isfinite().all() and gradient.isfinite().all()
    out = clipped_surrogate(logprobs, old, torch.full((1, 2), sign), mask)
    close(out.ratio, [[math.exp(20.0), math.exp(-20.0)]], 1e-5)
    close(cispo(logprobs, old, torch.full((1, 2), sign), mask).ratio, out.ratio)


def test_sequence_ratio_by_hand():
    # log-ratios .3 and .1 over two trained tokens: s = e^.2
    logprobs = f64([[NAN, -0.7, -1.9], [0.0, -1.0, NAN]])
    old = f64([[NAN, -1.0, -2.0], [0.0, -1.5, NAN]])
    mask = torch.tensor([[False, True, True], [False, True, False]])
    advantages = f64([[NAN, 2.0, 2.0], [0.0, -1.0, NAN]])
    s, u = math.exp(0.2), math.exp(0.5)
    out = clipped_surrogate(
        logprobs, old, advantages, mask, clip_eps=0.5, ratio_level=RatioLevel.sequence
    )
    close(out.ratio, [[1.0, s, s], [1.0, u, 1.0]])
    close(out.loss, [[0.0, -2 * s, -2 * s], [0.0, u, 0.0]])
    out = clipped_surrogate(logprobs, old, advantages, mask, clip_eps=0.1, ratio_level="sequence")
    close(out.loss, [[0.0, -2.2, -2.2], [0.0, u, 0.0]])
    assert out.clipped_high.tolist() == [[False, True, True], [False, False, False]]


def test_sequence_ratio_has_the_gradient_of_gspo():
    # J = 1/B Σ_i s_i A_i, s_i = exp(1/n Σ_t (logp − old)): ∂J/∂logp_it = s_i A_i / (n_i B)
    generator = torch.Generator().manual_seed(2)
    old = torch.randn(2, 4, generator=generator, dtype=F64)
    logprobs = (old + 0.1 * torch.randn(2, 4, generator=generator, dtype=F64)).requires_grad_()
    mask = torch.tensor([[True, True, True, False], [False, True, True, False]])
    row_advantages = f64([1.5, -0.5])
    out = clipped_surrogate(
        logprobs,
        old,
        row_advantages[:, None].expand(2, 4),
        mask,
        clip_eps=9.0,
        ratio_level="sequence",
    )
    lengths = mask.sum(1)
    loss = ((out.loss * mask).sum(1) / lengths).mean()
    s = (torch.where(mask, logprobs - old, 0.0).sum(1) / lengths).exp()
    close(loss, -(s * row_advantages).mean().detach())
    (gradient,) = torch.autograd.grad(loss, logprobs)
    expected = torch.where(mask, -(s * row_advantages / lengths / 2)[:, None], 0.0)
    close(gradient, expected.detach())


@pytest.mark.parametrize("level", list(RatioLevel))
def test_surrogate_agrees_with_a_slow_loop(level):
    generator = torch.Generator().manual_seed(4)
    old = torch.randn(6, 5, generator=generator, dtype=F64)
    logprobs = old + 0.5 * torch.randn(6, 5, generator=generator, dtype=F64)
    advantages = torch.randn(6, 5, generator=generator, dtype=F64)
    mask = torch.rand(6, 5, generator=generator) > 0.3
    out = clipped_surrogate(
        logprobs,
        old,
        advantages,
        mask,
        clip_eps=0.1,
        clip_eps_high=0.3,
        dual_clip=1.4,
        ratio_level=level,
    )
    n_high = n_low = 0
    for i in range(6):
        at = [t for t in range(5) if mask[i, t]]
        for t in range(5):
            if t not in at:
                assert out.loss[i, t] == 0
                continue
            used = at if level is RatioLevel.sequence else [t]
            ratio = math.exp(sum((logprobs - old)[i, u].item() for u in used) / len(used))
            a = advantages[i, t].item()
            value = min(ratio * a, min(max(ratio, 0.9), 1.3) * a)
            if a < 0:
                value = max(value, 1.4 * a)
            assert out.loss[i, t].item() == pytest.approx(-value, rel=1e-9)
            assert out.clipped_high[i, t].item() == (ratio > 1.3 and a > 0)
            assert out.clipped_low[i, t].item() == (ratio < 0.9 and a < 0)
            n_high += ratio > 1.3 and a > 0
            n_low += ratio < 0.9 and a < 0
    assert n_high and n_low


def test_policy_gradient_is_the_exact_gradient_of_the_expected_reward():
    """Two-token completions over three words, enumerated; the second word depends on the first."""
    logits = f64([[0.2, -0.4, 0.1], [1.0, 0.0, -1.0], [0.3, 0.3, -0.2], [-0.5, 0.6, 0.0]])
    rewards = f64([[1.0, 0.0, 2.0], [0.5, -1.0, 0.0], [3.0, 0.2, 0.1]])

    def expected_reward(z):
        logp = torch.log_softmax(z, -1)
        return sum(
            (logp[0, a] + logp[1 + a, b]).exp() * rewards[a, b] for a in range(3) for b in range(3)
        )

    z = logits.clone().requires_grad_()
    (exact,) = torch.autograd.grad(expected_reward(z), z)
    baseline = 0.7  # any baseline that does not depend on the completion
    for with_old in (False, True):
        z = logits.clone().requires_grad_()
        logp = torch.log_softmax(z, -1)
        pairs = [(a, b) for a in range(3) for b in range(3)]
        tokens = torch.stack([torch.stack([logp[0, a], logp[1 + a, b]]) for a, b in pairs])
        probabilities = tokens.detach().sum(1).exp()
        advantages = f64([[rewards[a, b].item() - baseline] * 2 for a, b in pairs])
        mask = torch.ones(9, 2, dtype=torch.bool)
        old = tokens.detach() if with_old else None
        loss = clipped_surrogate(tokens, old, advantages, mask).loss.sum(1)
        (gradient,) = torch.autograd.grad((probabilities * loss).sum(), z)
        close(gradient, -exact)
        tokens = torch.stack(
            [
                torch.stack([x[0, a], x[1 + a, b]])
                for x in [torch.log_softmax(z, -1)]
                for a, b in pairs
            ]
        )
        loss = cispo(tokens, old, advantages, mask).loss.sum(1)
        (gradient,) = torch.autograd.grad((probabilities * loss).sum(), z)
        close(gradient, -exact)
    assert exact.abs().max() > 0.1


def test_sampling_off_policy_is_corrected_by_the_ratio():
    # One token, three words, drawn from an old policy: Σ_x old(x)·ρ(x)·A(x) = E_π A, exactly.
    old_logits, logits = f64([0.5, -0.2, 0.1]), f64([0.1, 0.3, -0.4]).requires_grad_()
    rewards = f64([1.0, -2.0, 0.5])
    old, new = torch.log_softmax(old_logits, -1), torch.log_softmax(logits, -1)
    one = torch.ones(3, 1, dtype=torch.bool)
    out = clipped_surrogate(new[:, None], old[:, None], rewards[:, None], one, clip_eps=1e6)
    loss = (old.exp() * out.loss[:, 0]).sum()
    expected = (new.exp() * rewards).sum()
    close(loss.detach(), -expected.detach())
    (gradient,) = torch.autograd.grad(loss, logits, retain_graph=True)
    (exact,) = torch.autograd.grad(expected, logits)
    close(gradient, -exact)


def test_surrogate_dtypes():
    half = torch.zeros(1, 2).bfloat16()
    mask = torch.ones(1, 2, dtype=torch.bool)
    for function in (clipped_surrogate, cispo):
        out = function(half, half, half, mask)
        assert out.loss.dtype == out.ratio.dtype == torch.float32
        assert function(half.double(), None, half, mask).loss.dtype == F64
    assert value_loss(half, half, half, mask, clip=0.1).loss.dtype == torch.float32
    assert importance_weights(half, half, mask).dtype == torch.float32


@pytest.mark.parametrize("function", [clipped_surrogate, cispo])
def test_policy_loss_errors(function):
    good = torch.zeros(2, 3)
    mask = torch.ones(2, 3).bool()
    with pytest.raises(ValueError, match=r"^logprobs must have 2 dimension\(s\), got 3"):
        function(good[None], None, good, mask)
    with pytest.raises(ValueError, match=r"^old_logprobs must have shape \(2, 3\), got \(2, 2\)"):
        function(good, good[:, 1:], good, mask)
    with pytest.raises(ValueError, match=r"^advantages must have shape \(2, 3\), got \(2,\)"):
        function(good, None, good[:, 0], mask)
    with pytest.raises(ValueError, match=r"^advantages must have shape \(2, 3\), got \(2, 1\)"):
        function(good, None, good[:, :1], mask)
    with pytest.raises(ValueError, match=r"^mask must be bool, got torch.float32"):
        function(good, None, good, mask.float())
    with pytest.raises(ValueError, match=r"^mask must have shape \(2, 3\), got \(3,\)"):
        function(good, None, good, mask[0])
    with pytest.raises(ValueError, match=r"^old_logprobs must be floating point"):
        function(good, good.long(), good, mask)
    with pytest.raises(ValueError, match=r"^logprobs must be floating point"):
        function(good.long(), good, good, mask)


def test_policy_loss_option_errors():
    good, mask = torch.zeros(2, 3), torch.ones(2, 3).bool()
    with pytest.raises(ValueError, match=r"^clip_eps must lie in \[0, inf\], got -0.1"):
        clipped_surrogate(good, None, good, mask, clip_eps=-0.1)
    with pytest.raises(ValueError, match=r"^clip_eps_high must lie in \[0, inf\], got -0.1"):
        clipped_surrogate(good, None, good, mask, clip_eps_high=-0.1)
    with pytest.raises(ValueError, match=r"^dual_clip must lie in \(1, inf\], got 1.0"):
        clipped_surrogate(good, None, good, mask, dual_clip=1.0)
    with pytest.raises(ValueError, match=r"^ratio_level must be one of token, sequence; got 'row'"):
        clipped_surrogate(good, None, good, mask, ratio_level="row")
    with pytest.raises(ValueError, match=r"^clip_eps_high must lie in \[0, inf\], got -1"):
        cispo(good, None, good, mask, clip_eps_high=-1)
    with pytest.raises(ValueError, match=r"^clip_eps_low must lie in \[0, inf\], got -1"):
        cispo(good, None, good, mask, clip_eps_low=-1)


# --- CISPO ----------------------------------------------------------------------------------------


def test_cispo_keeps_the_gradient_of_every_token():
    old = torch.full((1, 4), -1.0, dtype=F64)
    logprobs = (old + f64([[1.5, 9.0, 0.5, 9.0]]).log()).requires_grad_()
    advantages = f64([[1.0, -1.0, 2.0, 2.0]])
    mask = torch.ones(1, 4, dtype=torch.bool)
    weights = f64([[1.5, 6.0, 0.5, 6.0]])  # the default cap is 1 + 5
    out = cispo(logprobs, old, advantages, mask)
    close(out.loss, (-weights * advantages * logprobs).detach())
    (gradient,) = torch.autograd.grad(out.loss.sum(), logprobs)
    close(gradient, -weights * advantages)
    close(out.ratio, [[1.5, 9.0, 0.5, 9.0]])
    assert out.clipped_high.tolist() == [[False, True, False, True]]
    assert not out.clipped_low.any()
    out = cispo(logprobs, old, advantages, mask, clip_eps_high=0.25, clip_eps_low=0.1)
    (gradient,) = torch.autograd.grad(out.loss.sum(), logprobs)
    close(gradient, -f64([[1.25, 1.25, 0.9, 1.25]]) * advantages)
    assert out.clipped_high.tolist() == [[True, True, False, True]]
    assert out.clipped_low.tolist() == [[False, False, True, False]]
    out = cispo(logprobs, None, advantages, mask, clip_eps_high=0.0, clip_eps_low=0.0)
    assert not out.clipped_high.any() and not out.clipped_low.any()


# --- critic ---------------------------------------------------------------------------------------


def test_value_loss_by_hand():
    values = f64([[1.0, 2.0, 0.0, 3.0, NAN]]).requires_grad_()
    returns = f64([[0.0, 0.0, 1.0, 3.0, NAN]])
    old = f64([[0.5, 2.0, -1.0, 0.0, NAN]])
    mask = torch.tensor([[True, True, True, True, False]])
    out = value_loss(values, returns, None, mask)
    close(out.loss, [[0.5, 2.0, 0.5, 0.0, 0.0]])
    assert not out.clipped.any() and out.clipped.shape == (1, 5)
    out = value_loss(values, returns, old, mask, clip=0.2)
    # clip to .7, 2, −.8, .2: squares .49, 4, 3.24, 7.84 against 1, 4, 1, 0
    close(out.loss, [[0.5, 2.0, 1.62, 3.92, 0.0]])
    assert out.clipped.tolist() == [[False, False, True, True, False]]
    (gradient,) = torch.autograd.grad(out.loss.sum(), values)
    # v − R where the plain square decides, 0 where the clipped constant does
    close(gradient, [[1.0, 2.0, 0.0, 0.0, 0.0]])


def test_value_loss_is_pessimistic_about_moves_down_too():
    one = torch.ones(1, 1, dtype=torch.bool)
    # 0 is clipped up to 1 − .2 = .8; (.8 + 1)²/2 = 1.62 is more than (0 + 1)²/2
    out = value_loss(f64([[0.0]]), f64([[-1.0]]), f64([[1.0]]), one, clip=0.2)
    close(out.loss, [[1.62]])
    assert out.clipped.item()


def test_value_loss_treats_targets_as_constants():
    tensors = [torch.rand(1, 2, requires_grad=True) for _ in range(3)]
    mask = torch.ones(1, 2, dtype=torch.bool)
    out = value_loss(tensors[0], tensors[1], tensors[2], mask, clip=0.2)
    out.loss.sum().backward()
    assert tensors[0].grad is not None
    assert tensors[1].grad is None and tensors[2].grad is None
    assert out.clipped.dtype == torch.bool and not out.clipped.requires_grad


@pytest.mark.parametrize("garbage", [1e4, NAN, math.inf])
def test_value_loss_ignores_garbage(garbage):
    mask = torch.tensor([[True, False]])
    tensors = [f64([[x, garbage]]) for x in (1.0, 0.5, 0.8)]
    tensors[0].requires_grad_()
    for clip in (None, 0.1):
        out = value_loss(*tensors, mask, clip=clip)
        (gradient,) = torch.autograd.grad(out.loss.sum(), tensors[0])
        close(out.loss, [[0.125, 0.0]])
        close(gradient, [[0.5, 0.0]])
        assert not out.clipped.any()


def test_value_loss_errors():
    good, mask = torch.zeros(2, 3), torch.ones(2, 3).bool()
    with pytest.raises(ValueError, match=r"^values must have 2 dimension\(s\), got 1"):
        value_loss(good[0], good[0], None, mask[0])
    with pytest.raises(ValueError, match=r"^returns must have shape \(2, 3\), got \(2, 1\)"):
        value_loss(good, good[:, :1], None, mask)
    with pytest.raises(ValueError, match=r"^mask must have shape \(2, 3\), got \(3,\)"):
        value_loss(good, good, None, mask[0])
    with pytest.raises(ValueError, match=r"^old_values must have shape \(2, 3\), got \(3,\)"):
        value_loss(good, good, good[0], mask, clip=0.2)
    with pytest.raises(
        ValueError, match=r"clip=0.2 needs old_values, got None. Pass them, or clip="
    ):
        value_loss(good, good, None, mask, clip=0.2)
    with pytest.raises(ValueError, match=r"^clip must lie in \(0, inf\], got 0"):
        value_loss(good, good, good, mask, clip=0)


# --- importance weights ---------------------------------------------------------------------------


def weights_of(kind, **options):
    # log-ratios ln of [[.5, 3, 1, –], [2, 2, –, –]]
    ratios = f64([[0.5, 3.0, 1.0, 1.0], [2.0, 2.0, 1.0, 1.0]])
    mask = torch.tensor([[True, True, True, False], [True, True, False, False]])
    sampler = torch.where(mask, -1.0, f64(NAN))
    trainer = torch.where(mask, sampler + ratios.log(), f64(NAN))
    out = importance_weights(trainer, sampler, mask, kind=kind, **options)
    assert not out.requires_grad
    return out


def test_importance_weights_by_hand():
    close(weights_of("truncated"), [[0.5, 2.0, 1.0, 0.0], [2.0, 2.0, 0.0, 0.0]])
    close(weights_of("truncated", cap=1.5), [[0.5, 1.5, 1.0, 0.0], [1.5, 1.5, 0.0, 0.0]])
    close(weights_of("masked", cap=2.5), [[0.5, 0.0, 1.0, 0.0], [2.0, 2.0, 0.0, 0.0]])
    close(weights_of("masked", cap=4.0, floor=0.75), [[0.0, 3.0, 1.0, 0.0], [2.0, 2.0, 0.0, 0.0]])
    # products 1.5 and 4
    s = weights_of("sequence_truncated", cap=3.0)
    close(s, [[1.5, 1.5, 1.5, 0.0], [3.0, 3.0, 0.0, 0.0]])
    close(weights_of("sequence_masked", cap=3.0), [[1.5, 1.5, 1.5, 0.0], [0.0] * 4])
    close(weights_of("sequence_masked", cap=4.5, floor=2.0), [[0.0] * 4, [4.0, 4.0, 0.0, 0.0]])
    assert torch.equal(
        weights_of(ImportanceKind.sequence_truncated, cap=9.0),
        weights_of("sequence_masked", cap=9.0),
    )


def test_importance_weight_default_is_truncation_at_two():
    ones = torch.ones(1, 2).bool()
    out = importance_weights(f64([[-1.0, -1.0]]), f64([[-3.0, -1.5]]), ones)
    close(out, [[2.0, math.exp(0.5)]])
    # bounds themselves are kept
    same = torch.zeros(1, 2, dtype=F64)
    out = importance_weights(same, same, ones, kind="masked", cap=1.0, floor=1.0)
    assert out.tolist() == [[1.0, 1.0]]


def test_importance_weights_are_finite_and_constant():
    ones = torch.ones(1, 2).bool()
    trainer = torch.tensor([[0.0, -500.0]], requires_grad=True)
    sampler = torch.tensor([[-500.0, 0.0]], requires_grad=True)
    out = importance_weights(trainer, sampler, ones, cap=1e12)
    assert out.tolist()[0] == pytest.approx([math.exp(20.0), math.exp(-20.0)], rel=1e-5, abs=0.0)
    assert not out.requires_grad


def test_importance_weight_errors():
    good, mask = torch.zeros(2, 3), torch.ones(2, 3).bool()
    with pytest.raises(
        ValueError,
        match=r"^kind must be .* truncated, masked, sequence_truncated, sequence_masked; got 'tis'",
    ):
        importance_weights(good, good, mask, kind="tis")
    with pytest.raises(ValueError, match=r"^cap must lie in \(0, inf\], got 0"):
        importance_weights(good, good, mask, cap=0)
    for floor in (-1, 3):
        with pytest.raises(ValueError, match=rf"^floor must lie in \[0, 2\], got {floor}"):
            importance_weights(good, good, mask, kind="masked", floor=floor)
    for kind in ("truncated", "sequence_truncated"):
        with pytest.raises(ValueError, match=rf"floor=0.5 has no effect with kind={kind}\. Use"):
            importance_weights(good, good, mask, kind=kind, floor=0.5)
    with pytest.raises(
        ValueError, match=r"^logprobs_sampler must have shape \(2, 3\), got \(2, 1\)"
    ):
        importance_weights(good, good[:, :1], mask)
    with pytest.raises(ValueError, match=r"^logprobs_trainer must have 2 dimension\(s\), got 1"):
        importance_weights(good[0], good[0], mask[0])
    with pytest.raises(ValueError, match=r"^mask must have shape \(2, 3\), got \(3,\)"):
        importance_weights(good, good, mask[0])
