"""Writing a model as a HF folder: safetensors from a stream of buckets, everything else as it was in the source folder. And adapters."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from drumroll.backends.base import LoraSpec, NamedTensor
from drumroll.errors import RunError, UserError
from drumroll.models import lora
from drumroll.models.build import parameter_names
from drumroll.models.fused import FileTensor, file_tensors
from drumroll.models.stream import persistent_buffers, tensor_files

Bucket = list[tuple[str, torch.Tensor]]

# Configuration, tokenizer, chat template, generation config, custom code, licence: all but the weights and their index.
_KEPT = ("*.json", "*.txt", "*.model", "*.jinja", "*.py", "*.md", "LICENSE*")
_INDEX = "*.index.json"
_TEMPLATES = "additional_chat_templates"
_ABANDONED_S = 3600.0


def save_folder(source: Path, out: Path, buckets: Iterable[Bucket], shard_bytes: int = 4 << 30) -> None:
    """Write `buckets` of (HF name, full tensor) as the folder `out`, which appears whole or not at all and replaces an older one.

    Tied weights have one key, the embedding's; what the model holds as one tensor and files have in several (experts) is taken apart. A
    file takes at most `shard_bytes` of tensors (or one larger tensor), and one file's tensors are held at a time. Persistent buffers, which
    do not train, are those of `source`. Raises RunError when the names are not exactly those of the parameters that `source/config.json`
    describes, each once, when dtypes are mixed, or when the disk refuses.
    """
    parameters, buffers = _expected(source)
    temporary = _temporary(out)
    try:
        written, dtype = _write_tensors(temporary, _taken_apart(buckets, parameters), shard_bytes)
        expected = {tensor.name for tensors in parameters.values() for tensor in tensors}
        if expected != written:
            raise RunError(f"export of {source}: missing {sorted(expected - written)}, unexpected {sorted(written - expected)}")
        _write_buffers(source, temporary, buffers)
        _finish_weights(temporary)
        _copy_rest(source, temporary, dtype)
        _replace(temporary, out)
    except (OSError, SafetensorError) as error:
        raise RunError(f"{out}: cannot write the model: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def save_adapter(source: Path, out: Path, spec: LoraSpec, tensors: Iterable[NamedTensor]) -> None:
    """Write adapters as a folder for PEFT, which appears whole or not at all. `source`: folder of the model they belong to.

    Raises RunError when the disk refuses.
    """
    temporary = _temporary(out)
    try:
        whole = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors}
        lora.write_folder(temporary, spec, str(source), whole)
        _replace(temporary, out)
    except (OSError, SafetensorError) as error:
        raise RunError(f"{out}: cannot write the adapter: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def check_out(out: Path) -> None:
    """Raises UserError when `out` holds anything that an export has not written: replacing it would remove that."""
    if not out.exists():
        return
    if not out.is_dir():
        raise UserError(f"{out}: a file; name a folder, or a place where there is none")
    entries = list(out.iterdir())
    foreign = [entry.name for entry in entries if not _is_ours(entry)]
    if entries and not any((out / name).is_file() for name in ("config.json", "adapter_config.json")):
        foreign = foreign or [entry.name for entry in entries]
    if foreign:
        first = sorted(foreign)[0]
        raise UserError(f"{out}: holds {first!r}, which is no part of a model, and would be replaced; name an empty or a new folder")


def _is_ours(entry: Path) -> bool:
    if entry.is_dir():
        return entry.name == _TEMPLATES
    return any(entry.match(pattern) for pattern in (*_KEPT, "*.safetensors"))


def _temporary(out: Path) -> Path:
    """Where `out` is written before it takes its name. What killed exports to `out` have left there goes. Raises RunError.

    What has changed within the hour may be another process's, at work: two runs of a recipe make its warm-up at the same time.
    """
    orphan = re.compile(rf"\.{re.escape(out.name)}-(old-)?[a-z0-9_]{{8}}")  # as mkdtemp names them
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        for path in out.parent.iterdir():
            if orphan.fullmatch(path.name) and time.time() - path.stat().st_mtime > _ABANDONED_S:
                shutil.rmtree(path, ignore_errors=True)
        return Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    except OSError as error:
        raise RunError(f"{out}: cannot write there: {error}") from error


def _expected(source: Path) -> tuple[dict[str, list[FileTensor]], dict[str, list[FileTensor]]]:
    """By name, the files' tensors of the parameters (ties once) and of the persistent buffers of the model that the folder describes."""
    with torch.device("meta"):
        hf = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source))
    parameters = {aliases[0]: parameter.shape for parameter, aliases in parameter_names(hf).items()}
    buffers = {name: buffer.shape for name, buffer in persistent_buffers(hf)}
    apart = file_tensors(hf, parameters | buffers)
    return {name: apart[name] for name in parameters}, {name: apart[name] for name in buffers}


def _taken_apart(buckets: Iterable[Bucket], parameters: Mapping[str, Sequence[FileTensor]]) -> Iterator[NamedTensor]:
    """(name in files, tensor) of every weight; each HF name may come once."""
    seen: set[str] = set()
    for name, tensor in (pair for bucket in buckets for pair in bucket):
        if name in seen:
            raise RunError(f"export: {name!r} came twice; expected each name once, a tied weight under its embedding's name")
        seen.add(name)
        for part in parameters.get(name, [FileTensor(name, tensor.shape, 0)]):
            yield part.name, part.of(tensor)


def _write_tensors(folder: Path, named: Iterable[NamedTensor], shard_bytes: int) -> tuple[set[str], torch.dtype]:
    """Numbered files in `folder`; gives back the names written and their dtype."""
    names: set[str] = set()
    dtypes: set[torch.dtype] = set()
    for number, tensors in enumerate(_shards(named, shard_bytes)):
        names |= tensors.keys()
        dtypes |= {tensor.dtype for tensor in tensors.values()}
        save_file(tensors, folder / f"part-{number:05d}.safetensors", metadata={"format": "pt"})
    if len(dtypes) != 1:
        raise RunError(f"export: expected tensors of one dtype, got {sorted(map(str, dtypes))}")
    return names, dtypes.pop()


def _shards(named: Iterable[NamedTensor], shard_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
    shard: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in named:
        if shard and size + tensor.nbytes > shard_bytes:
            yield shard
            shard, size = {}, 0
        # A copy: a bucket's storage may be reused for the next one.
        shard[name] = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        size += tensor.nbytes
    if shard:
        yield shard


def _write_buffers(source: Path, folder: Path, buffers: Mapping[str, Sequence[FileTensor]]) -> None:
    files = tensor_files(source)
    tensors = {}
    for name in sorted(tensor.name for apart in buffers.values() for tensor in apart):
        with safe_open(files[name], framework="pt") as reader:
            tensors[name] = reader.get_tensor(name)
    if tensors:
        save_file(tensors, folder / "part-buffers.safetensors", metadata={"format": "pt"})


def _finish_weights(folder: Path) -> None:
    """Give the parts their final names, and an index where there is more than one."""
    parts = sorted(folder.glob("part-*.safetensors"))
    if len(parts) == 1:
        parts[0].rename(folder / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    total = 0
    for number, part in enumerate(parts, start=1):
        name = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        with safe_open(part, framework="pt") as reader:
            for key in reader.keys():  # noqa: SIM118 - not a dict
                weight_map[key] = name
        total += part.stat().st_size
        part.rename(folder / name)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def _copy_rest(source: Path, folder: Path, dtype: torch.dtype) -> None:
    for pattern in _KEPT:
        for file in source.glob(pattern):
            if file.is_file() and not file.match(_INDEX):
                shutil.copyfile(file, folder / file.name)
    if (source / _TEMPLATES).is_dir():
        shutil.copytree(source / _TEMPLATES, folder / _TEMPLATES)
    config = json.loads((folder / "config.json").read_text())
    config.pop("torch_dtype", None)  # the older spelling of the same field
    config["dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _replace(temporary: Path, out: Path) -> None:
    temporary.chmod(0o755)  # mkdtemp made it private, and safetensors its files
    for file in temporary.iterdir():
        file.chmod(0o644 if file.is_file() else 0o755)
    if not out.exists():
        os.rename(temporary, out)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{out.name}-old-", dir=out.parent))
    os.rename(out, old / out.name)
    os.rename(temporary, out)
    shutil.rmtree(old)
