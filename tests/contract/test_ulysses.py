"""Ranks that share a micro-batch (`fsdp2`, `sequence_ranks`) against one process: outputs, losses, statistics, gradients, memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM as Auto
from transformers import GPT2Config, LlamaConfig, MistralConfig, Phi3Config, PreTrainedConfig, Qwen3Config

from drumroll.algorithms.loss import policy_objective, rl_loss, sft_loss, token_weights
from drumroll.backends.base import LoraSpec, ModelSpec, OptimSpec
from drumroll.errors import UserError
from drumroll.models.ulysses import _attention, overlaps
from drumroll.packing import collate, denominators
from drumroll.types import Denominators, LossFn, LossOutput, MicroBatch, Stat, TokenOutputs, TrainSample
from tests.contract import backend_runs as runs
from tests.contract.backend_runs import Trained, relative
from tests.ranks import run_ranks

TOLERANCE = 1e-5
VOCAB = 67
# name -> (family, heads, heads of keys and values, tied): of the latter fewer than ranks, as many, more, and no multiple of them.
MODELS = {
    "llama 4/4 tied": ("llama", 4, 4, True),
    "llama 4/1": ("llama", 4, 1, False),
    "qwen3 4/2": ("qwen3", 4, 2, False),
    "qwen3 12/3 tied": ("qwen3", 12, 3, True),
}
RANKS = [(2, 2), (4, 2), (4, 4)]  # all, and of one group


def write_model(folder: Path, family: str, heads: int, kv_heads: int, tied: bool) -> Path:
    """Two layers with random weights, five times the usual size, so that a leak or a wrong position shows."""
    torch.manual_seed(7)
    config = {"llama": LlamaConfig, "qwen3": Qwen3Config}[family](
        vocab_size=VOCAB, hidden_size=32, intermediate_size=70, num_hidden_layers=2, num_attention_heads=heads, head_dim=8,
        num_key_value_heads=kv_heads, tie_word_embeddings=tied, initializer_range=0.1,
    )  # fmt: skip
    Auto.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: write_model(root / name.replace("/", "-"), *fields) for name, fields in MODELS.items()}


def make_samples() -> list[TrainSample]:
    """Long and short, one of two tokens, one of a single token, one without a target; with all that a loss may ask for."""
    rng = np.random.default_rng(3)
    made = []
    for index, length in enumerate((33, 2, 9, 1, 27, 3, 14, 8)):
        mask = np.zeros(length, bool)
        if index != 7:
            mask[max(1, length // (2 if index % 3 else 4)) :] = True
        count = int(mask.sum())
        advantage, old, ref = np.repeat(rng.normal(), count), rng.normal(-4.2, 0.5, count), rng.normal(-4.2, 0.5, count)
        arrays = {"advantages": advantage, "old_logprobs": old, "engine_logprobs": old + 0.01, "ref_logprobs": ref}
        as_float = {name: array.astype(np.float32) for name, array in arrays.items()}
        made.append(TrainSample(rng.integers(1, VOCAB, length), mask, **as_float, group_id=index // 2, index=index))
    return made


def distillation(outputs: TokenOutputs, micro: MicroBatch, counts: Denominators) -> LossOutput:
    """Reverse KL to a teacher whose log-probs stand in `ref_logprobs`, at the tokens at hand, and no use of the entropy."""
    assert micro.ref_logprobs is not None
    per_token = outputs.logprobs.exp() * (outputs.logprobs - micro.ref_logprobs)
    return LossOutput(per_token.sum() / counts.tokens, {"logprob": outputs.logprobs.detach()})


LOSSES: dict[str, LossFn] = {
    "grpo": partial(
        rl_loss, policy=policy_objective("ppo", 0.3, 0.4, None), weights=token_weights("token_mean", 1), kl_coef=0.1, entropy_coef=0.01
    ),
    "gspo": partial(rl_loss, policy=policy_objective("gspo", 0.3, 0.4, None), weights=token_weights("sequence_mean_token_mean", 1)),
    "sft": sft_loss,
    "distillation": distillation,
}
PLANS = {
    "every rank works": runs.even_plan,
    "one rank works": runs.one_rank_plan,  # its group has work, a second group has none, and every second micro-batch of a third is empty
}


@dataclass
class Seen:
    logprobs: list[torch.Tensor]  # a micro-batch
    entropy: list[torch.Tensor]
    stats: dict[str, Stat]
    gradients: dict[str, torch.Tensor]


def every_loss(rank: int, ranks: int, name: str, options: dict[str, Any], folders: dict[str, Path]) -> dict[Any, Seen]:
    """(model, loss, plan) -> what one step gives, before the update."""
    samples, found = make_samples(), {}
    counts = denominators(samples)
    for model, folder in folders.items():
        backend = runs.start(rank, ranks, name, options, ModelSpec(str(folder), temperature=0.8), OptimSpec())
        for plan, divide in PLANS.items():
            micros = [collate(part) for part in divide(samples, rank, ranks, 2)]
            scored = [backend.logprobs(micro, entropy=True) for micro in micros]
            alone = [backend.logprobs(micro).logprobs for micro in micros]
            assert all(torch.equal(one, both.logprobs) for one, both in zip(alone, scored, strict=True))
            for loss, function in LOSSES.items():
                stats: dict[str, Stat] = {}
                for index, micro in enumerate(micros):
                    told = backend.forward_backward(micro, function, counts, last=index == len(micros) - 1)
                    stats = {key: stats.get(key, Stat()).merge(stat) for key, stat in told.items()}
                gradients = {key: gradient.clone() for key, gradient in backend.gradients()}
                backend.step(0.0)
                logprobs, entropy = zip(*((one.logprobs, one.entropy) for one in scored), strict=True)
                found[model, loss, plan] = Seen(list(logprobs), list(entropy), stats, gradients)
    return found


@pytest.fixture(scope="module")
def single(folders: dict[str, Path]) -> dict[Any, Seen]:
    found: dict[Any, Seen] = run_ranks(every_loss, 1, "single", {}, folders)[0]
    return found


def in_order(found: list[list[torch.Tensor]], plan: Any, ranks: int) -> list[torch.Tensor]:
    """Values of each sample, by its index, from those of every rank's micro-batches."""
    samples = make_samples()
    where = {id(sample): index for index, sample in enumerate(samples)}
    by_sample = [torch.empty(0)] * len(samples)
    for rank, of_rank in enumerate(found):
        for part, values in zip(plan(samples, rank, ranks, 2), of_rank, strict=True):
            for sample, own in zip(part, values.split([sample.n_targets for sample in part]), strict=True):
                by_sample[where[id(sample)]] = own
    return by_sample


@pytest.mark.parametrize(("ranks", "sequence_ranks"), RANKS)
def test_every_loss_equals_one_process(ranks: int, sequence_ranks: int, folders: dict[str, Path], single: dict[Any, Seen]) -> None:
    """Also where the samples are shorter than the ranks are many, on ranks without a sample and in groups without one."""
    found = run_ranks(every_loss, ranks, "fsdp2", {"sequence_ranks": sequence_ranks}, folders)
    for key, expected in single.items():
        of_ranks = [of_rank[key] for of_rank in found]
        for values in ("logprobs", "entropy"):
            mine = in_order([vars(one)[values] for one in of_ranks], PLANS[key[2]], ranks)
            theirs = in_order([vars(expected)[values]], PLANS[key[2]], 1)
            for own, other in zip(mine, theirs, strict=True):
                torch.testing.assert_close(own, other, rtol=0, atol=TOLERANCE)
        for one in of_ranks:
            assert max(relative(one.gradients[name], gradient) for name, gradient in expected.gradients.items()) < TOLERANCE, key
        assert min(float(gradient.norm()) for gradient in expected.gradients.values()) > 0
        merged = {name: reduce(Stat.merge, (one.stats[name] for one in of_ranks if name in one.stats)) for name in expected.stats}
        for name, stat in expected.stats.items():  # each target is counted once, not once a rank of its group
            assert name == "loss" or merged[name].count == stat.count > 0, (key, name)
            assert merged[name].sum == pytest.approx(stat.sum, rel=TOLERANCE, abs=1e-6), (key, name)
            assert name == "loss" or merged[name].max == pytest.approx(stat.max, rel=TOLERANCE, abs=1e-6), (key, name)


def test_single_equals_transformers_alone(folders: dict[str, Path], single: dict[Any, Seen]) -> None:
    for model, folder in folders.items():
        reference = Auto.from_pretrained(folder, dtype=torch.float32)
        found = in_order([single[model, "sft", "every rank works"].logprobs], runs.even_plan, 1)
        for sample, mine in zip(make_samples(), found, strict=True):
            ids = torch.from_numpy(sample.token_ids)
            log_p = (reference(input_ids=ids[None]).logits[0] / 0.8).log_softmax(-1)
            theirs = log_p[:-1].gather(1, ids[1:, None]).squeeze(1)[torch.from_numpy(sample.target_mask[1:])]
            torch.testing.assert_close(mine, theirs, rtol=0, atol=TOLERANCE)


COMPUTING = {
    "checkpointing: full": {"checkpointing": "full"},
    "checkpointing: selective": {"checkpointing": "selective"},
    "checkpointing: off-loaded": {"checkpointing": "offload"},
    "tiled MLP": {"tile_mlp": 8},
    "tiled MLP, checkpointing: full": {"tile_mlp": 8, "checkpointing": "full"},
    "one block trains": {"trainable": (r"layers\.1\.",)},
}


OTHER_MATHEMATICS = ("trainable", "lora", "compute_dtype")  # what one process does too


def three_steps(rank: int, ranks: int, name: str, options: dict[str, Any], folders: list[Path], computing: Any) -> dict[Any, Trained]:
    samples, found = make_samples(), {}
    for how, fields in computing.items():
        for folder in folders:
            spec = ModelSpec(str(folder), **{key: value for key, value in fields.items() if name == "fsdp2" or key in OTHER_MATHEMATICS})
            backend = runs.start(rank, ranks, name, options, spec, OptimSpec(weight_decay=0.01))
            found[how, folder] = runs.train(backend, runs.even_plan(samples, rank, ranks, 2), denominators(samples))
    return found


@pytest.mark.parametrize(
    ("ranks", "options", "computing"),
    [
        (2, {}, COMPUTING),
        (4, {}, {"plain": {}}),
        (4, {"replicas": 2}, {"checkpointing: full": {"checkpointing": "full"}}),
        (2, {"grad_sync": "last", "reshard_after_forward": False, "embeddings": "apart"}, {"plain": {}}),
        (2, {"offload": True}, {"plain": {}}),
    ],
    ids=["recomputed, tiled, frozen", "two groups", "two replicas", "kept apart", "off-loaded"],
)
def test_three_steps_equal_one_process(ranks: int, options: dict[str, Any], computing: Any, folders: dict[str, Path]) -> None:
    """With whatever else changes how a block computes: what is recomputed exchanges again, in the same order on all ranks."""
    chosen = [folders["llama 4/1"], folders["qwen3 12/3 tied"]]
    (expected,) = run_ranks(three_steps, 1, "single", {}, chosen, computing)
    for found in run_ranks(three_steps, ranks, "fsdp2", options | {"sequence_ranks": 2}, chosen, computing, timeout=200.0):
        for key, theirs in expected.items():
            mine = found[key]
            assert mine.gradients.keys() == theirs.gradients.keys()
            assert max(relative(mine.gradients[name], theirs.gradients[name]) for name in theirs.gradients) < TOLERANCE, key
            assert max(relative(mine.weights[name], theirs.weights[name]) for name in theirs.weights) < TOLERANCE, key
            for one, other in zip(mine.results, theirs.results, strict=True):
                assert one.grad_norm == pytest.approx(other.grad_norm, rel=TOLERANCE)


def test_adapters_and_low_precision(folders: dict[str, Path]) -> None:
    """Weights after three steps: adapters (merged) in float32, and all parameters trained in bfloat16, to what bfloat16 rounds."""
    computing = {"adapters": {"lora": LoraSpec(rank=4)}, "bfloat16": {"compute_dtype": torch.bfloat16}}
    folder = folders["llama 4/1"]
    (expected,) = run_ranks(three_steps, 1, "single", {}, [folder], computing)
    for found in run_ranks(three_steps, 2, "fsdp2", {"sequence_ranks": 2}, [folder], computing):
        for how, tolerance in (("adapters", TOLERANCE), ("bfloat16", 2e-3)):
            mine, theirs = found[how, folder], expected[how, folder]
            assert max(relative(mine.weights[name], theirs.weights[name]) for name in theirs.weights) < tolerance
            assert mine.results[0].grad_norm == pytest.approx(theirs.results[0].grad_norm, rel=10 * tolerance)


def one_gradient(rank: int, ranks: int, name: str, options: dict[str, Any], folder: Path, compiled: bool) -> dict[str, torch.Tensor]:
    samples = make_samples()
    backend = runs.start(rank, ranks, name, options, ModelSpec(str(folder), compile=compiled), OptimSpec())
    backend.forward_backward(collate(samples[rank::ranks]), sft_loss, denominators(samples), last=True)
    return dict(backend.gradients())


def test_compiled_blocks(folders: dict[str, Path]) -> None:
    """Blocks are compiled around the exchanges."""
    (expected,) = run_ranks(one_gradient, 1, "single", {}, folders["llama 4/1"], False)
    for found in run_ranks(one_gradient, 2, "fsdp2", {"sequence_ranks": 2}, folders["llama 4/1"], True, timeout=240.0):
        assert max(relative(found[name], expected[name]) for name in expected) < TOLERANCE


def isolation(rank: int, ranks: int, folder: Path) -> list[list[torch.Tensor]]:
    """Log-probs of this rank's two samples as they are, then with one token of rank 0's first sample changed, for each token."""
    samples = [sample for sample in make_samples() if sample.n_targets][rank * 2 : rank * 2 + 2]
    backend = runs.start(rank, ranks, "fsdp2", {"sequence_ranks": ranks}, ModelSpec(str(folder)), None)
    batches = [samples]
    for place in range(len(samples[0].token_ids)) if rank == 0 else range(33):
        changed = replace(samples[0], token_ids=samples[0].token_ids.copy())
        changed.token_ids[place % len(changed.token_ids)] += 1 if rank == 0 else 0
        batches.append([changed, samples[1]])
    counts = [sample.n_targets for sample in samples]
    return [list(backend.logprobs(collate(batch)).logprobs.split(counts)) for batch in batches]


def test_a_sample_in_two_slices_leaves_others_alone(folders: dict[str, Path]) -> None:
    """Failure case 27: not one bit of another sample changes, on whichever rank it is, in whichever slices."""
    mine, others = run_ranks(isolation, 2, folders["qwen3 4/2"])
    for first, second in mine[1:]:
        assert not torch.equal(first, mine[0][0])
        assert torch.equal(second, mine[0][1])
    for changed in others[1:]:
        assert all(torch.equal(one, other) for one, other in zip(changed, others[0], strict=True))


@dataclass
class Held:
    """What a rank holds for backward, beside parameters, and how many tokens its MLPs see at most."""

    kept: int
    tokens: list[int] = field(default_factory=list)


def long_sequence(rank: int, ranks: int, name: str, options: dict[str, Any], folder: Path, spec: dict[str, Any]) -> Held:
    """Forward and backward of one sample of 1,201 tokens that only rank 0 is given."""
    rng = np.random.default_rng(5)
    mask = np.arange(1201) > 0
    sample = TrainSample(rng.integers(1, VOCAB, 1201), mask, advantages=np.ones(1200, np.float32))
    backend: Any = runs.start(rank, ranks, name, options, ModelSpec(str(folder), **spec), OptimSpec())
    storages: dict[int, int] = {}
    held = Held(0)

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.ndim and not isinstance(tensor, torch.nn.Parameter) and not any(tensor.shape == p for p in shapes):
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    def watch(module: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        held.tokens.append(inputs[0].shape[1])

    shapes = {parameter.shape for parameter in backend._scorer.parameters()}
    shapes |= {shape[::-1] for shape in shapes}
    for block in backend._scorer.blocks:
        block.mlp.register_forward_pre_hook(watch)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        backend.forward_backward(collate([sample] if rank == 0 else []), runs.loss_fn, denominators([sample]), last=True)
    held.kept = sum(storages.values())
    return held


@pytest.mark.parametrize("spec", [{}, {"checkpointing": "full"}, {"tile_mlp": 100}], ids=str)
def test_activations_are_one_over_the_group(spec: dict[str, Any], folders: dict[str, Path]) -> None:
    """A rank sees no more than its slice of a long sequence outside attention, and keeps a half, or a fourth, of the bytes for backward.

    And one value a token, layer and channel more: attention keeps what it gives for its own backward, and the layer after it what it gets.
    """
    folder = folders["llama 4/4 tied"]
    (whole,) = run_ranks(long_sequence, 1, "fsdp2", {}, folder, spec)
    assert whole.tokens[0] == 1200
    for ranks in (2, 4):
        for held in run_ranks(long_sequence, ranks, "fsdp2", {"sequence_ranks": ranks}, folder, spec):
            assert set(held.tokens) == {1200 // ranks}
            exchanged = 0 if "checkpointing" in spec else 2 * 1200 * 32 * 4
            outputs = 12 * 1200  # a few numbers a target, on the rank whose targets they are
            assert whole.kept / ranks < held.kept < (whole.kept + exchanged) / ranks + outputs


def refusal(rank: int, ranks: int, options: dict[str, Any], folder: Path, spec: dict[str, Any]) -> str:
    with pytest.raises(UserError) as caught:
        runs.start(rank, ranks, "fsdp2", options, ModelSpec(str(folder), **spec), None)
    return str(caught.value)


_SIZE: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 40, "intermediate_size": 64, "num_hidden_layers": 2}
_LONG: dict[str, Any] = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 5, "long_factor": [2.0] * 5, "factor": 4.0}
_PHI3: dict[str, Any] = {"original_max_position_embeddings": 32, "rope_parameters": _LONG, "pad_token_id": 0, "eos_token_id": 1}
REFUSED: dict[str, tuple[Callable[..., PreTrainedConfig], dict[str, Any], dict[str, Any], str]] = {
    "heads": (LlamaConfig, {"num_attention_heads": 5}, {}, "5 attention heads, which 2 ranks cannot share"),
    "window": (MistralConfig, {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 16}, {}, "sliding_window=16"),
    "rope": (Phi3Config, {"num_attention_heads": 4, "num_key_value_heads": 2, **_PHI3}, {}, "rope_type=longrope"),
    "rows": (LlamaConfig, {"num_attention_heads": 4}, {"layout": "rows"}, "model.layout=auto"),
    "attention": (LlamaConfig, {"num_attention_heads": 4}, {"attention": "eager"}, "model.attention=sdpa, got auto and eager"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_shared_is_refused(what: str, tmp_path: Path) -> None:
    make, fields, spec, expected = REFUSED[what]
    Auto.from_config(make(**_SIZE | fields)).save_pretrained(tmp_path)
    for message in run_ranks(refusal, 2, {"sequence_ranks": 2}, tmp_path, spec):
        assert "sequence_ranks=2" in message
        assert expected in message


def test_a_group_size_that_does_not_divide_the_ranks_is_refused(folders: dict[str, Path]) -> None:
    for message in run_ranks(refusal, 2, {"sequence_ranks": 4}, folders["llama 4/4 tied"], {}):
        assert "backend.fsdp2.sequence_ranks=4 does not divide runtime.ranks=2" in message


@pytest.mark.parametrize(
    ("given", "expected"),
    [({"s_aux": torch.zeros(4)}, "its attention s_aux"), ({"softcap": 30.0}, "its attention softcap"), ({}, "keyword arguments")],
)
def test_attention_that_is_more_than_its_operands_is_refused(given: dict[str, Any], expected: str) -> None:
    """Sinks and caps come with the call; so does the row, unless the model's code drops what it does not know."""
    heads = torch.zeros(1, 4, 6, 8)
    with pytest.raises(UserError, match=expected):
        _attention(torch.nn.Linear(1, 1), heads, heads, heads, None, position_ids=torch.arange(6)[None], use_cache=False, **given)


def test_absolute_positions(tmp_path: Path) -> None:
    """A family that adds positions to its embeddings. (Its keys' bias has a gradient of nothing but rounding: weights are not compared.)"""
    torch.manual_seed(0)
    ids = {"bos_token_id": 1, "eos_token_id": 2}
    config = GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.1, **ids)
    Auto.from_config(config).save_pretrained(tmp_path)
    (expected,) = run_ranks(three_steps, 1, "single", {}, [tmp_path], {"plain": {}})
    for found in run_ranks(three_steps, 2, "fsdp2", {"sequence_ranks": 2}, [tmp_path], {"plain": {}}):
        mine, theirs = found["plain", tmp_path].gradients, expected["plain", tmp_path].gradients
        assert max(relative(mine[name], theirs[name]) for name in theirs) < TOLERANCE


def test_overlaps() -> None:
    assert overlaps([3, 0, 5], [4, 4]) == [[3, 0], [0, 0], [1, 4]]
    assert overlaps([0, 0], [0, 0]) == [[0, 0], [0, 0]]
