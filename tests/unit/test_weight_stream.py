"""Streaming safetensors: sharded files, names, shapes, ties, dtypes, and only this rank's rows."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from drumroll.backends.base import ModelSpec
from drumroll.backends.rows import Rows
from drumroll.digest import combine, digest
from drumroll.errors import UserError
from drumroll.models.build import build, materialise
from drumroll.models.stream import Held, load, tensor_files
from drumroll.packing import collate
from tests import scorer_models as models
from tests.ranks import run_ranks


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return models.make("llama", tmp_path / "llama")


def _rewrite(folder: Path, change) -> None:  # type: ignore[no-untyped-def]
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_sharded_folder_loads_equal(folder: Path, tmp_path: Path) -> None:
    model = models.reference(folder)
    model.save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    assert len(set(tensor_files(tmp_path / "sharded").values())) > 1
    for got, want in zip(models.scorer(tmp_path / "sharded").parameters(), model.parameters(), strict=True):
        assert torch.equal(got, want)


def test_bf16_files_become_fp32_masters(folder: Path) -> None:
    _rewrite(folder, lambda tensors: tensors.update({name: tensor.bfloat16() for name, tensor in tensors.items()}))
    scorer = models.scorer(folder)
    for name, parameter in scorer.hf.named_parameters():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, load_file(folder / "model.safetensors")[name].float())


def test_missing_and_unexpected_names_are_named(folder: Path) -> None:
    def rename(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.norm.scale"] = tensors.pop("model.norm.weight")

    _rewrite(folder, rename)
    with pytest.raises(UserError, match=r"missing model\.norm\.weight; unexpected model\.norm\.scale"):
        models.scorer(folder)


def test_another_shape_is_named(folder: Path) -> None:
    _rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(40, 32)}))
    with pytest.raises(UserError, match=r"lm_head\.weight' has shape \(40, 32\).*\(48, 32\)"):
        models.scorer(folder)


def test_a_missing_file_of_an_index_is_named(folder: Path) -> None:
    weight_map = dict.fromkeys(load_file(folder / "model.safetensors"), "model-00001-of-00002.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(UserError, match=r"model-00001-of-00002\.safetensors.*no such file"):
        models.scorer(folder)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": 3}'])
def test_an_index_that_is_none_is_named(folder: Path, content: str) -> None:
    (folder / "model.safetensors.index.json").write_text(content)
    with pytest.raises(UserError, match=r"index\.json: expected an object with weight_map"):
        models.scorer(folder)


def test_a_folder_without_safetensors_is_named(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"expected model\.safetensors"):
        models.scorer(folder)


def test_a_tied_model_reads_either_name_and_refuses_two_values(tmp_path: Path) -> None:
    folder = models.make("qwen2-tied", tmp_path / "tied")
    weight = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    _rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": weight.clone()}))
    assert torch.equal(models.scorer(folder).head.weight, weight)  # both, equal
    _rewrite(folder, lambda tensors: tensors.pop("model.embed_tokens.weight"))
    assert torch.equal(models.scorer(folder).head.weight, weight)  # only the head's
    _rewrite(folder, lambda tensors: tensors.update({"model.embed_tokens.weight": weight + 1}))
    with pytest.raises(UserError, match=r"model\.embed_tokens\.weight and lm_head\.weight are tied .* different values"):
        models.scorer(folder)


def test_a_folder_saved_from_the_bare_body_loads(tmp_path: Path) -> None:
    folder = models.make("gpt2", tmp_path / "gpt2")
    want = models.scorer(folder)
    strip = load_file(folder / "model.safetensors")
    save_file({name.removeprefix("transformer."): t for name, t in strip.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    for got, expected in zip(models.scorer(folder).parameters(), want.parameters(), strict=True):
        assert torch.equal(got, expected)


def _sharded(rank: int, world_size: int, folder: Path, dtype: torch.dtype, checkpointing: str) -> dict[str, float]:
    """A model sharded by blocks against the same one whole: parameters, digests, outputs, gradients, one empty rank included."""
    whole = models.scorer(folder, compute_dtype=dtype, checkpointing=checkpointing)
    sharded = build(ModelSpec(str(folder), compute_dtype=dtype, checkpointing=checkpointing))
    mesh, policy = init_device_mesh("cpu", (world_size,)), MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for unit in (*sharded.blocks, sharded):
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    materialise(sharded, torch.device("cpu"))
    rows = Rows(mesh)

    def held(parameter: torch.nn.Parameter) -> Held:
        assert isinstance(parameter, DTensor)
        return Held(parameter.to_local(), rows.bounds(parameter.shape)[0], parameter.shape)

    load(sharded, folder, held)
    assert sharded.tied == whole.tied
    for (name, part), full in zip(sharded.hf.named_parameters(), whole.hf.parameters(), strict=True):
        assert torch.equal(part.full_tensor(), full), name
        mine, sums = held(part), [None] * world_size
        assert torch.equal(mine.local, rows.cut(full)), name
        dist.all_gather_object(sums, digest(mine.local, mine.start))
        assert combine(*sums) == digest(full), name
    for (name, got), want in zip(sharded.hf.named_buffers(), whole.hf.buffers(), strict=True):
        assert torch.equal(got, want), name
    batch = models.samples()
    whole(collate(batch))[0].sum().backward()
    mine = batch if rank == 0 else []
    (sharded(collate(mine))[0].sum() * world_size).backward()
    worst = max(
        float((part.grad.full_tensor() - full.grad).norm() / full.grad.norm())
        for part, full in zip(sharded.parameters(), whole.parameters(), strict=True)
    )
    with torch.no_grad():
        gap = float((sharded(collate(batch))[0] - whole(collate(batch))[0]).abs().max())
    return {"gradient": worst, "logprob": gap}


@pytest.mark.parametrize("name", ["llama", "qwen2-tied", "qwen3-moe"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_two_ranks_hold_their_rows_and_compute_the_same(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    """48 rows of 32 over 2 ranks, the second without a sample; the cast of plain parameters equals the mixed-precision policy."""
    folder = models.make(name, tmp_path / name)
    for result in run_ranks(_sharded, 2, folder, dtype, "full", timeout=100):
        assert result["logprob"] == 0.0
        assert result["gradient"] < (1e-6 if dtype == torch.float32 else 1e-2)


def test_one_rank_is_bit_equal_in_lower_precision(tmp_path: Path) -> None:
    folder = models.make("qwen2-tied", tmp_path / "tied")
    [result] = run_ranks(_sharded, 1, folder, torch.bfloat16, False, timeout=100)
    assert result == {"gradient": 0.0, "logprob": 0.0}


def test_a_cut_file_is_named(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"model\.safetensors: not a whole safetensors file"):
        models.scorer(folder)
