"""What the page draws itself, as inline SVG without colours of its own, and pictures as data URLs of bounded size."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from markupsafe import Markup
from numpy.typing import ArrayLike
from PIL import Image

NARROWEST = 320  # pixels
SCALE = 0.7  # CSS pixels a pixel: what style.py draws at 10 points comes out as large as the page's text


class Embedded(NamedTuple):
    """A picture as a data URL, and its size on the page."""

    url: str
    width: int
    height: int


def embedded(paths: Sequence[Path], total: int) -> list[Embedded]:
    """PNG files of ``total`` bytes together at most, or as many as 320 pixels of width take.

    A picture above its equal share is redrawn in 256 colours, and smaller where that is not enough.
    """
    share = total // max(1, len(paths))
    return [_embedded(path, share) for path in paths]


def _embedded(path: Path, limit: int) -> Embedded:
    with Image.open(path) as picture:
        width, height = (round(SCALE * pixels) for pixels in picture.size)
    return Embedded(f"data:image/png;base64,{base64.b64encode(_within(path, limit)).decode()}", width, height)


def _within(path: Path, limit: int) -> bytes:
    data = path.read_bytes()
    if len(data) <= limit:
        return data
    with Image.open(path) as picture:
        plain = picture.convert("RGB")
    width = plain.width
    while True:
        buffer = io.BytesIO()
        small = plain.resize((width, max(1, round(width * plain.height / plain.width))))
        small.quantize(256, Image.Quantize.FASTOCTREE).save(buffer, "PNG", optimize=True)
        if buffer.tell() <= limit or width <= NARROWEST:
            return buffer.getvalue()
        width = max(NARROWEST, int(width * 0.95 * math.sqrt(limit / buffer.tell())))


def sparkline(values: ArrayLike, highest: float, *, width: int = 96, height: int = 22, points: int = 48) -> Markup:
    """A curve [n] from 0 at the bottom to ``highest`` at the top; of a longer one, so many evenly spaced points."""
    y = np.asarray(values, dtype=float)
    if not len(y):
        return Markup("")
    y = np.clip(y[np.unique(np.linspace(0, len(y) - 1, points).round().astype(int))] / (highest or 1), 0, 1)
    x = np.linspace(2, width - 2, len(y)) if len(y) > 1 else np.array([width / 2])
    line = " ".join(f"{a:.0f},{height - 2 - b * (height - 4):.1f}" for a, b in zip(x, y, strict=True))
    mark = (
        f'<polyline points="{line}"/>' if len(y) > 1 else f'<circle cx="{x[0]:.0f}" cy="{line.split(",")[1]}" r="2"/>'
    )
    return Markup(f'<svg class="spark" viewBox="0 0 {width} {height}" width="{width}" height="{height}">{mark}</svg>')


def scatter(numbers: ArrayLike, values: ArrayLike, *, width: int = 640, height: int = 220) -> Markup:
    """Finite values [n] over the trials' numbers [n], with the values' range and the first and last number written."""
    x, y = np.asarray(numbers, dtype=float), np.asarray(values, dtype=float)
    if not len(y):
        return Markup("")
    left, right, top, bottom = 64, width - 12, 12, height - 34
    low, high, first, last = y.min(), y.max(), x.min(), x.max()
    px = left + (right - left) * (x - first) / (last - first) if last > first else np.full_like(x, (left + right) / 2)
    py = bottom - (bottom - top) * (y - low) / (high - low) if high > low else np.full_like(y, (top + bottom) / 2)
    dots = "".join(
        f'<circle cx="{a:.1f}" cy="{b:.1f}" r="4"><title>trial {n:.0f}: {v:.5g}</title></circle>'
        for a, b, n, v in zip(px, py, x, y, strict=True)
    )
    labels: list[tuple[float, float, str, str]] = [
        (left - 8, b + 4, "end", f"{v:.4g}") for b, v in {py[y.argmin()]: low, py[y.argmax()]: high}.items()
    ]
    labels += [(a, bottom + 18, "middle", f"{n:.0f}") for a, n in {px[x.argmin()]: first, px[x.argmax()]: last}.items()]
    labels += [((left + right) / 2, bottom + 30, "middle", "trial")]
    texts = "".join(
        f'<text x="{a:.0f}" y="{b:.0f}" text-anchor="{anchor}">{text}</text>' for a, b, anchor, text in labels
    )
    axes = f'<path d="M{left - 2} {top}V{bottom + 2}H{right}"/>'
    return Markup(
        f'<svg class="scatter" viewBox="0 0 {width} {height}" role="img" aria-label="Value of each trial">'
        f"{axes}{dots}{texts}</svg>"
    )
