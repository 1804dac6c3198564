"""Attentions of drumroll's own, among those that transformers' models choose theirs from by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import AttentionInterface, PreTrainedModel

from drumroll.errors import RunError, UserError

Attention = Callable[..., Any]  # as transformers calls it: (module, query, key, value, attention_mask, **others) -> (output, None)


def register(name: str, attention: Attention) -> str:
    """Make an attention known, and return its name. Raises RunError for a name that something else has.

    It has no function that makes masks beside it: transformers then gives it a mask only where the body was given one of four dimensions.
    """
    known = AttentionInterface().get(name)
    if known is not None and _source(known) != _source(attention):
        raise RunError(f"transformers has an attention {name!r} already, of {'.'.join(_source(known))}: expected a name that is free")
    AttentionInterface.register(name, attention)
    return name


def choose(hf: PreTrainedModel, name: str) -> None:
    """Let a model use the attention of this name. Raises UserError for one that calls its own, past transformers' interface."""
    hf.set_attn_implementation(name)
    if hf.config._attn_implementation != name:
        raise UserError(f"the attention of {type(hf).__name__} cannot be replaced through transformers' AttentionInterface")


def _source(attention: Attention) -> tuple[str, str]:
    return attention.__module__, attention.__qualname__
