"""Fully sharded data parallel as torch had it first (`FullyShardedDataParallel`; Zhao et al. 2023, arXiv 2304.11277): flat parameters.

A unit is what is gathered at once: a transformer block each, and the root for the rest (embedding, final norm and head, so that tied
weights are in one). The parameters of a unit lie end to end in one flat tensor, cut into as many equal shards as there are ranks: a rank
may hold all of a parameter, any part of it, or nothing. A unit is gathered before it computes, in forward and again in backward, and
discarded after; its flat gradient is reduce-scattered as soon as backward has it, and each rank steps its own shard.

[Note: one flat gradient] A unit has one gradient for all of its parameters. Where some of them are frozen, theirs is computed and kept
with the others' (4 bytes a parameter), and not used. Where the loss does not reach one that trains, its gradient is zero, not missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Literal

import torch
from pydantic import Field
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp._flat_param import FlatParamHandle

from drumroll.backends.base import ModelSpec, RankContext
from drumroll.backends.division import Division
from drumroll.backends.engine import TorchPlugin
from drumroll.backends.footprint import Footprint, Gathering
from drumroll.backends.rows import Rows
from drumroll.backends.spans import HeldSpans, Span, spans
from drumroll.config import Section
from drumroll.errors import UserError
from drumroll.models import build
from drumroll.models.scorer import Scorer


class Config(Section):
    """`backend.fsdp1.*`"""

    reshard_after_forward: bool = Field(
        True,
        description="free a block's gathered parameters after forward and gather them again in backward (torch's FULL_SHARD): less memory, "
        "more traffic; false: SHARD_GRAD_OP",
    )
    grad_sync: Literal["every", "last"] = Field(
        "every",
        description="reduce gradients after every micro-batch, or only after the last: less traffic, 4 bytes a parameter more on a rank",
    )


class Unit(FullyShardedDataParallel):
    """A module and its flat parameter. Parameters, buffers and modules below it keep the names that they have without it."""

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """As torch's, but without its own place in names: `layers.0.mlp`, not `layers.0._fsdp_wrapped_module.mlp`."""
        memo = set() if memo is None else memo
        if self not in memo:
            if remove_duplicate:
                memo.add(self)
            yield prefix, self
            yield from self.module.named_modules(memo, prefix, remove_duplicate)


class Fsdp1Placement:
    def __init__(self, options: Config) -> None:
        self._options = options

    def check(self, ctx: RankContext) -> None:
        pass

    def place(self, scorer: Scorer, ctx: RankContext, model: ModelSpec) -> None:
        """Unit by unit: a rank never holds more than its shards and one unit whole."""
        _refuse_two_dtypes(scorer)
        if model.compile and ctx.world_size > 1:
            raise UserError(
                "backend.name=fsdp1: a gradient that waits for the next micro-batch has the shape of this rank's piece, and its parameter "
                "that of the whole: torch.compile fails when it compiles again; set model.compile=false, or use fsdp2"
            )
        self._rows = Rows(init_device_mesh(ctx.device.type, (ctx.world_size,), mesh_dim_names=("shard",)))
        self.averaged_over = ctx.world_size
        self._low_precision = model.compute_dtype is not torch.float32
        unit = self._make_unit(ctx, model.compute_dtype)
        ties = build.tied_names(scorer.hf)
        names = {module: name for name, module in scorer.hf.named_modules()}
        _refuse_ties_in_blocks(ties, [names[block] for block in scorer.blocks])
        inside = {module for block in scorer.blocks for module in block.modules()}
        outside = [module for module in scorer.modules() if module not in inside]
        for block in scorer.blocks:
            scorer.hf.set_submodule(names[block], unit(block.to_empty(device=ctx.device)))
        for module in outside:
            module.to_empty(device=ctx.device, recurse=False)
        build.complete(scorer.hf, ties)
        self._root = unit(scorer)
        assert self._root.check_is_root()  # asking makes torch set up what it otherwise does in the first forward, `_local_shard` among it
        self._index()

    def _make_unit(self, ctx: RankContext, compute_dtype: torch.dtype) -> Callable[[nn.Module], Unit]:
        if ctx.world_size == 1:
            strategy = ShardingStrategy.NO_SHARD  # what torch makes of any other, with a warning
        elif self._options.reshard_after_forward:
            strategy = ShardingStrategy.FULL_SHARD
        else:
            strategy = ShardingStrategy.SHARD_GRAD_OP
        policy = MixedPrecision(
            param_dtype=compute_dtype if self._low_precision else None,
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,
            cast_root_forward_inputs=False,
        )
        return partial(
            Unit,
            process_group=self._rows.group,
            sharding_strategy=strategy,
            mixed_precision=policy,
            device_id=ctx.device,
            use_orig_params=True,
        )

    def _index(self) -> None:
        """Look up where every parameter lies. No public way leads there."""
        self._units: list[FlatParamHandle] = []
        self._spans: dict[nn.Parameter, Span] = {}
        self._unit_of: dict[nn.Parameter, FlatParamHandle] = {}
        for module in FullyShardedDataParallel.fsdp_modules(self._root):
            unit = module._handle
            if unit is None:
                continue  # it holds nothing that is not in a unit below
            flat = unit.flat_param
            assert flat._params is not None  # `use_orig_params`
            places = spans(flat._shapes, flat._numels_with_padding, flat._is_padding_mask, flat._local_shard.numel())
            self._units.append(unit)
            self._spans |= dict(zip(flat._params, places, strict=True))
            self._unit_of |= dict.fromkeys(flat._params, unit)
        units = self._unit_of
        self.division: Division = HeldSpans(self._rows, self._spans, lambda parameter: units[parameter].flat_param._local_shard)

    def wrap(self, scorer: Scorer, ctx: RankContext) -> nn.Module:
        return self._root

    @contextmanager
    def sync(self, last: bool) -> Iterator[None]:
        with nullcontext() if last or self._options.grad_sync == "every" else self._root.no_sync():
            yield
        for unit in self._units:
            _widen_unreduced(unit)
            _put_back_parameters(unit)
            _forget_views(unit)

    def gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """1-D; empty where the rank holds nothing of the parameter. See [Note: one flat gradient]."""
        flat = _reduced_gradient(self._unit_of[parameter])
        if flat is None or not parameter.requires_grad:
            return None
        span = self._spans[parameter]
        return self._rows.dtensor(flat[span.in_shard(self._rows.rank)], torch.Size([span.numel]))

    def after_forward(self) -> None:
        """What waits for a backward that does not come: the root, and with `reshard_after_forward` off all units."""
        for unit in self._units:
            if unit.uses_sharded_strategy and not unit.needs_unshard():
                unit.reshard(free_unsharded_flat_param=True)
            _forget_views(unit)

    def after_update(self) -> None:
        pass

    def clear_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        for parameter in parameters:
            parameter.grad = None
        for unit in self._units:
            unit.flat_param.grad = None

    def unsharded(self) -> list[torch.Tensor]:
        held: list[torch.Tensor] = []
        for unit in self._units:
            flat = unit.flat_param
            if unit.uses_sharded_strategy:
                held.append(flat._full_param_padded)
            if self._low_precision:
                held.append(flat._mp_shard)
            if flat.grad is not None:  # where it is reduced already, it has been counted as a gradient
                held.append(flat.grad)
        return held


def _reduced_gradient(unit: FlatParamHandle) -> torch.Tensor | None:
    """A unit's shard of what has been reduced since the last step; what awaits reduction is of the whole unit's size, and no such."""
    gradient: torch.Tensor | None = unit.sharded_grad
    return gradient if gradient is not None and gradient.shape == unit.flat_param._local_shard.shape else None


def _widen_unreduced(unit: FlatParamHandle) -> None:
    """Gradients that await reduction to float32, in which the next one is added: torch keeps them in the dtype of the computation."""
    gradient = unit.flat_param.grad
    if gradient is not None and gradient.dtype is not torch.float32:
        gradient.data = gradient.float()
        unit._use_unsharded_grad_views()


def _put_back_parameters(unit: FlatParamHandle) -> None:
    """In the modules, after backward. Torch has done it, but for a unit that is not cut and does not train: by its data pointer, which
    never changes, it takes that for done already."""
    if not unit.uses_sharded_strategy and not unit.flat_param.requires_grad:
        unit.reshard(free_unsharded_flat_param=False)


def _forget_views(unit: FlatParamHandle) -> None:
    """The tensors that forward computed with. Torch drops them after backward, if parameters are sharded; where it does not, the unit
    would outlive `close`: it holds them, and their graph holds it, where Python's garbage collector does not look."""
    flat = unit.flat_param
    flat._tensors = [None] * flat._num_params


def _refuse_two_dtypes(scorer: Scorer) -> None:
    dtypes = sorted({str(parameter.dtype).removeprefix("torch.") for parameter in scorer.parameters()})
    if len(dtypes) > 1:
        raise UserError(
            f"backend.name=fsdp1: parameters are stored in {' and '.join(dtypes)}, expected one dtype, that of a unit's flat tensor; "
            "set model.lora.base_dtype=float32, or use fsdp2"
        )


def _refuse_ties_in_blocks(ties: Sequence[Sequence[str]], blocks: Sequence[str]) -> None:
    """Raises UserError: two units that share a parameter would each have their own. `blocks`: their names."""
    for aliases in ties:
        if any(alias.startswith(f"{block}.") for alias in aliases for block in blocks):
            raise UserError(
                f"backend.name=fsdp1: {' and '.join(aliases)} are one parameter; expected tied weights outside of transformer blocks only, "
                "such as embedding and head; use ddp"
            )


def footprint(options: Config, ranks: int) -> Footprint:
    """Everything divided, a unit's parameters as one; units whole while they compute."""
    return Footprint(
        parameter=ranks,
        gradient=ranks,
        optimizer=ranks,
        flat=True,
        gathering=Gathering(
            units=lambda scorer: [list(block.parameters()) for block in scorer.blocks],
            between=ranks if options.reshard_after_forward else 0,
            arrives_apart=False,
        ),
        every_micro=options.grad_sync == "every",
    )


PLUGIN = TorchPlugin(Config, Fsdp1Placement, footprint)
