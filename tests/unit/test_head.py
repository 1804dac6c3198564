"""The chunked head against log_softmax over full logits."""

import pytest
import torch

from drumroll.models import head
from drumroll.models.head import target_logprobs


def _case(dtype: torch.dtype, bias: bool, n: int = 37, hidden: int = 5, vocab: int = 11) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    make = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((n, hidden), (vocab, hidden), (vocab,))]
    tensors = [t.to(dtype).requires_grad_() for t in make]
    return (tensors[0], tensors[1], tensors[2] if bias else None, torch.randint(0, vocab, (n,), generator=generator))  # type: ignore[return-value]


def _reference(hidden, weight, bias, targets, temperature):  # type: ignore[no-untyped-def]
    logits = hidden @ weight.T if bias is None else hidden @ weight.T + bias
    log_p = (logits / temperature).log_softmax(-1)
    return log_p.gather(1, targets[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)


@pytest.fixture(autouse=True)
def _several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(head._CHUNK_BYTES, "cpu", 1)  # chunks of _MIN_ROWS = 16 targets: 37 make three


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_gradients_in_double(bias: bool, entropy: bool, temperature: float) -> None:
    hidden, weight, bias_V, targets = _case(torch.float64, bias)
    inputs = [t for t in (hidden, weight, bias_V) if t is not None]

    def outputs(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logprobs, ent = target_logprobs(tensors[0], tensors[1], tensors[2] if bias else None, targets, temperature, entropy)
        return (logprobs,) if ent is None else (logprobs, ent)

    assert torch.autograd.gradcheck(outputs, inputs)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_equals_log_softmax_in_double(temperature: float) -> None:
    hidden, weight, bias, targets = _case(torch.float64, True)
    got, want = target_logprobs(hidden, weight, bias, targets, temperature, True), _reference(hidden, weight, bias, targets, temperature)
    torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-13)
    coefficients = torch.randn(2, len(targets), dtype=torch.float64)
    got_grads = torch.autograd.grad((coefficients[0] * got[0] + coefficients[1] * got[1]).sum(), (hidden, weight, bias))
    want_grads = torch.autograd.grad((coefficients[0] * want[0] + coefficients[1] * want[1]).sum(), (hidden, weight, bias))
    torch.testing.assert_close(got_grads, want_grads, rtol=1e-12, atol=1e-12)


def test_float32_outputs_and_gradients_for_lower_precision_inputs() -> None:
    hidden, weight, _, targets = _case(torch.bfloat16, False)
    logprobs, entropy = target_logprobs(hidden, weight, None, targets, 1.0, True)
    assert entropy is not None
    assert (logprobs.dtype, entropy.dtype) == (torch.float32, torch.float32)
    (logprobs.sum() + entropy.sum()).backward()
    assert (hidden.grad.dtype, weight.grad.dtype) == (torch.bfloat16, torch.bfloat16)


def test_large_logits_do_not_overflow() -> None:
    hidden, weight = torch.full((1, 1), 1e4, requires_grad=True), torch.tensor([[1.0], [-1.0], [1 - 2**-10]], requires_grad=True)
    logprobs, entropy = target_logprobs(hidden, weight, None, torch.tensor([0]), 1.0, True)
    (logprobs + entropy).sum().backward()
    expected = torch.tensor([0.0, -1e4 / 2**10]).log_softmax(0)  # 1e4 against 9990.2; -1e4 vanishes
    torch.testing.assert_close(logprobs, expected[:1], rtol=0, atol=1e-3 * 2**-10)
    assert torch.isfinite(hidden.grad).all()
    assert torch.isfinite(weight.grad).all()


def test_zero_upstream_gradients_give_exact_zeros() -> None:
    hidden, weight, _, targets = _case(torch.float32, False)
    logprobs, entropy = target_logprobs(hidden, weight, None, targets, 1.0, True)
    (logprobs[:0].sum() + entropy[:0].sum()).backward()
    assert (hidden.grad == 0).all()
    assert (weight.grad == 0).all()


def test_no_tensor_of_full_logits_is_ever_made() -> None:
    n, vocab = 512, 4096
    largest = 0

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                largest = max(largest, out.numel())
            return out

    hidden, weight = torch.randn(n, 8, requires_grad=True), torch.randn(vocab, 8, requires_grad=True)
    with Sizes():
        logprobs, entropy = target_logprobs(hidden, weight, None, torch.randint(0, vocab, (n,)), 1.0, True)
        (logprobs.sum() + entropy.sum()).backward()
    assert largest == 16 * vocab  # one chunk of _MIN_ROWS rows; full logits are 32 times that
