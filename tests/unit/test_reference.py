"""One list of every key for `drumroll keys` and docs/config.md: whole, described, quick where no plug-in is asked for."""

from __future__ import annotations

import importlib.util
import io
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from drumroll.config.explain import recipe_keys
from drumroll.config.keys import Key
from drumroll.errors import UserError
from drumroll.reference import reference, show


def key(name: str, form: str = "") -> Key:
    (found,) = (key for table in reference(name) if table.form == form for key in table.keys if key.name == name)
    return found


def test_every_key_is_there_and_says_what_it_means() -> None:
    found = [key for table in reference() for key in table.keys]
    assert set(recipe_keys()) - {key.name for key in found} == set()
    assert [key.name for key in found if not (key.type and key.meaning)] == []
    assert [table.title for table in reference() if not table.about and not table.section.startswith(("engine.", "backend."))] == []


@pytest.mark.parametrize(
    ("name", "form", "kind", "default"),
    [
        ("max_steps", "", "int > 0", "required"),
        ("model", "", "section", "required"),
        ("rewards", "", "list of sections", "[]"),
        ("warmup", "", "str | section | null", "null"),
        ("data.train.task", "with task", "str", "required"),
        ("data.train.rows", "with path", "int > 0 | null", "null"),
        ("data.train.options.digits", "task: sort", "int > 0", "6"),
        ("rollout.top_p", "", "float > 0, <= 1", "1.0"),
        ("model.lora.targets", "", "all-linear | list of str", "all-linear"),
        ("algorithm.kl.coef", "", "float >= 0 | null", "null"),
        ("optim.name", "", "adamw | muon | adafactor", "adamw"),
        ("optim.betas", "", "list of 2: float >= 0, < 1", "[0.9, 0.999]"),
        ("backend.fsdp2.reshard_after_forward", "", "bool | int", "true"),
        ("rewards.args.pattern", "fn: format", "str", "required"),
        ("rewards.args.column", "fn: math", "str", "answer"),
    ],
)
def test_types_and_defaults_are_in_words(name: str, form: str, kind: str, default: str) -> None:
    found = key(name, form)
    assert (found.type, found.default) == (kind, default)


def shown(prefix: str, **terminal: bool) -> str:
    out = io.StringIO()
    show(Console(file=out, width=80, color_system=None, **terminal), prefix)  # type: ignore[arg-type]
    return out.getvalue()


def test_a_prefix_shows_its_keys_in_lines_for_a_pipe_and_within_80_columns_on_a_terminal() -> None:
    lines = shown("algorithm.kl.").splitlines()
    assert [line.split("\t")[0] for line in lines] == ["algorithm.kl.coef", "algorithm.kl.estimator", "algorithm.kl.where"]
    assert lines[0] == "algorithm.kl.coef\tfloat >= 0 | null\tnull\t0: no reference model is held"
    assert shown("rewards.args.pattern").split("\t")[3] == "fn: format: regular expression that the whole response must match\n"
    text = shown("backend.fsdp2", force_terminal=True)
    assert max(map(len, text.splitlines())) <= 80
    assert "backend.fsdp2.reshard_after_forward" in text


def test_a_prefix_that_no_key_has_names_the_nearest() -> None:
    with pytest.raises(UserError, match=r"no key begins with 'optim.learning_rate'; did you mean 'optim.lr'\?"):
        shown("optim.learning_rate")


def test_keys_of_the_schema_need_no_torch(repository: Path) -> None:
    program = "import sys; from drumroll.cli import app; app(['keys', 'optim'], standalone_mode=False); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=repository, capture_output=True, text=True, timeout=60, check=True)
    assert "optim.lr\tfloat > 0\t1e-06\thighest learning rate" in done.stdout
    assert done.stdout.endswith("False\n")


def test_the_documents_have_every_key(repository: Path) -> None:
    """docs/config.md is made by a mkdocs hook from the same list."""
    spec = importlib.util.spec_from_file_location("hooks", repository / "docs/hooks.py")
    assert spec is not None and spec.loader is not None
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    page = hooks.on_page_markdown((repository / "docs/config.md").read_text(encoding="utf-8"))
    assert hooks.MARK not in page
    assert [name for name in recipe_keys() if f"| `{name}` |" not in page] == []
    assert "| `rollout.top_p` | float > 0, <= 1 | `1.0` |" in page
    assert "| `optim.schedule` | constant \\| linear \\| cosine | `constant` |" in page
