"""The settings of a run as a whole, which no constructor sees, are checked before anything is built."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import Field

from gcfed.utils.checked import Count, Share, Whole, fits
from gcfed.utils.machine import in_sweep
from gcfed.utils.resolvers import command

#: 16-mixed is not among them: it scales the loss, so that gradient hooks (GC, SCAFFOLD, clipping) see scaled gradients.
Precision = Literal["32-true", "bf16-mixed", "64-true"]
RANGES: dict[str, Any] = {
    "name": Annotated[str, Field(pattern=r"^[^./\\][^/\\]*$")],
    "rounds": Count, "eval_every": Count, "seed": Whole, "precision": Precision,
    "precision_matmul": Literal["high", "medium"] | None, "targets": Sequence[Share], "optimized_metric": str | None,
    "client_store.folder": Annotated[str, Field(min_length=1)] | None,
    "channels_last": bool, "extras.figures": bool,
    "trainer.num_nodes": Count | None, "trainer.accelerator": Literal["auto", "cpu", "gpu", "cuda"] | None,
}  # fmt: skip


def check(cfg: DictConfig) -> None:
    """Refuses settings with which a run cannot work.

    Raises:
        ValueError: names the key.
        TypeError: ``cfg`` is no config.
    """
    if not isinstance(cfg, DictConfig):
        raise TypeError(f'a {type(cfg).__name__} is no config: gcfed.configure("rounds=2", "gc=none") makes one.')
    try:
        OmegaConf.to_container(cfg, resolve=True)
    except OmegaConfBaseException as error:
        raise ValueError(" ".join(str(error).split())) from None
    for key, hint in RANGES.items():
        value = OmegaConf.select(cfg, key)
        fits(key, OmegaConf.to_container(value) if OmegaConf.is_config(value) else value, hint)
    fits("trainer.precision", OmegaConf.select(cfg, "trainer.precision"), Literal[cfg.precision])  # which it follows
    by = OmegaConf.select(cfg, "partition.by")
    if by is not None and OmegaConf.select(cfg, "data.dataset.groups") is None:
        raise ValueError(f"partition.by={by}: data={cfg.tags.data} says whose samples are; leave partition.by out.")
    search = HydraConfig.get().runtime.choices.get("hparams_search") if HydraConfig.initialized() else None
    if search is not None and not in_sweep():
        raise ValueError(f"hparams_search={search} is a sweep: {command('train')} -m hparams_search={search} …")
