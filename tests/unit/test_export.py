"""Exported folders load in transformers with nothing missing and the same logits. Failure case 46."""

import json
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from drumroll.errors import RunError, UserError
from drumroll.models import builtin
from drumroll.models.export import Bucket, check_out, save_folder
from drumroll.models.scorer import Scorer
from tests import scorer_models as models


def _buckets(scorer: Scorer, dtype: torch.dtype = torch.float32, size: int = 3) -> Iterator[Bucket]:
    """One reused storage a bucket, as a backend that gathers may do."""
    named = list(scorer.hf.named_parameters())
    for start in range(0, len(named), size):
        bucket = [(name, parameter.detach().to(dtype, copy=True)) for name, parameter in named[start : start + size]]
        yield bucket
        for _, tensor in bucket:
            tensor.fill_(float("nan"))


@pytest.mark.parametrize("name", ["llama", "qwen2-tied", "qwen3-tied", "gpt2", "gemma3", "qwen3-moe", "mixtral"])
@pytest.mark.parametrize("shard_bytes", [4 << 30, 20_000])
def test_reloads_with_equal_logits_and_no_report(name: str, shard_bytes: int, tmp_path: Path) -> None:
    source, out = models.make(name, tmp_path / "source"), tmp_path / "out"
    scorer = models.scorer(source)
    with torch.no_grad():
        for parameter in scorer.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))  # trained: no longer what the source holds
    save_folder(source, out, _buckets(scorer), shard_bytes)
    model, report = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert len(list(model.parameters())) == len(list(scorer.parameters()))
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == scorer.tied
    ids = torch.arange(3, 20)[None]
    torch.testing.assert_close(model(ids).logits, scorer.hf(ids).logits, rtol=0, atol=1e-6)
    files = list(out.glob("*.safetensors"))
    assert (len(files) == 1) == (shard_bytes > 1 << 30)
    shapes = {key: tensor.shape for file in files for key, tensor in load_file(file).items()}
    assert shapes == {key: tensor.shape for key, tensor in load_file(source / "model.safetensors").items()}  # a tie has one key
    models.scorer(out)  # and it is a source again


def test_everything_else_is_the_sources(tmp_path: Path) -> None:
    source = builtin.folder("llama-0.8m", tmp_path)
    (source / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (source / "model.safetensors.index.json").write_text("{}")  # stale: must not come along
    scorer_source = json.loads((source / "config.json").read_text())
    (source / "model.safetensors.index.json").unlink()
    scorer = models.scorer(source)
    save_folder(source, tmp_path / "out", _buckets(scorer, torch.bfloat16))
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {**scorer_source, "dtype": "bfloat16"}
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes(), name
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == "{{ messages[0].content }}"
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.bfloat16


def test_names_that_are_not_the_models_leave_the_old_folder_as_it_was(tmp_path: Path) -> None:
    source, out = models.make("llama", tmp_path / "source"), tmp_path / "out"
    scorer = models.scorer(source)
    save_folder(source, out, _buckets(scorer))
    before = (out / "model.safetensors").read_bytes()
    with pytest.raises(RunError, match=r"missing \['model\.norm\.weight'\], unexpected \['model\.norm\.scale'\]"):
        save_folder(source, out, ([(n.replace("model.norm.weight", "model.norm.scale"), t) for n, t in b] for b in _buckets(scorer)))
    with pytest.raises(RunError, match=r"'model\.embed_tokens\.weight' came twice"):
        save_folder(source, out, (b for buckets in (_buckets(scorer), _buckets(scorer)) for b in buckets))
    with pytest.raises(RunError, match=r"of one dtype, got \['torch.bfloat16', 'torch.float32'\]"):
        save_folder(source, out, ([(n, t.bfloat16() if "norm" in n else t) for n, t in b] for b in _buckets(scorer)))
    assert (out / "model.safetensors").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]  # nothing temporary is left


def test_a_disk_that_refuses_leaves_the_old_folder_as_it_was(tmp_path: Path) -> None:
    source, out = models.make("llama", tmp_path / "source"), tmp_path / "out"
    scorer = models.scorer(source)
    save_folder(source, out, _buckets(scorer))
    before = (out / "model.safetensors").read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(RunError, match=r"out: cannot write the model: .*File too large"):
            save_folder(source, out, _buckets(scorer))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (out / "model.safetensors").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


def test_an_older_folder_is_replaced(tmp_path: Path) -> None:
    source, out = models.make("llama", tmp_path / "source"), tmp_path / "out"
    out.mkdir()
    (out / "stale.txt").write_text("")
    save_folder(source, out, _buckets(models.scorer(source)))
    assert not (out / "stale.txt").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


def test_nothing_but_an_older_model_is_replaced(tmp_path: Path) -> None:
    """`drumroll export RUN ~/project` must not become the end of the project."""
    out = tmp_path / "out"
    check_out(out)
    out.mkdir()
    check_out(out)
    source = models.make("llama", tmp_path / "source")
    save_folder(source, out, _buckets(models.scorer(source)))
    check_out(out)
    for name in ("thesis.tex", "src/main.py"):
        file = out / name
        file.parent.mkdir(exist_ok=True)
        file.touch()
        with pytest.raises(UserError, match=rf"{out}: holds '{name.split('/')[0]}', which is no part of a model, and would be replaced"):
            check_out(out)
        file.unlink()
    (out / "src").rmdir()
    (out / "config.json").unlink()
    with pytest.raises(UserError, match="is no part of a model"):
        check_out(out)  # weights or notes of something else
    with pytest.raises(UserError, match="a file; name a folder"):
        check_out(out / "model.safetensors")


def test_what_a_killed_export_left_goes_with_the_next(tmp_path: Path) -> None:
    """But not what another process may be writing: two runs of a recipe make its warm-up at the same time."""
    source = models.make("llama", tmp_path / "source")
    for name in (".out-ab12_xyz", ".out-old-abcdefgh", ".out-2-abcdefgh", ".outer-abcdefgh"):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (0, 0))
    (tmp_path / ".out-at__work").mkdir()
    save_folder(source, tmp_path / "out", _buckets(models.scorer(source)))
    assert {path.name for path in tmp_path.iterdir()} == {"source", "out", ".out-2-abcdefgh", ".outer-abcdefgh", ".out-at__work"}
