"""ZeRO stage 2 (Rajbhandari et al. 2020, arXiv 1910.02054, section 5.2): as ZeRO-1, but a rank keeps gradients of its own rows only.

Backward makes full gradients, one after the other. They are gathered in buckets; each is reduce-scattered as it is full, and freed, so
that all of them are never there at once. What stays is the sum, over ranks and micro-batches, of the rows that a rank owns and steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal
from weakref import WeakMethod

import torch
import torch.distributed as dist
from pydantic import Field
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from drumroll.backends.base import ModelSpec, RankContext
from drumroll.backends.buckets import buckets
from drumroll.backends.division import Division, OwnedRows
from drumroll.backends.engine import TorchPlugin
from drumroll.backends.footprint import Footprint
from drumroll.backends.replicas import check_replicas, share_rows
from drumroll.backends.rows import Rows
from drumroll.config import Section
from drumroll.errors import RunError
from drumroll.models import build
from drumroll.models.scorer import Scorer

# torch 2.11 has the old name only; later ones warn of it.
_reduce_scatter = dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor

IN_FLIGHT = 2  # buckets being reduced at a time: one travels while the next is filled


class Config(Section):
    """`backend.zero2.*`"""

    grad_sync: Literal["every", "last"] = Field(
        "every",
        description="reduce gradients after every micro-batch, or only after the last: less traffic, 4 bytes a parameter more on a rank",
    )
    bucket_mb: float = Field(
        25.0, gt=0, description="size of the buckets in which gradients are reduced while backward goes on", examples=[0.01]
    )


class Bucket:
    """Parameters whose gradients travel together.

    Full gradients lie in `full` [ranks, width] float32: row r holds the rows of each parameter that rank r owns, padded to those of
    rank 0, and at its end one number a parameter, 1 where this rank has a gradient of it. A parameter without one on any rank has none.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], rows: Rows) -> None:
        self.parameters = parameters
        self._ranks = rows.ranks
        self._shapes = [rows.cut(parameter.detach()).shape for parameter in parameters]  # of this rank's pieces
        self._sizes = [rows.bounds(parameter.shape, rank=0)[1] for parameter in parameters]  # no rank owns more
        self._starts = list(accumulate(self._sizes, initial=0))
        self._came: set[int] = set()
        self._reached: list[bool] | None = None
        self.full: torch.Tensor | None = None
        self.mine: torch.Tensor | None = None  # [width]: this rank's row, summed over what has been reduced since the last `clear`

    @property
    def complete(self) -> bool:
        return len(self._came) == len(self.parameters)

    def put(self, index: int) -> None:
        """Move the gradient of the parameter at `index` into `full`. Raises RunError for a second one in the same backward."""
        gradient, self.parameters[index].grad = self.parameters[index].grad, None
        assert gradient is not None, f"parameter {index} of a bucket has no gradient"
        if index in self._came:
            shape = tuple(self.parameters[index].shape)
            raise RunError(f"a parameter of shape {shape} got two gradients in one backward: does the model use re-entrant checkpoints?")
        self._came.add(index)
        full = self._opened()
        start, size = self._starts[index], self._sizes[index]
        flat = gradient.reshape(-1)
        filled = flat.numel() // size if size else 0  # ranks that own `size` elements; the next one owns what is left
        left = flat.numel() - filled * size
        full[:filled, start : start + size] = flat[: filled * size].view(filled, size)
        full[filled : filled + 1, start : start + left] = flat[filled * size :]
        full[:, self._starts[-1] + index] = 1.0

    def put_the_rest(self) -> None:
        """Those whose last gradient is of an earlier backward."""
        for index, parameter in enumerate(self.parameters):
            if parameter.grad is not None:
                self.put(index)

    def take(self) -> torch.Tensor:
        """`full`, which is no longer kept here: the bucket is ready for the next backward."""
        full, self.full = self._opened(), None
        self._came.clear()
        return full

    def drop(self) -> None:
        """Forget what a backward that was broken off has left."""
        self.full = None
        self._came.clear()

    def _opened(self) -> torch.Tensor:
        if self.full is None:
            width = self._starts[-1] + len(self.parameters)
            self.full = torch.zeros(self._ranks, width, device=self.parameters[0].device)
        return self.full

    def add(self, row: torch.Tensor) -> None:
        """Accumulate this rank's row of what has been reduced."""
        self.mine = row if self.mine is None else self.mine.add_(row)
        self._reached = None

    def clear(self) -> None:
        self.mine = self._reached = None

    def piece(self, index: int) -> torch.Tensor | None:
        """This rank's rows of the gradient of the parameter at `index`; a view."""
        if self.mine is None:
            return None
        if self._reached is None:
            self._reached = [count > 0 for count in self.mine[self._starts[-1] :].tolist()]
        shape, start = self._shapes[index], self._starts[index]
        return self.mine[start : start + shape.numel()].view(shape) if self._reached[index] else None


@dataclass(slots=True, frozen=True)
class _Flight:
    """A bucket on its way; holds what the collective reads and writes."""

    bucket: Bucket
    full: torch.Tensor
    row: torch.Tensor
    work: dist.Work


class Reducer:
    """Makes sums of this rank's rows out of full gradients, while backward goes on.

    Buckets hold parameters in the order in which backward is likely to reach them (`_order`). They are sent in this order whatever order
    gradients come in: collectives match on all ranks.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], rows: Rows, bucket_bytes: float) -> None:
        self._group = rows.group
        self._buckets = [Bucket(bucket, rows) for bucket in buckets(_order(parameters), lambda p: p.nbytes, bucket_bytes)]
        self._places: dict[torch.Tensor, tuple[Bucket, int]] = {
            parameter: (bucket, index) for bucket in self._buckets for index, parameter in enumerate(bucket.parameters)
        }
        self._reducing = False
        self._unsent: deque[Bucket] = deque()
        self._flights: deque[_Flight] = deque()
        collect = WeakMethod(self._collect)  # the garbage collector cannot follow a hook: a reference would keep everything for ever

        def hook(parameter: torch.Tensor) -> None:
            if (method := collect()) is not None:
                method(parameter)

        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(hook)

    @contextmanager
    def reducing(self) -> Iterator[None]:
        """Around a backward whose gradients, and those that parameters have from before, are to be reduced. Collective."""
        self._unsent.extend(self._buckets)
        self._reducing = True
        try:
            yield
            while self._unsent:
                self._unsent[0].put_the_rest()
                self._send()
            while self._flights:
                self._land()
        finally:
            self._reducing = False
            self._flights.clear()
            while self._unsent:
                self._unsent.popleft().drop()

    def _collect(self, parameter: torch.Tensor) -> None:
        """What the hook does: `parameter.grad` has been accumulated in this backward."""
        if not self._reducing:
            return
        bucket, index = self._places[parameter]
        bucket.put(index)
        while self._unsent and self._unsent[0].complete:
            self._send()

    def _send(self) -> None:
        if len(self._flights) == IN_FLIGHT:
            self._land()
        bucket = self._unsent.popleft()
        full = bucket.take()
        row = torch.empty_like(full[0])
        work = _reduce_scatter(row, full.view(-1), op=dist.ReduceOp.SUM, group=self._group, async_op=True)
        assert work is not None  # this rank is in the group
        self._flights.append(_Flight(bucket, full, row, work))

    def _land(self) -> None:
        flight = self._flights.popleft()
        flight.work.wait()
        flight.bucket.add(flight.row)

    def gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """This rank's rows of what has been reduced; None for a parameter that no gradient came for on any rank."""
        if parameter not in self._places:
            return None  # frozen
        bucket, index = self._places[parameter]
        return bucket.piece(index)

    def clear(self) -> None:
        """Drop all gradients, reduced or not, and their memory."""
        for bucket in self._buckets:
            bucket.clear()
        for parameter in self._places:
            parameter.grad = None

    def held(self) -> list[torch.Tensor]:
        """Full gradients, alone or in buckets, and rows not yet accumulated."""
        alone = [parameter.grad for parameter in self._places if parameter.grad is not None]
        filling = [bucket.full for bucket in self._buckets if bucket.full is not None]
        return [*alone, *filling, *(tensor for flight in self._flights for tensor in (flight.full, flight.row))]


def _order(parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """The last ones first; but norms and biases after all matrices: little, and reached at other times than the matrices beside them.

    A block's first norm is reached when the block is done: before it in the order, all of the block's matrices would wait for it.
    """
    matrices = [parameter for parameter in reversed(parameters) if parameter.ndim > 1]
    return [*matrices, *(parameter for parameter in reversed(parameters) if parameter.ndim < 2)]


class Zero2Placement:
    averaged_over = 1  # the reduction sums

    def __init__(self, options: Config) -> None:
        self._options = options

    def check(self, ctx: RankContext) -> None:
        pass

    def place(self, scorer: Scorer, ctx: RankContext, model: ModelSpec) -> None:
        self._rows = Rows(init_device_mesh(ctx.device.type, (ctx.world_size,), mesh_dim_names=("shard",)))
        self.division: Division = OwnedRows(self._rows)
        scorer.cast_parameters = True
        build.materialise(scorer, ctx.device)

    def wrap(self, scorer: Scorer, ctx: RankContext) -> nn.Module:
        check_replicas(scorer, ctx.device)
        self._trainable = [parameter for parameter in scorer.parameters() if parameter.requires_grad]
        self._reducer = Reducer(self._trainable, self._rows, self._options.bucket_mb * (1 << 20))
        return scorer

    def sync(self, last: bool) -> AbstractContextManager[None]:
        return self._reducer.reducing() if last or self._options.grad_sync == "every" else nullcontext()

    def gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        piece = self._reducer.gradient(parameter)
        return None if piece is None else self._rows.dtensor(piece, parameter.shape)

    def after_forward(self) -> None:
        pass

    def after_update(self) -> None:
        share_rows(self._rows, self._trainable)

    def clear_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        self._reducer.clear()

    def unsharded(self) -> list[torch.Tensor]:
        return self._reducer.held()


def footprint(options: Config, ranks: int) -> Footprint:
    """Gradients and optimizer state divided; whole gradients wait in the bucket that is filled and in those that travel."""
    return Footprint(
        gradient=ranks,
        optimizer=ranks,
        every_micro=options.grad_sync == "every",
        bucket_bytes=int(options.bucket_mb * (1 << 20)),
        buckets=IN_FLIGHT + 1,
    )


PLUGIN = TorchPlugin(Config, Zero2Placement, footprint)
