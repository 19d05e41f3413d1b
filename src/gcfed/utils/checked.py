"""Validates arguments against the annotations of the function that takes them, by pydantic in
strict mode.

    @checked
    class Proximal(ClientPart):
        def __init__(self, mu: Weight = 0.1) -> None: ...

    Proximal(-1)    # ValueError: mu=-1: Input should be greater than or equal to 0

Strict: "3" is not a number, 1.0 is not an integer, and 1 is not true.
    :mod:`gcfed.utils.instantiate` adds the key.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import is_dataclass
from functools import wraps
from inspect import BoundArguments, signature
from typing import Annotated, Any, TypeVar, get_type_hints

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from gcfed.utils.refusal import Refusal

STRICT = ConfigDict(strict=True, allow_inf_nan=False, arbitrary_types_allowed=True)
LARGEST = 1e9  # the largest number without a bound of its own: its square is finite in float32
SMALLEST = 1e-18  # the smallest number above 0: its square is not 0 in float32

Number = Annotated[float, Field(ge=-LARGEST, le=LARGEST)]
Weight = Annotated[float, Field(ge=0, le=LARGEST)]
Positive = Annotated[float, Field(ge=SMALLEST, le=LARGEST)]
Share = Annotated[float, Field(ge=0, le=1)]
PositiveShare = Annotated[float, Field(ge=SMALLEST, le=1)]
ShareBelow1 = Annotated[float, Field(ge=0, lt=1)]
Inside = Annotated[float, Field(gt=0, lt=1)]
Whole = Annotated[int, Field(ge=0, lt=2**63)]
Count = Annotated[int, Field(ge=1, lt=2**63)]

A_LIST = "Input should be a list, such as [1,2]"
#: Pydantic's sentences that speak of Python → ours.
REASONS = {
    "'str' instances are not allowed as a Sequence value": A_LIST,
    "Input should be an instance of Sequence": A_LIST,
    "Input should be callable": "Input should be a class or function, which _target_ names",
}

T = TypeVar("T", bound=Callable[..., Any])


class SettingError(Refusal):
    """An argument that is refused. ``name`` is the argument's, ``rest`` the text after it."""

    def __init__(self, name: str, rest: str) -> None:
        super().__init__(f"{name}{rest}")
        self.name = name
        self.rest = rest


def checked(target: T) -> T:
    """Lets a function, or a class's constructor, raise SettingError for arguments that its
    annotations do not allow.
    """
    if isinstance(target, type):
        target.__init__ = checked(target.__init__)  # type: ignore[misc]
        return target
    rules: dict[str, TypeAdapter] = {}

    @wraps(target)
    def call(*args: Any, **kwargs: Any) -> Any:
        # built at the first call, because most functions are imported and never called
        if not rules:
            rules.update(_rules_of(target))
        given = _bound(target, args, kwargs)
        for name in given.arguments.keys() & rules.keys():
            given.arguments[name] = validated(name, given.arguments[name], rules[name])
        return target(*given.args, **given.kwargs)

    return call  # type: ignore[return-value]


def _rules_of(target: Callable[..., Any]) -> dict[str, TypeAdapter]:
    hints = get_type_hints(target, include_extras=True)
    hints.pop("return", None)
    return {name: rule(hint) for name, hint in hints.items()}


def _bound(
    target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> BoundArguments:
    try:
        return signature(target).bind(*args, **kwargs)
    except TypeError as error:  # missing a required argument: 'name', or got an unexpected one
        name = f"{error}'".split("'")[1]
        raise SettingError(name, f": {error}") from None


def rule(hint: Any) -> TypeAdapter:
    # a dataclass has its own configuration
    return TypeAdapter(hint, config=None if is_dataclass(hint) else STRICT)


def validated(name: str, value: Any, hint: Any) -> Any:
    """``value``, if the annotation allows it: ``validated("seed", 1, Whole)``; else raises
    SettingError.
    """
    adapter = hint if isinstance(hint, TypeAdapter) else rule(hint)
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        reasons = dict.fromkeys(_reason(finding) for finding in error.errors())
        raise SettingError(name, f"={value}: {' or '.join(reasons)}") from None


def _reason(finding: ErrorDetails) -> str:
    """Pydantic's sentence about a value. One raised by a validator of ours comes without prefix."""
    if finding.get("ctx", {}).get("ge") == SMALLEST:
        return "Input should be greater than 0"
    message = finding["msg"].removeprefix("Value error, ")
    return REASONS.get(message, message)
