"""Foreseen beside measured, and when that is a warning."""

import pytest

from drumroll.observe.foreseen import Foreseen, beside

MIB = 1 << 20


@pytest.mark.parametrize(
    ("state", "peak", "process", "warned"),
    [
        (100, 1000, 0, []),
        (114, 1149, 0, []),
        (116, 1000, 0, ["training state is +16% off"]),
        (84, 1000, 0, ["training state is -16% off"]),
        (100, 1151, 0, ["peak is +15% above"]),
        (100, 500, 0, []),  # batches were shorter than they might have been
        (100, 1250, 400, []),  # resident memory: libraries and the allocator's gaps
        (100, 1300, 400, ["peak is +30% above"]),
    ],
)
def test_a_warning_beyond_15_percent(state: int, peak: int, process: int, warned: list[str]) -> None:
    text = beside(Foreseen(100 * MIB, 1000 * MIB, process * MIB), [state * MIB // 2, state * MIB], [peak * MIB, 1])
    first, *warnings = text.splitlines()
    assert first.startswith(f"memory a rank: state {state}.0 MiB, foreseen 100.0 MiB; peak ")
    assert ("of it the process 400.0 MiB" in first) == (process == 400)
    assert len(warnings) == len(warned)
    assert all(part in warning for part, warning in zip(warned, warnings, strict=True))
