"""Which roles live on which ranks. Pure: works without torch, before anything is launched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from drumroll.config import RunConfig

Role = Literal["policy", "critic", "reference", "engine"]


@dataclass(slots=True, frozen=True)
class Plan:
    """Roles share ranks (`max_lag: 0` alternates sampling and training, so nobody is idle beside the other)."""

    world_size: int
    roles: frozenset[Role]  # every role lives on every rank


def plan(config: RunConfig, reference: bool, critic: bool = False) -> Plan:
    """Place the roles that the pipeline needs. `reference`: the algorithm holds the policy near the model it began with.

    With adapters the policy is that model too, with them switched off. `critic`: it learns the value of states.
    """
    roles: set[Role] = {"policy"}
    if config.pipeline == "rl":
        roles.add("engine")
    if reference and config.model.lora is None:
        roles.add("reference")
    if critic:
        roles.add("critic")
    return Plan(world_size=config.runtime.ranks, roles=frozenset(roles))
