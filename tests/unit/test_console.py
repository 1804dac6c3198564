"""What a user sees while a run goes on."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from drumroll.observe.alarms import alarms
from drumroll.observe.console import LiveConsole, Pace, PlainConsole, console_sink, duration, live_view, sparkline, step_line
from drumroll.observe.metrics import eval_record
from tests.records import group, healthy_history, healthy_record, sft_record

TOTALS = {"sft": 250, "rl": 60}


def console(terminal: bool, width: int = 110) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=terminal, width=width, color_system=None), out


def test_the_output_decides_the_view() -> None:
    plain = console_sink("x", TOTALS, console(False)[0])
    live = console_sink("x", TOTALS, console(True)[0])
    live.close()
    assert isinstance(plain, PlainConsole) and isinstance(live, LiveConsole)


def test_one_plain_line_a_step_without_escape_codes() -> None:
    target, out = console(False, width=40)  # narrower than the line: it must not be wrapped
    sink = PlainConsole(TOTALS, target)
    for record in [sft_record(1), *healthy_history(3)]:
        sink.step(record, [])
    sink.evaluation(eval_record(step=3, version=3, groups=[group([1.0]), group([0.5], group_id=1)], seconds=2.0))
    sink.note("[checkpoint] written")
    lines = out.getvalue().splitlines()
    assert len(lines) == 6 and "\x1b" not in out.getvalue()
    assert lines[0].startswith("sft 1/250  loss 2 ")
    assert lines[1].startswith("rl 1/60  reward 0.4")
    times = "2.8s (generate 1.0 reward 0.1 train 1.5 sync 0.1)"
    for part in ("len 7.", "cut 2%", "same ", "entropy 0.", "gap 2.0e-07", "grad 0.5", "lr 3e-05", times):
        assert part in lines[1]
    assert lines[3].endswith("eta 2m40s")  # 57 steps of 2.8 s
    assert lines[4].startswith("eval after step 3: score 0.750 on 2 rows")
    assert lines[5] == "[checkpoint] written"


def test_an_alarm_is_printed_when_it_comes_on_only() -> None:
    target, out = console(False)
    sink = PlainConsole(TOTALS, target)
    history = [replace(r, skipped_steps=1 if r.step == 2 else 0) for r in healthy_history(12)]
    for step in range(1, 13):
        sink.step(history[step - 1], alarms(history[:step]))
    assert out.getvalue().count("ALARM skipped_steps: 1 optimizer steps were skipped") == 1
    assert "Likely: " in out.getvalue() and "Try: " in out.getvalue()


def test_what_is_unusual_is_said() -> None:
    line = step_line(replace(healthy_record(1), abstentions=3, skipped_steps=1, kl=0.0123, grad_norm=float("nan")), 60)
    assert "no verdict 3" in line and "SKIPPED 1" in line and "kl 0.012" in line and "grad nan" in line
    critics = {"value_loss": 0.125, "critic_grad_norm": 1.5, "critic_lr": 5e-4}
    alone = step_line(replace(healthy_record(1), optimizer_steps=0, grad_norm=float("nan"), **critics), 60)
    assert "critic alone: loss 0.125 grad 1.5 lr 0.0005" in alone and "nan" not in alone
    bare = step_line(replace(healthy_record(1), reward_mean=None, response_tokens_mean=None, response_tokens_max=None, entropy=None), 60)
    assert "reward -" in bare and "entropy" not in bare


def test_the_live_view_shows_everything_that_matters() -> None:
    target, out = console(True)
    history = healthy_history(30)
    sick = [replace(r, truncated_share=0.5) for r in history]
    evals = [eval_record(step=s, version=s, groups=[group([0.25])], seconds=1.0) for s in (0, 20)]
    target.print(live_view("quickstart", sick, evals, alarms(sick), 60, 84.0))
    text = out.getvalue()
    for part in ("drumroll quickstart", "rl step 30/60", "eta 1m24s", "0.59 GiB", "generate 1.00s", "train 1.50s", "0.250 @20"):
        assert part in text
    assert "▲ truncation: 50%" in text
    assert " 23 " in text and " 22 " not in text, "the last eight steps"
    for name in ("reward", "length", "entropy", "kl", "gap", "grad", "seconds"):
        assert name in text


def test_the_live_console_draws_and_leaves_the_terminal_as_it_was() -> None:
    target, out = console(True)
    sink = LiveConsole("quickstart", TOTALS, target)
    sink.step(sft_record(1), [])
    sink.evaluation(eval_record(step=0, version=0, groups=[group([1.0])], seconds=1.0))
    sink.step(healthy_record(1), [])
    sink.note("checkpoint written")
    sink.close()
    text = out.getvalue()
    assert "eval after step 0: score 1.000" in text and "checkpoint written" in text and "rl step 1/60" in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1, "the cursor was hidden and shown again"


def test_the_remaining_time_follows_the_pace_of_the_phase() -> None:
    pace = Pace({"sft": 10, "rl": 60})
    assert pace.remaining() == 0.0
    pace.add(sft_record(4))
    assert pace.remaining() == pytest.approx(0.6)
    for record in healthy_history(60):
        pace.add(record)
        assert pace.remaining() == pytest.approx(2.8 * (60 - record.step))


@pytest.mark.parametrize(("seconds", "text"), [(0, "0s"), (59.4, "59s"), (59.6, "1m00s"), (185, "3m05s"), (7440, "2h04m")])
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_sparkline() -> None:
    assert sparkline([]) == "" and sparkline([1.0, 1.0]) == "▁▁" and sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert len(sparkline([float(i) for i in range(1000)])) == 60
