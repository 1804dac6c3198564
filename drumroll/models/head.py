"""Log-probs and entropy of target tokens from hidden states, without ever making the [tokens, vocab] matrix of logits.

Axis suffixes: N targets, C targets of one chunk, H hidden, V vocabulary.

[Note: chunks] Forward keeps one number a token (the log of the partition sum) and, for the entropy's gradient, the entropy.
Backward makes the logits of a chunk again: one matmul more than the plain version, paid back by logits that stay in the cache.
With z = logits / temperature and p = softmax(z):
    d logprob / d z = onehot(target) - p          d entropy / d z = -p * (log p + entropy)
"""

from __future__ import annotations

from typing import Any

import torch

# Bytes of one chunk of logits; one or two such buffers live at once. Few rows would make the sum into the weight's gradient cost more than
# the matmul: it passes over [V, H] once a chunk, 12 V H bytes beside matmuls of 6 C V H operations. A GPU does some hundred operations in
# the time of a byte, so there it takes more rows.
_CHUNK_BYTES = {"cpu": 32 << 20}
_CHUNK_BYTES_ELSEWHERE = 64 << 20
_MIN_ROWS = 16
_MIN_ROWS_ELSEWHERE = 512


def target_logprobs(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    bias_V: torch.Tensor | None,
    targets_N: torch.Tensor,
    temperature: float = 1.0,
    entropy: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """log_softmax(logits / temperature) at the targets, and the entropy in nats of the same distribution.

    Both are [N] in float32 (float64 for float64 input) and differentiable with respect to hidden, weight and bias. Matmuls run in the
    dtype of `hidden`; everything after them, and the accumulation of the weight's gradient, in float32.
    """
    logprobs_N, entropy_N = _Head.apply(hidden_NH, weight_VH, bias_V, targets_N, temperature, entropy)  # type: ignore[no-untyped-call]
    return logprobs_N, entropy_N if entropy else None


def chunk_rows(vocab: int, itemsize: int, device: torch.device) -> int:
    """Targets whose logits are made at once."""
    least = _MIN_ROWS if device.type == "cpu" else _MIN_ROWS_ELSEWHERE
    return max(least, _CHUNK_BYTES.get(device.type, _CHUNK_BYTES_ELSEWHERE) // (vocab * itemsize))


class _Head(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: torch.Tensor,
        weight_VH: torch.Tensor,
        bias_V: torch.Tensor | None,
        targets_N: torch.Tensor,
        temperature: float,
        entropy: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        accurate = torch.promote_types(hidden_NH.dtype, torch.float32)
        logprobs_N = hidden_NH.new_empty(len(targets_N), dtype=accurate)
        partition_N = torch.empty_like(logprobs_N)
        entropy_N = torch.empty_like(logprobs_N) if entropy else logprobs_N.new_zeros(0)
        logits = _Logits(hidden_NH, weight_VH, bias_V, temperature)
        spare_CV = torch.empty_like(logits.accurate_CV) if entropy else logits.accurate_CV
        for rows in logits.chunks():
            scaled_CV = logits(rows)
            top_C1 = scaled_CV.amax(dim=1, keepdim=True)
            shifted_CV = scaled_CV.sub_(top_C1)
            target_C = shifted_CV.gather(1, targets_N[rows, None]).squeeze(1)
            p_CV = torch.exp(shifted_CV, out=spare_CV[: len(shifted_CV)])
            sum_C = p_CV.sum(dim=1)
            log_sum_C = sum_C.log()
            logprobs_N[rows] = target_C - log_sum_C
            partition_N[rows] = top_C1.squeeze(1) + log_sum_C
            if entropy:
                entropy_N[rows] = log_sum_C - p_CV.mul_(shifted_CV).sum(dim=1) / sum_C
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, targets_N, partition_N, entropy_N)
        ctx.set_materialize_grads(False)  # an entropy that is only reported costs nothing in backward
        ctx.temperature = temperature
        ctx.with_entropy = entropy
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        hidden_NH, weight_VH, bias_V, targets_N, partition_N, entropy_N = ctx.saved_tensors
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        g_logprobs_N, g_entropy_N = grads[0], grads[1] if ctx.with_entropy else None
        accurate = partition_N.dtype
        d_hidden = torch.empty_like(hidden_NH) if need_hidden else None
        d_weight = weight_VH.new_zeros(weight_VH.shape, dtype=accurate) if need_weight else None
        d_bias = weight_VH.new_zeros(weight_VH.shape[0], dtype=accurate) if need_bias else None
        logits = _Logits(hidden_NH, weight_VH, bias_V, ctx.temperature)
        spare_CV = torch.empty_like(logits.accurate_CV) if g_entropy_N is not None else None
        for rows in logits.chunks():
            log_p_CV = logits(rows).sub_(partition_N[rows, None])
            weight_C1 = torch.zeros_like(partition_N[rows, None]) if g_logprobs_N is None else g_logprobs_N[rows, None]
            if g_entropy_N is None or spare_CV is None:
                d_CV = log_p_CV.exp_().mul_(-weight_C1)
            else:
                p_CV = torch.exp(log_p_CV, out=spare_CV[: len(log_p_CV)])
                d_CV = log_p_CV.add_(entropy_N[rows, None]).mul_(g_entropy_N[rows, None]).add_(weight_C1).mul_(p_CV).neg_()
            d_CV.scatter_add_(1, targets_N[rows, None], weight_C1)
            if ctx.temperature != 1.0:
                d_CV.div_(ctx.temperature)
            if d_bias is not None:
                d_bias += d_CV.sum(dim=0)
            d_CV = logits.lower(d_CV)
            if d_hidden is not None:
                torch.mm(d_CV, weight_VH, out=d_hidden[rows])
            if d_weight is not None:
                _accumulate(d_weight, d_CV, hidden_NH[rows])
        return (
            d_hidden,
            d_weight.to(weight_VH.dtype) if d_weight is not None else None,
            d_bias.to(bias_V.dtype) if d_bias is not None else None,
            None, None, None,
        )  # fmt: skip


class _Logits:
    """Scaled logits of one chunk after another, in buffers made once: fresh memory for each would cost as much as filling it."""

    def __init__(self, hidden_NH: torch.Tensor, weight_VH: torch.Tensor, bias_V: torch.Tensor | None, temperature: float) -> None:
        self.hidden_NH, self.weight_VH, self.bias_V, self.temperature = hidden_NH, weight_VH, bias_V, temperature
        accurate = torch.promote_types(hidden_NH.dtype, torch.float32)
        self.rows = min(len(hidden_NH), chunk_rows(weight_VH.shape[0], accurate.itemsize, hidden_NH.device))
        self.raw_CV = hidden_NH.new_empty(self.rows, weight_VH.shape[0])
        self.accurate_CV = self.raw_CV if accurate == hidden_NH.dtype else self.raw_CV.to(accurate)

    def chunks(self) -> list[slice]:
        return [slice(start, start + self.rows) for start in range(0, len(self.hidden_NH), max(1, self.rows))]

    def __call__(self, rows: slice) -> torch.Tensor:
        """[C, V] in float32 (float64 for float64), to be overwritten by the caller and by the next call."""
        hidden_CH = self.hidden_NH[rows]
        raw_CV = torch.mm(hidden_CH, self.weight_VH.T, out=self.raw_CV[: len(hidden_CH)])
        if self.bias_V is not None:
            raw_CV += self.bias_V
        scaled_CV = raw_CV if self.accurate_CV is self.raw_CV else self.accurate_CV[: len(raw_CV)].copy_(raw_CV)
        return scaled_CV.div_(self.temperature) if self.temperature != 1.0 else scaled_CV

    def lower(self, values_CV: torch.Tensor) -> torch.Tensor:
        """Values in the dtype of `hidden`, for matmuls; overwrites the chunk's raw logits."""
        return values_CV if self.accurate_CV is self.raw_CV else self.raw_CV[: len(values_CV)].copy_(values_CV)


def _accumulate(d_weight_VH: torch.Tensor, d_CV: torch.Tensor, hidden_CH: torch.Tensor) -> None:
    if d_weight_VH.dtype == d_CV.dtype:
        d_weight_VH.addmm_(d_CV.T, hidden_CH)
    else:
        d_weight_VH += d_CV.T @ hidden_CH
