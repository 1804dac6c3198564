"""What the commands refuse, they refuse before torch is imported; and what an unknown key was meant to be is named."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from drumroll import config, plugins
from drumroll.config.explain import recipe_keys
from drumroll.config.nearest import OTHER_NAMES
from drumroll.config.options import plugin_options
from drumroll.errors import UserError
from drumroll.pipelines import recipe

QUICKSTART = "recipes/quickstart.yaml"
REFUSALS = [
    (["train", QUICKSTART, "optim.learning_rate=1e-4"], "'optim.learning_rate'; did you mean 'optim.lr'?"),
    (["train", QUICKSTART, "max_steps=x"], "max_steps: Input should be a valid integer"),
    (["train", QUICKSTART, "algorithm.name=grp"], "did you mean 'grpo'?"),
    (["train", QUICKSTART, "algorithm.kl.estimator=k1", "algorithm.kl.coef=0.1"], "k1 as a loss has an expected gradient of 0"),
    (["train", QUICKSTART, "rewards=[{fn: exac}]"], "did you mean 'exact'?"),
    (["train", QUICKSTART, "rewards=[{fn: 'none.py:f'}]"], "none.py: no such file"),
    (["train", QUICKSTART, "data.train={path: none.jsonl}"], "data.train.path: no such file or folder: none.jsonl"),
    (["train", QUICKSTART, "warmup.data={path: none.jsonl}"], "warmup.data.path: no such file or folder: none.jsonl"),
    (["train", QUICKSTART, "model.path=./none"], "model.path: no such folder: ./none"),
    (["train", QUICKSTART, "warmup=/none"], "warmup: no such folder: /none"),
    (["eval", QUICKSTART, "--model", "/none"], "model.path: no such folder: /none"),
    (["train", QUICKSTART, "data.eval={task: sor}"], "data.eval.task: unknown task 'sor'"),
    (["train", QUICKSTART, "data.train.options.digit=4"], "did you mean 'digits'?"),
    (["train", QUICKSTART, "backend.name=fsdp"], "backend.fsdp: unknown name 'fsdp'"),
    (["train", QUICKSTART, "engine.name=transformer"], "did you mean 'transformers'?"),
    (["train", QUICKSTART, "backend.fsdp2.reshard=false"], "did you mean 'backend.fsdp2.reshard_after_forward'?"),
    (["train", "none.yaml"], "none.yaml: no such recipe"),
    (["eval", QUICKSTART, "optim.lrr=1"], "did you mean 'optim.lr'?"),
    (["plan", QUICKSTART, "optim.lrr=1"], "did you mean 'optim.lr'?"),
    (["verify", "fsdp"], "unknown name 'fsdp'"),
    (["verify", "--config", "none.yaml"], "none.yaml: no such recipe"),
    (["replay", "none@3"], "none: not the directory of a run"),
    (["export", "none", "out"], "none: not the directory of a run"),
    (["diff", "none", "none"], "none: no records"),
]
PROGRAM = """
import json, sys
from typer.testing import CliRunner
from drumroll.cli import app
told = [repr(CliRunner().invoke(app, arguments).exception) for arguments in json.loads(sys.argv[1])]
print(json.dumps([told, "torch" in sys.modules]))
"""


def test_a_refusal_comes_before_torch(repository: Path) -> None:
    """All of them in one fresh interpreter, which stays without torch to the end."""
    arguments = json.dumps([arguments for arguments, _ in REFUSALS])
    command = [sys.executable, "-c", PROGRAM, arguments]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=120, check=True)
    told, torch_is_there = json.loads(done.stdout)
    assert [(got, words) for got, (_, words) in zip(told, REFUSALS, strict=True) if words not in got or "UserError" not in got] == []
    assert torch_is_there is False


def test_reading_checks_what_a_purpose_needs_and_no_more(repository: Path) -> None:
    gone = ["rewards=[{fn: 'none.py:f'}]"]
    assert recipe.read(repository / QUICKSTART, gone).rewards[0].fn == "none.py:f"  # `plan`, `replay` and `export` score nothing
    no_prompts = ["data.train={path: none.jsonl}", "warmup=null"]
    assert recipe.read(repository / QUICKSTART, no_prompts, "eval").warmup is None  # an evaluation trains on nothing
    began = ["warmup.data={path: none.jsonl}", "model.path=./none"]
    assert recipe.read(repository / QUICKSTART, began, "resume").warmup is not None  # a warm-up that has been made reads nothing again
    for purpose, overrides, words in (("eval", gone, "none.py: no such file"), ("resume", no_prompts, "data.train.path: no such file")):
        with pytest.raises(UserError, match=words):
            recipe.read(repository / QUICKSTART, overrides, purpose)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("optim.learning_rate=1", "'optim.lr'"),
        ("learning_rate=1", "'optim.lr'"),
        ("algorithm.critic.learning_rate=1", "'algorithm.critic.lr'"),
        ("algorithm.kl_coef=1", "'algorithm.kl.coef'"),
        ("algorithm.num_generations=1", "'algorithm.group_size'"),
        ("rollout.n=1", "'algorithm.group_size'"),
        ("batch_size=1", "'rollout.prompts_per_step' or 'train.batch_size'"),
        ("rollout.batch_size=1", "'rollout.prompts_per_step'"),
        ("model.lora.r=1", "'model.lora.rank'"),
        ("algorithm.beta=1", "'algorithm.kl.coef'"),
        ("optim.beta=1", "'optim.betas'"),  # of Adam, not of the KL
        ("optim.epsilon=1", "'optim.eps'"),
        ("algorithm.epsilon=1", "'algorithm.clip_low'"),
        ("eval.steps=1", "'eval.every'"),
        ("lr=1", "'algorithm.critic.lr' or 'optim.lr' or 'warmup.lr'"),
        ("reshard=1", "'backend.fsdp1.reshard_after_forward' or 'backend.fsdp2.reshard_after_forward'"),
        ("optim.reshard=1", "'backend.fsdp1.reshard_after_forward' or 'backend.fsdp2.reshard_after_forward'"),
        ("backend.reshard=1", "'backend.fsdp2.reshard_after_forward'"),  # the backend that the recipe selects
        ("backend.prefetch_forward=1", "'backend.fsdp2.prefetch_forward'"),
        ("backend.fsdp2.micro_batch_tokens=1", "'train.micro_batch_tokens'"),
        ("engine.slot=1", "'engine.transformers.slots'"),
        ("rewards=[{function: exact}]", "'rewards.0.fn'"),
    ],
)
@pytest.mark.parametrize("as_override", [True, False])
def test_an_unknown_key_names_what_was_meant(override: str, meant: str, as_override: bool, repository: Path, tmp_path: Path) -> None:
    file, overrides = repository / QUICKSTART, [override]
    if not as_override:
        key, _, value = override.partition("=")
        tree = config.recipe.read_tree(file, [f"{key}={value}"])
        file, overrides = tmp_path / "mine.yaml", []
        file.write_text(json.dumps(tree))
    with pytest.raises(UserError) as caught:
        recipe.read(file, overrides)
    unknown = override.partition("=")[0] if not override.startswith("rewards") else "rewards.0.function"
    assert str(caught.value).splitlines()[0] == f"{file}: unknown key {unknown!r}; did you mean {meant}?"


@pytest.mark.parametrize("override", ["backend.fsdp2=null", "backend.ddp=3", "engine.transformers=[slots]"])
def test_a_plug_in_without_options_is_no_stray_option(override: str, repository: Path) -> None:
    """As a section in YAML is that has nothing in it."""
    key = override.partition("=")[0]
    with pytest.raises(UserError, match=rf"{QUICKSTART}: {key}: expected a section with the options of that plug-in"):
        recipe.read(repository / QUICKSTART, [override])


def test_what_other_names_lead_to_exists() -> None:
    known = set(recipe_keys())
    assert {key for keys in OTHER_NAMES.values() for key in keys} - known == set()
    assert set(OTHER_NAMES) & known == set(), "a key of ours at the top level is no other's name"


def test_options_read_from_the_text_of_a_plug_in_are_those_of_its_schema() -> None:
    kinds = {"backend": "backends", "engine": "engines"}
    schemas = {f"{key}.{name}": plugins.load(kind, name).Config for key, kind in kinds.items() for name in plugins.names(kind)}
    assert plugin_options() == {section: tuple(schema.model_fields) for section, schema in schemas.items()}
