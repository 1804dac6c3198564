"""Reinforcement learning, one screen: prompts -> rollouts -> rewards -> advantages -> optimizer steps -> weights -> metrics.

A critic, where the algorithm has one, says before the step what it expects of every state, and learns from what came of it.

`max_lag: 0`: sampling and training alternate, so every sample comes from the weights that are trained next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from drumroll.algorithms.filters import has_variance
from drumroll.algorithms.presets import Algorithm, resolve
from drumroll.checkpoint.store import unheard
from drumroll.config import RunConfig
from drumroll.data.chat import load_eos_ids, load_tokenizer
from drumroll.data.sources import open_rows
from drumroll.data.stream import PromptStream
from drumroll.engines.base import SamplingParams
from drumroll.observe import batches, metrics
from drumroll.observe.critic import critic_facts
from drumroll.pipelines import evaluate
from drumroll.pipelines.critic import critic_start
from drumroll.pipelines.evaluate import Evaluator
from drumroll.pipelines.length import check_vocabulary
from drumroll.pipelines.place import check_place
from drumroll.pipelines.restart import with_restarts
from drumroll.pipelines.resume import Resumed
from drumroll.pipelines.session import BATCHES_DIR, Session, open_session
from drumroll.pipelines.warmup import starting_model
from drumroll.rewards.base import RewardSet
from drumroll.rollout import sampling
from drumroll.rollout.rollouter import Rollouter
from drumroll.rollout.samples import from_groups, minibatches, with_advantages
from drumroll.runtime.learner import Learner, critic_learner
from drumroll.runtime.local import launch
from drumroll.runtime.plan import plan
from drumroll.runtime.policy import Policy
from drumroll.runtime.worker import Trained, Worker, WorkerSpec
from drumroll.types import Group, LossFn, StepStats, TrainSample


def train(config: RunConfig, resumed: Resumed | None = None, reached: Callable[[str], None] = unheard) -> None:
    """`pipeline: rl`: from the recipe, or a checkpoint, to a trained model, its records and its report in the run directory.

    `reached`: told each stage of a save.
    """
    with_restarts(partial(_train, config, reached), config, resumed)


def _train(config: RunConfig, reached: Callable[[str], None], resumed: Resumed | None, restart: str) -> None:
    assert config.algorithm is not None
    check_place(config)
    algorithm = resolve(config.algorithm, config.rollout.max_tokens)
    with open_session(config, resumed, restart, reached) as session, RewardSet(config.rewards) as rewards:
        folder = resumed.folder if resumed is not None else starting_model(config, session.recorder)
        start = critic_start(config, algorithm, folder)
        session.start_from(folder, start)
        prompts, sampled_with = open_prompts(config, folder, rewards)
        spec = WorkerSpec(config, folder, plan(config, algorithm.needs_reference, algorithm.needs_critic), start)
        where = config.runtime
        with launch(partial(Worker, spec=spec), where.ranks, where.device, where.timeout_s, in_process=not where.max_restarts) as ranks:
            total = partial(total_optimizer_steps, config, algorithm)
            critic = critic_learner(ranks, config, algorithm.critic, total("critic")) if start is not None else None
            policy = Policy(ranks, config, total("policy"), critic)
            rollouter = Rollouter(policy.generate, rewards, session.timer)
            evaluator = Evaluator(config, folder, rollouter) if config.data.eval is not None else None
            Loop(session, algorithm, policy, prompts, rollouter, sampled_with, evaluator).run()
            session.finish(policy)


@dataclass(slots=True)
class Loop:
    """The training loop and what it turns over."""

    session: Session
    algorithm: Algorithm
    policy: Policy
    prompts: PromptStream
    rollouter: Rollouter
    sampled_with: SamplingParams
    evaluator: Evaluator | None = None

    def run(self) -> None:
        """`max_steps` steps, with evaluations and checkpoints where the config asks for them."""
        session, policy = self.session, self.policy
        first = session.begin(policy, self.prompts)
        session.push(policy)
        if first == 1:
            self.evaluate(0)
        session.timer.restart()  # what start-up took is no step's
        with session.training():
            for step in range(first, session.config.max_steps + 1):
                self.step(step)
                self.evaluate(step)
                session.after_step(policy, step, self.prompts)
                session.timer.restart()

    def evaluate(self, step: int) -> None:
        """Before the first step, after the last, and between them where the config asks for it."""
        config = self.session.config
        if self.evaluator is not None and (step in (0, config.max_steps) or (config.eval.every and step % config.eval.every == 0)):
            evaluate.record(self.session.recorder, self.evaluator, step, self.policy.version)
        self.session.timer.restart()

    def step(self, step: int) -> None:
        """Sample, judge, train, send the new weights, write everything down."""
        session, policy, algorithm = self.session, self.policy, self.algorithm
        version, rate = policy.version, policy.next_learning_rate
        drawn, groups = collect(self.prompts, self.rollouter, algorithm, session.config.rollout.prompts_per_step, self.sampled_with)
        session.leave_if_asked(policy)  # the parameters are still those of the last step
        with session.timer.phase("logprobs"):
            samples = score(from_groups(groups), policy, algorithm)
        session.leave_if_asked(policy)
        samples = with_advantages(samples, groups, algorithm, self.sampled_with.max_tokens)
        with session.timer.phase("train"):
            lessons = learn(policy.critic, samples, algorithm)
            updates = update(policy, samples, algorithm.loss(), algorithm) if algorithm.trains_policy(step) else []
        session.push(policy)
        session.measure(policy)
        left_out = self.prompts.state().left_out
        record(session, step, version, drawn, samples, metrics.update_facts(updates, rate), lessons, left_out)


def open_prompts(config: RunConfig, folder: Path, rewards: RewardSet) -> tuple[PromptStream, SamplingParams]:
    """The training prompts and how they are sampled. Raises UserError for rows that cannot be used, before anything is launched."""
    tokenizer = load_tokenizer(folder, config.model.trust_remote_code)
    check_vocabulary(config, folder, tokenizer)
    rows = open_rows(config.data.train, config.data, "rl", rewards.columns)
    return PromptStream(rows, tokenizer, config.data, config.seed), sampling.training(config, load_eos_ids(folder, tokenizer))


def total_optimizer_steps(config: RunConfig, algorithm: Algorithm, role: Trained = "policy") -> int:
    """Optimizer steps of the whole run: a batch has as many groups as prompts, and a mini-batch at least one of them."""
    steps = sum(role == "critic" or algorithm.trains_policy(step) for step in range(1, config.max_steps + 1))
    return steps * min(algorithm.minibatches, config.rollout.prompts_per_step) * algorithm.epochs


def collect(
    prompts: PromptStream, rollouter: Rollouter, algorithm: Algorithm, wanted: int, params: SamplingParams
) -> tuple[list[Group], list[Group]]:
    """Scored groups: all that were drawn, and at most `wanted` of them to train on.

    Dynamic sampling (Yu et al. 2025) trains on no group that teaches nothing and draws again for it.
    """
    draws = algorithm.max_draws if algorithm.dynamic_sampling else 1
    drawn: list[Group] = []
    kept: list[Group] = []
    for _ in range(draws):
        groups = rollouter.rollout(prompts.draw(wanted), algorithm.group_size, params)
        drawn += groups
        kept += [g for g in groups if not algorithm.dynamic_sampling or has_variance([r.reward for r in g.rollouts])]
        if len(kept) >= wanted:
            break
    return drawn, kept[:wanted]


def score(samples: list[TrainSample], policy: Policy, algorithm: Algorithm) -> list[TrainSample]:
    """Fill in what the algorithm reads, before the first step: the trainer's log-probs, the frozen reference's, and the critic's values."""
    if algorithm.needs_old_logprobs:
        samples = [replace(s, old_logprobs=scores) for s, scores in zip(samples, policy.logprobs("policy", samples), strict=True)]
    if algorithm.needs_reference:
        samples = [replace(s, ref_logprobs=scores) for s, scores in zip(samples, policy.logprobs("reference", samples), strict=True)]
    if policy.critic is not None:
        samples = [replace(s, values=values) for s, values in zip(samples, policy.critic.scores(Worker.values, samples), strict=True)]
    return samples


def update(learner: Policy | Learner, samples: Sequence[TrainSample], loss: LossFn, algorithm: Algorithm) -> list[StepStats]:
    """The optimizer steps of one rollout batch: mini-batches of whole groups, each with its own denominators; every epoch the same ones."""
    return [learner.step(batch, loss) for _ in range(algorithm.epochs) for batch in minibatches(samples, algorithm.minibatches)]


def learn(critic: Learner | None, samples: Sequence[TrainSample], algorithm: Algorithm) -> metrics.CriticFacts | None:
    """The critic's own optimizer steps, on the mini-batches that the policy has."""
    if critic is None:
        return None
    rate = critic.next_learning_rate
    return critic_facts(update(critic, samples, algorithm.critic.loss(), algorithm), samples, rate)


def record(
    session: Session,
    step: int,
    version: int,
    drawn: Sequence[Group],
    samples: Sequence[TrainSample],
    updates: metrics.UpdateFacts,
    lessons: metrics.CriticFacts | None,
    left_out: int,
) -> None:
    """Write the step down: metrics and rollouts of every group drawn, trained on or not, and the batch itself for `drumroll replay`."""
    if session.config.record.batches:
        batches.write(batches.path(session.run_dir / BATCHES_DIR, step), samples)
    session.recorder.rollouts(metrics.rollout_records(drawn, phase="train", step=step, samples=samples))
    session.recorder.step(
        metrics.rl_record(
            step=step,
            version=version,
            tokens_digest=metrics.tokens_digest([s.token_ids.tolist() for s in samples]),
            update=updates,
            critic=lessons,
            rollouts=metrics.rollout_facts(drawn),
            left_out=left_out,
            seconds=session.timer.take(),
            peak_bytes=session.peak_bytes,
        )
    )
