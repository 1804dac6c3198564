"""Cells without loss, from the samples' masks through layout, head and loss: nothing that lies there can reach a value or a gradient.

Failure cases 3 and 4, and the all-ignored batch of case 5, where a mean cross-entropy is NaN with a gradient of 0.
"""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import torch

from drumroll.algorithms.loss import Aggregate, reinforce, rl_loss, sft_loss, token_weights
from drumroll.models.head import target_logprobs
from drumroll.models.layout import lay_out
from drumroll.packing import collate, denominators
from drumroll.types import LossFn, LossOutput, TokenOutputs, TrainSample

# Two tokens with logits 0 and h, so that token 0 has log-prob -log(1 + e^h): -1 at this h, and a slope of e^-1 - 1 there.
LOGIT = math.log(math.e - 1)
SLOPE = math.exp(-1) - 1
MODES: tuple[Aggregate, ...] = ("token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant")


def sample(targets: list[int]) -> TrainSample:
    mask = np.zeros(3, bool)
    mask[targets] = True
    return TrainSample(np.zeros(3, np.int64), mask, advantages=np.ones(len(targets), np.float32))


def losses(hidden_N: torch.Tensor, batch: list[TrainSample], loss: LossFn, layout: str) -> LossOutput:
    """What `Scorer` and a backend do after the model's body, whose hidden states are `hidden_N`, one a place of the layout."""
    micro = collate(batch)
    laid = lay_out(micro, layout)  # type: ignore[arg-type]
    weight = torch.tensor([[0.0], [1.0]])
    logprobs, entropy = target_logprobs(hidden_N[:, None].index_select(0, laid.index_N), weight, None, laid.targets_N, 1.0, True)
    keep = 0 if laid.fill_in else len(logprobs)
    assert entropy is not None
    return loss(TokenOutputs(logprobs[:keep], entropy[:keep]), micro, denominators(batch))


@pytest.mark.parametrize("layout", ["rows", "packed"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("poison", [100.0, -50.0, math.nan, math.inf, -math.inf])
def test_a_cell_without_loss_reaches_neither_value_nor_gradient(mode: Aggregate, poison: float, layout: str) -> None:
    """Loss [[1, x], [1, x]] with mask [[1, 0], [1, 0]], and x first in a third row whose only target comes second."""
    hidden = torch.tensor([LOGIT, poison, LOGIT, poison, poison, LOGIT], requires_grad=True)
    batch = [sample([1]), sample([1]), sample([2])]
    out = losses(hidden, batch, partial(rl_loss, policy=reinforce, weights=token_weights(mode, 10), entropy_coef=1e-30), layout)
    out.loss.backward()
    scale = 0.1 if mode == "constant" else 1.0
    assert out.loss.item() == pytest.approx(scale, abs=1e-6)
    assert hidden.grad is not None
    assert hidden.grad[[1, 3, 4]].tolist() == [0.0, 0.0, 0.0]
    assert hidden.grad[[0, 2, 5]].tolist() == pytest.approx([-SLOPE / 3 * scale] * 3, abs=1e-6)
    assert all(bool(torch.isfinite(stat).all()) and len(stat) == 3 for stat in out.stats.values())


@pytest.mark.parametrize("layout", ["rows", "packed"])
def test_an_all_ignored_batch_has_loss_zero_and_no_stats(layout: str) -> None:
    hidden = torch.full((2,), math.inf, requires_grad=True)
    hidden_or_dummy = torch.cat((hidden.new_zeros(1), hidden))  # a fill-in reads one dummy place and keeps nothing of it
    out = losses(hidden_or_dummy, [sample([])], sft_loss, layout)
    out.loss.backward()
    assert out.loss.item() == 0.0  # not NaN, as 0 / 0 would be
    assert hidden.grad is not None
    assert hidden.grad.tolist() == [0.0, 0.0]
    assert all(len(stat) == 0 for stat in out.stats.values())
