"""Where a run writes: what cannot be written to is bad input, said before anything starts; a batch of nothing is a batch."""

from __future__ import annotations

from pathlib import Path

import pytest

from drumroll.errors import RunError, UserError
from drumroll.observe import batches
from drumroll.pipelines.session import _make_room


@pytest.mark.parametrize("where", ["/proc/no-such", "/dev/null/x"])
def test_a_directory_that_cannot_be_made_is_bad_input(where: str) -> None:
    with pytest.raises(UserError, match=f"run_dir: cannot write into {where}"):
        _make_room(Path(where))


def test_a_batch_that_cannot_be_written_says_what_to_do() -> None:
    with pytest.raises(RunError, match=r"cannot write the batch.*record\.batches=false"):
        batches.write(Path("/proc/no-such/step.npz"), [])


def test_a_batch_of_nothing_comes_back_as_nothing(tmp_path: Path) -> None:
    batches.write(tmp_path / "b.npz", [])
    assert batches.read(tmp_path / "b.npz") == []
