"""What the suite knows of a model before it runs a backend on it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from drumroll.verify import subjects
from tests import scorer_models


@pytest.mark.parametrize("name", ["llama", "qwen3-tied"])
def test_a_value_head_trains_in_the_place_of_the_language_models(name: str, tmp_path: Path) -> None:
    """vocabulary x hidden numbers less where head and embedding are two, and hidden more; it trains whatever else does."""
    subject = subjects.describe(name, scorer_models.make(name, tmp_path))
    (embedding,) = [shape for names, shape in subject.shapes.items() if subject.embedding in names]
    lost = 0 if subject.tied else math.prod(embedding)
    hidden = embedding[1]
    of = {head: sum(map(math.prod, subject.trained((), head))) for head in ("lm", "value")}
    assert of["value"] == of["lm"] - lost + hidden
    assert subject.trained((r"\.none\.",), "value") == [(1, hidden)]
    assert subject.trained((r"\.none\.",), "lm") == []
