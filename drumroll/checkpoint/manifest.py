"""`manifest.json`: name, size and SHA-256 of every file of a checkpoint. Written last: without a valid one a directory is no checkpoint.

The manifest is held against its own rendering byte by byte, so a flipped bit in it shows as one in any other file does.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from drumroll.errors import RunError

NAME = "manifest.json"
FORMAT = 1  # raise when a checkpoint of before cannot be read any more
_READERS = 8  # files hashed at a time


class Damaged(RunError):
    """A directory that is no valid checkpoint; the message names the file."""


def write(directory: Path) -> None:
    """Put every file below `directory` on the disk, and the manifest after them."""
    names = _names(directory)
    facts = dict(zip(names, _facts(directory, names), strict=True))
    for folder in {(directory / name).parent for name in names}:
        sync_folder(folder)
    with (directory / NAME).open("w", encoding="utf-8") as out:
        out.write(_render(facts))
        out.flush()
        os.fsync(out.fileno())
    sync_folder(directory)


def check(directory: Path) -> None:
    """Raises Damaged naming the file that is missing, cut or changed."""
    file = directory / NAME
    if not file.is_file():
        raise Damaged(f"{file}: no such file; its save was not finished")
    content = file.read_bytes()
    try:
        facts = json.loads(content)["files"]
        intact = _render(facts).encode() == content
    except (ValueError, KeyError, TypeError, AttributeError):  # ValueError: neither JSON nor UTF-8
        intact = False
    if not intact:
        raise Damaged(f"{file}: changed since it was written, or of another format than {FORMAT}")
    if strangers := [name for name in _names(directory) if name not in facts]:
        # A reader of `state/` takes every file there is: that of another checkpoint would come in unseen.
        raise Damaged(f"{directory / strangers[0]}: not a file of this checkpoint, which has none of that name; remove it")
    for name, fact in facts.items():
        size = (directory / name).stat().st_size if (directory / name).is_file() else None
        if size != fact["size"]:
            raise Damaged(f"{directory / name}: expected {fact['size']} bytes, found {'no file' if size is None else size}")
    for (name, fact), found in zip(facts.items(), _facts(directory, list(facts)), strict=True):
        if found["sha256"] != fact["sha256"]:
            raise Damaged(f"{directory / name}: its bytes changed since it was written (SHA-256 {found['sha256'][:12]}...)")


def sync_folder(folder: Path) -> None:
    """Wait until the folder's entries are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _names(directory: Path) -> list[str]:
    """Of all files but the manifest itself, and hidden ones, which a file system may leave behind (.nfs000...)."""
    names = (file.relative_to(directory) for file in directory.rglob("*") if file.is_file())
    return sorted(str(name) for name in names if str(name) != NAME and not any(part.startswith(".") for part in name.parts))


def _facts(directory: Path, names: Sequence[str]) -> list[dict[str, Any]]:
    with ThreadPoolExecutor(_READERS) as pool:
        return list(pool.map(lambda name: _fact(directory / name), names))


def _fact(file: Path) -> dict[str, Any]:
    with file.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
        os.fsync(content.fileno())
        return {"size": os.fstat(content.fileno()).st_size, "sha256": digest}


def _render(files: dict[str, Any]) -> str:
    own = hashlib.sha256(json.dumps([FORMAT, files], sort_keys=True).encode()).hexdigest()
    return json.dumps({"format": FORMAT, "files": files, "sha256": own}, indent=1, sort_keys=True) + "\n"
