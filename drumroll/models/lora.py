"""Low-rank adapters (Hu et al. 2021, arXiv 2106.09685, section 4.1), by PEFT: W x becomes W x + (alpha / rank) B A x; W does not train.

The layers are PEFT's own. What is ours: which layers may be adapted, where A and B begin, how they are named, and what W becomes when they
are merged into it. Everything here is about whole tensors; where they lie is the placement's business.

[Note: names] PEFT moves the weight of an adapted layer `q_proj` to `q_proj.base_layer.weight` and puts `q_proj.lora_A.default.weight`
beside it. Outside of the module tree the weight keeps its Hugging Face name, and A is `q_proj.lora_A.weight`, as in PEFT's own files.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from drumroll import plugins
from drumroll.backends.base import LoraSpec
from drumroll.errors import UserError

_ADAPTER = "default"  # PEFT's name for an adapter that has none
_BASE = ".base_layer."
_MATRIX = re.compile(rf"\.(lora_[AB])\.{_ADAPTER}\.")
_PREFIX = "base_model.model."  # of every name in a PEFT file
_TENSORS = "adapter_model.safetensors"
_CONFIG = "adapter_config.json"
_NOT_PLAIN = ("use_dora", "use_rslora", "lora_bias", "rank_pattern", "alpha_pattern", "modules_to_save", "trainable_token_indices")


@dataclass(slots=True, frozen=True)
class Adapter:
    """The adapter of one linear layer: W [out, in] += scale · B [out, rank] · A [rank, in]."""

    layer: str  # HF name of the layer
    scale: float
    transposed: bool  # GPT-2's Conv1D keeps W as [in, out]

    @property
    def weight(self) -> str:
        return f"{self.layer}.weight"

    @property
    def a(self) -> str:
        return f"{self.layer}.lora_A.weight"

    @property
    def b(self) -> str:
        return f"{self.layer}.lora_B.weight"

    def delta(self, a: torch.Tensor, b: torch.Tensor, first: int, last: int) -> torch.Tensor:
        """Rows [first, last) of what is added to the stored weight, float32."""
        left, right = (a.t(), b.t()) if self.transposed else (b, a)
        return (left[first:last] @ right) * self.scale


def outer_name(name: str) -> str:
    """The name of a parameter outside of the module tree. See [Note: names]."""
    return _MATRIX.sub(r".\1.", name.replace(_BASE, "."))


def is_adapter(name: str) -> bool:
    """Whether a name in the module tree is that of an A or a B."""
    return _MATRIX.search(name) is not None


def inject(hf: PreTrainedModel, spec: LoraSpec, blocks: Sequence[nn.Module]) -> None:
    """Put adapters without values beside the linear layers of `blocks` that `spec` names, and freeze all the rest, stored in `base_dtype`.

    Raises UserError for a target that is no linear layer of a block, and where PEFT is not installed.
    """
    if importlib.util.find_spec("peft") is None:
        raise UserError(f"model.lora needs PEFT, which is not installed: {plugins.install('lora')}")
    from peft import inject_adapter_in_model

    linear = _linear_layers(hf, blocks)
    _check_targets(spec, [*linear], type(hf).__name__)
    for parameter in hf.parameters():
        parameter.requires_grad_(False)
    with next(hf.parameters()).device:
        try:
            inject_adapter_in_model(_config(spec, [*linear], any(isinstance(m, Conv1D) for m in linear.values())), hf, _ADAPTER)
        except ValueError as error:
            raise UserError(f"model.lora.targets={spec.targets}: {error}") from error
    if outside := [adapter.layer for adapter in adapters(hf) if adapter.layer not in linear]:
        raise UserError(
            f"model.lora.targets: by these names PEFT adapts {outside[0]} too, which is no linear layer of a transformer block; "
            "name targets that only linear layers have, e.g. [q_proj, k_proj, v_proj, o_proj]"
        )
    for name, parameter in hf.named_parameters():
        parameter.data = parameter.data.to(torch.float32 if is_adapter(name) else spec.base_dtype)
        parameter.requires_grad_(is_adapter(name))


def _linear_layers(hf: nn.Module, blocks: Sequence[nn.Module]) -> dict[str, nn.Module]:
    inside = {module for block in blocks for module in block.modules()}
    return {name: module for name, module in hf.named_modules() if module in inside and isinstance(module, nn.Linear | Conv1D)}


def _check_targets(spec: LoraSpec, linear: Sequence[str], model: str) -> None:
    for target in spec.targets:
        if not any(f".{name}".endswith(f".{target}") for name in linear):
            known = ", ".join(sorted({name.rpartition(".")[2] for name in linear}))
            raise UserError(f"model.lora.targets: no linear layer in the transformer blocks of {model} is a {target!r}; they are {known}")


def _config(spec: LoraSpec, layers: Sequence[str], transposed: bool = False, base: str | None = None) -> Any:
    """PEFT's configuration; values are ours to make. `layers`: all that may be adapted; `base`: the model's folder, for a file.

    `transposed` is not known to a file: PEFT looks at the layers itself, and warns.
    """
    from peft import LoraConfig, TaskType

    return LoraConfig(
        base_model_name_or_path=base,
        task_type=TaskType.CAUSAL_LM,
        r=spec.rank,
        lora_alpha=int(spec.alpha) if spec.alpha.is_integer() else spec.alpha,  # type: ignore[arg-type]  # divided by r, no more
        lora_dropout=0.0,
        bias="none",
        target_modules=sorted(spec.targets or {name.rpartition(".")[2] for name in layers}),
        fan_in_fan_out=transposed,
        init_lora_weights=base is not None,  # read by PEFT alone, where it makes an adapter
        inference_mode=base is not None,
    )


def adapters(hf: nn.Module) -> list[Adapter]:
    """Those of a model that `inject` has worked on, in the order of its modules."""
    from peft.tuners.lora import LoraLayer

    return [
        Adapter(name, layer.scaling[_ADAPTER], isinstance(layer.get_base_layer(), Conv1D))
        for name, layer in hf.named_modules()
        if isinstance(layer, LoraLayer)
    ]


@contextmanager
def switched_off(hf: nn.Module) -> Iterator[None]:
    """Within, the model computes as if it had no adapters."""
    from peft.tuners.lora import LoraLayer

    layers = [module for module in hf.modules() if isinstance(module, LoraLayer)]
    needed = [(parameter, parameter.requires_grad) for parameter in hf.parameters()]  # PEFT changes it on the way
    try:
        for layer in layers:
            layer.enable_adapters(False)
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
        for parameter, flag in needed:
            parameter.requires_grad_(flag)


def initial(name: str, shape: torch.Size, seed: int) -> torch.Tensor:
    """Values that the matrix called `name` begins with, whole, float32, the same wherever they are made: B is 0, so nothing changes yet.

    A is uniform within ±1 / sqrt(in), as in PEFT and in the paper's own code; its numbers depend on the seed and the name alone.
    """
    if name.endswith(".lora_B.weight"):
        return torch.zeros(shape)
    key = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key[:8], "little") >> 1)
    bound = 1 / math.sqrt(shape[1])
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


def read_folder(folder: Path, spec: LoraSpec, shapes: Mapping[str, torch.Size]) -> dict[str, torch.Tensor]:
    """Name -> whole tensor, float32, of a PEFT adapter's folder. `shapes`: of what `spec` asks for.

    Raises UserError when it is not a plain LoRA adapter of just that rank, scale and layers.
    """
    try:
        config = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
        stored = load_file(folder / _TENSORS)
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(f"model.lora.start={folder}: expected a PEFT adapter, {_CONFIG} and {_TENSORS}: {error}") from error
    wanted = {"peft_type": "LORA", "r": spec.rank, "lora_alpha": spec.alpha}
    unlike = {key: config.get(key) for key, value in wanted.items() if config.get(key) != value}
    unlike |= {key: config[key] for key in _NOT_PLAIN if config.get(key)}
    if unlike:
        raise UserError(f"{folder / _CONFIG}: {unlike}; expected plain LoRA with model.lora.rank={spec.rank} and alpha={spec.alpha:g}")
    tensors = {name.removeprefix(_PREFIX): tensor.float() for name, tensor in stored.items()}
    if odd := sorted(tensors.keys() ^ shapes.keys()):
        side = "only in the file" if odd[0] in tensors else "missing in the file"
        raise UserError(f"{folder / _TENSORS}: {len(odd)} names are not those of model.lora.targets, first {odd[0]}, {side}")
    for name, tensor in tensors.items():
        if tensor.shape != shapes[name]:
            raise UserError(f"{folder / _TENSORS}: {name} has shape {tuple(tensor.shape)}, the model needs {tuple(shapes[name])}")
    return tensors


def write_folder(folder: Path, spec: LoraSpec, base: str, tensors: Mapping[str, torch.Tensor]) -> None:
    """The adapter as a folder that `peft.PeftModel.from_pretrained` reads. `base`: path or name of the model that it belongs to."""
    save_file({f"{_PREFIX}{name}": tensor for name, tensor in tensors.items()}, folder / _TENSORS, metadata={"format": "pt"})
    layers = [name.removesuffix(".lora_A.weight") for name in tensors if name.endswith(".lora_A.weight")]
    settings = _config(spec, layers, base=base).to_dict()
    settings["target_modules"] = sorted(settings["target_modules"])  # a set in there, in another order every time
    (folder / _CONFIG).write_text(json.dumps(settings, indent=2, sort_keys=True, default=str) + "\n", encoding="utf-8")


def with_folder(hf: PreTrainedModel, folder: Path) -> nn.Module:
    """A plain model under the adapter that `write_folder` has written, as PEFT itself loads it."""
    from peft import PeftModel

    return PeftModel.from_pretrained(hf, folder)
