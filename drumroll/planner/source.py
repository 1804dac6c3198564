"""The config.json that a plan is made from: weights are neither read nor fetched."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from drumroll.errors import UserError
from drumroll.models.locate import locate

_CONFIG = "config.json"


def config_folder(path: str, given: Path | None = None) -> Path:
    """The folder with the config.json of `model.path`, or of the file (or folder) given instead. Raises UserError when there is none."""
    if given is not None:
        folder = given if given.is_dir() else given.parent
        if not (folder / _CONFIG).is_file() or (given.is_file() and given.name != _CONFIG):
            raise UserError(f"--model-config {given}: expected a file called {_CONFIG}, or a folder that holds one")
        return folder
    if path.count("/") != 1 or path.startswith((".", "/", "~")) or Path(path).is_dir():
        return locate(path)
    try:
        return Path(hf_hub_download(path, _CONFIG)).parent
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise UserError(
            f"model {path}: no such folder, and the hub did not give its {_CONFIG} ({type(error).__name__}): a plan needs no weights, so "
            f"save the model's {_CONFIG} and name it with --model-config FILE"
        ) from error
