"""Curves in a panel: means with their shading, dashes for what did not finish, targets, and the words for all that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes

from gcfed.report.panels import log_axis, percent_axis, plural
from gcfed.report.runs import DIVERGED, FINISHED
from gcfed.report.series import Curve, Drawing, Quantity, crossing
from gcfed.report.style import GREY, UNFINISHED, Look

ROOMY = 4  # series in a panel that leave room for the values before smoothing


def draw_curves(axes: Axes, drawings: Sequence[Drawing], quantity: Quantity, by_method: Mapping[str, Look]) -> None:
    """Draws each group, labels the y axis, and limits it to what finished where something diverged."""
    shade = 0.16 if len(drawings) <= ROOMY else 0.09
    for i, part in enumerate(drawings):
        style = by_method[part.group.method]
        if part.raw is not None:
            curve = part.raw.thinned()
            axes.plot(curve.x, curve.y, color=style.color, alpha=0.28, linewidth=0.7)
        if part.mean is not None:
            curve = part.mean.thinned()
            if curve.low is not None and curve.high is not None:
                axes.fill_between(curve.x, curve.low, curve.high, color=style.color, alpha=shade, linewidth=0)
            axes.plot(curve.x, curve.y, **style.line(), markevery=_marked(curve, i, len(drawings)), linewidth=1.6)
        for curve in (c.thinned() for c in part.partial):
            every = _marked(curve, i, len(drawings))
            axes.plot(curve.x, curve.y, **style.line(dashes=UNFINISHED), markevery=every, linewidth=1.1)
    axes.set_ylabel(quantity.label)
    _limit(axes, drawings, quantity)


def _limit(axes: Axes, drawings: Sequence[Drawing], quantity: Quantity) -> None:
    sane = [c for part in drawings for c in (part.mean, part.raw, *part.partial) if c and not _lost(part, c)]
    parts = [y for c in sane for y in (c.y, c.low, c.high) if y is not None]
    everything = [c.y for part in drawings for c in (part.mean, *part.partial) if c]
    shown = np.concatenate(parts or everything or [np.empty(0)])
    if not len(shown):
        return
    is_share = "%" in quantity.label
    if quantity.log or (not is_share and shown.max() > 1000 * max(shown.min(), 0) > 0):
        log_axis(axes, shown.min(), shown.max())
    elif len(parts) and any(_lost(part, c) for part in drawings for c in part.partial):
        low, high = shown.min(), shown.max()
        margin = 0.05 * ((high - low) or 1.0)
        axes.set_ylim(low - margin, high + margin)
    if is_share:
        percent_axis(axes)


def _lost(part: Drawing, curve: Curve) -> bool:
    """Whether the curve may be one of a run that diverged, whose numbers grow before they end."""
    return curve is not part.mean and curve is not part.raw and any(run.state == DIVERGED for run in part.group.runs)


def _marked(curve: Curve, i: int, count: int, marks: int = 6) -> list[int]:
    """Which points of curve i of ``count`` have a marker: all of few, else some, beside those of the other curves."""
    n = len(curve.x)
    if n <= 2 * marks:
        return list(range(n))
    return sorted({int(n * (k + (i + 0.5) / count) / marks) for k in range(marks)})


def draw_target(
    axes: Axes, drawings: Sequence[Drawing], by_method: Mapping[str, Look], target: float, label: str
) -> None:
    """A dotted line at the target, and one down from where each mean curve first reaches it."""
    axes.axhline(target, color=GREY, linestyle=":", linewidth=1.2, zorder=1)
    axes.annotate(
        label, (1, target), xycoords=("axes fraction", "data"), xytext=(3, 0), textcoords="offset points",
        va="center", fontsize=8, color="#555555",
    )  # fmt: skip
    low = axes.get_ylim()[0]
    for part in drawings:
        if part.mean is not None and (x := crossing(part.mean, target)) is not None:
            axes.vlines(x, low, target, color=by_method[part.group.method].color, linestyle=":", linewidth=1.1)
    axes.set_ylim(bottom=low)


def curves_told(drawn: Sequence[Drawing]) -> str:
    """How the curves came about: seeds, smoothing, shading, dashes."""
    windows = sorted({part.window for part in drawn})
    several = any(part.mean is not None and part.mean.low is not None for part in drawn)
    counts = [sum(run.state == FINISHED for run in part.group.runs) for part in drawn if part.mean is not None]
    sentences = []
    if counts:
        seeds = plural(max(counts), "seed") if min(counts) == max(counts) else f"{min(counts)} to {max(counts)} seeds"
        sentences.append(f"Lines: {'mean over ' if several else ''}{seeds}")
        if windows[-1] > 1:
            size = f"{windows[0]} to {windows[-1]}" if windows[0] < windows[-1] else f"{windows[-1]}"
            sentences[-1] += f", each point the mean of the last {size} measurements"
    if several:
        sentences.append("Shaded: one standard deviation over the seeds to either side")
    if any(part.raw is not None for part in drawn):
        sentences.append("Pale: the values of single seeds before smoothing")
    if any(part.partial for part in drawn):
        sentences.append("Dashed: single runs that diverged, failed or are not finished, as far as they got")
    return "".join(f"{sentence}. " for sentence in sentences).rstrip()
