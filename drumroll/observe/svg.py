"""A chart as an SVG element for an HTML page: no script, no font or network; values show as tooltips, colours follow the page's theme."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from drumroll.observe.charts import Chart, Series, smoothed

LEFT, RIGHT, TOP, BOTTOM = 52, 14, 10, 34  # pixels around the plot


@dataclass(slots=True, frozen=True)
class Frame:
    """Maps data to pixels."""

    width: int
    height: int
    x_min: float
    x_max: float
    y_min: float
    y_max: float

    def x(self, value: float) -> float:
        return LEFT + (value - self.x_min) / (self.x_max - self.x_min) * (self.width - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return self.height - BOTTOM - (value - self.y_min) / (self.y_max - self.y_min) * (self.height - TOP - BOTTOM)


def render(chart: Chart, width: int = 520, height: int = 240) -> str:
    """An `<svg>` of the chart; it scales with its container."""
    stacks = _stack(chart.series)
    frame = _frame(chart, stacks, width, height)
    parts = [f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(chart.title)}">', _axes(frame, chart.x_label)]
    for series, base in zip(chart.series, stacks, strict=True):
        parts.append(_draw(series, base, frame))
    parts += [_tooltips(chart.series, frame), "</svg>"]
    return "".join(parts)


def legend(chart: Chart) -> str:
    """The chart's series and their colours, as inline HTML."""
    return "".join(f'<span class="key"><i style="background:{s.color}"></i>{escape(s.name)}</span>' for s in chart.series)


def _stack(series: Sequence[Series]) -> list[list[float]]:
    """Where each series starts: zero, or for an area the top of the one below."""
    bases, top = [], [0.0] * max((len(s.xs) for s in series), default=0)
    for one in series:
        if one.mark != "area":
            bases.append([0.0] * len(one.xs))
            continue
        bases.append(top[: len(one.xs)])
        top = [below + (y if math.isfinite(y) else 0.0) for below, y in zip(top, one.ys, strict=True)]
    return bases


def _frame(chart: Chart, stacks: Sequence[Sequence[float]], width: int, height: int) -> Frame:
    xs = [x for series in chart.series for x in series.xs] or [0.0]
    tops = [b + y for series, base in zip(chart.series, stacks, strict=True) for b, y in zip(base, series.ys, strict=True)]
    ys = [top for top in tops if math.isfinite(top)]
    ys += [0.0] if chart.from_zero or not ys else []
    ys += [chart.to] if chart.to is not None else []
    x_max = max(xs) if max(xs) > min(xs) else min(xs) + 1.0
    low, high = min(ys), max(ys)
    ticks = nice_ticks(low, high if high > low else low + (abs(low) or 1.0))
    return Frame(width, height, min(xs), x_max, min(low, ticks[0]), max(high, ticks[-1]))


def nice_ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Round numbers from at most `low` to at least `high`, about `count` steps, each 1, 2 or 5 times a power of ten."""
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1.0, 2.0, 5.0, 10.0) if m * power >= raw * 0.75)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, last + 1)]


def _axes(frame: Frame, x_label: str) -> str:
    parts = []
    for tick in nice_ticks(frame.y_min, frame.y_max):
        if frame.y_min <= tick <= frame.y_max * (1 + 1e-9):
            y = frame.y(tick)
            parts.append(f'<line class="grid" x1="{LEFT}" x2="{frame.width - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{short(tick)}</text>')
    whole = [tick for tick in nice_ticks(frame.x_min, frame.x_max, 6) if frame.x_min <= tick <= frame.x_max and tick == int(tick)]
    for tick in whole:
        parts.append(f'<text x="{frame.x(tick):.1f}" y="{frame.height - BOTTOM + 16}" text-anchor="middle">{tick:.0f}</text>')
    middle = (LEFT + frame.width - RIGHT) / 2
    parts.append(f'<text x="{middle:.0f}" y="{frame.height - 4}" text-anchor="middle" class="label">{escape(x_label)}</text>')
    return "".join(parts)


def _draw(series: Series, base: Sequence[float], frame: Frame) -> str:
    if series.mark == "area":
        return _area(series, base, frame)
    if series.mark == "dots":
        line = _path(series.xs, series.ys, frame, series.color, 2.0, 0.9, dash="5 4")
        return line + _dots(series, frame, 4.5)
    if not series.smooth:
        alone = _dots(series, frame, 3.0) if len(series.xs) == 1 else ""
        return _path(series.xs, series.ys, frame, series.color, 2.0, 1.0) + alone
    faint = _path(series.xs, series.ys, frame, series.color, 1.2, 0.35)
    return faint + _path(series.xs, smoothed(series.ys), frame, series.color, 2.4, 1.0)


def _dots(series: Series, frame: Frame, radius: float) -> str:
    points = [(x, y) for x, y in zip(series.xs, series.ys, strict=True) if math.isfinite(y)]
    return "".join(f'<circle cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="{radius}" fill="{series.color}"/>' for x, y in points)


def _path(xs: Sequence[float], ys: Sequence[float], frame: Frame, color: str, width: float, opacity: float, dash: str = "") -> str:
    commands, pen_down = [], False
    for x, y in zip(xs, ys, strict=True):
        if not math.isfinite(y):
            pen_down = False
            continue
        commands.append(f"{'L' if pen_down else 'M'}{frame.x(x):.1f} {frame.y(y):.1f}")
        pen_down = True
    style = f'stroke="{color}" stroke-width="{width}" stroke-opacity="{opacity}"' + (f' stroke-dasharray="{dash}"' if dash else "")
    return f'<path d="{" ".join(commands)}" fill="none" stroke-linejoin="round" {style}/>' if commands else ""


def _area(series: Series, base: Sequence[float], frame: Frame) -> str:
    tops = [b + (y if math.isfinite(y) else 0.0) for b, y in zip(base, series.ys, strict=True)]
    xs = series.xs if len(series.xs) > 1 else [frame.x_min, frame.x_max]  # one step: a band, not a line of no width
    tops, base = (tops, base) if len(series.xs) > 1 else (tops * 2, list(base) * 2)
    upper = [f"{frame.x(x):.1f} {frame.y(y):.1f}" for x, y in zip(xs, tops, strict=True)]
    lower = [f"{frame.x(x):.1f} {frame.y(y):.1f}" for x, y in zip(xs, base, strict=True)]
    return f'<path d="M{" L".join(upper + lower[::-1])}Z" fill="{series.color}" fill-opacity="0.8"/>'


def _tooltips(series: Sequence[Series], frame: Frame) -> str:
    """An invisible column a step whose `<title>` lists the values there."""
    values: dict[float, list[str]] = {}
    for one in series:
        for x, y in zip(one.xs, one.ys, strict=True):
            values.setdefault(x, []).append(f"{one.name}: {y:.4g}")
    xs = sorted(values)
    wide = (frame.width - LEFT - RIGHT) / max(len(xs), 1)
    top, tall = TOP, frame.height - TOP - BOTTOM
    return "".join(
        f'<rect x="{frame.x(x) - wide / 2:.1f}" y="{top}" width="{wide:.1f}" height="{tall}" fill="transparent">'
        f"<title>{escape(chr(10).join([f'step {x:.4g}', *values[x]]))}</title></rect>"
        for x in xs
    )


def short(value: float) -> str:
    """A tick label: 0.25, 1200, 2e-6."""
    if value == 0 or abs(value) < 1e-12:
        return "0"
    if 1e3 <= abs(value) < 1e5:
        return f"{value:.0f}"
    return f"{value:.3g}" if 1e-3 <= abs(value) < 1e3 else f"{value:.1e}".replace(".0e", "e").replace("e-0", "e-").replace("e+0", "e")
