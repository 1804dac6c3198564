"""A run directory, read back: also that of a run that crashed or is still going."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from drumroll.errors import UserError
from drumroll.observe import jsonl
from drumroll.observe.metrics import DigestRecord, EvalRecord, EventRecord, RolloutRecord, StepRecord
from drumroll.observe.summary import Summary, read_summary

R = TypeVar("R", StepRecord, EvalRecord, DigestRecord)

CONFIG_FILE = "config.yaml"  # the resolved config
METRICS_FILE = "metrics.jsonl"
EVALS_FILE = "evals.jsonl"
ROLLOUTS_FILE = "rollouts.jsonl"
DIGESTS_FILE = "digests.jsonl"
RECORD_FILES = (METRICS_FILE, EVALS_FILE, ROLLOUTS_FILE, DIGESTS_FILE)  # appended to
EVENTS_FILE = "events.jsonl"  # what happened stays: a resumed run does not cut it back
STACKS_FILE = "stacks.txt"  # of all processes, when a rank fell silent
SUMMARY_FILE = "summary.json"
REPORT_FILE = "report.html"
PICTURE_FILE = "reward.png"
TENSORBOARD_DIR = "tensorboard"


@dataclass(slots=True, frozen=True)
class Run:
    """What a run left behind. `summary` is None for a run that did not come to its end."""

    path: Path
    config: str  # YAML; empty when there is none
    steps: list[StepRecord]
    evals: list[EvalRecord]
    summary: Summary | None

    @property
    def rl(self) -> list[StepRecord]:
        return [record for record in self.steps if record.phase == "rl"]

    @property
    def sft(self) -> list[StepRecord]:
        return [record for record in self.steps if record.phase == "sft"]


def read_run(run_dir: Path) -> Run:
    """Raises UserError when there is nothing to read, or naming file and line of a damaged record."""
    config = run_dir / CONFIG_FILE
    steps = read_steps(run_dir)
    evals = read_evals(run_dir)
    if not steps and not evals:
        raise UserError(f"{run_dir}: no records: expected the directory of a run, with {METRICS_FILE} in it")
    text = config.read_text(encoding="utf-8") if config.is_file() else ""
    return Run(path=run_dir, config=text, steps=steps, evals=evals, summary=read_summary(run_dir / SUMMARY_FILE))


def read_steps(run_dir: Path) -> list[StepRecord]:
    """Step records in order, SFT first. A resumed run goes back some steps: what it recorded then replaces what was there."""
    path = run_dir / METRICS_FILE
    stacks: dict[str, list[StepRecord]] = {"sft": [], "rl": []}
    for row in jsonl.read(path):
        record = jsonl.decode(StepRecord, row, str(path))
        _rewind(stacks[record.phase], record)
    return stacks["sft"] + stacks["rl"]


def read_evals(run_dir: Path) -> list[EvalRecord]:
    """Evaluations in order of their step; like `read_steps` for a resumed run."""
    path = run_dir / EVALS_FILE
    stack: list[EvalRecord] = []
    for row in jsonl.read(path):
        _rewind(stack, jsonl.decode(EvalRecord, row, str(path)))
    return stack


def read_digests(run_dir: Path) -> list[DigestRecord]:
    """Digests of the weights in order of their step; like `read_steps` for a resumed run."""
    path = run_dir / DIGESTS_FILE
    stack: list[DigestRecord] = []
    for row in jsonl.read(path):
        _rewind(stack, jsonl.decode(DigestRecord, row, str(path)))
    return stack


def read_events(run_dir: Path) -> list[EventRecord]:
    """In the order in which they happened."""
    path = run_dir / EVENTS_FILE
    return [jsonl.decode(EventRecord, row, str(path)) for row in jsonl.read(path)]


def _rewind(stack: list[R], record: R) -> None:
    while stack and stack[-1].step >= record.step:
        stack.pop()
    stack.append(record)


def read_rollouts(run_dir: Path) -> Iterator[RolloutRecord]:
    """Rollouts in the order written, read as they are asked for: the file of a long run does not fit in memory."""
    path = run_dir / ROLLOUTS_FILE
    for row in jsonl.read(path):
        yield jsonl.decode(RolloutRecord, row, str(path))
