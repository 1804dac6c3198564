"""Mixtures of experts: how they are computed, and how evenly routers spread the tokens of each sequence over them.

Axis suffixes: B rows, L tokens of a row, T = B * L, E experts, S samples of the micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ExpertsInterface, grouped_mm_experts_forward

from drumroll.errors import UserError

# The argument that makes a body give its routers' logits, the field in which it does, and what says that experts are chosen by them alone.
ROUTER_OUTPUT = "output_router_logits"
_FIELD = "router_logits"
_TRAINED_WITH = "router_aux_loss_coef"
_ALIGNMENT = 16  # bytes
_BETWEEN = "grouped_mm_between_graphs"  # of the experts' computation, among those of transformers
GROUPED = ("grouped_mm", _BETWEEN)  # ways of computing experts, by name


def expert_modules(hf: PreTrainedModel) -> list[nn.Module]:
    """The modules that hold the experts of a layer, all of them in each of their parameters: [experts, ...]."""
    counting = (module for module in hf.modules() if "num_experts" in vars(module))
    return [module for module in counting if any(parameter.ndim == 3 for parameter in module.parameters(recurse=False))]


def choose_kernel(hf: PreTrainedModel, dtype: torch.dtype, compiled: bool = False) -> None:
    """How experts are computed: by grouped matmuls, transformers' default and the fastest of its ways; expert by expert where they cannot.

    They take rows of a multiple of 16 bytes. In blocks that will be compiled they are called between graphs: inductor takes them in
    bfloat16 only, and of other dtypes transformers makes a loop that it cannot take either, and says so at length.
    """
    if hf.config._experts_implementation != "grouped_mm":
        return
    if any(size * dtype.itemsize % _ALIGNMENT for parameter in hf.parameters() if parameter.ndim == 3 for size in parameter.shape[1:]):
        hf.set_experts_implementation("eager")
    elif compiled:
        ExpertsInterface.register(_BETWEEN, torch.compiler.disable(grouped_mm_experts_forward))
        hf.set_experts_implementation(_BETWEEN)


def check_routers(hf: PreTrainedModel) -> None:
    """Raises UserError for a model whose routers' balance cannot be measured."""
    fields = hf.config.get_text_config().to_dict()
    body: Any = hf.base_model
    recorded: dict[str, Any] = body._can_record_outputs or {}
    if _FIELD not in recorded or _TRAINED_WITH not in fields or not isinstance(fields.get("num_experts_per_tok"), int):
        raise UserError(
            f"train.router_aux_coef: {type(hf).__name__} is no mixture of experts whose routers choose by the largest logits (config.json "
            f"with {_TRAINED_WITH} and num_experts_per_tok); set train.router_aux_coef=0"
        )


def balance(hf: PreTrainedModel, router_logits: Sequence[torch.Tensor], owner_T: torch.Tensor, samples: int) -> torch.Tensor:
    """How unevenly the tokens that the model read of each sample are routed: float32 [S], with graph; 1 at best, E / K at worst.

    DeepSeek-AI 2024 (arXiv 2412.19437), equations 17 to 20, without the factor: the sum over experts of f P, its mean over layers. f: share
    of a sample's tokens that chose the expert among their K, times E / K; P: mean of its probability. A function of the sample alone, so a
    sum over samples does not depend on how they are divided; 0 for a sample of which nothing is read.

    `router_logits`: [T, E] a layer, or in order the parts of it that tiles made; `owner_T`: which sample a token is of, `samples` for none.
    """
    chosen = int(hf.config.get_text_config().num_experts_per_tok)
    flat = [logits.flatten(0, -2) for logits in router_logits]
    layers = flat if len(flat[0]) == len(owner_T) else torch.cat(flat).unflatten(0, (-1, len(owner_T)))
    tokens_S1 = _sums(torch.ones(len(owner_T), 1, device=owner_T.device), owner_T, samples).clamp(min=1)
    total_S = torch.zeros(samples, device=owner_T.device)
    for logits_TE in layers:
        p_TE = logits_TE.float().softmax(-1)
        hit_TE = torch.zeros_like(p_TE).scatter_(1, p_TE.detach().topk(chosen).indices, 1.0)
        mean_SE, share_SE = (_sums(values_TE, owner_T, samples) / tokens_S1 for values_TE in (p_TE, hit_TE))
        total_S = total_S + (share_SE * mean_SE).sum(-1) * (p_TE.shape[1] / chosen)
    return total_S / len(layers)


def _sums(values_TE: torch.Tensor, owner_T: torch.Tensor, samples: int) -> torch.Tensor:
    """[S, E]: over the tokens of each sample."""
    return values_TE.new_zeros(samples + 1, values_TE.shape[1]).index_add(0, owner_T, values_TE)[:samples]
