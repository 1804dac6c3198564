"""What counts as the same numbers when a recorded step is trained again."""

from __future__ import annotations

import io
import math
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from rich.console import Console

from drumroll import config, plugins
from drumroll.algorithms.kl import k3
from drumroll.observe.metrics import StepRecord, UpdateFacts
from drumroll.pipelines.replay import Replayed, compare, table
from tests.records import healthy_record

CONFIG = config.parse(
    {
        "pipeline": "sft",
        "max_steps": 1,
        "run_dir": "r",
        "model": {"path": "m"},
        "data": {"train": {"task": "sort"}},
        "backend": {"name": plugins.SPECIFICATION_BACKEND},
    }
)


def verdicts(record: StepRecord, **changes: Any) -> dict[str, bool]:
    again = UpdateFacts(**{f.name: changes.get(f.name, getattr(record, f.name)) for f in fields(UpdateFacts)})
    return {row.check: row.passed for row in compare(record, again, CONFIG)}


def test_a_relative_difference_of_1e_5_is_the_bound() -> None:
    record = healthy_record(3)
    assert all(verdicts(record, grad_norm=record.grad_norm * (1 + 9e-6)).values())
    found = verdicts(record, grad_norm=record.grad_norm * (1 + 1.1e-5))
    assert [name for name, passed in found.items() if not passed] == ["grad_norm"]


def test_a_small_kl_is_judged_by_the_log_ratios_that_it_is_made_of() -> None:
    record = replace(healthy_record(3), kl=2e-6)  # log-ratios of about 2e-3
    assert verdicts(record, kl=2e-6 + 2e-3 * 9e-6)["kl"]
    assert not verdicts(record, kl=2e-6 + 2e-3 * 1.1e-5)["kl"]
    assert not verdicts(record, kl=0.0)["kl"]
    assert "kl" not in verdicts(healthy_record(3))


@pytest.mark.parametrize("spread", [1e-4, 0.1, 1.3, 4.0])
def test_log_probs_within_the_bound_keep_the_kl_within_its_bound(spread: float) -> None:
    """[Note: how exact a KL is]: whatever the log-ratios, an error of 1e-5 in each of them passes, and one of 3e-5 in most does not."""
    reference = spread * torch.randn(4000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logprobs = torch.zeros_like(reference)
    record = replace(healthy_record(3), kl=float(k3(logprobs, reference).mean()))
    worst = -torch.sign(torch.expm1(reference))  # the direction in which every token's estimate grows
    assert verdicts(record, kl=float(k3(logprobs + 0.99e-5 * worst, reference).mean()))["kl"]
    assert not verdicts(record, kl=float(k3(logprobs + 3e-5 * worst, reference).mean()))["kl"]


def test_a_kl_of_zero_is_the_same_again() -> None:
    record = replace(healthy_record(3), kl=0.0)
    assert verdicts(record, kl=0.0)["kl"]


def test_both_numbers_stand_whole_in_80_columns() -> None:
    record = replace(healthy_record(3), kl=1.23456789e-13, loss=-1.23456789e-12, grad_norm=123456.789, logprob_mean=-1.23456789e-05)
    again = UpdateFacts(**{f.name: getattr(record, f.name) for f in fields(UpdateFacts)})
    rows = compare(record, replace(again, loss=-2.23456789e-12), CONFIG)
    out = io.StringIO()
    Console(file=out, width=80, color_system=None).print(table(rows))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert [word for word in ("recorded", "replayed") if word not in lines[1]] == []
    for row in rows:
        assert any(line.split()[:3] == [row.check, row.options["recorded"], row.options["replayed"]] for line in lines), row


def test_it_says_how_many_updates_were_redone_and_from_where() -> None:
    facts = UpdateFacts(**{f.name: getattr(healthy_record(3), f.name) for f in fields(UpdateFacts)})
    assert Replayed(facts, redone=12, start=0).way().startswith("12 updates redone since the model that the run started with; rounding")
    assert Replayed(facts, redone=1, start=4).way().startswith("1 update redone since the checkpoint of step 4; rounding")
    assert Replayed(facts, redone=0, start=4).way() == "0 updates redone: the step follows the checkpoint of step 4"


def test_a_step_that_trained_on_nothing_is_the_same_again() -> None:
    record = replace(healthy_record(3), grad_norm=math.nan, loss=0.0, loss_abs=0.0, logprob_mean=0.0, entropy=None, advantage_abs_mean=None)
    assert all(verdicts(record).values())
    assert not verdicts(record, grad_norm=1.0)["grad_norm"]
