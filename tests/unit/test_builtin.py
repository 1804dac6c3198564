"""Models made in code: the same bits each time, a tokenizer without loss, and where models are found."""

import multiprocessing
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from drumroll.errors import UserError
from drumroll.models import builtin
from drumroll.models.locate import locate

SIZES = {"llama-0.8m": 0.8, "llama-tied-0.8m": 0.8, "llama-4.5m": 4.5, "llama-24m": 24, "qwen3-0.9m": 0.9, "qwen3-untied-0.9m": 0.9}


@pytest.mark.parametrize("name", [name for name in builtin.SPECS if name != "llama-24m"])
def test_folders_load_in_transformers_at_their_named_size(name: str, tmp_path: Path) -> None:
    model, report = AutoModelForCausalLM.from_pretrained(builtin.folder(name, tmp_path), output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert model.num_parameters() / 1e6 == pytest.approx(SIZES[name], rel=0.03)
    assert model.config.tie_word_embeddings == builtin.SPECS[name].tied


def test_the_same_bits_each_time_and_made_once(tmp_path: Path) -> None:
    first, second = (builtin.folder("llama-0.8m", tmp_path / cache) for cache in "ab")
    names = sorted(file.name for file in first.iterdir())
    assert names == sorted(file.name for file in second.iterdir())
    for name in names:
        assert (first / name).read_bytes() == (second / name).read_bytes(), name
    stamp = (first / "model.safetensors").stat().st_mtime_ns
    assert builtin.folder("llama-0.8m", tmp_path / "a") == first
    assert (first / "model.safetensors").stat().st_mtime_ns == stamp
    assert [path.name for path in (tmp_path / "a" / "builtin").iterdir()] == [first.name]  # nothing temporary is left


def test_a_changed_spec_has_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = builtin.folder("llama-0.8m", tmp_path)
    changed = builtin.BuiltinSpec("llama", hidden=64, layers=1, heads=4, kv_heads=2, intermediate=64)
    monkeypatch.setitem(builtin.SPECS, "llama-0.8m", changed)
    assert builtin.folder("llama-0.8m", tmp_path) != before


def test_processes_that_race_all_get_the_whole_folder(tmp_path: Path) -> None:
    with multiprocessing.get_context("fork").Pool(2) as pool:
        folders = pool.starmap(builtin.folder, [("llama-0.8m", tmp_path)] * 4)
    assert len(set(folders)) == 1
    AutoModelForCausalLM.from_pretrained(folders[0])


def test_the_tokenizer_is_one_token_a_character_and_loses_nothing(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(builtin.folder("llama-0.8m", tmp_path))
    text = "sort: 3 1 2, 90 = ?\na > b - c"
    ids = tokenizer(text).input_ids
    assert ids[0] == tokenizer.bos_token_id
    assert len(ids) == 1 + len(text)
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert len({tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id}) == 4
    assert tokenizer.chat_template is None
    assert tokenizer("É", add_special_tokens=False).input_ids == [tokenizer.unk_token_id]
    assert len(set(builtin._CHARACTERS)) == len(builtin._CHARACTERS)


def test_the_generation_config_has_no_sampling_defaults_of_its_own(tmp_path: Path) -> None:
    config = GenerationConfig.from_pretrained(builtin.folder("llama-0.8m", tmp_path))
    assert (config.pad_token_id, config.bos_token_id, config.eos_token_id) == (0, 1, 2)
    assert {config.temperature, config.top_p, config.top_k} == {None}


def test_locate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRUMROLL_CACHE", str(tmp_path / "cache"))
    folder = locate("builtin:llama-0.8m")
    assert folder.is_relative_to(tmp_path / "cache")
    assert locate(str(folder)) == folder


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("builtin:llama-0.8", "did you mean 'llama-0.8m'"),
        ("nobody/no-such-model", r"nobody/no-such-model: no such folder, and the hub did not give it .*drumroll model list"),
        ("not a/valid/id", "no such folder"),
        ("./nowhere", "no such folder"),
    ],
)
def test_a_model_that_is_nowhere_is_refused(path: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        locate(path)


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no config\.json"):
        locate(str(tmp_path))
