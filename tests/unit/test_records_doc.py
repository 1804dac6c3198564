"""docs/records.md documents exactly the fields that are written."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from drumroll.observe import alarms
from drumroll.observe.checks import CheckRow
from drumroll.observe.metrics import DigestRecord, EvalRecord, EventRecord, RolloutRecord, StepRecord
from drumroll.observe.summary import Summary

DOC = (Path(__file__).parents[2] / "docs" / "records.md").read_text(encoding="utf-8")


def documented(section: str) -> list[str]:
    """First column of the table below a heading."""
    text = DOC.split(f"\n## {section}\n")[1].split("\n## ")[0]
    return re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("section", "record"),
    [
        ("metrics.jsonl", StepRecord),
        ("evals.jsonl", EvalRecord),
        ("rollouts.jsonl", RolloutRecord),
        ("digests.jsonl", DigestRecord),
        ("events.jsonl", EventRecord),
        ("summary.json", Summary),
        ("Check rows", CheckRow),
    ],
)
def test_documented_fields_are_the_written_ones_in_their_order(section: str, record: type) -> None:
    assert documented(section) == [f.name for f in fields(record)]


def test_documented_alarms_are_the_ones_that_exist() -> None:
    assert documented("Alarms") == [*(check.__name__ for check in alarms.CHECKS), alarms.skipped_steps.__name__]
