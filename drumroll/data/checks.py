"""What makes a row usable: a pure function from a row to its faults."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from string import Formatter
from typing import Any, Literal

from drumroll.config import DataConfig
from drumroll.data.rows import Row
from drumroll.errors import UserError


def template_fields(data: DataConfig) -> tuple[str, ...]:
    """Columns that `data.template` fills in. Raises UserError for a template that Python's str.format cannot read."""
    if data.template is None:
        return ()
    try:
        fields = [field for _, field, _, _ in Formatter().parse(data.template) if field is not None]
    except ValueError as error:
        raise UserError(f"data.template: {error}; write {{column}} for a column and {{{{ or }}}} for a brace") from error
    bad = [field for field in fields if not field.isidentifier()]
    if bad:
        raise UserError(f"data.template: {{{bad[0]}}} is not the name of a column; write {{{{ or }}}} for a brace")
    return tuple(dict.fromkeys(fields))


def row_faults(row: Row, data: DataConfig, purpose: Literal["rl", "sft"], needed: Sequence[str]) -> Iterator[str]:
    """Everything wrong with a row, each as `file:line: what was expected, what was got`."""
    completion = data.completion_column if purpose == "sft" else None
    wanted = [*needed, *([] if data.template else [data.prompt]), *([completion] if completion else [])]
    missing = [name for name in dict.fromkeys(wanted) if row.columns.get(name) is None]
    absent = [name for name in missing if name not in row.columns]
    if absent:
        yield f"{row.id}: no column {' or '.join(map(repr, absent))}; it has {', '.join(map(repr, row.columns)) or 'none'}"
    for name in missing:
        if name in row.columns:
            yield f"{row.id}: column {name!r} is null"
    for name, value in row.columns.items():
        if _has_surrogate(value):
            yield f"{row.id}: column {name!r} holds half of a surrogate pair, which no tokenizer or file can take"
    if completion and completion not in missing and not _text(row.columns[completion]):
        yield f"{row.id}: column {completion!r}: expected text, got {_shown(row.columns[completion])}"
    if data.template is None and data.prompt not in missing:
        faults = _prompt_faults(row.columns[data.prompt], data, purpose, completion)
        yield from (f"{row.id}: column {data.prompt!r}: {fault}" for fault in faults)


def _prompt_faults(value: Any, data: DataConfig, purpose: Literal["rl", "sft"], completion: str | None) -> Iterator[str]:
    whole_chat = purpose == "sft" and completion is None
    if isinstance(value, str):
        if whole_chat:
            yield "a text alone has nothing to learn from: set data.completion, or give whole chats as lists of messages"
        elif not value:
            yield "expected text, got an empty string"
        return
    if not isinstance(value, list) or not value:
        yield f"expected text or a list of chat messages, got {_shown(value)}"
        return
    faults = [(at, fault) for at, message in enumerate(value) for fault in _message_faults(message)]
    yield from (f"message {at}: {fault}" for at, fault in faults)
    if faults:
        return
    roles = [message["role"] for message in value]
    if data.chat is False:
        yield "a list of messages needs the chat template; got chat: false"
    if data.system is not None and roles[0] == "system":
        yield "has a system message, and so has data.system: leave one out"
    if whole_chat and "assistant" not in roles:
        yield "no assistant message to learn from"
    if not whole_chat and roles[-1] == "assistant":
        yield "ends with an assistant message: a prompt ends where the model is to answer"


def _message_faults(message: Any) -> Iterator[str]:
    if not isinstance(message, Mapping):
        yield f"expected {{role, content}}, got {_shown(message)}"
        return
    for key in ("role", "content"):
        if not isinstance(message.get(key), str):
            yield f"{key}: expected text, got {_shown(message.get(key))}"


def _text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _has_surrogate(value: Any) -> bool:
    if isinstance(value, str):
        return not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value)
    if isinstance(value, Mapping):
        return any(_has_surrogate(key) or _has_surrogate(inner) for key, inner in value.items())
    return isinstance(value, list) and any(map(_has_surrogate, value))


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
