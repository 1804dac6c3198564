"""What is FSDP2's own: which modules are units, and how many of them are whole at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.distributed.fsdp import FSDPModule

from drumroll.backends.base import ModelSpec, OptimSpec
from drumroll.errors import UserError
from drumroll.packing import collate, denominators
from tests.contract import backend_runs as runs
from tests.ranks import run_ranks

BLOCKS = 8
Options = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nearly all of it in blocks."""
    return runs.write_model(tmp_path_factory.mktemp("models") / "llama", "llama", tied=True, vocab=7, hidden=64, layers=BLOCKS)


def gathered_bytes(units: list[FSDPModule]) -> int:
    """Of whole parameters, those included that are on their way or still lie where they arrived."""
    groups = [group for unit in units if (group := unit._get_fsdp_state()._fsdp_param_group) is not None]
    held = [output for group in groups for parameter in group.fsdp_params for output in parameter.all_gather_outputs]
    arrived = [group._all_gather_result for group in groups]
    arrived += [state.all_gather_result for group in groups if (state := group.comm_ctx.all_gather_state) is not None]
    held += [result.all_gather_output for result in arrived if result is not None]
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in held}.values())


def train_and_sample(rank: int, ranks: int, cases: list[Options], folder: Path) -> list[tuple[float, float, float]]:
    """Of each case the most blocks that are whole beside the root: at the borders of blocks in forward, after it, and in backward."""
    return [most_gathered(rank, ranks, options, folder) for options in cases]


def most_gathered(rank: int, ranks: int, options: Options, folder: Path) -> tuple[float, float, float]:
    samples = runs.make_samples(4, vocab=7)
    backend: Any = runs.start(rank, ranks, "fsdp2", options, ModelSpec(str(folder)), OptimSpec())
    scorer = backend._scorer
    units = [module for module in scorer.modules() if isinstance(module, FSDPModule)]
    block = sum(4 * parameter.numel() for parameter in scorer.blocks[0].parameters())
    root = sum(4 * parameter.numel() for parameter in scorer.parameters()) - BLOCKS * block
    most = dict.fromkeys(("forward", "between", "backward"), 0.0)

    def sample(when: str) -> None:
        most[when] = max(most[when], (gathered_bytes(units) - root) / block)

    for one in scorer.blocks:
        one.register_forward_pre_hook(lambda *_: sample("forward"))
        one.register_forward_hook(lambda *_: sample("forward"))
        one.register_full_backward_pre_hook(lambda *_: sample("backward"))
        one.register_full_backward_hook(lambda *_: sample("backward"))
    scorer.head.register_forward_hook(lambda *_: sample("between"))
    backend.forward_backward(collate(samples[rank::ranks]), runs.loss_fn, denominators(samples), last=True)
    backend.close()
    return most["forward"], most["between"], most["backward"]


GATHERED: list[tuple[Options, tuple[int, int, int]]] = [
    ({}, (2, 1, 2)),  # a block and the buffer that it arrived in, which stays until the next one has arrived; in backward one is ahead
    ({"reshard_after_forward": False}, (BLOCKS + 1, BLOCKS + 1, BLOCKS)),
    ({"prefetch_forward": 2}, (4, 1, 2)),
    ({"prefetch_backward": 3}, (2, 1, 4)),
]


def test_the_root_and_two_blocks_are_whole_at_a_time_and_as_many_more_as_are_asked_for(folder: Path) -> None:
    for found in run_ranks(train_and_sample, 2, [options for options, _ in GATHERED], folder):
        for (options, expected), blocks in zip(GATHERED, found, strict=True):
            assert blocks == pytest.approx(expected, abs=0.01), options


def count_units(rank: int, ranks: int, folder: Path) -> list[int]:
    found = []
    for options in ({}, {"wrap": ["LlamaMLP", "LlamaAttention"]}, {"embeddings": "apart"}):
        backend: Any = runs.start(rank, ranks, "fsdp2", options, ModelSpec(str(folder)), None)
        groups = [m._get_fsdp_state()._fsdp_param_group for m in backend._scorer.modules() if isinstance(m, FSDPModule)]
        found.append(len({id(group) for group in groups}))
        backend.close()
    with pytest.raises(UserError, match=r"backend\.fsdp2\.wrap: no module is a 'LlamaBlock'; this model has .*LlamaDecoderLayer"):
        runs.start(rank, ranks, "fsdp2", {"wrap": ["LlamaDecoderLayer", "LlamaBlock"]}, ModelSpec(str(folder)), None)
    return found


def test_units_are_blocks_or_what_is_named_and_a_name_that_nothing_has_is_refused(folder: Path) -> None:
    """And the root; tied embedding and head are one unit also where they are apart."""
    assert run_ranks(count_units, 2, folder) == [[BLOCKS + 1, 2 * BLOCKS + 1, BLOCKS + 2]] * 2
