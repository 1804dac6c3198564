"""Building a model: on the meta device, then placed by a backend, then materialised; weights come after (`stream.load`).

[Note: to_empty] Giving meta tensors memory unties tied weights and leaves non-persistent buffers (RoPE's `inv_freq`) uninitialised: both
are silent. `complete` ties again and rebuilds, and checks both.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from contextlib import nullcontext

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from drumroll.backends.base import ModelSpec
from drumroll.errors import RunError, UserError
from drumroll.models import lora, value
from drumroll.models.scorer import Scorer, find_blocks


def build(spec: ModelSpec, *, meta: bool = True) -> Scorer:
    """The model of `spec.path`, tied, with `requires_grad` set; on the meta device, or on the CPU with random weights.

    In float32, but below adapters in their `base_dtype`. A value head trains whatever `trainable` says. Raises UserError for a folder
    without a causal language model, an attention that the model lacks, a `trainable` pattern that matches nothing, or adapters that cannot
    be.
    """
    try:
        config = AutoConfig.from_pretrained(spec.path, trust_remote_code=spec.trust_remote_code)
    except (OSError, ValueError, ImportError) as error:
        raise UserError(f"model {spec.path}: transformers cannot read its config.json: {error}") from error
    try:
        with torch.device("meta") if meta else nullcontext():
            hf = AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, attn_implementation=spec.attention, trust_remote_code=spec.trust_remote_code
            )
    except (OSError, ValueError, ImportError) as error:
        raise UserError(f"model {spec.path}: cannot build a causal language model with attention={spec.attention!r}: {error}") from error
    left_out = value.put_on(hf) if spec.head == "value" else frozenset()
    if spec.lora is None:
        select_trainable(hf, spec.trainable, "algorithm.critic.trainable" if left_out else "model.trainable")
        if left_out:
            hf.get_parameter(value.WEIGHT).requires_grad_(True)  # nothing else could make up for a head that stays as it began
    elif left_out:
        raise UserError(f"model {spec.path}: a value head trains, and adapters let nothing of the model itself train: leave one out")
    elif spec.lora.base_dtype.itemsize < spec.compute_dtype.itemsize:
        raise UserError(f"model.lora.base_dtype={spec.lora.base_dtype} is narrower than model.dtype={spec.compute_dtype}: set both alike")
    else:
        lora.inject(hf, spec.lora, find_blocks(hf))
    return Scorer(hf, spec, left_out)


def select_trainable(hf: PreTrainedModel, patterns: Iterable[str], key: str = "model.trainable") -> None:
    """Train the parameters one of whose HF names a pattern is found in (`re.search`); no pattern: all.

    `key`: of a recipe, where the patterns stand. Raises UserError for one that matches nothing.
    """
    patterns = tuple(patterns)
    names = parameter_names(hf)
    for pattern in patterns:
        if not any(re.search(pattern, name) for aliases in names.values() for name in aliases):
            some = ", ".join(aliases[0] for aliases in list(names.values())[:4])
            raise UserError(f"{key}: '{pattern}' matches no parameter of {type(hf).__name__}; names look like {some}, ...")
    for parameter, aliases in names.items():
        parameter.requires_grad_(not patterns or any(re.search(pattern, name) for pattern in patterns for name in aliases))


def parameter_names(hf: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Each parameter with all its HF names; the first is the one it is exported under, further ones are ties."""
    names: dict[nn.Parameter, list[str]] = defaultdict(list)
    for name, parameter in hf.named_parameters(remove_duplicate=False):
        names[parameter].append(name)
    return dict(names)


def materialise(scorer: Scorer, device: torch.device) -> None:
    """Memory for every parameter (uninitialised) and buffer of a model on the meta device, plain or sharded. See [Note: to_empty].

    Raises RunError when a non-persistent buffer could not be rebuilt.
    """
    ties = tied_names(scorer.hf)
    scorer.to_empty(device=device)
    complete(scorer.hf, ties)


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """All buffers to `device`, parameters where they are."""
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffer.to(device))


def tied_names(hf: nn.Module) -> list[list[str]]:
    """The HF names of every parameter that has several."""
    return [aliases for aliases in parameter_names(hf).values() if len(aliases) > 1]


def complete(hf: PreTrainedModel, ties: Iterable[list[str]]) -> None:
    """What is left to do when all of a model has been given memory. See [Note: to_empty]. `ties`: `tied_names` of before."""
    for source, *targets in ties:
        for target in targets:
            parent, _, leaf = target.rpartition(".")
            setattr(hf.get_submodule(parent), leaf, hf.get_parameter(source))
    _rebuild_buffers(hf)
    untied = [aliases for aliases in ties if len({id(hf.get_parameter(name)) for name in aliases}) > 1]
    if untied:
        raise RunError(f"tied weights came apart while the model was given memory: {untied}")


def _rebuild_buffers(hf: PreTrainedModel) -> None:
    """Compute every non-persistent buffer as HF does, twice over unlike fillings: what differs was not written."""
    for tensor in [*hf.parameters(), *hf.buffers()]:
        tensor._is_hf_initialized = True  # type: ignore[attr-defined]  # how transformers is told to leave a tensor alone
    owners = [module for module in hf.modules() if module._non_persistent_buffers_set]
    first: dict[str, torch.Tensor] = {}
    for filling in (0, 1):
        for module in owners:
            module._is_hf_initialized = False  # type: ignore[assignment]
            for name in module._non_persistent_buffers_set:
                buffer = module.get_buffer(name)
                buffer._is_hf_initialized = False  # type: ignore[attr-defined]
                buffer.fill_(filling)
        hf.initialize_weights()
        rebuilt = {name: buffer.clone() for name, buffer in non_persistent_buffers(hf)}
        bad = [name for name, buffer in rebuilt.items() if name in first and not torch.equal(first[name], buffer)]
        if bad:
            raise RunError(f"{type(hf).__name__}: transformers does not rebuild the buffers {bad}; they would stay uninitialised memory")
        first = rebuilt


def non_persistent_buffers(hf: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    """(HF name, buffer) of what no folder stores."""
    for prefix, module in hf.named_modules():
        for name in sorted(module._non_persistent_buffers_set):
            yield f"{prefix}.{name}" if prefix else name, module.get_buffer(name)
