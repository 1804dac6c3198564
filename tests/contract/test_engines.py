"""The Engine contract, held against every engine that can run here: one that is not installed is skipped, visibly.

Failure cases 13 (the engine's half), 20, 21 and 68. `make` gives a model folder, `reference` a plain forward of it without a cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from drumroll import plugins
from drumroll.digest import digest
from drumroll.engines.base import Completion, Engine, GenerateRequest, SamplingParams
from drumroll.errors import RunError, UserError
from tests.engine_models import VOCABULARY, by_identity, make, spec

SCRIPTED = "scripted"
LOGPROB_TOLERANCE = 1e-5
ODD_DEFAULTS = GenerationConfig(
    do_sample=True,
    temperature=0.3,
    top_k=5,
    top_p=0.33,
    repetition_penalty=3.0,
    suppress_tokens=[7, 8, 9, 10, 11, 12],
    eos_token_id=[20, 21, 22, 23],
)


@dataclass
class Started:
    name: str
    engine: Engine
    model: PreTrainedModel  # the same weights, plain


def sampling_engines() -> list[str]:
    return [name for name in plugins.names("engines") if name != SCRIPTED]


def start(name: str, folder: Path, **changes: object) -> Engine:
    """An engine of that name on a tiny model; skips the test, visibly, where it cannot be installed."""
    plugin = plugins.load("engines", name)
    engine: Engine = plugin(plugin.Config())
    try:
        engine.start(spec(folder, **changes))
    except UserError as error:
        if "is not installed" in str(error):
            pytest.skip(f"engine {name}: {error}")
        raise
    return engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied model (a head that is missed shows), shipped with a generation config that would spoil every distribution."""
    folder = make("qwen2", tmp_path_factory.mktemp("model"))
    ODD_DEFAULTS.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=sampling_engines())
def started(request: pytest.FixtureRequest, folder: Path) -> Iterator[Started]:
    engine = start(request.param, folder)
    yield Started(request.param, engine, reference(folder))
    engine.close()


@pytest.fixture(scope="module", params=plugins.names("engines"))
def any_engine(request: pytest.FixtureRequest, folder: Path) -> Iterator[Started]:
    engine = start(request.param, folder)
    yield Started(request.param, engine, reference(folder))
    engine.close()


def reference(folder: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    return model


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Prompts of 1 to 40 tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCABULARY, (1 + (i * 13) % 40,), generator=generator).tolist() for i in range(count)]


def requests(count: int, n: int, sampling: SamplingParams, **changes: object) -> list[GenerateRequest]:
    return [GenerateRequest(i, ids, n, sampling, **changes) for i, ids in enumerate(prompts(count))]  # type: ignore[arg-type]


def plain_logprobs(model: PreTrainedModel, request: GenerateRequest, completion: Completion, temperature: float) -> torch.Tensor:
    """Log-probs of the response's tokens from one forward without a cache."""
    tokens = torch.tensor([request.token_ids + completion.token_ids])
    with torch.no_grad():
        logprobs = (model(tokens, use_cache=False).logits[0].float() / temperature).log_softmax(-1)
    return logprobs[len(request.token_ids) - 1 : -1].gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
def test_logprobs_are_those_of_a_plain_forward(started: Started, temperature: float) -> None:
    asked = requests(7, 3, SamplingParams(24, temperature=temperature))
    found = by_identity(list(started.engine.generate(asked)))
    assert set(found) == {(g, i) for g in range(7) for i in range(3)}
    worst = 0.0
    for request in asked:
        for index in range(request.n):
            completion = found[request.group_id, index]
            assert len(completion.token_ids) == len(completion.logprobs) == 24 and completion.finish_reason == "length"
            plain = plain_logprobs(started.model, request, completion, temperature or 1.0)
            worst = max(worst, float((plain - torch.tensor(completion.logprobs)).abs().max()))
    assert worst < LOGPROB_TOLERANCE


def test_frequencies_are_the_models_whatever_generation_config_it_ships(started: Started) -> None:
    """Case 68: 4000 first tokens of one prompt against softmax, on a model whose own defaults are top_k 5, top_p 0.33 and worse."""
    asked = GenerateRequest(0, [1, 9, 30, 12], 4000, SamplingParams(1))
    counts = torch.zeros(VOCABULARY, dtype=torch.float64)
    for completion in started.engine.generate([asked]):
        counts[completion.token_ids[0]] += 1
    with torch.no_grad():
        expected = started.model(torch.tensor([asked.token_ids])).logits[0, -1].double().softmax(-1) * 4000
    enough = expected >= 5
    assert int(enough.sum()) > 10
    pooled = lambda t: torch.cat((t[enough], t[~enough].sum(0, keepdim=True)))  # noqa: E731
    statistic, dof = float(((pooled(counts) - pooled(expected)) ** 2 / pooled(expected).clamp(min=1e-9)).sum()), int(enough.sum())
    assert statistic < dof + 4.5 * (2 * dof) ** 0.5  # p about 1e-5


def test_filtered_logprobs_are_renormalised(started: Started) -> None:
    sampling = SamplingParams(12, temperature=0.8, top_k=4)
    for completion in started.engine.generate(asked := requests(4, 2, sampling)):
        request = asked[completion.group_id]
        for t, (token, logprob) in enumerate(zip(completion.token_ids, completion.logprobs, strict=True)):
            with torch.no_grad():
                logits = started.model(torch.tensor([request.token_ids + completion.token_ids[:t]])).logits[0, -1] / 0.8
            best = logits.topk(4)
            assert token in best.indices.tolist()
            assert abs(float(logits[token] - best.values.logsumexp(0)) - logprob) < LOGPROB_TOLERANCE


def test_a_sample_depends_on_its_identity_alone(started: Started) -> None:
    """The same tokens alone and among others, in another order, among other requests; another stream or group gives others."""
    sampling = SamplingParams(16)
    asked = requests(6, 3, sampling)
    whole = by_identity(list(started.engine.generate(asked)))
    again = by_identity(list(started.engine.generate(reversed(asked))))
    alone = by_identity([c for request in asked[:3] for c in started.engine.generate([request])])
    for identity, completion in whole.items():
        assert again[identity].token_ids == completion.token_ids
        if identity in alone:
            assert alone[identity].token_ids == completion.token_ids
    other = by_identity(list(started.engine.generate(requests(6, 3, sampling, stream="eval"))))
    assert sum(other[i].token_ids == whole[i].token_ids for i in whole) == 0
    assert len({tuple(whole[0, i].token_ids) for i in range(3)}) == 3


def test_greedy_does_not_depend_on_identity(started: Started) -> None:
    found = by_identity(list(started.engine.generate([GenerateRequest(9, [1, 5, 6], 3, SamplingParams(8, temperature=0))])))
    assert found[9, 0].token_ids == found[9, 1].token_ids == found[9, 2].token_ids


def test_every_eos_id_stops_and_is_kept(started: Started) -> None:
    """Cases 20 and 21: two ids, one of them also in the prompt; the one sampled stays in the response with its log-prob."""
    free = by_identity(list(started.engine.generate(requests(8, 4, SamplingParams(24)))))
    ids = tuple(sorted({c.token_ids[3] for c in free.values()})[:2])
    asked = requests(8, 4, SamplingParams(24, eos_ids=ids))
    asked[0].token_ids[0] = ids[0]
    free |= by_identity(list(started.engine.generate([GenerateRequest(0, asked[0].token_ids, 4, SamplingParams(24))])))
    stopped = 0
    for completion in started.engine.generate(asked):
        full = free[completion.group_id, completion.index].token_ids
        end = next((t + 1 for t, token in enumerate(full) if token in ids), None)
        assert completion.token_ids == full[:end]
        assert completion.finish_reason == ("length" if end is None else "stop")
        stopped += end is not None
    assert stopped >= 2


def test_eos_on_the_last_token_allowed_is_a_stop(started: Started) -> None:
    free = next(iter(started.engine.generate([GenerateRequest(0, [1, 5], 1, SamplingParams(6))])))
    limit = next(t for t, token in enumerate(free.token_ids) if token not in free.token_ids[:t] and t >= 1) + 1
    sampling = SamplingParams(limit, eos_ids=(free.token_ids[limit - 1],))
    completion = next(iter(started.engine.generate([GenerateRequest(0, [1, 5], 1, sampling)])))
    assert completion.token_ids == free.token_ids[:limit] and completion.finish_reason == "stop"


def test_stop_strings_end_a_response_where_they_are_complete(started: Started) -> None:
    free = by_identity(list(started.engine.generate(requests(6, 4, SamplingParams(24)))))
    stop = free[2, 1].text[4:6]
    stopped = 0
    for completion in started.engine.generate(requests(6, 4, SamplingParams(24, stop=(stop, "\x00never")))):
        full = free[completion.group_id, completion.index]
        assert completion.token_ids == full.token_ids[: len(completion.token_ids)]
        assert (completion.finish_reason == "stop") == (stop in completion.text) == (stop in full.text)
        if completion.finish_reason == "stop":
            assert completion.text.endswith(stop) and completion.text.count(stop) == 1
            stopped += 1
    assert stopped >= 1


def test_lengths_are_per_request(started: Started) -> None:
    asked = [GenerateRequest(i, ids, 2, SamplingParams(1 + 5 * i)) for i, ids in enumerate(prompts(5))]
    assert {(c.group_id, len(c.token_ids)) for c in started.engine.generate(asked)} == {(i, 1 + 5 * i) for i in range(5)}


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (GenerateRequest(3, [], 1, SamplingParams(4)), "group 3.*no tokens"),
        (GenerateRequest(3, [1] * 100, 1, SamplingParams(100)), "200 tokens.*at most 128"),
        (GenerateRequest(3, [1, VOCABULARY], 1, SamplingParams(4)), "vocabulary"),
        (GenerateRequest(3, [1], 0, SamplingParams(4)), "n=0"),
        (GenerateRequest(3, [1], 1, SamplingParams(4, top_p=2.0)), "top_p"),
    ],
    ids=["empty", "long", "unknown-id", "none", "top_p"],
)
def test_a_request_that_cannot_be_sampled_is_refused_by_name(any_engine: Started, request_: GenerateRequest, message: str) -> None:
    with pytest.raises(UserError, match=message):
        list(any_engine.engine.generate([request_]))
    assert len(list(any_engine.engine.generate([GenerateRequest(0, [1, 4], 2, SamplingParams(3))]))) == 2  # and the engine goes on


def pushed(model: PreTrainedModel, scale: float) -> list[list[tuple[str, torch.Tensor]]]:
    """Other weights for `model`, two tensors a bucket, tied ones once."""
    named = [(name, parameter.detach() * scale) for name, parameter in model.named_parameters()]
    return [named[i : i + 2] for i in range(0, len(named), 2)]


def test_weights_arrive_digests_show_it_and_tokens_carry_the_version(any_engine: Started) -> None:
    engine, model = any_engine.engine, any_engine.model
    held = engine.memory()
    try:
        for version, scale in ((5, 1.25), (6, 0.5)):
            buckets = pushed(model, scale)
            engine.load_weights(iter(buckets), version)
            assert engine.digests() == {name: digest(tensor) for bucket in buckets for name, tensor in bucket}
            assert {c.version for c in engine.generate([GenerateRequest(0, [1, 5], 2, SamplingParams(2))])} == {version}
        assert engine.memory() == pytest.approx(held, rel=0.05, abs=1 << 20)
    finally:
        engine.load_weights(pushed(model, 1.0), 0)


def test_samples_come_from_the_new_weights(started: Started, folder: Path) -> None:
    other = reference(folder)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.7)
    try:
        started.engine.load_weights(pushed(started.model, 0.7), 1)
        asked = GenerateRequest(0, [1, 5, 9], 1, SamplingParams(20))
        completion = next(iter(started.engine.generate([asked])))
        new, old = (plain_logprobs(m, asked, completion, 1.0) for m in (other, started.model))
        assert float((new - torch.tensor(completion.logprobs)).abs().max()) < LOGPROB_TOLERANCE
        assert float((old - torch.tensor(completion.logprobs)).abs().max()) > 0.01
    finally:
        started.engine.load_weights(pushed(started.model, 1.0), 0)


def test_weights_that_do_not_fit_are_refused_by_name(any_engine: Started) -> None:
    good = [(name, parameter.detach()) for name, parameter in any_engine.model.named_parameters()]
    name, tensor = good[-1]
    faults = {
        "no parameter 'ghost.weight'": [*good, ("ghost.weight", tensor)],
        f"did not come.*{name}": good[:-1],
        f"{name}.*twice": [*good, good[-1]],
        f"{name}.*expected shape": [*good[:-1], (name, tensor[:3])],
    }
    try:
        for message, bucket in faults.items():
            with pytest.raises(RunError, match=message):
                any_engine.engine.load_weights([bucket], 1)
    finally:
        any_engine.engine.load_weights([good], 0)


def test_sleep_releases_and_wake_brings_back(any_engine: Started) -> None:
    engine = any_engine.engine
    asked = [GenerateRequest(0, [1, 5, 9], 2, SamplingParams(8))]
    before = by_identity(list(engine.generate(asked)))
    held = engine.memory()
    engine.sleep()
    assert engine.memory() <= held
    with pytest.raises(RunError, match="wake"):
        list(engine.generate(asked))
    engine.wake()
    after = by_identity(list(engine.generate(asked)))
    assert {k: c.token_ids for k, c in before.items()} == {k: c.token_ids for k, c in after.items()}
