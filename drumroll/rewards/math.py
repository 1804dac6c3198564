"""Whether a response gives the right mathematical answer, by `math-verify` with its known mistakes kept out.

Against math-verify 0.9 alone: its timers are off (they are signals, which work in the main thread only; the killable process that this runs
in is the limit); its exceptions are failures that are counted, not scores; a last box that does not end makes an answer wrong, whatever
earlier boxes say; plain text that is a formula is read as one, so that `pi/2` is no product of three letters and `2x+y=3` is not its last
number; and what it calls equal must also be equal exactly, or to 1e-5 relative where a decimal number is involved: 1/2004! is not 1/2006!.
"""

from __future__ import annotations

import logging
import re
from typing import Any

import sympy
from math_verify import parse, verify

from drumroll.rewards.text import After, Column
from drumroll.rewards.text import gold as answer_of
from drumroll.types import Prompt, Rollout

for _module in ("math_verify.parser", "math_verify.grader"):
    logging.getLogger(_module).setLevel(logging.ERROR)  # they warn that their timers are off

RELATIVE = 1e-5  # between a decimal number and anything
DIGITS = 60  # of the comparison of two exact numbers
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_WORD = re.compile(r"(?<![a-zA-Z\\])(?!pi(?![a-zA-Z]))[a-zA-Z]{3,}")
_TEXT = re.compile(r"\\text\s*\{[^}]*\}")
_SAID = re.compile(r"(?:(?i:answer|result)\s*(?:is|:|=)+|####)\s*(\S.*?)[.\s]*$")
_PI = re.compile(r"(?<![a-zA-Z\\])pi(?![a-zA-Z])")


def math(rollout: Rollout, prompt: Prompt, *, column: Column = "answer", after: After = None) -> float | None:
    """1 or 0; None when the row's own answer cannot be read. The response's last box counts, else its last formula.

    `after`: in the column the answer stands behind this mark, e.g. `####` in GSM8K.
    """
    gold = _parsed(answer_of(prompt, column, after))
    if not gold:
        return None
    return float(matches(gold, rollout.text))


def matches(gold: list[Any], response: str) -> bool:
    """Whether a response's final answer is one of the parsed `gold`. Not symmetric: gold 1<x<2 takes (1,2), not the reverse."""
    answers = _parsed(response)
    pairs = ((g, a) for g in gold for a in answers if isinstance(g, str) == isinstance(a, str))
    return any(verify(g, a, timeout_seconds=None, raise_on_error=True) and _really_equal(g, a) for g, a in pairs)


def _parsed(text: str) -> list[Any]:
    """What math-verify makes of a final answer: expressions, and its text as the last resort; empty when there is none."""
    expression = final_expression(text)
    if expression is None:
        return []
    return list(parse(expression, parsing_timeout=None))


def final_expression(text: str) -> str | None:
    """What math-verify is to read: the last box; or the whole text, or what follows `answer is` or `####` in its last line, where that is a
    formula; else all of the text. None: the last box does not end.
    """
    text = text.replace(r"\$", "").strip()  # a currency
    boxes = list(_BOX.finditer(text))
    if boxes:
        inside = _braced(text, boxes[-1].end())
        return None if inside is None else _boxed(inside)
    said = _SAID.search(text.rpartition("\n")[2])
    formula = next((candidate for candidate in (text, said[1] if said else "") if _is_formula(candidate)), None)
    return text if formula is None else _boxed(formula)


def _boxed(formula: str) -> str:
    return "\\boxed{" + _PI.sub(r"\\pi ", formula.strip().strip("$")) + "}"


def _braced(text: str, start: int) -> str | None:
    """Text from `start` up to the brace that closes what was opened just before it; None when nothing closes it."""
    depth = 1
    for at in range(start, len(text)):
        if text[at] in "{}" and text[at - 1] != "\\":
            depth += 1 if text[at] == "{" else -1
            if depth == 0:
                return text[start:at]
    return None


def _is_formula(text: str) -> bool:
    """One line without a word; commands of LaTeX and pi are no words."""
    inside = text.strip().strip("$")
    if not inside or "\n" in inside or "$" in inside or inside.endswith("."):
        return False
    return _WORD.search(_TEXT.sub("", inside)) is None


def _really_equal(gold: Any, answer: Any) -> bool:
    """A second look at two expressions that math-verify calls equal: it compares numbers by absolute differences."""
    if isinstance(gold, str) or isinstance(answer, str):
        return True
    if isinstance(gold, sympy.Tuple | sympy.FiniteSet) and isinstance(answer, sympy.Tuple | sympy.FiniteSet):
        return all(any(_really_equal(g, a) for a in answer.args) for g in gold.args)
    gold, answer = _value(gold), _value(answer)
    if gold is None or answer is None or gold == answer:
        return True  # no numbers: sets, relations, expressions with symbols, which it compares symbolically
    return _close(gold, answer)


def _value(expression: Any) -> Any:
    """The number that an expression or an assignment `x = 5` stands for; None when it is no number."""
    if isinstance(expression, sympy.Eq) and isinstance(expression.lhs, sympy.Symbol):
        expression = expression.rhs
    if not isinstance(expression, sympy.Expr) or expression.free_symbols:
        return None
    return expression.doit()


def _close(gold: Any, answer: Any) -> bool:
    decimal = gold.has(sympy.Float) or answer.has(sympy.Float)
    bound = sympy.Float(RELATIVE if decimal else f"1e-{DIGITS - 20}", DIGITS)
    a, b = sympy.N(gold, DIGITS), sympy.N(answer, DIGITS)
    return bool(abs(a - b) <= bound * max(abs(a), abs(b)))
