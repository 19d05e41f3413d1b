"""What researchers compare runs by, as one flat table."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, OmegaConf

from gcfed.utils.settings import flat

Scalar = bool | int | float | str

ALONE = ("seed", "rounds", "precision")
SECTIONS = ("partition", "participation", "client", "server", "aggregator", "methods", "gc", "quantization")
NAMED = ("partition", "client.optimizer", "server")  # whose class is a choice of its own
LEFT_OUT = ("client.stack", "participation.sampler.per_round")  # they change no number, or stand there twice


def hyperparameters(cfg: DictConfig) -> dict[str, Scalar]:
    """The settings of a run that change its numbers, under the names that the command line knows them by.

    ``data``, ``model``, ``algorithm`` and ``gc`` are the options of these groups, ``gc.lam``, ``partition.alpha``,
    ``client.optimizer.lr``, ``methods.proximal.mu``, … single values. What is null has no entry, lists become text.
    """
    tree: Any = OmegaConf.to_container(cfg, resolve=True)
    table: dict[str, Any] = dict(tree["tags"]) | {key: tree[key] for key in ALONE}
    for section in SECTIONS:
        if tree[section].get("_target_", "") is not None:  # of an absent ingredient, defaults may be left
            values = flat({section: tree[section]})
            named = {
                name: values[f"{name}._target_"].rpartition(".")[-1] for name in NAMED if f"{name}._target_" in values
            }
            table |= named | {key: value for key, value in values.items() if "._" not in key and key not in LEFT_OUT}
    return {k: v if isinstance(v, Scalar) else str(v) for k, v in table.items() if v is not None and v != {}}
