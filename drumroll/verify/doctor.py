"""What is installed, what can be used on this machine, and what to do about the rest: facts first, then a table of them."""

from __future__ import annotations

import importlib
import inspect
import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

import torch
from huggingface_hub.constants import HF_HUB_CACHE
from packaging.requirements import Requirement
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from drumroll import env, plugins

Topic = Literal["machine", "packages", "extras", "devices", "backends", "engines", "folders"]
State = Literal["ok", "absent", "wrong"]  # absent: works without; wrong: mend it

_DISTRIBUTION = "drumroll"
_LOW_DISK = 5 * 2**30  # bytes; a 0.5B-parameter model with optimizer state in a checkpoint takes about 6 GB
_SHARED_MEMORY = 2**30  # bytes; a container has 64 MiB of it unless it is told otherwise
_MARKS = {"ok": "[green]ok[/]", "absent": "[yellow]–[/]", "wrong": "[red]wrong[/]"}


@dataclass(slots=True, frozen=True)
class Finding:
    """One fact, and what to do when it is not as wanted."""

    topic: Topic
    name: str
    state: State
    detail: str
    advice: str = ""


def findings() -> list[Finding]:
    """Everything that the doctor looks at. Starts nothing, writes nothing, reaches no network."""
    return [*_machine(), *_packages(), *_devices(), *_plugins("backends"), *_plugins("engines"), *_folders()]


def show(console: Console | None = None) -> bool:
    """Print the findings as a table; True when nothing is wrong."""
    found = findings()
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column in ("", "what", "state", "found, and → what to do about it"):
        table.add_column(column, overflow="fold", no_wrap=column in ("", "what", "state"))
    topic = ""
    for finding in found:
        first = finding.topic if finding.topic != topic else ""
        if first and topic:
            table.add_section()
        topic = finding.topic
        advice = f"\n→ {escape(finding.advice)}" if finding.advice else ""
        table.add_row(f"[bold]{first}[/]", escape(finding.name), _MARKS[finding.state], escape(finding.detail) + advice)
    (console or Console()).print(table)
    return all(finding.state != "wrong" for finding in found)


def _machine() -> Iterator[Finding]:
    yield Finding("machine", "python", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    cores, threads = len(os.sched_getaffinity(0)) if platform.system() == "Linux" else os.cpu_count() or 1, torch.get_num_threads()
    detail = f"{cores} cores for this process; torch threads: {threads}"
    yield Finding("machine", "cores", "ok", detail, "" if cores > 1 else "more ranks than cores take turns: expect no speed-up")


def _packages() -> Iterator[Finding]:
    try:
        declared = metadata.requires(_DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        yield Finding("packages", _DISTRIBUTION, "wrong", "used from its folder, not installed", "pip install -e . -c constraints.txt")
        return
    yield Finding("packages", _DISTRIBUTION, "ok", metadata.version(_DISTRIBUTION))
    requirements = [Requirement(text) for text in declared]
    for requirement in (r for r in requirements if r.marker is None or r.marker.evaluate({"extra": ""})):
        yield _package(requirement, "packages", "pip install '{}'")
    extras = metadata.metadata(_DISTRIBUTION).get_all("Provides-Extra") or []
    for extra in (name for name in extras if name not in plugins.names("engines")):  # an engine says itself what it needs
        of_extra = [r for r in requirements if r.marker and r.marker.evaluate({"extra": extra}) and not r.marker.evaluate({"extra": ""})]
        results = [_package(r, "extras", "") for r in of_extra]
        lacking = [f"{r.name} ({r.detail})" for r in results if r.state != "ok"]
        advice = plugins.install(extra) if lacking else ""
        detail = "not complete: " + ", ".join(lacking) if lacking else ", ".join(f"{r.name} {r.detail}" for r in results)
        yield Finding("extras", extra, "absent" if lacking else "ok", detail, advice)


def _package(requirement: Requirement, topic: Topic, advice: str) -> Finding:
    wanted = f"{requirement.name}{requirement.specifier}"
    try:
        version = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return Finding(topic, requirement.name, "wrong", "not installed", advice.format(wanted))
    if not requirement.specifier.contains(version, prereleases=True):
        return Finding(topic, requirement.name, "wrong", f"{version}, wanted {requirement.specifier}", advice.format(wanted))
    return Finding(topic, requirement.name, "ok", version)


def _devices() -> Iterator[Finding]:
    gloo = torch.distributed.is_available() and torch.distributed.is_gloo_available()
    if gloo:
        yield Finding("devices", "cpu", "ok", "collectives: gloo")
    else:
        yield Finding("devices", "cpu", "wrong", "this torch has no gloo: one rank only", "install another build of torch")
    if not torch.cuda.is_available():
        built = f"torch is built for CUDA {torch.version.cuda}, and it finds no device" if torch.version.cuda else "torch is a CPU build"
        yield Finding("devices", "cuda", "absent", built, "everything runs on the CPU; for a GPU: its driver and a CUDA build of torch")
        return
    shared = Path("/dev/shm")
    if torch.cuda.device_count() > 1 and shared.is_dir() and shutil.disk_usage(shared).total < _SHARED_MEMORY:
        advice = "docker run --shm-size=8g, or --ipc=host: nccl passes data of one machine through it"
        yield Finding("devices", "shared memory", "wrong", f"{shared}: {shutil.disk_usage(shared).total / 2**20:.0f} MiB", advice)
    nccl = torch.distributed.is_nccl_available()
    for index in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(index)
        detail = f"{card.name}, {card.total_memory / 2**30:.0f} GiB, bfloat16 {'yes' if torch.cuda.is_bf16_supported() else 'no'}"
        yield Finding("devices", f"cuda:{index}", "ok" if nccl else "wrong", detail, "" if nccl else "torch has no nccl: one rank only")


def _plugins(kind: Literal["backends", "engines"]) -> Iterator[Finding]:
    for name in plugins.names(kind):
        try:
            plugins.load(kind, name)
            if plugins.for_tests(kind, name):
                continue
            lacking = plugins.missing(kind, name)
        except ImportError as error:
            yield Finding(kind, name, "wrong", f"cannot be imported: {error}", "see packages above")
            continue
        if lacking:
            yield Finding(kind, name, "absent", f"needs {', '.join(lacking)}", "; ".join(lacking.values()))
        else:
            yield Finding(kind, name, "ok", _first_sentence(f"drumroll.{kind}.{name}"))


def _first_sentence(module: str) -> str:
    text = inspect.getdoc(importlib.import_module(module)) or ""
    return text.split("\n\n")[0].replace("\n", " ").replace("et al. ", "et al.\xa0").split(". ")[0].replace("\xa0", " ").rstrip(".")


def _folders() -> Iterator[Finding]:
    for name, folder in (("runs", Path.cwd()), ("cache", env.read().cache), ("hub cache", Path(HF_HUB_CACHE))):
        existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
        if not os.access(existing, os.W_OK):
            advice = "DRUMROLL_CACHE, HF_HOME or the working directory chooses another"
            yield Finding("folders", name, "wrong", f"{folder}: {existing} may not be written", advice)
            continue
        free = shutil.disk_usage(existing).free
        advice = "little space for checkpoints and models" if free < _LOW_DISK else ""
        yield Finding("folders", name, "wrong" if free < _LOW_DISK else "ok", f"{folder}: {free / 2**30:.0f} GiB free", advice)
