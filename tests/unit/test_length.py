"""Sequences that the model has no positions for are refused before the first step, whatever the pipeline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from drumroll import config, plugins
from drumroll.errors import UserError
from drumroll.models.builtin import tokenizer
from drumroll.pipelines import evaluate, rl, sft
from drumroll.pipelines.warmup import starting_model
from drumroll.rewards.base import RewardSet

ROW = {"prompt": "ab", "answer": "ba", "completion": "ba"}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder that says 64 positions. It has no weights: whoever went as far as reading them would fail in another way."""
    folder = tmp_path / "model"
    tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "max_position_embeddings": 64, "vocab_size": 66}))
    return folder


def run(tmp_path: Path, model: Path, **changes: Any) -> config.RunConfig:
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROW) + "\n")
    source = {"path": str(tmp_path / "rows.jsonl")}
    tree: dict[str, Any] = {
        "max_steps": 1,
        "run_dir": str(tmp_path / "run"),
        "model": {"path": str(model)},
        "data": {"train": source, "max_prompt_tokens": 40},
        "rollout": {"max_tokens": 25},
        "backend": {"name": plugins.SPECIFICATION_BACKEND},
    }
    if changes.get("pipeline") != "sft":
        tree |= {"rewards": [{"fn": "exact"}], "algorithm": {"name": "grpo"}, "engine": {"name": plugins.EMBEDDED_ENGINE}}
        tree["data"]["eval"] = source
    return config.parse(tree | changes)


WORDS = ["data.max_prompt_tokens=40", "rollout.max_tokens=25", "65 tokens", "built for 64", "max_position_embeddings"]


@pytest.mark.parametrize("warmup", [None, {"steps": 2}, "folder"])
def test_rl(tmp_path: Path, model: Path, warmup: Any) -> None:
    given = str(model) if warmup == "folder" else warmup
    with pytest.raises(UserError) as caught:
        rl.train(run(tmp_path, model, warmup=given))
    assert [word for word in WORDS if word not in str(caught.value)] == []
    assert not (tmp_path / "run").exists()


def test_sft(tmp_path: Path, model: Path) -> None:
    with pytest.raises(UserError) as caught:
        sft.train(run(tmp_path, model, pipeline="sft"))
    assert [word for word in WORDS if word not in str(caught.value)] == []


def test_eval(tmp_path: Path, model: Path) -> None:
    with pytest.raises(UserError) as caught:
        evaluate.evaluate_model(run(tmp_path, model), None)
    assert [word for word in WORDS if word not in str(caught.value)] == []


def test_as_many_tokens_as_positions_are_enough(tmp_path: Path, model: Path) -> None:
    with pytest.raises(UserError, match="rows that cannot be used"):  # further on: the rows have no completion
        sft.train(run(tmp_path, model, pipeline="sft", rollout={"max_tokens": 24}))


@pytest.mark.parametrize("pipeline", ["rl", "sft"])
def test_a_token_without_an_embedding_is_refused_and_padding_is_not(tmp_path: Path, model: Path, pipeline: str) -> None:
    made = tokenizer()
    size = max(i for token, i in made.get_vocab().items() if token != made.pad_token)
    open_data = {"rl": lambda run: rl.open_prompts(run, model, RewardSet(run.rewards)), "sft": lambda run: sft.open_samples(run, model)}
    data = {"data": {"train": {"path": str(tmp_path / "rows.jsonl")}, "completion": "completion"}} if pipeline == "sft" else {}
    for vocabulary, good in ((size + 1, True), (size, False)):
        (model / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": vocabulary}))
        if good:
            open_data[pipeline](run(tmp_path, model, pipeline=pipeline, **data))
        else:
            with pytest.raises(UserError, match=rf"the id {size}, and the model has {size} embeddings \(vocab_size\)"):
                open_data[pipeline](run(tmp_path, model, pipeline=pipeline, **data))


@pytest.mark.parametrize(("given", "where"), [(True, "warmup.data"), (False, "data.train")])
def test_rows_of_a_warm_up_are_refused_under_their_own_key(given: bool, where: str, tmp_path: Path, model: Path) -> None:
    rows = tmp_path / "rows.jsonl"  # of prompts alone, which is enough for RL
    warmup = {"steps": 1} | ({"data": {"path": str(rows)}} if given else {})
    with pytest.raises(UserError, match=rf"^{where}: rows that cannot be used"):
        starting_model(run(tmp_path, model, warmup=warmup, rollout={"max_tokens": 4}), None)
