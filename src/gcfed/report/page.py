"""The report as one HTML page that needs no other file: ``page.html``, ``page.css`` and ``page.js``, filled in."""

from __future__ import annotations

import base64
import hashlib
import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from gcfed.report import style
from gcfed.report.drawings import embedded
from gcfed.report.lines import (
    FAR,
    bare,
    bare_rows,
    blocks,
    folded,
    kinds,
    missing,
    numeric,
    relative,
    run_lines,
    search_lines,
    told,
)
from gcfed.report.runs import FINISHED, STATES
from gcfed.utils.files import replacing

if TYPE_CHECKING:
    from gcfed.report.build import Report

PICTURE_BYTES = 2_500_000  # of all pictures together: a page that goes into a mail
_HERE = Path(__file__).parent
_FORMATS = {"md": "Markdown", "tex": "LaTeX"}


def write_page(report: Report, path: str | Path) -> None:
    """Writes the page. Its links, to figures, tables and run folders, are relative to its folder."""
    path = Path(path)
    base = os.path.realpath(path.parent)
    css, js = (_HERE / "page.css").read_text(encoding="utf-8"), (_HERE / "page.js").read_text(encoding="utf-8")
    css = f":root {{ {' '.join(f'--{name}: {colour};' for name, colour in _palette().items())} }}\n{css}"
    runs = run_lines(report, base)
    counted = Counter(run.state for run in report.runs)
    shown = {
        "report": report,
        "runs": runs,
        "states": {state: counted[state] for state in STATES},
        "troubled": [line for line in runs if line.run.state != FINISHED],
        "tables": report.tables[:-1],  # the last lists all runs, as the page does in a form of its own
        "searches": [search_lines(search) for search in report.searches],
        "pictures": list(
            zip(report.pictures, embedded([p.path_png for p in report.pictures], PICTURE_BYTES), strict=True)
        ),
        "files": lambda table: _written(Path(base, "tables", table.name), ("md", "tex", "csv"), base),
        "copies": lambda picture: _written(picture.path_png.with_suffix(""), ("pdf", "svg", "png"), base),
        "far": FAR,
        "css": Markup(css),
        "js": Markup(js),
        "policy": f"default-src 'none'; img-src data:; style-src {_digest(css)}; script-src {_digest(js)}",
    }
    with replacing(path) as temporary:
        temporary.write_text(_environment().get_template("page.html").render(shown), encoding="utf-8")


def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "bare": bare, "bare_rows": bare_rows, "blocks": blocks, "folded": folded, "kinds": kinds, "missing": missing,
        "numeric": numeric, "slug": _slug, "told": told,
    }  # fmt: skip
    return environment


def _palette() -> dict[str, str]:
    return {name: getattr(style, name.upper()) for name in ("blue", "vermilion", "green", "purple", "sky", "grey")}


def _digest(text: str) -> str:
    """What a content security policy admits this very text by, and nothing that slipped in through a run's name."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _written(stem: Path, suffixes: Sequence[str], base: str) -> list[tuple[str, str]]:
    """(name of the format, link) of each file of that stem that is there."""
    files = {suffix: stem.with_name(f"{stem.name}.{suffix}") for suffix in suffixes}
    return [
        (_FORMATS.get(suffix, suffix.upper()), relative(os.path.realpath(file), base))
        for suffix, file in files.items()
        if file.is_file()
    ]
