"""Checks the settings that no constructor sees, before anything is built."""

import re
from collections.abc import Sequence
from functools import cache
from typing import Annotated, Any, Literal

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import AfterValidator, TypeAdapter

from gcfed.utils.checked import Count, NonEmpty, Share, Whole, rule, validated
from gcfed.utils.hints import explained
from gcfed.utils.machine import in_sweep
from gcfed.utils.near import suggestion
from gcfed.utils.refusal import Refusal
from gcfed.utils.resolvers import CONFIGS
from gcfed.utils.unread import refuse_unread

DEVICES = (
    "set auto, a number of devices from 1 on, -1 for all of them, or a list of different GPUs such"
    " as [0,1]"
)


def _known_devices(devices: Any) -> Any:
    """Returns the devices if Lightning can read them; else raises ValueError."""
    read = devices
    if isinstance(devices, str) and re.fullmatch(r"-?\d+(,\d+)*", devices):
        # Lightning takes a text without a comma as a number of devices
        read = [int(text) for text in devices.split(",")] if "," in devices else int(devices)
    if isinstance(read, list):
        is_known = _are_gpus(read)
    else:
        is_known = read == "auto" or (type(read) is int and (read == -1 or read >= 1))
    if not is_known:
        raise ValueError(DEVICES)
    return devices


def _are_gpus(numbers: Sequence[Any]) -> bool:
    """Whether these are the indices of one or more different GPUs."""
    if not all(type(number) is int and number >= 0 for number in numbers):
        return False
    return 0 < len(numbers) == len({*numbers})


def _name_of_folder(name: str) -> str:
    if not re.fullmatch(r"[^./\\][^/\\]*", name):
        raise ValueError("it names a folder, so it has no slash and does not begin with a dot")
    return name


RANGES: dict[str, Any] = {
    "name": Annotated[str, AfterValidator(_name_of_folder)],
    "rounds": Count,
    "eval_every": Count,
    "seed": Whole,
    # Not 16-mixed: it scales the loss, so gradient hooks (GC, SCAFFOLD, clipping) would see scaled
    # gradients.
    "precision": Literal["32-true", "bf16-mixed", "64-true"],
    "eval_precision": Literal["bf16-mixed"] | None,
    "precision_matmul": Literal["high", "medium"] | None,
    "targets": Sequence[Share],
    "optimized_metric": str | None,
    "ckpt_path": NonEmpty | None,
    "paths.data_dir": NonEmpty,
    "paths.log_dir": NonEmpty,
    "paths.output_dir": NonEmpty,
    "client_store.folder": NonEmpty | None,
    "channels_last": bool,
    "extras.figures": bool,
    "participation.num_clients": Count | None,
    "trainer.num_nodes": Count | None,
    "trainer.devices": Annotated[Any, AfterValidator(_known_devices)],
    "trainer.accelerator": Literal["auto", "cpu", "gpu", "cuda"] | None,
}

#: Groups of settings.
SECTIONS = (
    "paths",
    "extras",
    "trainer",
    "participation",
    "data",
    "model",
    "client",
    "client.optimizer",
)
OPTIONAL_SECTIONS = ("model.lora",)  # null means without


def check(cfg: DictConfig) -> None:
    """Raises Refusal for a setting that cannot work or has no effect, and names its key."""
    try:
        OmegaConf.to_container(cfg, resolve=True)
    except OmegaConfBaseException as error:
        raise Refusal(explained(error)) from None
    _check_sections(cfg)
    _check_ranges(cfg)
    refuse_unread(cfg)
    _check_groups_of_clients(cfg)
    if _searches_without_sweep():
        raise Refusal("hparams_search=… is a sweep: add -m.")


@cache
def _rules() -> dict[str, TypeAdapter]:
    """Pydantic's adapters of RANGES: to make one takes longer than to validate with it."""
    return {key: rule(hint) for key, hint in RANGES.items()}


def _check_ranges(cfg: DictConfig) -> None:
    linked = {
        "trainer.precision": Literal[cfg.precision],
        "trainer.max_steps": Literal[cfg.rounds],
    }
    for key, hint in (_rules() | linked).items():
        value = OmegaConf.select(cfg, key)
        if OmegaConf.is_config(value):
            value = OmegaConf.to_container(value)
        validated(key, value, hint)
    _check_cosine(cfg)


def _check_sections(cfg: DictConfig) -> None:
    """Raises Refusal for a value in place of a group of settings, such as
    ``client.optimizer=adam``, with the option that is meant.
    """
    for key in (*SECTIONS, *OPTIONAL_SECTIONS):
        value = OmegaConf.select(cfg, key)
        if OmegaConf.is_dict(value) or (value is None and key in OPTIONAL_SECTIONS):
            continue
        group = key.partition(".")[0]
        options = sorted(file.stem for file in (CONFIGS / group).glob("*.yaml"))
        hint = suggestion(str(value), options, f"{group}=")
        raise Refusal(f"{key}={value} must be a group of settings{hint}")


def _check_groups_of_clients(cfg: DictConfig) -> None:
    by = OmegaConf.select(cfg, "partition.by")
    if by is not None and OmegaConf.select(cfg, "data.dataset.groups") is None:
        raise Refusal(
            f"partition.by={by}: data={cfg.tags.data} has its own groups: leave partition.by out."
        )


def _searches_without_sweep() -> bool:
    if not HydraConfig.initialized() or in_sweep():
        return False
    return bool(HydraConfig.get().runtime.choices.get("hparams_search"))


def _check_cosine(cfg: DictConfig) -> None:
    """Raises Refusal if the clients' learning rate reaches 0 before the last round."""
    cosine = OmegaConf.select(cfg, "client.lr_cosine")
    if isinstance(cosine, int) and cosine < cfg.rounds:
        raise Refusal(
            f"client.lr_cosine={cosine} is below rounds={cfg.rounds}: the clients' learning rate"
            f" would be 0 from round {cosine + 1}. Set client.lr_cosine={cfg.rounds}."
        )
