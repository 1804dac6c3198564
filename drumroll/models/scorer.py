"""A HF causal language model that scores targets: its body, then the chunked head, or a value head in its place."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call
from transformers import PreTrainedModel

from drumroll.backends.base import ModelSpec
from drumroll.errors import UserError
from drumroll.models import experts, prompts, ulysses, value
from drumroll.models.blocks import block_forward, tile_mlp
from drumroll.models.head import target_logprobs
from drumroll.models.layout import Laid, choose, cut, lay_out, owners
from drumroll.models.lora import outer_name
from drumroll.types import MicroBatch

logger = logging.getLogger(__name__)
# Fields of HF configs by which a model changes its logits after the head, and the values that leave them alone.
_LOGIT_FIELDS: dict[str, tuple[float | None, ...]] = {
    "final_logit_softcapping": (None,),
    "logit_scale": (None, 1.0),
    "logits_scaling": (None, 1.0),
    "lm_head_multiplier": (None, 1.0),
}


class Scorer(nn.Module):
    """Log-probs (and entropy) of a micro-batch's targets, or their values. Always in eval mode: old, new and reference numbers must agree.

    Raises UserError for a language model whose head is not a plain linear layer on the body's last hidden state.
    """

    hf: PreTrainedModel
    blocks: list[nn.Module]  # transformer blocks, in order: the units of sharding and checkpointing
    cast_parameters: bool  # see [Note: master parameters] in blocks.py; off until the backend turns it on

    def __init__(self, hf: PreTrainedModel, spec: ModelSpec, left_out: Collection[str] = ()) -> None:
        """`left_out`: names of a folder's tensors that `hf` has no place for."""
        super().__init__()
        self._values = spec.head == "value"
        if not self._values:
            _refuse_changed_logits(hf)
        self.hf = hf.eval()
        self.left_out = left_out
        _refuse_layers_between(hf, self.head)
        self.layout = choose(spec.layout, spec.attention)
        self.compute_dtype = spec.compute_dtype
        self.temperature = spec.temperature
        self.cast_parameters = False
        self._balance = spec.balance
        if spec.balance:
            experts.check_routers(hf)
        self._sequence_group: dist.ProcessGroup | None = None
        self.blocks = find_blocks(hf)
        self._share_prompts = spec.share_prompts and self._install_sharing(spec)
        experts.choose_kernel(hf, spec.compute_dtype, spec.compile)
        for block in self.blocks:
            if spec.tile_mlp:
                tile_mlp(self, block, spec.tile_mlp)
            block.forward = block_forward(self, block, spec.checkpointing, spec.compile)
        self.head.forward = (_value_forward if self._values else _head_forward)(self.head)  # type: ignore[method-assign]

    def _install_sharing(self, spec: ModelSpec) -> bool:
        """Whether samples share their prompts from now on. See [Note: shared prompts].

        With routers' logits given, tokens are counted by sample: those of every sample are needed. A packed row needs the masks that
        `prompts.install` takes away.
        """
        if self.layout == "packed" or spec.balance or not prompts.supports(self.hf, spec.attention):
            return False
        if reason := prompts.install(self.hf, self.blocks):
            logger.warning("model.share_prompts is without effect on %s: %s", type(self.hf).__name__, reason)
        return not reason

    @property
    def body(self) -> nn.Module:
        return self.hf.base_model

    @property
    def head(self) -> nn.Linear:
        head = self.hf.get_submodule(value.NAME) if self._values else self.hf.get_output_embeddings()
        assert isinstance(head, nn.Linear)  # `_refuse_changed_logits`
        return head

    @property
    def tied(self) -> bool:
        """Whether the head's weight is the input embedding's."""
        return self.head.weight is self.hf.get_input_embeddings().weight

    @staticmethod
    def hf_name(parameter_name: str) -> str:
        """The HF name of a parameter, from its name in the scorer: `hf.model.norm.weight` -> `model.norm.weight`."""
        return outer_name(parameter_name.removeprefix("hf."))

    def share_sequences(self, group: dist.ProcessGroup) -> None:
        """Let the ranks of `group` compute their micro-batches together, each a slice of the tokens. See [Note: ulysses].

        Raises UserError for a model that cannot be computed like this.
        """
        if self._balance:
            raise UserError("train.router_aux_coef: a sequence's balance cannot be measured where ranks share it: set sequence_ranks=1")
        ulysses.install(self.hf, dist.get_world_size(group))
        self._sequence_group = group

    def train(self, mode: bool = True) -> Scorer:
        """Stays in eval mode whatever is asked: dropout would make old, new and reference log-probs disagree."""
        return super().train(False)

    def forward(self, micro: MicroBatch, entropy: bool = False) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """(log-probs [N], entropy [N] or None, routers' balance [S] or None), float32; the last one only where it was asked for, to train.

        A value head gives values [N] in place of log-probs, of the states that [Note: states] in value.py says, and no entropy.
        Without a target the outputs are empty (the balance 0), attached to the graph, and their gradients are zero.
        """
        if self._sequence_group is not None:
            return *self._shared_forward(micro, entropy, self._sequence_group), None
        laid = lay_out(micro, self.layout, self._share_prompts)
        logprobs_N, entropy_N, router_logits = self._score(laid, entropy)
        balance_S = None
        if router_logits is not None:
            balance_S = experts.balance(self.hf, router_logits, owners(micro, self.layout), len(micro.lengths))
        if laid.fill_in:  # a clone, because hooks on outputs (FSDP2's) do not survive in-place operations on views
            return logprobs_N[:0].clone(), None if entropy_N is None else entropy_N[:0].clone(), balance_S
        return logprobs_N, entropy_N, balance_S

    def _shared_forward(
        self, micro: MicroBatch, entropy: bool, group: dist.ProcessGroup
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The same, of a micro-batch that is part of its group's. See [Note: ulysses]."""
        gathered = ulysses.gather(micro, group)
        part = cut(gathered.micro, dist.get_rank(group), dist.get_world_size(group), micro.token_ids.device)
        made = self._score(part.laid, entropy, row=ulysses.Row(part.lengths, group))[:2]
        # In one tensor: a loss that uses one of them on some ranks only must not make the others wait for its gradient.
        outputs = torch.stack([output for output in made if output is not None], dim=1)
        home = ulysses.bring_home(outputs, part.targets, gathered.targets, group).unbind(dim=1)
        return home[0].clone(), home[1].clone() if len(home) > 1 else None  # clones: see `forward`

    def _score(
        self, laid: Laid, entropy: bool, **attention: ulysses.Row | prompts.Shared
    ) -> tuple[torch.Tensor, torch.Tensor | None, tuple[torch.Tensor, ...] | None]:
        """Log-probs, entropy and routers' logits of what is laid out; `attention`: what the model's attention needs to know."""
        cast = self._cast_outside_blocks()
        inputs = {"input_ids": laid.input_ids_BL, "position_ids": laid.position_ids_BL, "attention_mask": None, "use_cache": False}
        routers = {experts.ROUTER_OUTPUT: True} if self._balance and torch.is_grad_enabled() else {}
        body = {name: cast[parameter] for name, parameter in self.body.named_parameters() if parameter in cast}
        if laid.shared is not None:
            attention["shared"] = laid.shared
        made = functional_call(self.body, body, (), inputs | routers | attention)
        hidden = made.last_hidden_state.flatten(0, 1)
        if laid.shared is not None:
            hidden = prompts.spread(hidden, laid.shared).flatten(0, 1)
        hidden_NH = hidden.index_select(0, laid.index_N)
        logprobs_N, entropy_N = self.head(hidden_NH, _Targets(laid.targets_N, self.temperature, entropy, cast))
        return logprobs_N, entropy_N, made.router_logits if routers else None

    def _cast_outside_blocks(self) -> dict[torch.Tensor, torch.Tensor]:
        """Parameter -> its value in the compute dtype, for embedding, norm and head; a tied weight is cast once.

        Empty when nothing is to be cast.
        """
        if not self.cast_parameters or self.compute_dtype == torch.float32:
            return {}
        inside = {id(parameter) for block in self.blocks for parameter in block.parameters()}
        return {p: p.to(self.compute_dtype) for p in self.hf.parameters() if id(p) not in inside}


@dataclass(slots=True, frozen=True)
class _Targets:
    """What the head scores: a call that brings this gives log-probs and entropy, any other the logits."""

    ids_N: torch.Tensor
    temperature: float
    entropy: bool
    cast: dict[torch.Tensor, torch.Tensor]  # see `Scorer._cast_outside_blocks`


def _head_forward(head: nn.Linear) -> Callable[..., Any]:
    """The forward of the head. It is called as a module, so that a backend which shards it by itself can gather its weight."""
    plain = head.forward

    def forward(hidden: torch.Tensor, targets: _Targets | None = None) -> Any:
        if targets is None:
            return plain(hidden)
        weight: torch.Tensor = head.weight
        bias: torch.Tensor | None = head.bias
        return target_logprobs(
            hidden,
            targets.cast.get(weight, weight),
            None if bias is None else targets.cast.get(bias, bias),
            targets.ids_N,
            targets.temperature,
            targets.entropy,
        )

    return forward


def _value_forward(head: nn.Linear) -> Callable[..., Any]:
    """The forward of a value head: values [N] of hidden states in any dtype, multiplied and added up in float32; and no entropy."""

    def forward(hidden_NH: torch.Tensor, targets: _Targets) -> tuple[torch.Tensor, None]:
        weight_1H: torch.Tensor = head.weight
        return hidden_NH.float() @ targets.cast.get(weight_1H, weight_1H).float()[0], None  # no view: see `Scorer.forward`

    return forward


def find_blocks(hf: PreTrainedModel) -> list[nn.Module]:
    """The transformer blocks, in order. Raises UserError for a model whose body has no list of them."""
    count = hf.config.get_text_config().num_hidden_layers
    for module in hf.base_model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return list(module)
    name = type(hf).__name__
    raise UserError(f"{name}: expected a list of {count} transformer blocks (num_hidden_layers) in the model's body; found none")


def _refuse_layers_between(hf: PreTrainedModel, head: nn.Module) -> None:
    known = {id(parameter) for module in (hf.base_model, head) for parameter in module.parameters()}
    if between := [name for name, parameter in hf.named_parameters() if id(parameter) not in known]:
        raise UserError(
            f"{type(hf).__name__}: {between[0]} is neither of the model's body nor of its head, which is then not a plain linear layer on "
            "the body's last hidden state; use a causal language model"
        )


def _refuse_changed_logits(hf: PreTrainedModel) -> None:
    name = type(hf).__name__
    head = hf.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise UserError(f"{name}: expected a linear language-model head, got {type(head).__name__}; use a causal language model")
    config = hf.config.get_text_config().to_dict()
    for field, neutral in _LOGIT_FIELDS.items():
        if config.get(field) not in neutral:
            raise UserError(f"{name}: config.json has {field}={config[field]}, which changes the logits after the head; not supported")
