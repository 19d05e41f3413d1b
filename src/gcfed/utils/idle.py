"""Refuses words of the user that have no effect with the other settings."""

import logging
import re
from collections.abc import Sequence
from functools import cache

from omegaconf import DictConfig, OmegaConf

from gcfed.utils.keys import options_of
from gcfed.utils.refusal import Refusal

log = logging.getLogger(__name__)

SEARCHED = "optimized_metric"  # the measure of a search
#: Groups of one object, which the option none switches off.
SWITCHES = ("attack", "federation", "gc", "privacy", "quantization")
#: Keys that have no effect with certain values of another key → that key and these values.
IDLE = {
    r"gc\.(lam|boundary|local_rounds)": ("gc.local", (False,)),
    r"gc\.server_boundary": ("gc.server", (False,)),
    r"participation\.clock\.day": ("participation.clock.available", (None,)),
    r"participation\.sampler\.penalty": ("participation.sampler.preferred", (None,)),
    r"methods\.fedbuff\.a": ("methods.fedbuff.weight", ("constant",)),
    r"methods\.fedbuff\.b": ("methods.fedbuff.weight", ("constant", "polynomial")),
    r"methods\.fedasync\.a": ("methods.fedasync.weight", ("constant",)),
    r"methods\.fedasync\.b": ("methods.fedasync.weight", ("constant", "polynomial")),
    r"methods\.fedreg\.eta_s": ("methods.fedreg.pseudo", (False,)),
    r"methods\.fedreg\.eta_p": ("methods.fedreg.perturbed", (False,)),
}


def refuse_idle(cfg: DictConfig, words: Sequence[str], *, searches: bool) -> None:
    """Raises Refusal if the user set a key of a group that is switched off: ``gc.boundary`` without
    GC; a key that has no effect with the present value of another one (:data:`IDLE`); or
    ``optimized_metric`` without a search.

    A config file may set such a key, as models do for the case that there is GC.
    """
    if not searches:
        refuse_measure_of_search(words)
    for word in words:
        why = why_without_effect(cfg, word)
        if why:
            raise Refusal(why)
        steps = OmegaConf.select(cfg, "client.steps")
        if word.lstrip("+").startswith("client.epochs=") and steps is not None:
            _warn_of_epochs(word, steps)


def refuse_measure_of_search(words: Sequence[str]) -> None:
    """Raises Refusal if the user set ``optimized_metric``, because there is no search."""
    for word in words:
        key, _, value = word.removeprefix("++").partition("=")
        if key == SEARCHED and value != "null":
            raise Refusal(
                f"{word} has no effect without a search, such as -m hparams_search=digits_optuna."
            )


def why_without_effect(cfg: DictConfig, word: str) -> str:
    """The sentence about an override that has no effect; empty for others."""
    key, _, _ = word.lstrip("+").partition("=")
    return why_switched_off(cfg, key) or _why_idle(cfg, key)


def why_switched_off(cfg: DictConfig, key: str) -> str:
    """The sentence about a key of a group that is switched off; empty for other keys."""
    group = key.partition(".")[0]
    if group not in SWITCHES or group == key:
        return ""
    node = cfg.get(group)
    if not OmegaConf.is_dict(node) or node.get("_target_"):
        return ""
    choices = [f"{group}={option}" for option in options_of(group) if option != "none"]
    return f"{key} has no effect without {' or '.join(choices)}."


def _why_idle(cfg: DictConfig, key: str) -> str:
    """The sentence about a key of :data:`IDLE` that has no effect; empty for other keys."""
    for keys, (other, idle_values) in IDLE.items():
        if not re.fullmatch(keys, key):
            continue
        value = OmegaConf.select(cfg, other)
        if value in idle_values:
            shown = {None: "null", False: "false"}.get(value, value)
            return f"{key} has no effect with {other}={shown}: change {other}, or leave it out."
    return ""


@cache  # a comparison composes many configs
def _warn_of_epochs(word: str, steps: int) -> None:
    """Does not refuse: FedGC sets ``client.steps``, and a comparison sets all methods' epochs."""
    log.warning(
        "%s has no effect with client.steps=%s, which this algorithm, this experiment or you have"
        " set: client.steps=null trains epochs",
        word,
        steps,
    )
