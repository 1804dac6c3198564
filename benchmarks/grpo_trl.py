"""TRL's side of `grpo_step.py`: `GRPOTrainer.train()`, held between two steps until the other side has had its turn.

Runs in any environment that has TRL, torch and transformers; it needs no drumroll. TRL's defaults are kept but for what would make it
slower here or train something else: bf16 and gradient checkpointing are off (fp32 on a CPU), no KL term, the loss of the GRPO paper.
"""

from __future__ import annotations

import tempfile
from typing import Any

from grpo_reward import even_digits
from sides import Channel, Stopwatch

channel = Channel()  # before the libraries, which may print

import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from trl import GRPOConfig, GRPOTrainer


class Turns(TrainerCallback):
    """Waits before every step for its turn, and answers after it with what the step took."""

    def __init__(self) -> None:
        self.tokens = 0
        self._watch = Stopwatch()

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._next(control)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        channel.answer(self._watch.measure(self.tokens))
        self._next(control)

    def _next(self, control: TrainerControl) -> None:
        control.should_training_stop = not channel.wait()
        self.tokens = 0
        self._watch = Stopwatch()

    def reward(self, completions: list[str], completion_ids: list[list[int]], **columns: Any) -> list[float]:
        """Judges as the other side does, and counts the step's tokens on the way."""
        self.tokens += sum(len(ids) for ids in completion_ids)
        return [even_digits(text) for text in completions]


class Ends(LogitsProcessor):
    """Row i ends at its i-th prescribed length: the end token is impossible before and certain then."""

    def __init__(self, eos: int) -> None:
        self._eos = eos
        self._calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        lengths = torch.tensor(channel.lengths)[:, None]
        self._calls += 1
        ends = torch.arange(scores.shape[1]) == self._eos
        return scores.masked_fill((ends & (self._calls < lengths)) | (~ends & (self._calls >= lengths)), float("-inf"))


def with_prescribed_lengths(model: Any) -> PreTrainedModel:
    """The model, whose `generate` keeps to the lengths of the round wherever some are prescribed."""
    generate, eos = model.generate, model.generation_config.eos_token_id

    def prescribed(*args: Any, **kwargs: Any) -> Any:
        processors = LogitsProcessorList([Ends(eos)] if channel.lengths else [])
        return generate(*args, logits_processor=processors, **kwargs)

    model.generate = prescribed
    assert isinstance(model, PreTrainedModel)
    return model


def main() -> None:
    torch.set_num_threads(1)
    channel.ready()
    spec = channel.spec
    tokenizer = AutoTokenizer.from_pretrained(spec["model"])
    if tokenizer.eos_token is None:  # the trainer wants one: the next id, which the model has no logit for
        tokenizer.add_special_tokens({"eos_token": "<never>"})
    turns = Turns()
    samples, micro = spec["prompts_per_step"] * spec["group_size"], spec["trl_rows"]
    with tempfile.TemporaryDirectory() as out:
        trainer = GRPOTrainer(
            model=with_prescribed_lengths(AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.float32)),
            processing_class=tokenizer,
            reward_funcs=turns.reward,
            train_dataset=Dataset.from_dict({"prompt": spec["prompts"]}),
            callbacks=[turns],
            args=GRPOConfig(
                output_dir=out,
                per_device_train_batch_size=micro,
                gradient_accumulation_steps=samples // micro,
                num_generations=spec["group_size"],
                max_completion_length=spec["max_tokens"],
                learning_rate=spec["lr"],
                lr_scheduler_type="constant",
                max_steps=10**6,
                beta=0.0,
                loss_type="grpo",
                temperature=1.0,
                cache_implementation=spec["trl_cache"],
                bf16=False,
                gradient_checkpointing=False,
                use_cpu=True,
                report_to="none",
                save_strategy="no",
                logging_steps=1,
                disable_tqdm=True,
                dataloader_num_workers=0,
            ),
        )
        trainer.train()


if __name__ == "__main__":
    main()
