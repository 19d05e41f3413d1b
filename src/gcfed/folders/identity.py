"""The identity of a run: the keys of a config that change what a round computes.

Resuming, repetitions in a report and cells of a paper's table compare identities.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from gcfed.utils.resolvers import method_name

Scalar = bool | int | float | str

#: Keys, with all below them, that do not change what a round computes: names, folders, logs,
#: measurements, pictures, the number of rounds and tests, and devices.
NEUTRAL = (
    "name",
    "tags",
    "labels",
    "paths",
    "hydra",
    "logger",
    "callbacks",
    "extras",
    "metrics",
    "targets",
    "rounds",
    "eval_every",
    "ckpt_path",
    "optimized_metric",
    "trainer",
    "client_store",
    "client.stack",
    "client.graphs",
    "data.eval_batch_size",
    "federation",
    "data.dataset.data_dir",
    "data.dataset.download",
    "participation.faults._target_",
)
#: Values that other sections repeat under the same name, as ``data.seed: ${seed}``.
REPEATED = ("seed", "rounds")
#: Sections whose class is a hyperparameter.
CLASSES = (
    "aggregator",
    "attack",
    "client.optimizer",
    "partition",
    "privacy",
    "quantization",
    "server",
    "task",
)
_INGREDIENT = re.compile(r"(gc|attack|privacy|quantization|methods\.[^.]+)\.")
_NEUTRAL = re.compile(rf"({'|'.join(map(re.escape, NEUTRAL))})([./]|$)")


def changes_results(key: str) -> bool:
    """Whether a dotted key, or a group such as ``hydra/launcher``, changes what a
    round computes.
    """
    return not _NEUTRAL.match(key)


def key_of(override: str) -> str:
    return override.lstrip("+~").split("=", 1)[0]


def changing_results(overrides: Iterable[str]) -> list[str]:
    """The overrides that change results, sorted."""
    return sorted(override for override in overrides if changes_results(key_of(override)))


def leaves(cfg: DictConfig | Mapping[str, Any]) -> dict[str, Any]:
    """The values that change results, of a composed config or a run's ``config.yaml``: dotted key →
    plain value, sorted.

    ``1.0`` becomes 1. Nulls are left out, and so are sections whose ``_target_`` is null and
    ingredients without one (after ``~gc``).
    """
    if isinstance(cfg, DictConfig):
        cfg = _changing_sections(cfg)
    values = dict(_flat(cfg))
    changing = {}
    for key, value in sorted(values.items()):
        section, _, name = key.rpartition(".")
        repeats = section and name in REPEATED and value == values.get(name)
        if value is not None and changes_results(key) and not repeats:
            changing[key] = _plain(value)
    return changing


def _changing_sections(cfg: DictConfig) -> dict[str, Any]:
    """The resolved sections that change results; values of others may not be known yet."""
    sections = {}
    for key in map(str, cfg):
        if changes_results(key) or key in REPEATED:
            value = cfg[key]
            if OmegaConf.is_config(value):
                value = OmegaConf.to_container(value, resolve=True)
            sections[key] = value
    return sections


def _flat(tree: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    absent = None if _INGREDIENT.fullmatch(prefix) else ""
    if tree.get("_target_", absent) is None:  # an absent ingredient, which may have left defaults
        return
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def digest(values: Mapping[str, Any], without: str | None = None) -> str:
    """Twelve hexadecimal digits of the SHA-256 of :func:`leaves`, without one key."""
    values = {key: value for key, value in values.items() if key != without}
    text = json.dumps(values, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def identity(cfg: DictConfig | Mapping[str, Any]) -> str:
    """Equal for two configs if every round computes the same."""
    return digest(leaves(cfg))


def differences(there: Mapping[str, Any], here: Mapping[str, Any], most: int = 6) -> str:
    """How the :func:`leaves` of two configs differ: ``client.epochs is 5 there, 2 here``; "" if
    they do not. At most ``most`` keys are listed.
    """
    listed = []
    for key in sorted(there.keys() | here.keys()):
        if there.get(key) != here.get(key):
            listed.append(f"{key} is {there.get(key)!r} there, {here.get(key)!r} here")
    if len(listed) > most:
        listed[most:] = [f"and {len(listed) - most} more"]
    return "; ".join(listed)


def hyperparameters(cfg: DictConfig) -> dict[str, Scalar]:
    """Hyperparameters for loggers: the chosen options and the values that change results, by key.

    Lists become text. ``method`` is the algorithm with its GC, by one name for equal choices.
    """
    table: dict[str, Any] = {key: cfg.tags[key] for key in cfg.tags} | {"rounds": cfg.rounds}
    if "algorithm" in table:
        table["method"] = method_name(table.pop("algorithm"), table.get("gc") or "none")
    changing = leaves(cfg)
    has_clock = "participation.clock.step" in changing
    for key, value in changing.items():
        is_off = key.startswith("participation.clock.") and not has_clock
        if is_off or key == "participation.sampler.per_round":  # participation.per_round
            continue
        section = key.removesuffix("._target_")
        if section in CLASSES:
            table[section] = str(value).rpartition(".")[2]
        elif "._" not in key and not key.startswith(("data.", "model.", "task")):
            table[key] = value
    return {key: value if isinstance(value, Scalar) else str(value) for key, value in table.items()}
