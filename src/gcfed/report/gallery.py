"""Every figure that a set of runs has something for, written and captioned."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from gcfed.report.borderline import plot_lambda
from gcfed.report.costs import plot_bytes, plot_bytes_to_target
from gcfed.report.dynamics import families_of, plot_dynamics, plot_errors, plot_measured
from gcfed.report.groups import Group
from gcfed.report.layers import cka_quantities, plot_cka_by_layer
from gcfed.report.panels import Drawn
from gcfed.report.partitions import plot_partitions
from gcfed.report.runs import Run
from gcfed.report.series import Quantity
from gcfed.report.style import save
from gcfed.report.subspace import plot_subspace
from gcfed.report.sweeps import plot_participation, plot_sweeps


@dataclass(frozen=True)
class Picture:
    """One picture of a report.

    Attributes:
        name: stem of its files.
        caption: what is drawn and how, in plain words.
        path_png: its file; the other formats lie beside it.
        source: figures of the papers that it follows; "" for none.
        files: all of its files.
    """

    name: str
    title: str
    caption: str
    path_png: Path
    source: str
    files: tuple[Path, ...] = ()


class Entry(NamedTuple):
    """A figure that may apply; ``plot`` returns None where it does not."""

    name: str
    title: str
    source: str
    plot: Callable[[Sequence[Group], Path], Drawn | None]


log = logging.getLogger(__name__)
MOST_COPIES = 6
MOST_PANELS = 60  # once so many are drawn, a tenth of a second each, only the figures of FIRST still are

FIRST = (
    Entry("dynamics", "Training dynamics", "GC-Fed, Figures 4 and 6; FedGC, Figures 2 and 3", plot_dynamics),
    Entry("errors", "Relative error over the rounds", "SSF, Figures 1 to 3", plot_errors),
    Entry("lambda", "Accuracy against λ", "GC-Fed, Figure 9", plot_lambda),
    Entry("sweeps", "Hyperparameters", "GC-Fed, Figure 10", plot_sweeps),
    Entry("subspace", "Dimension of the subspace", "SSF, Figure 2 and Table 3", plot_subspace),
    Entry("bytes", "Accuracy against bytes", "FedGC, Figure 6", plot_bytes),
    Entry("bytes_to_target", "Bytes to a target accuracy", "FedGC, Table 2", plot_bytes_to_target),
    Entry("partitions", "How the data lie on the clients", "GC-Fed, Figure 5", plot_partitions),
    Entry("participation", "Partial update against participation", "GC-Fed, Figure 1b", plot_participation),
    Entry("cka_layers", "Similarity by layer", "FedACG, Figure 2c", plot_cka_by_layer),
)
#: Families of columns over the rounds: title, source, what is drawn.
MEASURED = {
    "cka": (
        "Similarity of layers over the rounds", "GC-Fed, Figure 7",
        "Linear CKA of the clients' local models and the global model that they started from, layer by layer.",
    ),
    "gap": (
        "Partial update against the update of all clients", "GC-Fed, Figure 1b",
        "How far the mean update of the cohort, Δₛ, is from the mean update of all clients, Δₐₗₗ.",
    ),
    "drift": (
        "Client drift", "FedACG, Figure 2b",
        "Norms of the clients' updates Δₖ and of their mean, and how far they lie apart.",
    ),
    "angle": (
        "Angles of the updates", "FedGC, equations 1 and 8",
        "Angles of the clients' updates to the server's last step and to the update of the round.",
    ),
    "forgetting": (
        "Forgetting", "FedGC, Figure 7",
        "Loss of the global model before, and of the local models after local training, on the data of the cohort.",
    ),
    "loss": (
        "Losses", "", "Loss of local training, mean over the cohort, and of the global model on the test split.",
    ),
    "clients": (
        "Clients on their own data", "", "Accuracy and loss of the cohort on its own data, before and after training.",
    ),
    "leakage": (
        "What an attack recovers", "FedGC, Appendix A.5",
        "What deep leakage from gradients recovers of a client's images from its upload of one step.",
    ),
    "fedgc": ("FedGC's constraints", "", "How often the constraints of FedGC bind."),
}  # fmt: skip
COPIED = (
    (
        "surface", "Loss surface with local models", "FedACG, Figure 2a",
        "The loss around the global model on the plane of local models, as the run drew it",
    ),
    (
        "leakage", "Recovered images", "FedGC, Figure 5",
        "A client's images above what deep leakage from gradients recovered from its upload of one step",
    ),
)  # fmt: skip


def draw(
    groups: Sequence[Group],
    folder: Path,
    formats: Sequence[str] = ("png", "pdf"),
    failed: dict[str, Exception] | None = None,
) -> list[Picture]:
    """Writes every figure that applies to the groups, in each format, and returns them in their order on a page.

    Args:
        folder: where the files go; made if it is not there.
        formats: suffixes; ``png`` is written always.
        failed: takes the errors of figures that cannot be drawn, by their titles; None: the first one is raised.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pictures: list[Picture] = []
    panels, left_out = 0, []
    for entry in _entries(groups):
        files = [folder / f"{entry.name}.{suffix}" for suffix in dict.fromkeys(("png", *formats))]
        if panels >= MOST_PANELS and entry not in FIRST:
            left_out.append(entry.title)
            continue
        try:
            drawn = _written(entry, groups, files)
        except Exception as error:  # whatever it is, it must not cost the other figures and the tables
            if failed is None:
                raise
            failed[entry.title] = error
            log.error("The figure %r cannot be drawn: %s: %s", entry.title, type(error).__name__, error)
            for path in files:
                path.unlink(missing_ok=True)
            continue
        if drawn:
            panels += len(drawn.figure.axes)
            pictures.append(Picture(entry.name, entry.title, drawn.caption, files[0], entry.source, tuple(files)))
    if left_out and pictures:
        told = f"{pictures[-1].caption} Not drawn for want of room: {', '.join(left_out)}."
        pictures[-1] = replace(pictures[-1], caption=told)
    return pictures + [picture for copies in COPIED for picture in copied(groups, folder, formats, *copies)]


def _written(entry: Entry, groups: Sequence[Group], files: Sequence[Path]) -> Drawn | None:
    """Draws the figure into the files, the first one being the PNG."""
    drawn = entry.plot(groups, files[0])
    if drawn:
        for path in files[1:]:
            save(drawn.figure, path)
    return drawn


def _entries(groups: Sequence[Group]) -> Iterator[Entry]:
    """The figures of their own, then one of each family of columns that was measured."""
    yield from FIRST
    families: dict[str, Sequence[Quantity]] = {"cka": cka_quantities(groups), **families_of(groups)}
    for name in (*MEASURED, *(name for name in families if name not in MEASURED)):
        if families.get(name):
            title, source, what = MEASURED.get(name, (name, "", f"The columns {name}/… of the metrics."))
            plot = partial(plot_measured, quantities=families[name], what=what, one_scale=name == "cka")
            yield Entry(f"measured_{name}", title, source, plot)


def copied(
    groups: Sequence[Group], folder: Path, formats: Sequence[str], stem: str, title: str, source: str, caption: str
) -> list[Picture]:
    """The pictures ``<stem>_round_<t>.png`` that runs have drawn: the last one of each group's lowest seed with any."""
    found = [(group, *last) for group in groups if (last := _last(group, stem))]
    count = f" {MOST_COPIES} of {len(found)} settings shown." if len(found) > MOST_COPIES else ""
    pictures = []
    for i, (group, run, number, path) in enumerate(found[:MOST_COPIES], start=1):
        name = stem if len(found) == 1 else f"{stem}_{i}"
        files = []
        for suffix in dict.fromkeys(("png", *formats)):
            if path.with_suffix(f".{suffix}").is_file():
                files.append(shutil.copyfile(path.with_suffix(f".{suffix}"), folder / f"{name}.{suffix}"))
        told = f"{caption}: {group.label}, seed {run.seed}, round {number}.{count}"
        pictures.append(Picture(name, title, told, files[0], source, tuple(files)))
    return pictures


def _last(group: Group, stem: str) -> tuple[Run, int, Path] | None:
    for run in group.runs:
        rounds = {path: path.stem.rpartition("_")[2] for path in run.folder.glob(f"{stem}_round_*.png")}
        numbered = [(int(number), path) for path, number in rounds.items() if number.isdigit()]
        if numbered:
            return run, *max(numbered)
    return None
