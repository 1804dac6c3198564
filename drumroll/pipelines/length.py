"""Whether a model was built for sequences as long as the recipe allows: asked before anything is launched, not met at some later step."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoConfig

from drumroll.config import RunConfig
from drumroll.engines.response import positions
from drumroll.errors import UserError


def check_length(config: RunConfig, folder: Path) -> None:
    """Raises UserError when `config.max_length`, the longest sequence of RL and where SFT cuts its rows, is over the model's positions."""
    try:
        limit = positions(AutoConfig.from_pretrained(folder, trust_remote_code=config.model.trust_remote_code))
    except (OSError, ValueError, ImportError) as error:
        raise UserError(f"model {folder}: config.json cannot be used: {error}") from error
    if config.max_length > limit:
        raise UserError(
            f"data.max_prompt_tokens={config.data.max_prompt_tokens} and rollout.max_tokens={config.rollout.max_tokens} allow sequences of "
            f"{config.max_length} tokens, and {folder} was built for {limit} (max_position_embeddings): lower them to {limit} together"
        )
