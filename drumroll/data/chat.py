"""From rows to token ids: the only place that knows chat templates and tokenisation.

[Note: one BOS] A chat template usually writes the BOS token itself, and a tokenizer usually adds one to plain text; a rendered template
that is tokenised like text begins with two. Here nothing is ever tokenised with the tokenizer's own special tokens: templates are applied
and tokenised in one call, and the BOS is put in front exactly where the tokenizer would have put one and none is there yet. A tokenizer
that adds no BOS to plain text (Qwen) gets none.

[Note: assistant spans] Which tokens of a chat the assistant wrote is found by applying the template to growing prefixes of the chat:
tokens of messages[:i] with the generation prompt < the answer <= tokens of messages[:i+1]. Text is never cut and tokenised again, so the
ids before an answer are those that the sampler is given. A template for which these are not prefixes of each other (it rewrites earlier
turns) is refused, since what the model would be trained on is not what it would see.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from jinja2 import TemplateError
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from drumroll.config import DataConfig
from drumroll.data.rows import Row
from drumroll.errors import UserError
from drumroll.types import TrainSample

ChatMessage = dict[str, Any]
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


def load_tokenizer(folder: str | Path, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a HF model folder. Raises UserError when there is none that can be read."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        there = Path(folder).is_dir() and not any((Path(folder) / name).is_file() for name in _TOKENIZER_FILES)
        why = f"it has none of {', '.join(_TOKENIZER_FILES)}; save the model's tokenizer into it (save_pretrained)" if there else str(error)
        raise UserError(f"{folder}: no tokenizer can be loaded from there: {why}") from error
    return cast(PreTrainedTokenizerBase, tokenizer)


def eos_ids(tokenizer: PreTrainedTokenizerBase, generation_config: GenerationConfig | None = None) -> tuple[int, ...]:
    """Every token that ends a response, sorted: the tokenizer's EOS and all those that the model's generation config lists."""
    listed = generation_config.eos_token_id if generation_config is not None else None
    ids = [listed] if isinstance(listed, int) else list(listed or ())
    own = tokenizer.eos_token_id
    return tuple(sorted({int(i) for i in ids} | ({int(own)} if own is not None else set())))


def load_eos_ids(folder: str | Path, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """`eos_ids` with the generation config of the model folder, where it has one. Raises UserError when nothing could end a response."""
    config = GenerationConfig.from_pretrained(str(folder)) if (Path(folder) / "generation_config.json").is_file() else None
    found = eos_ids(tokenizer, config)
    if not found:
        raise UserError(f"{folder}: neither the tokenizer nor generation_config.json names an EOS token: no response could end")
    return found


def uses_chat(tokenizer: PreTrainedTokenizerBase, data: DataConfig) -> bool:
    """Whether prompts go through the chat template. Raises UserError when the recipe asks for one that the tokenizer does not have."""
    has_template = tokenizer.chat_template is not None
    if data.chat and not has_template:
        raise UserError("data.chat: true, but the model's tokenizer has no chat template")
    if not has_template and (data.system is not None or data.examples or data.chat_options):
        raise UserError("data.system, examples and chat_options need a chat template; the model's tokenizer has none: use data.template")
    return has_template if data.chat is None else data.chat


def prompt_ids(tokenizer: PreTrainedTokenizerBase, row: Row, data: DataConfig) -> tuple[str, list[int]]:
    """What the model reads for a row: (text, token ids [P]); a chat ends with the generation prompt. [Note: one BOS]

    Raises UserError naming the row when the template refuses it or nothing is left to read.
    """
    if uses_chat(tokenizer, data):
        messages = _messages(row, data)
        text = _apply(tokenizer, messages, data, row, generation=True, tokenize=False)
        ids = _chat_ids(tokenizer, messages, data, row, generation=True)
    else:
        text = _plain_prompt(row, data)
        ids = _with_bos(tokenizer, _plain_ids(tokenizer, text))
    if not ids:
        raise UserError(f"{row.id}: the prompt has no tokens: {text!r}")
    return text, ids


def sft_sample(tokenizer: PreTrainedTokenizerBase, row: Row, data: DataConfig, eos: Sequence[int], max_length: int) -> SftSample:
    """A row as a training sample whose targets are the assistant's tokens, the EOS that ends a turn included.

    With a completion column only the completion is learned, else every assistant message of the chat. A sequence over `max_length` tokens
    is cut there; what is cut away carries no loss, and a sample without a target left must be left out and counted by the caller.
    """
    ids, spans = _spans(tokenizer, row, data, eos)
    cut = ids[:max_length]
    mask = np.zeros(len(cut), dtype=bool)
    for begin, end in spans:
        mask[begin:end] = True
    mask[:1] = False  # nothing predicts the first token
    return SftSample(TrainSample(np.asarray(cut, dtype=np.int64), mask), truncated=len(ids) > max_length)


@dataclass(slots=True, frozen=True)
class SftSample:
    sample: TrainSample
    truncated: bool  # the row was longer than max_length


def _spans(tokenizer: PreTrainedTokenizerBase, row: Row, data: DataConfig, eos: Sequence[int]) -> tuple[list[int], list[tuple[int, int]]]:
    """Token ids of the whole row, and the [begin, end) of what is to be learned."""
    column = data.completion_column
    chat = uses_chat(tokenizer, data)
    if column is None and not chat:
        raise UserError(f"{row.id}: whole chats need a chat template, and none is applied (data.chat: {data.chat}); or set data.completion")
    if chat:
        messages = _messages(row, data)
        learned = range(len(messages) - len(_own_messages(row, data)), len(messages))
        if column is not None:
            learned = range(len(messages), len(messages) + 1)
            messages = [*messages, {"role": "assistant", "content": row.columns[column]}]
        return _assistant_spans(tokenizer, messages, [i for i in learned if messages[i]["role"] == "assistant"], data, row, eos)
    if tokenizer.eos_token_id is None:
        raise UserError("the model's tokenizer has no EOS token: a completion could not be ended")
    _, prompt = prompt_ids(tokenizer, row, data)
    completion = [*_plain_ids(tokenizer, row.columns[cast(str, column)]), int(tokenizer.eos_token_id)]
    return [*prompt, *completion], [(len(prompt), len(prompt) + len(completion))]


def _assistant_spans(
    tokenizer: PreTrainedTokenizerBase, messages: list[ChatMessage], learned: Sequence[int], data: DataConfig, row: Row, eos: Sequence[int]
) -> tuple[list[int], list[tuple[int, int]]]:
    """[Note: assistant spans]"""
    whole = _chat_ids(tokenizer, messages, data, row, generation=False)
    spans = []
    for index in learned:
        before = _chat_ids(tokenizer, messages[:index], data, row, generation=True)
        after = _chat_ids(tokenizer, messages[: index + 1], data, row, generation=False)
        if after[: len(before)] != before or whole[: len(after)] != after:
            raise UserError(
                f"{row.id}: message {index}: the chat template writes earlier turns differently once later ones follow, "
                "so the tokens of this answer cannot be told; keep one answer a row, or use another template"
            )
        # Templates put a line break or the like behind the EOS: the sampler stops before it, so it is not learned.
        ends = [at for at in range(len(before), len(after)) if after[at] in eos]
        spans.append((len(before), ends[-1] + 1 if ends else len(after)))
    return whole, spans


def _own_messages(row: Row, data: DataConfig) -> list[ChatMessage]:
    value = _plain_prompt(row, data) if data.template is not None else row.columns[data.prompt]
    return [{"role": "user", "content": value}] if isinstance(value, str) else list(value)


def _messages(row: Row, data: DataConfig) -> list[ChatMessage]:
    """System message, few-shot examples, then the row's own messages; a row's own system message stays in front."""
    own = _own_messages(row, data)
    first = [{"role": "system", "content": data.system}] if data.system is not None else []
    if data.examples and own[0]["role"] == "system":
        first, own = own[:1], own[1:]
    return [*first, *(example.model_dump() for example in data.examples), *own]


def _plain_prompt(row: Row, data: DataConfig) -> str:
    if data.template is not None:
        return data.template.format_map(row.columns)
    value = row.columns[data.prompt]
    if not isinstance(value, str):
        raise UserError(f"{row.id}: column {data.prompt!r} is a list of messages, and no chat template is applied (data.chat: {data.chat})")
    return value


def _plain_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _chat_ids(tokenizer: PreTrainedTokenizerBase, messages: list[ChatMessage], data: DataConfig, row: Row, generation: bool) -> list[int]:
    if not messages:
        return []
    return _with_bos(tokenizer, list(_apply(tokenizer, messages, data, row, generation, tokenize=True)))


def _apply(
    tokenizer: PreTrainedTokenizerBase, messages: list[ChatMessage], data: DataConfig, row: Row, generation: bool, tokenize: bool
) -> Any:
    options = data.chat_options
    try:
        return tokenizer.apply_chat_template(messages, tokenize=tokenize, return_dict=False, add_generation_prompt=generation, **options)
    except (TemplateError, TypeError, ValueError) as error:
        roles = ", ".join(message["role"] for message in messages)
        raise UserError(f"{row.id}: the chat template refuses the roles [{roles}]: {error}") from error


def _with_bos(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[int]:
    """[Note: one BOS]"""
    bos = tokenizer.bos_token_id
    if bos is None or ids[:1] == [bos] or bos not in tokenizer("")["input_ids"]:
        return ids
    return [int(bos), *ids]
