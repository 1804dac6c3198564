"""What counts as the same numbers when a recorded step is trained again."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

from drumroll import config, plugins
from drumroll.observe.metrics import StepRecord, UpdateFacts
from drumroll.pipelines.replay import compare
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


def test_a_step_that_trained_on_nothing_is_the_same_again() -> None:
    record = replace(healthy_record(3), grad_norm=math.nan, loss=0.0, loss_abs=0.0, logprob_mean=0.0, entropy=None, advantage_abs_mean=None)
    assert all(verdicts(record).values())
    assert not verdicts(record, grad_norm=1.0)["grad_norm"]
