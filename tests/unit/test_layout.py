"""Rows and packed rows: samples are isolated, padding changes nothing, fill-ins touch everything. Failure cases 19, 20 and 27."""

from operator import attrgetter
from pathlib import Path

import numpy as np
import pytest
import torch

from drumroll.models.layout import choose, cut, lay_out
from drumroll.packing import collate
from drumroll.types import TrainSample
from tests import scorer_models as models

FAMILIES = ["gpt2", "qwen2-tied", "llama"]


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.make(request.param, tmp_path_factory.mktemp(request.param))


def _sample(ids: list[int], targets: list[int]) -> TrainSample:
    mask = np.zeros(len(ids), bool)
    mask[targets] = True
    return TrainSample(np.array(ids), mask)


def test_rows_by_hand() -> None:
    laid = lay_out(collate([_sample([5, 6, 7, 8], [2, 3]), _sample([9, 10], [1])]), "rows")
    assert laid.input_ids_BL.tolist() == [[5, 6, 7], [9, 10, 10]]  # no last token but as padding, after everything that is read
    assert laid.position_ids_BL.tolist() == [[0, 1, 2]]
    assert laid.index_N.tolist() == [1, 2, 3]  # the place before each target
    assert laid.targets_N.tolist() == [7, 8, 10]


def test_packed_by_hand() -> None:
    laid = lay_out(collate([_sample([5, 6, 7, 8], [2, 3]), _sample([4], []), _sample([9, 10], [1])]), "packed")
    assert laid.input_ids_BL.tolist() == [[5, 6, 7, 9]]
    assert laid.position_ids_BL.tolist() == [[0, 1, 2, 0]]
    assert laid.index_N.tolist() == [1, 2, 3]
    assert laid.targets_N.tolist() == [7, 8, 10]


def test_auto_packs_only_where_a_varlen_kernel_is() -> None:
    assert [choose("auto", a) for a in ("eager", "sdpa", "flash_attention_2")] == ["rows", "rows", "packed"]
    assert choose("packed", "sdpa") == "packed"
    with pytest.raises(ValueError, match="auto, rows or packed"):
        choose("row", "sdpa")


@pytest.mark.parametrize("layout", ["rows", "packed"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_equals_each_sample_alone_and_changing_one_leaves_others(folder: Path, layout: str, attention: str, checkpointing: str) -> None:
    """Failure case 27: another sample's tokens change nothing, not one bit; alone through transformers it is the same within 1e-5."""
    scorer = models.scorer(folder, layout=layout, attention=attention, checkpointing=checkpointing)
    batch = models.samples((6, 5, 9))
    logprobs, *_ = scorer(collate(batch))
    expected = models.alone(models.reference(folder, attention), batch)
    assert expected.std() > 0.3  # far from uniform: a leak or a wrong position would show
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-5)
    first = batch[0].n_targets
    for place in range(6):
        changed = TrainSample(batch[0].token_ids.copy(), batch[0].target_mask)
        changed.token_ids[place] = (changed.token_ids[place] + 7) % models.VOCAB
        other, *_ = scorer(collate([changed, *batch[1:]]))
        assert torch.equal(other[first:], logprobs[first:])
        assert not torch.equal(other[:first], logprobs[:first])


@pytest.mark.parametrize("layout", ["rows", "packed"])
def test_padding_width_changes_nothing(folder: Path, layout: str) -> None:
    """Failure case 19: unpadded and padded by 5 or 30 agree below 1e-5, for absolute and rotary positions."""
    scorer = models.scorer(folder, layout=layout)
    [sample] = models.samples((8,))
    alone, *_ = scorer(collate([sample]))
    for longer in (13, 38):
        beside, *_ = scorer(collate([sample, *models.samples((longer,), seed=1)]))
        torch.testing.assert_close(beside[: sample.n_targets], alone, rtol=0, atol=1e-5)


def test_a_token_equal_to_the_padding_or_the_end_counts_like_any_other(folder: Path) -> None:
    """Failure case 20: what is real is known by length, never by id."""
    batch = [_sample([0, 2, 0, 2], [1, 2, 3]), _sample([5, 6, 7, 8, 9, 2], [4, 5])]
    logprobs, *_ = models.scorer(folder)(collate(batch))
    torch.testing.assert_close(logprobs, models.alone(models.reference(folder), batch), rtol=0, atol=1e-5)


@pytest.mark.parametrize("batch", [[], [_sample([5, 6, 7], [])]], ids=["no sample", "no target"])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_a_fill_in_touches_every_parameter_with_zero_gradient(folder: Path, batch: list[TrainSample], checkpointing: str) -> None:
    scorer = models.scorer(folder, checkpointing=checkpointing)
    logprobs, entropy, _ = scorer(collate(batch), True)
    assert logprobs.shape == entropy.shape == (0,)
    (logprobs.sum() + entropy.sum()).backward()
    for name, parameter in scorer.named_parameters():
        assert parameter.grad is not None, name
        assert (parameter.grad == 0).all(), name


@pytest.mark.parametrize("layout", ["rows", "packed"])
def test_gradients_equal_each_sample_alone(folder: Path, layout: str) -> None:
    scorer, reference, batch = models.scorer(folder, layout=layout, temperature=0.7), models.reference(folder), models.samples()
    scorer(collate(batch))[0].sum().backward()
    models.alone(reference, batch, temperature=0.7).sum().backward()
    for (name, got), want in zip(scorer.hf.named_parameters(), reference.parameters(), strict=True):
        assert (got.grad - want.grad).norm() <= 1e-5 * want.grad.norm() + 1e-7, name


def test_slices_by_hand() -> None:
    """Ten inputs over three ranks: slices of four, the last two tokens of which are filling with positions of its own."""
    micro = collate([_sample([5, 6, 7, 8], [2, 3]), _sample([4], []), _sample([9, 10, 11, 12, 13, 14, 15, 16], [1, 5, 7])])
    slices = [cut(micro, rank, 3, torch.device("cpu")) for rank in range(3)]
    assert [part.laid.input_ids_BL.tolist() for part in slices] == [[[5, 6, 7, 9]], [[10, 11, 12, 13]], [[14, 15, 0, 0]]]
    assert [part.laid.position_ids_BL.tolist() for part in slices] == [[[0, 1, 2, 0]], [[1, 2, 3, 4]], [[5, 6, 0, 1]]]
    assert [part.laid.index_N.tolist() for part in slices] == [[1, 2, 3], [3], [1]]
    assert [part.laid.targets_N.tolist() for part in slices] == [[7, 8, 10], [14], [16]]
    assert all(part.lengths == [3, 7, 2] and part.targets == [3, 1, 1] for part in slices)


@pytest.mark.parametrize("batch", [[], [_sample([5, 6, 7], [])]], ids=["no sample", "no target"])
def test_without_a_target_a_slice_is_one_token_of_filling(batch: list[TrainSample]) -> None:
    for rank in range(3):
        part = cut(collate(batch), rank, 3, torch.device("cpu"))
        assert part.laid.input_ids_BL.shape == part.laid.position_ids_BL.shape == (1, 1)
        assert (part.lengths, part.targets, part.laid.index_N.tolist()) == ([3], [0, 0, 0], [])


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 40])
def test_slices_put_together_are_the_packed_row(ranks: int) -> None:
    micro = collate(models.samples((7, 12, 3, 9, 2)))
    whole, slices = lay_out(micro, "packed"), [cut(micro, rank, ranks, torch.device("cpu")) for rank in range(ranks)]
    tokens = whole.input_ids_BL.shape[1]

    for field in (attrgetter("input_ids_BL"), attrgetter("position_ids_BL")):
        assert torch.equal(torch.cat([field(part.laid) for part in slices], dim=1)[:, :tokens], field(whole))
    length = slices[0].laid.input_ids_BL.shape[1]
    assert length == -(-tokens // ranks)
    assert torch.equal(torch.cat([part.laid.index_N + rank * length for rank, part in enumerate(slices)]), whole.index_N)
    assert torch.equal(torch.cat([part.laid.targets_N for part in slices]), whole.targets_N)
    assert all(sum(part.lengths) == ranks * length and sum(part.targets) == len(whole.targets_N) for part in slices)
