"""Failure case 16: the global norm over plain tensors and DTensors of different meshes is one plain float, each shard counted once."""

from __future__ import annotations

import math

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from drumroll.backends import clip
from tests.ranks import run_ranks


def shard(full: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """Rows of `full` over the last mesh dimension, replicated over the others; uneven and empty shards as FSDP has them."""
    rank, ranks = mesh.get_local_rank(mesh.ndim - 1), mesh.size(mesh.ndim - 1)
    chunks = list(full.chunk(ranks)) + [full[:0]] * ranks
    placements = [Replicate()] * (mesh.ndim - 1) + [Shard(0)]
    return DTensor.from_local(chunks[rank].clone(), mesh, placements, run_check=False, shape=full.shape, stride=full.stride())


def mixed_meshes(rank: int, world_size: int) -> dict[str, object]:
    first = init_device_mesh("cpu", (world_size,), mesh_dim_names=("a",))
    second = init_device_mesh("cpu", (world_size,), mesh_dim_names=("b",))
    grid = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replicate", "shard"))
    threes, fours = shard(torch.full((4, 4), 3.0), first), shard(torch.full((4, 4), 4.0), second)
    two_meshes = clip.global_norm([threes, fours])
    uneven = [shard(torch.full((6, 2), 2.0), grid), shard(torch.full((3, 1), 5.0), first), shard(torch.ones(1), grid)]
    grads = [threes, fours, torch.full((2, 2), 1.0), *uneven]
    norm = clip.global_norm(grads)
    clip.clip_(grads, norm, 1.0)
    poisoned = torch.ones(3)
    if rank == world_size - 1:
        poisoned[1] = math.nan
    return {
        "two meshes": two_meshes,
        "all kinds": norm,
        "clipped": clip.global_norm(grads),
        "ratio": (float(threes.to_local().sum()) / threes.to_local().numel(), float(fours.to_local().sum()) / fours.to_local().numel()),
        "replica poisoned on the last rank": clip.global_norm([poisoned]),
        "shard poisoned on the last rank": clip.global_norm([shard(torch.ones(8), first) * float(poisoned[1]), threes]),
        "nothing": clip.global_norm([]),
    }


def test_norm_over_mixed_meshes_and_plain_tensors() -> None:
    everything = math.sqrt(16 * 9 + 16 * 16 + 4 + 12 * 4 + 3 * 25 + 1)
    for found in run_ranks(mixed_meshes, 4):
        assert type(found["two meshes"]) is float
        assert found["two meshes"] == 20.0
        assert math.isclose(found["all kinds"], everything, rel_tol=1e-7)
        assert math.isclose(found["clipped"], 1.0, rel_tol=1e-6)
        assert all(math.isclose(value, full / everything, rel_tol=1e-6) for value, full in zip(found["ratio"], (3.0, 4.0), strict=True))
        assert found["replica poisoned on the last rank"] == math.inf
        assert found["shard poisoned on the last rank"] == math.inf
        assert found["nothing"] == 0.0
