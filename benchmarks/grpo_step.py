"""Whole GRPO steps against TRL's GRPOTrainer: prompts, sampling, rewards, advantages, backward, optimizer, weights back to the sampler.

    python benchmarks/grpo_step.py --trl-python PATH      # the Python of an environment that has TRL; default: this one

TRL comes with the extra `bench`: pip install -e '.[bench]' -c constraints.txt. It may live in an environment of its own, which needs no
drumroll (pip install trl -c constraints.txt).

Both sides train the same 4.5M-parameter Llama on the same prompts with the same reward: 8 prompts x 8 samples a step, one optimizer step a
batch, fp32, no KL term, learning rate 1e-6, each in one process on one thread; they step in turn. Two cases:

  equal   every response has 64 tokens. The model's folder names an end token outside its vocabulary, so neither side can stop early.
  tailed  responses end when the end token is sampled, at most 256. The model's weights are random: every token has nearly the same
          probability, 1 in 66 the end token, so lengths are geometric with a mean of about 65. In each round TRL's responses are made to
          have the very lengths that drumroll's had (a logits processor forbids the end token before its time and then forces it).

How many rows go through the model at once is a choice of either side; the defaults are those that were fastest here.

drumroll's step is the product's own (`drumroll.pipelines.rl.Loop.step`): digests of the weights and every record and rollout included.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sides import Channel, Measure, Stopwatch, Summary, alternate, python

if TYPE_CHECKING:
    from drumroll.engines.base import Completion, GenerateRequest

CHILD = "--side"
MODEL = "builtin:llama-4.5m"
HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    max_tokens: int
    stops: bool  # whether the end token can be sampled
    target: float  # times faster than TRL


CASES = (Case("equal", 64, False, 1.2), Case("tailed", 256, True, 3.0))


def take_turns() -> None:
    """drumroll's side: a run of the product, one step at a time."""
    channel = Channel()
    from drumroll.config import RunConfig
    from drumroll.pipelines import rl, session  # noqa: F401 - loads what a run loads
    from drumroll.runtime.worker import Worker  # noqa: F401

    channel.ready()
    with tempfile.TemporaryDirectory() as out:
        config = RunConfig.model_validate(run_config(channel.spec, Path(out) / "run"))
        for measure in steps(config, channel):
            channel.answer(measure)


def run_config(spec: Mapping[str, Any], run_dir: Path) -> dict[str, Any]:
    return {
        "max_steps": 10**6,
        "run_dir": str(run_dir),
        "model": {"path": spec["model"]},
        "data": {"train": {"path": spec["rows"]}, "max_prompt_tokens": 64},
        "rollout": {"prompts_per_step": spec["prompts_per_step"], "max_tokens": spec["max_tokens"]},
        "rewards": [{"fn": f"{HERE / 'grpo_reward.py'}:judge", "isolate": False}],
        "algorithm": {"name": "grpo", "group_size": spec["group_size"], "kl": {"coef": 0.0}},
        "optim": {"lr": spec["lr"]},
        "train": {"micro_batch_tokens": spec["cap"]},
        "backend": {"name": "single"},
        "engine": {"name": "transformers"},
        "runtime": {"ranks": 1, "device": "cpu"},
    }


def steps(config: Any, channel: Channel) -> Iterator[Measure]:
    """What `drumroll train` does, one step each time the channel asks for one."""
    from functools import partial

    from drumroll.algorithms.presets import resolve
    from drumroll.pipelines import rl
    from drumroll.pipelines.session import open_session
    from drumroll.rewards.base import RewardSet
    from drumroll.rollout.rollouter import Rollouter
    from drumroll.runtime.local import launch
    from drumroll.runtime.plan import plan
    from drumroll.runtime.policy import Policy
    from drumroll.runtime.worker import Worker, WorkerSpec

    algorithm = resolve(config.algorithm, config.rollout.max_tokens)
    folder = Path(config.model.path)
    with open_session(config) as session, RewardSet(config.rewards) as rewards:
        prompts, sampled_with = rl.open_prompts(config, folder, rewards)
        spec = WorkerSpec(config, folder, plan(config, algorithm.needs_reference))
        with launch(partial(Worker, spec=spec), ranks=1, device="cpu") as ranks:
            policy = Policy(ranks, config, rl.total_optimizer_steps(config, algorithm))
            lengths = Lengths(policy.generate)
            rollouter = Rollouter(lengths, rewards, session.timer)
            loop = rl.Loop(session, algorithm, policy, prompts, rollouter, sampled_with)
            session.push(policy)
            step = 0
            while channel.wait():
                step += 1
                watch = Stopwatch()
                session.timer.restart()
                loop.step(step)
                record = session.recorder.records[-1]
                phases = {"sampling": record.seconds_generate, "training": record.seconds_train, "the weight push": record.seconds_sync}
                yield watch.measure(record.train_tokens, phases, lengths.take() if channel.spec["stops"] else ())


class Lengths:
    """An engine's `generate` that remembers how long the responses became."""

    def __init__(self, generate: Callable[[Sequence[GenerateRequest]], list[Completion]]) -> None:
        self._generate = generate
        self._lengths: list[int] = []

    def __call__(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        completions = self._generate(requests)
        self._lengths = [len(completion.token_ids) for completion in sorted(completions, key=lambda c: (c.group_id, c.index))]
        return completions

    def take(self) -> list[int]:
        return self._lengths


def case_folder(case: Case, out: Path) -> Path:
    """The model of a case: where responses must not stop, the end token is one that the model has no logit for."""
    from transformers import AutoTokenizer, GenerationConfig

    from drumroll.models.locate import locate

    folder = shutil.copytree(locate(MODEL), out / case.name)
    if not case.stops:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.eos_token = None
        tokenizer.save_pretrained(folder)
        generation = GenerationConfig.from_pretrained(folder)
        generation.eos_token_id = len(tokenizer)
        generation.save_pretrained(folder)
    return Path(folder)


def prompt_rows(out: Path) -> tuple[Path, list[str]]:
    """Prompts of one task, as a file for one side and as texts for the other."""
    from drumroll.config import TaskSource
    from drumroll.data.tasks import task_rows

    task = task_rows(TaskSource(task="sort", options={"digits": 6}), "data.train")
    texts = [str(task.row(index).columns["prompt"]) for index in range(512)]
    path = out / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts), encoding="utf-8")
    return path, texts


def run_case(case: Case, out: Path, options: argparse.Namespace) -> dict[str, Summary]:
    rows, texts = prompt_rows(out)
    spec = {
        **asdict(case), "model": str(case_folder(case, out)), "rows": str(rows), "prompts": texts, "prompts_per_step": 8, "group_size": 8,
        "lr": 1e-6, "cap": options.cap, "trl_rows": options.trl_rows, "trl_cache": options.trl_cache,
    }  # fmt: skip
    sides = {
        "drumroll": python(Path(__file__), CHILD),
        "TRL": python(HERE / "grpo_trl.py", interpreter=options.trl_python),
    }
    return alternate(sides, spec, rounds=options.rounds)


def trl_version(interpreter: str) -> str:
    """Version of TRL in an environment; exits with 2 and the way to install it where there is none."""
    code = "from importlib.metadata import version; print(*(f'{p} {version(p)}' for p in ('trl', 'torch', 'transformers')))"
    found = subprocess.run([interpreter, "-c", code], capture_output=True, text=True, check=False)
    if found.returncode != 0:
        print(
            f"{interpreter} has no TRL. Install it here with: pip install -e '.[bench]' -c constraints.txt\n"
            "or in an environment of its own: python3 -m venv ENV && ENV/bin/pip install trl torch -c constraints.txt\n"
            "and name that one: --trl-python ENV/bin/python",
            file=sys.stderr,
        )
        sys.exit(2)
    return found.stdout.strip()


def main() -> None:
    import common

    from drumroll.observe.checks import CheckRow

    parser = common.parser(__doc__)
    parser.add_argument("--trl-python", default=sys.executable, metavar="PATH", help="Python of an environment with TRL")
    parser.add_argument("--cap", type=int, default=2048, help="drumroll's train.micro_batch_tokens")
    parser.add_argument("--trl-rows", type=int, default=16, help="TRL's per_device_train_batch_size; 64 samples a step whatever it is")
    parser.add_argument("--trl-cache", choices=("dynamic", "static"), default=None, help="TRL's cache_implementation")
    parser.add_argument("--rounds", type=int, default=3, help="steps of each side that count, after one that does not")
    parser.add_argument("--case", choices=[case.name for case in CASES], action="append", help="only this case")
    options = parser.parse_args()
    trl = trl_version(options.trl_python)
    common.announce()
    rows: list[CheckRow] = []
    for case in CASES:
        if options.case and case.name not in options.case:
            continue
        with tempfile.TemporaryDirectory() as out:
            sides = run_case(case, Path(out), options)
        for name, summary in sides.items():
            rows += common.side_rows("GRPO step", summary, "single", {"case": case.name, "side": name, "tokens": round(summary.tokens)})
        rows += common.ratio_rows("GRPO step: times faster than TRL", sides["TRL"], sides["drumroll"], case.target, {"case": case.name})
    common.report(rows, f"GRPO steps, drumroll and {trl}, {options.rounds} alternating pairs, medians", options.json)


if __name__ == "__main__":
    take_turns() if sys.argv[1:] == [CHILD] else main()
