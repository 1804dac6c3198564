"""KL estimators by exact enumeration over three outcomes, in double precision: no sampling (known failure 12)."""

from __future__ import annotations

import pytest
import torch

from drumroll.algorithms.kl import ESTIMATORS, Estimator, estimate, k1, k2, k3, penalise

POLICY = torch.tensor([-0.2, -0.7, 0.0], dtype=torch.float64)
REFERENCE = torch.log_softmax(torch.tensor([-0.5, 0.5, 0.0], dtype=torch.float64), 0)
REVERSE_KL_GRADIENT = [0.1596, -0.2249, 0.0653]
FORWARD_KL_GRADIENT = [0.1673, -0.2920, 0.1247]


def exact_kl(logits: torch.Tensor) -> torch.Tensor:
    logp = torch.log_softmax(logits, 0)
    return (logp.exp() * (logp - REFERENCE)).sum()


def on_policy_gradient(kind: Estimator) -> torch.Tensor:
    """Gradient of E_{y ~ pi}[estimator], the expectation's weights held fixed, as sampling would."""
    logits = POLICY.clone().requires_grad_()
    logp = torch.log_softmax(logits, 0)
    (logp.detach().exp() * estimate(kind, logp, REFERENCE)).sum().backward()
    assert logits.grad is not None
    return logits.grad


def test_values_average_to_the_exact_kl() -> None:
    logp = torch.log_softmax(POLICY, 0)
    exact = exact_kl(POLICY).item()
    assert exact == pytest.approx(0.18943, abs=5e-6)
    assert (logp.exp() * k1(logp, REFERENCE)).sum().item() == pytest.approx(exact, abs=1e-12)
    assert (logp.exp() * k3(logp, REFERENCE)).sum().item() == pytest.approx(exact, abs=1e-12)
    assert (logp.exp() * k2(logp, REFERENCE)).sum().item() == pytest.approx(exact, rel=0.2)  # biased, and close here


def test_gradients_as_losses() -> None:
    logits = POLICY.clone().requires_grad_()
    exact_kl(logits).backward()
    assert logits.grad is not None
    assert logits.grad.tolist() == pytest.approx(REVERSE_KL_GRADIENT, abs=5e-5)
    assert torch.allclose(on_policy_gradient("k2"), logits.grad, rtol=0, atol=1e-9)
    assert on_policy_gradient("k1").abs().max() < 1e-15
    assert on_policy_gradient("k3").tolist() == pytest.approx(FORWARD_KL_GRADIENT, abs=5e-5)


@pytest.mark.parametrize("kind", ["k2", "k3"])
def test_one_step_on_the_term_lowers_the_kl(kind: Estimator) -> None:
    assert exact_kl(POLICY - 0.1 * on_policy_gradient(kind)) < exact_kl(POLICY) - 1e-3


@pytest.mark.parametrize("kind", list(ESTIMATORS))
def test_equal_policies_have_exactly_no_kl(kind: Estimator) -> None:  # (13)
    logp = torch.log_softmax(torch.randn(64, 50, generator=torch.Generator().manual_seed(0)), -1)
    assert estimate(kind, logp, logp.clone()).abs().max().item() == 0.0


def test_k3_of_tiny_gaps_keeps_its_digits_and_of_huge_ones_stays_finite() -> None:
    logp, ref = torch.tensor([-1.0]), torch.tensor([-1.0 - 1e-3])
    d = (ref.double() - logp.double()).item()
    assert k3(logp, ref).item() == pytest.approx(d * d / 2 + d**3 / 6, rel=1e-3)  # exp(d) - 1 - d in fp32 is off by 6 %
    assert torch.isfinite(k3(torch.tensor([-500.0]), torch.tensor([0.0]))).all()


def test_kl_in_the_reward_is_subtracted_before_advantages() -> None:
    got = penalise([[1.0, None], [0.5]], [[2.0, float("nan")], [-1.0]], coef=0.1)
    assert got == [[0.8, None], [0.6]]
