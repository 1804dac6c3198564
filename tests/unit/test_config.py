"""A run configuration: what is refused, how it says so, and that nothing is rewritten."""

from __future__ import annotations

import copy
import math
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from drumroll import config, plugins
from drumroll.errors import UserError

TREE: dict[str, Any] = {
    "max_steps": 3,
    "run_dir": "runs/x",
    "model": {"path": "some/folder"},
    "data": {"train": {"task": "sort", "options": {"digits": 6}}},
    "rewards": [{"fn": "exact"}],
    "algorithm": {"name": "grpo"},
    "backend": {"name": plugins.SPECIFICATION_BACKEND},
    "engine": {"name": plugins.EMBEDDED_ENGINE},
}


def tree(**changes: Any) -> dict[str, Any]:
    """TREE with `a__b=value` set at a.b."""
    result = copy.deepcopy(TREE)
    for name, value in changes.items():
        node: Any = result
        *parents, leaf = name.split("__")
        for part in parents:
            node = node[int(part)] if isinstance(node, list) else node.setdefault(part, {})
        node[leaf] = value
    return result


def refusal(source: dict[str, Any]) -> list[str]:
    """The lines of the refusal."""
    with pytest.raises(UserError) as caught:
        config.parse(source, "recipe.yaml")
    return str(caught.value).split("\n")


@pytest.mark.parametrize(
    ("source", "unknown", "nearest"),
    [
        (tree(max_step=3), "max_step", "max_steps"),
        (tree(optim__weigth_decay=0.1), "optim.weigth_decay", "optim.weight_decay"),
        (tree(optim__LR=0.1), "optim.LR", "optim.lr"),
        (tree(rewards__0__wieght=2), "rewards.0.wieght", "rewards.0.weight"),
        (tree(algorithm__kl={"ceof": 0.1}), "algorithm.kl.ceof", "algorithm.kl.coef"),
        (tree(warmup={"stpes": 10}), "warmup.stpes", "warmup.steps"),
        (tree(warmup={"steps": 10, "bach_size": 8}), "warmup.bach_size", "warmup.batch_size"),
        (tree(data__train={"task": "sort", "row": 8}), "data.train.row", "data.train.rows"),
        (tree(data__train={"path": "x.jsonl", "skipp": 8}), "data.train.skipp", "data.train.skip"),
        (tree(data__eval={"hub": "a/b", "splits": "test"}), "data.eval.splits", "data.eval.split"),
        (tree(data__train={"tsk": "sort"}), "data.train.tsk", "data.train.task"),
        (tree(runtime__rank=2), "runtime.rank", "runtime.ranks"),
    ],
)
def test_unknown_key_is_refused_at_any_level_with_the_nearest(source: dict[str, Any], unknown: str, nearest: str) -> None:
    assert refusal(source) == [f"recipe.yaml: unknown key {unknown!r}; did you mean {nearest!r}?"]


def test_a_key_of_another_section_is_found() -> None:
    (line,) = refusal(tree(lr=1e-4))
    assert "unknown key 'lr'" in line
    assert "optim.lr" in line


def test_a_key_like_no_other_gets_the_list() -> None:
    (line,) = refusal(tree(checkpoint__zzz=1))
    assert line == "recipe.yaml: unknown key 'checkpoint.zzz'; valid keys here: " + ", ".join(config.CheckpointConfig.model_fields)


def test_every_fault_has_its_line() -> None:
    lines = refusal(tree(max_step=3, optim__lr=-1.0, model__path=3))
    assert len(lines) == 3
    assert any("optim.lr" in line and "-1.0" in line for line in lines)


def test_missing_keys_are_named() -> None:
    source = tree()
    del source["model"]["path"]
    assert refusal(source) == ["recipe.yaml: missing key 'model.path'"]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (tree(warmup=5), ["warmup", "steps, batch_size", "got 5"]),
        (tree(optim=5), ["optim", "lr, schedule", "got 5"]),
        (tree(data__train={"rows": 4}), ["data.train", "task", "path", "hub"]),
        (tree(max_lag=1), ["max_lag", "got 1"]),
        (tree(backend={"name": "a", "x": 3}), ["backend", "'x'", "a.x"]),
        (tree(rewards=[]), ["rl needs rewards"]),
        (tree(max_steps=0), ["max_steps", "greater than 0", "got 0"]),
        (tree(optim__lr=math.inf), ["optim.lr", "finite", "got inf"]),
        (tree(rewards__0__weight=math.nan), ["rewards.0.weight", "finite", "got nan"]),
        (tree(optim__betas=[0.9, 1.0]), ["optim.betas.1", "less than 1", "got 1.0"]),
        (tree(model__trainable=["layers.(1"]), ["model.trainable", "'layers.(1' is not a regular expression", "unterminated"]),
        (tree(rollout__stop=["a", ""]), ["rollout.stop.1", "at least 1 character", "got ''"]),
        (tree(max_steps=True), ["max_steps", "number", "the boolean true"]),
        (tree(optim__lr=False), ["optim.lr", "the boolean false"]),
        (tree(optim__betas=[0.9, True]), ["optim.betas", "the boolean true"]),
        (tree(data__train={"task": "sort", "rows": True}), ["data.train.rows", "the boolean true"]),
        (tree(rewards__0__weight=True), ["rewards.0.weight", "the boolean true"]),
        (tree(algorithm__kl={"coef": True}), ["algorithm.kl.coef", "the boolean true"]),
        (tree(max_lag=False), ["max_lag", "the boolean false"]),
    ],
)
def test_a_wrong_value_says_what_was_expected_and_got(source: dict[str, Any], words: list[str]) -> None:
    text = "\n".join(refusal(source))
    assert text.startswith("recipe.yaml: ")
    assert [word for word in words if word not in text] == []
    assert "Value error" not in text


SFT: dict[str, Any] = {key: TREE[key] for key in ("max_steps", "run_dir", "model", "data", "backend")} | {"pipeline": "sft"}


def changed(source: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return copy.deepcopy(source) | changes


@pytest.mark.parametrize(
    ("source", "line"),
    [
        (changed(SFT, warmup="some/folder", eval={"every": 0}), "pipeline: sft does not read warmup, eval: leave that out"),
        (tree(pipeline="sft"), "pipeline: sft does not read rewards, algorithm, engine: leave that out"),
        (changed(SFT, rollout={"max_tokens": 8, "temperature": 1.0}), "pipeline: sft does not read rollout.temperature: leave that out"),
        (changed(SFT, data={"train": {"task": "sort"}, "eval": {"task": "sort"}}), "pipeline: sft does not read data.eval: leave that out"),
        (changed(SFT, record={"batches": True}), "pipeline: sft does not read record.batches: leave that out"),
        (changed(SFT, optim={"min_lr_ratio": 0.1}),
         "optim.schedule: constant does not read optim.min_lr_ratio: leave that out, or choose linear or cosine"),
        (tree(train__batch_size=64),
         "pipeline: rl does not read train.batch_size: set rollout.prompts_per_step, algorithm.group_size and algorithm.minibatches"),
        (tree(data__completion="x"), "pipeline: rl without a warm-up does not read data.completion: leave that out"),
        (tree(data__completion="x", warmup="some/folder"), "pipeline: rl without a warm-up does not read data.completion: leave that out"),
    ],
)  # fmt: skip
def test_a_key_that_the_run_would_not_read_is_refused(source: dict[str, Any], line: str) -> None:
    assert refusal(source) == [f"recipe.yaml: {line}"]


@pytest.mark.parametrize(
    "source",
    [
        SFT,
        changed(SFT, rollout={"max_tokens": 8}, rewards=[], algorithm=None, engine=None, warmup=None, eval={}),
        changed(SFT, train={"batch_size": 8}, optim={"schedule": "linear", "min_lr_ratio": 0.1}),
        tree(data__completion="x", warmup={"steps": 3}),
    ],
)
def test_what_is_read_or_says_nothing_is_taken_and_survives_dump_and_load(source: dict[str, Any], tmp_path: Path) -> None:
    first = config.parse(source)
    config.dump(first, tmp_path / "config.yaml")
    assert config.load(tmp_path / "config.yaml") == first


def test_a_boolean_stays_one_where_one_is_expected() -> None:
    parsed = config.parse(tree(model__checkpointing="full", data__chat=False, data__train={"task": "sort", "options": {"x": True}}))
    assert parsed.model.checkpointing == "full"
    assert parsed.data.chat is False
    assert parsed.data.train.options == {"x": True}  # type: ignore[union-attr]


def test_warmup_is_a_folder_or_a_section() -> None:
    assert config.parse(tree(warmup="some/folder")).warmup == "some/folder"
    assert config.parse(tree(warmup={"steps": 7})).warmup == config.WarmupConfig(steps=7)
    assert config.parse(tree(warmup=None)).warmup is None


def test_sft_needs_no_algorithm_engine_or_reward() -> None:
    assert config.parse(SFT).engine is None


def test_frozen_at_every_level() -> None:
    parsed = config.parse(tree())
    with pytest.raises(ValidationError):
        parsed.seed = 1  # type: ignore[misc]
    with pytest.raises(ValidationError):
        parsed.optim.lr = 1.0  # type: ignore[misc]
    with pytest.raises(ValidationError):
        parsed.backend.name = "other"  # type: ignore[misc]


def recipe(folder: Path, source: dict[str, Any] | str) -> Path:
    file = folder / "recipe.yaml"
    file.write_text(source if isinstance(source, str) else yaml.safe_dump(source), encoding="utf-8")
    return file


@pytest.mark.parametrize(
    ("text", "value"),
    [("3e-4", 3e-4), ("+1.e-2", 1e-2), (".5e1", 5.0), ("0.01", 0.01), ("1", 1), ("true", True), ("null", None), ("abc", "abc"),
     ("3E4", 3e4), ("'3e-4'", "3e-4"), ("1e", "1e"), ("[1e-3, 2]", [1e-3, 2]), ("{a: 1e-3}", {"a": 1e-3}), ("nan", "nan"), ("", None)],
)  # fmt: skip
def test_override_values_are_yaml(tmp_path: Path, text: str, value: Any) -> None:
    parsed = config.load(recipe(tmp_path, tree()), [f"data.train.options.x={text}"])
    got = parsed.data.train.options["x"]  # type: ignore[union-attr]
    assert got == value
    assert type(got) is type(value)


def test_overrides_reach_sections_that_the_recipe_leaves_out(tmp_path: Path) -> None:
    parsed = config.load(recipe(tmp_path, tree()), ["optim.lr=3e-4", "algorithm.kl.coef=0.1", "backend.other.depth=2", "runtime.ranks=2"])
    assert math.isclose(parsed.optim.lr, 3e-4, rel_tol=0)
    assert parsed.algorithm is not None
    assert parsed.algorithm.kl is not None
    assert parsed.algorithm.kl.coef == 0.1
    assert parsed.backend.sections == {"other": {"depth": 2}}
    assert parsed.backend.options == {}
    assert parsed.runtime.ranks == 2


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("runtime.ranks", ["'runtime.ranks'", "key=value"]),
        ("=3", ["key=value"]),
        ("max_steps.x=3", ["max_steps is a value (3)"]),
        ("optim.lr=[1", ["optim.lr=[1", "not valid YAML"]),
        ("optim.lrr=3", ["optim.lrr", "optim.lr"]),
        ("rewards.0.fn=math", ["rewards is a list", "given whole: rewards=[...]"]),
        ("rewards.0={fn: math}", ["rewards is a list", "given whole: rewards=[...]"]),
        ("data.examples.0.role=user", ["data.examples is a list", "given whole: data.examples=[...]"]),
        ("max_steps=true", ["max_steps", "the boolean true"]),
    ],
)
def test_a_bad_override_is_refused(tmp_path: Path, override: str, words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        config.load(recipe(tmp_path, tree()), [override])
    assert [word for word in words if word not in str(caught.value)] == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [1", ["not valid YAML"]),
        ("- 1", ["mapping", "list"]),
        ("seed: 1\nmax_steps: 2\nseed: 3\n", ["'seed' stands twice", "line 3"]),
        ("optim: {lr: 1, lr: 2}", ["'lr' stands twice"]),
        ("{[a]: b}", ["unhashable key"]),
    ],
)
def test_a_bad_file_is_refused_by_name(tmp_path: Path, text: str, words: list[str]) -> None:
    file = recipe(tmp_path, text)
    with pytest.raises(UserError) as caught:
        config.load(file)
    assert [word for word in [str(file), *words] if word not in str(caught.value)] == []


def test_a_recipe_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such recipe"):
        config.load(tmp_path / "none.yaml")


def test_dumped_and_loaded_again_is_equal(tmp_path: Path) -> None:
    source = tree(
        warmup={"steps": 5}, seed=7, run_dir="3e-4", optim={"lr": 3e-4, "betas": [0.9, 0.95]},
        data__system="Größer? \n 'x': # no\u2028comment", rewards=[{"fn": "a:b", "args": {"k": None, "s": "1e5"}}],
        backend={"name": plugins.SPECIFICATION_BACKEND, "other": {"a": [1, 2.5e-9]}},
    )  # fmt: skip
    first = config.parse(source)
    config.dump(first, tmp_path / "config.yaml")
    assert config.load(tmp_path / "config.yaml") == first


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5, alphabet="ab1e-."), inner, max_size=3),
    max_leaves=8,
)


@given(options=st.dictionaries(st.text(min_size=1, max_size=5, alphabet="abc1e-"), VALUES, max_size=4))
def test_any_options_survive_dump_and_load(tmp_path_factory: pytest.TempPathFactory, options: dict[str, Any]) -> None:
    file = tmp_path_factory.mktemp("dump") / "config.yaml"
    first = config.parse(tree(data__train={"task": "sort", "options": options}))
    config.dump(first, file)
    assert config.load(file) == first


PLUGIN = '''
from drumroll.config import Section
from pydantic import Field

class Options(Section):
    depth: int = Field(1, gt=0, description="a number")

class Mine:
    Config = Options
'''


def test_plugin_sections_are_checked_against_the_schema_in_the_plugins_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(PLUGIN)
    name = f"{file}:Mine"
    good = config.parse(tree(backend={"name": name, name: {"depth": 3}}))
    plugins.check(good)
    assert plugins.options("backends", good.backend).depth == 3  # type: ignore[attr-defined]
    assert plugins.options("backends", config.NamedSection(name=name)).depth == 1  # type: ignore[attr-defined]

    with pytest.raises(UserError) as caught:
        plugins.check(config.parse(tree(backend={"name": name, name: {"dept": 3}})), "recipe.yaml")
    assert str(caught.value) == f"recipe.yaml: unknown key 'backend.{name}.dept'; did you mean 'backend.{name}.depth'?"
    not_selected = config.parse(tree(backend={"name": plugins.SPECIFICATION_BACKEND, name: {"depth": 0}}))
    with pytest.raises(UserError, match=r"depth.*greater than 0"):
        plugins.check(not_selected)
    with pytest.raises(UserError, match=rf"backend.{re.escape(name)}.depth: expected a number, got the boolean true"):
        plugins.check(config.parse(tree(backend={"name": name, name: {"depth": True}})))


@pytest.mark.parametrize(("kind", "right"), [("backend", plugins.SPECIFICATION_BACKEND), ("engine", plugins.EMBEDDED_ENGINE)])
def test_unknown_plugin_names_are_refused_with_the_nearest(kind: str, right: str) -> None:
    wrong = right[:-1]
    for section in ({"name": wrong}, {"name": right, wrong: {}}):
        with pytest.raises(UserError) as caught:
            plugins.check(config.parse(tree(**{kind: section})))
        assert f"{kind}.{wrong}" in str(caught.value)
        assert f"did you mean {right!r}?" in str(caught.value)
