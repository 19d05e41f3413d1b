"""Settings against the annotations of constructors: what passes as it is, and the sentence that the rest ends in."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, nan
from typing import Annotated, Any, Literal

import pytest
from hydra.utils import get_class
from omegaconf import OmegaConf
from pydantic import Field

from gcfed.utils.checked import Count, Number, Positive, Share, ShareBelow1, Weight, Whole, checked
from gcfed.utils.instantiate import build

HERE = f"{__name__}.Part"


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
        self.given = (rounds, lam, lr, kind, on, shape, of, stack)
        self.inner = inner


@pytest.mark.parametrize(
    "given", [{"rounds": 2}, {"lam": 1}, {"lam": None}, {"lr": 3}, {"shape": [1, 2]}, {"stack": 3}, {"of": print}]
)
def test_what_fits_is_passed_on_as_it_is(given):
    (value,) = given.values()
    assert any(item is value for item in Part(**given).given)


@pytest.mark.parametrize("value", [nan, inf, -inf, -1, 1.5, True, False, "0.5", "auto", [], {}])
def test_nothing_but_a_number_in_its_range_is_a_share(value):
    with pytest.raises(ValueError, match=r"^lam=.* must be a number from 0 to 1, or null\.$"):
        Part(lam=value)


@pytest.mark.parametrize(
    ("hint", "value", "sentence"),
    [
        (Count, 0, "x=0 must be a whole number of at least 1."),
        (Count, 1.0, "x=1.0 must be a whole number of at least 1."),
        (Whole, 2**63, f"x={2**63} must be a whole number of at least 0, and smaller."),
        (Annotated[int, Field(ge=2, le=32)], 1, "x=1 must be a whole number from 2 to 32."),
        (Annotated[float, Field(gt=0, le=1)], 0, "x=0 must be a number above 0, at most 1."),
        (ShareBelow1 | None, 1, "x=1 must be a number of at least 0, below 1, or null."),
        (Positive, 0, "x=0 must be a number above 0."),
        (Positive, 1e-300, "x=1e-300 must be a number above 0, and at least 1e-18."),  # float32 squares it to 0
        (Number, 1e300, "x=1e+300 must be a number, and smaller."),
        (Count | Literal["auto"], "on", "x=on must be a whole number of at least 1 or auto."),
        (Literal["a", "b", None], "c", "x=c must be a, b or null."),
        (bool, 1, "x=1 must be true or false."),
        (str | None, 3, "x=3 must be text, or null."),
        (Sequence[Share], [0, 2], "x=[0, 2] must be a list, each entry a number from 0 to 1."),
        (Sequence[Share], "01", "x=01 must be a list, each entry a number from 0 to 1."),
        (Callable[[], Any], 3, "x=3 must be a group of settings with a _target_."),
    ],
)
def test_the_sentence_says_what_fits(hint, value, sentence):
    def constructor(x):
        pass

    constructor.__annotations__["x"] = hint
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        checked(constructor)(value)


def test_what_is_unknown_or_missing_is_named():
    with pytest.raises(ValueError, match=r"^lamb=1 is read by nothing: did you mean lam\?$"):
        Part(lamb=1)

    @checked
    @dataclass
    class Required:
        size: Count

    with pytest.raises(ValueError, match=r"^size is missing\.$"):
        Required()
    with pytest.raises(ValueError, match=r"^size=0 must be"):
        Required(0)

    @checked
    def takes_all(size: Count, **settings: Any) -> None: ...

    with pytest.raises(ValueError, match=r"^size is missing\.$"):
        takes_all(other=1)


def test_the_key_of_an_error_is_that_of_the_node_or_of_what_it_follows():
    part = {"_target_": HERE, "rounds": "${rounds}", "lam": 0.5}
    cfg = OmegaConf.create({"rounds": 3, "methods": {"ahead": part | {"inner": [part]}}})
    assert get_class(HERE) is type(build(cfg.methods.ahead).inner[0])
    cfg.methods.ahead.lam = 2
    with pytest.raises(ValueError, match=r"^methods\.ahead\.lam=2 must be a number from 0 to 1"):
        build(cfg.methods.ahead)
    cfg.methods.ahead.lam, cfg.methods.ahead.inner[0].lam = 1, -1
    with pytest.raises(ValueError, match=r"^methods\.ahead\.inner\[0\]\.lam=-1 must be"):
        build(cfg.methods.ahead)
    cfg.methods.ahead.inner[0].lam, cfg.rounds = 1, 0
    with pytest.raises(ValueError, match=r"^rounds=0 must be"):
        build(cfg.methods.ahead)


def test_an_argument_that_is_missing_is_named_by_its_key():
    cfg = OmegaConf.create({"part": {"_target_": f"{__name__}.Needy"}})
    OmegaConf.set_struct(cfg, True)
    with pytest.raises(ValueError, match=r"^part\.rounds is missing\.$"):
        build(cfg.part)


@checked
class Needy:
    def __init__(self, rounds: Count) -> None: ...
