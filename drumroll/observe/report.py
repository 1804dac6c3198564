"""`report.html`: one page that shows a newcomer what a run did, made from the run directory alone, also of a run that crashed."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import yaml

from drumroll.observe import alarms as signs
from drumroll.observe import svg
from drumroll.observe.charts import Chart, detail_charts, main_chart
from drumroll.observe.console import duration
from drumroll.observe.metrics import RolloutRecord
from drumroll.observe.page import PAGE
from drumroll.observe.picture import write_picture
from drumroll.observe.run import PICTURE_FILE, REPORT_FILE, Run, read_rollouts, read_run
from drumroll.observe.samples import Comparison, Pair, compare

CONFIG_FACTS = (  # (what a reader calls it, key of the config)
    ("model", "model.path"),
    ("algorithm", "algorithm.name"),
    ("training backend", "backend.name"),
    ("ranks", "runtime.ranks"),
    ("engine", "engine.name"),
    ("prompts a step", "rollout.prompts_per_step"),
    ("samples a prompt", "algorithm.group_size"),
    ("longest response", "rollout.max_tokens"),
    ("learning rate", "optim.lr"),
    ("seed", "seed"),
)


@dataclass(slots=True, frozen=True)
class Tile:
    """A headline number."""

    value: str
    label: str
    tone: str = ""  # good, bad or nothing


def write_report(run_dir: Path) -> Path:
    """Write `report.html` and `reward.png` into the run directory; returns the page's path.

    Raises UserError when the directory has no records, or naming file and line of a damaged one.
    """
    run = read_run(run_dir)
    comparison = compare(read_rollouts(run_dir))
    chart = main_chart(run)
    path = run_dir / REPORT_FILE
    partial = path.with_name(path.name + ".partial")
    partial.write_text(report_html(run, comparison), encoding="utf-8", errors="backslashreplace")  # a lone surrogate is shown escaped
    partial.replace(path)
    write_picture(run_dir / PICTURE_FILE, chart, _title(run))
    return path


def report_html(run: Run, comparison: Comparison | None) -> str:
    """The page as text: no file, no network, no script is needed to show it."""
    config = _config(run)
    sections = [
        f'<div class="tiles">{"".join(_tile(tile) for tile in _tiles(run))}</div>',
        _figure(main_chart(run), 1080, 380, "main"),
        _alarm_section(run),
        _sample_section(comparison) if comparison else "",
        f'<h2>Curves</h2><div class="charts">{"".join(_figure(chart, 520, 230) for chart in detail_charts(run))}</div>',
        _fact_section(run, config),
        f"<h2>Configuration</h2><details><summary>config.yaml</summary><pre>{escape(run.config)}</pre></details>" if run.config else "",
    ]
    return PAGE.substitute(title=escape(_title(run)), status=_status(run), story=escape(_story(run, config)), body="\n".join(sections))


def _title(run: Run) -> str:
    return run.path.resolve().name


def _config(run: Run) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(run.config)
    except yaml.YAMLError:  # cut off by a crash: the page still shows its text
        return {}
    return tree if isinstance(tree, dict) else {}


def _status(run: Run) -> str:
    if run.summary is None:
        return '<span class="badge bad">no summary: the run crashed or is still going</span>'
    tone = "good" if run.summary.status == "completed" else "bad"
    return f'<span class="badge {tone}">{escape(run.summary.status)}</span>'


def _story(run: Run, config: dict[str, Any]) -> str:
    """What happened, in a sentence or two."""
    if run.summary is not None and run.summary.error:
        return f"The run ended early after {len(run.rl or run.sft)} steps: {run.summary.error}"
    if not run.rl and not run.sft:
        return "No step was finished."
    if not run.rl:
        return f"Supervised training ran {len(run.sft)} steps; the loss went from {run.sft[0].loss:.3f} to {run.sft[-1].loss:.3f}."
    name = str(_at(config, "algorithm.name") or "RL").upper()
    warmup = f"After a supervised warm-up of {len(run.sft)} steps, " if run.sft else ""
    samples = sum(record.rollouts for record in run.rl)
    text = f"{warmup}{name} trained {len(run.rl)} steps on {samples:,} sampled responses."
    before, after = _scores(run)
    if before is not None and after is not None:
        text += f" The score on held-out prompts went from {before:.3f} to {after:.3f}."
    return text


def _scores(run: Run) -> tuple[float | None, float | None]:
    before = next((e.score for e in run.evals if e.step == 0), None)
    after = next((e.score for e in reversed(run.evals) if e.step > 0), None)
    return before, after


def _tiles(run: Run) -> list[Tile]:
    tiles = []
    before, after = _scores(run)
    if before is not None and after is not None:
        label = f"score on held-out prompts ({after - before:+.2f})"
        tiles.append(Tile(f"{before:.2f} → {after:.2f}", label, "good" if after > before else "bad"))
    records = run.rl or run.sft
    tiles.append(Tile(str(len(records)), "RL steps" if run.rl else "SFT steps"))
    seconds = run.summary.wall_seconds if run.summary else sum(record.seconds_total for record in run.steps)
    tiles.append(Tile(duration(seconds), "wall clock" if run.summary else "in steps so far"))
    if run.summary and run.summary.weight_pushes:
        pushes, matched = run.summary.weight_pushes, run.summary.digests_matched
        tiles.append(Tile(f"{matched}/{pushes}", "weight pushes whose digests matched", "good" if matched == pushes else "bad"))
    gaps = [record.logprob_gap_mean for record in run.rl if record.logprob_gap_mean is not None]
    if gaps:
        tiles.append(Tile(f"{sum(gaps) / len(gaps):.1e}", "mean log-prob gap of sampler and trainer, nats"))
    peaks = run.summary.peak_bytes_per_rank if run.summary else [record.peak_bytes for record in run.steps]
    if any(peaks):
        tiles.append(Tile(f"{max(peaks) / 2**30:.2f} GiB", "peak memory of the fullest rank"))
    return tiles


def _tile(tile: Tile) -> str:
    return f'<div class="tile {tile.tone}"><b>{escape(tile.value)}</b><span>{escape(tile.label)}</span></div>'


def _figure(chart: Chart, width: int, height: int, kind: str = "") -> str:
    head = f"<h3>{escape(chart.title)}</h3><p>{escape(chart.hint)}</p>"
    return f'<figure class="{kind}">{head}{svg.render(chart, width, height)}<figcaption>{svg.legend(chart)}</figcaption></figure>'


def _alarm_section(run: Run) -> str:
    """Alarms that are on at the end in full; those that came and went as one line each."""
    now = signs.alarms(run.steps)
    kinds = {alarm.kind for alarm in now}
    rows = [
        f'<div class="alarm"><b>{escape(alarm.kind.replace("_", " "))}: {escape(alarm.what)}</b>'
        f"<p>Likely: {escape(alarm.cause)}.<br>Try: {escape(alarm.action)}.</p></div>"
        for alarm in now
    ]
    steps: dict[str, list[int]] = {}
    for record in run.steps:
        for kind in record.alarms:
            steps.setdefault(kind, []).append(record.step)
    rows += [
        f"<p>{escape(kind.replace('_', ' '))}: was on in {len(on)} steps, from {on[0]} to {on[-1]}.</p>"
        for kind, on in steps.items()
        if kind not in kinds
    ]
    return f"<h2>Alarms</h2>{''.join(rows)}" if rows else '<p class="calm">No alarm is on and none was.</p>'


def _sample_section(comparison: Comparison) -> str:
    counts = comparison.counts
    if comparison.phase == "eval" and comparison.first_step != comparison.last_step:
        head = (
            f"The same held-out prompts, answered before training (step {comparison.first_step}) and after step {comparison.last_step}: "
            f"{counts['better']} got a higher reward, {counts['same']} the same, {counts['worse']} a lower one. The first few of each:"
        )
    elif comparison.phase == "eval":
        head = f"Held-out prompts, answered at step {comparison.first_step}; no later evaluation was recorded."
    else:
        head = f"Training samples of step {comparison.first_step} (left) and step {comparison.last_step} (right); their prompts differ."
    shown = comparison.shown
    return f"<h2>Samples before and after</h2><p>{escape(head)}</p>{''.join(_pair(pair, comparison.phase == 'eval') for pair in shown)}"


def _pair(pair: Pair, same_prompt: bool) -> str:
    prompt = f'<pre class="prompt">{escape(pair.before.prompt)}</pre>' if same_prompt else ""
    sides = "".join(_side(name, rollout, not same_prompt) for name, rollout in (("before", pair.before), ("after", pair.after)))
    return f'<div class="pair {pair.change if same_prompt else ""}">{prompt}<div class="sides">{sides}</div></div>'


def _side(name: str, rollout: RolloutRecord, with_prompt: bool) -> str:
    reward = "no verdict" if rollout.reward is None else f"reward {rollout.reward:.3g}"
    parts = ", ".join(f"{key} {'none' if value is None else f'{value:.3g}'}" for key, value in rollout.breakdown.items())
    detail = f" ({escape(parts)})" if len(rollout.breakdown) > 1 else ""
    cut = ", cut at the limit" if rollout.finish_reason == "length" else ""
    prompt = f'<pre class="prompt">{escape(rollout.prompt)}</pre>' if with_prompt else ""
    head = f"<span>{name}, step {rollout.step}</span><span>{escape(reward)}{detail}, {rollout.tokens} tokens{cut}</span>"
    return f'<div><div class="head">{head}</div>{prompt}<pre>{escape(rollout.response)}</pre></div>'


def _fact_section(run: Run, config: dict[str, Any]) -> str:
    facts = [(label, _at(config, key)) for label, key in CONFIG_FACTS]
    if run.rl:
        last = run.rl[-1]
        facts += [("weight version that sampled the last step", last.version), ("digest of its token ids", last.tokens_digest)]
    facts += [("optimizer steps skipped", sum(record.skipped_steps for record in run.steps))]
    if run.summary:
        facts += [("peak bytes by rank", ", ".join(f"{peak:,}" for peak in run.summary.peak_bytes_per_rank))]
        facts += [("samples without a verdict", run.summary.abstentions)]
    rows = "".join(f"<tr><th>{escape(label)}</th><td>{escape(str(value))}</td></tr>" for label, value in facts if value not in (None, ""))
    return f"<h2>Facts</h2><table>{rows}</table>"


def _at(config: dict[str, Any], key: str) -> Any:
    """A value of a nested mapping; None where the path ends early."""
    node: Any = config
    for part in key.split("."):
        node = node.get(part) if isinstance(node, dict) else None
    return node
