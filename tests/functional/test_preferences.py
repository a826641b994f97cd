"""Preference and reward-model losses: the known figures, identities and finite differences."""

import inspect
import math

import pytest
import torch

from zoo.functional import (
    bradley_terry,
    bradley_terry_ranked,
    dpo_robust,
    dpo_sigmoid,
    hinge,
    ipo,
    kto,
    kto_baseline,
    nll_mixed,
    orpo,
    preference_margins,
    ranked_pairs,
    sequence_logprobs,
    simpo,
)

F64 = torch.float64
NAN = math.nan
EXAMPLE = tuple(torch.tensor([x], dtype=F64) for x in (-10.0, -12.0, -11.0, -11.0))
START = tuple(torch.tensor([x], dtype=F64) for x in (-10.0, -12.0, -10.0, -12.0))
PAIRWISE = {
    "sigmoid": lambda *a: dpo_sigmoid(*a),
    "cdpo": lambda *a: dpo_sigmoid(*a, label_smoothing=0.1),
    "robust": lambda *a: dpo_robust(*a, label_smoothing=0.1),
    "ipo": ipo,
    "hinge": hinge,
}


def f64(values):
    return torch.tensor(values, dtype=F64)


def close(actual, expected, tolerance=1e-9):
    torch.testing.assert_close(
        actual, torch.as_tensor(expected, dtype=actual.dtype), rtol=tolerance, atol=tolerance
    )


def log_sigmoid(x):
    return -math.log1p(math.exp(-x))


@pytest.mark.parametrize(
    "name,expected",
    [
        ("sigmoid", 0.598139),
        ("hinge", 0.8),
        ("ipo", 9.0),
        ("cdpo", 0.618139),
        ("robust", 0.573139),
    ],
)
def test_B58_each_type_gives_its_own_number(name, expected):
    assert PAIRWISE[name](*EXAMPLE, 0.1).item() == pytest.approx(expected, rel=2e-6)


def test_B58_gradient_of_the_sigmoid_loss():
    chosen = EXAMPLE[0].clone().requires_grad_()
    dpo_sigmoid(chosen, *EXAMPLE[1:], 0.1).backward()
    assert chosen.grad is not None and chosen.grad.item() == pytest.approx(-0.0450166, rel=1e-6)


@pytest.mark.parametrize("beta", [0.05, 0.1, 2.0])
def test_losses_at_the_start(beta):
    ln2 = math.log(2)
    assert dpo_sigmoid(*START, beta).item() == pytest.approx(ln2, rel=1e-12)
    for smoothing in (0.0, 0.1, 0.4):
        assert dpo_sigmoid(*START, beta, smoothing).item() == pytest.approx(ln2, rel=1e-12)
        assert dpo_robust(*START, beta, smoothing).item() == pytest.approx(ln2, rel=1e-12)
    assert hinge(*START, beta).item() == 1.0
    assert ipo(*START, beta).item() == pytest.approx(1 / (4 * beta**2), rel=1e-12)
    margins = preference_margins(*START, beta)
    assert margins.margin.item() == margins.chosen.item() == margins.rejected.item() == 0.0
    assert not margins.correct.item()


def test_ipo_has_its_minimum_at_one_over_two_beta():
    beta = 0.2
    h = f64([2.0, 2.5, 3.0]).requires_grad_()  # 1/(2β) = 2.5
    zero = torch.zeros(3, dtype=F64)
    loss = ipo(h, zero, zero, zero, beta)
    close(loss, [0.25, 0.0, 0.25])
    (gradient,) = torch.autograd.grad(loss.sum(), h)
    close(gradient, [-1.0, 0.0, 1.0])


def test_losses_agree_with_their_formulas():
    generator = torch.Generator().manual_seed(0)
    tensors = [-10 * torch.rand(5, generator=generator, dtype=F64) for _ in range(4)]
    beta, e = 0.3, 0.2
    sigmoid, smooth = dpo_sigmoid(*tensors, beta), dpo_sigmoid(*tensors, beta, e)
    robust = dpo_robust(*tensors, beta, e)
    margins = preference_margins(*tensors, beta)
    for i in range(5):
        pc, pr, rc, rr = (t[i].item() for t in tensors)
        h = (pc - rc) - (pr - rr)
        m = beta * h
        assert sigmoid[i].item() == pytest.approx(-log_sigmoid(m))
        assert smooth[i].item() == pytest.approx(-0.8 * log_sigmoid(m) - 0.2 * log_sigmoid(-m))
        expected = (-0.8 * log_sigmoid(m) + 0.2 * log_sigmoid(-m)) / 0.6
        assert robust[i].item() == pytest.approx(expected)
        assert ipo(*tensors, beta)[i].item() == pytest.approx((h - 1 / 0.6) ** 2)
        assert hinge(*tensors, beta)[i].item() == pytest.approx(max(0.0, 1 - m))
        assert margins.chosen[i].item() == pytest.approx(beta * (pc - rc))
        assert margins.rejected[i].item() == pytest.approx(beta * (pr - rr))
        assert margins.margin[i].item() == pytest.approx(m)
        assert margins.correct[i].item() == (m > 0)
    assert 0 < margins.correct.sum() < 5


def test_robust_loss_is_unbiased_under_flipped_labels():
    e, beta = 0.15, 0.4
    flipped = (EXAMPLE[1], EXAMPLE[0], EXAMPLE[3], EXAMPLE[2])
    mean = (1 - e) * dpo_robust(*EXAMPLE, beta, e) + e * dpo_robust(*flipped, beta, e)
    close(mean, dpo_sigmoid(*EXAMPLE, beta))


@pytest.mark.parametrize("name", list(PAIRWISE))
def test_gradients_go_to_the_policy_alone_and_have_the_right_sign(name):
    tensors = [each.clone().requires_grad_() for each in EXAMPLE]
    PAIRWISE[name](*tensors, 0.1).sum().backward()
    assert tensors[0].grad is not None and tensors[1].grad is not None
    assert tensors[0].grad.item() < 0 < tensors[1].grad.item()
    assert tensors[0].grad.item() == pytest.approx(-tensors[1].grad.item())
    assert tensors[2].grad is None and tensors[3].grad is None


def test_margins_carry_no_gradient():
    tensors = [each.clone().requires_grad_() for each in EXAMPLE]
    margins = preference_margins(*tensors, 0.1)
    assert not any(each.requires_grad for each in margins)
    assert margins.correct.dtype == torch.bool and margins.correct.item()
    half = [each.bfloat16() for each in EXAMPLE]
    assert preference_margins(*half, 0.1).chosen.dtype == torch.float32


@pytest.mark.parametrize("name", list(PAIRWISE))
def test_large_margins_do_not_overflow(name):
    for sign in (1.0, -1.0):
        chosen = torch.tensor([sign * 3e3], requires_grad=True)
        zero = torch.zeros(1)
        loss = PAIRWISE[name](chosen, zero, zero, zero, 1.0)
        loss.sum().backward()
        assert loss.isfinite().all() and chosen.grad is not None and chosen.grad.isfinite().all()


@pytest.mark.parametrize("name", list(PAIRWISE))
def test_pairwise_errors(name):
    function = PAIRWISE[name]
    good = torch.zeros(3)
    for i, argument in enumerate(("policy_rejected", "ref_chosen", "ref_rejected"), start=1):
        arguments = [good] * 4
        arguments[i] = good[:1]
        with pytest.raises(
            ValueError, match=rf"^{argument} must have shape \(3,\), got \(1,\): noth"
        ):
            function(*arguments, 0.1)
        arguments[i] = good.long()
        with pytest.raises(
            ValueError, match=rf"^{argument} must be floating point, got torch.int64"
        ):
            function(*arguments, 0.1)
    with pytest.raises(ValueError, match=r"^policy_chosen must have 1 dimension\(s\), got 2"):
        function(good[None], good, good, good, 0.1)
    with pytest.raises(ValueError, match=r"^beta must lie in \(0, inf\], got 0.0"):
        function(good, good, good, good, 0.0)
    half = function(*[good.half()] * 4, 0.1)
    assert half.dtype == torch.float32
    assert function(*[good.double()] * 4, 0.1).dtype == F64


def test_label_smoothing_must_be_below_one_half():
    for function in (dpo_sigmoid, dpo_robust):
        for value in (0.5, -0.1):
            with pytest.raises(
                ValueError, match=rf"^label_smoothing must lie in \[0, 0.5\), got {value}"
            ):
                function(*EXAMPLE, 0.1, value)
    assert inspect.signature(dpo_sigmoid).parameters["label_smoothing"].default == 0.0


# --- sequence log-probs ---------------------------------------------------------------------------


def test_sequence_logprobs_sum_and_mean():
    logprobs = f64([[NAN, -1.0, -2.0, 1e4], [-3.0, NAN, -5.0, -1.0]]).requires_grad_()
    mask = torch.tensor([[False, True, True, False], [True, False, True, True]])
    close(sequence_logprobs(logprobs, mask, average=False), [-3.0, -9.0])
    out = sequence_logprobs(logprobs, mask, average=True)
    close(out, [-1.5, -3.0])
    out.sum().backward()
    assert logprobs.grad is not None
    third = 1 / 3
    close(logprobs.grad, [[0.0, 0.5, 0.5, 0.0], [third, 0.0, third, third]])
    assert sequence_logprobs(torch.zeros(1, 1).half(), mask[:1, 1:2], True).dtype == torch.float32


def test_B56_ipo_of_sums_and_of_means():
    # Chosen of 4 tokens, rejected of 2; the sums are those of the example.
    policy = f64([[-2.5] * 4, [-6.0, -6.0, NAN, NAN]])
    reference = f64([[-2.75] * 4, [-5.5, -5.5, NAN, NAN]])
    mask = torch.tensor([[True] * 4, [True, True, False, False]])
    for average, expected in ((False, 9.0), (True, 18.0625)):
        # means: h = (−2.5 + 2.75) − (−6 + 5.5) = .75; (.75 − 5)² = 18.0625
        pc, pr = sequence_logprobs(policy, mask, average)[:, None]
        rc, rr = sequence_logprobs(reference, mask, average)[:, None]
        assert ipo(pc, pr, rc, rr, 0.1).item() == pytest.approx(expected)


@pytest.mark.parametrize("average", [True, False])
def test_B56_empty_completions_are_refused_by_index(average):
    mask = torch.tensor([[True, False], [False, False], [True, True], [False, False]])
    with pytest.raises(ValueError, match=r"no trained token in row\(s\) \[1, 3\].*Drop the pair"):
        sequence_logprobs(torch.zeros(4, 2), mask, average)
    with pytest.raises(ValueError, match=r"^mask must have shape \(4, 2\), got \(2,\)"):
        sequence_logprobs(torch.zeros(4, 2), mask[0], average)
    with pytest.raises(ValueError, match=r"^logprobs must have 2 dimension\(s\), got 1"):
        sequence_logprobs(torch.zeros(2), mask[0], average)


# --- without a reference --------------------------------------------------------------------------


def test_likelihood_mixed_in_by_hand():
    # 0.5 + 0.1·6/3 = 0.7 and 1 + 0.1·2/4 = 1.05.
    chosen = torch.tensor([-6.0, -2.0], dtype=torch.float64, requires_grad=True)
    losses = torch.tensor([0.5, 1.0], dtype=torch.float64)
    mixed = nll_mixed(losses, chosen, torch.tensor([3, 4]), 0.1)
    assert mixed.tolist() == pytest.approx([0.7, 1.05])
    mixed.sum().backward()
    assert chosen.grad is not None
    assert chosen.grad.tolist() == pytest.approx([-0.1 / 3, -0.1 / 4])


def test_likelihood_mixed_in_refuses_empty_completions_and_a_price_on_likelihood():
    losses, lengths = torch.zeros(2), torch.tensor([1, 0])
    with pytest.raises(ValueError, match=r"^chosen_lengths must be at least 1, got 0"):
        nll_mixed(losses, losses, lengths, 0.1)
    with pytest.raises(ValueError, match=r"^nll_coef must lie in \[0, inf\], got -0.1"):
        nll_mixed(losses, losses, lengths + 1, -0.1)
    assert nll_mixed(losses, losses - 5, lengths + 1, 0.0).tolist() == [0.0, 0.0]
    with pytest.raises(ValueError, match=r"^losses must have 1 dimension\(s\), got 0"):
        nll_mixed(losses[0], losses[0], lengths[0], 0.1)
    with pytest.raises(ValueError, match=r"^policy_chosen must have shape \(2,\), got \(1,\)"):
        nll_mixed(losses, losses[:1], lengths + 1, 0.1)
    with pytest.raises(ValueError, match=r"^chosen_lengths must have shape \(2,\), got \(1,\)"):
        nll_mixed(losses, losses, lengths[:1], 0.1)


def test_simpo_by_hand():
    # β (π̄_c − π̄_r) − γ = 2·(−.5 + 1) − .25 = .75
    out = simpo(f64([-0.5]), f64([-1.0]), beta=2.0, margin=0.25)
    assert out.item() == pytest.approx(-log_sigmoid(0.75))
    assert simpo(f64([-0.5]), f64([-0.5]), 2.0, 0.0).item() == pytest.approx(math.log(2))
    with pytest.raises(ValueError, match=r"^beta must lie in \(0, inf\], got 0"):
        simpo(f64([-0.5]), f64([-1.0]), beta=0, margin=0.25)
    with pytest.raises(ValueError, match=r"^margin must lie in \[0, inf\], got -1"):
        simpo(f64([-0.5]), f64([-1.0]), beta=1, margin=-1)
    with pytest.raises(ValueError, match=r"^policy_rejected must have shape \(1,\), got \(2,\)"):
        simpo(f64([-0.5]), f64([-1.0, 0.0]), beta=1, margin=1)
    with pytest.raises(ValueError, match=r"^policy_chosen must have 1 dimension\(s\), got 0"):
        simpo(torch.tensor(0.0), torch.tensor(0.0), beta=1, margin=1)


def test_orpo_by_hand():
    # p_c = .8: odds 4; p_r = .5: odds 1; −log σ(ln 4 − ln 1) = −log(4/5)
    out = orpo(f64([math.log(0.8)]), f64([math.log(0.5)]))
    assert out.item() == pytest.approx(-math.log(0.8))
    chosen = f64([math.log(0.8)]).requires_grad_()
    orpo(chosen, f64([math.log(0.5)])).backward()
    # d/dlog p of log odds = 1/(1−p) = 5; −(1 − σ) · 5 = −.2 · 5
    assert chosen.grad is not None and chosen.grad.item() == pytest.approx(-1.0)
    rejected = f64([math.log(0.5)]).requires_grad_()
    orpo(f64([math.log(0.8)]), rejected).backward()
    assert rejected.grad is not None and rejected.grad.item() == pytest.approx(0.2 * 2)


def test_orpo_of_a_certain_completion_is_finite():
    for dtype in (torch.float32, F64):
        for pair in ((0.0, -1.0), (-1.0, 0.0), (0.0, 0.0)):
            chosen, rejected = (torch.tensor([x], dtype=dtype, requires_grad=True) for x in pair)
            loss = orpo(chosen, rejected)
            gradients = torch.autograd.grad(loss.sum(), (chosen, rejected))
            assert loss.isfinite().all() and all(g.isfinite().all() for g in gradients)
        # p = 1 − eps: odds of about 1/eps against odds of e^−1/(1 − e^−1)
        eps = torch.finfo(dtype).eps
        out = orpo(torch.tensor([-1.0], dtype=dtype), torch.tensor([0.0], dtype=dtype)).item()
        odds = math.exp(-1) / (1 - math.exp(-1))
        assert out == pytest.approx(math.log(1 / eps / odds), rel=1e-4)
    with pytest.raises(ValueError, match=r"^policy_rejected must have shape \(1,\), got \(2,\)"):
        orpo(f64([-0.5]), f64([-1.0, 0.0]))
    with pytest.raises(ValueError, match=r"^policy_chosen must have 1 dimension\(s\), got 0"):
        orpo(torch.tensor(-0.5), torch.tensor(-1.0))


def test_kto_by_hand():
    policy, reference = f64([-9.0, -9.0, -12.0]), f64([-10.0, -10.0, -10.0])  # h = 1, 1, −2
    desirable = torch.tensor([True, False, False])
    sigmoid = lambda x: 1 / (1 + math.exp(-x))  # noqa: E731
    expected = [1 - sigmoid(0.5 * 0.75), 1 - sigmoid(-0.5 * 0.75), 1 - sigmoid(0.5 * 2.25)]
    for z in (0.25, torch.tensor(0.25), torch.full((3,), 0.25)):
        close(kto(policy, reference, desirable, z, 0.5), expected)
    out = kto(policy, reference, desirable, 0.25, 0.5, desirable_weight=2.0, undesirable_weight=3.0)
    close(out, [2 * expected[0], 3 * expected[1], 3 * expected[2]])
    assert kto(policy, policy, desirable, 0.0, 0.5).tolist() == [0.5] * 3


def test_kto_gradients():
    policy = f64([-9.0, -12.0]).requires_grad_()
    reference, z = f64([-10.0, -10.0]).requires_grad_(), torch.tensor(0.5, requires_grad=True)
    kto(policy, reference, torch.tensor([True, False]), z, 0.5).sum().backward()
    assert policy.grad is not None and policy.grad[0] < 0 < policy.grad[1]
    assert reference.grad is None and z.grad is None


def test_kto_baseline_is_a_mean_at_least_zero():
    policy = f64([-1.0, -2.0, -6.0]).requires_grad_()
    out = kto_baseline(policy, f64([-3.0, -4.0, -4.0]))  # (2 + 2 − 2)/3
    assert out.item() == pytest.approx(2 / 3) and not out.requires_grad and out.shape == ()
    assert kto_baseline(f64([-5.0, -1.0]), f64([-1.0, -2.0])).item() == 0.0
    with pytest.raises(ValueError, match=r"^policy has no rows"):
        kto_baseline(torch.zeros(0), torch.zeros(0))
    with pytest.raises(ValueError, match=r"^reference must have shape \(2,\), got \(1,\)"):
        kto_baseline(torch.zeros(2), torch.zeros(1))
    with pytest.raises(ValueError, match=r"^policy must have 1 dimension\(s\), got 2"):
        kto_baseline(torch.zeros(2, 1), torch.zeros(2, 1))


def test_kto_errors():
    good, desirable = torch.zeros(3), torch.zeros(3).bool()
    with pytest.raises(ValueError, match=r"^reference must have shape \(3,\), got \(1,\)"):
        kto(good, good[:1], desirable, 0.0, 0.1)
    with pytest.raises(ValueError, match=r"^policy must have 1 dimension\(s\), got 2"):
        kto(good[None], good[None], desirable, 0.0, 0.1)
    with pytest.raises(ValueError, match=r"^desirable must be bool, got torch.float32"):
        kto(good, good, good, 0.0, 0.1)
    with pytest.raises(ValueError, match=r"^desirable must have shape \(3,\), got \(1,\)"):
        kto(good, good, desirable[:1], 0.0, 0.1)
    with pytest.raises(ValueError, match=r"^kl_baseline must have shape \(3,\), got \(1,\)"):
        kto(good, good, desirable, torch.zeros(1), 0.1)
    with pytest.raises(ValueError, match=r"^kl_baseline must be floating point"):
        kto(good, good, desirable, torch.tensor(0), 0.1)
    with pytest.raises(ValueError, match=r"^beta must lie in \(0, inf\], got 0"):
        kto(good, good, desirable, 0.0, 0)
    with pytest.raises(ValueError, match=r"^undesirable_weight must lie in \[0, inf\], got -1"):
        kto(good, good, desirable, 0.0, 0.1, undesirable_weight=-1)
    with pytest.raises(ValueError, match=r"^desirable_weight must lie in \[0, inf\], got -1"):
        kto(good, good, desirable, 0.0, 0.1, desirable_weight=-1)


# --- reward models --------------------------------------------------------------------------------


def test_B65_bradley_terry_does_not_overflow():
    for dtype in (torch.float32, torch.bfloat16):
        chosen, rejected = torch.tensor([1.0, 0.0]).to(dtype), torch.tensor([0.0, 100.0]).to(dtype)
        chosen.requires_grad_()
        out = bradley_terry(chosen, rejected)
        assert out.dtype == torch.float32
        assert out.tolist() == pytest.approx([0.313262, 100.0], rel=1e-5)
        out.sum().backward()
        assert chosen.grad is not None and chosen.grad[1].item() == pytest.approx(-1.0)


def test_bradley_terry_margin_and_centring():
    chosen, rejected = f64([2.0, 1.0]), f64([1.0, 1.5])
    close(bradley_terry(chosen, rejected), [-log_sigmoid(1.0), -log_sigmoid(-0.5)])
    close(bradley_terry(chosen, rejected, 0.25), [-log_sigmoid(0.75), -log_sigmoid(-0.75)])
    margin = f64([0.5, 0.0]).requires_grad_()
    out = bradley_terry(chosen, rejected, margin)
    close(out, [-log_sigmoid(0.5), -log_sigmoid(-0.5)])
    assert not out.requires_grad
    out = bradley_terry(chosen, rejected, centre=0.01)
    close(out, [-log_sigmoid(1.0) + 0.09, -log_sigmoid(-0.5) + 0.0625])


def test_bradley_terry_errors():
    good = torch.zeros(3)
    with pytest.raises(ValueError, match=r"^rejected must have shape \(3,\), got \(1,\)"):
        bradley_terry(good, good[:1])
    with pytest.raises(ValueError, match=r"^chosen must have 1 dimension\(s\), got 2"):
        bradley_terry(good[None], good[None])
    with pytest.raises(ValueError, match=r"^margin must have shape \(3,\), got \(1,\)"):
        bradley_terry(good, good, good[:1])
    with pytest.raises(ValueError, match=r"^margin must be floating point"):
        bradley_terry(good, good, good.long())
    with pytest.raises(ValueError, match=r"^centre must lie in \[0, inf\], got -1"):
        bradley_terry(good, good, centre=-1)


def test_ranked_bradley_terry_agrees_with_a_loop_over_pairs():
    scores = f64([[1.0, 0.5, -2.0, 0.0], [3.0, 3.0, 1.0, 2.0], [0.1, 0.2, 0.3, 0.4]])
    ranks = torch.tensor([[1, 2, 3, 4], [2, 1, 1, 3], [5, 5, 5, 5]])
    expected = []
    for s, r in zip(scores.tolist(), ranks.tolist(), strict=True):
        terms = [-log_sigmoid(s[i] - s[j]) for i in range(4) for j in range(4) if r[i] < r[j]]
        expected.append(sum(terms) / len(terms) if terms else 0.0)
    close(bradley_terry_ranked(scores, ranks), expected)
    close(bradley_terry_ranked(scores, ranks.double()), expected)
    close(bradley_terry_ranked(scores, ranks.int() - 7), expected)
    order = torch.tensor([3, 1, 0, 2])
    close(bradley_terry_ranked(scores[:, order], ranks[:, order]), expected)


def test_ranked_pairs_are_the_pairwise_loss():
    chosen, rejected = f64([2.0, 1.0]), f64([1.0, 1.5])
    scores = torch.stack([chosen, rejected], dim=1)
    ranks = torch.tensor([[1, 2], [1, 2]])
    close(bradley_terry_ranked(scores, ranks), bradley_terry(chosen, rejected))
    close(bradley_terry_ranked(scores, ranks.flip(1)), bradley_terry(rejected, chosen))


def test_ranking_of_ties_alone_has_a_graph_and_large_scores_are_finite():
    scores = torch.tensor([[0.0, 1e4]], requires_grad=True)
    out = bradley_terry_ranked(scores, torch.tensor([[1, 1]]))
    out.sum().backward()
    assert out.item() == 0.0 and scores.grad is not None and not scores.grad.any()
    out = bradley_terry_ranked(scores, torch.tensor([[1, 2]]))
    assert out.item() == pytest.approx(1e4)
    # The square of a sum of 1e30 is no float32 number, and has no part in a loss without centring.
    for loss in (
        bradley_terry_ranked(torch.tensor([[0.0, 1e30]]), torch.tensor([[1, 2]])),
        bradley_terry(torch.tensor([0.0]), torch.tensor([1e30])),
    ):
        assert loss.item() == pytest.approx(1e30)
    assert bradley_terry_ranked(scores.bfloat16(), torch.tensor([[1, 2]])).dtype == torch.float32


def test_ranked_margins_centring_and_absent_outputs_agree_with_a_loop_over_pairs():
    scores = f64([[1.0, 0.5, -2.0], [3.0, NAN, 1.0], [NAN, 0.2, NAN]]).requires_grad_()
    ranks = torch.tensor([[1, 2, 3], [2, 1, 1], [1, 2, 3]])
    present = torch.tensor([[True] * 3, [True, False, True], [False, True, False]])
    margin = torch.arange(27, dtype=F64).reshape(3, 3, 3) / 10
    # m where i wins and both are there, NaN elsewhere: only the pairs' margins may be read
    pairs = [[(0, 1), (0, 2), (1, 2)], [(2, 0)], []]
    wins = torch.zeros(3, 3, 3, dtype=torch.bool)
    for n, ones in enumerate(pairs):
        for i, j in ones:
            wins[n, i, j] = True
    assert torch.equal(ranked_pairs(ranks, present), wins)
    margin = torch.where(wins, margin, NAN).requires_grad_()
    for options in ({}, {"margin": margin}, {"centre": 0.1}, {"margin": margin, "centre": 0.1}):
        expected = []
        for n, ones in enumerate(pairs):
            s = scores[n].tolist()
            m = margin[n] if "margin" in options else torch.zeros(3, 3)
            terms = [
                -log_sigmoid(s[i] - s[j] - m[i, j].item())
                + options.get("centre", 0.0) * (s[i] + s[j]) ** 2
                for i, j in ones
            ]
            expected.append(sum(terms) / max(1, len(terms)))
        out = bradley_terry_ranked(scores, ranks, present=present, **options)
        close(out, expected)
        inputs = (scores, margin)
        gradient, of_margin = torch.autograd.grad(out.sum(), inputs, allow_unused=True)
        assert gradient.isfinite().all() and not gradient[~present].any()
        assert of_margin is None


def test_ranking_errors():
    good = torch.zeros(2, 3)
    for ranks in (torch.zeros(2, 2).long(), torch.zeros(2, 2)):
        with pytest.raises(ValueError, match=r"^ranks must have shape \(2, 3\), got \(2, 2\)"):
            bradley_terry_ranked(good, ranks)
    with pytest.raises(ValueError, match=r"^ranks must hold integers, got torch.bool"):
        bradley_terry_ranked(good, good.bool())
    with pytest.raises(ValueError, match=r"^ranks must be a torch.Tensor, got list"):
        bradley_terry_ranked(good, [[1, 2, 3]] * 2)
    with pytest.raises(ValueError, match=r"^scores must have 2 dimension\(s\), got 1"):
        bradley_terry_ranked(good[0], good[0].long())
    with pytest.raises(ValueError, match=r"^centre must lie in \[0, inf\], got -1"):
        bradley_terry_ranked(good, good.long(), centre=-1)
    with pytest.raises(ValueError, match=r"^margin must have shape \(2, 3, 3\), got \(2, 3\)"):
        bradley_terry_ranked(good, good.long(), margin=good)
    with pytest.raises(ValueError, match=r"^margin must be floating point"):
        bradley_terry_ranked(good, good.long(), margin=torch.zeros(2, 3, 3).long())
    with pytest.raises(ValueError, match=r"^ranks must have 2 dimension\(s\), got 1"):
        ranked_pairs(good[0])
    with pytest.raises(ValueError, match=r"^present must be bool, got torch.float32"):
        ranked_pairs(good, good)
    with pytest.raises(ValueError, match=r"^present must have shape \(2, 3\), got \(3,\)"):
        ranked_pairs(good, good[0].bool())
