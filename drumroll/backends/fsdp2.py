"""Fully sharded data parallel (`torch.distributed.fsdp.fully_shard`): parameters, gradients and optimizer state lie in rows over the ranks.

A unit is what is gathered at once: one a transformer block, unless `wrap` says otherwise; what no unit below it holds (embedding, final
norm and head, so that tied weights are in one) forms the root unit. With `replicas` above 1 the mesh is replicate x shard: rows lie over
the ranks of a replica, gradients are reduce-scattered there and then all-reduced over the replicas. With `sequence_ranks` above 1 so many
consecutive ranks share the tokens of a micro-batch (`models/ulysses.py`); parameters are cut over all ranks as they are without. With
`expert_ranks` above 1 so many consecutive ranks share the experts of every layer (`models/dispatch.py`): a rank's experts are a unit, of
which rows lie over the ranks that have the same ones. Everything else is cut over all ranks as it is without.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Literal

import torch
from pydantic import Field
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState

from drumroll.backends.base import ModelSpec, RankContext
from drumroll.backends.clip import local_part
from drumroll.backends.division import HeldRows
from drumroll.backends.engine import TorchPlugin
from drumroll.backends.footprint import Footprint, Gathering, Unit
from drumroll.backends.ring import RingReduceScatter
from drumroll.backends.rows import Cut, Rows
from drumroll.config import Section
from drumroll.errors import UserError
from drumroll.models import build, dispatch
from drumroll.models.experts import expert_modules
from drumroll.models.scorer import Scorer


class Config(Section):
    """`backend.fsdp2.*`"""

    replicas: int = Field(
        1, gt=0, description="copies of the sharded model; ranks / replicas share one copy (hybrid sharding)", examples=[2]
    )
    reshard_after_forward: bool | int = Field(
        True,
        description="free a unit's gathered parameters after forward and gather them again in backward: less memory, more traffic; "
        "a number: keep them sharded over that many ranks in between, e.g. those of a node",
        examples=[False, 2],
    )
    grad_sync: Literal["every", "last"] = Field(
        "every",
        description="reduce gradients after every micro-batch, or only after the last: less traffic, 4 bytes a parameter more on a rank",
    )
    reduce_dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="dtype in which gradients are reduced; bfloat16 halves traffic and rounds"
    )
    wrap: tuple[str, ...] = Field(
        (),
        description="class names of the modules that are units; empty: every transformer block",
        examples=[("LlamaDecoderLayer", "LlamaMLP"), ("Qwen3DecoderLayer", "Qwen3MLP")],
    )
    embeddings: Literal["root", "apart"] = Field(
        "root", description="embedding and head in the root unit, which stays gathered, or units of their own (one, where they are tied)"
    )
    prefetch_forward: int = Field(0, ge=0, description="units gathered ahead of the one that computes, in forward", examples=[2])
    prefetch_backward: int = Field(0, ge=0, description="the same in backward; 0: torch's own choice, one unit", examples=[2])
    offload: bool = Field(
        False, description="parameters, gradients and optimizer state in host memory; units are copied to the device for use"
    )
    sequence_ranks: int = Field(
        1,
        gt=0,
        description="consecutive ranks that compute a micro-batch together, each a slice of its tokens (Ulysses): it may then have so many "
        "times train.micro_batch_tokens, one sequence too",
        examples=[2],
    )
    expert_ranks: int = Field(
        1,
        gt=0,
        description="consecutive ranks that share the experts of every layer: tokens travel to experts instead of experts to tokens "
        "(expert parallelism)",
        examples=[2],
        json_schema_extra={"verify_on": "experts"},
    )


class Fsdp2Placement:
    def __init__(self, options: Config) -> None:
        self._options = options
        self._units: list[FSDPModule] = []

    def check(self, ctx: RankContext) -> None:
        options, ranks = self._options, ctx.world_size
        if ranks % options.replicas:
            raise UserError(f"backend.fsdp2.replicas={options.replicas} does not divide runtime.ranks={ranks}")
        shards = ranks // options.replicas
        if shards % options.expert_ranks:
            raise UserError(
                f"backend.fsdp2.expert_ranks={options.expert_ranks} does not divide the {shards} ranks that share a copy of the model"
            )
        keep, alike = options.reshard_after_forward, shards // options.expert_ranks
        if not isinstance(keep, bool) and (keep < 1 or shards % keep or (keep < alike and alike % keep)):
            raise UserError(
                f"backend.fsdp2.reshard_after_forward={keep}: expected true, false or a divisor of the {shards} ranks that share a copy of "
                f"the model, and of the {alike} of them that share the same experts"
            )
        if ranks % options.sequence_ranks:
            raise UserError(f"backend.fsdp2.sequence_ranks={options.sequence_ranks} does not divide runtime.ranks={ranks}")

    def place(self, scorer: Scorer, ctx: RankContext, model: ModelSpec) -> None:
        options = self._options
        mesh = self._make_mesh(ctx)
        rows = Rows(mesh)
        self.averaged_over = mesh.size()
        if options.sequence_ranks > 1:
            self._share_sequences(scorer, ctx, model)
        low_precision = None if model.compute_dtype is torch.float32 else model.compute_dtype
        reduce_dtype = torch.bfloat16 if options.reduce_dtype == "bfloat16" else torch.float32
        policy = MixedPrecisionPolicy(param_dtype=low_precision, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
        offload = CPUOffloadPolicy(pin_memory=ctx.device.type == "cuda") if options.offload else OffloadPolicy()
        shard = partial(fully_shard, mp_policy=policy, offload_policy=offload)
        units = [*_embedding_units(scorer, options.embeddings), *_wrapped(scorer, options.wrap)]
        experts: list[nn.Module] = []
        if options.expert_ranks > 1:
            expert_mesh = self._make_expert_mesh(ctx)
            experts = dispatch.install(scorer.hf, dispatch.GroupRoads(expert_mesh.get_group("expert")), model.tile_mlp)
            alike = expert_mesh["replicate", "data"] if options.replicas > 1 else expert_mesh["data"]
            for module in experts:
                shard(module, mesh=alike, reshard_after_forward=_kept_between(options, alike))
        for unit in (unit for unit in units if unit not in experts):
            shard(unit, mesh=mesh, reshard_after_forward=_kept_between(options, mesh))
        # The root is needed again at once when backward begins: freeing it after forward would only gather it twice.
        root = shard(scorer, mesh=mesh, reshard_after_forward=False)
        self._units = [module for module in scorer.modules() if isinstance(module, FSDPModule)]
        if ctx.device.type == "cpu":
            for made in self._units:
                made.set_custom_reduce_scatter(RingReduceScatter())
        _prefetch([unit for unit in self._units if unit is not root], options.prefetch_forward, options.prefetch_backward)
        build.materialise(scorer, torch.device("cpu") if options.offload else ctx.device)
        build.move_buffers(scorer, ctx.device)  # torch copies off-loaded parameters to the device for use, and nothing else
        for sharded in self._sharded():  # rows are padded now, not at the first forward, when the optimizer has the old ones in its hands
            sharded.reset_sharded_param()
        self.division = HeldRows(rows, _expert_cuts(experts, Rows(expert_mesh, 2, rows.group)) if experts else {})

    def _make_mesh(self, ctx: RankContext) -> DeviceMesh:
        replicas = self._options.replicas
        if replicas == 1:
            return init_device_mesh(ctx.device.type, (ctx.world_size,), mesh_dim_names=("shard",))
        return init_device_mesh(ctx.device.type, (replicas, ctx.world_size // replicas), mesh_dim_names=("replicate", "shard"))

    def _make_expert_mesh(self, ctx: RankContext) -> DeviceMesh:
        """Experts are divided over `expert`, consecutive ranks, first, and their rows over `data`: so the dimensions are in this order."""
        replicas, together = self._options.replicas, self._options.expert_ranks
        ranks = torch.arange(ctx.world_size).view(replicas, -1, together).transpose(1, 2)
        return DeviceMesh(ctx.device.type, ranks, mesh_dim_names=("replicate", "expert", "data"))

    def _share_sequences(self, scorer: Scorer, ctx: RankContext, model: ModelSpec) -> None:
        ranks = self._options.sequence_ranks
        if model.layout == "rows" or model.attention != "sdpa":
            raise UserError(
                f"backend.fsdp2.sequence_ranks={ranks} cuts packed rows and has an attention of its own: set model.layout=auto and "
                f"model.attention=sdpa, got {model.layout} and {model.attention}"
            )
        mesh = init_device_mesh(ctx.device.type, (ctx.world_size // ranks, ranks), mesh_dim_names=("data", "sequence"))
        scorer.share_sequences(mesh.get_group("sequence"))

    def wrap(self, scorer: Scorer, ctx: RankContext) -> nn.Module:
        return scorer

    @contextmanager
    def sync(self, last: bool) -> Iterator[None]:
        if self._options.grad_sync == "last":
            for unit in self._units:
                unit.set_requires_gradient_sync(last, recurse=False)
        yield

    def gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        return None if parameter.grad is None else self.division.stored(parameter, local_part(parameter.grad))

    def after_forward(self) -> None:
        for unit in self._units:
            unit.reshard()

    def after_update(self) -> None:
        pass

    def clear_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        for parameter in parameters:
            parameter.grad = None

    def unsharded(self) -> list[torch.Tensor]:
        held: list[torch.Tensor] = []
        for sharded in self._sharded():
            if sharded.all_gather_outputs:
                gradients = (sharded.unsharded_param.grad, sharded.unsharded_accumulated_grad)
                held += [*sharded.all_gather_outputs, *(gradient for gradient in gradients if gradient is not None)]
            if sharded.sharded_state is ShardedState.SHARDED_POST_FORWARD:
                assert sharded._sharded_post_forward_param is not None
                held.append(local_part(sharded._sharded_post_forward_param))
        return held

    def _sharded(self) -> Iterator[FSDPParam]:
        """What torch keeps of each parameter; no public way leads there."""
        for unit in self._units:
            group = unit._get_fsdp_state()._fsdp_param_group
            if group is not None:
                yield from group.fsdp_params


def _kept_between(options: Config, mesh: DeviceMesh) -> bool | int:
    """torch's `reshard_after_forward` for what is cut over the last dimension of `mesh`."""
    keep, ranks = options.reshard_after_forward, mesh.size(mesh.ndim - 1)
    if isinstance(keep, bool) or 1 < keep < ranks:
        return keep
    return keep > 1 or ranks == 1  # over all ranks is `true`, over one is `false`


def _expert_cuts(experts: Sequence[nn.Module], rows: Rows) -> dict[nn.Parameter, Cut]:
    """How the parameters of each module that holds this rank's experts, [own experts, ...], are cut out of all experts, [experts, ...]."""
    held = [parameter for module in experts for parameter in module.parameters(recurse=False)]
    return {parameter: Cut(rows, torch.Size([len(parameter) * rows.sizes[0], *parameter.shape[1:]])) for parameter in held}


def _wrapped(scorer: Scorer, class_names: Sequence[str]) -> list[nn.Module]:
    """The modules that `backend.fsdp2.wrap` names, inner ones first; every transformer block where it names none."""
    if not class_names:
        return list(scorer.blocks)
    for name in class_names:
        if not any(type(module).__name__ == name for module in scorer.hf.modules()):
            known = sorted({type(module).__name__ for module in scorer.hf.modules() if any(True for _ in module.parameters())})
            raise UserError(f"backend.fsdp2.wrap: no module is a {name!r}; this model has {', '.join(known)}")
    return [module for module in reversed(list(scorer.hf.modules())) if type(module).__name__ in class_names]


def _embedding_units(scorer: Scorer, where: str) -> list[nn.Module | list[nn.Module]]:
    if where == "root":
        return []
    embedding = scorer.hf.get_input_embeddings()
    return [[embedding, scorer.head]] if scorer.tied else [embedding, scorer.head]


def _prefetch(units: Sequence[FSDPModule], forward: int, backward: int) -> None:
    """Units are in the order of forward."""
    for index, unit in enumerate(units):
        if forward:
            unit.set_modules_to_forward_prefetch(list(units[index + 1 : index + 1 + forward]))
        if backward:
            unit.set_modules_to_backward_prefetch(list(reversed(units[max(0, index - backward) : index])))


def footprint(options: Config, ranks: int) -> Footprint:
    """Everything divided over the ranks of a replica; units whole while they compute."""
    shards = ranks // options.replicas
    keep = options.reshard_after_forward
    return Footprint(
        parameter=shards,
        gradient=shards,
        optimizer=shards,
        gathering=Gathering(
            units=partial(_units, options),
            between=shards * int(keep) if isinstance(keep, bool) else keep * (keep > 1),
            arrives_apart=True,
            ahead_forward=options.prefetch_forward,
            ahead_backward=max(1, options.prefetch_backward),
        ),
        every_micro=options.grad_sync == "every",
        reduce_itemsize=2 if options.reduce_dtype == "bfloat16" else 4,
        sequence=options.sequence_ranks,
        experts=options.expert_ranks,
        offload=options.offload,
    )


def _units(options: Config, scorer: Scorer) -> Sequence[Unit]:
    """Parameters by unit, as `Fsdp2Placement.place` makes them, without the root."""
    experts = expert_modules(scorer.hf) if options.expert_ranks > 1 else []
    made = [*experts, *_embedding_units(scorer, options.embeddings), *_wrapped(scorer, options.wrap)]
    taken: set[nn.Parameter] = set()
    units = []
    for unit in made:
        modules = unit if isinstance(unit, list) else [unit]
        units.append([p for module in modules for p in module.parameters() if p not in taken])
        taken.update(units[-1])
    return units


PLUGIN = TorchPlugin(Config, Fsdp2Placement, footprint)
