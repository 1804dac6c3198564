"""The embedded engine's two loops: exactness by family, refills and compaction, prompts prefilled once, refusals, memory."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from drumroll import plugins
from drumroll.engines import cache as cache_module
from drumroll.engines.base import Completion, GenerateRequest, SamplingParams
from drumroll.engines.response import Row, Text
from drumroll.errors import RunError, UserError
from drumroll.models.builtin import tokenizer
from tests.engine_models import FAMILIES, VOCABULARY, by_identity, make, spec

EMBEDDED = plugins.load("engines", plugins.EMBEDDED_ENGINE)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: make(family, tmp_path_factory.mktemp(family)) for family in FAMILIES}


def engine(folder: Path, max_length: int = 128, **options: Any) -> Any:
    made = EMBEDDED(EMBEDDED.Config(**options))
    made.start(spec(folder, max_length=max_length))
    return made


def ragged(groups: int, n: int) -> list[GenerateRequest]:
    """Prompts of 1 to 40 tokens and responses of 1 to 41 tokens, in no order."""
    generator = torch.Generator().manual_seed(4)
    return [
        GenerateRequest(
            group_id=100 + g,
            token_ids=torch.randint(3, VOCABULARY, (1 + (g * 17) % 40,), generator=generator).tolist(),
            n=n,
            sampling=SamplingParams(1 + (g * 23) % 41, temperature=(1.0, 0.7, 1.3)[g % 3], top_k=(0, 0, 9)[g % 3]),
        )
        for g in range(groups)
    ]


def tokens(completions: Iterator[Completion]) -> dict[tuple[int, int], list[int]]:
    return {identity: c.token_ids for identity, c in by_identity(list(completions)).items()}


@pytest.mark.parametrize("family", list(FAMILIES))
def test_families_are_exact_or_fall_back(family: str, folders: dict[str, Path], caplog: pytest.LogCaptureFixture) -> None:
    """Log-probs of ragged rows equal a plain forward to 1e-5, also where a small window makes the engine fall back to `generate`."""
    with caplog.at_level(logging.WARNING):
        sampler = engine(folders[family], slots=5)
    notice = "model.generate" in caplog.text and "DynamicSlidingWindowLayer" in caplog.text
    assert notice == (family == "mistral-window")
    model = AutoModelForCausalLM.from_pretrained(folders[family], attn_implementation="eager").eval()
    asked = {r.group_id: GenerateRequest(r.group_id, r.token_ids, r.n, SamplingParams(24)) for r in ragged(6, 2)}
    worst = 0.0
    for completion in sampler.generate(asked.values()):
        prompt = asked[completion.group_id].token_ids
        with torch.no_grad():
            logprobs = model(torch.tensor([prompt + completion.token_ids]), use_cache=False).logits[0].log_softmax(-1)
        plain = logprobs[len(prompt) - 1 : -1].gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        worst = max(worst, float((plain - torch.tensor(completion.logprobs)).abs().max()))
    assert worst < 1e-5


def test_bfloat16_agrees_with_a_plain_forward_to_its_own_rounding(folders: dict[str, Path]) -> None:
    """Mean gap of log-probs a few times 2^-8: a wrong position or mask would be of the order of 1."""
    sampler = EMBEDDED(EMBEDDED.Config())
    sampler.start(spec(folders["llama"], dtype=torch.bfloat16))
    model = AutoModelForCausalLM.from_pretrained(folders["llama"], dtype=torch.bfloat16).eval()
    gaps = []
    for completion in sampler.generate([GenerateRequest(0, [1, 7, 9], 8, SamplingParams(20))]):
        with torch.no_grad():
            logprobs = model(torch.tensor([[1, 7, 9, *completion.token_ids]]), use_cache=False).logits[0, 2:-1].float().log_softmax(-1)
        gaps.append((logprobs.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0] - torch.tensor(completion.logprobs)).abs())
    assert float(torch.cat(gaps).mean()) < 0.05


@pytest.mark.parametrize("slots", [1, 3, 8])
def test_slots_refills_and_compaction_do_not_show(slots: int, folders: dict[str, Path]) -> None:
    """11 groups of 3 through few slots give the tokens that 33 slots at once give; groups are cut by refills at every place."""
    asked = ragged(11, 3)
    want = tokens(engine(folders["llama"], slots=33).generate(asked))
    assert tokens(engine(folders["llama"], slots=slots, prefill_tokens=50).generate(asked)) == want


def test_looks_at_finished_rows_may_be_rare(folders: dict[str, Path]) -> None:
    """On a GPU rows are looked at every few steps: the tokens that a finished row went on to sample leave no trace."""
    asked = ragged(11, 3)
    want = tokens(engine(folders["llama"], slots=33).generate(asked))
    rare = engine(folders["llama"], slots=6)
    rare._loop._steps = 5
    assert tokens(rare.generate(asked)) == want


def test_generate_loop_draws_the_same_tokens(folders: dict[str, Path]) -> None:
    asked = ragged(9, 3)
    slots, fallback = engine(folders["qwen3"], slots=8), engine(folders["qwen3"], slots=8, loop="generate")
    assert type(slots._loop) is not type(fallback._loop)
    assert tokens(slots.generate(asked)) == tokens(fallback.generate(asked))


def test_the_generate_loop_ignores_the_models_generation_config(folders: dict[str, Path], tmp_path: Path) -> None:
    """Failure case 68 where it comes from: `generate` fills every field that is left open from what the model ships."""
    shipped = tmp_path / "shipped"
    shutil.copytree(folders["mistral-window"], shipped)
    GenerationConfig(
        do_sample=True, temperature=0.3, top_k=5, top_p=0.33, repetition_penalty=3.0, min_new_tokens=9, suppress_tokens=list(range(7, 40)),
        eos_token_id=list(range(20, 30)), max_length=20,
    ).save_pretrained(shipped)  # fmt: skip
    asked = ragged(9, 3)
    odd, plain = engine(shipped, slots=8), engine(folders["mistral-window"], slots=8)
    assert type(odd._loop) is type(engine(folders["qwen3"], loop="generate")._loop)
    found, expected = by_identity(list(odd.generate(asked))), by_identity(list(plain.generate(asked)))
    assert {i: (c.token_ids, c.logprobs, c.finish_reason) for i, c in found.items()} == {
        i: (c.token_ids, c.logprobs, c.finish_reason) for i, c in expected.items()
    }


def test_a_prompt_is_prefilled_once(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """One group of 24 through 4 slots, prompt of 30 tokens: 29 positions are computed before decoding, not 24 times as many."""
    sampler = engine(folders["llama"], slots=4)
    seen: list[tuple[int, int]] = []
    hook = sampler._model.get_decoder().layers[0].register_forward_pre_hook(lambda _, args: seen.append(tuple(args[0].shape[:2])))
    list(sampler.generate([GenerateRequest(0, list(range(3, 33)), 24, SamplingParams(5))]))
    hook.remove()
    assert [shape for shape in seen if shape[1] > 1] == [(1, 29)]
    assert sum(1 for shape in seen if shape[1] == 1) == 6 * 5  # and no row waits for another


def test_prompts_are_prefilled_together_within_the_limit(folders: dict[str, Path]) -> None:
    sampler = engine(folders["llama"], slots=8, prefill_tokens=40)
    seen: list[tuple[int, int]] = []
    hook = sampler._model.get_decoder().layers[0].register_forward_pre_hook(lambda _, args: seen.append(tuple(args[0].shape[:2])))
    lengths = (11, 3, 51, 11, 3, 1)
    list(sampler.generate([GenerateRequest(g, [5] * length, 1, SamplingParams(1)) for g, length in enumerate(lengths)]))
    hook.remove()
    assert [shape for shape in seen if shape[1] > 1] == [(4, 10), (1, 50)]  # the prompt of one token has nothing to prefill


def test_requests_are_read_when_slots_are_free(folders: dict[str, Path]) -> None:
    """A lazy source of requests is not drained: completions come before the last request is asked for."""
    asked = []

    def source() -> Iterator[GenerateRequest]:
        for g in range(10):
            asked.append(g)
            yield GenerateRequest(g, [1, 5], 2, SamplingParams(4))

    completions = engine(folders["llama"], slots=4).generate(source())
    next(completions)
    assert len(asked) == 3  # two in the slots, one at the head of the queue
    assert len(list(completions)) == 19


def test_the_same_requests_after_a_push_do_not_reuse_old_keys(folders: dict[str, Path]) -> None:
    asked = ragged(1, 6)
    sampler, fresh = engine(folders["llama"], slots=4), engine(folders["llama"], slots=4)
    pushed = [[(name, p.detach() * 1.5) for name, p in sampler._model.named_parameters()]]
    before = tokens(sampler.generate(asked))
    for one in (sampler, fresh):
        one.load_weights(pushed, 1)
    assert tokens(sampler.generate(asked)) == tokens(fresh.generate(asked)) != before


def test_an_abandoned_generate_leaves_nothing_behind(folders: dict[str, Path]) -> None:
    sampler = engine(folders["llama"], slots=4)
    asked = ragged(5, 3)
    want = tokens(sampler.generate(asked))
    started = sampler.generate(asked)
    next(started)
    with pytest.raises(RunError, match="another generate"):
        next(sampler.generate(asked))
    with pytest.raises(RunError, match="under way"):
        sampler.load_weights([], 1)
    started.close()
    assert tokens(sampler.generate(asked)) == want


def test_a_slot_path_that_is_wrong_is_refused(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault planted in the decode mask (one token too many is hidden) is caught at start, before anything is sampled."""
    right = cache_module.decode_mask
    monkeypatch.setattr("drumroll.engines.self_check.decode_mask", lambda positions, *args: right(positions - 1, *args))
    with pytest.raises(UserError, match=r"differ from a plain forward by .*loop=generate"):
        engine(folders["llama"])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("loop", ["auto", "generate"])
def test_a_model_file_with_nan_is_named_with_its_tensor(value: float, loop: str, folders: dict[str, Path], tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folders["llama"])
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] = value
    model.save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    with pytest.raises(UserError) as caught:
        engine(tmp_path, loop=loop)
    assert f"{tmp_path}: the model file holds NaN or infinity in model.layers.1.mlp.up_proj.weight:" in str(caught.value)
    assert "loop=generate" not in str(caught.value)


def test_finite_weights_whose_logits_are_not_are_no_fault_of_the_slot_cache(folders: dict[str, Path], tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folders["llama"])
    with torch.no_grad():
        model.lm_head.weight.fill_(3e38)
    model.save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"torch\.float32 gives logits that are not finite: name another model"):
        engine(tmp_path)


def test_a_config_that_hides_its_window_is_refused(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Were a window taken for full attention, the start-up check's rows are longer than it and show the difference."""
    monkeypatch.setattr("drumroll.engines.transformers.why_not_slots", lambda config: None)
    with pytest.raises(UserError, match="differ from a plain forward"):
        engine(folders["mistral-window"])


def test_the_models_positions_bound_a_request(folders: dict[str, Path]) -> None:
    with pytest.raises(UserError, match="at most 256"):
        list(engine(folders["gpt2"], max_length=1000).generate([GenerateRequest(0, [5] * 200, 1, SamplingParams(60))]))


def test_memory_is_what_the_longest_rows_need_and_sleep_gives_it_back(folders: dict[str, Path]) -> None:
    sampler = engine(folders["llama"], slots=4)
    weights = sampler.memory()
    list(sampler.generate([GenerateRequest(0, [5] * 10, 4, SamplingParams(20))]))
    per_token = 2 * 2 * 2 * 32 * 4  # layers, keys and values, heads, head size, bytes
    assert sampler.memory() - weights == 4 * 32 * per_token  # steps of 16 tokens
    sampler.sleep()
    assert sampler.memory() == weights


def test_rows_in_flight_are_bounded_by_memory(folders: dict[str, Path]) -> None:
    row = 128 * 2 * 2 * 2 * 32 * 4
    assert engine(folders["llama"], slots=99, cache_gib=(3.5 * row) / 2**30)._loop._slots == 3
    with pytest.raises(UserError, match=r"cache_gib.*one row of 128 tokens"):
        engine(folders["llama"], cache_gib=0.5 * row / 2**30)


def test_weights_of_tied_names_must_agree(folders: dict[str, Path]) -> None:
    sampler = engine(folders["qwen2"])
    named = [(name, p.detach().clone()) for name, p in sampler._model.named_parameters()]
    embedding = dict(named)["model.embed_tokens.weight"]
    sampler.load_weights([[*named, ("lm_head.weight", embedding)]], 1)
    with pytest.raises(RunError, match=r"lm_head\.weight.*tied"):
        sampler.load_weights([[*named, ("lm_head.weight", embedding + 1)]], 2)


def test_a_folder_without_tokenizer_is_named(folders: dict[str, Path], tmp_path: Path) -> None:
    for file in folders["llama"].iterdir():
        if "token" not in file.name:
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(UserError, match="no tokenizer"):
        engine(tmp_path)


class TestStopStrings:
    """`Text.stopped` looks at the tail only: it must see every stop string that the newest token completes, and no other."""

    def row(self, text: str, *stop: str) -> Row:
        row = Row(GenerateRequest(0, [1], 1, SamplingParams(99, stop=stop)), 0, 0)
        row.token_ids = tokenizer().encode(text, add_special_tokens=False)
        return row

    @pytest.mark.parametrize(("text", "stops"), [("abc", True), ("xabc", True), ("ab", False), ("abxc", False), ("a" * 50 + "bc", True)])
    def test_the_newest_token_completes_it(self, text: str, stops: bool) -> None:
        assert Text(tokenizer()).stopped(self.row(text, "zz", "abc")) is stops

    def test_special_tokens_inside_do_not_hide_it(self) -> None:
        row = self.row("ab", "abc")
        row.token_ids += [0, 2, 0, *tokenizer().encode("c", add_special_tokens=False)]
        assert Text(tokenizer()).stopped(row)
        row.token_ids.append(2)
        assert not Text(tokenizer()).stopped(row)  # it was completed earlier


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}, {"temperature": 0.0}])
def test_weights_that_are_not_finite_end_sampling_in_words(value: float, filters: dict[str, float], folders: dict[str, Path]) -> None:
    sampler = engine(folders["llama"])
    weights = {name: parameter.detach().clone() for name, parameter in sampler._model.named_parameters()}
    weights["lm_head.weight"][5] = value
    sampler.load_weights([list(weights.items())], version=1)
    with pytest.raises(RunError, match="logits are not finite"):
        list(sampler.generate([GenerateRequest(0, [5, 6, 7], 4, SamplingParams(6, **filters))]))
