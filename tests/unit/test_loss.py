"""Losses over flat tokens. Numbers in parentheses are rows of the table of known failures."""

from __future__ import annotations

import math
import pickle
from collections.abc import Sequence
from functools import partial

import pytest
import torch

from drumroll.algorithms.loss import (
    LOGPROB_GAP_BOUND,
    Aggregate,
    TokenWeights,
    cispo,
    gspo,
    policy_objective,
    ppo,
    reinforce,
    rl_loss,
    sft_loss,
    token_weights,
)
from drumroll.errors import RunError
from drumroll.types import Denominators, LossFn, MicroBatch, TokenOutputs

MODES: tuple[Aggregate, ...] = ("token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant")
POLICIES = ("ppo", "gspo", "cispo", "reinforce")
LENGTHS = [3, 1, 0, 5, 2, 7, 1, 4]  # targets of eight samples; one has none


def micro_batch(lengths: Sequence[int], **vectors: torch.Tensor | None) -> MicroBatch:
    n = sum(lengths)
    tokens = [length + 1 for length in lengths]  # a prompt of one token each
    ids = torch.zeros(sum(tokens), dtype=torch.int64)
    return MicroBatch(ids, tokens, torch.arange(n), torch.tensor(lengths, dtype=torch.int64), **vectors)


def denominators(lengths: Sequence[int]) -> Denominators:
    sequences = sum(length > 0 for length in lengths)
    return Denominators(tokens=sum(lengths), sequences=sequences, groups=max(1, sequences // 2))


def reinforce_loss(mode: Aggregate) -> LossFn:
    return partial(rl_loss, policy=reinforce, weights=token_weights(mode, 10))


def full_loss(policy: str, mode: Aggregate) -> LossFn:
    """Every term of the loss switched on."""
    objective = policy_objective(policy, 0.2, 0.28, 3.0)  # type: ignore[arg-type]
    weights = token_weights(mode, 10)
    return partial(rl_loss, policy=objective, weights=weights, kl_coef=0.1, kl_estimator="k3", entropy_coef=0.01, importance_cap=2.0)


def random_vectors(n: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    logprobs = -3 * torch.rand(n, generator=g)
    noisy = {name: logprobs + 0.4 * torch.randn(n, generator=g) for name in ("old_logprobs", "engine_logprobs", "ref_logprobs")}
    return {"logprobs": logprobs, "advantages": torch.randn(n, generator=g), **noisy}


# Splits: the sum over micro-batches (and ranks) of losses by global denominators.


def split_gradient(loss: LossFn, lengths: Sequence[int], micro_size: int) -> tuple[float, float, torch.Tensor]:
    """(loss, loss_abs, gradient) of the step when it goes through in micro-batches of `micro_size` samples."""
    vectors = random_vectors(sum(lengths))
    logprobs = vectors.pop("logprobs").requires_grad_()
    total, total_abs = 0.0, 0.0
    for first in range(0, len(lengths), micro_size):
        part = lengths[first : first + micro_size]
        start = sum(lengths[:first])
        cut = slice(start, start + sum(part))
        outputs = TokenOutputs(logprobs[cut], entropy=-logprobs[cut] * 0.5)
        out = loss(outputs, micro_batch(part, **{name: v[cut] for name, v in vectors.items()}), denominators(lengths))
        out.loss.backward()
        total += out.loss.item()
        total_abs += out.stats["loss_abs"].sum().item()
    assert logprobs.grad is not None
    return total, total_abs, logprobs.grad


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("policy", POLICIES)
def test_gradient_does_not_depend_on_micro_batches(policy: str, mode: Aggregate) -> None:  # (2)
    loss, loss_abs, gradient = split_gradient(full_loss(policy, mode), LENGTHS, 8)
    assert gradient.abs().sum() > 0
    for size in (1, 2):
        other_loss, other_abs, other = split_gradient(full_loss(policy, mode), LENGTHS, size)
        assert other_loss == pytest.approx(loss, abs=1e-6)
        assert other_abs == pytest.approx(loss_abs, abs=1e-6)
        assert (other - gradient).abs().max() < 1e-6 * max(1.0, gradient.abs().max().item())


@pytest.mark.parametrize("split", [[10], [9, 1], [1] * 10, [4, 0, 6], [5, 5]])
def test_token_mean_of_nine_twos_and_an_eight_is_2_6(split: list[int]) -> None:  # (2)
    losses = torch.tensor([2.0] * 9 + [8.0])
    total, start = 0.0, 0
    for n in split:
        out = sft_loss(TokenOutputs(-losses[start : start + n]), micro_batch([n]), Denominators(10, 10, 1))
        total, start = total + out.loss.item(), start + n
    assert total == pytest.approx(2.6, abs=1e-6)


def test_uneven_ranks_sum_to_the_one_process_gradient() -> None:  # (1), its pure part: 6 tokens split 5/1 over two ranks
    g = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(6, 4, generator=g), torch.randint(7, (6,), generator=g)
    weight = torch.randn(7, 4, generator=g)

    def gradient(part: slice) -> torch.Tensor:
        w = weight.clone().requires_grad_()
        logprobs = torch.log_softmax(inputs[part] @ w.T, -1).gather(1, targets[part, None])[:, 0]
        sft_loss(TokenOutputs(logprobs), micro_batch([len(logprobs)]), Denominators(6, 2, 1)).loss.backward()
        assert w.grad is not None
        return w.grad

    whole = gradient(slice(0, 6))
    summed = gradient(slice(0, 5)) + gradient(slice(5, 6))
    assert ((summed - whole).norm() / whole.norm()).item() < 1e-6


# What carries no loss.


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("poison", [100.0, math.nan, -math.inf])
def test_tokens_without_loss_cannot_reach_it(mode: Aggregate, poison: float) -> None:  # (3), (4)
    """Loss [[1, x], [1, x]] with mask [[1, 0], [1, 0]]: 1.0 under every mean, gradient [[.5, 0], [.5, 0]]."""
    loss_BT = torch.tensor([[1.0, poison], [1.0, poison]], requires_grad=True)
    targets = torch.tensor([[True, False], [True, False]])
    lengths = targets.sum(1).tolist()
    out = reinforce_loss(mode)(TokenOutputs(-loss_BT[targets]), micro_batch(lengths, advantages=torch.ones(2)), denominators(lengths))
    out.loss.backward()
    scale = 0.1 if mode == "constant" else 1.0  # over a constant length of 10
    assert out.loss.item() == pytest.approx(scale, abs=1e-7)
    assert loss_BT.grad is not None
    assert torch.equal(loss_BT.grad, torch.tensor([[0.5, 0.0], [0.5, 0.0]]) * scale)


def test_nan_between_targets_stays_out_of_value_stats_and_gradient() -> None:  # (4)
    terms = torch.tensor([1.0, math.nan, 3.0], requires_grad=True)
    keep = torch.tensor([True, False, True])
    logprobs = -terms[keep]
    vectors = {"advantages": torch.ones(2), "ref_logprobs": torch.zeros(2), "engine_logprobs": torch.zeros(2)}
    loss = partial(rl_loss, policy=reinforce, weights=token_weights("sequence_mean_token_sum", 1), kl_coef=0.1, entropy_coef=0.1)
    out = loss(TokenOutputs(logprobs, entropy=terms[keep]), micro_batch([2], **vectors), Denominators(2, 1, 1))
    out.loss.backward()
    assert terms.grad is not None
    assert terms.grad[1].item() == 0.0
    assert all(torch.isfinite(stat).all() for stat in out.stats.values())
    plain = reinforce_loss("sequence_mean_token_sum")(TokenOutputs(-terms[keep]), micro_batch([2], **vectors), Denominators(2, 1, 1))
    assert plain.loss.item() == 4.0


@pytest.mark.parametrize("lengths", [[], [0], [0, 0]])
@pytest.mark.parametrize("policy", [*POLICIES, "sft"])
@pytest.mark.parametrize("mode", MODES)
def test_no_targets_give_an_attached_zero(policy: str, mode: Aggregate, lengths: list[int]) -> None:  # (5)
    for totals in (Denominators(0, 0, 0), Denominators(10, 2, 1)):
        parameter = torch.ones(3, requires_grad=True)
        logprobs = parameter[:0] * 1.0
        empty = torch.zeros(0)
        vectors = dict.fromkeys(("advantages", "old_logprobs", "engine_logprobs", "ref_logprobs"), empty)
        loss = sft_loss if policy == "sft" else full_loss(policy, mode)
        out = loss(TokenOutputs(logprobs, entropy=logprobs), micro_batch(lengths, **vectors), totals)
        assert out.loss.item() == 0.0
        out.loss.backward()  # every rank must be able to: collectives hang on it
        assert parameter.grad is not None
        assert not parameter.grad.any()
        assert all(stat.numel() == 0 for stat in out.stats.values())


# Weights.


def test_weights_of_each_mode() -> None:
    lengths = torch.tensor([1, 0, 3])
    totals = Denominators(tokens=8, sequences=4, groups=2)  # the micro-batch is half of the step
    expected = {
        "token_mean": [1 / 8] * 4,
        "sequence_mean_token_mean": [1 / 4] + [1 / 12] * 3,
        "sequence_mean_token_sum": [1 / 4] * 4,
        "constant": [1 / 40] * 4,
    }
    for mode in MODES:
        weights: TokenWeights = token_weights(mode, 10)
        assert weights(lengths, 4, totals, torch.float64).tolist() == pytest.approx(expected[mode], abs=1e-15)


# Policy objectives.


def objective_gradient(ratio: float, advantage: float, **clips: float | None) -> tuple[float, float, bool]:
    """(term, d term / d logprob, clipped) of PPO for one token."""
    logprobs = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    zero, a = torch.zeros(1, dtype=torch.float64), torch.tensor([advantage], dtype=torch.float64)
    out = ppo(logprobs, zero, a, torch.tensor([1]), **{"clip_low": 0.2, "clip_high": 0.28, **clips})  # type: ignore[arg-type]
    out.terms.sum().backward()
    assert logprobs.grad is not None
    return out.terms.item(), logprobs.grad.item(), bool(out.clipped.item())


@pytest.mark.parametrize(
    ("ratio", "advantage", "dual", "term", "gradient", "clipped"),
    [
        (1.1, 2.0, None, -2.2, -2.2, False),
        (1.5, 2.0, None, -2.56, 0.0, True),  # above 1 + clip_high, and pushed further up
        (0.5, 2.0, None, -1.0, -1.0, False),  # below, but pulled back: min takes the free side
        (0.5, -2.0, None, 1.6, 0.0, True),
        (1.5, -2.0, None, 3.0, 3.0, False),
        (5.0, -2.0, None, 10.0, 10.0, False),
        (5.0, -2.0, 3.0, 6.0, 0.0, True),  # dual clip bounds it at 3 |A|
        (2.5, -2.0, 3.0, 5.0, 5.0, False),
        (5.0, 2.0, 3.0, -2.56, 0.0, True),
        (1.0, 0.0, 3.0, 0.0, 0.0, False),
    ],
)
def test_ppo_clip(ratio: float, advantage: float, dual: float | None, term: float, gradient: float, clipped: bool) -> None:
    got = objective_gradient(ratio, advantage, dual_clip=dual)
    assert got[:2] == pytest.approx((term, gradient), abs=1e-12)
    assert got[2] is clipped


def test_gspo_clips_whole_sequences() -> None:
    # Means of the log-ratio: 0.1 (within 0.2) although one token is at 0.5; and 0.4 (beyond) although one token is at -0.2.
    log_ratio = torch.tensor([0.5, -0.3, 1.0, -0.2], dtype=torch.float64)
    logprobs = log_ratio.clone().requires_grad_()
    old, ones = torch.zeros(4, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
    out = gspo(logprobs, old, ones, torch.tensor([2, 2]), clip_low=0.2, clip_high=0.2)
    out.terms.sum().backward()
    assert out.ratio.tolist() == pytest.approx([math.exp(0.1)] * 2 + [math.exp(0.4)] * 2, abs=1e-12)
    assert out.clipped.tolist() == [False, False, True, True]
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-math.exp(0.1)] * 2 + [0.0, 0.0], abs=1e-12)


def test_cispo_clips_the_weight_and_keeps_every_gradient() -> None:
    logprobs = torch.tensor([math.log(6.0), math.log(2.0), math.log(0.1)], dtype=torch.float64, requires_grad=True)
    a = torch.tensor([1.0, -1.0, 2.0], dtype=torch.float64)
    out = cispo(logprobs, torch.zeros(3, dtype=torch.float64), a, torch.tensor([3]), clip_low=1.0, clip_high=4.0)
    out.terms.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-5.0, 2.0, -0.2], abs=1e-12)
    assert out.clipped.tolist() == [True, False, False]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_ratio_that_overflows_stays_finite(policy: str) -> None:
    logprobs = torch.tensor([0.0, 0.0], requires_grad=True)
    vectors = {"advantages": torch.tensor([0.0, -1.0]), "old_logprobs": torch.tensor([-200.0, -200.0])}
    weights = token_weights("token_mean", 1)
    loss = partial(rl_loss, policy=policy_objective(policy, 0.2, 0.2, None), weights=weights)  # type: ignore[arg-type]
    out = loss(TokenOutputs(logprobs), micro_batch([1, 1], **vectors), Denominators(2, 2, 1))
    out.loss.backward()
    assert torch.isfinite(out.loss)
    assert logprobs.grad is not None
    assert torch.isfinite(logprobs.grad).all()


# Composition.


@pytest.mark.parametrize("policy", POLICIES)
def test_step_zero_has_ratio_one_and_no_kl(policy: str) -> None:  # (13)
    vectors = random_vectors(8)
    logprobs = vectors["logprobs"].requires_grad_()
    same = logprobs.detach().clone()
    loss = partial(rl_loss, policy=policy_objective(policy, 0.2, 0.2, None), weights=token_weights("token_mean", 1), kl_coef=0.1)  # type: ignore[arg-type]
    gradients = []
    for old in (None, same):
        micro = micro_batch([5, 3], advantages=torch.ones(8), old_logprobs=old, engine_logprobs=same, ref_logprobs=same)
        out = loss(TokenOutputs(logprobs), micro, Denominators(8, 2, 1))
        assert (out.stats["ratio"] == 1.0).all()
        assert out.stats["kl_old"].abs().max() == out.stats["kl_ref"].abs().max() == out.stats["logprob_gap"].abs().max() == 0.0
        assert not out.stats["clipped"].any()
        gradients.append(torch.autograd.grad(out.loss, logprobs)[0])
    assert torch.equal(gradients[0], gradients[1])
    assert gradients[0].tolist() == pytest.approx([-1 / 8] * 8, abs=1e-7)  # the policy gradient, whatever the objective


def test_entropy_bonus_and_kl_are_added_per_token() -> None:
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    entropy = torch.tensor([0.5, 0.7], requires_grad=True)
    loss = partial(rl_loss, policy=reinforce, weights=token_weights("token_mean", 1), kl_coef=0.3, kl_estimator="k2", entropy_coef=0.1)
    vectors = {"advantages": torch.tensor([1.0, -1.0]), "ref_logprobs": torch.tensor([-1.5, -1.0])}
    out = loss(TokenOutputs(logprobs, entropy=entropy), micro_batch([2], **vectors), Denominators(4, 2, 1))
    assert out.loss.item() == pytest.approx((1.0 - 2.0 + 0.3 * (0.125 + 0.5) - 0.1 * 1.2) / 4, abs=1e-7)
    out.loss.backward()
    assert entropy.grad is not None
    assert entropy.grad.tolist() == pytest.approx([-0.025] * 2, abs=1e-8)
    assert out.stats["loss_abs"].sum().item() == pytest.approx((abs(1.0 + 0.0375 - 0.05) + abs(-2.0 + 0.15 - 0.07)) / 4, abs=1e-7)
    assert out.stats["entropy"].tolist() == pytest.approx([0.5, 0.7])


def test_truncated_importance_sampling_weighs_the_policy_term_only() -> None:
    logprobs = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    old = torch.tensor([-1.0, -1.0, -1.0])
    vectors = {"advantages": torch.ones(3), "old_logprobs": old, "engine_logprobs": old - torch.tensor([math.log(4.0), 0.0, math.log(0.5)])}
    loss = partial(rl_loss, policy=reinforce, weights=token_weights("sequence_mean_token_sum", 1), importance_cap=2.0)
    out = loss(TokenOutputs(logprobs), micro_batch([3], **vectors), Denominators(3, 1, 1))
    out.loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-2.0, -1.0, -0.5], abs=1e-6)
    assert out.stats["logprob_gap"].max().item() == pytest.approx(math.log(4.0), abs=1e-6)
    assert out.stats["logprob_gap_high"].mean().item() == pytest.approx(2 / 3)
    assert math.log(2.0) > LOGPROB_GAP_BOUND


def test_old_from_engine_takes_the_ratio_against_the_sampler() -> None:
    loss = partial(rl_loss, policy=policy_objective("ppo", 0.2, 0.2, None), weights=token_weights("token_mean", 1), old_from_engine=True)
    vectors = {"advantages": torch.ones(2), "engine_logprobs": torch.tensor([-1.0, -1.0])}
    out = loss(TokenOutputs(torch.tensor([-0.9, -1.0])), micro_batch([2], **vectors), Denominators(2, 1, 1))
    assert out.stats["ratio"].tolist() == pytest.approx([math.exp(0.1), 1.0], abs=1e-6)
    assert out.stats["logprob_gap"].tolist() == pytest.approx([0.1, 0.0], abs=1e-6)


@pytest.mark.parametrize(
    ("missing", "options"),
    [
        ("advantages", {}),
        ("ref_logprobs", {"kl_coef": 0.1}),
        ("engine_logprobs", {"importance_cap": 2.0}),
        ("engine_logprobs", {"old_from_engine": True}),
        ("entropy", {"entropy_coef": 0.1}),
    ],
)
def test_a_missing_input_is_named(missing: str, options: dict[str, float]) -> None:
    vectors = {"advantages": torch.ones(1)} if missing != "advantages" else {}
    loss = partial(rl_loss, policy=reinforce, weights=token_weights("token_mean", 1), **options)
    with pytest.raises(RunError, match=missing):
        loss(TokenOutputs(torch.zeros(1)), micro_batch([1], **vectors), Denominators(1, 1, 1))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("mode", MODES)
def test_losses_travel_to_ranks(policy: str, mode: Aggregate) -> None:
    vectors = random_vectors(5)
    outputs = TokenOutputs(vectors.pop("logprobs"), entropy=torch.ones(5))
    micro, totals = micro_batch([3, 2], **vectors), Denominators(5, 2, 1)
    loss = full_loss(policy, mode)
    assert pickle.loads(pickle.dumps(loss))(outputs, micro, totals).loss.item() == loss(outputs, micro, totals).loss.item()
