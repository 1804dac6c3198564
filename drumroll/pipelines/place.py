"""Whether a run can be where its config puts it: asked before anything is trained, a warm-up included."""

from __future__ import annotations

import torch

from drumroll import plugins
from drumroll.backends.base import RankContext
from drumroll.backends.engine import TorchPlugin
from drumroll.config import RunConfig
from drumroll.runtime.local import resolve_device


def check_place(config: RunConfig) -> None:
    """Raises UserError when there are fewer devices than ranks, or the backend does not run on so many ranks.

    A backend that is no TorchPlugin says so when it starts.
    """
    ranks = config.runtime.ranks
    device = resolve_device(config.runtime.device, ranks)
    plugin = plugins.load("backends", config.backend.name)
    if isinstance(plugin, TorchPlugin):
        plugin.placement(plugins.options("backends", config.backend)).check(RankContext(0, ranks, torch.device(device)))
