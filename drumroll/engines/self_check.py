"""Before it samples, the slot loop proves that this model gives the same logits through the slot cache as in a plain forward."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from drumroll.engines.cache import SLOT_ATTENTION, Decode, Prefill, SlotCache, decode_mask
from drumroll.engines.weights import vocabulary_of
from drumroll.errors import UserError

_STEPS = 4  # decode steps compared
_LENGTHS = (24, 17)  # tokens of the two rows before them, longer than that where the config mentions a window
_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.01}  # of max(1, largest |logit|)


def check_slot_path(model: PreTrainedModel, cache: SlotCache, max_length: int) -> int:
    """Compare two ragged rows with a plain forward (eager attention); returns the cache's bytes a token of one row.

    Raises UserError when a logit differs by more than the tolerance of the model's dtype, or the model's own logits are not finite.
    """
    longest = min(max(_LENGTHS[0], _window(model) + 8), max_length - _STEPS)
    lengths = [longest, max(1, longest - (_LENGTHS[0] - _LENGTHS[1]))]
    vocabulary = vocabulary_of(model)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocabulary, (2, longest + _STEPS), generator=generator).to(model.device)
    with torch.inference_mode():
        slots = _through_slots(model, cache, tokens, lengths)
        plain = _plain(model, tokens, lengths)
    bytes_per_token = sum(t[0, :, 0].numel() * t.element_size() for t in cache.tensors())
    cache.release()
    worst, scale = float((slots - plain).abs().max()), max(1.0, float(plain.abs().max()))
    bound = _TOLERANCE[model.dtype] * scale
    if not bool(plain.isfinite().all()):  # nothing to do with the slot cache
        advice = "name another model" if model.dtype == torch.float32 else "set model.dtype=float32"
        raise UserError(f"{model.name_or_path}: a plain forward in {model.dtype} gives logits that are not finite: {advice}")
    if not worst <= bound:  # NaN fails too
        raise UserError(
            f"{type(model).__name__}: logits through the slot cache differ from a plain forward by {worst:.2e}, "
            f"at most {bound:.2e} expected: the embedded engine would sample from another distribution; set its option loop=generate"
        )
    return bytes_per_token


def _through_slots(model: PreTrainedModel, cache: SlotCache, tokens: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """Logits [2, steps, V] of the tokens after `lengths`, both rows prefilled together and then decoded side by side."""
    rows = torch.arange(2, device=model.device)
    longest = max(lengths)
    cache.reserve(2, longest + _STEPS)
    cache.plan = Prefill(slots=rows, source=rows)
    positions = torch.arange(longest, device=model.device).expand(2, longest)
    model.get_decoder()(input_ids=tokens[:, :longest], position_ids=positions, past_key_values=cache, use_cache=True)
    logits = []
    for step in range(_STEPS):
        at = torch.tensor(lengths, device=model.device) + step
        cache.plan = Decode(rows, at, longest + step + 1)
        mask = decode_mask(at, longest + step + 1, model.dtype)
        out = model(
            input_ids=tokens.gather(1, at[:, None]), position_ids=at[:, None], attention_mask=mask, past_key_values=cache, use_cache=True
        )
        logits.append(out.logits[:, -1].float())
    return torch.stack(logits, dim=1)


def _plain(model: PreTrainedModel, tokens: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """The same logits from one forward a row, without a cache, with the model's own eager attention."""
    model.set_attn_implementation("eager")
    logits = []
    for row, length in zip(tokens, lengths, strict=True):
        out = model(input_ids=row[None, : length + _STEPS], use_cache=False)
        logits.append(out.logits[0, length : length + _STEPS].float())
    model.set_attn_implementation(SLOT_ATTENTION)
    return torch.stack(logits)


def _window(model: PreTrainedModel) -> int:
    """The largest window that the config mentions, used or not, 0 when it mentions none: a row beyond it shows what the config hides."""
    fields = model.config.get_text_config(decoder=True).to_dict().items()
    return max((value for name, value in fields if "window" in name and isinstance(value, int)), default=0)
