"""Muon and Adafactor over pieces against torch's own optimizers, AdamW with its moments in host memory, and what they cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytest
import torch

from drumroll.backends.base import OptimSpec
from drumroll.backends.optim import Optimizer, Wholes, adamw, make
from drumroll.backends.optim.muon import orthogonal

SHAPES = {"wide": (6, 10), "tall": (12, 5), "embedding": (9, 6), "norm": (6,)}
STEPS = 5


def pieces() -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    return {name: torch.randn(shape) for name, shape in SHAPES.items()}


def gradients(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def wholes() -> Wholes:
    return Wholes({n: torch.Size(s) for n, s in SHAPES.items()}, {"wide", "tall"}, lambda name, piece: piece, lambda name: 0)


def trained(spec: OptimSpec) -> tuple[dict[str, torch.Tensor], Optimizer]:
    mine = pieces()
    optimizer = make(spec, mine, wholes())
    for step in range(STEPS):
        optimizer.step(gradients(step), lr=0.01)
    return mine, optimizer


def theirs(make_optimizer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer], names: list[str]) -> dict[str, torch.Tensor]:
    parameters = {name: torch.nn.Parameter(tensor) for name, tensor in pieces().items() if name in names}
    optimizer = make_optimizer(list(parameters.values()))
    for step in range(STEPS):
        for name, parameter in parameters.items():
            parameter.grad = gradients(step)[name]
        optimizer.step()
    return {name: parameter.detach() for name, parameter in parameters.items()}


def test_muon_is_torchs_muon_up_to_its_bfloat16_and_adamw_for_the_rest() -> None:
    mine, optimizer = trained(OptimSpec(name="muon", weight_decay=0.1))
    start = pieces()
    muon = theirs(lambda p: torch.optim.Muon(p, lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"), ["wide", "tall"])
    for name, expected in muon.items():
        assert float((mine[name] - expected).norm() / (expected - start[name]).norm()) < 0.02
    adamw = theirs(lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, fused=True), ["embedding", "norm"])
    assert all(torch.equal(mine[name], expected) for name, expected in adamw.items())
    assert optimizer.steps == STEPS
    kept = optimizer.moments()
    assert set(kept["momentum"]) == {"wide", "tall"}
    assert set(kept["exp_avg"]) == {"embedding", "norm"}


@pytest.mark.parametrize("shape", [(6, 10), (12, 5), (8, 8)])
def test_what_muon_applies_has_singular_values_near_one(shape: tuple[int, int]) -> None:
    torch.manual_seed(1)
    values = torch.linalg.svdvals(orthogonal(torch.randn(shape) * 1e-3))
    assert values.min() > 0.6
    assert values.max() < 1.3


def test_adafactor_is_torchs_bit_for_bit_and_all_but_stateless() -> None:
    mine, optimizer = trained(OptimSpec(name="adafactor", weight_decay=0.1))
    expected = theirs(lambda p: torch.optim.Adafactor(p, lr=0.01, weight_decay=0.1, foreach=False), list(SHAPES))
    assert all(torch.equal(mine[name], tensor) for name, tensor in expected.items())
    assert optimizer.moments() == {}
    state = sum(tensor.numel() for of_kind in optimizer.shared().values() for tensor in of_kind.values())
    assert state == sum(sum(shape) for shape in SHAPES.values())


@pytest.mark.parametrize("limit", [1, 500, 64 << 20])
def test_moments_in_host_memory_change_nothing_and_come_a_bucket_at_a_time(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 1,440 bytes of moments those of one parameter, of as many as fit, or all are brought to the device together."""
    brought: list[list[str]] = []

    class Watched(adamw.AdamW):
        def _brought(self, moments: Mapping[str, torch.Tensor], names: Sequence[str]) -> dict[str, torch.Tensor]:
            brought.append(list(names))
            return super()._brought(moments, names)

    monkeypatch.setattr(adamw, "_STREAM_BYTES", limit)
    mine = pieces()
    optimizer = Watched(mine, OptimSpec(weight_decay=0.1, offload=True))
    for step in range(STEPS):
        optimizer.step(gradients(step), lr=0.01)
    expected, _ = trained(OptimSpec(weight_decay=0.1))
    assert all(torch.equal(mine[name], tensor) for name, tensor in expected.items())
    sizes = {name: 2 * piece.nbytes for name, piece in mine.items()}
    assert all(len(names) == 1 or sum(sizes[name] for name in names) <= limit for names in brought)
    assert len(brought) == {1: 4, 500: 3, 64 << 20: 1}[limit] * 2 * STEPS  # both moments


@pytest.mark.parametrize("name", ["adamw", "muon", "adafactor"])
def test_a_restored_optimizer_goes_on_bit_equal(name: str) -> None:
    spec = OptimSpec(name=name)  # type: ignore[arg-type]
    straight, first = trained(spec)
    again = {key: tensor.clone() for key, tensor in straight.items()}
    second = make(spec, again, wholes())
    for theirs_of_kind, mine_of_kind in ((first.moments(), second.moments()), (first.shared(), second.shared())):
        for kind, named in theirs_of_kind.items():
            for key, tensor in named.items():
                mine_of_kind[kind][key].copy_(tensor)
    second.set_steps(first.steps)
    for optimizer in (first, second):
        optimizer.step(gradients(STEPS), lr=0.01)
    assert all(torch.equal(again[key], tensor) for key, tensor in straight.items())
    assert second.steps == STEPS + 1
