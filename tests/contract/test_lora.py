"""LoRA on every backend, against PEFT and torch alone: values, gradients, steps, merged weights, digests, checkpoints, references, exports.

Failure cases 47, 51, 52, 53, 54 and 56; a case's number stands in the test that holds it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from drumroll import plugins
from drumroll.algorithms.loss import reinforce, rl_loss, token_weights
from drumroll.backends import state
from drumroll.backends.base import Backend, LoraSpec, ModelSpec, OptimSpec
from drumroll.config import RunConfig, parse
from drumroll.digest import digest
from drumroll.engines.base import GenerateRequest, SamplingParams
from drumroll.errors import RunError, UserError
from drumroll.models.export import save_adapter
from drumroll.packing import collate, denominators
from drumroll.rollout.rollouter import assemble
from drumroll.rollout.samples import from_groups
from drumroll.runtime.local import launch
from drumroll.runtime.plan import plan
from drumroll.runtime.policy import Policy
from drumroll.runtime.worker import Worker, WorkerSpec
from drumroll.types import Prompt
from tests.contract import backend_runs as runs
from tests.contract.backend_runs import Trained, relative
from tests.engine_models import make
from tests.ranks import run_ranks
from tests.scorer_models import alone

peft = pytest.importorskip("peft")

LORA = LoraSpec(rank=4, alpha=8.0, seed=3)
OPTIM = OptimSpec(weight_decay=0.01, eps=1e-4)  # B begins at 0 and Adam divides: with a smaller eps rounding alone is above the tolerance
TOLERANCE = 1e-5
MODELS = ("llama-tied", "qwen3-untied")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: runs.write_model(root / name, name.split("-")[0], name.endswith("-tied")) for name in MODELS}


def lora_run(rank: int, ranks: int, name: str, options: dict[str, Any], folders: dict[str, Path], save: Path | None) -> dict[str, Any]:
    """Model -> everything that is compared. Each model's checkpoint after three steps goes below `save`."""
    samples = runs.make_samples()
    counts = denominators(samples)
    found: dict[str, Any] = {}
    for model, folder in folders.items():
        backend = runs.start(rank, ranks, name, options, ModelSpec(str(folder), lora=LORA), OPTIM)
        work = runs.even_plan(samples, rank, ranks, 2)
        facts: dict[str, Any] = {"start": matrices(backend), "loaded": runs.full_weights(backend)}
        facts["trained"] = runs.train(backend, work, counts)
        facts["end"] = matrices(backend)
        with backend.reference():
            facts["reference"] = [backend.logprobs(collate(micro)).logprobs.clone() for micro in work]
        facts["after"] = [backend.logprobs(collate(micro)).logprobs.clone() for micro in work]
        for dtype in (torch.float32, torch.bfloat16):
            sent = runs.full_weights(backend, dtype)
            facts[f"digests {dtype}"] = backend.digests(dtype) == {key: digest(tensor) for key, tensor in sent.items()}
        facts["changing"] = {key for bucket in backend.weights(torch.float32, trained_only=True) for key, _ in bucket}
        facts["memory"] = backend.memory()
        if save is not None:
            backend.save(save / model)
        backend.close()
        found[model] = facts
    return found


def matrices(backend: Backend) -> dict[str, torch.Tensor]:
    """Every A and B, whole."""
    return {name: tensor.clone() for bucket in backend.weights(torch.float32, trained_only=True, apart=True) for name, tensor in bucket}


@pytest.fixture(scope="module")
def single(folders: dict[str, Path]) -> dict[str, Any]:
    found: dict[str, Any] = run_ranks(lora_run, 1, "single", {}, folders, None)[0]
    return found


def plain_peft(folder: Path, start: dict[str, torch.Tensor]) -> Trained:
    """Three steps of PEFT's model under torch's AdamW and clipping, from the same A and B, one unpadded sample at a time."""
    samples = runs.make_samples()
    tokens = denominators(samples).tokens
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = peft.LoraConfig(r=LORA.rank, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(base, config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(start[plain_name(name)])
    trainable = {plain_name(name): parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    optimizer = torch.optim.AdamW(trainable.values(), lr=runs.LR, betas=OPTIM.betas, eps=OPTIM.eps, weight_decay=OPTIM.weight_decay)
    trained = Trained(logprobs=[])
    for step in range(3):
        total = 0.0
        for sample in samples:
            ids, mask = torch.from_numpy(sample.token_ids), torch.from_numpy(sample.target_mask)
            log_p = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
            chosen = log_p.gather(1, ids[1:, None]).squeeze(1)[mask[1:]]
            entropy = -(log_p.exp() * log_p).sum(-1)[mask[1:]]
            loss = (-(torch.from_numpy(sample.advantages) + 1.0) * chosen - 0.1 * entropy).sum() / tokens
            loss.backward()
            total += float(loss.detach())
        trained.losses.append(total)
        if step == 0:
            trained.gradients = {name: parameter.grad.clone() for name, parameter in trainable.items()}
        torch.nn.utils.clip_grad_norm_(trainable.values(), OPTIM.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
    trained.weights = {name: parameter.detach() for name, parameter in trainable.items()}
    return trained


def plain_name(name: str) -> str:
    return name.removeprefix("base_model.model.").replace(".default", "")


@pytest.mark.parametrize("model", MODELS)
def test_single_trains_as_peft_does_by_itself(model: str, single: dict[str, Any], folders: dict[str, Path]) -> None:
    found = single[model]
    expected = plain_peft(folders[model], found["start"])
    trained: Trained = found["trained"]
    assert trained.gradients.keys() == found["end"].keys() == expected.weights.keys()
    assert len(expected.weights) == 2 * 2 * 7  # A and B of the seven linear layers of two blocks
    for name in expected.weights:
        if name.endswith("lora_A.weight"):  # nothing reaches A while B is zero
            assert not trained.gradients[name].any()
            assert not expected.gradients[name].any()
        else:
            assert relative(trained.gradients[name], expected.gradients[name]) < TOLERANCE
        assert relative(found["end"][name], expected.weights[name]) < TOLERANCE
    assert trained.losses == pytest.approx(expected.losses, rel=TOLERANCE)


def test_a_fresh_adapter_changes_nothing_and_its_reference_is_the_base(single: dict[str, Any], folders: dict[str, Path]) -> None:
    """Case 56, fresh: step-0 KL is 0, and after three steps the reference is still the base model, to the bit."""
    for model, found in single.items():
        base = run_ranks(base_logprobs, 1, folders[model])[0]
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(found["reference"], base, strict=True))
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(found["trained"].logprobs, base, strict=True))
        assert max(float((mine - theirs).abs().max()) for mine, theirs in zip(found["after"], base, strict=True)) > 1e-4
        bounds = {name: 1 / math.sqrt(a.shape[1]) for name, a in found["start"].items() if name.endswith("lora_A.weight")}
        assert all(0.5 * bound < float(found["start"][name].abs().max()) <= bound for name, bound in bounds.items())
        assert not any(b.any() for name, b in found["start"].items() if name.endswith("lora_B.weight"))


def base_logprobs(rank: int, ranks: int, folder: Path) -> list[torch.Tensor]:
    backend = runs.start(rank, ranks, "single", {}, ModelSpec(str(folder)), None)
    return [backend.logprobs(collate(micro)).logprobs.clone() for micro in runs.even_plan(runs.make_samples(), 0, 1, 2)]


SHARED = ("ddp", "zero1", "zero2", "fsdp1", "fsdp2")  # of more than one rank
BACKENDS: list[tuple[str, dict[str, Any]]] = [
    ("ddp", {}),
    ("zero1", {}),
    ("zero2", {}),
    ("fsdp1", {}),
    ("fsdp2", {}),
    ("fsdp2", {"grad_sync": "last", "reshard_after_forward": False, "embeddings": "apart"}),
]


@pytest.mark.parametrize(("name", "options"), BACKENDS, ids=["ddp", "zero1", "zero2", "fsdp1", "fsdp2", "fsdp2 otherwise"])
def test_two_ranks_equal_single(name: str, options: dict[str, Any], folders: dict[str, Path], single: dict[str, Any]) -> None:
    """Cases 51 and 54: the same bits at the start, the same steps, every row there, and a digest of what a push sends."""
    of_rank = run_ranks(lora_run, 2, name, options, folders, None)
    for model, expected in single.items():
        for found in (rank[model] for rank in of_rank):
            assert found["start"].keys() == expected["start"].keys()
            assert all(torch.equal(found["start"][key], tensor) for key, tensor in expected["start"].items())
            assert all(torch.equal(found["loaded"][key], tensor) for key, tensor in expected["loaded"].items())
            for key, gradient in expected["trained"].gradients.items():
                assert torch.allclose(found["trained"].gradients[key], gradient, rtol=0, atol=TOLERANCE * float(gradient.norm() + 1e-30))
            assert max(relative(found["end"][key], tensor) for key, tensor in expected["end"].items()) < TOLERANCE
            weights = expected["trained"].weights
            assert found["trained"].weights.keys() == weights.keys() == expected["loaded"].keys()
            assert max(relative(found["trained"].weights[key], tensor) for key, tensor in weights.items()) < TOLERANCE
            assert found["digests torch.float32"]
            assert found["digests torch.bfloat16"]
            moved = {key for key, tensor in weights.items() if not torch.equal(tensor, expected["loaded"][key])}
            assert found["changing"] == expected["changing"] == moved
        first = of_rank[0][model]["trained"].results
        assert all(rank[model]["trained"].results == first for rank in of_rank)
        parts = torch.cat([logprobs for rank in of_rank for logprobs in rank[model]["reference"]]).sort().values
        assert relative(parts, torch.cat(expected["reference"]).sort().values) < TOLERANCE


def test_merged_weights_are_what_peft_merges(single: dict[str, Any], folders: dict[str, Path], tmp_path: Path) -> None:
    """Case 47: the adapter's folder is PEFT's, keeps rank and alpha, and PEFT merges it into the very weights that we push and export."""
    for model, found in single.items():
        save_adapter(folders[model], tmp_path / model, LORA, iter(found["end"].items()))
        loaded = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folders[model]), tmp_path / model)
        config = loaded.peft_config["default"]
        assert (config.r, config.lora_alpha, config.base_model_name_or_path) == (4, 8, str(folders[model]))
        assert sorted(config.target_modules) == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
        merged = dict(loaded.merge_and_unload().named_parameters())
        assert merged.keys() == found["trained"].weights.keys()
        assert max(relative(tensor, merged[key]) for key, tensor in found["trained"].weights.items()) < 1e-6


# Checkpoints


def reload(rank: int, ranks: int, name: str, folder: Path, source: Path, out: Path | None) -> dict[str, Any]:
    backend = runs.start(rank, ranks, name, {}, ModelSpec(str(folder), lora=LoraSpec(rank=4, alpha=8.0, seed=99)), OPTIM)
    different = matrices(backend)
    backend.load(source)
    if out is not None:
        backend.save(out)
    return {"before": different, "after": matrices(backend), "weights": runs.full_weights(backend)}


def test_a_checkpoint_holds_adapters_alone_and_moves_between_backends(folders: dict[str, Path], tmp_path: Path) -> None:
    """From ddp on two ranks along a route over all backends, bit for bit. Case 54: all rows are in it."""
    chosen = {"llama-tied": folders["llama-tied"]}
    (saved, _) = run_ranks(lora_run, 2, "ddp", {}, chosen, tmp_path / "ddp")
    route = (("fsdp2", 2), ("fsdp1", 2), ("zero1", 2), ("zero2", 2), ("single", 1))
    for model, folder in chosen.items():
        source, expected, loaded = tmp_path / "ddp" / model, saved[model]["end"], list[dict[str, Any]]()
        for name, ranks in route:
            loaded += run_ranks(reload, ranks, name, folder, source, tmp_path / name / model)
            source = tmp_path / name / model
        for found in loaded:
            assert not any(torch.equal(found["before"][key], tensor) for key, tensor in expected.items())
            assert all(torch.equal(found["after"][key], tensor) for key, tensor in expected.items())
        first, *others = (state.read(tmp_path / name / model) for name in ("ddp", *(name for name, _ in route)))
        of_optimizer = {f"optimizer.{name}.{kind}" for name in expected for kind in ("exp_avg", "exp_avg_sq")} | {"optimizer.step"}
        assert first.keys() == {f"model.{name}" for name in expected} | of_optimizer | {"base.digests", "base.scale"}
        assert all(torch.equal(first[f"model.{name}"], tensor) for name, tensor in expected.items())
        for other in others:
            assert all(torch.equal(other[key], tensor) for key, tensor in first.items())
        adapters = sum(tensor.nbytes for tensor in expected.values())
        assert sum(tensor.nbytes for tensor in first.values()) < 3 * adapters + 1000


def refused(rank: int, ranks: int, folder: Path, spec: LoraSpec, source: Path) -> str:
    backend = runs.start(rank, ranks, "single", {}, ModelSpec(str(folder), lora=spec), OPTIM)
    with pytest.raises(RunError) as caught:
        backend.load(source)
    return str(caught.value)


def test_adapters_of_another_base_or_scale_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = folders["llama-tied"]
    run_ranks(lora_run, 1, "single", {}, {"llama-tied": folder}, tmp_path)
    other = runs.write_model(tmp_path / "other", "llama", tied=True)
    model = AutoModelForCausalLM.from_pretrained(other)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] += 1e-3
    model.save_pretrained(other)
    (message,) = run_ranks(refused, 1, other, LORA, tmp_path / "llama-tied")
    assert "1 of 20 weights differ, first model.layers.1.mlp.up_proj.weight" in message
    (message,) = run_ranks(refused, 1, folder, LoraSpec(rank=4, alpha=16.0), tmp_path / "llama-tied")
    assert "scaled by 2, these by 4" in message
    (message,) = run_ranks(refused, 1, folder, LoraSpec(rank=4, alpha=8.0, targets=("q_proj",)), tmp_path / "llama-tied")
    assert "names saved and restored differ: none missing in the checkpoint, 72 (" in message  # A, B and their moments of six layers in two


# Dtypes, checkpointing, loaded adapters


def low_precision(rank: int, ranks: int, name: str, folder: Path, base: torch.dtype) -> dict[str, Any]:
    spec = ModelSpec(str(folder), compute_dtype=torch.bfloat16, lora=LoraSpec(rank=4, alpha=8.0, seed=3, base_dtype=base))
    samples = runs.make_samples()
    backend: Any = runs.start(rank, ranks, name, {}, spec, OPTIM)
    trained = runs.train(backend, runs.even_plan(samples, rank, ranks, 2), denominators(samples))
    dtypes = {("adapter" if "lora_" in key else "base", parameter.dtype) for key, parameter in backend._parameters.items()}
    moments = {tensor.dtype for kind in backend._optimizer.moments().values() for tensor in kind.values()}
    digests = backend.digests(torch.bfloat16) == {key: digest(tensor) for key, tensor in runs.full_weights(backend, torch.bfloat16).items()}
    return {"trained": trained, "dtypes": dtypes, "moments": moments, "memory": backend.memory(), "digests": digests}


def test_case_52_a_bfloat16_base_trains_as_one_that_is_cast_for_use(folders: dict[str, Path]) -> None:
    """On one rank bit for bit, at half the base's memory; on two within bfloat16's rounding; adapters and moments in float32."""
    folder = folders["llama-tied"]
    (wide,) = run_ranks(low_precision, 1, "single", folder, torch.float32)
    (narrow,) = run_ranks(low_precision, 1, "single", folder, torch.bfloat16)
    assert narrow["dtypes"] == {("adapter", torch.float32), ("base", torch.bfloat16)}
    assert narrow["moments"] == {torch.float32}
    assert wide["trained"].losses == narrow["trained"].losses
    assert wide["trained"].results == narrow["trained"].results
    assert all(torch.equal(narrow["trained"].gradients[key], tensor) for key, tensor in wide["trained"].gradients.items())
    adapters = sum(4 * tensor.numel() for tensor in wide["trained"].gradients.values())
    assert narrow["memory"]["parameter"] - adapters == (wide["memory"]["parameter"] - adapters) / 2
    for name in ("ddp", "zero1", "zero2", "fsdp2"):
        for found in run_ranks(low_precision, 2, name, folder, torch.bfloat16):
            assert found["dtypes"] == narrow["dtypes"]
            assert found["moments"] == {torch.float32}
            assert found["digests"]
            for key, gradient in narrow["trained"].gradients.items():
                assert float((found["trained"].gradients[key] - gradient).norm()) <= 2e-2 * float(gradient.norm())


def checkpointed(rank: int, ranks: int, names: tuple[str, ...], folder: Path) -> dict[str, dict[str, Trained]]:
    """Backend -> how activations are kept -> what came of it."""
    samples = runs.make_samples()
    found: dict[str, dict[str, Trained]] = {}
    for name in names:
        found[name] = {}
        for checkpointing in ("none", "full", "selective"):
            spec = ModelSpec(str(folder), checkpointing=checkpointing, lora=LORA)  # type: ignore[arg-type]
            backend = runs.start(rank, ranks, name, {}, spec, OPTIM)
            found[name][checkpointing] = runs.train(backend, runs.even_plan(samples, rank, ranks, 2), denominators(samples), steps=2)
    return found


@pytest.mark.parametrize(("names", "ranks"), [(("single",), 1), (SHARED, 2)], ids=["1", "2"])
def test_case_53_recomputed_activations_over_frozen_embeddings(names: tuple[str, ...], ranks: int, folders: dict[str, Path]) -> None:
    """Nothing before the first adapter needs a gradient. Every B has one after the first step, the same with and without recomputation."""
    for of_rank in run_ranks(checkpointed, ranks, names, folders["llama-tied"]):
        assert of_rank.keys() == set(names)
        for found in of_rank.values():
            expected = found["none"]
            assert all(gradient.any() for name, gradient in expected.gradients.items() if name.endswith("lora_B.weight"))
            for checkpointing in ("full", "selective"):
                assert all(torch.equal(found[checkpointing].gradients[name], tensor) for name, tensor in expected.gradients.items())
                assert all(torch.equal(found[checkpointing].weights[name], tensor) for name, tensor in expected.weights.items())


def write_adapter(folder: Path, model: Path, single: dict[str, Any]) -> Path:
    """With a random B, as after SFT."""
    torch.manual_seed(5)
    save_adapter(model, folder, LORA, ((name, 0.3 * torch.randn_like(tensor)) for name, tensor in single["llama-tied"]["start"].items()))
    return folder


def from_adapter(rank: int, ranks: int, names: tuple[str, ...], model: Path, start: Path) -> dict[str, dict[str, Any]]:
    return {name: of_adapter(rank, ranks, name, model, start) for name in names}


def of_adapter(rank: int, ranks: int, name: str, model: Path, start: Path) -> dict[str, Any]:
    samples = runs.make_samples()
    work = [collate(micro) for micro in runs.even_plan(samples, rank, ranks, 1)]
    spec = ModelSpec(str(model), lora=LoraSpec(rank=4, alpha=8.0, start=str(start)))
    backend = runs.start(rank, ranks, name, {}, spec, OPTIM)

    def score() -> torch.Tensor:
        return torch.cat([backend.logprobs(micro).logprobs for micro in work])

    begun = score()
    with backend.reference():
        at_start = score()
    runs.train(backend, runs.even_plan(samples, rank, ranks, 1), denominators(samples))
    trained = score()
    with backend.reference():
        at_end = score()
    return {"begun": begun, "at start": at_start, "at end": at_end, "trained": trained, "again": score()}


@pytest.mark.parametrize(("names", "ranks"), [(("single",), 1), (SHARED, 2)], ids=["1", "2"])
def test_case_56_a_loaded_adapter_is_its_own_reference(
    names: tuple[str, ...], ranks: int, folders: dict[str, Path], single: dict[str, Any], tmp_path: Path
) -> None:
    """Step-0 KL is 0, not the gap to the bare base; the reference stays what it was while the policy moves, and the policy comes back."""
    start = write_adapter(tmp_path / "adapter", folders["llama-tied"], single)
    of_ranks = run_ranks(from_adapter, ranks, names, folders["llama-tied"], start)
    for found in (of_rank[name] for of_rank in of_ranks for name in names):
        assert torch.equal(found["begun"], found["at start"])
        assert torch.equal(found["begun"], found["at end"])
        assert torch.equal(found["trained"], found["again"])
        assert (found["trained"] - found["begun"]).abs().max() > 1e-4
    if ranks == 1:
        model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folders["llama-tied"]), start).eval()
        assert (found["begun"] - alone(model, runs.make_samples())).abs().max() < 1e-5
        bare = alone(AutoModelForCausalLM.from_pretrained(folders["llama-tied"]).eval(), runs.make_samples())
        assert (found["begun"] - bare).abs().max() > 0.03


def no_reference(rank: int, ranks: int, folder: Path) -> str:
    backend = runs.start(rank, ranks, "single", {}, ModelSpec(str(folder)), OPTIM)
    with pytest.raises(RunError) as caught:
        backend.reference()
    narrow = ModelSpec(str(folder), lora=LoraSpec(base_dtype=torch.bfloat16))
    with pytest.raises(UserError, match="set both alike"):
        runs.start(rank, ranks, "single", {}, narrow, OPTIM)
    return str(caught.value)


def test_without_adapters_there_is_no_reference(folders: dict[str, Path]) -> None:
    assert "no longer there" in run_ranks(no_reference, 1, folders["llama-tied"])[0]


# The path that a run takes

LOSS = partial(rl_loss, policy=reinforce, weights=token_weights("token_mean", 1))


def run_config(folder: Path, engine: str, adapters: str, **lora: Any) -> RunConfig:
    return parse(
        {
            "max_steps": 10,
            "run_dir": "unused",
            "model": {"path": str(folder), "lora": {"rank": 4, "alpha": 8, **lora}},
            "data": {"train": {"task": "sort"}, "max_prompt_tokens": 96},
            "rollout": {"max_tokens": 12},
            "rewards": [{"fn": "exact"}],
            "algorithm": {"name": "grpo"},
            "optim": {"lr": 1e-2},
            "train": {"micro_batch_tokens": 100},
            "backend": {"name": "fsdp2"},
            "engine": {"name": engine, "transformers": {"adapters": adapters}},
            "runtime": {"ranks": 2, "device": "cpu"},
        }
    )


@contextmanager
def started(run: RunConfig) -> Iterator[Policy]:
    spec = WorkerSpec(run, Path(run.model.path), plan(run, reference=True))
    with launch(partial(Worker, spec=spec), run.runtime.ranks, "cpu", timeout_s=60) as ranks:
        yield Policy(ranks, run, 10)


def engine_gap(policy: Policy) -> float:
    """Largest difference of the log-probs of sampled tokens between engine and trainer."""
    asked = [GenerateRequest(i, list(range(5, 12 + i)), 2, SamplingParams(12)) for i in range(4)]
    prompts = [Prompt(i, "", "", request.token_ids, {}) for i, request in enumerate(asked)]
    groups = assemble(prompts, policy.generate(asked), 2)
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        rollout.reward = 1.0
    samples = from_groups(groups)
    scores = policy.logprobs("policy", samples)
    return max(float(np.abs(mine - sample.engine_logprobs).max()) for mine, sample in zip(scores, samples, strict=True))


@pytest.mark.parametrize("family", ["qwen2", "llama"], ids=["tied", "untied"])
@pytest.mark.parametrize(("engine", "adapters"), [("transformers", "merged"), ("transformers", "apart"), ("vllm", "merged")])
def test_a_run_pushes_what_changed_scores_its_reference_and_exports_both_ways(
    family: str, engine: str, adapters: str, tmp_path: Path
) -> None:
    """Cases 47, 51 and 56 over workers, engine and transport. With adapters in the attention's queries and values alone.

    vLLM keeps both of them in one parameter with the keys, which are not sent.
    """
    if lacking := plugins.missing("engines", engine):
        pytest.skip(f"engine {engine}: {lacking}")
    folder = make(family, tmp_path / "source")
    batch = runs.make_samples(4, vocab=48)
    with started(run_config(folder, engine, adapters, targets=["q_proj", "v_proj"])) as policy:
        first = policy.push()
        base = policy.logprobs("policy", batch)
        assert all(map(np.array_equal, base, policy.logprobs("reference", batch)))
        for _ in range(2):
            policy.step(batch, LOSS)
        stale = engine_gap(policy)
        second = policy.push()
        assert engine_gap(policy) < 1e-5 < 1e-2 < stale
        live = torch.from_numpy(np.concatenate(policy.logprobs("policy", batch)))
        assert all(map(np.array_equal, base, policy.logprobs("reference", batch)))
        assert all("reference" not in held for held in policy.memory())
        policy.export(tmp_path / "merged")
        policy.export_adapter(tmp_path / "adapter")
    plain = AutoModelForCausalLM.from_pretrained(folder)
    sizes = {name: 4 * parameter.numel() for name, parameter in plain.named_parameters()}
    adapter = sum(tensor.nbytes for tensor in load_file(tmp_path / "adapter" / "adapter_model.safetensors").values())
    adapted = [size for name, size in sizes.items() if "q_proj.weight" in name or "v_proj.weight" in name]
    if adapters == "merged":
        assert (first.sent_bytes, second.sent_bytes) == (sum(sizes.values()), sum(adapted))
        assert second.tensors == second.matched == len(sizes)  # what was not sent is compared too
    else:
        assert (first.sent_bytes, second.sent_bytes) == (sum(sizes.values()) + adapter, adapter)
        assert second.tensors == second.matched == len(sizes) + 2 * len(adapted)
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", output_loading_info=True)
    model, report = loaded
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert (alone(model.eval(), batch) - live).abs().max() < 1e-5
    by_peft = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter").eval()
    assert (alone(by_peft, batch) - live).abs().max() < 1e-5
    assert (torch.from_numpy(np.concatenate(base)) - live).abs().max() > 1e-2
