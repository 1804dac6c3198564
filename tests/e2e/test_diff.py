"""Two real runs that are the same, and one that is not: `drumroll diff` tells them apart by step and tensor."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from drumroll.observe.run import read_digests
from tests.e2e.test_train import RECIPE, SMALL, drumroll

pytestmark = pytest.mark.timeout(400)


def test_diff_names_where_runs_part(tmp_path: Path) -> None:
    """On two ranks of another backend the weights before the first step are the same, bit for bit; after it they are not."""
    changes = {
        "one": ["backend.name=single", "runtime.ranks=1"],
        "same": ["backend.name=single", "runtime.ranks=1"],
        "other": ["backend.name=fsdp2", "runtime.ranks=2"],
    }
    for name, overrides in changes.items():
        drumroll("train", RECIPE, *SMALL, *overrides, "record.digests=2", "eval.rows=4", f"run_dir={tmp_path / name}")
    one, same, other = (str(tmp_path / name) for name in changes)
    digests = read_digests(Path(one))
    assert [record.step for record in digests] == [0, 2, 3]  # every second step, and the last
    names = set(digests[0].digests)
    assert names == set(digests[-1].digests)
    assert "model.embed_tokens.weight" in names
    assert digests[0].digests != digests[-1].digests
    assert "weights: equal" in drumroll("diff", one, same)
    text = drumroll("diff", one, other, code=1)
    assert "weights: they differ at step 2, equal up to step 0" in text
    assert "numbers: they differ at rl step 1" in text
    assert json.loads((Path(other) / "summary.json").read_text())["status"] == "completed"
    (Path(other) / "digests.jsonl").unlink()
    assert "train it with record.digests=1" in drumroll("diff", one, other, code=1)
