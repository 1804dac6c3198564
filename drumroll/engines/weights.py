"""The weights of a Hugging Face module that samples: replaced in place by name, digested from what the module computes with."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from transformers import PreTrainedModel

from drumroll.digest import digest
from drumroll.errors import RunError, UserError
from drumroll.models.lora import outer_name


def load_in_place(model: torch.nn.Module, buckets: Iterable[list[tuple[str, torch.Tensor]]], partial: bool = False) -> None:
    """Copy (HF name, full tensor) buckets into the parameters of `model`, cast to their dtype.

    A tied parameter is known by its first name and may also come under its others, which then must carry the same values. Raises RunError
    for a name that is unknown, that comes twice or (unless `partial`) does not come, for a wrong shape, and for tied names that disagree.
    """
    own = {outer_name(name): parameter for name, parameter in model.named_parameters(remove_duplicate=False)}
    seen: dict[str, torch.Tensor] = {}  # every name that came -> the parameter it names
    loaded: dict[int, str] = {}  # id of a parameter -> the name it was loaded under
    with torch.no_grad():
        for bucket in buckets:
            for name, tensor in bucket:
                if name not in own:
                    raise RunError(f"weights: the sampler's {type(model).__name__} has no parameter {name!r}")
                parameter = own[name]
                if name in seen:
                    raise RunError(f"weights: {name!r} came twice in one push")
                if parameter.shape != tensor.shape:
                    raise RunError(f"weights: {name!r}: expected shape {tuple(parameter.shape)}, got {tuple(tensor.shape)}")
                if id(parameter) in loaded and not torch.equal(parameter, tensor.to(parameter)):
                    raise RunError(f"weights: {name!r} is tied to {loaded[id(parameter)]!r} in the sampler, but came with other values")
                parameter.copy_(tensor)
                seen[name] = parameter
                loaded[id(parameter)] = name
    missing = [outer_name(name) for name, parameter in model.named_parameters() if id(parameter) not in loaded]
    if missing and not partial:
        raise RunError(f"weights: {len(missing)} parameters of the sampler did not come in this push: {', '.join(missing[:5])}")


def refuse_not_finite(model: PreTrainedModel) -> None:
    """Raises UserError naming the first tensors of a model file that hold NaN or infinity."""
    broken = [name for name, parameter in model.named_parameters() if not bool(parameter.isfinite().all())]
    if broken:
        more = f" and {len(broken) - 3} more tensors" if len(broken) > 3 else ""
        raise UserError(
            f"{model.name_or_path}: the model file holds NaN or infinity in {', '.join(broken[:3])}{more}: it is damaged, or was saved by "
            "a run that had diverged; copy or download it again, or name another model"
        )


def parameter_digests(model: torch.nn.Module) -> dict[str, int]:
    """HF name -> digest of every parameter, tied ones once under their first name."""
    return {outer_name(name): digest(parameter.detach()) for name, parameter in model.named_parameters()}


def vocabulary_of(model: PreTrainedModel) -> int:
    """Rows of the input embedding."""
    embedding = model.get_input_embeddings()
    assert isinstance(embedding, torch.nn.Embedding)
    return embedding.num_embeddings


def stored_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the distinct storages behind `tensors`."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())
