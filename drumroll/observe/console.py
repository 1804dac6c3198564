"""The run as its user sees it: a live view on a terminal, one plain line a step everywhere else (CI logs, files, pipes)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from drumroll.observe.alarms import Alarm
from drumroll.observe.metrics import EvalRecord, StepPhase, StepRecord
from drumroll.observe.sinks import Sink

ROWS = 8  # steps in the live table
RECENT = 10  # steps that the remaining time is estimated from
PHASES = (("generate", "cyan"), ("reward", "magenta"), ("logprobs", "blue"), ("train", "green"), ("sync", "yellow"))


def console_sink(title: str, totals: dict[StepPhase, int], console: Console | None = None) -> Sink:
    """The view that suits the output. `totals`: steps of each phase of the run, e.g. {"sft": 250, "rl": 60}."""
    console = console or Console()
    return LiveConsole(title, totals, console) if console.is_terminal else PlainConsole(totals, console)


class PlainConsole:
    """One line a step; an alarm is printed when it comes on, not while it stays on."""

    def __init__(self, totals: dict[StepPhase, int], console: Console) -> None:
        self._totals = totals
        self._console = console
        self._pace = Pace(totals)
        self._on: set[str] = set()

    def step(self, record: StepRecord, alarms: Sequence[Alarm]) -> None:
        self._pace.add(record)
        self._print(f"{step_line(record, self._totals[record.phase])}  eta {duration(self._pace.remaining())}")
        for alarm in alarms:
            if alarm.kind not in self._on:
                self._print(f"ALARM {alarm.kind}: {alarm.what}. Likely: {alarm.cause}. Try: {alarm.action}.")
        self._on = {alarm.kind for alarm in alarms}

    def evaluation(self, record: EvalRecord) -> None:
        self._print(eval_line(record))

    def note(self, text: str) -> None:
        self._print(text)

    def close(self) -> None:
        """Nothing is held."""

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class LiveConsole:
    """A view that is drawn over: progress, the last steps, where the time goes, evaluations, alarms. Notes scroll above it."""

    def __init__(self, title: str, totals: dict[StepPhase, int], console: Console) -> None:
        self._title = title
        self._totals = totals
        self._console = console
        self._pace = Pace(totals)
        self._records: list[StepRecord] = []
        self._evals: list[EvalRecord] = []
        self._live = Live(console=console, auto_refresh=False, transient=False)
        self._live.start()

    def step(self, record: StepRecord, alarms: Sequence[Alarm]) -> None:
        self._pace.add(record)
        self._records.append(record)
        self._draw(alarms)

    def evaluation(self, record: EvalRecord) -> None:
        self._evals.append(record)
        self._console.print(Text(eval_line(record), style="bold"))
        self._live.refresh()

    def note(self, text: str) -> None:
        self._console.print(Text(text, style="dim"))

    def close(self) -> None:
        self._live.stop()

    def _draw(self, alarms: Sequence[Alarm]) -> None:
        last = self._records[-1]
        view = live_view(self._title, self._records, self._evals, alarms, self._totals[last.phase], self._pace.remaining())
        self._live.update(view, refresh=True)


class Pace:
    """Seconds that are left, from the pace of the last steps; steps of a phase that has not begun are not foreseen."""

    def __init__(self, totals: dict[StepPhase, int]) -> None:
        self._totals = totals
        self._recent: deque[StepRecord] = deque(maxlen=RECENT)

    def add(self, record: StepRecord) -> None:
        """Count a step; those of an earlier phase no longer tell the pace."""
        if self._recent and self._recent[-1].phase != record.phase:
            self._recent.clear()
        self._recent.append(record)

    def remaining(self) -> float:
        """Seconds to the last step of the phase under way."""
        if not self._recent:
            return 0.0
        last = self._recent[-1]
        return median(record.seconds_total for record in self._recent) * max(self._totals[last.phase] - last.step, 0)


def step_line(record: StepRecord, total: int) -> str:
    """A step as one line of plain text."""
    parts = [f"{record.phase} {record.step}/{total}"]
    if record.phase == "rl":
        parts += [
            f"reward {number(record.reward_mean)}",
            f"len {number(record.response_tokens_mean, 1)}/{record.response_tokens_max or 0}",
            f"cut {percent(record.truncated_share)}",
            f"same {percent(record.no_variance_share)}",
        ]
    parts += [f"loss {record.loss:.4g}"] if record.phase == "sft" else []
    parts += [f"entropy {number(record.entropy)}"] if record.entropy is not None else []
    parts += [f"kl {record.kl:.2g}"] if record.kl is not None else []
    parts += [f"ev {record.explained_variance:.2f}"] if record.explained_variance is not None else []
    parts += [f"gap {record.logprob_gap_mean:.1e}"] if record.logprob_gap_mean is not None else []
    parts += _update_parts(record)
    parts += [f"no verdict {record.abstentions}"] if record.abstentions else []
    parts += [f"left out {record.left_out}"] if record.left_out else []
    skipped = record.skipped_steps + record.critic_skipped_steps
    parts += [f"SKIPPED {skipped}"] if skipped else []
    phases = " ".join(f"{name} {value:.1f}" for name, value in phase_seconds(record) if value >= 0.05)
    return "  ".join([*parts, f"{record.seconds_total:.1f}s" + (f" ({phases})" if phases else ""), f"{record.tokens_per_second:.0f} tok/s"])


def _update_parts(record: StepRecord) -> list[str]:
    if record.optimizer_steps == 0 and record.value_loss is not None:  # the policy did not train
        return [f"critic alone: loss {record.value_loss:.3g} grad {record.critic_grad_norm:.3g} lr {record.critic_lr:.2g}"]
    return [f"grad {record.grad_norm:.3g}", f"lr {record.lr:.2g}"]


def eval_line(record: EvalRecord) -> str:
    """An evaluation as one line of plain text."""
    shown = record.rewards if len(record.rewards) > 1 else {}
    rewards = "".join(f"  {name} {value:.3f}" for name, value in shown.items())
    abstained = f"  no verdict {record.abstentions}" if record.abstentions else ""
    return f"eval after step {record.step}: score {record.score:.3f} on {record.rows} rows{rewards}{abstained}  ({record.seconds:.1f}s)"


def live_view(
    title: str, records: Sequence[StepRecord], evals: Sequence[EvalRecord], alarms: Sequence[Alarm], total: int, remaining: float
) -> RenderableType:
    """What the live console shows after the last of `records`; a pure function of its arguments."""
    last = records[-1]
    shown = [record for record in records if record.phase == last.phase]
    parts: list[RenderableType] = [_progress(last, total, remaining), _table(shown[-ROWS:]), _time_bar(last)]
    if last.phase == "rl":
        parts.append(Text.assemble(("reward  ", "dim"), (sparkline([r.reward_mean or 0.0 for r in shown]), "green")))
    if evals:
        history = "  ".join(f"{e.score:.3f} @{e.step}" for e in evals[-6:])
        parts.append(Text.assemble(("eval    ", "dim"), (history, "bold")))
    parts += [_alarm(alarm) for alarm in alarms]
    return Panel(Group(*parts), title=f"[bold]drumroll[/] {title}", title_align="left", border_style="red" if alarms else "blue")


def _progress(last: StepRecord, total: int, remaining: float) -> RenderableType:
    bar = Table.grid(padding=(0, 1), expand=True)
    bar.add_column(no_wrap=True)
    bar.add_column(ratio=1)
    bar.add_column(no_wrap=True)
    speed = f"{last.tokens_per_second:.0f} tok/s  {last.peak_bytes / 2**30:.2f} GiB"
    bar.add_row(f"{last.phase} step [bold]{last.step}[/]/{total}", ProgressBar(total, last.step), f"{speed}  eta {duration(remaining)}")
    return bar


def _table(records: Sequence[StepRecord]) -> Table:
    table = Table(box=None, expand=True, header_style="dim", pad_edge=False)
    rl = records[-1].phase == "rl"
    names = ["step", "reward", "length", "cut", "same", "entropy", "kl", "gap"] if rl else ["step", "loss", "tokens", "entropy"]
    for name in [*names, "grad", "lr", "seconds"]:
        table.add_column(name, justify="right", no_wrap=True)
    for record in records:
        entropy = number(record.entropy)
        kl = record.kl if record.kl is not None else record.kl_old
        cells = (
            [
                number(record.reward_mean),
                f"{number(record.response_tokens_mean, 1)}/{record.response_tokens_max or 0}",
                percent(record.truncated_share),
                percent(record.no_variance_share),
                entropy,
                "-" if kl is None else f"{kl:.1e}",
                "-" if record.logprob_gap_mean is None else f"{record.logprob_gap_mean:.1e}",
            ]
            if rl
            else [f"{record.loss:.4g}", str(record.train_tokens), entropy]
        )
        end = [f"{record.grad_norm:.3g}", f"{record.lr:.1e}", f"{record.seconds_total:.1f}"]
        table.add_row(str(record.step), *cells, *end, style="bold" if record is records[-1] else "")
    return table


def _time_bar(record: StepRecord, width: int = 40) -> Text:
    """Where the last step's time went, as a bar of coloured blocks and its legend."""
    bar, legend = Text.assemble(("time    ", "dim")), Text()
    whole = max(record.seconds_total, sum(value for _, value in phase_seconds(record)), 1e-9)
    colors = dict(PHASES)
    for name, value in phase_seconds(record):
        bar.append("█" * round(width * value / whole), style=colors[name])
        if value >= 0.005:
            legend.append(f" {name} {value:.2f}s", style=colors[name])
    return bar + legend


def _alarm(alarm: Alarm) -> Text:
    return Text.assemble(
        (f"▲ {alarm.kind}: {alarm.what}. ", "bold red"), ("Likely: ", "bold"), f"{alarm.cause}. ", ("Try: ", "bold"), f"{alarm.action}."
    )


def phase_seconds(record: StepRecord) -> list[tuple[str, float]]:
    """(phase, seconds) in the order in which a step goes through them."""
    return [
        ("generate", record.seconds_generate),
        ("reward", record.seconds_reward),
        ("logprobs", record.seconds_logprobs),
        ("train", record.seconds_train),
        ("sync", record.seconds_sync),
    ]


def sparkline(values: Sequence[float], width: int = 60) -> str:
    """The values as block characters, from the least to the greatest of them; long series are cut into means."""
    bins = min(width, len(values))
    means = [_mean(values[i * len(values) // bins : (i + 1) * len(values) // bins]) for i in range(bins)]
    low, high = min(means, default=0.0), max(means, default=0.0)
    return "".join("▁▂▃▄▅▆▇█"[int((value - low) / (high - low) * 7.999) if high > low else 0] for value in means)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def duration(seconds: float) -> str:
    """12s, 3m05s, 2h04m."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    return f"{whole // 60}m{whole % 60:02d}s" if whole < 3600 else f"{whole // 3600}h{whole % 3600 // 60:02d}m"
