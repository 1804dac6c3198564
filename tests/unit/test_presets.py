"""Each preset's gradient against its paper's objective, written down again in numpy and differentiated numerically; and `resolve`."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from drumroll.algorithms import kl
from drumroll.algorithms.advantage import compute
from drumroll.algorithms.presets import PRESETS, Algorithm, resolve
from drumroll.config import AlgorithmConfig
from drumroll.errors import UserError
from drumroll.types import Denominators, MicroBatch, TokenOutputs

# Two prompts with three responses each, ragged; a token is a draw from a table row of four logits.
LENGTHS = [[3, 1, 4], [2, 5, 2]]
REWARDS = [[1.0, 0.0, 0.25], [0.5, -1.0, 2.0]]
MAX_TOKENS = 6
N, V, S = 17, 4, 6


@dataclass
class Batch:
    """Log-probs of the sampled tokens, one array a response, in group order."""

    new: list[np.ndarray]
    old: list[np.ndarray]
    ref: list[np.ndarray]
    frozen: list[np.ndarray]  # the current policy's, held fixed: for stop-gradients

    def ratios(self) -> list[np.ndarray]:
        return [np.exp(a - b) for a, b in zip(self.new, self.old, strict=True)]


Objective = Callable[[Batch], float]
FLAT = np.array(REWARDS).reshape(-1)
GROUP_MEAN = np.repeat(np.mean(REWARDS, axis=1), 3)
GROUP_STD = np.repeat(np.std(REWARDS, axis=1, ddof=1), 3)
EPS = 1e-6
A_GROUP = (FLAT - GROUP_MEAN) / (GROUP_STD + EPS)
A_BATCH = (FLAT - FLAT.mean()) / (FLAT.std() + EPS)


def clipped(r: np.ndarray, a: float, low: float, high: float) -> np.ndarray:
    return np.minimum(r * a, np.clip(r, 1 - low, 1 + high) * a)


def grpo(b: Batch) -> float:
    """1/G sum_i 1/|o_i| sum_t [min(r A, clip(r) A) - 0.04 (ref/pi - log(ref/pi) - 1)], averaged over prompts."""
    terms = []
    for i in range(S):
        r = np.exp(b.new[i] - b.old[i])
        k = np.exp(b.ref[i] - b.new[i]) - (b.ref[i] - b.new[i]) - 1
        terms.append(np.mean(clipped(r, A_GROUP[i], 0.2, 0.2) - 0.04 * k))
    return float(np.mean(terms))


def dr_grpo(b: Batch) -> float:
    advantage = FLAT - GROUP_MEAN
    return float(np.mean([clipped(r, a, 0.2, 0.2).sum() / MAX_TOKENS for r, a in zip(b.ratios(), advantage, strict=True)]))


def dapo(b: Batch) -> float:
    return float(sum(clipped(r, a, 0.2, 0.28).sum() for r, a in zip(b.ratios(), A_GROUP, strict=True)) / N)


def rloo(b: Batch) -> float:
    rewards = FLAT - 0.1 * np.array([(o - f).sum() for o, f in zip(b.old, b.ref, strict=True)])
    total = 0.0
    for i in range(S):
        others = [j for j in range(S) if j // 3 == i // 3 and j != i]
        total += (rewards[i] - rewards[others].mean()) * b.new[i].sum()
    return float(total / S)


def reinforce(b: Batch) -> float:
    return float(np.mean([r * logp.sum() for r, logp in zip(FLAT, b.new, strict=True)]))


def reinforce_pp(b: Batch) -> float:
    return float(sum(clipped(r, a, 0.2, 0.2).sum() for r, a in zip(b.ratios(), A_BATCH, strict=True)) / N)


def reinforce_pp_baseline(b: Batch) -> float:
    centred = FLAT - GROUP_MEAN
    advantage = centred / (np.sqrt(np.mean(centred**2)) + EPS)
    k2 = sum(((n - f) ** 2 / 2).sum() for n, f in zip(b.new, b.ref, strict=True))
    return float((sum(clipped(r, a, 0.2, 0.2).sum() for r, a in zip(b.ratios(), advantage, strict=True)) - 0.1 * k2) / N)


def gspo(b: Batch) -> float:
    """1/G sum_i min(s_i A_i, clip(s_i) A_i), s_i = (pi(y)/pi_old(y))^(1/|y|)."""
    s = np.array([np.prod(r) ** (1 / len(r)) for r in b.ratios()])
    return float(np.mean(np.minimum(s * A_GROUP, np.clip(s, 1 - 3e-4, 1 + 4e-4) * A_GROUP)))


def cispo(b: Batch) -> float:
    """1/sum|o_i| sum_t sg(min(r, 5)) A log pi."""
    weights = [np.minimum(np.exp(f - o), 5.0) for f, o in zip(b.frozen, b.old, strict=True)]
    return float(sum((w * a * logp).sum() for w, a, logp in zip(weights, A_GROUP, b.new, strict=True)) / N)


def ppo(b: Batch) -> float:
    """1/N sum_t min(r A, clip(r) A), A the critic's: here the batch's, as its values are another test's matter."""
    return float(sum(clipped(r, a, 0.2, 0.2).sum() for r, a in zip(b.ratios(), A_BATCH, strict=True)) / N)


# name -> (paper's objective, spread of the old log-probs, overrides)
PAPERS: dict[str, tuple[Objective, float, dict[str, object]]] = {
    "grpo": (grpo, 0.3, {}),
    "dr_grpo": (dr_grpo, 0.3, {}),
    "dapo": (dapo, 0.3, {"overlong": "keep"}),
    "rloo": (rloo, 0.0, {"kl": {"coef": 0.1}}),
    "reinforce": (reinforce, 0.0, {}),
    "reinforce_pp": (reinforce_pp, 0.3, {}),
    "reinforce_pp_baseline": (reinforce_pp_baseline, 0.3, {"kl": {"coef": 0.1}}),
    "gspo": (gspo, 1e-3, {}),
    "cispo": (cispo, 1.5, {}),
    "ppo": (ppo, 1.0, {}),
}


def ragged(values: np.ndarray) -> list[np.ndarray]:
    return np.split(values, np.cumsum(np.array(LENGTHS).reshape(-1))[:-1])


def log_softmax(logits: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    return (logits - np.log(np.exp(logits).sum(-1, keepdims=True)))[np.arange(N), tokens]


def library_gradient(
    algorithm: Algorithm, logits: np.ndarray, tokens: np.ndarray, old: np.ndarray, ref: np.ndarray
) -> tuple[np.ndarray, dict[str, torch.Tensor]]:
    rewards: list[list[float | None]] = [list(group) for group in REWARDS]
    if algorithm.kl_in_reward:
        per_token = kl.estimate(algorithm.kl.estimator, torch.from_numpy(old), torch.from_numpy(ref))
        sums = [float(part.sum()) for part in ragged(per_token.numpy())]
        rewards = kl.penalise(rewards, [sums[:3], sums[3:]], algorithm.kl.coef)
    per_sample = np.concatenate(compute("batch" if algorithm.advantage == "gae" else algorithm.advantage, rewards))
    lengths = [n for group in LENGTHS for n in group]
    micro = MicroBatch(
        token_ids=torch.zeros(N, dtype=torch.int64),
        lengths=lengths,
        target_positions=torch.arange(N),
        target_lengths=torch.tensor(lengths),
        advantages=torch.from_numpy(np.repeat(per_sample, lengths)),
        old_logprobs=torch.from_numpy(old),
        ref_logprobs=torch.from_numpy(ref),
    )
    table = torch.from_numpy(logits.copy()).requires_grad_()
    logprobs = torch.log_softmax(table, -1).gather(1, torch.from_numpy(tokens)[:, None])[:, 0]
    out = algorithm.loss()(TokenOutputs(logprobs), micro, Denominators(N, S, 2))
    out.loss.backward()
    assert table.grad is not None
    return table.grad.numpy(), out.stats


@pytest.mark.parametrize("name", list(PRESETS))
def test_gradient_is_the_papers(name: str) -> None:
    objective, spread, overrides = PAPERS[name]
    algorithm = resolve(AlgorithmConfig.model_validate({"name": name, **overrides}), MAX_TOKENS)
    rng = np.random.default_rng(3)
    logits, tokens = rng.normal(size=(N, V)), rng.integers(V, size=N)
    frozen = log_softmax(logits, tokens)
    old = frozen + spread * rng.normal(size=N)
    ref = frozen + 0.2 * rng.normal(size=N)

    def paper(at: np.ndarray) -> float:
        return objective(Batch(ragged(log_softmax(at, tokens)), ragged(old), ragged(ref), ragged(frozen)))

    h = 1e-6
    expected = np.zeros((N, V))
    for cell in np.ndindex(N, V):
        step = np.zeros((N, V))
        step[cell] = h
        expected[cell] = -(paper(logits + step) - paper(logits - step)) / (2 * h)
    got, stats = library_gradient(algorithm, logits, tokens, old, ref)
    assert np.abs(expected).max() > 1e-3
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-8)
    if spread:  # the clip was put to the test: some tokens are cut, some are not
        assert 0 < stats["clipped"].mean() < 1


def test_presets_declare_their_needs() -> None:
    assert [name for name, a in PRESETS.items() if a.needs_critic] == ["ppo"]
    needs = {name: (a.needs_group, a.needs_reference, a.needs_old_logprobs) for name, a in PRESETS.items()}
    assert needs == {
        "grpo": (True, True, False),
        "dr_grpo": (True, False, False),
        "dapo": (True, False, True),
        "rloo": (True, False, False),
        "reinforce": (False, False, False),
        "reinforce_pp": (False, False, False),
        "reinforce_pp_baseline": (True, False, False),
        "gspo": (True, False, True),
        "cispo": (True, False, False),
        "ppo": (False, False, True),
    }


def test_every_preset_resolves_alone_and_travels() -> None:
    for name in PRESETS:
        algorithm = resolve(AlgorithmConfig(name=name), 100)
        assert (algorithm.constant_length, algorithm.overlong_buffer) == (100, 20)
        assert pickle.loads(pickle.dumps(algorithm)) == algorithm


def test_overrides_win_and_a_partial_kl_keeps_the_presets_rest() -> None:
    config = AlgorithmConfig.model_validate({"name": "reinforce_pp", "kl": {"coef": 0.01}, "clip_high": 0.3, "minibatches": 2})
    algorithm = resolve(config, 100)
    assert (algorithm.kl.coef, algorithm.kl.estimator, algorithm.kl.where) == (0.01, "k1", "reward")
    assert (algorithm.clip_low, algorithm.clip_high, algorithm.minibatches) == (0.2, 0.3, 2)
    assert algorithm.kl_in_reward
    assert algorithm.needs_old_logprobs
    assert not resolve(AlgorithmConfig.model_validate({"name": "grpo", "kl": {"coef": 0}}), 100).needs_reference


def test_a_critics_settings_and_when_the_policy_trains() -> None:
    tree = {"name": "grpo", "advantage": "gae", "lam": 1, "critic": {"lr": 3e-4, "warmup_steps": 2, "value_clip": 0}}
    algorithm = resolve(AlgorithmConfig.model_validate(tree), 10)
    assert (algorithm.gamma, algorithm.lam, algorithm.critic.lr, algorithm.critic.path) == (1.0, 1.0, 3e-4, None)
    assert [algorithm.trains_policy(step) for step in (1, 2, 3)] == [False, False, True]
    assert [resolve(AlgorithmConfig(name="grpo"), 10).trains_policy(step) for step in (1, 2)] == [True, True]
    loss = pickle.loads(pickle.dumps(algorithm.critic.loss()))
    assert loss.keywords == {"clip": None}
    assert resolve(AlgorithmConfig(name="ppo"), 10).critic.loss().keywords == {"clip": 0.2}  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("old", "minibatches", "epochs", "expected"),
    [("auto", 1, 1, False), ("auto", 2, 1, True), ("auto", 1, 2, True), ("engine", 4, 2, False), ("recompute", 1, 1, True)],
)
def test_when_the_trainer_scores_old_log_probs(old: str, minibatches: int, epochs: int, expected: bool) -> None:
    config = {"name": "grpo", "old_logprobs": old, "minibatches": minibatches, "epochs": epochs}
    assert resolve(AlgorithmConfig.model_validate(config), 10).needs_old_logprobs is expected


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"name": "grop"}, "did you mean 'grpo'"),
        ({"name": "rloo", "group_size": 1}, "group_size: advantage: leave_one_out .* at least 2, got 1"),
        ({"name": "ppo", "dynamic_sampling": True}, "dynamic_sampling: true needs group_size"),
        ({"name": "rloo", "clip_low": 0.1}, "clip_low: 0.1 is not read"),
        ({"name": "gspo", "dual_clip": 3}, "dual_clip: 3.0 is not read"),
        ({"name": "grpo", "critic": {"lr": 1e-4}}, "critic: lr not read: advantage: group has no critic; choose preset ppo"),
        ({"name": "rloo", "lam": 0.9}, "lam: 0.9 is not read: only advantage: gae reads it"),
        ({"name": "rloo", "gamma": 0.9}, "gamma: 0.9 is not read"),
        ({"name": "grpo", "constant_length": 5}, "constant_length: 5 is not read"),
        ({"name": "grpo", "max_draws": 2}, "max_draws: 2 is not read"),
        ({"name": "grpo", "overlong_buffer": 2}, "overlong_buffer: 2 is not read"),
        ({"name": "dapo", "kl": {"estimator": "k2"}}, "set algorithm.kl.coef"),
        ({"name": "grpo", "kl": {"estimator": "k1"}}, "k1 as a loss has an expected gradient of 0"),
        ({"name": "dapo", "overlong_buffer": 11}, "expected at most rollout.max_tokens = 10, got 11"),
        ({"name": "grpo", "importance_cap": 2, "old_logprobs": "engine"}, "leaves nothing to correct"),
    ],
)
def test_what_cannot_work_or_is_not_read_is_refused(tree: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        resolve(AlgorithmConfig.model_validate(tree), 10)


def test_all_faults_are_named_at_once() -> None:
    with pytest.raises(UserError) as caught:
        resolve(AlgorithmConfig.model_validate({"name": "rloo", "clip_low": 0.1, "group_size": 1}), 10)
    assert [line.split(":")[0] for line in str(caught.value).splitlines()] == ["algorithm.clip_low", "algorithm.group_size"]
