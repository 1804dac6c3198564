"""What a request asks for and when its response ends: rows, limits, end-of-sequence ids, stop strings, text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from drumroll.engines import sampling
from drumroll.engines.base import Completion, EngineSpec, GenerateRequest
from drumroll.errors import UserError
from drumroll.types import FinishReason


@dataclass(slots=True, eq=False)
class Row:
    """One sample of a request, on its way from prompt to completion."""

    request: GenerateRequest
    index: int
    key: int  # state of its random stream, see sampling's [Note: randomness by identity]
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Tokens of prompt and response so far."""
        return len(self.request.token_ids) + len(self.token_ids)

    @property
    def limit(self) -> int:
        """Longest response in tokens."""
        return self.request.sampling.max_tokens


def rows(requests: Iterable[GenerateRequest], seed: int, max_length: int, vocabulary: int) -> Iterator[Row]:
    """Rows of the requests in order. Raises UserError for one that cannot be sampled."""
    for request in requests:
        _check(request, max_length, vocabulary)
        for index in range(request.n):
            yield Row(request, index, sampling.stream_key(seed, request.stream, request.group_id, index))


def _check(request: GenerateRequest, max_length: int, vocabulary: int) -> None:
    where = f"request of group {request.group_id}"
    if not request.token_ids:
        raise UserError(f"{where}: the prompt has no tokens; nothing can follow an empty prompt, begin it with a BOS token")
    if request.n < 1:
        raise UserError(f"{where}: n={request.n}: expected at least one sample")
    sampling.check(request.sampling)
    length = len(request.token_ids) + request.sampling.max_tokens
    if length > max_length:
        raise UserError(
            f"{where}: {len(request.token_ids)} prompt tokens and max_tokens={request.sampling.max_tokens} make {length} tokens; "
            f"the engine was started for at most {max_length}"
        )
    if not 0 <= min(request.token_ids) <= max(request.token_ids) < vocabulary:
        raise UserError(f"{where}: token ids {min(request.token_ids)}..{max(request.token_ids)} do not fit a vocabulary of {vocabulary}")


def positions(config: PreTrainedConfig) -> int:
    """Most positions the model was built for; a very large number where its config names none."""
    text = config.get_text_config(decoder=True)
    name = "max_position_embeddings"
    return int(text.to_dict().get(text.attribute_map.get(name, name)) or 1 << 62)


def load_text(spec: EngineSpec) -> Text:
    """The tokenizer of the model folder. Raises UserError when there is none."""
    try:
        return Text(AutoTokenizer.from_pretrained(spec.path, trust_remote_code=spec.trust_remote_code))
    except (OSError, ValueError) as error:
        raise UserError(f"{spec.path}: no tokenizer could be loaded, and an engine needs one for text and stop strings: {error}") from error


class Text:
    """Decodes responses, and finds stop strings in them while they grow."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self._special = frozenset(tokenizer.all_special_ids)

    def stopped(self, row: Row) -> bool:
        """Whether one of the row's stop strings is complete; to be asked after every token.

        Every ordinary token is at least one byte long, so a stop string of k bytes lies within the last k ordinary tokens: the cost of a
        look does not grow with the response. Two more tokens keep what a decoder does at the start of a text away from it.
        """
        stop = row.request.sampling.stop
        if not stop or row.token_ids[-1] in self._special:
            return False
        width = max(len(s.encode()) for s in stop) + 2
        ordinary = [i for i in row.token_ids[-2 * width :] if i not in self._special][-width:]
        tail = self._decode(ordinary)
        return any(s in tail for s in stop)

    def completion(self, row: Row, version: int, finish_reason: FinishReason) -> Completion:
        return Completion(
            group_id=row.request.group_id,
            index=row.index,
            token_ids=row.token_ids,
            logprobs=row.logprobs,
            version=version,
            finish_reason=finish_reason,
            text=self._decode(row.token_ids),
        )

    def _decode(self, token_ids: list[int]) -> str:
        text = self.tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text
