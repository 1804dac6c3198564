"""From what a recipe calls a model to a HF folder on disk."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from drumroll import env
from drumroll.errors import UserError
from drumroll.models import builtin, download

_BUILTIN = "builtin:"
_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.py"]


def locate(path: str) -> Path:
    """A local folder as it is, `builtin:NAME` made in the cache, a fetched model by its name, or a hub id downloaded.

    Raises UserError when there is no such model.
    """
    if path.startswith(_BUILTIN):
        return builtin.folder(path.removeprefix(_BUILTIN), env.read().cache)
    if path in download.MODELS:
        return download.folder(path, env.read().cache)
    local = Path(path).expanduser()
    if local.is_dir():
        if not (local / "config.json").is_file():
            raise UserError(f"model {path}: the folder has no config.json; expected a HF model folder")
        return local
    if path.count("/") > 1 or path.startswith((".", "/", "~")):
        raise UserError(f"model {path}: no such folder; expected a HF model folder, a hub id, or a name from `drumroll model list`")
    try:
        return Path(snapshot_download(path, allow_patterns=_FILES))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise UserError(
            f"model {path}: no such folder, and the hub did not give it ({type(error).__name__}: {error}); "
            "expected a HF model folder, a hub id, or a name from `drumroll model list`"
        ) from error
