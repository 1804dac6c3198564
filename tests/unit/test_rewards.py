"""Reward functions: verdicts, weighted sums, what happens when one abstains, fails or is misnamed. Processes are in the contract tests."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from drumroll.config import RewardConfig
from drumroll.errors import RunError, UserError
from drumroll.plugins import install
from drumroll.rewards import text
from drumroll.rewards.base import FunctionCounts, RewardSet
from drumroll.rewards.failure import RewardFailure, in_a_line
from drumroll.rewards.math import math as math_reward
from drumroll.types import Group, Prompt, Rollout

HERE = __file__


def prompt(**columns: Any) -> Prompt:
    return Prompt(0, "a.jsonl:1", "rendered", [1], columns)


def rollout(answer: str, index: int = 0) -> Rollout:
    return Rollout(index, [7, index], [0.0, 0.0], 0, "stop", answer)


def group(*answers: str, **columns: Any) -> Group:
    return Group(prompt(**columns), [rollout(answer, i) for i, answer in enumerate(answers)])


def here(name: str, **options: Any) -> RewardConfig:
    return RewardConfig.model_validate({"fn": f"{HERE}:{name}", "isolate": False, **options})


# What a user might write.


def length(rollout: Rollout, prompt: Prompt, *, scale: float = 1.0) -> float:
    return scale * len(rollout.text)


def abstains_on_empty(rollout: Rollout, prompt: Prompt) -> float | None:
    return float(rollout.text) if rollout.text else None


def raises(rollout: Rollout, prompt: Prompt) -> float:
    raise ZeroDivisionError("always")


def looks_up(rollout: Rollout, prompt: Prompt) -> float:
    return _looked_up(prompt.columns)


def _looked_up(columns: Mapping[str, Any]) -> float:
    return float(columns["anser"])


def talks(rollout: Rollout, prompt: Prompt) -> str:
    return "one"


def leaves(rollout: Rollout, prompt: Prompt) -> float:
    sys.exit(3)


async def slow(rollout: Rollout, prompt: Prompt) -> float:
    await asyncio.sleep(float(rollout.text))
    return 1.0


def trl_function(prompts: list[Any], completions: list[Any], answer: list[str], **columns: Any) -> list[float | None]:
    assert len(prompts) == len(completions) == len(answer) == len(columns["other"])
    words = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [None if word == "?" else float(word == right) for word, right in zip(words, answer, strict=True)]


def trl_short(completions: list[Any]) -> list[float]:
    return [0.5]


async def trl_async(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(ids[1]) for ids in completion_ids]


def verl_function(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> Any:
    return {"score": float(solution_str == ground_truth), "source": data_source}


NOT_A_FUNCTION = 3


@pytest.mark.parametrize(
    ("answer", "response", "exact", "digits"),
    [
        ("134789", "134789", 1, 1),
        ("134789", " 134789\n", 1, 1),
        ("134789", "134798", 0, 0),
        ("51", "The larger number is 51.", 0, 1),
        ("51", "51 is larger than 27", 0, 0),  # the last number counts
        ("1000", "1,000.0", 0, 1),
        ("-3", "3", 0, 0),
        ("-3", "x=-3", 0, 1),
        ("2", "3-2", 0, 1),  # a minus between numbers is none
        ("2", "1,2", 0, 1),
        ("5", "5cm", 0, 1),
        ("0.5", ".5", 0, 1),
        ("7", "none", 0, 0),
        ("abc", "abc", 1, None),
    ],
)
def test_exact_and_digits(answer: str, response: str, exact: float, digits: float | None) -> None:
    assert text.exact(rollout(response), prompt(answer=answer)) == exact
    assert text.digits(rollout(response), prompt(answer=answer)) == digits


def test_answers_behind_a_mark_and_in_another_column() -> None:
    row = prompt(solution="3 - 1 = 2\n#### 1,200")
    assert text.exact(rollout("1,200"), row, column="solution", after="####") == 1
    assert text.digits(rollout("1200"), row, column="solution", after="####") == 1


def test_format() -> None:
    pattern = r"<think>.*</think>\s*\d+"
    assert text.format(rollout("<think>a\nb</think> 12"), prompt(), pattern=pattern) == 1
    assert text.format(rollout("x <think>a</think> 12"), prompt(), pattern=pattern) == 0


# Case 65. The verdicts that math-verify 0.9 alone gets wrong are marked.
MATH = [
    (r"0.5", r"\frac{1}{2}", 1),
    (r"\frac12", "1/2", 1),
    (r"50\%", "0.5", 1),
    (r"0.5", r"50\%", 1),
    (r"1,000", "1000", 1),
    (r"1000", "1,000", 1),
    (r"13", r"\text{13}", 1),
    (r"\{1,2\}", r"\{2,1\}", 1),
    (r"(1,2)", "(2,1)", 0),
    (r"90", r"90^\circ", 1),
    (r"\frac{1}{2006!}", r"\frac{1}{2004!}", 0),  # wrong alone
    (r"1/2^{98}", r"1/2^{99}", 0),  # wrong alone
    (r"1/2^{98}", r"\frac{1}{2^{98}}", 1),
    (r"\{1, 1/2^{98}\}", r"\{1, 1/2^{99}\}", 0),  # wrong alone
    (r"0.0000001", "0.0000002", 0),  # wrong alone
    (r"x+y=3", "2x+y=3", 0),  # wrong alone without marks
    (r"x+y=3", "y+x=3", 1),
    (r"\frac{\pi}{2}", "pi/2", 1),  # wrong alone
    (r"1<x<2", "(1,2)", 1),
    (r"(1,2)", "1<x<2", 0),  # gold and answer are not swapped
    (r"[1,2)", "[1,2]", 0),
    (r"1/3", "0.333333", 1),
    (r"1/3", "0.33", 0),
    (r"x^2-1", "(x-1)(x+1)", 1),
    (r"\sqrt{8}", r"2\sqrt{2}", 1),
    (r"5", "x=5", 1),
    (r"10^{20}+1", "10^{20}", 0),
    (r"-3", "3", 0),
    (r"\$18", "18", 1),
    (r"10", r"10 \text{ cm}", 1),
]
WHOLE = [
    ("4", r"so \boxed{3} and then \boxed{4}.", 1),
    ("3", r"so \boxed{3} and then \boxed{4}.", 0),
    ("3", r"so \boxed{3} and then \boxed{4", 0),  # the last box does not end; wrong alone
    ("3", r"\boxed{\text{three} \{ } \boxed{3}", 1),
    (r"\frac{\pi}{2}", "So the answer is pi/2.", 1),  # wrong alone
    ("72", "She sold 48+24 = 72 clips altogether.\n#### 72", 1),
    ("72", "The answer is 72 dollars.", 1),
    ("72", "48 + 24 = 71", 0),
    ("5", "", 0),
    ("5", "I do not know.", 0),
]


@pytest.mark.parametrize(("gold", "answer", "verdict"), MATH)
def test_case_65_answers(gold: str, answer: str, verdict: int) -> None:
    for written in (rf"Thus \boxed{{{answer}}}.", answer, f"The answer is {answer}"):
        assert math_reward(rollout(written), prompt(answer=gold)) == verdict, written


@pytest.mark.parametrize(("gold", "response", "verdict"), WHOLE)
def test_case_65_whole_responses(gold: str, response: str, verdict: int) -> None:
    assert math_reward(rollout(response), prompt(answer=gold)) == verdict


def test_math_has_no_verdict_without_a_gold_answer() -> None:
    assert math_reward(rollout("5"), prompt(answer=r"\boxed{5")) is None
    assert math_reward(rollout("18"), prompt(answer="9 * 2 = 18\n#### 18"), after="####") == 1


def test_the_reward_is_the_weighted_sum_and_the_breakdown_says_of_what() -> None:
    groups = [group("12", "1", answer="12"), group("3", answer="3")]
    lengths = [here("length", weight=-0.1, args={"scale": 2}), here("length", weight=0)]
    with RewardSet([RewardConfig(fn="exact"), RewardConfig(fn="digits", weight=0.5), *lengths]) as rewards:
        counts = rewards.score(groups)
    names = ["exact", "digits", f"{HERE}:length", f"{HERE}:length#2"]
    rollouts = [r for g in groups for r in g.rollouts]
    assert [list(r.breakdown) for r in rollouts] == [names] * 3
    assert [list(r.breakdown.values()) for r in rollouts] == [[1, 1, 4, 2], [0, 0, 2, 1], [1, 1, 2, 1]]
    assert [r.reward for r in rollouts] == pytest.approx([1.1, -0.2, 1.3])
    assert counts.rollouts == 3 and counts.without_verdict == 0 and counts.functions["exact"] == FunctionCounts(3, 0, 0, 0)


def test_no_verdict_is_none_and_counted_never_0() -> None:
    groups = [group("1", "", "3", answer="1")]
    with RewardSet([here("abstains_on_empty"), RewardConfig(fn="exact")]) as rewards:
        counts = rewards.score(groups)
    assert [r.reward for r in groups[0].rollouts] == [2.0, None, 3.0]
    assert groups[0].rollouts[1].breakdown == {f"{HERE}:abstains_on_empty": None, "exact": 0.0}
    assert counts.without_verdict == 1
    assert counts.functions[f"{HERE}:abstains_on_empty"] == FunctionCounts(verdicts=2, abstained=1, timed_out=0, failed=0)


def test_a_function_without_weight_is_watched_only() -> None:
    groups = [group("", answer="")]
    with RewardSet([here("abstains_on_empty", weight=0), RewardConfig(fn="exact")]) as rewards:
        assert rewards.score(groups).without_verdict == 0
    assert groups[0].rollouts[0].reward == 1.0


def test_a_failure_on_some_is_counted_and_on_all_ends_the_run(caplog: pytest.LogCaptureFixture) -> None:
    some = [group("1", "one", "nan", answer="1")]
    with RewardSet([here("abstains_on_empty")]) as rewards:
        counts = rewards.score(some)
        assert [r.reward for r in some[0].rollouts] == [1.0, None, None]
        assert counts.functions[f"{HERE}:abstains_on_empty"] == FunctionCounts(1, 0, 0, failed=2)
        assert "failed on 2 responses" in caplog.text and "could not convert string to float: 'one'" in caplog.text
        assert "on response 1 to " in caplog.text
    with RewardSet([here("leaves")]) as rewards, pytest.raises(RewardFailure, match=r":leaves failed on all 2 responses.*SystemExit: 3 at"):
        rewards.score([group("1", "2")])


@pytest.mark.parametrize("isolate", [True, False])
def test_a_function_that_raises_is_named_with_line_error_and_sample(isolate: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message has no traceback; the one that is kept begins in the user's file, and leaves out what calls it."""
    monkeypatch.chdir(Path(__file__).parents[2])
    with RewardSet([here("looks_up", isolate=isolate)], workers=1) as rewards, pytest.raises(RewardFailure) as caught:
        rewards.score([group("x" * 100, "2", answer="1")])
    line = Path(__file__).read_text().splitlines().index('    return float(columns["anser"])') + 1
    name, row = f"{HERE}:looks_up", group("").prompt.prompt_id
    assert str(caught.value) == (
        f"reward {name} failed on all 2 responses; the first: KeyError: 'anser' at tests/unit/test_rewards.py:{line}, in _looked_up; "
        f"on response 0 to {row}, '{'x' * 80}...'; the row's columns: answer"
    )
    assert caught.value.trace.startswith(f'Traceback (most recent call last):\n  File "{Path(__file__)}"')
    assert caught.value.trace.endswith("KeyError: 'anser'\n")
    assert "call.py" not in caught.value.trace


def test_what_is_said_of_an_error_is_one_line_without_its_notes() -> None:
    error = ValueError("two\n  lines")
    error.add_note("a note")
    assert in_a_line(error) == "ValueError: two lines"
    assert in_a_line(SyntaxError("wrong", ("file.py", 3, 1, "x", 3, 2))) == "SyntaxError: wrong"


def test_a_value_that_is_no_number_is_said_too() -> None:
    words = "could not convert string to float: 'one'"
    with RewardSet([here("talks", isolate=False)]) as rewards, pytest.raises(RewardFailure, match=words):
        rewards.score([group("1")])


def test_a_batch_in_which_every_call_is_over_its_limit_ends_the_run() -> None:
    over = r":slow gave no verdict on any response: all 3 took it over its limit of 0\.05 s: raise timeout_s of this reward"
    with RewardSet([here("slow", timeout_s=0.05), RewardConfig(fn="exact")]) as rewards:
        with pytest.raises(RunError, match=over):
            rewards.score([group("30", "30", answer="1"), group("30", answer="1")])
        assert rewards.score([group("30", "0", answer="1")]).without_verdict == 1  # one verdict is enough to go on
        mixed = r":slow failed on 2 responses \(the other 1 took it over its limit of 0\.05 s.*\); the first: ValueError: could not convert"
        with pytest.raises(RunError, match=mixed):
            rewards.score([group("x", "30", "y", answer="1")])


def test_a_function_that_abstains_on_all_is_not_broken() -> None:
    with RewardSet([here("abstains_on_empty")]) as rewards:
        assert rewards.score([group("", "")]).without_verdict == 2


def test_nothing_to_score_is_no_failure() -> None:
    with RewardSet([here("raises"), here("slow")]) as rewards:
        assert rewards.score([]).rollouts == 0


def test_async_functions_run_at_once_and_under_a_limit() -> None:
    groups = [group(*["0.2"] * 50), group("30", "0")]
    begin = time.monotonic()
    with RewardSet([here("slow", timeout_s=1.0)]) as rewards:
        counts = rewards.score(groups)
        rewards.score([group("0")])  # the loop is still there
    assert time.monotonic() - begin < 5  # one after the other it would take 10 s
    assert [r.reward for r in groups[1].rollouts] == [None, 1.0]
    assert counts.functions[f"{HERE}:slow"] == FunctionCounts(51, 0, timed_out=1, failed=0)
    assert not [t for t in threading.enumerate() if t.name == "drumroll-rewards"]


@pytest.mark.parametrize("conversation", [False, True])
def test_trl_functions(conversation: bool) -> None:
    ask: Any = [{"role": "user", "content": "ask"}] if conversation else "ask"
    groups = [group("a", "b", "?", prompt=ask, answer="a", other=1), group("b", prompt=ask, answer="b", other=2)]
    with RewardSet([RewardConfig(fn=f"trl:{HERE}:trl_function", isolate=False)]) as rewards:
        rewards.score(groups)
    assert [r.reward for g in groups for r in g.rollouts] == [1.0, 0.0, None, 1.0]


def test_trl_async_and_wrong_number_of_values() -> None:
    groups = [group("a", "b")]
    with RewardSet([RewardConfig(fn=f"trl:{HERE}:trl_async")]) as rewards:
        rewards.score(groups)
    assert [r.reward for r in groups[0].rollouts] == [0.0, 1.0]
    short = RewardConfig(fn=f"trl:{HERE}:trl_short", isolate=False)
    with RewardSet([short]) as rewards, pytest.raises(RunError, match="expected 2 rewards, one a completion, got 1"):
        rewards.score(groups)


@pytest.mark.parametrize("columns", [{"reward_model": {"ground_truth": "4"}, "answer": "no"}, {"ground_truth": "4"}, {"answer": "4"}])
def test_verl_functions(columns: dict[str, Any]) -> None:
    groups = [group("4", "5", data_source="gsm8k", **columns)]
    with RewardSet([RewardConfig(fn=f"verl:{HERE}:verl_function", isolate=False)]) as rewards:
        rewards.score(groups)
    assert [r.reward for r in groups[0].rollouts] == [1.0, 0.0]


def test_rewards_say_which_columns_they_read() -> None:
    math = RewardConfig(fn="math", args={"column": "solution"})
    with RewardSet([RewardConfig(fn="exact"), math, here("length"), RewardConfig(fn="digits")], workers=0) as rewards:
        assert rewards.columns == ("answer", "solution")


@pytest.mark.parametrize(
    ("fn", "args", "message"),
    [
        ("exakt", {}, "expected exact, digits, format, math, reasoning_gym, or module:name, file.py:name; did you mean 'exact'?"),
        ("exact", {"colum": "a"}, "got an unexpected keyword argument 'colum'"),
        ("format", {}, "missing a required argument: 'pattern'"),
        ("format", {"pattern": "("}, "pattern '(' is not a regular expression"),
        ("trl:exact", {}, "expected trl:module:name or trl:file.py:name"),
        ("no_such_module:f", {}, "no module 'no_such_module'"),
        ("none.py:f", {}, "none.py: no such file"),
        (f"{HERE}:lenght", {}, "defines no 'lenght'; did you mean 'length'?"),
        (f"{HERE}:NOT_A_FUNCTION", {}, "is a int, not a function"),
        (f"{HERE}:verl_function", {}, "cannot be called with (rollout, prompt)"),
    ],
)
def test_misnamed_functions_are_found_before_the_first_step(fn: str, args: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        RewardSet([RewardConfig(fn=fn, args=args)], workers=0)
    assert message in str(caught.value)


def test_reasoning_gym_needs_its_extra() -> None:
    try:
        import reasoning_gym
    except ImportError:
        with pytest.raises(UserError, match=re.escape(install("reasoning-gym"))):
            RewardSet([RewardConfig(fn="reasoning_gym")], workers=0)
        return
    from drumroll.rewards.gym import reasoning_gym as gym_reward

    entry = reasoning_gym.create_dataset("countdown", seed=0, size=1)[0]
    row = prompt(prompt=entry["question"], answer=entry["answer"], metadata=entry["metadata"])
    assert gym_reward(rollout(entry["answer"]), row) == 1.0
    assert gym_reward(rollout("so: " + entry["answer"]), row, after="so:") == 1.0
    assert gym_reward(rollout(entry["answer"]), row, after="so:") == 0.0


def test_a_worker_starts_without_torch() -> None:
    code = "import sys, drumroll.rewards.worker, drumroll.rewards.math; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    assert done.stdout.strip() == "False"


def test_files_of_user_functions_are_found_by_path(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def always(rollout, prompt):\n    return 1\n")
    groups = [group("a")]
    with RewardSet([RewardConfig(fn=f"{file}:always", isolate=False)]) as rewards:
        rewards.score(groups)
    assert groups[0].rollouts[0].reward == 1.0
