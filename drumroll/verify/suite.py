"""`drumroll verify`: a training backend against the executable specification, on the same data.

The specification runs in one process and writes down what it gets; the backend under test then runs the same scenarios on its ranks and
compares. What each check proves stands in docs/verify.md.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, get_args, get_origin

import torch
from pydantic import BaseModel, ValidationError
from rich.console import Console

from drumroll import plugins
from drumroll.errors import UserError
from drumroll.observe.checks import CheckRow, write_rows
from drumroll.verify import subjects
from drumroll.verify.batches import POISONED, SPLITS, WHOLE
from drumroll.verify.probe import Case, Probe
from drumroll.verify.trial import Job, Specification, Trial
from drumroll.verify.view import show

TIMEOUT_S = 60.0  # of one scenario on the suite's own models
TIMEOUT_OWN_MODEL_S = 600.0
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def run(
    backend: str,
    *,
    ranks: int = 2,
    models: Sequence[str] = (),
    dtype: str = "float32",
    device: str = "auto",
    json: Path | None = None,
    timeout_s: float | None = None,
    console: Console | None = None,
) -> bool:
    """Verify `backend`, print the table, and write its rows to `json`; True when every check passed.

    `models`: folders, hub ids or builtin:NAME; none: four small models made for it. `timeout_s`: of one scenario. Raises UserError for
    input that makes no sense.
    """
    started = time.monotonic()
    found = verify(backend, ranks=ranks, models=models, dtype=dtype, device=device, timeout_s=timeout_s)
    if json is not None:
        write_rows(json, found)
    show(console or Console(), found, f"{backend} on {ranks} rank{'s' if ranks > 1 else ''}, {dtype}", time.monotonic() - started)
    return all(row.passed for row in found)


def verify(
    backend: str,
    *,
    ranks: int = 2,
    models: Sequence[str] = (),
    dtype: str = "float32",
    device: str = "auto",
    timeout_s: float | None = None,
) -> list[CheckRow]:
    """The rows of every check, in the order they were made. Raises UserError for input that makes no sense."""
    if dtype not in DTYPES:
        raise UserError(f"--dtype {dtype}: expected {' or '.join(DTYPES)}")
    variants = option_variants(_config(backend))
    limit = timeout_s or (TIMEOUT_OWN_MODEL_S if models else TIMEOUT_S)
    with TemporaryDirectory(prefix="drumroll-verify-") as folder:
        root = Path(folder)
        tested = subjects.of_paths(models) if models else subjects.builtin(root / "models")
        with Specification(root, device, limit) as specification:
            cases = [specification.case(subject, DTYPES[dtype]) for subject in tested]
            expected = specification.run(jobs(cases, {}, whole=True), noise=bool(models))
        with Trial(backend, ranks, device, limit, root / "trial", expected) as trial:
            wanted = [job for number, options in enumerate(variants) for job in jobs(cases, options, whole=number == 0)]
            return [row for job in wanted for row in trial.rows(job)]


def option_variants(config: type[BaseModel]) -> list[dict[str, Any]]:
    """No options, then every other value of each option that has few: booleans and Literals, one at a time."""
    found: list[dict[str, Any]] = [{}]
    for name, info in config.model_fields.items():
        values: tuple[Any, ...] = (False, True) if info.annotation is bool else ()
        if get_origin(info.annotation) is Literal:
            values = get_args(info.annotation)
        found += [{name: value} for value in values if value != info.default]
    return found


def _config(backend: str) -> type[BaseModel]:
    """The options' schema. Raises UserError for a plug-in without one, or with options that have no default."""
    plugin = plugins.load("backends", backend)
    try:
        schema: type[BaseModel] = plugin.Config
        schema()
    except AttributeError as error:
        raise UserError(f"{backend}: {error}; expected a class or object as in drumroll.backends.base.BackendPlugin") from error
    except ValidationError as error:
        raise UserError(f"{backend}: its Config needs a default for every option, so that it can be verified: {error}") from error
    return schema


def jobs(cases: Sequence[Case], options: dict[str, Any], whole: bool) -> Iterator[Job]:
    """Every scenario; for a variant of the options, training alone. What no family can change runs on one tied and one untied subject."""
    pair = _pair(cases)
    if not whole:
        for case in pair:
            yield from (Job(Probe.train, replace(case, split=split, options=options), split.name) for split in SPLITS[1::2])
        return
    for case in cases:
        yield from (Job(Probe.train, replace(case, split=split), split.name) for split in SPLITS)
        yield Job(Probe.forward_only, replace(case, split=SPLITS[-1]), SPLITS[-1].name)
    for case in pair:
        yield Job(Probe.train, replace(case, split=SPLITS[1], checkpointing="full"), "activation checkpointing")
        yield Job(Probe.memory, case, WHOLE.name)
        yield Job(Probe.checkpoint, replace(case, split=SPLITS[1]), SPLITS[1].name)
        yield Job(Probe.adopt, replace(case, split=SPLITS[1]), SPLITS[1].name)
        yield Job(Probe.skip, replace(case, split=POISONED), POISONED.name)
        if not case.subject.tied:  # then the gradient of a frozen body's embedding is NaN in some rows only, on one rank if it is sharded
            pattern = f"^{re.escape(case.subject.embedding)}$"
            embedding = replace(case, split=POISONED, trainable=(pattern,), optim=replace(case.optim, max_grad_norm=0.0))
            yield Job(Probe.skip, embedding, f"{POISONED.name}, embedding alone trains")


def _pair(cases: Sequence[Case]) -> list[Case]:
    """The last untied subject and the first tied one: where there are two families, one of each."""
    untied, tied = [case for case in cases if not case.subject.tied], [case for case in cases if case.subject.tied]
    return [*untied[-1:], *tied[:1]]
