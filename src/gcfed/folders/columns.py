"""The columns of ``metrics.csv`` and the numbers of ``summary.json``, and where less is better."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, Literal

from omegaconf import DictConfig, OmegaConf

from gcfed.utils.compose import suggestion
from gcfed.utils.refusal import Refusal

Better = Literal["higher", "lower", "neither"]

#: Columns by pattern → which value is better. ``neither``: it describes a run and ranks none.
COLUMNS: dict[str, Better] = {
    "round": "neither",
    "train/loss": "lower",
    "train/clients": "neither",
    "train/nonfinite_clients": "lower",
    "train/refused_steps": "lower",
    "train/dropped_clients": "lower",
    "train/stragglers": "lower",
    "train/hostile_clients": "neither",
    "train/samples": "neither",
    "train/steps": "neither",
    "test/acc": "higher",
    "test/acc_smooth10": "higher",
    "test/acc_ema": "higher",
    "test/loss": "lower",
    "test/perplexity": "lower",
    "test/rmse": "lower",
    "test/relative_error": "lower",
    "val/acc": "higher",
    "val/loss": "lower",
    "val/perplexity": "lower",
    "val/rmse": "lower",
    "comm/down_bytes": "lower",
    "comm/up_bytes": "lower",
    "time/train_s": "lower",
    "time/round_s": "lower",
    "clock/seconds": "lower",
    "late/mean": "lower",
    "late/max": "lower",
    "late/lost": "lower",
    "privacy/epsilon_rdp": "lower",
    "privacy/epsilon_prv": "lower",
    "clip_update/max_norm": "neither",
    "clip_update/clipped": "neither",
    "drift/client_norm": "neither",
    "drift/relative": "neither",
    "drift/update_norm": "neither",
    "drift/divergence": "lower",
    "drift/cosine": "higher",
    "cka/*": "higher",
    "gap/l2": "lower",
    "gap/relative": "lower",
    "gap/cosine": "higher",
    "gc/rho/*": "neither",
    "gc/share_*/*": "neither",
    "angle/server": "lower",
    "angle/above_90": "lower",
    "angle/update": "lower",
    "forgetting/before": "lower",
    "forgetting/after": "lower",
    "forgetting/own": "lower",
    "forgetting/others": "lower",
    # what is better depends on who attacks
    "leakage/*": "neither",
    "fedgc/cgc_layers": "neither",
    "fedgc/sgc_active": "neither",
    "fedgc/sgc_failed": "lower",
    "personal/*_acc": "higher",
    "personal/*_worst10": "higher",
    "personal/*_std": "lower",
    "classes/*_acc": "higher",
    "clients/acc_*": "higher",
    "clients/loss_*": "lower",
}
#: Numbers that only ``summary.json`` has.
SUMMARY_NUMBERS: dict[str, Better] = {
    "rounds": "neither",
    "best_round": "neither",
    "test/acc_best": "higher",
    "test/loss_best": "lower",
    "test/perplexity_best": "lower",
    "test/rmse_best": "lower",
    "test/relative_error_best": "lower",
    "acc_diff/mean": "higher",
    "acc_diff/std": "lower",
    "acc_diff/min": "higher",
    "client_seconds": "lower",
    "partition/*": "neither",
}
# In other columns, such as those of torchmetrics, these words mean that less is better.
_LOWER = re.compile(
    "loss|error|rmse|mse|mae|perplexity|distance|divergence|deviance|epsilon|bytes|seconds|time/"
    "|comm/|_std",
    re.IGNORECASE,
)
# Classes of other packages may write columns of any name.
_NO_COLUMNS = ("gcfed.", "torch.", "torchvision.", "lightning.", "hydra.", "optuna.")


def better(column: str) -> Better:
    """Which value of a column is better. Of an unknown column it is the higher one, unless its name
    says otherwise.
    """
    known = known_better(column)
    if known is not None:
        return known
    return "lower" if _LOWER.search(column) else "higher"


def known_better(column: str) -> Better | None:
    """Which value is better; None for a column that is not this project's."""
    for pattern, direction in (COLUMNS | SUMMARY_NUMBERS).items():
        if fnmatchcase(column, pattern):
            return direction
    return None


def refuse_unwritten(column: str, cfg: DictConfig, key: str) -> None:
    """Raises Refusal, with a suggestion, for a column that no run of this config can write.

    Args:
        key: the setting that chose the column, such as ``search.metric=last:test/ac``.
    """
    validation = OmegaConf.select(cfg, "data.validation", default=1)
    if column.startswith("val/") and not validation:
        raise Refusal(f"{key} needs a validation split: set data.validation=0.1.")
    if is_written(column, cfg):
        return
    meant = suggestion(column, _known(cfg))
    if meant == ".":
        meant = ". docs/concepts.md lists the columns."
    raise Refusal(f"{key}: no run with these settings writes {column}{meant}")


def is_written(column: str, cfg: DictConfig) -> bool:
    """Whether a run of this config may write the column. A class that is not ours may write any."""
    if any(fnmatchcase(column, pattern) for pattern in _known(cfg)):
        return True
    settings = OmegaConf.to_container(cfg)
    return any(not target.startswith(_NO_COLUMNS) for target in _targets(settings))


def _known(cfg: DictConfig) -> list[str]:
    """All columns by pattern, with those of torchmetrics that the config asks for."""
    columns = [*COLUMNS, *SUMMARY_NUMBERS]
    for name in OmegaConf.select(cfg, "metrics.torchmetrics.names") or ():
        columns += [f"test/{name}", f"personal/global_{name}", f"personal/local_{name}"]
    return columns


def _targets(node: Any) -> Iterator[str]:
    """The classes and functions that a config names."""
    if isinstance(node, Mapping):
        if "_target_" in node:
            yield str(node["_target_"])
        for value in node.values():
            yield from _targets(value)
    elif isinstance(node, list):
        for value in node:
            yield from _targets(value)
