"""The learning curves of one run."""

from pathlib import Path

import pandas as pd

from gcfed.report import figures


def plot_curves(metrics: pd.DataFrame, path: Path) -> None:
    figures.plot_curves(metrics.reset_index().to_dict("records"), path)
