"""Arguments are checked against the annotations of the function that takes them, by pydantic in strict mode.

    @checked
    class Proximal(ClientPart):
        def __init__(self, mu: Weight = 0.1) -> None: ...

    Proximal(-1)    # ValueError: mu=-1: Input should be greater than or equal to 0

Nothing is converted: "3" is no number, 1.0 no integer, and 1 not true. Not ``pydantic.validate_call``: functions get
the values as they were given, and networks and tensors are not looked at. :mod:`gcfed.utils.instantiate` adds the key.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import NoneType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

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
    signature = inspect.signature(target)

    @functools.cache  # at the first call: most functions are imported and never called
    def rules() -> dict[str, Any]:
        return {name: hint for name, hint in get_type_hints(target, include_extras=True).items() if _is_plain(hint)}

    @functools.wraps(target)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = bind(signature, args, kwargs)
        for name in rules().keys() & given.keys():
            fits(name, given[name], rules()[name])
        return target(*args, **kwargs)

    return call  # type: ignore[return-value]


def bind(signature: inspect.Signature, args: Sequence[Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name. Raises SettingError if one is unknown or missing."""
    try:
        return signature.bind(*args, **given).arguments
    except TypeError as error:
        name, known = str(error).split("'")[1:2], [name for name in signature.parameters if name != "self"]
        raise SettingError("".join(name), f": {error}; there are {', '.join(known)}.") from None


def fits(name: str, value: V, hint: Any) -> V:
    """``value``, if the annotation allows it: ``fits("seed", 1, Whole)``; else raises SettingError."""
    try:
        _adapter(hint).validate_python(value)
    except ValidationError as error:
        raise SettingError(name, f"={value}: {' or '.join(dict.fromkeys(e['msg'] for e in error.errors()))}") from None
    return value


@functools.cache
def _adapter(hint: Any) -> TypeAdapter:
    return TypeAdapter(hint, config=ConfigDict(strict=True, allow_inf_nan=False))


def _is_plain(hint: Any) -> bool:
    """Whether an annotation is of numbers, text, choices, and lists and dicts of these; or of a callable."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _is_plain(args[0])
    plain = origin in (Literal, Callable) or hint in (int, float, bool, str, NoneType, Any, dict)
    return plain or (bool(args) and all(map(_is_plain, args)))
