"""From the `fn` of a recipe to something that can be called: built-in rewards, user functions, TRL's and verl's functions.

Everything here is found by name alone, so that a worker process finds the same function from the same few strings.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from typing import Any, Literal

from drumroll.errors import UserError
from drumroll.plugins import install, load_symbol
from drumroll.rewards import adapters

# What a function is called with: (rollout, prompt) -> value, or (group) -> a value for each rollout.
Takes = Literal["rollout", "group"]


@dataclass(slots=True, frozen=True)
class Builtin:
    path: str
    isolate: bool  # may run for ever on some text, so it runs in a killable process
    column: str | None = None  # the column it reads when the recipe names no other
    package: str | None = None  # what it needs beside the package's own dependencies


BUILTIN = {
    "exact": Builtin("drumroll.rewards.text:exact", isolate=False, column="answer"),
    "digits": Builtin("drumroll.rewards.text:digits", isolate=False, column="answer"),
    "format": Builtin("drumroll.rewards.text:format", isolate=True),
    "math": Builtin("drumroll.rewards.math:math", isolate=True, column="answer"),
    "reasoning_gym": Builtin("drumroll.rewards.gym:reasoning_gym", isolate=True, column="metadata", package="reasoning_gym"),
}
ADAPTERS: dict[str, tuple[Callable[..., Any], Takes]] = {"trl": (adapters.trl, "group"), "verl": (adapters.verl, "rollout")}


@dataclass(slots=True, frozen=True)
class RewardFunction:
    call: Callable[..., Any]
    takes: Takes
    is_async: bool


def resolve(fn: str, args: Mapping[str, Any]) -> RewardFunction:
    """The function called `fn` with its arguments bound. Raises UserError: no such function, or arguments it does not take."""
    library, _, path = fn.partition(":")
    if library in ADAPTERS:
        adapt, takes = ADAPTERS[library]
        function = _callable(path, fn)
        return RewardFunction(partial(adapt, function, dict(args)), takes, inspect.iscoroutinefunction(function))
    if fn in BUILTIN:
        function = builtin(fn)
    elif ":" in fn:
        function = _callable(fn, fn)
    else:
        near = get_close_matches(fn, BUILTIN, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UserError(f"rewards: unknown function {fn!r}: expected {', '.join(BUILTIN)}, or module:name, file.py:name{hint}")
    _check_args(function, fn, args)
    return RewardFunction(partial(function, **args), "rollout", inspect.iscoroutinefunction(function))


def builtin(fn: str) -> Callable[..., Any]:
    """The package's own function called `fn`."""
    function: Callable[..., Any] = load_symbol(BUILTIN[fn].path)
    return function


def check(fn: str, args: Mapping[str, Any]) -> None:
    """What can be said about a function before it is imported or called. Raises UserError."""
    package = BUILTIN[fn].package if fn in BUILTIN else None
    if package is not None and importlib.util.find_spec(package) is None:
        raise UserError(f"rewards: {fn} needs the extra: {install(package.replace('_', '-'))}")
    if fn == "format":
        try:
            re.compile(str(args.get("pattern", "")))
        except re.error as error:
            raise UserError(f"rewards: format: pattern {args['pattern']!r} is not a regular expression: {error}") from error


def columns(fn: str, args: Mapping[str, Any]) -> tuple[str, ...]:
    """Columns that a built-in reward reads from every row."""
    default = BUILTIN[fn].column if fn in BUILTIN else None
    return () if default is None else (str(args.get("column", default)),)


def _callable(path: str, fn: str) -> Callable[..., Any]:
    if ":" not in path:
        raise UserError(f"rewards: {fn!r}: expected {fn.partition(':')[0]}:module:name or {fn.partition(':')[0]}:file.py:name")
    function = load_symbol(path)
    if not callable(function):
        raise UserError(f"rewards: {fn!r} is a {type(function).__name__}, not a function")
    return function  # type: ignore[no-any-return]


def _check_args(function: Callable[..., Any], fn: str, args: Mapping[str, Any]) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:  # some built-in callables have none; the first call will tell
        return
    try:
        signature.bind("rollout", "prompt", **args)
    except TypeError as error:
        takes = f"{fn}{signature}"
        raise UserError(f"rewards: {takes} cannot be called with (rollout, prompt) and args {dict(args)}: {error}") from error
