"""The ways in which a backend is run: as it is, with each of its own options, and with what every backend has to be able to do.

A further way is one line in COMMON.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args, get_origin

import torch
from pydantic import BaseModel

from drumroll.backends.base import LoraSpec, ModelSpec, OptimSpec
from drumroll.verify.batches import SPLITS, WHOLE, Split
from drumroll.verify.probe import Probe, Scenario

_LOW_PRECISION = ("bfloat16", "float16")


@dataclass(slots=True, frozen=True, kw_only=True)
class Variant:
    """One way to run, as changes to the run that is asked for.

    The specification makes those changes of `model` and `optim` that are other mathematics (dtype, optimizer, what trains), and no others.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)  # of the backend
    model: Mapping[str, Any] = field(default_factory=dict)  # fields of ModelSpec
    optim: Mapping[str, Any] = field(default_factory=dict)  # fields of OptimSpec
    scenarios: tuple[Scenario, ...] = (Probe.train,)
    splits: tuple[Split, ...] = SPLITS[1::2]  # that it trains on
    one_model: bool = False  # an untied one, where there is one; else that and a tied one
    experts: bool = False  # it changes mixtures of experts alone, and runs on one
    ranks: int | None = None  # None: as many as asked for
    patience: int = 1  # times the usual limit for a scenario
    rounds: bool = False  # judged by the bounds of bfloat16 whatever the compute dtype


EVERYTHING = (Probe.train, Probe.forward_only, Probe.memory, Probe.checkpoint, Probe.adopt, Probe.skip, Probe.sleep)
AS_IS = Variant(name="as it is", scenarios=EVERYTHING, splits=SPLITS)
_STATE = (Probe.train, Probe.checkpoint)

COMMON = (
    Variant(name="one rank", ranks=1, model={"share_prompts": False}, splits=(WHOLE,)),  # shared, not every bit is the specification's
    # Later steps amplify the rounding of earlier ones: measured against the whole batch at once, which is cut once and not twice.
    Variant(name="bfloat16", model={"compute_dtype": torch.bfloat16}, scenarios=_STATE, splits=(WHOLE, *SPLITS[1::2])),
    Variant(name="packed layout", model={"layout": "packed"}),
    Variant(name="every prompt computed", model={"share_prompts": False}),
    Variant(name="checkpointing: full", model={"checkpointing": "full"}),
    Variant(name="checkpointing: selective", model={"checkpointing": "selective"}),
    Variant(name="checkpointing: off-loaded", model={"checkpointing": "offload"}),
    Variant(name="tiled MLP", model={"tile_mlp": 16}),
    Variant(name="compiled blocks", model={"compile": True}, splits=SPLITS[1:2], one_model=True, patience=5),
    Variant(name="one block and norms train", model={"trainable": (r"\.1\.", "norm")}, scenarios=(*_STATE, Probe.memory)),
    Variant(name="LoRA", model={"lora": LoraSpec(rank=4)}, scenarios=_STATE),
    Variant(name="value head", model={"head": "value"}, scenarios=(*_STATE, Probe.memory, Probe.forward_only, Probe.sleep)),
    Variant(name="AdamW off-loaded", optim={"offload": True}, scenarios=_STATE),
    Variant(name="Muon", optim={"name": "muon"}, scenarios=_STATE),
    # It divides by the size of each gradient, and that of the bias of attention's keys is nothing but rounding.
    Variant(name="Adafactor", optim={"name": "adafactor"}, model={"trainable": (r"^(?!.*k_proj\.bias)",)}, scenarios=_STATE),
)


def of_options(config: type[BaseModel]) -> list[Variant]:
    """A backend's own options, one at a time: booleans, Literals, and whatever a field gives as `examples`.

    A field whose `json_schema_extra` says `verify_on: experts` is verified on a mixture of experts.
    """
    return [
        Variant(
            name=f"{name}={_told(value)}",
            options={name: value},
            scenarios=(Probe.train, Probe.memory, Probe.checkpoint),
            rounds=value in _LOW_PRECISION if isinstance(value, str) else False,
            experts=isinstance(info.json_schema_extra, dict) and info.json_schema_extra.get("verify_on") == "experts",
        )
        for name, info in config.model_fields.items()
        for value in [*_few(info.annotation), *(info.examples or ())]
        if value != info.default
    ]


def _few(annotation: Any) -> Iterator[Any]:
    if annotation is bool:
        yield from (False, True)
    elif get_origin(annotation) is Literal:
        yield from get_args(annotation)


def _told(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return ",".join(_told(item) for item in value) if isinstance(value, (list, tuple)) else str(value)


def specified(model: ModelSpec, optim: OptimSpec) -> tuple[ModelSpec, OptimSpec]:
    """What the specification runs instead: the fields that are mathematics, and none that may only cost memory or time."""
    plain = ModelSpec(
        model.path,
        compute_dtype=model.compute_dtype,
        temperature=model.temperature,
        trainable=model.trainable,
        head=model.head,
        share_prompts=False,
        lora=model.lora,
        trust_remote_code=model.trust_remote_code,
    )
    return plain, replace(optim, offload=False)
