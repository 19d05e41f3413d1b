"""A report with everything that a page can show, texts that must be escaped among it."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from PIL import Image
from run_folders import rows_of, write_run

from gcfed.report import papers
from gcfed.report.build import Report
from gcfed.report.compare import compare
from gcfed.report.groups import grouped
from gcfed.report.papers import Axis, PaperTable
from gcfed.report.runs import Run, find_runs
from gcfed.report.searches import Search, Trial
from gcfed.report.tables import Cell, Row, Table

EVIL = "<script>alert(\"1\")</script> & <b>'bold'</b>"


def write_runs(root: Path, seeds: int = 3) -> None:
    """Three methods, so many seeds; then a run of each unhappy state, one whose config is broken, and a regression."""
    for method, level in ("fedavg", 0.5), ("fedprox", 0.6), ("fedlc", 0.4):
        for seed in range(1, seeds + 1):
            config = {"seed": seed, "tags.algorithm": method}
            write_run(root / f"{method}_s{seed}", config=config, rows=rows_of([0.1, level, level + seed / 100]))
    moon = {"tags.algorithm": "moon", "rounds": 9}
    error = f"ValueError: {EVIL}\nTraceback"
    write_run(root / "moon_failed", config=moon, rows=rows_of([0.2]), failure=error)
    write_run(root / "moon_unfinished", config=moon | {"seed": 2}, rows=rows_of([0.2, 0.3]), summary=False)
    diverged = rows_of([0.2, 0.1], **{"test/loss": [2.0, float("inf")]})
    write_run(root / "moon_diverged", config=moon | {"seed": 3, "rounds": 2}, rows=diverged)
    write_run(root / "regression", config={"tags.data": EVIL}, rows=[{"test/relative_error": x} for x in (0.5, 0.25)])
    broken = root / "broken"
    broken.mkdir()
    (broken / "config.yaml").write_text("rounds: [")
    (broken / "overrides.yaml").write_text("[]")


def picture(folder: Path, name: str, caption: str, pixels: Any = None) -> Any:
    """A picture and its PDF below the folder; the PDF is empty."""
    png, pdf = (folder / "figures" / f"{name}.{suffix}" for suffix in ("png", "pdf"))
    png.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((240, 480, 3), 200, np.uint8) if pixels is None else pixels).save(png)
    pdf.touch()
    return SimpleNamespace(name=name, title=f"Figure {name}", caption=caption, path_png=png, source="GC-Fed, Figure 4")


def paper_table() -> PaperTable:
    """FedAvg is 3.3 σ below the paper, FedProx 0.5 σ above it; the rest failed, or is missing under another α."""
    methods = {"FedAvg": "fedavg", "FedProx": "fedprox", EVIL: "moon"}
    numbers = {"FedAvg": papers.Cell(59.45, 2.0), "FedProx": papers.Cell(60.45, 3.0), EVIL: papers.Cell(61.0, 2.0)}
    return PaperTable(
        name="gcfed_table5",
        paper="GC-Fed",
        table="5",
        title=f"Accuracy {EVIL}",
        source="GC-Fed, Table 5",
        unit="percent",
        columns=tuple(Axis(f"α {a}", (f"partition.alpha={a}",), {"partition.alpha": a}) for a in (0.1, 0.05)),
        rows=tuple(Axis(label, (f"algorithm={m}",), {"tags.algorithm": m}) for label, m in methods.items()),
        cells={(label, f"α {a}"): number for label, number in numbers.items() for a in (0.1, 0.05)},
        higher_is_better=True,
        seeds=3,
        measure="max:test/acc",
        setting={"rounds": 800},
    )


def sample(folder: Path, runs: list[Run] | None = None, **changed: Any) -> Report:
    """The report of the runs below ``folder / "runs"``, to be written into ``folder / "site"``."""
    site = folder / "site"
    runs = find_runs([folder / "runs"]) if runs is None else runs
    groups = grouped(runs)
    trials = tuple(
        Trial(i, "COMPLETE", value, 2.0, f"{i}", {"gc.lam": f"{i / 10}", "model": EVIL})
        for i, value in enumerate([0.5, 0.9, None, 0.7])
    )
    free = Table("best", "Best accuracy", ("method", "accuracy"), (Row((Cell("FedAvg"), Cell("51.00"))),))
    given: dict[str, Any] = {
        "title": f"Report {EVIL}", "created": datetime(2026, 5, 4, 15, 6), "folder": site,
        "roots": (str(folder / "runs"),), "runs": tuple(runs), "groups": tuple(groups),
        "comparisons": (compare(paper_table(), groups),), "tables": (free, Table("runs", "All runs", (), ())),
        "pictures": (picture(site, "dynamics", f"Accuracy {EVIL}"),), "searches": (Search(f"search {EVIL}", trials),),
    }  # fmt: skip
    return Report(**(given | changed))


def many_runs(n: int) -> list[Run]:
    """Runs in memory alone, of 800 rounds each."""
    rounds = np.arange(1.0, 801)
    columns = {"round": rounds, "test/acc": rounds / 1000, "time/round_s": rounds, "comm/up_bytes": 1e7 * rounds}

    def config(i: int) -> dict[str, Any]:
        tags = {"data": "cifar10", "model": "cnn", "algorithm": f"method{i % 8}", "gc": "none"}
        return {"seed": i, "rounds": 800, "tags": tags}

    folders = (Path(f"/runs/logs/study/gcfed_table5/full/method{i % 8}_cifar10_5of100_a0.05_s{i}") for i in range(n))
    return [Run(folder, config(i), (), {}, columns, "finished", "") for i, folder in enumerate(folders)]
