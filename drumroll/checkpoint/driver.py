"""What the driver must know to go on: everything that decides numbers and is not a tensor on a rank."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers

import drumroll
from drumroll.data.stream import Cursor
from drumroll.errors import RunError

T = TypeVar("T")


@dataclass(slots=True, frozen=True)
class DriverState:
    """State after a whole number of steps."""

    step: int  # RL or SFT steps completed
    applied_steps: int  # optimizer steps that were not skipped: the learning rate's argument
    skips_in_a_row: int
    version: int  # weight version
    cursor: Cursor  # where the training stream stands; its `draws` is the next group_id
    records: dict[str, int] = field(default_factory=dict)  # record file -> bytes written up to this step
    critic_applied_steps: int = 0  # of a critic, as above; 0 without one
    critic_skips_in_a_row: int = 0
    pushes: int = 0  # weight pushes so far, and those of which every digest was right
    pushes_matched: int = 0
    seconds: float = 0.0  # wall clock of the run so far
    metrics: dict[str, float] = field(default_factory=dict)  # of this step, e.g. rl/reward_mean, eval/score
    environment: dict[str, str] = field(default_factory=dict)  # `environment` of the process that saved


def environment(device: str) -> dict[str, str]:
    """What numbers depend on beside the config. `device`: cpu or cuda; of a CPU also which of torch's kernels it runs."""
    return {
        "device": f"cpu ({torch.backends.cpu.get_cpu_capability()})" if device == "cpu" else device,
        "drumroll": drumroll.__version__,
        "torch": torch.__version__,
        transformers.__name__: transformers.__version__,
        "python": platform.python_version(),
    }


def dump(state: DriverState) -> str:
    """As JSON."""
    return json.dumps(asdict(state), indent=1) + "\n"


def load(file: Path) -> DriverState:
    """Raises RunError when it is no driver state, or its names are not exactly those of DriverState."""
    try:
        row = json.loads(file.read_text(encoding="utf-8"))
        cursor = dict(row.get("cursor", {}))
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise RunError(f"{file}: not the state of a driver: {error}") from error
    if cursor:
        row["cursor"] = _exact(Cursor, cursor, f"{file}: cursor")
    return _exact(DriverState, row, str(file))


def _exact(cls: type[T], row: Mapping[str, Any], where: str) -> T:
    wanted = {f.name for f in fields(cls)}  # type: ignore[arg-type]  # always a dataclass
    check_names(wanted, set(row), where)
    return cls(**row)


def check_names(wanted: set[str], saved: set[str], where: str) -> None:
    """Raises RunError when what is restored is not exactly what was saved."""
    if wanted != saved:
        missing, unknown = sorted(wanted - saved), sorted(saved - wanted)
        raise RunError(
            f"{where}: names saved and restored differ: missing {', '.join(missing) or 'none'}; only saved {', '.join(unknown) or 'none'}; "
            "resume with the version of drumroll that saved it"
        )
