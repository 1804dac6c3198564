"""What is FSDP1's own: flat shards, what is whole at a time while memory is given and while it trains, and what it refuses."""

from __future__ import annotations

import gc
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from drumroll.backends import fsdp1, spans
from drumroll.backends.base import Checkpointing, LoraSpec, ModelSpec, OptimSpec, RankContext
from drumroll.backends.spans import Run, Span
from drumroll.errors import UserError
from drumroll.models import build
from drumroll.packing import collate, denominators
from tests.contract import backend_runs as runs
from tests.ranks import run_ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nearly all of it in blocks."""
    return runs.write_model(tmp_path_factory.mktemp("models") / "llama", "llama", tied=True, vocab=7, hidden=64)


# --- flat shards


def test_spans_and_runs_by_hand() -> None:
    """Three ranks of six elements each: [a a a . b b | b b b b b b | . . c c . .]."""
    shapes = [torch.Size(shape) for shape in ((3,), (2, 4), (1, 2))]
    padding = [False, True, False, True, False, True]
    a, b, c = spans.spans(shapes, [3, 1, 8, 2, 2, 2], padding, shard=6)
    assert (a, b, c) == (Span(0, shapes[0], 6), Span(4, shapes[1], 6), Span(14, shapes[2], 6))
    assert [[span.held(rank) for rank in range(3)] for span in (a, b, c)] == [
        [(0, 3), (3, 0), (3, 0)],
        [(0, 2), (2, 6), (8, 0)],
        [(0, 0), (0, 0), (0, 2)],
    ]
    assert [span.in_shard(rank) for span, rank in ((a, 0), (b, 0), (b, 1), (c, 2), (a, 2))] == [
        slice(0, 3), slice(4, 6), slice(0, 6), slice(2, 4), slice(0, 0),
    ]  # fmt: skip
    assert spans.runs([a, b, c]) == [Run(0, 0, 5), Run(1, 5, 11), Run(2, 11, 13)]
    assert spans.runs([c, b, a]) == [Run(2, 0, 2), Run(0, 2, 4), Run(1, 4, 10), Run(0, 10, 13)]


def against_torch(rank: int, ranks: int, folder: Path) -> int:
    """How many parameters were looked at, after comparing where they lie with what torch knows of this rank."""
    backend: Any = runs.start(rank, ranks, "fsdp1", {}, ModelSpec(str(folder)), None)
    placement = backend._placement
    seen = 0
    for unit in placement._units:
        for parameter, info in zip(unit.flat_param._params, unit.flat_param._shard_param_infos, strict=True):
            seen += 1
            assert placement.division.owned(parameter).local.numel() == parameter.numel() == (info.numel_in_shard or 0)
            if info.in_shard:
                assert placement.division.owned(parameter).start == info.intra_param_start_idx
                assert placement.division.owned(parameter).local.data_ptr() == parameter.data_ptr()
    assert seen == len(backend._parameters)
    return sum(parameter.numel() == 0 for parameter in placement._spans)


def test_parameters_lie_where_torch_has_put_them(folder: Path) -> None:
    assert all(nothing_held > 0 for nothing_held in run_ranks(against_torch, 3, folder))


# --- what is whole at a time


class Peak(TorchDispatchMode):
    """Most bytes of live storages at a time, of those that operations have made under it."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self._alive: dict[int, weakref.ref[torch.Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                self._alive[id(tensor)] = weakref.ref(tensor)
        alive = [tensor for ref in self._alive.values() if (tensor := ref()) is not None]
        self.largest = max(self.largest, sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in alive}.values()))
        return made


def place(rank: int, ranks: int, folder: Path) -> dict[str, int]:
    spec = ModelSpec(str(folder))
    scorer = build.build(spec)
    whole = sum(parameter.nbytes for parameter in scorer.parameters())
    unit = max(sum(parameter.nbytes for parameter in block.parameters()) for block in scorer.blocks)
    placement = fsdp1.Fsdp1Placement(fsdp1.Config())
    with Peak() as peak:
        placement.place(scorer, RankContext(rank, ranks, runs.CPU), spec)
    return {"whole": whole, "unit": unit, "peak": peak.largest}


def test_memory_is_given_unit_by_unit(tmp_path: Path) -> None:
    """Torch lays a unit out flat before it cuts it: at that moment it is there twice. No rank ever holds the model."""
    deep = runs.write_model(tmp_path, "llama", tied=True, vocab=7, hidden=64, layers=8)
    for found in run_ranks(place, 4, deep):
        assert 2 * found["unit"] <= found["peak"] <= 1.02 * (2 * found["unit"] + found["whole"] / 4)
        assert found["peak"] < 0.52 * found["whole"]


def train_and_sample(rank: int, ranks: int, folder: Path) -> dict[str, int]:
    """Most unsharded bytes at the borders of every block, in forward and in backward."""
    samples = runs.make_samples(4, vocab=7)
    backend: Any = runs.start(rank, ranks, "fsdp1", {}, ModelSpec(str(folder)), OptimSpec())
    blocks = backend._scorer.blocks
    most = {"forward": 0, "backward": 0}

    def sample(when: str) -> None:
        most[when] = max(most[when], backend.memory()["unsharded"])

    for block in blocks:
        block.register_forward_pre_hook(lambda *_: sample("forward"))
        block.register_forward_hook(lambda *_: sample("forward"))
        block.register_full_backward_pre_hook(lambda *_: sample("backward"))
        block.register_full_backward_hook(lambda *_: sample("backward"))
    backend.forward_backward(collate(samples[rank::ranks]), runs.loss_fn, denominators(samples), last=True)
    spans = backend._placement._spans
    inside = [spans[parameter].numel * 4 for parameter in blocks[0].parameters()]
    whole = sum(span.numel * 4 for span in spans.values())
    return {**most, "block": sum(inside), "root": whole - len(blocks) * sum(inside)}


def test_no_more_than_the_root_and_two_blocks_are_gathered(tmp_path: Path) -> None:
    """One computes; in backward the next is gathered ahead of it. The flat gradient of the one that is done goes as it is reduced."""
    deep = runs.write_model(tmp_path, "llama", tied=True, vocab=7, hidden=64, layers=8)
    for found in run_ranks(train_and_sample, 2, deep):
        assert found["root"] + found["block"] <= found["forward"] <= 1.02 * (found["root"] + found["block"])
        assert found["root"] + 2 * found["block"] <= found["backward"] <= 1.02 * (found["root"] + 2 * found["block"])


# --- precision


def accumulate_in_bf16(rank: int, ranks: int, folder: Path) -> float:
    """Relative distance of gradients reduced after the last of eight micro-batches from those reduced after each."""
    samples = runs.make_samples(16, vocab=7)
    plan = runs.even_plan(samples, rank, ranks, 8)
    found: list[dict[str, torch.Tensor]] = []
    for when in ("every", "last"):
        spec = ModelSpec(str(folder), compute_dtype=torch.bfloat16)
        backend = runs.start(rank, ranks, "fsdp1", {"grad_sync": when}, spec, OptimSpec())
        for index, part in enumerate(plan):
            backend.forward_backward(collate(part), runs.loss_fn, denominators(samples), last=index == len(plan) - 1)
        found.append({name: gradient.clone() for name, gradient in backend.gradients()})
    every, last = found
    return max(runs.relative(last[name], every[name]) for name in every)


@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_that_wait_for_reduction_add_up_in_float32(ranks: int, folder: Path) -> None:
    """Torch would add them up in the dtype of the computation, and round each sum to 8 bits: then this is 3e-3."""
    assert all(distance < 1e-6 for distance in run_ranks(accumulate_in_bf16, ranks, folder))


# --- frozen parameters

FROZEN: list[tuple[tuple[str, ...], Checkpointing]] = [
    ((r"layers\.1\.",), "none"),  # the root and a block are frozen, and backward goes through the root alone
    (("norm",), "none"),  # some of every unit
    (("embed",), "none"),  # backward goes through frozen blocks
    ((r"layers\.0\.mlp",), "full"),
]


def train_some(rank: int, ranks: int, name: str, options: dict[str, Any], folder: Path) -> list[runs.Trained]:
    samples = runs.make_samples(8, vocab=7)
    plan, counts = runs.even_plan(samples, rank, ranks, 2), denominators(samples)
    specs = [ModelSpec(str(folder), trainable=trainable, checkpointing=checkpointing) for trainable, checkpointing in FROZEN]
    return [runs.train(runs.start(rank, ranks, name, options, spec, OptimSpec()), plan, counts) for spec in specs]


@pytest.mark.parametrize(
    ("ranks", "options"), [(1, {}), (1, {"grad_sync": "last"}), (2, {}), (2, {"reshard_after_forward": False, "grad_sync": "last"})]
)
def test_units_of_which_some_parameters_train_or_none(ranks: int, options: dict[str, Any], folder: Path) -> None:
    (expected,) = run_ranks(train_some, 1, "single", {}, folder)
    for found in run_ranks(train_some, ranks, "fsdp1", options, folder):
        for mine, theirs in zip(found, expected, strict=True):
            assert mine.gradients.keys() == theirs.gradients.keys()
            assert mine.weights.keys() == theirs.weights.keys()
            off = [runs.relative(mine.gradients[key], theirs.gradients[key]) for key in theirs.gradients]
            off += [runs.relative(mine.weights[key], theirs.weights[key]) for key in theirs.weights]
            assert max(off) <= (0.0 if ranks == 1 else 1e-5)
            assert all(torch.equal(mine.weights[key], theirs.weights[key]) for key in theirs.weights if key not in theirs.gradients)


# --- the end, and refusals


def close(rank: int, ranks: int, folder: Path) -> list[bool]:
    """Whether flat parameters are gone after `close`, having trained or scored last; warnings of FSDP are errors meanwhile."""
    samples = runs.make_samples(4, vocab=7)
    micro = collate(samples[rank::ranks])
    gone = []
    for last_verb in ("forward_backward", "logprobs"):
        with warnings.catch_warnings():
            warnings.filterwarnings("error", module=r"torch\.distributed\.fsdp.*")
            backend: Any = runs.start(rank, ranks, "fsdp1", {}, ModelSpec(str(folder)), OptimSpec())
            backend.forward_backward(micro, runs.loss_fn, denominators(samples), last=True)
            if last_verb == "logprobs":
                backend.logprobs(micro)
        flat = weakref.ref(backend._placement._units[0].flat_param)
        backend.close()
        gc.collect()
        gone.append(flat() is None)
    return gone


@pytest.mark.parametrize("ranks", [1, 2])
def test_nothing_is_left_after_close(ranks: int, folder: Path) -> None:
    assert run_ranks(close, ranks, folder) == [[True, True]] * ranks


def refuse(rank: int, ranks: int, folder: Path) -> list[str]:
    messages = []
    with pytest.raises(UserError) as caught:
        runs.start(rank, ranks, "fsdp1", {}, ModelSpec(str(folder), torch.bfloat16, lora=LoraSpec(base_dtype=torch.bfloat16)), None)
    messages.append(str(caught.value))
    with pytest.raises(UserError) as caught:
        runs.start(rank, ranks, "fsdp1", {}, ModelSpec(str(folder), compile=True), None)
    messages.append(str(caught.value))
    spec = ModelSpec(str(folder))
    scorer = build.build(spec)
    first, second = scorer.blocks
    second.mlp.up_proj.weight = first.mlp.up_proj.weight
    with pytest.raises(UserError) as caught:
        fsdp1.Fsdp1Placement(fsdp1.Config()).place(scorer, RankContext(rank, ranks, runs.CPU), spec)
    return [*messages, str(caught.value)]


def test_what_a_flat_tensor_cannot_hold_is_refused(folder: Path) -> None:
    for dtypes, compiled, ties in run_ranks(refuse, 2, folder):
        assert "bfloat16 and float32" in dtypes
        assert "model.lora.base_dtype=float32" in dtypes
        assert "set model.compile=false, or use fsdp2" in compiled
        assert "model.layers.0.mlp.up_proj.weight and model.layers.1.mlp.up_proj.weight are one parameter" in ties
