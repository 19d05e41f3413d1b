"""Which versions of this project trained the runs of a comparison: results may differ between
versions, and the settings do not show it.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from gcfed.folders.folder import Run

UNKNOWN = "not recorded"


def mixed_versions(runs: Iterable[Run]) -> str:
    """What to say of runs that different versions have trained; "" if none differ.

    Runs of which no one has recorded a version count as equal.
    """
    folders: dict[str, Path] = {}  # a version → a run
    for run in runs:
        if run.summary:
            folders.setdefault(str(run.summary.get("version") or UNKNOWN), run.folder)
    if len(folders) < 2:
        return ""
    listed = "; ".join(f"{version}: {folder}" for version, folder in sorted(folders.items()))
    return (
        f"runs of different versions are compared ({listed}). CHANGELOG.md lists the numbers that"
        " change between versions. Train the older ones again"
    )
