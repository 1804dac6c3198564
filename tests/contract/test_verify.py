"""`drumroll verify` passes what is right, whoever wrote it, and names what is wrong in everything that is not."""

from __future__ import annotations

import io
import math
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import BaseModel
from rich.console import Console

from drumroll.errors import UserError
from drumroll.observe.checks import CheckRow, read_rows
from drumroll.verify import subjects, suite
from drumroll.verify.batches import POISONED, SPLITS, STEPS, plan, samples
from drumroll.verify.probe import FOREIGN_STEP, FOREIGN_WEIGHTS, Case
from drumroll.verify.rows import Labels
from drumroll.verify.trial import MAX_CRASHES, Job, Specification, Trial

HERE = Path(__file__).parent
PLAIN = f"{HERE / 'plain_backend.py'}:Plain"
FAULTY = HERE / "faulty_backends.py"

pytestmark = pytest.mark.timeout(240)


def failed(rows: list[CheckRow]) -> set[str]:
    return {row.check for row in rows if not row.passed}


def test_a_right_backend_from_outside_passes(tmp_path: Path) -> None:
    shown = io.StringIO()
    file = tmp_path / "rows.json"
    assert suite.run(PLAIN, ranks=2, json=file, console=Console(file=shown, width=100))
    rows = read_rows(file)
    assert failed(rows) == set()
    assert {row.options["model"] for row in rows} == {"llama", "llama tied", "qwen3", "qwen3 tied"}
    for check in ("log-probs", "entropy", "loss", "gradients", "gradient norm", "parameters after 3 steps"):
        of_check = [row for row in rows if row.check == check]
        assert {row.options["batch"] for row in of_check} >= {split.name for split in SPLITS}
        assert all(row.tolerance == 1e-5 and row.ranks == 2 and row.backend == PLAIN for row in of_check)
        assert 0 < max(row.value for row in of_check) < 1e-5
        assert check in shown.getvalue()
    assert f"all {len(rows)} checks passed" in shown.getvalue()


def test_a_wrong_backend_fails_by_name(tmp_path: Path) -> None:
    """The whole way that a user goes, on their own model."""
    shown = io.StringIO()
    (subject, *_) = subjects.builtin(tmp_path / "models")
    assert not suite.run(f"{FAULTY}:Averages", models=[subject.path], json=tmp_path / "rows.json", console=Console(file=shown, width=200))
    rows = read_rows(tmp_path / "rows.json")
    assert {row.options["model"] for row in rows} == {"llama"}
    assert {"gradients", "gradient norm"} <= failed(rows)
    (worst, *_) = [row for row in rows if row.check == "gradients" and not row.passed]
    assert worst.value == pytest.approx(0.5, rel=1e-3)  # two ranks: half of the gradient
    assert "rank" in worst.options["where"]
    assert "FAIL gradients (0.5): llama, 1 micro-batch: rank 0, " in shown.getvalue()


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict[str, Case], Trial]]:
    """One tied and one untied subject, and the processes that every fault is tried in."""
    root = tmp_path_factory.mktemp("verify")
    tested = [subject for subject in subjects.builtin(root / "models") if subject.name.startswith("llama")]
    with Specification(root, "cpu", 60.0) as specification:
        found = [specification.case(subject, torch.float32) for subject in tested]
        expected = specification.run(suite.jobs(found, {}, whole=True))
    with Trial(f"{FAULTY}:PLUGIN", 2, "cpu", 60.0, root / "trial", expected) as trial:
        yield {case.subject.name: case for case in found}, trial


def run(cases: tuple[dict[str, Case], Trial], fault: str, scenario: str, model: str = "llama") -> list[CheckRow]:
    """The rows of one scenario: `train` is that of two micro-batches."""
    of_name, trial = cases
    wanted = [job for job in suite.jobs([of_name[model]], {}, whole=True) if matches(job, scenario)]
    (job, *_) = wanted
    return trial.rows(replace(job, case=replace(job.case, options={"fault": fault})))


def matches(job: Job, scenario: str) -> bool:
    name = job.scenario.__name__
    if scenario == "frozen":
        return name == "skip" and bool(job.case.trainable)
    if scenario in ("train", "whole"):
        return name == "train" and job.case.split == (SPLITS[0] if scenario == "whole" else SPLITS[1])
    return name == scenario and not job.case.trainable


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
    "HidesACopy": ("memory", "memory: all tensors", "memory: optimizer"),
    "StaysAfterClose": ("memory", "memory: after close", "memory: all tensors"),
    "HoldsMomentsWithoutAnOptimizer": ("forward_only", "forward-only: memory", "forward-only: log-probs"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named(fault: str, cases: tuple[dict[str, Case], Trial]) -> None:
    scenario, responsible, innocent = FAULTS[fault]
    rows = run(cases, fault, scenario)
    assert responsible in failed(rows), failed(rows)
    assert innocent in {row.check for row in rows} - failed(rows), failed(rows)
    assert all(row.options["where"] for row in rows if row.check == responsible and not row.passed and row.tolerance != 1.0)


@pytest.mark.parametrize("scenario", ["whole", "train", "memory", "forward_only", "checkpoint", "adopt", "skip", "frozen"])
def test_every_scenario_passes_without_a_fault(scenario: str, cases: tuple[dict[str, Case], Trial]) -> None:
    """So that what the faults fail is their doing."""
    assert failed(run(cases, "Plain", scenario)) == set()


@pytest.mark.parametrize(
    ("fault", "checks"),
    [
        ("Unties", {"names exported", "gradients", PARAMETERS}),
        ("UntiesQuietly", {"gradients", PARAMETERS}),
        ("ExportsTheTieTwice", {"names exported"}),
    ],
)
def test_ties_are_held(fault: str, checks: set[str], cases: tuple[dict[str, Case], Trial]) -> None:
    assert checks <= failed(run(cases, fault, "whole", "llama tied"))


def test_an_error_is_a_failed_row(cases: tuple[dict[str, Case], Trial]) -> None:
    """Whatever is raised becomes a row with the check and the first line; after enough crashes the rest is not tried."""
    wanted = [
        ("SavesParametersOnly", "checkpoint", "names saved", "missing or unexpected: ['optimizer."),
        ("SavesInItsOwnFormat", "checkpoint", "names saved", "torch.distributed.checkpoint cannot read it"),
        ("CannotSave", "checkpoint", "save", "NotImplementedError: save comes later"),
        ("KeepsTheGraph", "train", "log-probs", "requires_grad=True"),
        ("DiesOnTheLastRank", "train", "step", "rank 1: IndexError: list index out of range"),
        ("Plain", "train", "train: not run", f"given up after {MAX_CRASHES} crashes"),
    ]
    of_name, shared = cases
    with Trial(f"{FAULTY}:PLUGIN", 2, "cpu", 60.0, shared.scratch / "errors", shared.expected) as trial:
        for fault, scenario, check, error in wanted:
            rows = run((of_name, trial), fault, scenario)
            (row,) = [row for row in rows if row.check == check]
            assert not row.passed
            assert error in row.options["where"]
            assert "second line" not in row.options["where"]


def test_a_hang_ends_at_the_limit(cases: tuple[dict[str, Case], Trial]) -> None:
    of_name, shared = cases
    with Trial(f"{FAULTY}:PLUGIN", 2, "cpu", 5.0, shared.scratch / "hang", shared.expected) as trial:
        started = time.monotonic()
        (row,) = run((of_name, trial), "Waits", "train")
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
    for arguments, words in (
        ({"backend": PLAIN, "dtype": "float16"}, "--dtype float16: expected float32 or bfloat16"),
        ({"backend": PLAIN, "models": [str(tmp_path)]}, "config.json"),
        ({"backend": f"{HERE / 'test_verify.py'}:Needy"}, "needs a default for every option"),
        ({"backend": f"{HERE / 'test_verify.py'}:HERE"}, "BackendPlugin"),
    ):
        with pytest.raises(UserError, match=words):
            suite.verify(**arguments)  # type: ignore[arg-type]


class Needy:
    class Config(BaseModel):
        shards: int


def test_option_variants_are_booleans_and_literals_one_at_a_time() -> None:
    from typing import Literal

    class Config(BaseModel):
        early: bool = True
        how: Literal["a", "b", "c"] = "b"
        size: int = 3

    assert suite.option_variants(Config) == [{}, {"early": False}, {"how": "a"}, {"how": "c"}]


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
