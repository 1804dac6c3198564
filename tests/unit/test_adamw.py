"""The optimizer over plain pieces against torch's own AdamW, and failure case 15: small updates are not rounded away."""

from __future__ import annotations

import pytest
import torch

from drumroll.backends.base import OptimSpec
from drumroll.backends.optim.adamw import AdamW
from drumroll.errors import RunError


def test_equals_torch_adamw_bit_for_bit_and_steps_over_empty_pieces() -> None:
    torch.manual_seed(0)
    pieces = {"a": torch.randn(7, 3), "empty": torch.empty(0, 3), "b": torch.randn(5)}
    reference = [torch.nn.Parameter(pieces[name].clone()) for name in ("a", "b")]
    theirs = torch.optim.AdamW(reference, lr=1e-2, betas=(0.9, 0.95), eps=1e-9, weight_decay=0.1, fused=True)
    ours = AdamW(pieces, OptimSpec(betas=(0.9, 0.95), eps=1e-9, weight_decay=0.1))
    for _ in range(4):
        gradients = {name: torch.randn_like(piece) for name, piece in pieces.items()}
        for parameter, name in zip(reference, ("a", "b"), strict=True):
            parameter.grad = gradients[name].clone()
        theirs.step()
        ours.step(gradients, lr=1e-2)
    assert all(torch.equal(pieces[name], parameter) for name, parameter in zip(("a", "b"), reference, strict=True))
    assert ours.steps == 4


def test_small_steps_move_every_weight() -> None:
    weight = torch.ones(10_000)
    optimizer = AdamW({"w": weight}, OptimSpec())
    for _ in range(100):
        optimizer.step({"w": torch.ones_like(weight)}, lr=1e-3)
    assert torch.allclose(weight, torch.full_like(weight, 0.9), atol=1e-5)


def test_refuses_to_step_low_precision() -> None:
    with pytest.raises(RunError, match="expected float32"):
        AdamW({"w": torch.ones(3, dtype=torch.bfloat16)}, OptimSpec())
