"""Where rows come from and how they become prompts: the section `data`."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag, model_validator

from drumroll.config.section import Positive, Section


class TaskSource(Section):
    """A procedural task made in code: rows are a pure function of (task, options, seed, index)."""

    task: str = Field(description="sort, larger, reverse, or reasoning_gym:NAME (an extra)")
    options: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the task, e.g. {digits: 6}")
    rows: Positive | None = Field(None, description="number of rows; none: endless (reasoning_gym: a million)")
    seed: int = Field(0, description="rows of another seed have nothing in common with these")


class FileSource(Section):
    """Rows from a jsonl or parquet file, or a folder saved by `datasets`."""

    path: str = Field(description="relative paths start at the working directory")
    split: str | None = Field(None, description="which split of a folder that has several")
    rows: Positive | None = Field(None, description="use only the first rows")
    skip: int = Field(0, ge=0, description="leave out the first rows")


class HubSource(Section):
    """Rows from a data set on the hub."""

    hub: str = Field(description="id of the data set, e.g. openai/gsm8k")
    name: str | None = Field(None, description="configuration of the data set, where it has several")
    split: str = Field("train", description="which split")
    rows: Positive | None = Field(None, description="use only the first rows")
    skip: int = Field(0, ge=0, description="leave out the first rows")


SOURCE_KEYS: dict[str, type[Section]] = {"task": TaskSource, "path": FileSource, "hub": HubSource}  # the key that says which kind of source a section is


def _source_kind(value: Any) -> str | None:
    """Name of the schema that a `data.train` section means: a mistyped key is judged by one schema, not by three."""
    if isinstance(value, Section):
        return type(value).__name__
    if not isinstance(value, Mapping):
        return None
    for key in (str(k) for k in value):
        near = get_close_matches(key, SOURCE_KEYS, n=1, cutoff=0.7)
        if near:
            return SOURCE_KEYS[near[0]].__name__
    return None


SourceConfig = Annotated[
    Annotated[TaskSource, Tag("TaskSource")] | Annotated[FileSource, Tag("FileSource")] | Annotated[HubSource, Tag("HubSource")],
    Discriminator(
        _source_kind,
        custom_error_type="source_kind",
        custom_error_message="expected a section with one of the keys task (made in code), path (file or folder) or hub",
    ),
]


class Message(Section):
    """One turn of a chat."""

    role: str = Field(description="user, assistant or what else the template knows")
    content: str = Field(description="the text")


class DataConfig(Section):
    """Where rows come from, and how a row becomes a prompt."""

    train: SourceConfig = Field(description="rows to train on")
    eval: SourceConfig | None = Field(None, description="held-out rows to evaluate on; none: no evaluations")
    prompt: str = Field("prompt", description="column with the prompt: a string, or a list of chat messages")
    completion: str | None = Field(None, description="SFT: column with the completion; none: that of a procedural task, else the prompt column holds whole chats")
    template: str | None = Field(None, description="text with {column} fields that makes the user prompt; replaces `prompt`")
    system: str | None = Field(None, description="system message put before every chat")
    examples: tuple[Message, ...] = Field((), description="chat messages {role, content} put between the system message and the prompt (few-shot)")
    chat: bool | None = Field(None, description="apply the tokenizer's chat template; none: when there is one")
    chat_options: dict[str, Any] = Field(default_factory=dict, description="variables of the chat template, e.g. {enable_thinking: false}")
    max_prompt_tokens: Positive = Field(1024, description="a longer prompt is left out and counted")
    shuffle: bool = Field(True, description="a new order every epoch, a function of the run's seed and the epoch; an endless task has no order to change")

    @model_validator(mode="after")
    def _chat_fields_need_a_chat(self) -> DataConfig:
        given = [name for name, value in (("system", self.system), ("examples", self.examples), ("chat_options", self.chat_options)) if value]
        if self.chat is False and given:
            raise ValueError(f"chat: false leaves no place for {', '.join(given)}; put the text into `template`")
        return self

    @property
    def completion_column(self) -> str | None:
        """Column with the text to learn in SFT; none: the prompt column holds whole chats."""
        return self.completion or ("completion" if isinstance(self.train, TaskSource) else None)
