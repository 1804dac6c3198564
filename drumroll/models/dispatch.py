"""Experts divided over ranks: tokens travel to the rank that holds an expert, and its answers travel back.

[Note: dispatch] Rank i of a group of P holds experts [i E / P, (i + 1) E / P) of every layer. Every rank routes its own tokens, and then
    - says how many rows it has for each expert, so that all know what will come;
    - sends a copy of a token's row for each expert that was chosen for it, sorted by expert, in one all-to-all;
    - computes what came by grouped matmuls, as if all of it were its own;
    - sends the answers back, which are weighed and added up where the tokens are.
Gradients travel the same ways, so an expert's gradient is over the tokens of the whole group, where that of any other parameter is over
those of one rank. A placement that averages over the ranks which hold a parameter averages over P times fewer for an expert; what is
missing, 1 / P, is put into the gradients that enter its computation, and taken out of those that leave it towards the tokens.

All of it is collective: every rank makes the same calls, one whose experts get no token too.

Axis suffixes: P ranks of the group, E experts, e experts of one rank, T tokens, K experts of a token, S = T * K rows that leave, R rows
that come, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ExpertsInterface, grouped_mm_experts_forward

from drumroll.errors import UserError
from drumroll.models.exchange import exchange, scale_gradient
from drumroll.models.experts import GROUPED, expert_modules

_NAME = "dispatched"  # of the experts' computation, among those of transformers


def check(hf: PreTrainedModel, ranks: int) -> None:
    """Raises UserError for a model whose experts `ranks` ranks cannot share."""
    name, found = type(hf).__name__, expert_modules(hf)
    if not found:
        raise UserError(f"expert_ranks={ranks}: {name} has no experts: set expert_ranks=1")
    if hf.config._experts_implementation not in (*GROUPED, _NAME):
        raise UserError(f"expert_ranks={ranks}: the experts of {name} have rows of no multiple of 16 bytes, as grouped matmuls need them")
    for module in found:
        for parameter_name, parameter in module.named_parameters(recurse=False):
            if len(parameter) % ranks:
                raise UserError(
                    f"expert_ranks={ranks} does not divide the {len(parameter)} experts of {name} ({parameter_name}): choose a divisor"
                )


class Trip(Protocol):
    """One layer's rows on their way, sorted by expert."""

    @property
    def expert_R(self) -> torch.Tensor:
        """Of each row that comes: index among the experts here."""

    def there(self, rows_SH: torch.Tensor) -> torch.Tensor:
        """[R, H]: what comes, where those leave. Collective."""

    def back(self, rows_RH: torch.Tensor) -> torch.Tensor:
        """[S, H]: the other way. Collective."""


class Roads(Protocol):
    """Between the ranks that share experts."""

    @property
    def ranks(self) -> int: ...

    def trip(self, expert_S: torch.Tensor, here: int) -> Trip:
        """`expert_S`: of each row that leaves, in order. `here`: how many experts a rank has. Collective."""


@dataclass(slots=True, frozen=True)
class _Travelling:
    group: dist.ProcessGroup
    send: list[int]
    receive: list[int]
    expert_R: torch.Tensor

    def there(self, rows_SH: torch.Tensor) -> torch.Tensor:
        return exchange(rows_SH, self.group, self.send, self.receive)

    def back(self, rows_RH: torch.Tensor) -> torch.Tensor:
        return exchange(rows_RH, self.group, self.receive, self.send)


class GroupRoads:
    """By all-to-all in a process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.ranks = dist.get_world_size(group)

    def trip(self, expert_S: torch.Tensor, here: int) -> Trip:
        leaving_Pe = torch.bincount(expert_S, minlength=self.ranks * here).view(self.ranks, here)
        coming_Pe = exchange(leaving_Pe, self._group)
        send, receive = torch.stack([leaving_Pe.sum(1), coming_Pe.sum(1)]).tolist()
        each_Pe = torch.arange(here, device=expert_S.device).repeat(self.ranks)
        return _Travelling(self._group, send, receive, each_Pe.repeat_interleave(coming_Pe.flatten(), output_size=sum(receive)))


def install(hf: PreTrainedModel, roads: Roads, tile_mlp: int = 0) -> list[nn.Module]:
    """Leave of every layer's experts, still without values, as many as a rank has, and let tokens travel to the others.

    Gives the modules that hold them. `tile_mlp`: see ModelSpec. Raises UserError for a model that cannot be computed like this. See
    [Note: dispatch].
    """
    check(hf, roads.ranks)
    if tile_mlp:
        raise UserError(
            f"expert_ranks={roads.ranks}: tiles of tokens would travel to experts one by one, and ranks have different numbers of them: "
            f"set model.tile_mlp=0, got {tile_mlp}"
        )
    ExpertsInterface.register(_NAME, torch.compiler.disable(_dispatched))
    hf.set_experts_implementation(_NAME)
    found = expert_modules(hf)
    for module in found:
        for name, whole in list(module.named_parameters(recurse=False)):
            part = torch.empty_like(whole[: len(whole) // roads.ranks])
            module.register_parameter(name, nn.Parameter(part, requires_grad=whole.requires_grad))
            module.num_experts = len(part)  # type: ignore[assignment]  # what grouped matmuls count by
        module.register_forward_pre_hook(partial(_told, roads), with_kwargs=True)
    return found


def _told(roads: Roads, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """What the computation has to know beside its operands."""
    return args, {**kwargs, "roads": roads}


def _dispatched(
    module: nn.Module, hidden_TH: torch.Tensor, chosen_TK: torch.Tensor, weights_TK: torch.Tensor, roads: Roads
) -> torch.Tensor:
    """Called by the blocks of transformers' models. Collective."""
    tokens, chosen = chosen_TK.shape
    expert_S, order_S = chosen_TK.flatten().sort(stable=True)
    trip = roads.trip(expert_S, here=len(next(module.parameters(recurse=False))))
    rows_RH = scale_gradient(trip.there(hidden_TH[order_S // chosen]), roads.ranks)
    made_RH = scale_gradient(_computed(module, rows_RH, trip.expert_R), 1 / roads.ranks)
    weighed_SH = trip.back(made_RH) * weights_TK.flatten()[order_S, None]
    return weighed_SH[order_S.argsort()].view(tokens, chosen, -1).sum(1).to(hidden_TH.dtype)


def _computed(module: nn.Module, rows_RH: torch.Tensor, expert_R: torch.Tensor) -> torch.Tensor:
    """What this rank's experts make of the rows; of none too, so that their gradients are zero and not missing."""
    count = len(rows_RH)
    if not count:
        rows_RH, expert_R = nn.functional.pad(rows_RH, (0, 0, 0, 1)), expert_R.new_zeros(1)
    made_RH: torch.Tensor = grouped_mm_experts_forward(module, rows_RH, expert_R[:, None], rows_RH.new_ones(len(rows_RH), 1))
    return made_RH[:count]
