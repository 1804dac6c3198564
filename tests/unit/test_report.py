"""The report: self-contained, from the run directory alone, whatever state the run ended in."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from drumroll.errors import UserError
from drumroll.observe.charts import Chart, Series, detail_charts, main_chart, smoothed
from drumroll.observe.metrics import RolloutRecord, eval_record, rollout_records
from drumroll.observe.recorder import Recorder
from drumroll.observe.report import write_report
from drumroll.observe.run import read_run
from drumroll.observe.samples import compare
from drumroll.observe.summary import write_summary
from drumroll.observe.svg import nice_ticks, render, short
from tests.records import finished, group, healthy_history, sft_record

CONFIG = "model: {path: builtin:llama-0.8m}\nalgorithm: {name: grpo, group_size: 8}\nbackend: {name: fsdp2}\nseed: 7\n"


class Checker(HTMLParser):
    """Every element is closed, and nothing is fetched."""

    VOID = frozenset({"meta", "br", "i/"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.fetched += [f"{tag} {name}" for name, _ in attrs if name in ("src", "href", "srcset", "data")]
        if tag in ("script", "link", "iframe"):
            self.fetched.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_data(self, data: str) -> None:
        self.text += data


def check(path: Path) -> str:
    """The text of a page that is well-formed and self-contained."""
    page = path.read_text(encoding="utf-8")
    checker = Checker()
    checker.feed(page)
    checker.close()
    assert checker.open == [] and checker.fetched == []
    assert "http:" not in page and "https:" not in page and "url(" not in page and "@import" not in page
    for image in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        ElementTree.fromstring(image)
        assert "nan" not in re.sub(r"<title>.*?</title>", "", image).replace("nance", "")
    return checker.text


def record_run(run_dir: Path, steps: int = 6) -> None:
    (run_dir / "config.yaml").write_text(CONFIG)
    with Recorder(run_dir) as recorder:
        for record in [sft_record(1), sft_record(2), *healthy_history(steps)]:
            recorder.step(record)
        for step, texts in ((0, ["1<b>2", "21"]), (steps, ["12", "21"])):
            groups = [group([float(text == "12")], group_id=10 * step + i, text=text) for i, text in enumerate(texts)]
            for i, one in enumerate(groups):
                one.prompt = replace(one.prompt, prompt_id=f"row {i}", text=f"sort {i} & \ud83d")
            recorder.evaluation(eval_record(step=step, version=step, groups=groups, seconds=1.0))
            recorder.rollouts(rollout_records(groups, phase="eval", step=step))


def test_report_of_a_whole_run(tmp_path: Path) -> None:
    run_dir = tmp_path / "my <run>"
    run_dir.mkdir()
    record_run(run_dir)
    write_summary(run_dir / "summary.json", finished())
    path = write_report(run_dir)
    text = check(path)
    assert path == run_dir / "report.html"
    assert "my <run>" in text and "completed" in text
    assert "After a supervised warm-up of 2 steps, GRPO trained 6 steps on 3,072 sampled responses." in text
    assert "went from 0.000 to 0.500" in text and "0.00 → 0.50" in text and "3/3" in text
    for title in ("Reward", "Entropy", "Response length", "Sampler against trainer", "Gradient norm", "Where the time goes"):
        assert title in text
    assert "Warm-up loss" in text
    assert "1 got a higher reward, 1 the same, 0 a lower one" in text and "1<b>2" in text and "sort 0 & \\ud83d" in text
    assert "builtin:llama-0.8m" in text and "fsdp2" in text and f"{6:016x}" in text
    png = (run_dir / "reward.png").read_bytes()
    assert png[:8] == b"\x89PNG\r\n\x1a\n" and (int.from_bytes(png[16:20], "big"), int.from_bytes(png[20:24], "big")) == (1600, 900)
    assert not list(run_dir.glob("*.partial"))


def test_report_of_a_run_that_was_killed(tmp_path: Path) -> None:
    record_run(tmp_path)
    for name in ("metrics.jsonl", "rollouts.jsonl", "evals.jsonl"):
        path = tmp_path / name
        path.write_bytes(path.read_bytes()[:-20])  # torn in the middle of the last line
    (tmp_path / "config.yaml").write_text(CONFIG + "data: {train")
    text = check(write_report(tmp_path))
    assert "the run crashed or is still going" in text and "trained 5 steps" in text


def test_report_of_one_step_and_nothing_else(tmp_path: Path) -> None:
    with Recorder(tmp_path) as recorder:
        recorder.step(replace(healthy_history(1)[0], reward_mean=None, grad_norm=float("nan"), entropy=float("inf")))
    assert "RL trained 1 steps" in check(write_report(tmp_path))


def test_report_of_an_sft_run(tmp_path: Path) -> None:
    with Recorder(tmp_path) as recorder:
        for step in range(1, 5):
            recorder.step(sft_record(step))
    assert "Supervised training ran 4 steps; the loss went from 2.000 to 0.500." in check(write_report(tmp_path))


def test_report_of_an_evaluation_alone(tmp_path: Path) -> None:
    with Recorder(tmp_path) as recorder:
        recorder.evaluation(eval_record(step=0, version=0, groups=[group([1.0])], seconds=1.0))
        recorder.rollouts(rollout_records([group([1.0])], phase="eval", step=0))
    text = check(write_report(tmp_path))
    assert "No step was finished" in text and "no later evaluation was recorded" in text


def test_report_names_alarms_that_are_on_and_that_were(tmp_path: Path) -> None:
    with Recorder(tmp_path) as recorder:
        for record in healthy_history(20):
            spoiled = replace(record, skipped_steps=int(record.step == 3), truncated_share=0.9 if record.step > 10 else 0.0)
            recorder.step(spoiled)
    text = check(write_report(tmp_path))
    assert "truncation: 90% of the responses were cut" in text and "skipped steps: was on in 5 steps, from 3 to 7" in text


def test_an_error_is_told(tmp_path: Path) -> None:
    record_run(tmp_path)
    write_summary(tmp_path / "summary.json", finished(status="failed", error="rank 1: out of memory"))
    text = check(write_report(tmp_path))
    assert "failed" in text and "ended early after 6 steps: rank 1: out of memory" in text


def test_an_empty_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no records"):
        write_report(tmp_path)
    assert list(tmp_path.iterdir()) == []


def rollout(step: int, prompt: int, reward: float | None, phase: str = "eval") -> RolloutRecord:
    one = group([reward], group_id=100 * step + prompt)
    one.prompt = replace(one.prompt, prompt_id=f"row {prompt}")
    return rollout_records([one], phase="eval" if phase == "eval" else "train", step=step)[0]


def test_before_and_after_are_the_first_and_the_last_evaluation() -> None:
    rows = [rollout(step, prompt, float(step > prompt)) for step in (0, 5, 9) for prompt in range(12)]
    found = compare(iter([rollout(1, 0, 1.0, "train"), *rows]))
    assert found is not None
    assert (found.phase, found.first_step, found.last_step) == ("eval", 0, 9)
    assert found.counts == {"better": 9, "same": 3, "worse": 0}
    better, same = [(f"row {i}", "better") for i in range(4)], [("row 9", "same"), ("row 10", "same")]
    assert [(p.before.prompt_id, p.change) for p in found.shown] == better + same
    assert all(p.before.prompt_id == p.after.prompt_id and (p.before.step, p.after.step) == (0, 9) for p in found.shown)


def test_without_evaluations_training_samples_are_shown() -> None:
    found = compare(iter([rollout(step, step, None, "train") for step in (1, 2, 3)]))
    assert found is not None and (found.phase, found.first_step, found.last_step) == ("train", 1, 3)
    assert compare(iter([])) is None


def test_main_chart_holds_the_recorded_numbers(tmp_path: Path) -> None:
    record_run(tmp_path)
    run = read_run(tmp_path)
    reward, score = main_chart(run).series
    assert reward.ys == [record.reward_mean for record in run.rl] and reward.xs == [1, 2, 3, 4, 5, 6]
    assert (score.xs, score.ys) == ([0, 6], [0.0, 0.5])
    times = next(chart for chart in detail_charts(run) if chart.title == "Where the time goes")
    assert sum(series.ys[0] for series in times.series) == pytest.approx(2.8), "the stack ends at the whole step's seconds"


def test_a_long_run_is_drawn_as_means(tmp_path: Path) -> None:
    with Recorder(tmp_path) as recorder:
        for record in healthy_history(1000):
            recorder.step(record)
    run = read_run(tmp_path)
    series = main_chart(run).series[0]
    assert len(series.xs) == 400
    assert series.ys[0] == pytest.approx(sum(r.reward_mean or 0 for r in run.rl[:2]) / 2)


def test_a_hole_breaks_the_line_and_lies_at_the_right_pixels() -> None:
    chart = Chart("t", "", [Series("s", [0, 1, 2, 3], [0.0, 1.0, float("nan"), 1.0], "#000000")])
    path = re.search(r'<path d="([^"]*)"', render(chart, 166, 144))
    assert path is not None and path.group(1) == "M52.0 110.0 L85.3 10.0 M152.0 10.0"  # plot: x 52..152, y 110..10


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0, 7.3, [0, 2, 4, 6, 8]),
        (-0.5, 1.5, [-0.5, 0, 0.5, 1, 1.5]),
        (0, 3e-7, [0, 1e-7, 2e-7, 3e-7]),
    ],
)
def test_nice_ticks(low: float, high: float, ticks: list[float]) -> None:
    assert nice_ticks(low, high) == pytest.approx(ticks, abs=1e-12)


def test_tick_labels_and_smoothing() -> None:
    assert [short(v) for v in (0, 0.25, 1200, 2e-6, 1.5e-7, 3e5)] == ["0", "0.25", "1200", "2e-6", "1.5e-7", "3e5"]
    assert smoothed([1.0, 1.0, 1.0]) == pytest.approx([1.0, 1.0, 1.0])
    assert smoothed([0.0, 1.0])[1] == pytest.approx(1 / 1.7)
