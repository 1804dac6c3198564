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

# Bytes of one chunk of logits; about three such buffers live at once. Small enough for a CPU's caches, large enough for a GPU's matmuls.
_CHUNK_BYTES = {"cpu": 16 << 20}
_CHUNK_BYTES_ELSEWHERE = 64 << 20
_MIN_ROWS = 16


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
    return max(_MIN_ROWS, _CHUNK_BYTES.get(device.type, _CHUNK_BYTES_ELSEWHERE) // (vocab * itemsize))


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
        for rows in _chunks(hidden_NH, weight_VH, accurate):
            scaled_CV = _scaled_logits(hidden_NH[rows], weight_VH, bias_V, temperature, accurate)
            top_C1 = scaled_CV.amax(dim=1, keepdim=True)
            shifted_CV = scaled_CV.sub_(top_C1)
            target_C = shifted_CV.gather(1, targets_N[rows, None]).squeeze(1)
            p_CV = shifted_CV.exp() if entropy else shifted_CV.exp_()
            sum_C = p_CV.sum(dim=1)
            log_sum_C = sum_C.log()
            logprobs_N[rows] = target_C - log_sum_C
            partition_N[rows] = top_C1.squeeze(1) + log_sum_C
            if entropy:
                entropy_N[rows] = log_sum_C - p_CV.mul_(shifted_CV).sum(dim=1) / sum_C
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, targets_N, partition_N, entropy_N)
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
        for rows in _chunks(hidden_NH, weight_VH, accurate):
            log_p_CV = _scaled_logits(hidden_NH[rows], weight_VH, bias_V, ctx.temperature, accurate).sub_(partition_N[rows, None])
            d_CV = _logit_gradient(
                log_p_CV, targets_N[rows], g_logprobs_N[rows] if g_logprobs_N is not None else None,
                g_entropy_N[rows] if g_entropy_N is not None else None, entropy_N[rows] if ctx.with_entropy else None,
            )  # fmt: skip
            if ctx.temperature != 1.0:
                d_CV.div_(ctx.temperature)
            if d_bias is not None:
                d_bias += d_CV.sum(dim=0)
            d_CV = d_CV.to(hidden_NH.dtype)
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


def _chunks(hidden_NH: torch.Tensor, weight_VH: torch.Tensor, accurate: torch.dtype) -> list[slice]:
    rows = chunk_rows(weight_VH.shape[0], accurate.itemsize, hidden_NH.device)
    return [slice(start, start + rows) for start in range(0, len(hidden_NH), rows)]


def _scaled_logits(
    hidden_CH: torch.Tensor, weight_VH: torch.Tensor, bias_V: torch.Tensor | None, temperature: float, accurate: torch.dtype
) -> torch.Tensor:
    logits_CV = hidden_CH @ weight_VH.T if bias_V is None else torch.addmm(bias_V, hidden_CH, weight_VH.T)
    logits_CV = logits_CV.to(accurate)
    return logits_CV.div_(temperature) if temperature != 1.0 else logits_CV


def _logit_gradient(
    log_p_CV: torch.Tensor,
    targets_C: torch.Tensor,
    g_logprobs_C: torch.Tensor | None,
    g_entropy_C: torch.Tensor | None,
    entropy_C: torch.Tensor | None,
) -> torch.Tensor:
    """Gradient with respect to the scaled logits; overwrites `log_p_CV`. See [Note: chunks]."""
    weight_C1 = torch.zeros_like(log_p_CV[:, :1]) if g_logprobs_C is None else g_logprobs_C[:, None].to(log_p_CV.dtype)
    if g_entropy_C is None or entropy_C is None:
        d_CV = log_p_CV.exp_().mul_(-weight_C1)
    else:
        p_CV = log_p_CV.exp()
        d_CV = log_p_CV.add_(entropy_C[:, None]).mul_(g_entropy_C[:, None]).add_(weight_C1).mul_(p_CV).neg_()
    return d_CV.scatter_add_(1, targets_C[:, None], weight_C1)


def _accumulate(d_weight_VH: torch.Tensor, d_CV: torch.Tensor, hidden_CH: torch.Tensor) -> None:
    if d_weight_VH.dtype == d_CV.dtype:
        d_weight_VH.addmm_(d_CV.T, hidden_CH)
    else:
        d_weight_VH += d_CV.T @ hidden_CH
