"""Tables, figures and a page of many runs. The package can be called: it is ``gcfed.report(…)`` of the Python API."""

import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Literal

from gcfed.utils.checked import checked


@checked
def write_report(
    *roots: str | Path,
    out: str | Path = "logs/report",
    papers: Sequence[str] | None = None,
    measures: Sequence[str] | None = None,
    empty: bool = False,
    figures: bool | Literal["all"] = True,
    formats: Sequence[str] = ("png", "pdf"),
) -> Path:
    """Tables, figures and a page of finished runs, as ``python src/report.py`` makes them; returns the page.

    Args:
        roots: folders below which runs are looked for; none: ``logs``.
        out: folder of the report.
        papers: tables of ``configs/paper`` to compare with; None: all.
        measures: of the tables by federation, ``"mean:test/acc[10]"``; None: the usual ones.
        empty: with the rows and columns of the papers' tables that have no run.
        figures: whether to draw; "all": the curves of all federations, not of the first six alone.
        formats: of the figures, beside PNG.

    Raises:
        FileNotFoundError: a root or a paper's table is not there.
        ValueError: there is no run below the roots, a measure that is none, or what could not be drawn or found of
            what was asked for, when all else is written.
    """
    from gcfed.report.build import report

    return report({
        "roots": [str(root) for root in roots] or ["logs"], "out": out, "papers": papers, "measures": measures,
        "empty": empty, "figures": figures, "formats": formats,
    })  # fmt: skip


class _Package(ModuleType):
    __call__ = staticmethod(write_report)


sys.modules[__name__].__class__ = _Package
