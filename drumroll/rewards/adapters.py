"""Reward functions written for TRL or verl, called the way they expect."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from drumroll.types import Group, Prompt, Rollout

Function = Callable[..., Any]


def trl(function: Function, args: Mapping[str, Any], group: Group) -> Any:
    """TRL's `f(prompts, completions, completion_ids, **columns) -> list[float | None]`, called once a group.

    A row whose `prompt` column is a list of messages is conversational: completions are then lists of one assistant message.
    Every other column is a list with one entry a completion. Arguments of the recipe are passed as they are.
    """
    prompt, n = group.prompt, len(group.rollouts)
    raw = prompt.columns.get("prompt", prompt.text)
    completions = [[{"role": "assistant", "content": r.text}] if isinstance(raw, list) else r.text for r in group.rollouts]
    columns = {name: [value] * n for name, value in prompt.columns.items() if name not in {"prompt", "completion", "completions"}}
    given = {"prompts": [raw] * n, "completions": completions, "completion_ids": [r.token_ids for r in group.rollouts], **columns, **args}
    return function(**_accepted(function, given))


def verl(function: Function, args: Mapping[str, Any], rollout: Rollout, prompt: Prompt) -> Any:
    """verl's `compute_score(data_source, solution_str, ground_truth, extra_info)`, a number or a dict with `score`.

    The ground truth is `reward_model.ground_truth`, as in verl's data files, else the column `ground_truth`, else `answer`.
    """
    columns = prompt.columns
    nested = columns.get("reward_model")
    truths = [nested.get("ground_truth") if isinstance(nested, Mapping) else None, columns.get("ground_truth"), columns.get("answer")]
    truth = next((value for value in truths if value is not None), None)
    if truth is None:
        raise KeyError(f"{prompt.prompt_id}: expected a column reward_model.ground_truth, ground_truth or answer, got {list(columns)}")
    given = {
        "data_source": columns.get("data_source", ""),
        "solution_str": rollout.text,
        "ground_truth": truth,
        "extra_info": columns.get("extra_info"),
        **args,
    }
    value = function(**_accepted(function, given))
    return _score_later(value) if inspect.isawaitable(value) else _score(value)


def _score(value: Any) -> Any:
    return value["score"] if isinstance(value, Mapping) else value


async def _score_later(value: Any) -> Any:
    return _score(await value)


def _accepted(function: Function, given: Mapping[str, Any]) -> dict[str, Any]:
    """Only what the function has a parameter for, unless it takes anything."""
    parameters = inspect.signature(function).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return dict(given)
    return {name: value for name, value in given.items() if name in parameters}
