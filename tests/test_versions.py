"""The functions of Hydra and OmegaConf that newer versions rename or deprecate."""

import pytest
from omegaconf import OmegaConf

from gcfed.utils.resolvers import base_of, register


@pytest.mark.parametrize(
    ("version", "arguments"),
    [
        ("1.3.8", {"version_base": None}),
        ("1.3.10", {"version_base": None}),
        ("1.4.0rc3", {}),
        ("1.10.0", {}),
        ("2.0.0.dev1", {}),
    ],
)
def test_hydra_gets_version_base_until_1_4(version, arguments):
    assert base_of(version) == arguments


def test_a_resolver_can_be_replaced_without_a_warning(recwarn):
    for number in (1, 2):
        register("replaced_in_a_test", lambda number=number: number, replace=True)
    try:
        assert OmegaConf.create({"value": "${replaced_in_a_test:}"}).value == 2
    finally:
        OmegaConf.clear_resolver("replaced_in_a_test")
    assert not recwarn.list
