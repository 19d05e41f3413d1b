"""Validates arguments against the annotations of the function that takes them, by pydantic in strict mode.

    @checked
    class Proximal(ClientPart):
        def __init__(self, mu: Weight = 0.1) -> None: ...

    Proximal(-1)    # ValueError: mu=-1: Input should be greater than or equal to 0

Strict: "3" is not a number, 1.0 is not an integer, and 1 is not true. :mod:`gcfed.utils.instantiate` adds the key.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Annotated, Any, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, validate_call

# Most functions are imported and never called: pydantic builds a function's rules at its first call.
STRICT = ConfigDict(strict=True, allow_inf_nan=False, arbitrary_types_allowed=True, defer_build=True)
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

T = TypeVar("T", bound=Callable[..., Any])
V = TypeVar("V")


class SettingError(ValueError):
    """An argument that is refused. ``name`` is the argument's, ``rest`` the text after it."""

    def __init__(self, name: str, rest: str) -> None:
        super().__init__(f"{name}{rest}")
        self.name, self.rest = name, rest


def checked(target: T) -> T:
    """Lets a function, or a class's constructor, raise SettingError for arguments that its annotations do not allow."""
    if isinstance(target, type):
        target.__init__ = checked(target.__init__)  # type: ignore[misc]
        return target
    validated = validate_call(config=STRICT)(target)

    @wraps(target)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return validated(*args, **kwargs)
        except ValidationError as error:
            names, first = [*signature(target).parameters], error.errors()[0]["loc"][0]
            name = names[first] if isinstance(first, int) and first < len(names) else str(first)
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            value = f"={given[name]}" if name in given else ""
            raise SettingError(name, f"{value}: {_reasons(error, first)}") from None

    return call  # type: ignore[return-value]


def fits(name: str, value: V, hint: Any) -> V:
    """``value``, if the annotation allows it: ``fits("seed", 1, Whole)``; else raises SettingError."""
    try:
        TypeAdapter(hint, config=STRICT).validate_python(value)
    except ValidationError as error:
        raise SettingError(name, f"={value}: {_reasons(error)}") from None
    return value


def _reasons(error: ValidationError, argument: str | int | None = None) -> str:
    """Why a value is refused, in one line; of a call, why this argument is."""
    found = (e["msg"] for e in error.errors() if argument is None or e["loc"][0] == argument)
    return " or ".join(dict.fromkeys(found))
