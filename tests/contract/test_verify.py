"""`drumroll verify` passes what is right, whoever wrote it, and names what is wrong in everything that is not."""

from __future__ import annotations

import io
import math
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from pydantic import BaseModel, Field
from rich.console import Console
from typer.testing import CliRunner

from drumroll import config as configs
from drumroll import plugins
from drumroll.backends.base import ModelSpec, OptimSpec
from drumroll.cli import app
from drumroll.errors import UserError
from drumroll.models.layout import lay_out
from drumroll.observe.checks import CheckRow, read_rows, write_rows
from drumroll.packing import collate
from drumroll.runtime.worker import model_spec
from drumroll.verify import command, subjects, suite, variants
from drumroll.verify.batches import POISONED, SPLITS, STEPS, Split, plan, samples
from drumroll.verify.probe import Probe
from drumroll.verify.report import BESIDE, FOREIGN_STEP, FOREIGN_WEIGHTS, SENT_AGAIN
from drumroll.verify.rows import NOT_APPLICABLE, Labels
from drumroll.verify.suite import Prepared, Setup
from drumroll.verify.trial import MAX_CRASHES, Job, Specification, Trial
from drumroll.verify.variants import AS_IS, COMMON, Variant
from drumroll.verify.view import show

HERE = Path(__file__).parent
PLAIN = f"{HERE / 'plain_backend.py'}:Plain"
FAULTY = HERE / "faulty_backends.py"

pytestmark = pytest.mark.timeout(240)


def failed(rows: list[CheckRow]) -> set[str]:
    return {row.check for row in rows if not row.passed}


def test_a_right_backend_from_outside_passes(tmp_path: Path) -> None:
    """As it is on all models, and in one variant of each kind: what it does not do, it may refuse."""
    shown = io.StringIO()
    setup = Setup(variants=[AS_IS, *(v for v in COMMON if v.name in ("one rank", "tiled MLP", "one block and norms train", "Muon"))])
    cells = suite.verify([PLAIN], setup)
    file = tmp_path / "rows.json"
    rows = [row for cell in cells for row in cell.rows]
    write_rows(file, rows)
    assert read_rows(file) == rows
    assert failed(rows) == set()
    assert [(cell.variant, cell.applies) for cell in cells][-1] == ("Muon", False)
    assert [cell.ranks for cell in cells] == [2, 1, 2, 2, 2]
    assert "this backend has AdamW" in cells[-1].refusals[0]
    whole = cells[0].rows
    assert {row.options["model"] for row in whole} == {"qwen3 experts", "llama", "llama tied", "qwen3", "qwen3 tied"}
    show(Console(file=shown, width=100), cells, "plain", 1.0)
    for check in ("log-probs", "entropy", "loss", "gradients", "gradient norm", "parameters after 3 steps"):
        of_check = [row for row in whole if row.check == check]
        assert {row.options["batch"] for row in of_check} >= {split.name for split in SPLITS}
        assert all(row.tolerance == 1e-5 and row.ranks == 2 and row.backend == PLAIN for row in of_check)
        assert 0 < max(row.value for row in of_check) < 1e-5
        assert check in shown.getvalue()
    assert f"all {len([r for r in rows if r.check != NOT_APPLICABLE])} checks passed" in shown.getvalue()


WRONG = {  # the fault, the check that names it
    "Averages": "gradients",
    "ForgetsABuffer": "log-probs",
    "Unties": "names exported",
    "DropsTheLastMicroBatch": "gradients",
    "HalfPrecisionMoments": "moments in the files",
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_backend_fails_on_the_command_line(fault: str, tmp_path: Path) -> None:
    """The whole way that a user goes, on their own model."""
    subject = next(s for s in subjects.builtin(tmp_path / "models") if s.tied == (fault == "Unties"))
    file = tmp_path / "rows.json"
    arguments = ["verify", f"{FAULTY}:{fault}", "--model", subject.path, "--only", "as it is", "--json", str(file)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1, result.output
    rows = read_rows(file)
    assert {row.options["model"] for row in rows} == {Path(subject.path).name}
    assert WRONG[fault] in failed(rows)
    assert f"FAIL {WRONG[fault]} (" in result.output
    (worst, *_) = [row for row in rows if row.check == WRONG[fault] and not row.passed]
    assert "where" in worst.options
    if fault == "Averages":
        assert worst.value == pytest.approx(0.5, rel=1e-3)  # two ranks: half of the gradient


def test_all_backends_in_one_variant(tmp_path: Path) -> None:
    """One row of the matrix, with every file that is written of it."""
    files = {kind: tmp_path / f"verified.{kind}" for kind in ("json", "html", "markdown")}
    arguments = [text for kind, file in files.items() for text in (f"--{kind}", str(file))]
    result = CliRunner().invoke(app, ["verify", "--all", "--only", "one block", *arguments])
    assert result.exit_code == 0, result.output
    rows = read_rows(files["json"])
    assert {row.backend for row in rows} == set(plugins.names("backends"))
    assert {row.ranks for row in rows if row.backend != plugins.SPECIFICATION_BACKEND} == {2}
    assert {row.options["variant"] for row in rows} == {"one block and norms train"}
    assert failed(rows) == set()
    for name in plugins.names("backends"):
        assert f"{name}, one block and norms train: pass" in result.output
        assert f"<th>{name}</th>" in files["html"].read_text()
        assert f"| one block and norms train | {name} |" in files["markdown"].read_text()


def test_what_a_recipe_would_run_is_verified(tmp_path: Path) -> None:
    """Its model, its backend with its options, its optimizer, its way to compute; hyper-parameters are the suite's."""
    (subject, *_) = subjects.builtin(tmp_path / "models")
    backend = "zero1"
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"pipeline: sft\nmax_steps: 1\nrun_dir: {tmp_path / 'run'}\ndata: {{train: {{task: sort}}}}\nruntime: {{ranks: 2}}\n"
        f"model: {{path: {subject.path}, checkpointing: full, tile_mlp: 8, trainable: [norm, mlp]}}\n"
        f"optim: {{name: muon, lr: 0.5, weight_decay: 0.7}}\nbackend: {{name: {backend}, {backend}: {{bucket_mb: 0.5}}}}\n"
    )
    result = CliRunner().invoke(app, ["verify", "--config", str(recipe), "--json", str(tmp_path / "rows.json")])
    assert result.exit_code == 0, result.output
    rows = read_rows(tmp_path / "rows.json")
    assert failed(rows) == set()
    assert {(row.backend, row.ranks, row.options["variant"]) for row in rows} == {(backend, 2, "as the recipe says")}
    assert {row.options["bucket_mb"] for row in rows} == {0.5}
    assert {row.options["model"] for row in rows} == {Path(subject.path).name}
    assert {"weights in the files", "skip: next parameters", "sleep: bytes held"} <= {row.check for row in rows}


@pytest.fixture(scope="module")
def jobs_and_trial(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[Job], Trial]]:
    """One tied and one untied subject, and the processes that every fault is tried in."""
    root = tmp_path_factory.mktemp("verify")
    tested = [subject for subject in subjects.builtin(root / "models") if subject.name.startswith("llama")]
    prepared = Prepared(Setup())
    frozen = Variant(name="frozen", model={"trainable": (r"\.1\.", "norm")}, scenarios=(Probe.checkpoint,))
    with Specification(root, "cpu", 60.0) as specification:
        for variant in (AS_IS, frozen):
            prepared.add(variant, tested, specification)
    with Trial(f"{FAULTY}:PLUGIN", 2, "cpu", 60.0, root / "trial", prepared.expected) as trial:
        yield [*prepared.jobs(AS_IS, {}), *prepared.jobs(frozen, {})], trial


def run(jobs: list[Job], trial: Trial, fault: str, scenario: str, model: str = "llama") -> list[CheckRow]:
    """The rows of one scenario: `train` is that of two micro-batches."""
    job, *_ = [job for job in jobs if job.case.subject.name == model and matches(job, scenario)]
    return trial.rows(replace(job, case=replace(job.case, options={"fault": fault})), {"variant": AS_IS.name})


def matches(job: Job, scenario: str) -> bool:
    name = job.scenario.__name__
    if scenario in ("frozen", "frozen state"):
        return name == ("skip" if scenario == "frozen" else "checkpoint") and bool(job.case.model.trainable)
    if scenario in ("train", "whole"):
        return name == "train" and job.case.split == (SPLITS[0] if scenario == "whole" else SPLITS[1])
    return name == scenario and not job.case.model.trainable


PARAMETERS = "parameters after 3 steps"
# fault -> scenario, check that must name it, check that must not (what comes before the fault is right)
FAULTS: dict[str, tuple[str, str, str]] = {
    "Averages": ("train", "gradients", "log-probs"),
    "ForgetsToReduceBiases": ("train", "gradients", "log-probs"),
    "ForgetsToReduceNorms": ("train", "gradients", "log-probs"),
    "ReducesInHalfPrecision": ("train", "gradients", "log-probs"),
    "LocalDenominators": ("train", "gradients", "log-probs"),
    "DropsTheLastMicroBatch": ("train", "gradients", "log-probs"),
    "KeepsOnlyTheLastMicroBatch": ("train", "gradients", "log-probs"),
    "AveragesMicroBatches": ("train", "gradients", "log-probs"),
    "ReducesWhatIsReduced": ("train", "gradients", "log-probs"),
    "TakesTheFirstRanksGradient": ("train", "gradients", "log-probs"),
    "KeepsGradients": ("train", "gradients of later steps", "gradients"),
    "DetachesEntropy": ("train", "gradients", "entropy"),
    "ForgetsABuffer": ("train", "log-probs", "weights as loaded"),
    "BufferInHalfPrecision": ("train", "log-probs", "weights as loaded"),
    "IgnoresTemperature": ("train", "log-probs", "weights as loaded"),
    "IgnoresTemperatureWithoutEntropy": ("train", "log-probs", "gradients"),
    "EntropyAtAnotherTemperature": ("train", "entropy", "log-probs"),
    "TrainsInTrainMode": ("train", "outputs in training", "log-probs"),
    "LeaksBetweenSamples": ("train", "log-probs", "weights as loaded"),
    "OffByOne": ("train", "log-probs", "weights as loaded"),
    "ReportsTheMeanLoss": ("train", "loss", "gradients"),
    "CountsTokensTwice": ("train", "statistics of the loss", "gradients"),
    "OwnEpsilon": ("train", PARAMETERS, "gradients"),
    "OwnBetas": ("train", PARAMETERS, "gradients"),
    "NoWeightDecay": ("train", PARAMETERS, "gradients"),
    "DecaysMatricesOnly": ("train", PARAMETERS, "gradients"),
    "CouplesWeightDecay": ("train", PARAMETERS, "gradients"),
    "KeepsTheFirstLearningRate": ("train", PARAMETERS, "gradients"),
    "NoBiasCorrection": ("train", PARAMETERS, "gradients"),
    "ForgetsMoments": ("train", PARAMETERS, "gradients"),
    "RoundsMoments": ("checkpoint", "moments in the files", "names saved"),
    "HalfPrecisionMoments": ("checkpoint", "moments in the files", "names saved"),
    "HalfPrecisionParameters": ("train", "weights as loaded", "ranks agree"),
    "NeverClips": ("train", PARAMETERS, "gradients"),
    "ClipsAtOne": ("train", PARAMETERS, "gradients"),
    "ClipsByTheLocalNorm": ("train", PARAMETERS, "gradients"),
    "ClipsEachParameter": ("train", PARAMETERS, "gradients"),
    "ScalesUpToo": ("train", PARAMETERS, "gradients"),
    "ReportsTheClippedNorm": ("train", "gradient norm", PARAMETERS),
    "LocalGradientNorm": ("train", "ranks agree", "gradients"),
    "TrainsWhatIsFrozen": ("frozen", "skip: next parameters", "skip: nothing moves"),
    "NeverSkips": ("skip", "skip: all ranks together", "gradients"),
    "SkipsAlone": ("skip", "skip: all ranks together", "gradients"),
    "SkipKeepsGradients": ("skip", "skip: next gradients", "skip: nothing moves"),
    "SkipCountsAsAStep": ("skip", "skip: next parameters", "skip: next gradients"),
    "SkipDecaysMoments": ("skip", "skip: next parameters", "skip: next gradients"),
    "StaleExport": ("whole", PARAMETERS, "log-probs after 3 steps"),
    "StaleDigests": ("whole", "digests", PARAMETERS),
    "DigestsOfFloat32": ("whole", "digests", PARAMETERS),
    "IgnoresDtype": ("whole", "weights in bfloat16", PARAMETERS),
    "RoundsTheExport": ("whole", "weights as loaded", "log-probs after 3 steps"),
    "ExportsOnTheFirstRankOnly": ("whole", "names exported", "log-probs after 3 steps"),
    "ExportsTwice": ("whole", "names exported", "log-probs after 3 steps"),
    "ExportsTrainableOnly": ("frozen", "skip: next parameters", "skip: nothing moves"),
    "RanksDiffer": ("whole", "ranks agree", "digests"),
    "LoadsParametersOnly": ("checkpoint", "state as restored", "weights as restored"),
    "LoadsAllButOneMoment": ("checkpoint", "state as restored", "weights as restored"),
    "LoadsAllButOneParameter": ("checkpoint", "weights as restored", "moments in the files"),
    "ForgetsTheStepCount": ("adopt", FOREIGN_STEP, FOREIGN_WEIGHTS),
    "SavesLate": ("checkpoint", "state as restored", "step after restoring"),
    "StaysAwake": ("sleep", "sleep: bytes held", "sleep: weights after waking"),
    "WakesInHalfPrecision": ("sleep", "sleep: weights after waking", "sleep: bytes held"),
    "WakesWithoutMoments": ("sleep", "sleep: parameters after 3 steps", "sleep: weights after waking"),
    "HidesACopy": ("memory", "memory: all tensors", "memory: optimizer"),
    "StaysAfterClose": ("memory", "memory: after close", "memory: all tensors"),
    "SendsAllAgain": ("frozen state", SENT_AGAIN, "weights saved"),
    "ForgetsToSendNorms": ("frozen state", SENT_AGAIN, "weights saved"),
    "SharesWhatIsAlive": ("forward_only", BESIDE, "forward-only: log-probs"),
    "HoldsMomentsWithoutAnOptimizer": ("forward_only", "forward-only: memory", "forward-only: log-probs"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named(fault: str, jobs_and_trial: tuple[list[Job], Trial]) -> None:
    scenario, responsible, innocent = FAULTS[fault]
    rows = run(*jobs_and_trial, fault, scenario)
    assert responsible in failed(rows), failed(rows)
    assert innocent in {row.check for row in rows} - failed(rows), failed(rows)
    assert all(row.options["where"] for row in rows if row.check == responsible and not row.passed and row.tolerance != 1.0)


@pytest.mark.parametrize(
    "scenario", ["whole", "train", "memory", "forward_only", "checkpoint", "adopt", "skip", "frozen", "frozen state", "sleep"]
)
def test_every_scenario_passes_without_a_fault(scenario: str, jobs_and_trial: tuple[list[Job], Trial]) -> None:
    """So that what the faults fail is their doing."""
    assert failed(run(*jobs_and_trial, "Plain", scenario)) == set()


@pytest.mark.parametrize(
    ("fault", "checks"),
    [
        ("Unties", {"names exported", "gradients", PARAMETERS}),
        ("UntiesQuietly", {"gradients", PARAMETERS}),
        ("ExportsTheTieTwice", {"names exported"}),
    ],
)
def test_ties_are_held(fault: str, checks: set[str], jobs_and_trial: tuple[list[Job], Trial]) -> None:
    assert checks <= failed(run(*jobs_and_trial, fault, "whole", "llama tied"))


def test_an_error_is_a_failed_row(jobs_and_trial: tuple[list[Job], Trial]) -> None:
    """Whatever is raised becomes a row with the check and the first line; after enough crashes the rest is not tried."""
    wanted = [
        ("SavesParametersOnly", "checkpoint", "names saved", "missing or unexpected: ['optimizer."),
        ("SavesInItsOwnFormat", "checkpoint", "names saved", "torch.distributed.checkpoint cannot read it"),
        ("CannotSave", "checkpoint", "save", "NotImplementedError: save comes later"),
        ("KeepsTheGraph", "train", "log-probs", "requires_grad=True"),
        ("DiesOnTheLastRank", "train", "step", "rank 1: IndexError: list index out of range"),
        ("Plain", "train", "train: not run", f"given up after {MAX_CRASHES} crashes"),
    ]
    jobs, shared = jobs_and_trial
    with Trial(f"{FAULTY}:PLUGIN", 2, "cpu", 60.0, shared.scratch / "errors", shared.expected) as trial:
        for fault, scenario, check, error in wanted:
            rows = run(jobs, trial, fault, scenario)
            (row,) = [row for row in rows if row.check == check]
            assert not row.passed
            assert error in row.options["where"]
            assert "second line" not in row.options["where"]


def test_a_hang_ends_at_the_limit(jobs_and_trial: tuple[list[Job], Trial]) -> None:
    jobs, shared = jobs_and_trial
    with Trial(f"{FAULTY}:PLUGIN", 2, "cpu", 5.0, shared.scratch / "hang", shared.expected) as trial:
        started = time.monotonic()
        (row,) = run(jobs, trial, "Waits", "train")
        assert time.monotonic() - started < 30.0
    assert not row.passed
    assert math.isnan(row.value)
    assert re.search(r"rank \d: .*(silent for 5 s|[Tt]imed out|[Tt]imeout)", row.options["where"])


def test_a_bound_is_wider_where_the_specification_differs_from_itself() -> None:
    labels = Labels("b", 2, {}, torch.float32, {"gradients": 3e-6, "gradients of later steps": 4e-5, "weights as loaded": 1.0})
    assert labels.row("gradients", 0.0).tolerance == pytest.approx(3e-5)
    assert labels.row("gradient norm", 0.0).tolerance == pytest.approx(4e-4)
    assert labels.row("loss", 0.0).tolerance == 1e-5
    assert labels.row("weights as loaded", 0.0).tolerance == 0.0
    assert not labels.row("gradients", math.nan).passed


def test_what_makes_no_sense_is_refused(tmp_path: Path) -> None:
    own = f"{HERE / 'test_verify.py'}"
    for arguments, words in (
        ({"backend": PLAIN, "dtype": "float16"}, "--dtype float16: expected float32 or bfloat16"),
        ({"backend": PLAIN, "dtype": "bfloat16", "only": "tiled"}, "computes in float32"),
        ({"backend": PLAIN, "models": [str(tmp_path)]}, "config.json"),
        ({"backend": PLAIN, "only": "no such thing"}, "--only 'no such thing' is in no variant's name"),
        ({"backend": f"{own}:Needy"}, "needs a default for every option"),
        ({"backend": f"{own}:HERE"}, "BackendPlugin"),
        ({}, "expected the name of a backend, --all or --config"),
        ({"backend": PLAIN, "every": True}, "--all goes with neither"),
    ):
        with pytest.raises(UserError, match=words):
            command.run(**arguments)  # type: ignore[arg-type]


class Needy:
    class Config(BaseModel):
        shards: int


def test_variants_of_options_are_booleans_literals_and_examples_one_at_a_time() -> None:
    class Config(BaseModel):
        early: bool = True
        how: Literal["a", "b", "c"] = "b"
        dtype: Literal["float32", "bfloat16"] = "float32"
        size: int = 3
        parts: int = Field(1, examples=[1, 4])
        keep: bool | int = Field(True, examples=[False, 2])
        names: tuple[str, ...] = Field((), examples=[("A", "B")])

    found = variants.of_options(Config)
    assert [variant.options for variant in found] == [
        {"early": False}, {"how": "a"}, {"how": "c"}, {"dtype": "bfloat16"}, {"parts": 4},
        {"keep": False}, {"keep": 2}, {"names": ("A", "B")},
    ]  # fmt: skip
    assert [variant.name for variant in found][-2:] == ["keep=2", "names=A,B"]
    assert [variant.name for variant in found if variant.rounds] == ["dtype=bfloat16"]


def test_what_the_specification_computes_is_the_mathematics_alone() -> None:
    plain = ModelSpec("m", compute_dtype=torch.bfloat16, trainable=("norm",), share_prompts=False)
    asked = replace(plain, share_prompts=True, layout="packed", checkpointing="full", compile=True, tile_mlp=8)
    model, optim = variants.specified(asked, OptimSpec(name="muon", offload=True, weight_decay=0.5))
    assert model == plain
    assert optim == OptimSpec(name="muon", weight_decay=0.5)


def test_what_is_verified_is_what_a_recipe_runs_that_says_nothing_else() -> None:
    """Not one field of a `ModelSpec` is another in the suite than in such a run, nor where a test says nothing of it."""
    recipe = configs.parse(
        {"pipeline": "sft", "max_steps": 1, "run_dir": "r", "model": {"path": "m"}, "data": {"train": {"task": "sort"}},
         "backend": {"name": plugins.SPECIFICATION_BACKEND}}
    )  # fmt: skip
    runs = model_spec(recipe, Path("m"), torch.device("cpu"))
    assert runs == ModelSpec("m") == replace(suite.MODEL, path="m", temperature=1.0)
    assert runs.share_prompts
    assert [v.name for v in COMMON if not v.model.get("share_prompts", True)] == ["one rank", "every prompt computed"]


@pytest.mark.parametrize(("ranks", "splits"), [(1, SPLITS[::3]), (2, [*SPLITS[:2], SPLITS[3]]), (3, SPLITS[:1]), (4, SPLITS[:2])])
def test_prompts_are_shared_on_some_rank_in_every_step(ranks: int, splits: list[Split]) -> None:
    """On two ranks in each split that a variant trains on, so that a backend which cannot do it is seen."""
    for split in splits:
        for step in range(STEPS):
            made = samples(step, 67)
            parts = [part for rank in range(ranks) for part in plan(split, rank, ranks)]
            laid = [lay_out(collate([made[index] for index in part]), "rows", share_prompts=True) for part in parts]
            assert any(one.shared is not None and one.shared.real_CQ.any() for one in laid), (split, step)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 9, 12])
def test_every_split_has_every_sample_once_and_equal_passes(ranks: int) -> None:
    for split in (*SPLITS, POISONED):
        plans = [plan(split, rank, ranks) for rank in range(ranks)]
        assert {len(micros) for micros in plans} == {split.passes}
        assert sorted(index for micros in plans for micro in micros for index in micro) == list(range(9))
        if split.idle:
            assert plans[-1][-1] == []
            assert ranks == 1 or not any(plans[-1])
        if split.poisoned:
            assert plans[-1][-1] == [8]


def test_ranks_have_very_different_numbers_of_targets() -> None:
    for step in range(STEPS):
        made = samples(step, 67)
        counts: list[Any] = [sum(made[i].n_targets for i in plan(SPLITS[0], rank, 2)[0]) for rank in range(2)]
        assert max(counts) > 2 * min(counts)
        assert 0 in {sample.n_targets for sample in made}
