"""Chat templates and tokens: one BOS, every EOS, loss on the assistant's tokens alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import GenerationConfig, PreTrainedTokenizerFast

from drumroll.config import DataConfig
from drumroll.data.chat import eos_ids, load_eos_ids, load_tokenizer, prompt_ids, sft_sample
from drumroll.data.rows import Row
from drumroll.errors import UserError
from drumroll.models.builtin import tokenizer as char_tokenizer

WORDS = ["<s>", "</s>", "<pad>", "hi", "user", "assistant", "system", "yes", "no", "again", "|", "<end>"]
ID = {word: index for index, word in enumerate(WORDS)}
ASK = "{% if add_generation_prompt %}assistant {% endif %}"
PLAIN = "{% for m in messages %}{{ m.role }} {{ m.content }} {% if m.role == 'assistant' %}</s> | {% endif %}{% endfor %}" + ASK
WITH_BOS = "<s> " + PLAIN


def words(template: str | None, adds_bos: bool = True, **special: str) -> PreTrainedTokenizerFast:
    """One token a word; the post-processor writes <s> in front of plain text where `adds_bos`."""
    core = Tokenizer(models.WordLevel(ID, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if adds_bos:
        core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    made = PreTrainedTokenizerFast(tokenizer_object=core, **{"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", **special})
    made.chat_template = template
    return made


def data(**options: Any) -> DataConfig:
    return DataConfig.model_validate({"train": {"path": "unused"}, **options})


def row(**columns: Any) -> Row:
    return Row("a.jsonl:1", columns)


def ids(text: str) -> list[int]:
    return [ID[word] for word in text.split()]


def learned(sample: Any) -> list[int]:
    return [int(i) for i in sample.token_ids[sample.target_mask]]


def chat(*turns: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in turns]


CHAT = chat(("user", "hi"), ("assistant", "yes"), ("user", "again"), ("assistant", "no"))


@pytest.mark.parametrize(
    ("template", "prompt"), [(WITH_BOS, "hi"), (PLAIN, "hi"), (None, "hi"), (WITH_BOS, chat(("user", "hi"))), (PLAIN, chat(("user", "hi")))]
)
def test_case_34_exactly_one_bos(template: str | None, prompt: Any) -> None:
    """[0, 4, 3] for `user hi`: never [0, 0, 4, 3], and not [4, 3] where the template forgets it."""
    tokenizer = words(template)
    text, got = prompt_ids(tokenizer, row(prompt=prompt), data())
    assert got == (ids("<s> user hi assistant") if template else ids("<s> hi"))
    assert text.split() == [WORDS[i] for i in (got if template == WITH_BOS else got[1:])]
    if template == WITH_BOS:
        templated = tokenizer.apply_chat_template(chat(("user", "hi")), tokenize=True, return_dict=False)
        assert got[: len(templated)] == templated == [0, 4, 3]


def test_case_34_no_bos_where_the_tokenizer_adds_none() -> None:
    assert prompt_ids(words(PLAIN, adds_bos=False), row(prompt="hi"), data())[1] == ids("user hi assistant")
    assert prompt_ids(words(None, adds_bos=False), row(prompt="hi"), data())[1] == ids("hi")
    assert prompt_ids(words(None), row(prompt="<s> hi"), data())[1] == ids("<s> hi")  # written by hand


def test_an_empty_prompt_is_one_bos_or_an_error() -> None:
    assert prompt_ids(words(None), row(prompt=" "), data())[1] == [0]
    with pytest.raises(UserError, match=r"a.jsonl:1: the prompt has no tokens"):
        prompt_ids(words(None, adds_bos=False), row(prompt=" "), data())


def test_system_examples_and_template_come_in_that_order() -> None:
    examples = chat(("user", "again"), ("assistant", "no"))
    few = data(system="yes", examples=examples, template="{a} | {b}")
    _, got = prompt_ids(words(WITH_BOS), row(a="hi", b="yes"), few)
    assert got == ids("<s> system yes user again assistant no </s> | user hi | yes assistant")
    own = row(prompt=chat(("system", "hi"), ("user", "hi")))
    assert prompt_ids(words(WITH_BOS), own, data(examples=examples))[1] == ids(
        "<s> system hi user again assistant no </s> | user hi assistant"
    )
    assert prompt_ids(words(WITH_BOS), row(prompt="hi"), data(chat=False))[1] == ids("<s> hi")


def test_chat_options_reach_the_template() -> None:
    tokenizer = words("{{ messages[0].content }}{% if again %} again{% endif %}")
    assert prompt_ids(tokenizer, row(prompt="hi"), data(chat_options={"again": True}))[1] == ids("<s> hi again")


def test_what_a_template_cannot_do_is_said() -> None:
    with pytest.raises(UserError, match=r"data.chat: true, but the model's tokenizer has no chat template"):
        prompt_ids(words(None), row(prompt="hi"), data(chat=True))
    with pytest.raises(UserError, match=r"use data.template"):
        prompt_ids(words(None), row(prompt="hi"), data(system="yes"))
    with pytest.raises(UserError, match="is a list of messages, and no chat template is applied"):
        prompt_ids(words(None), row(prompt=chat(("user", "hi"))), data())
    strict = words("{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}hi")
    with pytest.raises(UserError, match=r"a.jsonl:1: the chat template refuses the roles \[system, user\]: user first"):
        prompt_ids(strict, row(prompt="hi"), data(system="yes"))


def test_case_21_every_eos_of_the_model_ends_a_response(tmp_path: Path) -> None:
    tokenizer = words(None)
    assert eos_ids(tokenizer) == (1,)
    assert eos_ids(tokenizer, GenerationConfig(eos_token_id=11)) == (1, 11)
    assert eos_ids(tokenizer, GenerationConfig(eos_token_id=[8, 9])) == (1, 8, 9)
    tokenizer.save_pretrained(tmp_path)
    assert load_eos_ids(tmp_path, load_tokenizer(tmp_path)) == (1,)
    GenerationConfig(eos_token_id=[8, 9]).save_pretrained(tmp_path)
    assert load_eos_ids(tmp_path, load_tokenizer(tmp_path)) == (1, 8, 9)
    with pytest.raises(UserError, match="no tokenizer can be loaded"):
        load_tokenizer(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"no tokenizer can be loaded from there: it has none of tokenizer\.json"):
        load_tokenizer(tmp_path / "empty")


def test_case_20_eos_is_learned_also_where_it_is_the_pad_token() -> None:
    """Masks go by position, never by id: the EOS carries loss, and one inside the prompt is a token like any other."""
    tokenizer = words(None, pad_token="</s>")
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 1
    sample = sft_sample(tokenizer, row(prompt="hi </s> hi", completion="yes"), data(completion="completion"), (1,), 64).sample
    assert sample.token_ids.tolist() == ids("<s> hi </s> hi yes </s>")
    assert sample.target_mask.tolist() == [False, False, False, False, True, True]


@pytest.mark.parametrize("template", [WITH_BOS, PLAIN])
def test_loss_lies_on_every_answer_and_its_eos_and_on_nothing_else(template: str) -> None:
    sample = sft_sample(words(template), row(prompt=CHAT), data(), (1,), 64).sample
    assert sample.token_ids.tolist() == ids("<s> user hi assistant yes </s> | user again assistant no </s> |")
    assert learned(sample) == ids("yes </s> no </s>")
    assert sample.token_ids.dtype == "int64" and sample.target_mask.dtype == "bool"


def test_few_shot_examples_and_the_prompt_carry_no_loss() -> None:
    few = data(system="hi", examples=chat(("user", "hi"), ("assistant", "no")), completion="out")
    prompt = chat(("user", "hi"), ("assistant", "no"), ("user", "again"))
    sample = sft_sample(words(WITH_BOS), row(prompt=prompt, out="yes"), few, (1,), 64).sample
    assert learned(sample) == ids("yes </s>")
    whole = sft_sample(words(WITH_BOS), row(prompt=CHAT), few.model_copy(update={"completion": None}), (1,), 64).sample
    assert learned(whole) == ids("yes </s> no </s>")


def test_the_prompt_of_sft_is_the_prompt_of_sampling() -> None:
    tokenizer = words(WITH_BOS)
    _, prompt = prompt_ids(tokenizer, row(prompt="hi"), data())
    sample = sft_sample(tokenizer, row(prompt="hi", out="yes"), data(completion="out"), (1,), 64).sample
    assert sample.token_ids.tolist()[: len(prompt)] == prompt and not sample.target_mask[: len(prompt)].any()
    plain = sft_sample(char_tokenizer(), row(prompt="sort 21:", completion="12"), data(completion="completion"), (2,), 64).sample
    assert plain.token_ids.tolist()[:9] == prompt_ids(char_tokenizer(), row(prompt="sort 21:"), data())[1]
    assert char_tokenizer().decode(learned(plain)) == "12<eos>"


def test_a_turn_that_the_template_ends_with_another_token_is_learned_whole() -> None:
    template = PLAIN.replace("</s> |", "<end>")
    assert learned(sft_sample(words(template), row(prompt=CHAT), data(), (1,), 64).sample) == ids("yes <end> no <end>")
    assert learned(sft_sample(words(template), row(prompt=CHAT), data(), (1, 11), 64).sample) == ids("yes <end> no <end>")


def test_a_template_that_rewrites_earlier_turns_is_refused() -> None:
    """As templates do that drop the reasoning of earlier answers."""
    forgets = "{% for m in messages %}{{ m.role }} {% if loop.last or m.role == 'user' %}{{ m.content }} {% endif %}{% endfor %}"
    tokenizer = words(forgets + "{% if add_generation_prompt %}assistant {% endif %}")
    with pytest.raises(UserError, match=r"a.jsonl:1: message 1: the chat template writes earlier turns differently"):
        sft_sample(tokenizer, row(prompt=CHAT), data(), (1,), 64)
    assert learned(sft_sample(tokenizer, row(prompt=CHAT[:2]), data(), (1,), 64).sample) == ids("yes")


def test_case_5_a_sample_is_cut_and_says_so() -> None:
    made = [sft_sample(words(WITH_BOS), row(prompt=CHAT), data(), (1,), length) for length in (13, 12, 5, 4)]
    assert [m.truncated for m in made] == [False, True, True, True]
    assert [m.sample.n_targets for m in made] == [4, 4, 1, 0]
    assert [len(m.sample.token_ids) for m in made] == [13, 12, 5, 4]


def test_the_first_token_is_never_a_target() -> None:
    tokenizer = words("{% for m in messages %}{{ m.content }} {% endfor %}", adds_bos=False)
    assert sft_sample(tokenizer, row(prompt=chat(("assistant", "yes no"))), data(), (1,), 64).sample.target_mask.tolist() == [False, True]


def test_sft_without_a_template_needs_a_completion_and_an_eos() -> None:
    with pytest.raises(UserError, match="whole chats need a chat template"):
        sft_sample(words(None), row(prompt=CHAT), data(), (1,), 64)
    tokenizer = words(None)
    tokenizer.eos_token = None
    with pytest.raises(UserError, match="no EOS token"):
        sft_sample(tokenizer, row(prompt="hi", completion="yes"), data(completion="completion"), (1,), 64)
