"""A value head in the place of a language model's: one number a state (Schulman et al. 2017, arXiv 1707.06347, section 5).

[Note: states] The value that belongs to a target is that of the state before it, the prompt and the tokens up to the one before: it is read
where the target's log-prob is, from the hidden state that predicts the target. The state after the last target has none: there the episode
is over, and its value is 0.

[Note: the name of the head] It is the one of transformers' `*ForSequenceClassification`: the folder of a reward model with one label
brings its own head, and a folder of any other model lacks it, so that it begins with `initial`.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from drumroll.errors import UserError

NAME = "score"
WEIGHT = f"{NAME}.weight"  # [1, hidden]; no bias
_SEED = 0


def put_on(hf: PreTrainedModel) -> frozenset[str]:
    """Take the language-model head away and put a value head there, float32, without values yet.

    Returns the names that a folder may have and this model has no place for. Raises UserError for a model without a head.
    """
    head = hf.get_output_embeddings()
    names = [name for name, module in hf.named_modules() if module is head]
    if head is None or not names:
        raise UserError(f"{type(hf).__name__}: expected a language-model head, whose place a value head takes; use a causal language model")
    lost = frozenset(f"{names[0]}.{name}" for name, _ in head.named_parameters())
    parent, _, leaf = names[0].rpartition(".")
    delattr(hf.get_submodule(parent), leaf)
    device = hf.get_input_embeddings().get_parameter("weight").device
    hf.add_module(NAME, nn.Linear(hf.config.get_text_config().hidden_size, 1, bias=False, device=device, dtype=torch.float32))
    return lost


def initial(shape: torch.Size) -> torch.Tensor:
    """What a fresh head begins with, whole, float32, always the same numbers: normal with standard deviation 1 / hidden.

    Behind a final norm values are then about 1 / sqrt(hidden): near 0, and the body has a gradient from the first step on.
    """
    generator = torch.Generator().manual_seed(_SEED)
    return torch.randn(shape, generator=generator) / shape[-1]
