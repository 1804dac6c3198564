"""The main curve of a run as a PNG, for a README or a chat."""

from __future__ import annotations

from pathlib import Path

from drumroll.observe.charts import Chart, smoothed


def write_picture(path: Path, chart: Chart, title: str) -> None:
    """Draw lines and dots of the chart at 1600 x 900 pixels."""
    # matplotlib takes a second to import; a Figure without pyplot needs no display and leaves no global state
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5.625), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for series in chart.series:
        if series.mark == "dots":
            axes.plot(series.xs, series.ys, "o--", color=series.color, label=series.name, markersize=8, linewidth=2)
        elif series.smooth:
            axes.plot(series.xs, series.ys, color=series.color, alpha=0.3, linewidth=1.2)
            axes.plot(series.xs, smoothed(series.ys), color=series.color, label=series.name, linewidth=2.6)
        else:
            axes.plot(series.xs, series.ys, color=series.color, label=series.name, linewidth=2.2)
    if chart.to is not None:
        axes.set_ylim(0.0, max(chart.to, axes.get_ylim()[1]))
    axes.set_title(title, loc="left", fontsize=15, fontweight="bold")
    axes.set_xlabel(chart.x_label)
    axes.grid(axis="y", color="#e2e8f0")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if chart.series:
        axes.legend(frameon=False, loc="lower right")
    partial = path.with_name(path.name + ".partial")
    figure.savefig(partial, format="png")
    partial.replace(path)
