"""KL estimators and entropy, against exact enumeration of a small softmax policy."""

import math

import pytest
import torch

from zoo.functional import (
    KLEstimator,
    adaptive_kl_coef,
    entropy,
    k1,
    k2,
    k3,
    kl_penalty,
    masked_mean,
)

F64 = torch.float64
NAN = math.nan
LOGITS = torch.tensor([0.3, -1.2, 0.8, 0.1], dtype=F64)
REFERENCE = torch.tensor([-0.5, 0.4, 0.2, 1.0], dtype=F64)
OLD = torch.tensor([0.9, -0.1, -0.3, 0.2], dtype=F64)


def exact_kl(p_logits, q_logits):
    p, q = torch.log_softmax(p_logits, -1), torch.log_softmax(q_logits, -1)
    return (p.exp() * (p - q)).sum()


def gradient_of(function, logits=LOGITS):
    logits = logits.clone().requires_grad_()
    return torch.autograd.grad(function(logits), logits)[0]


def expectation(estimator, logits, old_logits=None):
    """E over the sampling distribution (held fixed) of the estimator: every action, weighted."""
    logprobs = torch.log_softmax(logits, -1)
    ref = torch.log_softmax(REFERENCE, -1)
    if old_logits is None:
        values = kl_penalty(logprobs, ref, None, estimator)
        weights = logprobs.detach().exp()
    else:
        old = torch.log_softmax(old_logits, -1)
        values = kl_penalty(logprobs, ref, None, estimator, old)
        weights = old.exp()
    return (weights * values).sum()


FORWARD = gradient_of(lambda z: exact_kl(z, REFERENCE))  # ∇KL(π‖ref)
BACKWARD = gradient_of(lambda z: exact_kl(REFERENCE, z))  # ∇KL(ref‖π)


@pytest.mark.parametrize("estimator", list(KLEstimator))
def test_expected_values_by_enumeration(estimator):
    value = expectation(estimator, LOGITS)
    d = torch.log_softmax(LOGITS, -1) - torch.log_softmax(REFERENCE, -1)
    if estimator is KLEstimator.k2:
        torch.testing.assert_close(value, (LOGITS.softmax(-1) * d**2).sum() / 2)
        assert abs(value - exact_kl(LOGITS, REFERENCE)) > 5e-3  # k2 is biased
    else:
        torch.testing.assert_close(value, exact_kl(LOGITS, REFERENCE))


@pytest.mark.parametrize(
    "estimator,expected",
    [
        ("k1", torch.zeros(4, dtype=F64)),
        ("k2", FORWARD),
        ("k3", BACKWARD),
        ("k1_k2", FORWARD),
        ("k3_k2", FORWARD),
        ("k1_ratio", FORWARD),
        ("k3_ratio", FORWARD),
    ],
)
def test_expected_gradients_by_enumeration(estimator, expected):
    gradient = gradient_of(lambda z: expectation(estimator, z))
    torch.testing.assert_close(gradient, expected)
    assert FORWARD.abs().max() > 0.05 and (FORWARD - BACKWARD).abs().max() > 0.05


@pytest.mark.parametrize("estimator", ["k1_ratio", "k3_ratio"])
def test_ratio_forms_stay_unbiased_off_policy(estimator):
    torch.testing.assert_close(expectation(estimator, LOGITS, OLD), exact_kl(LOGITS, REFERENCE))
    gradient = gradient_of(lambda z: expectation(estimator, z, OLD))
    torch.testing.assert_close(gradient, FORWARD)


def test_B28_expected_gradients_of_two_actions():
    ref = torch.tensor([0.5, 0.5], dtype=F64).log()
    logits = torch.tensor([0.7, 0.3], dtype=F64).log()

    def expected(function):
        def of(z):
            logprobs = torch.log_softmax(z, -1)
            return (logprobs.detach().exp() * function(logprobs, ref)).sum()

        return gradient_of(of, logits)[0].item()

    assert expected(k1) == pytest.approx(0.0, abs=1e-12)
    assert expected(k2) == pytest.approx(0.177933, rel=1e-5)
    assert expected(k3) == pytest.approx(0.2, rel=1e-9)


@pytest.mark.parametrize("estimator", [each.value for each in KLEstimator])
def test_B26_every_name_runs(estimator):
    logprobs = torch.tensor([[-1.0]], dtype=F64, requires_grad=True)
    ref = torch.tensor([[-1.5]], dtype=F64)
    out = kl_penalty(logprobs, ref, torch.ones(1, 1).bool(), estimator)
    (gradient,) = torch.autograd.grad(out.sum(), logprobs)
    value_k3 = math.exp(-0.5) - 1 + 0.5  # .10653066
    values = {"k1": 0.5, "k2": 0.125, "k3": value_k3}
    # d/dlogp: k1 1, k2 d = .5, k3 1 − e^−d = .39346934; a ratio form adds the value itself
    slopes = {"k1": 1.0, "k2": 0.5, "k3": 1 - math.exp(-0.5)}
    first, _, second = estimator.partition("_")
    assert out.item() == pytest.approx(values[first], rel=1e-12)
    if second == "ratio":
        assert gradient.item() == pytest.approx(slopes[first] + values[first], rel=1e-12)
    else:
        assert gradient.item() == pytest.approx(slopes[second or first], rel=1e-12)


def test_B26_straight_through_k3_has_k2s_gradient():
    logprobs = torch.tensor([-1.0], dtype=F64, requires_grad=True)
    out = kl_penalty(logprobs, torch.tensor([-1.5], dtype=F64), None, "k3_k2")
    out.sum().backward()
    assert out.item() == pytest.approx(0.106531, rel=1e-5)
    assert logprobs.grad is not None and logprobs.grad.item() == pytest.approx(0.5)


def test_the_functions_are_the_estimators_of_their_names():
    logprobs = torch.tensor([-1.0, -3.0, -0.2], dtype=F64)
    ref = torch.tensor([-1.5, -1.0, -0.2], dtype=F64)
    torch.testing.assert_close(k1(logprobs, ref), torch.tensor([0.5, -2.0, 0.0], dtype=F64))
    torch.testing.assert_close(k2(logprobs, ref), torch.tensor([0.125, 2.0, 0.0], dtype=F64))
    expected = [math.exp(-0.5) - 0.5, math.exp(2.0) - 3.0, 0.0]
    torch.testing.assert_close(k3(logprobs, ref), torch.tensor(expected, dtype=F64))
    for function, name in ((k1, "k1"), (k2, "k2"), (k3, "k3")):
        assert torch.equal(function(logprobs, ref), kl_penalty(logprobs, ref, None, name))


@pytest.mark.parametrize("estimator", list(KLEstimator))
@pytest.mark.parametrize("garbage", [1e4, -1e4, NAN, math.inf])
def test_garbage_outside_the_mask_changes_neither_value_nor_gradient(estimator, garbage):
    mask = torch.tensor([[True, False, True]])

    def run(fill):
        bad = torch.tensor(fill, dtype=F64)
        logprobs = torch.where(mask, torch.tensor([[-1.0, 0.0, -2.0]], dtype=F64), bad)
        logprobs.requires_grad_()
        ref = torch.where(mask, torch.tensor([[-1.5, 0.0, -1.0]], dtype=F64), bad)
        old = torch.where(mask, torch.tensor([[-1.1, 0.0, -2.5]], dtype=F64), bad)
        out = kl_penalty(logprobs, ref, mask, estimator, old)
        return out.detach(), torch.autograd.grad(out.sum(), logprobs)[0]

    value, gradient = run(garbage)
    clean_value, clean_gradient = run(0.0)
    assert torch.equal(value, clean_value) and torch.equal(gradient, clean_gradient)
    assert value[0, 1] == 0 and gradient[0, 1] == 0 and (value[mask] != 0).all()


def test_ratio_forms_by_hand_and_masked_k_functions():
    logprobs = torch.tensor([[-1.0, NAN]], dtype=F64)
    ref, old = torch.tensor([[-1.5, NAN]], dtype=F64), torch.tensor([[-1.2, NAN]], dtype=F64)
    mask = torch.tensor([[True, False]])
    ratio = math.exp(0.2)
    for name, expected in (("k1_ratio", 0.5), ("k3_ratio", math.exp(-0.5) - 0.5)):
        out = kl_penalty(logprobs, ref, mask, name, old)[0].tolist()
        assert out == pytest.approx([ratio * expected, 0.0])
    for function, expected in ((k1, 0.5), (k2, 0.125), (k3, math.exp(-0.5) - 0.5)):
        out = function(logprobs, ref, mask)[0].tolist()
        assert out == pytest.approx([expected, 0.0])


def test_only_the_ratio_forms_read_the_old_policy():
    ref, old = torch.tensor([-1.5, -1.0]), torch.tensor([-0.1, -4.0])
    for estimator in KLEstimator:
        logprobs = torch.tensor([-1.0, -3.0], requires_grad=True)
        results = []
        for given in (None, old):
            out = kl_penalty(logprobs, ref, None, estimator, given)
            results += [(out, *torch.autograd.grad(out.sum(), logprobs))]
        same = [torch.equal(a, b) for a, b in zip(*results, strict=True)]
        assert same == ([False, False] if estimator.endswith("_ratio") else [True, True])


def test_reference_and_old_are_constants():
    logprobs = torch.zeros(2, requires_grad=True)
    ref = torch.full((2,), -1.0, requires_grad=True)
    old = torch.full((2,), -0.5, requires_grad=True)
    for estimator in KLEstimator:
        kl_penalty(logprobs, ref, None, estimator, old).sum().backward()
    assert ref.grad is None and old.grad is None


def test_equal_policies_have_no_kl_and_dtypes_are_kept():
    logprobs = torch.tensor([-1.0, -3.0]).bfloat16()
    for estimator in KLEstimator:
        out = kl_penalty(logprobs, logprobs, None, estimator)
        assert out.dtype == torch.float32 and (out == 0).all()
        assert kl_penalty(logprobs.double(), logprobs, None, estimator).dtype == F64


def test_k3_of_small_drift_is_accurate_in_float32():
    # d = 1e-3: e^−d − 1 + d = 4.998e-7; exp(−d) − 1 in float32 would leave one digit.
    out = k3(torch.tensor([1e-3]), torch.tensor([0.0])).item()
    assert out == pytest.approx(1e-6 / 2 - 1e-9 / 6, rel=2e-4)


def test_errors():
    good = torch.zeros(2, 3)
    for function in (k1, k2, k3):
        with pytest.raises(
            ValueError, match=r"^ref_logprobs must have shape \(2, 3\), got \(2, 1\)"
        ):
            function(good, good[:, :1])
        with pytest.raises(ValueError, match=r"^logprobs must be floating point, got torch.int64"):
            function(good.long(), good)
        with pytest.raises(ValueError, match=r"^mask must have shape \(2, 3\), got \(3,\)"):
            function(good, good, torch.ones(3).bool())
        with pytest.raises(ValueError, match=r"^mask must be bool"):
            function(good, good, good)
    with pytest.raises(
        ValueError,
        match=r"^estimator must be one of k1, k2, k3, k1_k2, k3_k2, k1_ratio, k3_ratio; got 'k4'",
    ):
        kl_penalty(good, good, None, "k4")
    with pytest.raises(ValueError, match=r"^old_logprobs must have shape \(2, 3\), got \(3,\)"):
        kl_penalty(good, good, None, "k1_ratio", good[0])


# --- the controller -------------------------------------------------------------------------------


def test_adaptive_coefficient_by_hand():
    # error .1 (of target 6: kl 6.6), 256 of 10000 episodes: ×(1 + .1·.0256)
    assert adaptive_kl_coef(0.15, 6.6, 6.0, 256, 10_000) == pytest.approx(0.15 * 1.00256)
    assert adaptive_kl_coef(0.15, 100.0, 6.0, 256, 10_000) == pytest.approx(0.15 * 1.00512)
    assert adaptive_kl_coef(0.15, 0.0, 6.0, 256, 10_000) == pytest.approx(0.15 * 0.99488)
    assert adaptive_kl_coef(0.15, 5.7, 6.0, 5_000, 10_000) == pytest.approx(0.15 * 0.975)
    assert adaptive_kl_coef(0.15, 9.0, 6.0, 0, 10_000) == 0.15


@pytest.mark.parametrize(
    "arguments,message",
    [
        ((0.0, 1.0, 1.0, 1, 1), r"^coef must lie in \(0, inf\], got 0.0"),
        ((1.0, NAN, 1.0, 1, 1), r"^kl must lie in \[-inf, inf\], got nan"),
        ((1.0, 1.0, 0.0, 1, 1), r"^target must lie in \(0, inf\], got 0.0"),
        ((1.0, 1.0, 1.0, -1, 1), r"^steps must lie in \[0, inf\], got -1"),
        ((1.0, 1.0, 1.0, 1, 0), r"^horizon must lie in \(0, inf\], got 0"),
    ],
)
def test_adaptive_coefficient_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        adaptive_kl_coef(*arguments)


# --- entropy --------------------------------------------------------------------------------------


def test_B36_entropy_of_the_uniform_and_of_the_temperature():
    assert entropy(torch.zeros(1, 1, 4)).item() == pytest.approx(1.386294, rel=1e-6)
    p = (LOGITS / 0.7).softmax(-1)
    expected = -sum(q * math.log(q) for q in p.tolist())
    assert entropy(LOGITS, temperature=0.7).item() == pytest.approx(expected, rel=1e-12)
    assert entropy(LOGITS).item() != pytest.approx(expected, rel=1e-3)
    # The mean over the trained tokens alone: [3, 3, pad → 1] under [1, 1, 0] is 3.
    mask = torch.tensor([[True, True, False]])
    assert masked_mean(torch.tensor([[3.0, 3.0, 1.0]]), mask).item() == 3.0


def test_B36_entropy_is_never_negative_in_float32():
    logits = torch.tensor([[50.0, 0.0, 0.0], [1e4, -1e4, 3.0], [0.1, 0.1, 0.1]])
    assert (entropy(logits) >= -1e-6).all()
    assert entropy(logits.bfloat16()).dtype == torch.float32
    assert entropy(logits.double()).dtype == F64


def test_entropy_is_per_position():
    out = entropy(torch.stack([LOGITS, REFERENCE, OLD])[None])
    assert out.shape == (1, 3)
    for i, logits in enumerate((LOGITS, REFERENCE, OLD)):
        expected = -sum(q * math.log(q) for q in logits.softmax(-1).tolist())
        assert out[0, i].item() == pytest.approx(expected, rel=1e-12)


def test_entropy_of_forbidden_tokens():
    logits = torch.tensor([0.0, -math.inf, 0.0], dtype=F64, requires_grad=True)
    out = entropy(logits)
    assert out.item() == pytest.approx(math.log(2))
    out.backward()
    assert logits.grad is not None and logits.grad.isfinite().all()
    # dH/dz_v = −p_v (log p_v + H), 0 for the uniform
    torch.testing.assert_close(logits.grad, torch.zeros(3, dtype=F64), atol=1e-12, rtol=0)
    p = LOGITS.softmax(-1)
    expected = -p * (p.log() + entropy(LOGITS))
    torch.testing.assert_close(gradient_of(lambda z: entropy(z)), expected)


def test_entropy_errors():
    with pytest.raises(ValueError, match=r"^temperature must lie in \(0, inf\], got 0"):
        entropy(LOGITS, 0.0)
    with pytest.raises(ValueError, match=r"^logits must be floating point"):
        entropy(LOGITS.long())
    with pytest.raises(
        ValueError, match=r"^logits must have a last dimension of tokens, got a scalar"
    ):
        entropy(torch.tensor(1.0))
