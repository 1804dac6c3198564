"""Whether a model was built for what the recipe will feed it, its lengths and its tokens: asked before anything is launched."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoConfig, PreTrainedTokenizerBase

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


def check_vocabulary(config: RunConfig, folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises UserError when the tokenizer gives out an id that the model has no embedding for; padding is never fed to it."""
    model = AutoConfig.from_pretrained(folder, trust_remote_code=config.model.trust_remote_code).get_text_config()
    ids = {token: index for token, index in tokenizer.get_vocab().items() if index >= model.vocab_size and token != tokenizer.pad_token}
    if ids:
        token = max(ids, key=lambda text: ids[text])
        raise UserError(
            f"model {folder}: the tokenizer gives {token!r} the id {ids[token]}, and the model has {model.vocab_size} embeddings "
            "(vocab_size); use the tokenizer that belongs to it, or resize the embeddings"
        )
