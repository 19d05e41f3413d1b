"""``trainer.devices`` is a number of devices or a list of GPUs."""

import pytest
from conftest import refuses

from gcfed.check import RANGES
from gcfed.utils.checked import validated

KEY = "trainer.devices"


@pytest.mark.parametrize("devices", ["auto", 1, 8, -1, "2", "-1", "0,1", [0], [1, 3]])
def test_valid_devices_are_passed_on(devices):
    assert validated(KEY, devices, RANGES[KEY]) == devices


@pytest.mark.parametrize(
    "devices",
    [
        0,
        -2,
        "0",
        "-2",
        "abc",
        "",
        "1,",
        "0,0",
        "0,-1",
        [],
        [0, 0],
        [-1],
        ["0"],
        [[0]],
        1.0,
        True,
        None,
    ],
)
def test_other_devices_are_refused_with_a_remedy_and_without_a_pattern(devices):
    with refuses(r"^trainer\.devices=.*: set auto, a number of devices from 1 on") as refusal:
        validated(KEY, devices, RANGES[KEY])
    assert "^" not in str(refusal.value)
