"""The defaults of each class equal those of its config group."""

import inspect

import pytest
from hydra.utils import get_object
from omegaconf import OmegaConf

from gcfed.utils.resolvers import CONFIGS

GROUPS = (
    "aggregator",
    "algorithm",
    "attack",
    "client",
    "gc",
    "metrics",
    "partition",
    "privacy",
    "quantization",
)
# These classes occur in several files, and have the defaults of another file.
OTHERS = {
    "aggregator/bulyan: hostile",
    "aggregator/weighted_mean: weighting",
    "algorithm/fedacg: mu",
    "algorithm/fedbabu: head_share",
    "algorithm/lgfedavg: keep",
    "attack/sign_flip: factor",
    *(
        f"algorithm/{name}: {key}"
        for name in (
            "fedgamma",
            "fedgloss",
            "fedlesam",
            "fedlesam_d",
            "fedlesam_s",
            "fedspeed",
            "mofedsam",
        )
        for key in ("rho", "direction")
    ),
}


def settings(node):
    """(key, value, default) of each setting of our classes without an interpolation."""
    for value in node.values():
        if isinstance(value, dict):
            yield from settings(value)
    if str(node.get("_target_")).startswith("gcfed."):
        parameters = inspect.signature(get_object(node["_target_"])).parameters
        for key in node.keys() & parameters.keys():
            if "$" not in str(node[key]) and parameters[key].default is not inspect.Parameter.empty:
                yield key, node[key], parameters[key].default


@pytest.mark.parametrize("group", GROUPS)
def test_defaults_of_classes_and_groups_agree(group):
    found = 0
    for path in sorted((CONFIGS / group).glob("*.yaml")):
        for key, value, default in settings(OmegaConf.to_container(OmegaConf.load(path))):
            found += 1
            if f"{group}/{path.stem}: {key}" not in OTHERS:
                assert value == (list(default) if isinstance(default, tuple) else default), (
                    f"{path}: {key}"
                )
    assert found
