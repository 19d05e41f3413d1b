"""Constructors validate arguments against their annotations, and errors name the key."""

import pkgutil
from collections.abc import Callable, Sequence
from importlib import import_module
from inspect import isclass
from math import inf, nan
from os import PathLike
from pathlib import Path
from typing import Any, Literal, get_type_hints

import pytest
from omegaconf import OmegaConf
from pydantic import TypeAdapter, ValidationError

import gcfed
from gcfed.utils.checked import Count, Positive, Share, ShareBelow1, Weight, checked
from gcfed.utils.instantiate import build


@checked
class Part:
    def __init__(
        self,
        rounds: Count,
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
    "given", [{"lam": 1.0}, {"lam": None}, {"shape": [1]}, {"stack": 3}, {"of": print}]
)
def test_valid_values_are_passed_on_unchanged(given):
    (value,) = given.values()
    assert any(item == value and type(item) is type(value) for item in Part(2, **given).given)


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        *(("lam", value, f"lam={value} must be a finite number.") for value in (nan, inf)),
        ("lam", -1, "lam=-1 must be at least 0."),
        ("lam", 1.5, "lam=1.5 must be at most 1 (1.5 % is 0.015)."),
        ("lam", 50, "lam=50 must be at most 1 (50 % is 0.5)."),
        ("lam", "50%", "lam=50% must be a number (50 % is 0.5)."),
        ("lam", "2.5 %", "lam=2.5 % must be a number (2.5 % is 0.025)."),
        ("lam", 300, "lam=300 must be at most 1."),
        ("pair", (50, 0), "pair.0=50 must be below 1 (50 % is 0.5)."),
        ("lam", True, "lam=true must be a number."),
        ("lam", "0.5", "lam=0.5 must be a number."),
        ("lam", [], "lam=[] must be a number."),
        ("rounds", 0, "rounds=0 must be at least 1."),
        ("rounds", 1.0, "rounds=1.0 must be a whole number."),
        ("rounds", None, "rounds=null must be a whole number."),
        ("lr", 0, "lr=0 must be above 0."),
        ("lr", 1e300, "lr=1e+300 must be at most 1e+09."),
        ("kind", "x", "kind=x must be 'uniform' or 'samples'."),
        ("on", 1, "on=1 must be true or false."),
        ("shape", [0, 2], "shape.0=0 must be at least 1."),
        ("shape", "12", "shape=12 must be a list, such as [12]."),
        ("of", 3, "of=3 must be a class or function, which _target_ names."),
        ("stack", "on", "stack=on must be a whole number or 'auto'."),
        ("pair", (1, 0), "pair.0=1 must be below 1."),
    ],
)
def test_invalid_values_are_not_converted_and_one_sentence_names_them(name, value, sentence):
    with pytest.raises(ValueError) as error:  # noqa: PT011
        Part(**{"rounds": 1, name: value})
    assert str(error.value) == sentence


class OfAnotherPackage:
    """Checks nothing itself."""

    def __init__(self, size: int = 1, path: str | PathLike = ".") -> None:
        self.grown = size + 1
        self.path = Path(path)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"size": "wide"}, "theirs.size=wide must be a whole number."),
        ({"path": 3}, "theirs.path=3 must be a text"),
    ],
)
def test_an_error_within_another_packages_constructor_names_the_argument(given, sentence):
    node = OmegaConf.create({"theirs": {"_target_": f"{__name__}.OfAnotherPackage"} | given})
    with pytest.raises(ValueError) as error:  # noqa: PT011
        build(node.theirs)
    assert str(error.value).startswith(sentence)


def test_an_error_names_the_key():
    part = {"_target_": f"{__name__}.Part", "rounds": 3, "lam": 0.5}
    cfg = OmegaConf.create({"ahead": part | {"inner": [part]}})
    assert type(build(cfg.ahead).inner[0]) is Part
    for key, value, message in (
        ("ahead.lam", 2, "ahead.lam=2 must be at most 1 (2 % is 0.02)."),
        ("ahead.inner[0].lam", -1, "ahead.inner[0].lam=-1 must be at least 0."),
        ("ahead.lamb", 1, "ahead.lamb: got an unexpected keyword argument 'lamb'"),
        (
            "ahead",
            {"_target_": f"{__name__}.Part"},
            "ahead.rounds: missing a required argument: 'rounds'",
        ),
        (
            "ahead._target_",
            "gcfed.nowhere.Part",
            "ahead: ImportError: Error loading 'gcfed.nowhere.Part'",
        ),
    ):
        wrong = cfg.copy()
        OmegaConf.update(wrong, key, value, merge=False)
        with pytest.raises(ValueError) as error:  # noqa: PT011
            build(wrong.ahead)
        assert str(error.value).startswith(message)


def test_an_error_of_pydantic_within_the_function_is_not_caught():
    @checked
    def use(rounds: Count) -> None:
        TypeAdapter(int).validate_python("many")

    with pytest.raises(ValidationError, match="many"):
        use(1)


def constructors():
    """Each class of ours that has a constructor of its own."""
    for info in pkgutil.walk_packages(gcfed.__path__, "gcfed."):
        for kind in vars(import_module(info.name)).values():
            if isclass(kind) and kind.__module__ == info.name and "__init__" in vars(kind):
                yield kind


def has_rules(kind):
    """Whether an argument has a rule, such as ``Count``."""
    try:
        hints = get_type_hints(kind.__init__, include_extras=True)
    except NameError:  # types of an import that only type checkers make: checked() refuses them
        return False
    return any("Annotated" in str(hint) for hint in hints.values())


def test_each_constructor_with_rules_checks_them():
    """A dataclass writes a new constructor, which loses the check of its base class."""
    with_rules = [kind for kind in constructors() if has_rules(kind)]
    assert len(with_rules) > 50
    assert [kind for kind in with_rules if not hasattr(kind.__init__, "__wrapped__")] == []
