"""Settings against the annotations of constructors: what passes as it is, and the key that an error names."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, nan
from typing import Any, Literal

import pytest
from omegaconf import OmegaConf

from gcfed.utils.checked import Count, Positive, Share, ShareBelow1, Weight, checked
from gcfed.utils.instantiate import build


@checked
class Part:
    def __init__(
        self,
        rounds: Count = 1,
        *,
        lam: Share | None = None,
        lr: Positive = 0.1,
        kind: Literal["uniform", "samples"] = "uniform",
        on: bool = False,
        shape: Sequence[Count] = (),
        of: Callable[[], Any] | None = None,
        stack: Count | Literal["auto"] = "auto",
        inner: Any = None,
        pair: tuple[ShareBelow1, Weight] = (0, 0),
    ) -> None:
        self.given = (rounds, lam, lr, kind, on, shape, of, stack, pair)
        self.inner = inner


@pytest.mark.parametrize(
    "given", [{"rounds": 2}, {"lam": 1}, {"lam": None}, {"lr": 3}, {"shape": [1, 2]}, {"stack": 3}, {"of": print}]
)
def test_valid_values_are_passed_on_unchanged(given):
    (value,) = given.values()
    assert any(item is value for item in Part(**given).given)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("lam", value) for value in (nan, inf, -inf, -1, 1.5, True, False, "0.5", "auto", [], {})),
        ("rounds", 0), ("rounds", 1.0), ("rounds", 2**63), ("lr", 0), ("lr", 1e-300), ("lr", 1e300), ("kind", "x"),
        ("on", 1), ("shape", [0, 2]), ("shape", "01"), ("of", 3), ("stack", "on"), ("pair", (1, 0)),
    ],
)  # fmt: skip
def test_nothing_is_converted_and_the_argument_is_named(name, value):
    with pytest.raises(ValueError) as error:  # noqa: PT011
        Part(**{name: value})
    assert str(error.value).startswith(f"{name}={value}: ")


def test_unknown_and_missing_arguments_are_named():
    with pytest.raises(ValueError, match=r"^lamb=1: there is no such argument; did you mean lam\?$"):
        Part(lamb=1)

    @checked
    @dataclass
    class Required:
        size: Count

    @checked
    def takes_all(size: Count, **settings: Any) -> None: ...

    for call in (Required, lambda: takes_all(other=1)):
        with pytest.raises(ValueError, match=r"^size is missing\.$"):
            call()


def test_an_error_names_the_key_of_the_node_or_the_key_that_its_value_follows():
    part = {"_target_": f"{__name__}.Part", "rounds": "${rounds}", "lam": 0.5}
    cfg = OmegaConf.create({"rounds": 3, "methods": {"ahead": part | {"inner": [part]}}})
    assert type(build(cfg.methods.ahead).inner[0]) is Part
    for key, value in (("methods.ahead.lam", 2), ("methods.ahead.inner[0].lam", -1), ("rounds", 0)):
        wrong = cfg.copy()
        OmegaConf.update(wrong, key, value)
        with pytest.raises(ValueError) as error:  # noqa: PT011
            build(wrong.methods.ahead)
        assert str(error.value).startswith(f"{key}={value}: ")
    for target in ("gcfed.nowhere.Part", f"{__name__}.Parts"):
        with pytest.raises(ValueError, match=rf"^part: ImportError: Error loading '{target}'"):
            build(OmegaConf.create({"part": {"_target_": target}}).part)
