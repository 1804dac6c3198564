"""The last lines of a run: what was learned, that the weights arrived, and where to look."""

from __future__ import annotations

from pathlib import Path

from drumroll.observe.console import duration
from drumroll.observe.foreseen import Foreseen, beside
from drumroll.observe.run import PICTURE_FILE, REPORT_FILE
from drumroll.observe.summary import Summary


def closing(summary: Summary, run_dir: Path) -> str:
    """A few lines of text; what a run does not have (evaluations, weight pushes, a report) is left out."""
    cause = f": {summary.error}" if summary.error else ""
    lines = [f"{summary.status}: {summary.steps} steps in {duration(summary.wall_seconds)}{cause}"]
    if summary.eval_before is not None and summary.eval_after is not None:
        gain = summary.eval_after - summary.eval_before
        lines.append(f"evaluation: {summary.eval_before:.3f} before, {summary.eval_after:.3f} after ({gain:+.3f})")
    if summary.weight_pushes:
        gap = "" if summary.logprob_gap_mean is None else f"; engine-trainer log-prob gap {summary.logprob_gap_mean:.1e} on average"
        lines.append(f"weights: {summary.digests_matched} of {summary.weight_pushes} pushes arrived as they were sent{gap}")
    state, peak = summary.predicted_state_bytes_per_rank, summary.predicted_peak_bytes_per_rank
    if state is not None and peak is not None and summary.state_bytes_per_rank:
        lines.append(beside(Foreseen(state, peak, summary.process_bytes), summary.state_bytes_per_rank, summary.peak_bytes_per_rank))
    found = [str(path) for path in (run_dir / REPORT_FILE, run_dir / PICTURE_FILE) if path.is_file()]
    if found:
        lines.append(f"to look at: {', '.join(found)}")
    return "\n".join(lines)
