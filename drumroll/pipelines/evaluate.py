"""Score a model on held-out prompts: every row once, greedy by default; the metric is the plain mean over rows with a verdict."""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from drumroll.config import RunConfig
from drumroll.data.chat import load_eos_ids, load_tokenizer
from drumroll.data.sources import open_rows
from drumroll.data.stream import eval_prompts
from drumroll.errors import UserError
from drumroll.observe import checks
from drumroll.observe.metrics import EvalRecord, eval_record, rollout_records
from drumroll.observe.recorder import Recorder
from drumroll.observe.timer import PhaseTimer
from drumroll.pipelines.warmup import starting_model
from drumroll.rewards.base import RewardSet
from drumroll.rewards.failure import RewardFailure
from drumroll.rollout import sampling
from drumroll.rollout.rollouter import Rollouter
from drumroll.runtime.local import launch
from drumroll.runtime.plan import Plan
from drumroll.runtime.policy import Policy
from drumroll.runtime.worker import Worker, WorkerSpec
from drumroll.types import Group


class Evaluator:
    """The evaluation rows of a recipe, tokenised once. Raises UserError when they cannot be read or none is left."""

    def __init__(self, config: RunConfig, folder: Path, rollouter: Rollouter) -> None:
        if config.data.eval is None:
            raise UserError("data.eval: an evaluation needs rows, e.g. data.eval.path=held_out.jsonl")
        tokenizer = load_tokenizer(folder, config.model.trust_remote_code)
        rows = open_rows(config.data.eval, config.data, "rl", rollouter.rewards.columns, where="data.eval")
        self._prompts = eval_prompts(rows, tokenizer, config.data, config.eval.rows)
        self._sampling = sampling.evaluation(config, load_eos_ids(folder, tokenizer))
        self._rollouter = rollouter

    def run(self, step: int, version: int) -> tuple[EvalRecord, list[Group]]:
        """The score after `step` steps, and what the model said."""
        started = time.monotonic()
        groups = self._rollouter.rollout(self._prompts.prompts, 1, self._sampling)
        return eval_record(step=step, version=version, groups=groups, seconds=time.monotonic() - started), groups


def record(recorder: Recorder, evaluator: Evaluator, step: int, version: int) -> None:
    """Evaluate and write it down."""
    result, groups = evaluator.run(step, version)
    recorder.evaluation(result)
    recorder.rollouts(rollout_records(groups, phase="eval", step=step))


def evaluate_model(config: RunConfig, json: Path | None) -> EvalRecord:
    """`drumroll eval`: engines only, no trainer. Prints some answers and the score; `json` gets the score as a row."""
    if config.engine is None or not config.rewards:
        raise UserError("eval needs engine.name and rewards: give it an RL recipe, and the model to score with --model")
    folder = starting_model(config, recorder=None)
    spec = WorkerSpec(config, folder, Plan(config.runtime.ranks, frozenset({"engine"})))
    runtime = config.runtime
    with (
        RewardSet(config.rewards) as rewards,
        launch(partial(Worker, spec=spec), runtime.ranks, runtime.device, runtime.timeout_s) as ranks,
    ):
        policy = Policy(ranks, config, total_steps=1)
        evaluator = Evaluator(config, folder, Rollouter(policy.generate, rewards, PhaseTimer()))
        try:
            result, groups = evaluator.run(step=0, version=0)
        except RewardFailure as error:
            print(error.trace, file=sys.stderr)  # there are no records to keep it in
            raise
    console = Console()
    for group in groups[:5]:
        console.print(f"[dim]{group.prompt.text!r}[/dim] -> {group.rollouts[0].text!r}  reward {group.rollouts[0].reward}", highlight=False)
    console.print(table(config.engine.name, folder, result, runtime.ranks))
    if json is not None:
        options = {"model": str(folder), "engine": config.engine.name, "rows": result.rows}
        checks.write_rows(json, [checks.measured("eval_score", result.score, backend="none", options=options, ranks=runtime.ranks)])
    return result


def table(engine: str, folder: Path, result: EvalRecord, ranks: int) -> Table:
    """One row: what was evaluated, what sampled it, and the score."""
    grid = Table(title="Evaluation", title_justify="left", header_style="bold")
    for name in ("model", "engine"):
        grid.add_column(name, overflow="fold")
    for name in ("ranks", "rows", "no verdict", "eval_score"):
        grid.add_column(name, justify="right", no_wrap=True)
    grid.add_row(str(folder), engine, str(ranks), str(result.rows), str(result.abstentions), f"{result.score:.4g}")
    return grid
