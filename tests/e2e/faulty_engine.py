"""An engine whose rank 1 does one thing wrong, once or for good; and a reward that its words get by chance."""

from __future__ import annotations

import os
import random
import resource
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

import psutil
import torch
import torch.distributed as dist
from pydantic import BaseModel

from drumroll.engines.base import Completion, GenerateRequest
from drumroll.engines.transformers import PLUGIN as Sound
from drumroll.errors import UserError
from drumroll.types import Prompt, Rollout

CALL = 3  # generate calls before the fault: step 3, or 2 with an evaluation


class Config(Sound.Config):  # type: ignore[misc,name-defined]  # a class that is found at run time
    how: Literal["raise", "exit", "kill", "lose", "hang", "memory", "user"]
    once: str = ""  # a file that is there once it has happened; none: it happens in every run


class FaultyEngine(Sound):
    Config = Config

    def __init__(self, options: BaseModel) -> None:
        assert isinstance(options, Config)
        super().__init__(options)
        self._faulty = options
        self._calls = 0

    def generate(self, requests: Iterable[GenerateRequest]) -> Iterator[Completion]:
        self._calls += 1
        once = self._faulty.once
        if self._calls != CALL or dist.get_rank() != 1 or (once and Path(once).exists()):
            return super().generate(requests)
        if once:
            Path(once).touch()
        return iter(list(super().generate(requests))[:-1]) if self._faulty.how == "lose" else self._fail()

    def _fail(self) -> Iterator[Completion]:
        match self._faulty.how:
            case "raise":
                raise ValueError("bad row 17")
            case "user":
                raise UserError("engine: this model has no such thing")
            case "exit":
                os._exit(7)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "hang":
                time.sleep(600)
            case "memory":
                room = 256 << 20  # beyond what is mapped: without it the loader aborts before torch can say a word
                resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + room, -1))
                torch.zeros(1 << 32)
        return iter(())


def digits(rollout: Rollout, prompt: Prompt) -> float:
    """What a model with random weights gets some of, and some of it by chance."""
    return sum(c.isdigit() for c in rollout.text) / 6 + random.random() / 10
