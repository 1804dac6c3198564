"""What backends hold, hand out, save and skip. Failure cases 15, 17 and 38, 46, and the export side of 51."""

from __future__ import annotations

import math
import tracemalloc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from drumroll import plugins
from drumroll.backends import engine as engine_module
from drumroll.backends import state
from drumroll.backends.base import KINDS, Backend, Checkpointing, ModelSpec, OptimSpec
from drumroll.backends.clip import local_part
from drumroll.digest import digest
from drumroll.errors import RunError
from drumroll.models.export import save_folder
from drumroll.packing import collate, denominators
from drumroll.planner.measure import peak_bytes
from drumroll.types import Denominators, LossOutput, MicroBatch, TokenOutputs
from tests.contract import backend_runs as runs
from tests.ranks import run_ranks
from tests.scorer_models import alone

LAYOUTS = (("single", 1), ("ddp", 2), ("zero1", 2), ("zero2", 2), ("fsdp1", 1), ("fsdp1", 2), ("fsdp2", 1), ("fsdp2", 2))
SHARDED = ("fsdp1", "fsdp2")  # parameters too
SPREAD = [name for name in plugins.names("backends") if name != plugins.SPECIFICATION_BACKEND]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: runs.write_model(root / name, "llama", name == "tied") for name in ("tied", "untied")}


def start_training(rank: int, ranks: int, name: str, options: dict[str, Any], spec: ModelSpec, steps: int) -> Any:
    """A backend that has done `steps` steps and holds gradients of the next."""
    samples = runs.make_samples(4)
    backend = runs.start(rank, ranks, name, options, spec, OptimSpec(weight_decay=0.01))
    micro = collate(samples[rank::ranks])
    for step in range(steps + 1):
        backend.forward_backward(micro, runs.loss_fn, denominators(samples), last=True)
        if step < steps:
            backend.step(runs.LR)
    return backend


# --- weights and digests


def export(rank: int, ranks: int, name: str, folders: dict[str, Path]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for model, folder in folders.items():
        backend = runs.start(rank, ranks, name, {}, ModelSpec(str(folder)), OptimSpec())
        engine_module.BUCKET_BYTES = 20_000  # several buckets even of so small a model
        found[model] = {}
        for dtype in (torch.float32, torch.bfloat16):
            buckets = [[(key, tensor.clone()) for key, tensor in bucket] for bucket in backend.weights(dtype)]
            found[model][dtype] = (buckets, backend.digests(dtype))
    held = []
    for bucket in backend.weights(torch.float32):
        tensor = weakref.ref(bucket[0][1])
        del bucket
        held.append(tensor() is not None)  # now, before the next bucket is made
    found["buckets kept alive"] = any(held)
    return found


@pytest.mark.parametrize(("name", "ranks"), [*LAYOUTS, ("fsdp1", 3), ("fsdp2", 3)])
def test_weights_and_digests(name: str, ranks: int, folders: dict[str, Path]) -> None:
    """Every name of the file once, the tied head under the embedding's; values and digests bit-equal to the file's, cast."""
    for found in run_ranks(export, ranks, name, folders):
        assert not found["buckets kept alive"]
        for model, folder in folders.items():
            expected = dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).named_parameters())
            for dtype, (buckets, digests) in found[model].items():
                names = [key for bucket in buckets for key, _ in bucket]
                assert len(buckets) >= 3
                assert sorted(names) == sorted(expected) == sorted(digests)
                for bucket in buckets:
                    assert len(bucket) == 1 or sum(tensor.nbytes for _, tensor in bucket) <= 20_000
                    assert all(torch.equal(tensor, expected[key].to(dtype)) for key, tensor in bucket)
                assert all(digests[key] == digest(tensor.to(dtype)) for key, tensor in expected.items())


def export_folders(rank: int, ranks: int, names: tuple[str, ...], folders: dict[str, Path], out: Path) -> dict[Any, torch.Tensor]:
    """Two steps, and the folder that a run would write; (backend, model) -> the live model's log-probs of all samples."""
    found: dict[Any, torch.Tensor] = {}
    for name in names:
        for model, folder in folders.items():
            backend = start_training(rank, ranks, name, {}, ModelSpec(str(folder)), steps=2)
            found[name, model] = backend.logprobs(collate(runs.make_samples(4))).logprobs.clone()
            buckets = backend.weights(torch.float32)
            if rank == 0:
                save_folder(folder, out / name / model, buckets)
            else:
                assert sum(map(len, buckets)) > 0
    return found


@pytest.mark.parametrize(("names", "ranks"), [(("single",), 1), (("ddp", "zero1", "zero2", *SHARDED), 2)], ids=["1", "2"])
def test_case_46_what_is_exported_reloads_as_it_is_live(
    names: tuple[str, ...], ranks: int, folders: dict[str, Path], tmp_path: Path
) -> None:
    """Tied: one key, and tied again; untied: both. transformers misses nothing and computes the live model's log-probs to 1e-6."""
    of_ranks = run_ranks(export_folders, ranks, names, folders, tmp_path)
    for name in names:
        for model in folders:
            loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / name / model, output_loading_info=True)
            again, report = loaded
            assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
            assert (again.get_output_embeddings().weight is again.get_input_embeddings().weight) == (model == "tied")
            written = load_file(tmp_path / name / model / "model.safetensors")
            assert ("lm_head.weight" in written) == (model == "untied")
            expected = alone(again.eval(), runs.make_samples(4))
            assert all((found[name, model] - expected).abs().max() < 1e-6 * expected.abs().max() for found in of_ranks)


# --- checkpoints


def save(rank: int, ranks: int, name: str, folder: Path, directory: Path, steps: int) -> None:
    start_training(rank, ranks, name, {}, ModelSpec(str(folder)), steps).save(directory)


def load_and_save(rank: int, ranks: int, name: str, folder: Path, source: Path, target: Path) -> dict[str, torch.Tensor]:
    """Into a backend that has other values, and gradients set: case 38."""
    backend = start_training(rank, ranks, name, {}, ModelSpec(str(folder)), steps=1)
    backend.load(source)
    backend.save(target)
    frozen = runs.start(rank, ranks, name, {}, ModelSpec(str(folder)), None)
    frozen.load(source)
    return runs.full_weights(frozen)


def saved_by_the_specification(directory: Path, folder: Path, steps: int) -> dict[str, torch.Tensor]:
    run_ranks(save, 1, plugins.SPECIFICATION_BACKEND, folder, directory, steps)
    saved = state.read(directory)
    assert int(saved["optimizer.step"]) == steps
    moments = [name for name in saved if name.endswith((".exp_avg", ".exp_avg_sq"))]
    assert len(moments) == 2 * sum(name.startswith("model.") for name in saved)
    assert all(saved[name].dtype == torch.float32 and bool(saved[name].any()) == (steps > 0) for name in moments)
    return saved


def travel(name: str, ranks: int, folder: Path, source: Path, first: dict[str, torch.Tensor]) -> Path:
    """Load `source` at a place and save it there again; nothing of it may differ from `first`."""
    target = source.with_name(f"{source.name}-{name}{ranks}")
    for forward_only in run_ranks(load_and_save, ranks, name, folder, source, target):
        assert all(torch.equal(tensor, first[f"model.{key}"]) for key, tensor in forward_only.items())
    again = state.read(target)
    assert again.keys() == first.keys()
    assert [key for key in first if not torch.equal(again[key], first[key])] == []
    return target


def test_state_travels_between_backends_and_numbers_of_ranks_bit_equal(folders: dict[str, Path], tmp_path: Path) -> None:
    """Case 37. From backend to backend on 2 ranks; from there to 1 and to 4 of the same."""
    last, folder = tmp_path / "s", folders["tied"]
    first = saved_by_the_specification(last, folder, steps=2)
    for name in SPREAD:
        last = travel(name, 2, folder, last, first)
        for ranks in (1, 4):
            travel(name, ranks, folder, last, first)
    travel(plugins.SPECIFICATION_BACKEND, 1, folder, last, first)


def test_the_state_before_the_first_step_travels_too(folders: dict[str, Path], tmp_path: Path) -> None:
    last, folder = tmp_path / "s", folders["tied"]
    first = saved_by_the_specification(last, folder, steps=0)
    for name in ("fsdp2", "fsdp1"):
        last = travel(name, 2, folder, last, first)


def test_a_save_holds_no_more_than_a_tensor_beside_what_it_saves(tmp_path: Path) -> None:
    """Of Python's memory, where the bytes of a file would be made; and every dtype and shape comes back bit for bit."""
    torch.manual_seed(0)
    tensors = {f"model.{index}": torch.randn(1 << 20) for index in range(8)}
    odd = {"model.half": torch.randn(7).half(), "model.low": torch.randn(3, 5).bfloat16(), "optimizer.step": torch.tensor(7)}
    odd |= {"model.none": torch.empty(0, 4), "base.digests": torch.arange(5)}
    tracemalloc.start()
    state.save(tmp_path / "s", tensors | odd)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20, f"{peak} bytes beside 32 MiB of tensors"
    again = state.read(tmp_path / "s")
    assert again.keys() == tensors.keys() | odd.keys()
    for name, tensor in (tensors | odd).items():
        assert again[name].dtype == tensor.dtype and torch.equal(again[name], tensor), name
    [file] = (tmp_path / "s").iterdir()
    assert load_file(file).keys() == again.keys()  # by safetensors itself


def saving_peaks(rank: int, ranks: int, folder: Path, root: Path) -> dict[str, tuple[int, int]]:
    """Save by fsdp1 -> most bytes at once beside what lay there, and bytes that lie there afterwards; once rank 1 cannot write its file."""
    backend = start_training(rank, ranks, "fsdp1", {}, ModelSpec(str(folder)), steps=1)
    (root / "refused" / "shard-00002-model-00001-of-00001.safetensors").mkdir(parents=True, exist_ok=True)
    with pytest.raises(RunError, match="rank 1 cannot write its part of the checkpoint: IsADirectoryError"):
        backend.save(root / "refused")
    found = {}
    for how in ("at once", "in the background", "in the background again"):
        before = sum(backend.memory().values())
        with peak_bytes(runs.CPU) as peak:
            if how == "at once":
                backend.save(root / how)
            else:
                backend.save_async(root / how).result()
        found[how] = peak.most, sum(backend.memory().values()) - before
    return found


def test_rows_are_made_for_a_save_tensor_by_tensor(tmp_path: Path) -> None:
    """Failure case 1: beside what lies there a save makes one whole tensor, and its rows, at a time; copies are counted as they are.

    A rank whose disk refuses leaves none of the others waiting in what they make together.
    """
    ranks = 2
    folder = runs.write_model(tmp_path / "model", "llama", tied=False, hidden=128)
    by_rank = run_ranks(saving_peaks, ranks, folder, tmp_path)
    saved = [state.read(tmp_path / how) for how in by_rank[0]]
    assert all(torch.equal(tensor, again[name]) for again in saved[1:] for name, tensor in saved[0].items())
    largest = max(tensor.nbytes for tensor in saved[0].values())
    part = sum(tensor.nbytes for tensor in saved[0].values()) / ranks
    at_most = 2 * largest  # the whole tensor, its rows, and the plan, which does not grow with tensors
    assert part > 5 * at_most
    for found in by_rank:
        kept = found["in the background"][1]
        assert kept == pytest.approx(part, rel=0.05)  # a vocabulary of 67 does not divide
        assert [left for _, left in found.values()] == [0, kept, 0]
        assert found["at once"][0] < at_most
        assert found["in the background"][0] < kept + at_most
        assert found["in the background again"][0] < at_most


def load_wrongly(rank: int, ranks: int, folders: dict[str, Path], root: Path) -> list[str]:
    start_training(rank, ranks, "fsdp2", {}, ModelSpec(str(folders["untied"])), steps=1).save(root / "all")
    runs.start(rank, ranks, "fsdp2", {}, ModelSpec(str(folders["untied"])), None).save(root / "forward-only")
    messages = []
    for spec, source in (
        (ModelSpec(str(folders["tied"])), "all"),
        (ModelSpec(str(folders["untied"]), trainable=("norm",)), "all"),
        (ModelSpec(str(folders["untied"])), "forward-only"),
        (ModelSpec(str(folders["untied"])), "nowhere"),
        (ModelSpec(str(folders["other shape"])), "all"),
    ):
        backend = runs.start(rank, ranks, "fsdp2", {}, spec, OptimSpec())
        with pytest.raises(RunError) as caught:
            backend.load(root / source)
        messages.append(str(caught.value))
    return messages


def test_a_checkpoint_of_something_else_is_refused_by_name(folders: dict[str, Path], tmp_path: Path) -> None:
    other = runs.write_model(tmp_path / "other", "llama", tied=False, vocab=68)
    for tied, frozen, forward_only, nowhere, shape in run_ranks(load_wrongly, 2, {**folders, "other shape": other}, tmp_path):
        assert "only in it" in tied
        assert "lm_head.weight" in tied
        assert "optimizer.model.embed_tokens.weight.exp_avg" in frozen
        assert "missing in the checkpoint" in forward_only
        assert "43 (optimizer." in forward_only  # two moments of 21 parameters, and the step
        assert "not a checkpoint" in nowhere
        assert "(67, 32), expected torch.float32 (68, 32)" in shape


# --- memory


def measure(rank: int, ranks: int, name: str, options: dict[str, Any], folder: Path) -> dict[str, dict[str, int]]:
    samples = runs.make_samples(4)
    micro, counts = collate(samples[rank::ranks]), denominators(samples)
    backend = runs.start(rank, ranks, name, options, ModelSpec(str(folder)), OptimSpec())
    found = {"start": backend.memory()}
    backend.logprobs(micro)
    found["scored"] = backend.memory()
    backend.forward_backward(micro, runs.loss_fn, counts, last=False)
    found["one of two"] = backend.memory()
    backend.forward_backward(micro, runs.loss_fn, counts, last=True)
    found["both"] = backend.memory()
    found["inside"] = {}

    def loss_that_looks(outputs: TokenOutputs, micro: MicroBatch, counts: Denominators) -> LossOutput:
        found["inside"] = backend.memory()
        return runs.loss_fn(outputs, micro, counts)

    backend.forward_backward(micro, loss_that_looks, counts, last=True)
    backend.step(runs.LR)
    found["stepped"] = backend.memory()
    forward_only = runs.start(rank, ranks, name, options, ModelSpec(str(folder)), None)
    forward_only.logprobs(micro)
    found["forward-only"] = forward_only.memory()
    return found


@pytest.mark.parametrize(
    ("name", "options", "ranks"),
    [
        ("single", {}, 1),
        ("ddp", {}, 2),
        ("zero1", {}, 2),
        ("zero2", {}, 2),
        ("zero2", {"grad_sync": "last"}, 2),
        *((name, options, 2) for name in SHARDED for options in ({}, {"grad_sync": "last"}, {"reshard_after_forward": False})),
        ("fsdp1", {}, 4),
    ],
)
def test_memory_by_kind(name: str, options: dict[str, Any], ranks: int, folders: dict[str, Path]) -> None:
    model = AutoModelForCausalLM.from_pretrained(folders["untied"])
    whole = sum(4 * parameter.numel() for parameter in model.parameters())
    root = sum(4 * p.numel() for key, p in model.named_parameters() if ".layers." not in key)
    blocks = whole - root
    parameter, gradient, optimizer = (whole / cut for cut in {
        "single": (1, 1, 1), "ddp": (1, 1, 1), "zero1": (1, 1, ranks), "zero2": (1, ranks, ranks), **dict.fromkeys(SHARDED, (ranks,) * 3),
    }[name])  # fmt: skip
    slack = 1.02  # rows that do not divide, and padding
    for found in run_ranks(measure, ranks, name, options, folders["untied"]):
        for phase in found.values():
            assert parameter / slack <= phase["parameter"] <= parameter * slack
            assert phase["other"] == sum(buffer.untyped_storage().nbytes() for buffer in model.buffers())
        assert optimizer / slack * 2 <= found["stepped"]["optimizer"] <= optimizer * slack * 2
        assert found["start"]["optimizer"] == found["stepped"]["optimizer"]
        assert gradient / slack <= found["both"]["gradient"] <= gradient * slack
        assert found["stepped"]["gradient"] == (whole if name in ("ddp", "zero1") else 0)
        assert found["forward-only"]["gradient"] == found["forward-only"]["optimizer"] == 0
        outside = [found[phase]["unsharded"] for phase in ("start", "scored", "both", "stepped", "forward-only")]
        assert outside == [0] * 5
        if name not in SHARDED:
            assert found["inside"]["unsharded"] == 0
        elif options.get("reshard_after_forward", True):
            assert root <= found["inside"]["unsharded"] <= root * 1.02
        else:
            assert whole <= found["inside"]["unsharded"] <= whole * 1.02
        waiting = found["one of two"]["unsharded"]
        assert whole <= waiting <= whole * 1.02 if options.get("grad_sync") == "last" else waiting == 0
        assert blocks > 0


# --- precision and non-finite steps


def train_in_bf16(rank: int, ranks: int, name: str, folder: Path, checkpointing: Checkpointing) -> dict[str, Any]:
    samples = runs.make_samples(4)
    spec = ModelSpec(str(folder), compute_dtype=torch.bfloat16, checkpointing=checkpointing)
    backend: Any = runs.start(rank, ranks, name, {}, spec, OptimSpec(max_grad_norm=0.0))
    before = runs.full_weights(backend)
    micro = collate(samples[rank::ranks])
    moved_by: dict[str, torch.Tensor] = {key: torch.zeros_like(tensor, dtype=torch.bool) for key, tensor in before.items()}
    first: dict[str, torch.Tensor] = {}
    for _ in range(10):
        backend.forward_backward(micro, runs.loss_fn, denominators(samples), last=True)
        for key, gradient in backend.gradients():
            assert gradient.dtype == torch.float32
            moved_by[key] |= gradient != 0
            first.setdefault(key, gradient.clone())
        backend.step(1e-6)
    after = runs.full_weights(backend)
    return {
        "moved": sum(int((after[key] != before[key])[moved_by[key]].sum()) for key in before),
        "with gradient": sum(int(mask.sum()) for mask in moved_by.values()),
        "moments": {tensor.dtype for tensor in (m for moments in backend._optimizer.moments().values() for m in moments.values())},
        "stored": {parameter.dtype for parameter in backend._scorer.parameters()},
        "gradients": first,
        "logprobs": backend.logprobs(micro).logprobs.dtype,
    }


def test_small_steps_in_bf16_move_every_weight(folders: dict[str, Path]) -> None:
    """Case 15: stored parameters, gradients and moments are fp32, and steps of 1e-6 are not rounded away."""
    layouts = [("single", 1, "none"), ("single", 1, "full"), *((name, 2, "full") for name in ("ddp", "zero1", "zero2", *SHARDED))]
    results = [run_ranks(train_in_bf16, ranks, name, folders["tied"], checkpointing) for name, ranks, checkpointing in layouts]
    reference = results[0][0]["gradients"]
    for found in (rank for ranks in results for rank in ranks):
        assert found["with gradient"] > 20_000
        assert found["moved"] == found["with gradient"]
        assert found["moments"] == found["stored"] == {torch.float32}
        assert found["logprobs"] == torch.float32
        assert max(runs.relative(found["gradients"][key], reference[key]) for key in reference) < 0.05


def skip(rank: int, ranks: int, name: str, folder: Path, root: Path) -> dict[str, Any]:
    backend: Any = start_training(rank, ranks, name, {}, ModelSpec(str(folder)), steps=1)
    backend.save(root / "before")
    if rank == ranks - 1:
        local_part(backend._placement.gradient(backend._trainable["model.norm.weight"]))[0] = math.nan
    skipped = backend.step(runs.LR)
    backend.save(root / "after")
    samples = runs.make_samples(4)
    backend.forward_backward(collate(samples[rank::ranks]), runs.loss_fn, denominators(samples), last=True)
    return {"skipped": skipped, "next": backend.step(runs.LR), "weights": runs.full_weights(backend)}


def two_steps(rank: int, ranks: int, name: str, folder: Path) -> dict[str, torch.Tensor]:
    return runs.full_weights(start_training(rank, ranks, name, {}, ModelSpec(str(folder)), steps=2))


@pytest.mark.parametrize(("name", "ranks"), [("single", 1), ("ddp", 2), ("zero1", 2), ("zero2", 2), ("fsdp1", 2), ("fsdp2", 2)])
def test_a_non_finite_gradient_on_one_rank_skips_on_all(name: str, ranks: int, folders: dict[str, Path], tmp_path: Path) -> None:
    """Case 17: parameters and moments bit-equal to before, and the next step as if nothing had been."""
    found = run_ranks(skip, ranks, name, folders["tied"], tmp_path)
    assert all(rank["skipped"].skipped and rank["skipped"].grad_norm == math.inf for rank in found)
    before, after = state.read(tmp_path / "before"), state.read(tmp_path / "after")
    assert before.keys() == after.keys()
    assert all(torch.equal(after[key], tensor) for key, tensor in before.items())
    assert not any(rank["next"].skipped for rank in found)
    for rank, expected in zip(found, run_ranks(two_steps, ranks, name, folders["tied"]), strict=True):
        assert all(torch.equal(rank["weights"][key], tensor) for key, tensor in expected.items())


# --- refusals


def misuse(rank: int, ranks: int, name: str, folders: dict[str, Path]) -> dict[str, str]:
    samples = runs.make_samples(4)
    micro, counts = collate(samples), denominators(samples)
    found = {}
    forward_only = runs.start(rank, ranks, name, {}, ModelSpec(str(folders["tied"])), None)
    with pytest.raises(RunError) as caught:
        forward_only.forward_backward(micro, runs.loss_fn, counts, last=True)
    found["train forward-only"] = str(caught.value)
    with pytest.raises(RunError) as caught:
        forward_only.step(1e-3)
    found["step forward-only"] = str(caught.value)
    forward_only.close()
    with pytest.raises(RunError) as caught:
        runs.start(rank, ranks, name, {}, ModelSpec(str(folders["tied"])), OptimSpec()).step(1e-3)
    found["no gradient"] = str(caught.value)
    return found


def replicas_differ(rank: int, ranks: int, folders: list[Path]) -> str:
    with pytest.raises(RunError) as caught:
        runs.start(rank, ranks, "ddp", {}, ModelSpec(str(folders[rank])), OptimSpec())
    return str(caught.value)


def test_misuse_is_refused_in_words(folders: dict[str, Path], tmp_path: Path) -> None:
    for name in ("ddp", "zero2", *SHARDED):
        for found in run_ranks(misuse, 2, name, folders):
            assert "forward-only" in found["train forward-only"]
            assert "forward-only" in found["step forward-only"]
            assert "got no gradient since the last step" in found["no gradient"]
    model = AutoModelForCausalLM.from_pretrained(folders["tied"])
    model.model.norm.weight.data[3] += 1e-6
    model.save_pretrained(tmp_path)
    for message in run_ranks(replicas_differ, 2, [folders["tied"], tmp_path]):
        assert message.startswith("1 of ")
        assert "model.norm.weight" in message


# --- sleep


def sleep_and_go_on(rank: int, ranks: int, name: str, folder: Path) -> dict[str, Any]:
    """One instance sleeps between backward and step and again after it, its twin never does."""
    samples = runs.make_samples(4)
    micro, counts = collate(samples[rank::ranks]), denominators(samples)
    found: dict[str, Any] = {}
    for sleeps in (False, True):
        backend = start_training(rank, ranks, name, {}, ModelSpec(str(folder)), steps=1)
        backend.forward_backward(micro, runs.loss_fn, counts, last=True)
        if sleeps:
            awake = backend.memory()
            backend.sleep(KINDS)
            backend.sleep(KINDS)  # nothing left to do
            asleep = backend.memory()
            found["freed"] = {kind: (awake[kind], asleep[kind]) for kind in KINDS}
            found["refusals"] = refusals(backend, micro, counts, folder / "never")
            backend.wake()
            found["awake again"] = backend.memory() == awake
        norm = backend.step(runs.LR).grad_norm
        if sleeps:
            backend.sleep(("optimizer", "gradient"))
            found["scored"] = backend.logprobs(micro).logprobs
            backend.wake()
        backend.forward_backward(micro, runs.loss_fn, counts, last=True)
        found[f"norms {sleeps}"] = (norm, backend.step(runs.LR).grad_norm)
        found[f"weights {sleeps}"] = runs.full_weights(backend)
        if not sleeps:
            backend.close()
    return found


def refusals(backend: Backend, micro: MicroBatch, counts: Denominators, directory: Path) -> dict[str, str]:
    """Verb -> what it says while everything sleeps."""
    verbs: dict[str, Callable[[], object]] = {
        "step": lambda: backend.step(runs.LR),
        "logprobs": lambda: backend.logprobs(micro),
        "digests": lambda: backend.digests(torch.float32),
        "forward_backward": lambda: backend.forward_backward(micro, runs.loss_fn, counts, last=True),
        "weights": lambda: list(backend.weights(torch.float32)),
        "save": lambda: backend.save(directory),
    }
    said = {}
    for name, verb in verbs.items():
        try:
            verb()
            said[name] = "nothing"
        except RunError as error:
            said[name] = str(error)
    return said


@pytest.mark.parametrize(("name", "ranks"), [*LAYOUTS])
def test_sleep_frees_everything_and_changes_no_bit(name: str, ranks: int, folders: dict[str, Path]) -> None:
    for found in run_ranks(sleep_and_go_on, ranks, name, folders["tied"]):
        assert all(before > 0 and after == 0 for before, after in found["freed"].values())
        for verb, said in found["refusals"].items():
            assert f"{verb} needs parameter" in said and said.endswith("call wake() first"), said
        assert found["awake again"]
        assert found["norms True"] == found["norms False"]
        assert all(torch.equal(found["weights True"][key], tensor) for key, tensor in found["weights False"].items())


def save_while_training(rank: int, ranks: int, name: str, folder: Path, scratch: Path) -> dict[str, Any]:
    """Save in the background and at once; train on while files are written; a save into a place that cannot be written to."""
    backend = start_training(rank, ranks, name, {}, ModelSpec(str(folder)), steps=2)
    backend.save(scratch / "sync")
    before = backend.memory()["other"]
    first = backend.save_async(scratch / "async")
    backend.step(runs.LR)  # the gradients are there
    second = backend.save_async(scratch / "later")
    first_done = first.done()  # a second save waits for the first
    first.result()
    second.result()
    backend.save(scratch / "later-sync")
    refused = backend.save_async(Path("/proc/no-such-place"))
    error = refused.exception()
    held = backend.memory()["other"] - before
    backend.close()
    return {"first done": first_done, "error": error, "held": held}


@pytest.mark.parametrize(("name", "ranks"), [("single", 1), ("ddp", 2), ("fsdp2", 2)])
def test_a_save_in_the_background_has_the_values_of_its_call(name: str, ranks: int, folders: dict[str, Path], tmp_path: Path) -> None:
    for found in run_ranks(save_while_training, ranks, name, folders["tied"], tmp_path):
        assert found["first done"]
        assert isinstance(found["error"], RunError)
        assert "/proc/no-such-place: rank 0 cannot write its part of the checkpoint" in str(found["error"])
        assert found["held"] > 0  # the copies are counted
    saved = {place: state.read(tmp_path / place) for place in ("sync", "async", "later", "later-sync")}
    assert all(torch.equal(saved["async"][key], tensor) for key, tensor in saved["sync"].items())
    assert all(torch.equal(saved["later"][key], tensor) for key, tensor in saved["later-sync"].items())
    assert saved["async"].keys() == saved["later"].keys() == saved["sync"].keys()
    moved = [key for key in saved["async"] if not torch.equal(saved["async"][key], saved["later"][key])]
    assert len(moved) == len(saved["async"])  # every tensor, the step count too
