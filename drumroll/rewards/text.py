"""Rewards that compare text: all of it, its last number, its form."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Annotated

from drumroll.types import Prompt, Rollout

# Arguments of a recipe: the text says what they mean, for `drumroll keys`.
Column = Annotated[str, "column of the row that holds the answer"]
After = Annotated[str | None, "the answer stands behind this mark in its column, e.g. #### in GSM8K; none: it is all that is there"]
Pattern = Annotated[str, "regular expression that the whole response must match"]

_NUMBER = re.compile(r"(?<![\w.])-?(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+)")  # a minus between two numbers is not a sign


def exact(rollout: Rollout, prompt: Prompt, *, column: Column = "answer", after: After = None) -> float:
    """1 when the whole response, spaces around it aside, is the answer; `after`: the answer stands behind this mark in its column."""
    return float(rollout.text.strip() == gold(prompt, column, after))


def digits(rollout: Rollout, prompt: Prompt, *, column: Column = "answer", after: After = None) -> float | None:
    """1 when the last number of the response has the value of the answer's last number (1,000 = 1000.0); None when the answer has none."""
    wanted, got = last_number(gold(prompt, column, after)), last_number(rollout.text)
    return None if wanted is None else float(got == wanted)


def format(rollout: Rollout, prompt: Prompt, *, pattern: Pattern) -> float:
    """1 when the whole response matches a regular expression; `.` also matches line breaks."""
    return float(re.fullmatch(pattern, rollout.text, re.DOTALL) is not None)


def gold(prompt: Prompt, column: str, after: str | None) -> str:
    """The answer that the row gives, e.g. what follows `####` in GSM8K."""
    text = str(prompt.columns[column])
    return (text if after is None else text.rpartition(after)[2]).strip()


def last_number(text: str) -> Decimal | None:
    """The last number in the text, thousands separators removed; None when there is none."""
    found = _NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "")) if found else None
