"""Value heads and what a critic learns, against transformers alone and against numbers worked out by hand."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoModelForSequenceClassification

from drumroll.algorithms.presets import Algorithm, resolve
from drumroll.algorithms.value import value_loss
from drumroll.backends.base import LoraSpec, ModelSpec
from drumroll.config import AlgorithmConfig
from drumroll.errors import RunError, UserError
from drumroll.models import value
from drumroll.models.build import build
from drumroll.observe.critic import explained_variance
from drumroll.packing import collate
from drumroll.rollout.samples import from_groups, token_rewards, with_advantages
from drumroll.types import Denominators, Group, MicroBatch, Prompt, Rollout, TokenOutputs, TrainSample
from tests.scorer_models import CONFIGS, make, samples, scorer


def states(folder: Path, weight: torch.Tensor, batch: list[TrainSample]) -> torch.Tensor:
    """Values by transformers' own body, one sample at a time: of the hidden state before each target."""
    body = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    parts = []
    for sample in batch:
        hidden_TH = body(input_ids=torch.from_numpy(sample.token_ids)[None], use_cache=False).last_hidden_state[0]
        parts.append((hidden_TH[:-1] @ weight[0])[torch.from_numpy(sample.target_mask[1:])])
    return torch.cat(parts)


@pytest.mark.parametrize("name", ["llama", "qwen3-tied", "gpt2", "qwen3-moe"])
@torch.no_grad()
def test_values_are_those_of_the_states_before_the_targets(name: str, tmp_path: Path) -> None:
    folder, batch = make(name, tmp_path), samples()
    built = scorer(folder, head="value")
    head = built.head.weight
    assert torch.equal(head, value.initial(head.shape))
    assert 0.5 / 32 < float(head.std()) < 2 / 32
    for layout in ("rows", "packed"):
        found, entropy, _ = scorer(folder, head="value", layout=layout)(collate(batch), entropy=True)
        assert entropy is None
        assert found.dtype is torch.float32
        torch.testing.assert_close(found, states(folder, head, batch), rtol=0, atol=1e-6)
    names = {built.hf_name(name) for name, _ in built.named_parameters()}
    plain = {name for name, _ in scorer(folder).hf.named_parameters()}
    assert names == plain - {"lm_head.weight"} | {value.WEIGHT}
    assert not built.tied


@torch.no_grad()
def test_a_reward_model_brings_its_head(tmp_path: Path) -> None:
    torch.manual_seed(1)
    config = CONFIGS["llama"].__class__.from_dict({**CONFIGS["llama"].to_dict(), "num_labels": 1})
    model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    batch = samples()
    found, _, _ = scorer(tmp_path, head="value")(collate(batch))
    torch.testing.assert_close(found, states(tmp_path, model.score.weight, batch), rtol=0, atol=1e-6)
    assert not torch.allclose(model.score.weight, value.initial(model.score.weight.shape))


def test_the_head_trains_whatever_trainable_says_and_has_no_adapters(tmp_path: Path) -> None:
    folder = str(make("llama", tmp_path))
    built = build(ModelSpec(folder, head="value", trainable=("norm",)))
    trained = {built.hf_name(name) for name, parameter in built.named_parameters() if parameter.requires_grad}
    assert value.WEIGHT in trained
    assert trained - {value.WEIGHT} == {name for name in trained if "norm" in name} != set()
    with pytest.raises(UserError, match=r"lm_head.* matches no parameter"):
        build(ModelSpec(folder, head="value", trainable=("lm_head",)))
    with pytest.raises(UserError, match="a value head trains, and adapters let nothing"):
        build(ModelSpec(folder, head="value", lora=LoraSpec()))


def micro(values: list[float], returns: list[float], lengths: list[int]) -> MicroBatch:
    return MicroBatch(
        torch.zeros(len(values) + len(lengths), dtype=torch.int64),
        [n + 1 for n in lengths],
        torch.arange(len(values)),
        torch.tensor(lengths),
        values=torch.tensor(values),
        returns=torch.tensor(returns),
    )


def test_value_loss_by_hand() -> None:
    """Old values 0 and clip 0.2. V = 0.5, R = 1: free 0.25, clipped to 0.2 0.64, which counts, without gradient. V = -0.5, R = 1: the error
    grows by moving away, 2.25 against 1.44, so it counts with its gradient. V = 0.1, R = 0.3: within the clip, 0.04."""
    now = torch.tensor([0.5, -0.5, 0.1], requires_grad=True)
    batch = micro([0.0, 0.0, 0.0], [1.0, 1.0, 0.3], [2, 1])
    out = value_loss(TokenOutputs(values=now), batch, Denominators(10, 2, 1), clip=0.2)
    out.loss.backward()
    assert float(out.loss.detach()) == pytest.approx((0.64 + 2.25 + 0.04) / 20, rel=1e-6)
    assert now.grad is not None
    assert now.grad.tolist() == pytest.approx([0.0, -1.5 / 10, -0.2 / 10], rel=1e-6)
    assert out.stats["value_clipped"].tolist() == [1.0, 0.0, 0.0]
    assert float(out.stats["loss_abs"].sum()) == pytest.approx(float(out.loss.detach()))
    plain = value_loss(TokenOutputs(values=now), batch, Denominators(10, 2, 1), clip=None)
    assert float(plain.loss.detach()) == pytest.approx((0.25 + 2.25 + 0.04) / 20, rel=1e-6)


def test_rounding_is_no_clip() -> None:
    """old + (V - old) is V but for rounding: of values within the clip none has lost its gradient."""
    rng = np.random.default_rng(0)
    now, old, returns = (rng.normal(0, scale, 1000).clip(-0.1, 0.1).astype(np.float32).tolist() for scale in (0.05, 0.05, 1.0))
    out = value_loss(TokenOutputs(values=torch.tensor(now)), micro(old, returns, [1000]), Denominators(1000, 1, 1), clip=0.2)
    assert float(out.stats["value_clipped"].sum()) == 0


def test_value_loss_adds_up_over_any_cut() -> None:
    rng = np.random.default_rng(0)
    now, old, returns = (rng.normal(size=7).astype(np.float32).tolist() for _ in range(3))
    loss = partial(value_loss, clip=0.3)
    counts = Denominators(7, 3, 2)
    whole = loss(TokenOutputs(values=torch.tensor(now)), micro(old, returns, [3, 2, 2]), counts).loss
    parts = [loss(TokenOutputs(values=torch.tensor(now[a:b])), micro(old[a:b], returns[a:b], n), counts).loss
             for a, b, n in ((0, 3, [3]), (3, 7, [2, 2]), (7, 7, []))]  # fmt: skip
    assert float(sum(parts)) == pytest.approx(float(whole), rel=1e-6)


def test_value_loss_says_what_it_lacks() -> None:
    batch = micro([0.0], [1.0], [1])
    with pytest.raises(RunError, match=r"values \(ModelSpec.head\)"):
        value_loss(TokenOutputs(logprobs=torch.zeros(1)), batch, Denominators(1, 1, 1), clip=None)
    batch.values = None
    with pytest.raises(RunError, match="values from before the step"):
        value_loss(TokenOutputs(values=torch.zeros(1)), batch, Denominators(1, 1, 1), clip=0.2)


def actor_critic(**tree: object) -> Algorithm:
    return resolve(AlgorithmConfig.model_validate({"name": "ppo", **tree}), 10)


def group(group_id: int, tokens: int, reward: float | None, finish: str = "stop") -> Group:
    rollout = Rollout(0, [5] * tokens, [-1.0] * tokens, 0, finish, "", reward)  # type: ignore[arg-type]
    return Group(Prompt(group_id, "", "", [1, 2], {}), [rollout])


def judged(groups: list[Group], values: list[list[float]], algorithm: Algorithm) -> list[TrainSample]:
    made = from_groups(groups)
    for sample, of_sample in zip(made, values, strict=True):
        sample.values = np.array(of_sample, np.float32)
    return with_advantages(made, groups, algorithm, 10)


def test_advantages_and_returns_by_hand() -> None:
    """gamma = lambda = 1/2. One token, reward 1, value 0.5: delta 0.5. Three tokens, reward 2, values 1, 2, 4, from the end: deltas
    2 - 4 = -2, 0 + 4/2 - 2 = 0, 0 + 2/2 - 1 = 0; advantages -2, 0 - 2/4 = -0.5, 0 - 0.5/4 = -0.125. Returns: advantage + value."""
    done = judged([group(0, 1, 1.0), group(1, 3, 2.0)], [[0.5], [1.0, 2.0, 4.0]], actor_critic(gamma=0.5, lam=0.5))
    raw = np.array([0.5, -0.125, -0.5, -2.0])
    found = np.concatenate([s.advantages for s in done if s.advantages is not None])
    np.testing.assert_allclose(found, (raw - raw.mean()) / (raw.std() + 1e-6), rtol=1e-6)
    assert [s.returns.tolist() for s in done if s.returns is not None] == [[1.0], [0.875, 1.5, 2.0]]


def test_with_lambda_1_returns_are_the_rewards_to_go_whatever_the_values() -> None:
    done = judged([group(0, 3, 1.0), group(1, 2, 0.0)], [[9.0, -3.0, 0.5], [7.0, 0.0]], actor_critic(lam=1.0))
    assert [s.returns.tolist() for s in done if s.returns is not None] == [[1.0, 1.0, 1.0], [0.0, 0.0]]


def test_kl_is_taken_from_the_reward_of_its_own_token() -> None:
    sample = from_groups([group(0, 3, 1.0)])[0]
    sample.old_logprobs, sample.ref_logprobs = np.float32([-1.0, -2.0, -3.0]), np.float32([-1.5, -2.0, -2.0])
    algorithm = actor_critic(kl={"coef": 0.1})
    np.testing.assert_allclose(token_rewards(sample, 1.0, algorithm), [-0.05, 0.0, 1.1], rtol=1e-6)
    np.testing.assert_allclose(token_rewards(sample, 1.0, actor_critic()), [0.0, 0.0, 1.0])


def test_masked_overlong_responses_enter_no_whitening_and_no_verdict_no_batch() -> None:
    groups = [group(0, 1, 1.0), group(1, 1, 0.0), group(2, 10, 5.0, "length"), group(3, 1, None)]
    done = judged(groups, [[0.0], [0.0], [0.0] * 10], actor_critic(overlong="mask"))
    assert [s.group_id for s in done] == [0, 1]
    np.testing.assert_allclose([float(s.advantages[0]) for s in done if s.advantages is not None], [1.0, -1.0], rtol=1e-5)


def test_gae_without_values_is_an_error() -> None:
    groups = [group(0, 1, 1.0)]
    with pytest.raises(RunError, match="GAE needs its reward and the critic's values first"):
        with_advantages(from_groups(groups), groups, actor_critic(), 10)


def test_explained_variance() -> None:
    returns = [np.array([1.0, 3.0]), np.array([5.0])]
    assert explained_variance(returns, returns) == 1.0
    assert explained_variance([np.array([3.0, 3.0]), np.array([3.0])], returns) == 0.0
    assert explained_variance([np.array([0.0, 2.0]), np.array([4.0])], returns) == 1.0  # a constant offset is not variance
    assert explained_variance([np.array([5.0, 3.0]), np.array([1.0])], returns) == pytest.approx(-3.0)
    assert explained_variance([np.zeros(2)], [np.ones(2)]) is None
    assert explained_variance([], []) is None
