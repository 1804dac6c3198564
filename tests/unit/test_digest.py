"""The digest adds up over runs, and shows what a weight push can get wrong."""

from itertools import pairwise

import pytest
import torch

from drumroll.digest import combine, digest

FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
DTYPES = [*FLOATS, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]
BLOCK = 1 << 16


def _tensor(dtype: torch.dtype, size: int = 1000) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(-100, 100, (size,), generator=generator)
    return (values > 0) if dtype is torch.bool else values.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_runs_add_up_in_every_dtype(dtype: torch.dtype) -> None:
    tensor = _tensor(dtype)
    for cut in (0, 1, 7, 500, 999, 1000):
        assert combine(digest(tensor[:cut]), digest(tensor[cut:], cut)) == digest(tensor)


def test_runs_add_up_across_blocks_and_at_any_start() -> None:
    tensor = torch.randn(3 * BLOCK + 17, generator=torch.Generator().manual_seed(0))
    cuts = [0, 5, BLOCK - 1, BLOCK, 2 * BLOCK + 3, len(tensor)]
    parts = [digest(tensor[a:b], a) for a, b in pairwise(cuts)]
    assert combine(*parts) == digest(tensor)
    far = 5 * 10**12 + 11  # beyond any int32
    assert combine(digest(tensor[:9], far), digest(tensor[9:], far + 9)) == digest(tensor, far)


def test_many_blocks_at_once_give_what_one_at_a_time_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    """The accelerator's path, on a CPU."""
    from drumroll import digest as module

    tensor = torch.randn(5 * BLOCK + 3)
    at_once = module._blocks(tensor[: 4 * BLOCK].view(torch.int32).view(4, BLOCK), 0, 0)
    assert int(at_once) % 2**64 == digest(tensor[: 4 * BLOCK])


def test_rows_of_a_matrix_are_runs() -> None:
    matrix = torch.randn(10, 33)
    assert combine(*(digest(matrix[i : i + 3], i * 33) for i in range(0, 10, 3))) == digest(matrix)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_single_change_shows(dtype: torch.dtype) -> None:
    tensor = _tensor(dtype, 64)
    whole = digest(tensor)
    for index in range(64):
        changed = tensor.clone()
        changed[index] = ~tensor[index] if dtype is torch.bool else tensor[index] + 1
        assert digest(changed) != whole


def test_permutations_transposes_sign_flips_and_lengths_show() -> None:
    tensor = torch.randn(8, 8)
    values = {digest(tensor), digest(tensor.T), digest(tensor.flip(0)), digest(tensor.flip(1)), digest(-tensor), digest(tensor.roll(1, 0))}
    assert len(values) == 6
    assert digest(torch.zeros(5)) != digest(torch.zeros(6))
    two = torch.randn(2, dtype=torch.float64)
    assert digest(two) != digest(-two)  # two sign bits, at the top of 64: must not cancel
    assert digest(torch.tensor([0.0])) != digest(torch.tensor([-0.0]))
    big = torch.zeros(3 * BLOCK)
    big[7], big[BLOCK + 7] = 1.0, 2.0
    swapped = big.clone()
    swapped[7], swapped[BLOCK + 7] = 2.0, 1.0  # same place of two blocks
    assert digest(big) != digest(swapped)


def test_value_is_fixed() -> None:
    """The digest is a format: engines in other processes must compute the same. The second value is the definition, in plain integers."""
    from drumroll.digest import _splitmix64

    bits = [3, -1, 70_000]
    golden = 0x9E3779B97F4A7C15 - 2**64
    start = BLOCK - 1
    keys = [(_splitmix64(i % BLOCK) | 1) * (_splitmix64(i // BLOCK + 2**40) | 1) for i in range(start, start + 3)]
    expected = sum((b + golden) * k for b, k in zip(bits, keys, strict=True)) % 2**64
    assert digest(torch.tensor(bits, dtype=torch.int32), start) == expected


def test_empty_is_zero() -> None:
    assert digest(torch.zeros(0)) == 0
    assert combine() == 0
