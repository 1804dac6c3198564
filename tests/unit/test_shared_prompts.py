"""A prompt that several samples have is computed once, and nothing else changes: [Note: shared prompts] in drumroll/models/prompts.py."""

from collections.abc import Callable
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo as dynamo
from torch import nn
from transformers import AutoModelForCausalLM as Auto
from transformers import (
    DiffLlamaConfig,
    DogeConfig,
    GPT2Config,
    LlamaConfig,
    NemotronConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
)

from drumroll.errors import RunError
from drumroll.models import prompts
from drumroll.models.layout import lay_out
from drumroll.models.scorer import Scorer, find_blocks
from drumroll.packing import collate
from drumroll.types import TrainSample
from tests import scorer_models as models

SHARING = ["gpt2", "qwen3-yarn", "phi3-long", "qwen3-moe"]  # positions learned, rotary, rotary by length; experts


def sample(prompt: list[int], response: list[int]) -> TrainSample:
    ids = np.array(prompt + response)
    return TrainSample(ids, np.arange(len(ids)) >= len(prompt))


def groups() -> list[TrainSample]:
    """Two groups that lie between each other, prompts of 9 and 4 tokens, a sample with a prompt of its own, one that ends in its prompt."""
    rng = np.random.default_rng(3)
    first, second = rng.integers(3, 32, 9).tolist(), rng.integers(3, 32, 4).tolist()
    responses = [rng.integers(3, 32, length).tolist() for length in (3, 8, 1, 5, 6, 2)]
    batch = [sample(prompt, response) for prompt, response in zip([first, second] * 3, responses, strict=True)]
    without_targets = sample(first, [])
    return [*batch, sample(second[:3], [7, 8]), without_targets]


def test_by_hand() -> None:
    micro = collate([sample([5, 6, 7], [8, 9]), sample([4], [5]), sample([5, 6, 7], [3, 2, 1])])
    assert micro.prompts == [(3, 0), (1, 1), (3, 0)]
    laid = lay_out(micro, "rows", share_prompts=True)
    assert laid.shared is not None
    assert laid.input_ids_BL.tolist() == [[5, 6, 7, 8, 4, 3, 2]]
    assert laid.position_ids_BL.tolist() == [[0, 1, 2, 3, 0, 3, 4]]
    assert laid.shared.token_BL.tolist() == [[0, 1, 2, 3, 3], [4, 4, 4, 4, 4], [0, 1, 2, 5, 6]]
    assert laid.shared.place_U.tolist() == [0, 1, 2, 3, 5, 13, 14]
    assert laid.shared.token_Q.tolist() == [0, 0, 0, 1, 2]
    assert laid.shared.copy_CQ.tolist() == [[0, 0, 10, 11, 12]]
    assert laid.shared.real_CQ.tolist() == [[False, False, True, True, True]]
    plain = lay_out(micro, "rows")
    assert torch.equal(laid.index_N, plain.index_N) and torch.equal(laid.targets_N, plain.targets_N)


def test_only_where_it_pays() -> None:
    alike = [sample([5], [3, 4, 5, 6, 7, 8, 9, 3, 4, 5])] * 2
    assert lay_out(collate(alike), "rows", share_prompts=True).shared is None
    assert lay_out(collate([sample([5, 6], [7])] * 2), "packed", share_prompts=True).shared is None
    assert lay_out(collate([]), "rows", share_prompts=True).fill_in


def test_gradients_of_copies_are_added_up() -> None:
    shared = lay_out(collate(groups()), "rows", share_prompts=True).shared
    assert shared is not None
    tokens = torch.randn(len(shared.place_U), 3, dtype=torch.float64, requires_grad=True)
    columns = torch.arange(shared.token_BL.shape[1])
    real_BL = torch.stack([columns < len(s.token_ids) - 1 for s in groups()])
    weights = torch.randn(*shared.token_BL.shape, 3, dtype=torch.float64) * real_BL[..., None]
    (prompts.spread(tokens, shared) * weights).sum().backward()
    expected = torch.zeros_like(tokens).index_add_(0, shared.token_BL.flatten(), weights.flatten(0, 1))
    assert tokens.grad is not None
    torch.testing.assert_close(tokens.grad, expected, rtol=1e-14, atol=1e-14)


def both(folder: Path, **spec: Any) -> tuple[Scorer, Scorer]:
    return models.scorer(folder, share_prompts=False, **spec), models.scorer(folder, share_prompts=True, **spec)


def outcome(scorer: Scorer, batch: list[TrainSample]) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    logprobs, entropy, _ = scorer(collate(batch), True)
    assert entropy is not None
    (logprobs * torch.linspace(-1, 1, len(logprobs)) + 0.1 * entropy).sum().backward()
    return logprobs.detach(), entropy.detach(), {name: p.grad for name, p in scorer.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("family", "spec"),
    [
        *((family, {}) for family in SHARING),
        *(("llama", {"checkpointing": kind}) for kind in ("none", "full", "selective")),
        ("llama", {"tile_mlp": 8}),
        ("llama", {"trainable": ("mlp",)}),
    ],
)
def test_numbers_are_those_of_whole_samples(family: str, spec: dict[str, Any], tmp_path: Path) -> None:
    assert_alike(*both(models.make(family, tmp_path), **spec))


def assert_alike(plain: Scorer, sharing: Scorer) -> None:
    expected, found = outcome(plain, groups()), outcome(sharing, groups())
    for one, other in zip(expected[:2], found[:2], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
    assert expected[2].keys() == found[2].keys()
    largest = max(float(gradient.abs().max()) for gradient in expected[2].values())
    for name, gradient in expected[2].items():
        assert float((gradient - found[2][name]).abs().max()) <= 1e-5 * max(float(gradient.abs().max()), 0.01 * largest), name


def test_fewer_tokens_are_computed(tmp_path: Path) -> None:
    """65 tokens of eight samples, padding left out: 9 + 4 + 3 of prompts, and of responses all but the last tokens."""
    seen: list[int] = []
    scorer = models.scorer(models.make("llama", tmp_path), share_prompts=True)
    attrgetter("layers.0.mlp")(scorer.body).register_forward_hook(lambda module, args, output: seen.append(output.shape[:-1].numel()))
    scorer(collate(groups()))
    own_prompts, responses, ends_in_its_prompt = 9 + 4 + 3, 25 - 6 + 1, 8
    assert seen == [own_prompts + responses + ends_in_its_prompt]


def test_blocks_are_compiled_once_and_whole_whatever_is_shared(tmp_path: Path) -> None:
    """One prompt, two, three, in either block: the same graph, attention in it. Past a few versions torch would not compile at all."""
    scorer = models.scorer(models.make("llama", tmp_path), share_prompts=True)
    for block in scorer.blocks:
        block.forward = torch.compile(block.forward, backend="eager", dynamic=True, fullgraph=True)  # type: ignore[method-assign]
    dynamo.reset()
    graphs = []
    for count in (1, 2, 3):
        before = dynamo.utils.counters["stats"]["unique_graphs"]
        batch = [sample([prompt, *range(3, 12)], [answer, answer + 1]) for prompt in range(3, 3 + count) for answer in range(5, 9)]
        outcome(scorer, batch)
        graphs.append(dynamo.utils.counters["stats"]["unique_graphs"] - before)
    assert graphs == [1, 0, 0]


def test_another_sample_changes_nothing(tmp_path: Path) -> None:
    """Not one bit of another sample, though they share a prompt (failure case 27)."""
    scorer = models.scorer(models.make("llama", tmp_path), share_prompts=True)
    batch = groups()
    before = scorer(collate(batch))[0].split([s.n_targets for s in batch])
    batch[2] = sample(batch[2].token_ids[:9].tolist(), [batch[2].token_ids[-1] % 29 + 1])
    after = scorer(collate(batch))[0].split([s.n_targets for s in batch])
    assert [torch.equal(one, other) for one, other in zip(before, after, strict=True)] == [index != 2 for index in range(len(batch))]


def test_a_step_repeats_bit_by_bit(tmp_path: Path) -> None:
    folder = models.make("llama", tmp_path)
    once, again = (outcome(models.scorer(folder, share_prompts=True), groups())[2] for _ in range(2))
    assert all(torch.equal(once[name], again[name]) for name in once)


@pytest.mark.parametrize(
    ("attention", "changed", "supported"), [("sdpa", {}, True), ("eager", {}, False), ("sdpa", {"sliding_window": 4}, False)]
)
def test_where_it_is_without_effect(attention: str, changed: dict[str, Any], supported: bool, tmp_path: Path) -> None:
    scorer = models.scorer(models.make("llama", tmp_path), attention=attention)
    scorer.hf.config.update(changed)
    assert prompts.supports(scorer.hf, attention) is supported


@torch.no_grad()
def test_packed_rows_keep_their_masks(tmp_path: Path) -> None:
    """It is asked for by default, and has no effect on them: samples do not see one another (failure case 27)."""
    plain, asked = both(models.make("llama", tmp_path), layout="packed")
    assert torch.equal(plain(collate(groups()))[0], asked(collate(groups()))[0])


@torch.no_grad()
def test_a_model_that_builds_on_the_mask_keeps_it(tmp_path: Path) -> None:
    """Doge adds to the body's mask in its attention, so it must be there, samples shared or not."""
    model = Auto.from_config(DogeConfig(**models._SHAPE), dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if name.endswith(".A"):
            parameter.data.normal_()  # 0 at first: then it adds nothing
    model.save_pretrained(tmp_path)
    plain, asked = both(tmp_path)
    assert torch.equal(plain(collate(groups()))[0], asked(collate(groups()))[0])


def bare() -> PreTrainedModel:
    """A llama of two blocks without weights."""
    with torch.device("meta"):
        model: PreTrainedModel = Auto.from_config(LlamaConfig(**models._SHAPE), dtype=torch.float32)
    return model


def wrap(hf: PreTrainedModel, attend: Callable[..., Any]) -> str:
    """Let the attention of the second block be called through `attend(plain, ...)`; what a trial says of it."""
    attention = attrgetter("layers.1.self_attn")(hf.base_model)
    attention.forward = partial(attend, attention.forward)
    return prompts.install(hf, find_blocks(hf))


MASK, OTHER = torch.ones(1, dtype=torch.bool, device="meta"), torch.empty(1, 3, 32, device="meta")
UNSUITED: dict[str, Callable[..., Any]] = {
    "does not pass its arguments on to its attention": lambda plain, *args, shared, **others: plain(*args, **others),
    "makes a mask of its own": lambda plain, *args, attention_mask, **others: plain(*args, attention_mask=MASK, **others),
    "attends over other tokens than its block's": lambda plain, hidden_states, position_embeddings, **others: plain(
        OTHER, tuple(part[:, :3] for part in position_embeddings), **others
    ),
    "expected every block, and nothing else, to call its attention": lambda plain, hidden_states, **others: (hidden_states, None),
    "cannot be tried without values": lambda plain, hidden_states, **others: plain(hidden_states * hidden_states.sum().item(), **others),
}


@pytest.mark.parametrize(
    "config",
    [
        GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=64, vocab_size=48, pad_token_id=0),  # its body looks for padding
        Qwen2MoeConfig(**models._SHAPE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16),
    ],
    ids=["gpt2 with padding", "a window of 0 is none"],
)
def test_what_can_be_shared_is_shared(config: PreTrainedConfig) -> None:
    with torch.device("meta"):
        hf = Auto.from_config(config, dtype=torch.float32)
    assert prompts.supports(hf, "sdpa")
    assert prompts.install(hf, find_blocks(hf)) == ""


@pytest.mark.parametrize("reason", UNSUITED)
def test_what_cannot_be_shared_is_found_before_there_are_weights(reason: str) -> None:
    """And keeps the attention that it had."""
    hf = bare()
    assert reason in wrap(hf, UNSUITED[reason])
    assert hf.config._attn_implementation == "sdpa"


def test_what_falls_back_computes_every_prompt_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nemotron's blocks keep the arguments to themselves."""
    model = Auto.from_config(NemotronConfig(**models._SHAPE, head_dim=8), dtype=torch.float32)
    model.save_pretrained(tmp_path)
    plain, asked = both(tmp_path)
    assert "model.share_prompts is without effect on NemotronForCausalLM: NemotronAttention does not pass its arguments on" in caplog.text
    assert torch.equal(plain(collate(groups()))[0], asked(collate(groups()))[0])


def test_two_attentions_a_block_share_as_one_does(tmp_path: Path) -> None:
    """DiffLlama's blocks call theirs twice (its first block, which has a share of its own, too)."""
    torch.manual_seed(0)
    model = Auto.from_config(DiffLlamaConfig(**models._SHAPE), dtype=torch.float32)
    model.save_pretrained(tmp_path)
    assert_alike(*both(tmp_path))


def test_a_convolution_looks_at_other_tokens_too() -> None:
    hf = bare()
    assert prompts.supports(hf, "sdpa")
    attrgetter("layers.0")(hf.base_model).conv = nn.Conv1d(32, 32, 3)
    assert not prompts.supports(hf, "sdpa")


def test_a_mask_that_comes_late_is_not_passed_over(tmp_path: Path) -> None:
    scorer = models.scorer(models.make("llama", tmp_path), share_prompts=True)
    attention = attrgetter("layers.1.self_attn")(scorer.body)
    plain = attention.forward
    attention.forward = lambda *args, attention_mask, **kwargs: plain(*args, attention_mask=torch.ones(1, dtype=torch.bool), **kwargs)
    with pytest.raises(RunError, match=r"LlamaAttention makes a mask of its own: set model\.share_prompts=false"):
        scorer(collate(groups()))
