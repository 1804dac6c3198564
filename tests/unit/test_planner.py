"""`drumroll plan`: closed forms, a 7B model on a thousand ranks, traffic, advice that has been tried, errors."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from drumroll import config, plugins
from drumroll.backends.base import LoraSpec, ModelSpec, OptimSpec
from drumroll.backends.footprint import Footprint
from drumroll.cli import app
from drumroll.engines.cache import length_reached
from drumroll.errors import UserError
from drumroll.models import build, head
from drumroll.planner import state, view
from drumroll.planner.advice import advise, fits
from drumroll.planner.forecast import forecast, training_scene
from drumroll.planner.measure import micro_batch
from drumroll.planner.phases import (
    CACHE,
    COPIES,
    CRITIC,
    CRITIC_STEP,
    CRITIC_TRAIN,
    EXPORT,
    GRADIENTS,
    LOAD,
    OPTIMIZER,
    PARAMETERS,
    POLICY,
    SAMPLING,
    SAVE,
    STEP,
    TRAIN,
    VALUES,
)
from drumroll.planner.source import config_folder
from drumroll.planner.trace import Batch, build_fake, trace
from drumroll.planner.traffic import traffic
from tests import scorer_models

CPU = torch.device("cpu")
BATCH = Batch(rows=3, length=20, targets=9)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return scorer_models.make("llama", tmp_path_factory.mktemp("llama"))


def footprint(name: str, ranks: int, **options: Any) -> Footprint:
    plugin = plugins.load("backends", name)
    made: Footprint = plugin.footprint(plugin.Config(**options), ranks)
    return made


# --- state at rest


@pytest.mark.parametrize(
    ("name", "formula"),
    [
        ("ddp", lambda n: (4, 4, 8)),
        ("zero1", lambda n: (4, 4, 8 / n)),
        ("zero2", lambda n: (4, 4 / n, 8 / n)),
        ("fsdp1", lambda n: (4 / n, 4 / n, 8 / n)),
        ("fsdp2", lambda n: (4 / n, 4 / n, 8 / n)),
    ],
)
def test_every_backend_claims_what_zero_says(name: str, formula: Any) -> None:
    for ranks in (1, 2, 8, 1024):
        of = footprint(name, ranks)
        assert (4 / of.parameter, 4 / of.gradient, 8 / of.optimizer) == pytest.approx(formula(ranks), rel=1e-12)


def test_hybrid_sharding_divides_by_the_ranks_of_a_replica() -> None:
    of = footprint("fsdp2", 16, replicas=4)
    assert (of.parameter, of.gradient, of.optimizer) == (4, 4, 4)


def test_rows_that_do_not_divide_are_padded(llama: Path) -> None:
    """48 rows over 5 ranks: 10 for the fullest; vectors and matrices alike."""
    tensors = state.parameters(build_fake(ModelSpec(str(llama)))[1], footprint("fsdp2", 5))
    embedding = next(tensor for tensor in tensors if "embed" in tensor.name)
    assert (embedding.shape, embedding.rows(5)) == (torch.Size([48, 32]), 10 * 32)
    whole = 4 * state.count(tensors)
    share = state.state(tensors, footprint("fsdp2", 5), OptimSpec()).parameter
    assert whole / 5 < share < 1.1 * whole / 5


def test_optimizers_hold_what_they_say(llama: Path) -> None:
    scorer = build_fake(ModelSpec(str(llama)))[1]
    tensors = state.parameters(scorer, Footprint())
    count = state.count(tensors)
    matrices = state.count(t for t in tensors if t.block >= 0 and len(t.shape) == 2)
    of = {name: state.state(tensors, Footprint(), OptimSpec(name=name)) for name in ("adamw", "muon")}
    assert of["adamw"].optimizer == 8 * count
    assert of["muon"].optimizer == 8 * count - 4 * matrices
    vectors = sum(sum(t.shape) if len(t.shape) == 2 else t.numel for t in tensors)
    assert state.state(tensors, Footprint(), OptimSpec(name="adafactor")).optimizer == 4 * vectors
    away = state.state(tensors, Footprint(), OptimSpec(offload=True))
    assert (away.optimizer, away.host) == (0, 8 * count)


def test_adapters_alone_have_gradients_and_moments(llama: Path) -> None:
    spec = ModelSpec(str(llama), compute_dtype=torch.bfloat16, lora=LoraSpec(rank=4, base_dtype=torch.bfloat16))
    scene = training_scene(spec, OptimSpec(), footprint("ddp", 2), BATCH, 1, CPU)
    adapters = sum(t.numel for t in scene.tensors if t.trained)
    base = sum(t.numel for t in scene.tensors if not t.trained)
    assert 0 < adapters < base / 4
    assert (scene.state.parameter, scene.state.gradient, scene.state.optimizer) == (2 * base + 4 * adapters, 4 * adapters, 8 * adapters)


@pytest.mark.parametrize(("name", "parts"), [("ddp", 1), ("zero1", 4), ("zero2", 4), ("fsdp1", 4), ("fsdp2", 4)])
def test_a_rank_saves_its_rows_of_parameters_and_moments(name: str, parts: int, llama: Path) -> None:
    """12 bytes a parameter in all; of a model with adapters these alone."""
    plain, adapted = ModelSpec(str(llama)), ModelSpec(str(llama), lora=LoraSpec(rank=4))
    for spec in (plain, adapted):
        of = footprint(name, 4)
        tensors = state.parameters(build_fake(spec)[1], of, adapted=spec is adapted)
        saved = state.count(tensor for tensor in tensors if tensor.trained)
        assert saved == state.count(tensors) or spec is adapted
        assert state.state(tensors, of, OptimSpec()).saved == 12 * saved // parts


def test_a_forward_only_model_holds_parameters_alone(llama: Path) -> None:
    tensors = state.parameters(build_fake(ModelSpec(str(llama)))[1], footprint("fsdp2", 2))
    of = state.state(tensors, footprint("fsdp2", 2), None)
    assert (of.gradient, of.optimizer, of.host, of.parameter) == (0, 0, 0, 2 * state.count(tensors))


# --- activations


def held_after_forward(folder: Path, batch: Batch, **spec: Any) -> int:
    """Bytes that autograd keeps of the real model on real tensors, parameters and buffers aside."""
    scorer = scorer_models.scorer(folder, **spec)
    known = {t.untyped_storage().data_ptr() for t in [*scorer.parameters(), *scorer.buffers()]}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = scorer(micro_batch(batch, CPU), True)
    assert outputs[0].requires_grad
    return sum(kept.values())


@pytest.mark.parametrize("name", ["llama", "qwen3-tied", "gemma3", "gpt2", "qwen3-moe", "mixtral"])
def test_the_trace_keeps_what_autograd_keeps(name: str, tmp_path: Path) -> None:
    """Fake tensors against real ones, of several families: equal but for what lives outside of the graph (ids, outputs)."""
    folder = scorer_models.make(name, tmp_path)
    mode, scorer = build_fake(ModelSpec(str(folder)))
    found = trace(mode, scorer, BATCH, CPU, cast=True)
    begin = next(segment.start for segment in found.train if segment.kind == "backward")
    assert begin == pytest.approx(held_after_forward(folder, BATCH), rel=0.05)


def test_the_trace_goes_through_all_blocks_in_order(llama: Path) -> None:
    mode, scorer = build_fake(ModelSpec(str(llama)))
    found = trace(mode, scorer, BATCH, CPU, cast=True)
    assert [(s.kind, s.block) for s in found.train] == [
        ("forward", -1), ("forward", 0), ("forward", 1), ("forward", -2),
        ("backward", -2), ("backward", 1), ("backward", 0), ("backward", -1),
    ]  # fmt: skip
    assert [s.block for s in found.score] == [-1, 0, 1, -2]
    assert all(s.most >= s.start for s in found.train)


def test_targets_beyond_the_traced_ones_are_added(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of the head are alike: two are traced. Tracing them all gives the same peak."""
    batch = Batch(rows=4, length=60, targets=50)
    peaks = []
    for chunk_bytes in (1, 1 << 30):  # 16 rows, which makes 2 of 13 chunks; one chunk of all
        monkeypatch.setitem(head._CHUNK_BYTES, "cpu", chunk_bytes)
        mode, scorer = build_fake(ModelSpec(str(llama)))
        of_head = [s.start for s in trace(mode, scorer, batch, CPU, cast=True).train if s.kind == "backward" and s.block == -2]
        peaks.append(of_head[0])
    assert peaks[0] == pytest.approx(peaks[1], rel=0.02)


# --- advice


def test_advice_has_been_tried() -> None:
    """Each change, planned by itself with those before it, gives the bytes that it promises; none is idle."""
    memory = 70 << 20

    def load(more: Any) -> config.RunConfig:
        return quickstart("backend.name=ddp", "runtime.device=cuda", "runtime.ranks=4", "model.dtype=float32", *more)

    plan = forecast(load([]), quickstart_folder())
    assert not fits(plan, memory)
    found = advise(load, quickstart_folder(), plan, memory)
    assert found[0].override == "model.checkpointing=full"
    assert [advice.fits for advice in found] == [False] * (len(found) - 1) + [True]
    totals = [plan.peak.total, *(advice.total for advice in found)]
    assert all(after <= 0.99 * before for before, after in pairwise(totals))
    again = forecast(load([advice.override for advice in found]), quickstart_folder())
    assert (again.peak.total, again.peak.name) == (found[-1].total, found[-1].phase)


# --- traffic


@pytest.mark.parametrize(("name", "ring"), [("ddp", [2.0]), ("zero1", [2.0, 1.0]), ("zero2", [1.0, 1.0])])
def test_traffic_of_replicated_parameters(name: str, ring: list[float]) -> None:
    """An all-reduce sends 2 (N-1)/N of what it reduces, the two halves of it half of that: ZeRO-1 pays half as much again here."""
    for ranks in (2, 4):
        plan = forecast(quickstart(f"backend.name={name}", f"runtime.ranks={ranks}"), quickstart_folder())
        once = 4 * plan.parameters * (ranks - 1) / ranks
        assert [t.bytes / once for t in plan.traffic] == pytest.approx(ring, rel=0.01)


def test_traffic_of_gathered_parameters() -> None:
    plan = forecast(quickstart("runtime.ranks=4"), quickstart_folder())
    once = 4 * plan.parameters * 3 / 4
    of = {traffic.what: traffic for traffic in plan.traffic}
    assert of["parameters gathered in forward"].bytes == pytest.approx(once, rel=0.02)
    assert of["gradients reduce-scattered"].bytes == pytest.approx(once, rel=0.02)
    assert of["parameters gathered in forward"].times == of["gradients reduce-scattered"].times + plan.work.scored
    kept = forecast(quickstart("runtime.ranks=4", "backend.fsdp2.reshard_after_forward=false"), quickstart_folder())
    assert "parameters gathered in backward" not in {traffic.what for traffic in kept.traffic}


def test_hybrid_gradients_travel_twice() -> None:
    plan = forecast(quickstart("runtime.ranks=4", "backend.fsdp2.replicas=2"), quickstart_folder())
    of = {traffic.what: traffic.bytes for traffic in plan.traffic}
    assert of["gradients all-reduced"] == pytest.approx(4 * plan.parameters / 2, rel=0.02)  # 2 (R-1)/R of a half


def test_tokens_travel_to_shared_experts_and_these_are_gathered_no_more(tmp_path: Path) -> None:
    """2 layers of 4 experts, 2 a token: rows of 32 numbers, 57 tokens; an expert has 3 · 64 · 32 numbers."""
    folder, experts = scorer_models.make("mixtral", tmp_path), 4 * 2 * 4 * 3 * 64 * 32  # bytes
    rows = 4 * 2 * 57 * 2 * 32  # bytes of all layers
    of = {}
    for shared in (1, 2, 4):
        for checkpointing in ("none", "full"):
            spec = ModelSpec(str(folder), checkpointing=checkpointing)
            scene = training_scene(spec, OptimSpec(), footprint("fsdp2", 4, expert_ranks=shared), BATCH, 3, CPU)
            of[shared, checkpointing] = {t.what: t for t in traffic(scene, 4, optimizer_steps=1, scored=2)}
    alone = of[1, "none"]
    assert "tokens to experts and back in forward" not in alone
    for shared in (2, 4):
        plain, again = of[shared, "none"], of[shared, "full"]
        once = 2 * rows * (shared - 1) / shared
        there = plain["tokens to experts and back in forward"]
        assert (there.bytes, there.times) == (once, 5)
        assert (plain["the same in backward"].bytes, plain["the same in backward"].times) == (once, 3)
        assert again["the same in backward"].bytes == 2 * once
        alike = 4 // shared
        fewer = experts * 3 / 4 - experts / shared * (alike - 1) / alike
        for what in ("parameters gathered in forward", "parameters gathered in backward", "gradients reduce-scattered"):
            assert alone[what].bytes - plain[what].bytes == fewer


def quickstart(*overrides: str) -> config.RunConfig:
    return config.load("recipes/quickstart.yaml", overrides)


def quickstart_folder() -> Path:
    return config_folder(quickstart().model.path)


# --- phases of a run


def test_turns_take_the_policy_away_while_the_engine_samples() -> None:
    together = forecast(quickstart(), quickstart_folder())
    turns = forecast(quickstart("runtime.take_turns=true"), quickstart_folder())
    assert together.phase(SAMPLING).terms[OPTIMIZER] > 0
    assert turns.phase(SAMPLING).terms[OPTIMIZER] == turns.phase(SAMPLING).terms[PARAMETERS] == 0
    assert together.phase(TRAIN).terms[CACHE] > 0 == turns.phase(TRAIN).terms[CACHE]
    assert turns.phase(TRAIN).terms[OPTIMIZER] == together.phase(TRAIN).terms[OPTIMIZER]


def test_copies_of_saves_in_the_background_lie_in_every_phase_but_load() -> None:
    recipe = config.load("recipes/ppo_quickstart.yaml", ["checkpoint.every=2"])
    folder = config_folder(recipe.model.path)
    plan = forecast(recipe, folder)
    assert plan.critic is not None
    copies = plan.state.saved + plan.critic.saved
    assert {phase.terms.get(COPIES, 0) for phase in plan.phases if phase.name != LOAD} == {copies}
    assert plan.phase(LOAD).terms.get(COPIES, 0) == 0
    at_once = forecast(config.load("recipes/ppo_quickstart.yaml", ["checkpoint.every=2", "checkpoint.async_save=false"]), folder)
    assert plan.phase(TRAIN).total - at_once.phase(TRAIN).total == plan.phase(SAVE).total - at_once.phase(SAVE).total == copies
    never = forecast(config.load("recipes/ppo_quickstart.yaml", ["checkpoint.every=0"]), folder)
    assert SAVE not in [phase.name for phase in never.phases]
    assert never.phase(EXPORT).total == at_once.phase(EXPORT).total
    away = forecast(config.load("recipes/ppo_quickstart.yaml", ["checkpoint.every=2", "runtime.device=cuda"]), folder)
    assert away.host == away.state.saved + away.critic.saved
    assert away.phase(TRAIN).terms[COPIES] == 0


def test_a_reference_is_one_more_model() -> None:
    without, held = (forecast(quickstart(f"algorithm.kl={{coef: {coef}}}"), quickstart_folder()) for coef in (0.0, 0.1))
    added = held.phase(STEP).total - without.phase(STEP).total
    assert added == pytest.approx(4 * held.parameters / held.ranks, rel=0.02)


def test_a_critic_is_one_more_model_that_trains() -> None:
    """Beside the other in every phase, but for what the value head leaves out of a model; by turns away while the engine samples."""
    recipe = config.load("recipes/ppo_quickstart.yaml", ["runtime.take_turns=true"])
    folder = config_folder(recipe.model.path)
    plan = forecast(recipe, folder)
    scorer = build.build(ModelSpec(str(folder)))
    lost = scorer.head.weight.numel() - scorer.head.weight.shape[1]
    assert plan.critic is not None
    assert plan.state.parameter - plan.critic.parameter == pytest.approx(4 * lost / 2, rel=0.02)
    assert plan.between == plan.state.between + plan.critic.between
    assert plan.phase(TRAIN).terms[CRITIC] == pytest.approx(plan.critic.between, rel=0.02)
    assert plan.phase(CRITIC_TRAIN).terms[POLICY] == pytest.approx(plan.state.between, rel=0.02)
    assert plan.phase(CRITIC_STEP).terms[GRADIENTS] == plan.critic.gradient
    assert plan.phase(VALUES).total < plan.phase(CRITIC_TRAIN).total
    assert plan.phase(SAMPLING).terms[CRITIC] == 0
    assert sum(traffic.what.startswith("critic: ") for traffic in plan.traffic) == 3  # forward, backward, gradients


def test_a_slot_grows_by_quarters() -> None:
    assert [length_reached(10, length) for length in (15, 16, 63, 64, 200)] == [16, 32, 64, 80, 240]


# --- words


@pytest.mark.parametrize(
    ("text", "value"), [("80GiB", 80 << 30), ("80 gb", 80 * 10**9), ("1.5 TiB", 3 << 39), ("4096", 4096)]
)
def test_sizes(text: str, value: int) -> None:
    assert view.memory_of(text) == value


@pytest.mark.parametrize("text", ["", "much", "80 GiBs", "-1GiB"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(UserError, match="expected a size such as 80GiB"):
        view.memory_of(text)


def test_a_backend_from_elsewhere_cannot_be_foreseen(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("from drumroll.backends.single import Config, SinglePlacement\nfrom drumroll.backends.engine import TorchPlugin\n"
                    "PLUGIN = TorchPlugin(Config, SinglePlacement)\n")  # fmt: skip
    with pytest.raises(UserError, match="does not say how it divides memory"):
        forecast(quickstart(f"backend={{name: '{file}:PLUGIN'}}", "runtime.ranks=1"), quickstart_folder())


def test_what_would_be_refused_at_launch_is_refused() -> None:
    with pytest.raises(UserError, match="single runs in one process"):
        forecast(quickstart("backend.name=single", "runtime.ranks=2"), quickstart_folder())


@pytest.mark.parametrize(("name", "tile", "why"), [("llama", 0, "has no experts"), ("mixtral", 8, "set model.tile_mlp=0")])
def test_models_whose_experts_cannot_be_shared_are_refused(name: str, tile: int, why: str, tmp_path: Path) -> None:
    spec = ModelSpec(str(scorer_models.make(name, tmp_path)), tile_mlp=tile)
    with pytest.raises(UserError, match=why):
        training_scene(spec, OptimSpec(), footprint("fsdp2", 4, expert_ranks=2), BATCH, 1, CPU)


def test_a_model_that_is_not_here(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"expected a file called config\.json"):
        config_folder("some/model", tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert config_folder("some/model", tmp_path) == config_folder("some/model", tmp_path / "config.json") == tmp_path


def test_exit_code_says_whether_it_fits() -> None:
    answer = CliRunner().invoke(app, ["plan", "recipes/quickstart.yaml", "--memory", "100MiB"])
    assert answer.exit_code == 1 and "does not fit" in answer.output
    assert CliRunner().invoke(app, ["plan", "recipes/quickstart.yaml", "--memory", "8GiB"]).exit_code == 0


def test_fake_models_are_tied_as_real_ones_are(tmp_path: Path) -> None:
    folder = scorer_models.make("qwen3-tied", tmp_path)
    fake = build_fake(ModelSpec(str(folder)))[1]
    real: nn.Module = build.build(ModelSpec(str(folder)))
    assert [(n, p.shape) for n, p in fake.named_parameters()] == [(n, p.shape) for n, p in real.named_parameters()]
