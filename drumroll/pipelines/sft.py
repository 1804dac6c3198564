"""Supervised fine-tuning on the backends of RL: next-token loss on the assistant's tokens."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

from drumroll.algorithms.loss import sft_loss
from drumroll.checkpoint.store import unheard
from drumroll.config import RunConfig
from drumroll.data.chat import load_eos_ids, load_tokenizer
from drumroll.data.sources import open_rows
from drumroll.data.stream import SampleStream
from drumroll.models.locate import locate
from drumroll.observe.metrics import sft_record, tokens_digest, update_facts
from drumroll.observe.recorder import Recorder
from drumroll.observe.timer import PhaseTimer
from drumroll.pipelines.length import check_length, check_vocabulary
from drumroll.pipelines.place import check_place
from drumroll.pipelines.restart import with_restarts
from drumroll.pipelines.resume import Resumed
from drumroll.pipelines.session import Session, open_session
from drumroll.runtime.local import launch
from drumroll.runtime.plan import plan
from drumroll.runtime.policy import Policy
from drumroll.runtime.worker import Worker, WorkerSpec


def train(config: RunConfig, resumed: Resumed | None = None, reached: Callable[[str], None] = unheard) -> None:
    """`pipeline: sft`: train, from a checkpoint if there is one, and leave the model in the run directory.

    `reached`: told each stage of a save.
    """
    with_restarts(partial(_train, config, reached), config, resumed)


def _train(config: RunConfig, reached: Callable[[str], None], resumed: Resumed | None, restart: str) -> None:
    check_place(config)
    with open_session(config, resumed, restart, reached) as session:
        folder = resumed.folder if resumed is not None else locate(config.model.path)
        check_length(config, folder)
        session.start_from(folder)
        samples = open_samples(config, folder)
        spec = WorkerSpec(config, folder, plan(config, reference=False))
        where = config.runtime
        with launch(partial(Worker, spec=spec), where.ranks, where.device, where.timeout_s, in_process=not where.max_restarts) as ranks:
            policy = Policy(ranks, config, total_steps=config.max_steps)
            fit(policy, samples, config, session.recorder, session)
            session.finish(policy)


def open_samples(config: RunConfig, folder: Path, where: str = "data.train") -> SampleStream:
    """The training rows as samples. Raises UserError for rows that cannot be used, before anything is launched. `where`: their key."""
    tokenizer = load_tokenizer(folder, config.model.trust_remote_code)
    check_vocabulary(config, folder, tokenizer)
    rows = open_rows(config.data.train, config.data, "sft", where=where)
    return SampleStream(rows, tokenizer, config.data, load_eos_ids(folder, tokenizer), config.max_length, config.seed)


def fit(policy: Policy, samples: SampleStream, config: RunConfig, recorder: Recorder | None, session: Session | None = None) -> None:
    """`max_steps` optimizer steps, each on `train.batch_size` fresh samples; with a session, from where it stands."""
    timer = PhaseTimer()
    first = session.begin(policy, samples) if session is not None else 1
    with session.training() if session is not None else nullcontext():
        for step in range(first, config.max_steps + 1):
            batch = samples.draw(config.train.batch_size)
            rate = policy.next_learning_rate
            with timer.phase("train"):
                update = policy.step(batch, sft_loss)
            if session is not None:
                session.measure(policy)
            if recorder is not None:
                recorder.step(
                    sft_record(
                        step=step,
                        tokens_digest=tokens_digest([sample.token_ids.tolist() for sample in batch]),
                        tokens=sum(len(sample.token_ids) for sample in batch),
                        update=update_facts([update], rate),
                        seconds=timer.take(),
                        peak_bytes=session.peak_bytes if session is not None else 0,
                    )
                )
            if session is not None:
                session.after_step(policy, step, samples)
                timer.restart()
