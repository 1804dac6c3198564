"""The directory of a run: made empty for a new one, and held by one process at a time.

[Note: one process a run] A job that is started again while the old one still ends would put aside its checkpoints, cut its records back and
remove the save that it is writing. The lock is the operating system's, on `config.yaml`: it goes with the process, however that ends, and
with the directory when it is renamed. `config.yaml` is therefore written in place, never replaced.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import shutil
from pathlib import Path
from typing import IO

from drumroll.errors import UserError
from drumroll.observe.run import CONFIG_FILE

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # what file systems without locks say


def claim(run_dir: Path) -> IO[bytes]:
    """Hold the run in `run_dir` until the file is closed. Raises UserError when another process does, or the directory refuses.

    On a file system without locks nothing is held.
    """
    file = run_dir / CONFIG_FILE
    try:
        held = file.open("ab")
    except OSError as error:
        raise _cannot_write(run_dir, error) from error
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        held.close()
        raise UserError(f"run_dir: another process runs in {run_dir}; wait until it has ended, end it, or name another run_dir") from error
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            held.close()
            raise _cannot_write(run_dir, error) from error
    if not _is_at(held, file):  # renamed between opening and locking: what is held is no longer the run at this path
        held.close()
        raise UserError(f"run_dir: another process has just moved {run_dir}; start again, or name another run_dir")
    return held


def _is_at(held: IO[bytes], file: Path) -> bool:
    """Whether the open file is still the one at this path."""
    try:
        return os.path.samestat(os.fstat(held.fileno()), file.stat())
    except FileNotFoundError:
        return False


def make_room(run_dir: Path) -> tuple[IO[bytes], Path | None]:
    """An empty directory at `run_dir`, held as by `claim`. A run that is there is kept under the next free name, `run_dir.1`, ...: the
    second value. Of a link it is the directory behind it that is kept and made new."""
    place = run_dir.resolve()
    kept: Path | None = None
    if place.exists() and not place.is_dir():
        raise UserError(f"run_dir: {run_dir} is a file; expected a directory or a name that is free")
    if place.is_dir() and any(place.iterdir()):
        if not (place / CONFIG_FILE).is_file():
            raise UserError(
                f"run_dir: {run_dir} holds files that are no run of drumroll; name an empty directory or one that does not exist"
            )
        kept = next(p for n in itertools.count(1) if not (p := place.with_name(f"{place.name}.{n}")).exists())
    try:
        if kept is not None:
            with claim(place):
                place.rename(kept)
            print(f"the run that was in {run_dir} is now in {kept} (--resume would go on with it, where it has checkpoints)")
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _cannot_write(run_dir, error) from error
    return claim(place), kept


def undo(run_dir: Path, kept: Path | None) -> None:
    """A run that ended before its first step leaves nothing, and puts back the run it displaced."""
    place = run_dir.resolve()
    shutil.rmtree(place)
    if kept is not None:
        kept.rename(place)
        print(f"nothing was trained; the run that was in {run_dir} is there again")


def _cannot_write(run_dir: Path, error: OSError) -> UserError:
    return UserError(f"run_dir: cannot write into {run_dir}: {error}; name another directory, see to its permissions, or free the disk")
