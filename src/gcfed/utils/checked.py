"""Settings are checked where they are declared: by the annotations of what they are given to, with pydantic.

    @checked
    class Proximal(ClientPart):
        def __init__(self, mu: Weight = 0.1) -> None: ...

    Proximal(-1)    # ValueError: mu=-1 must be a number of at least 0.

Nothing is converted: no "3" for 3, no 1.0 for a whole number, no 1 for true. What the config builds is told by its
dotted key, ``methods.proximal.mu=-1 …`` (:mod:`gcfed.utils.instantiate`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

LARGEST = 1e9  # of a number without a bound of its own: its square is finite in float32
SMALLEST = 1e-18  # of what must be above 0: its square is not 0 in float32

Number = Annotated[float, Field(ge=-LARGEST, le=LARGEST)]
Weight = Annotated[float, Field(ge=0, le=LARGEST)]
Positive = Annotated[float, Field(ge=SMALLEST, le=LARGEST)]
Share = Annotated[float, Field(ge=0, le=1)]
PositiveShare = Annotated[float, Field(ge=SMALLEST, le=1)]
ShareBelow1 = Annotated[float, Field(ge=0, lt=1)]
Inside = Annotated[float, Field(gt=0, lt=1)]
Whole = Annotated[int, Field(ge=0, lt=2**63)]
Count = Annotated[int, Field(ge=1, lt=2**63)]

_RULES = ConfigDict(strict=True, allow_inf_nan=False)
_NAMES: dict[Any, str] = {
    int: "a whole number", float: "a number", bool: "true or false", str: "text", dict: "a group of settings",
    Any: "any value", Callable: "a group of settings with a _target_",
}  # fmt: skip
T = TypeVar("T", bound=Callable[..., Any])
V = TypeVar("V")


class SettingError(ValueError):
    """A setting that does not fit: ``name`` of the argument, and the ``rest`` of the sentence."""

    def __init__(self, name: str, rest: str) -> None:
        super().__init__(f"{name}{rest}")
        self.name, self.rest = name, rest


def checked(target: T) -> T:
    """Checks the arguments of a function, or of a class's constructor, against their annotations, before each call.

    Looked at are numbers, texts, switches, choices, lists and dicts of them, and what must be callable.

    Raises:
        SettingError: when called, for an argument that does not fit, is missing or is not known.
    """
    if isinstance(target, type):
        target.__init__ = checked(target.__init__)  # type: ignore[misc]
        return target
    signature = inspect.signature(target)
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    names = {name for name, parameter in signature.parameters.items() if parameter.kind not in kinds}

    @functools.cache
    def rules() -> dict[str, Any]:  # once it is called: schemas cost time
        hints = get_type_hints(target, include_extras=True)
        return {name: hint for name, hint in hints.items() if name in names and _is_plain(hint)}

    @functools.wraps(target)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = bind(signature, args, kwargs)
        for name, hint in rules().items():
            if name in given:
                fits(name, given[name], hint)
        return target(*args, **kwargs)

    return call  # type: ignore[return-value]


def fits(name: str, value: V, hint: Any) -> V:
    """``value``, if it is what the annotation allows: ``fits("seed", 1, Whole)``.

    Raises:
        SettingError: it is not.
    """
    try:
        _adapter(hint).validate_python(value)
    except ValidationError:
        raise SettingError(name, f"={value} must be {in_words(hint)}{_hidden(value)}.") from None
    return value


@functools.cache
def _adapter(hint: Any) -> TypeAdapter:
    return TypeAdapter(hint, config=_RULES)


def _is_plain(hint: Any) -> bool:
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _is_plain(args[0])
    plain = origin in (Literal, Callable) or hint in (int, float, bool, str, NoneType, Any, dict)
    return plain or (bool(args) and all(map(_is_plain, args)))


def bind(signature: inspect.Signature, args: Sequence[Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name.

    Raises:
        SettingError: an argument is not known, or missing.
        TypeError: a call that cannot be for another reason.
    """
    try:
        return signature.bind(*args, **given).arguments
    except TypeError as error:
        takes_all = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
        names = [name for name in signature.parameters if name != "self"]
        for name in () if takes_all else given.keys() - set(names):
            near = get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]}?" if near else f"choose of {', '.join(names) or 'none'}."
            raise SettingError(name, f"={given[name]} is read by nothing: {hint}") from None
        for name, parameter in signature.parameters.items():
            if parameter.default is parameter.empty and name not in given and f"'{name}'" in str(error):
                raise SettingError(name, " is missing.") from None
        raise


def in_words(hint: Any) -> str:
    """What an annotation allows: ``a whole number of at least 1, or null``."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _NAMES[args[0]] + _range_in_words(args[1].metadata)
    if origin is Literal:
        *some, last = ({None: "null", True: "true", False: "false"}.get(arg, str(arg)) for arg in args)
        return f"{', '.join(some)} or {last}" if some else last
    if origin in (Union, UnionType):
        null = ", or null" * (NoneType in args)
        return " or ".join(in_words(arg) for arg in args if arg is not NoneType) + null
    if origin in _NAMES or hint in _NAMES:
        return _NAMES[origin or hint]
    if origin is not None and issubclass(origin, Sequence):
        entries = [in_words(arg) for arg in args if arg is not ...]
        if origin is tuple and ... not in args:
            return f"a list of {len(args)}: {'; '.join(entries)}"
        return f"a list, each entry {entries[0]}"
    return getattr(hint, "__name__", str(hint))


def _range_in_words(bounds: Sequence[Any]) -> str:
    """The bounds that a reader needs, not those that only keep numbers finite."""
    signs = ("ge", "gt", "le", "lt")
    found = {sign: getattr(bound, sign) for bound in bounds for sign in signs if hasattr(bound, sign)}
    if found.get("ge") == SMALLEST:
        found["gt"] = 0
    low, high = found.get("gt", found.get("ge", -LARGEST)), found.get("le", found.get("lt", LARGEST))
    if low <= -LARGEST:
        return f" of at most {high:,}" if high < LARGEST else ""
    if high < LARGEST and "le" in found and "gt" not in found:
        return f" from {low:,} to {high:,}"
    above = f" above {low:,}" if "gt" in found else f" of at least {low:,}"
    below = f", {'at most' if 'le' in found else 'below'} {high:,}" if high < LARGEST else ""
    return above + below


def _hidden(value: Any) -> str:
    """The bound that words leave out, where it is what a value does not keep."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ""
    if 0 < value < SMALLEST:
        return f", and at least {SMALLEST:g}"
    return ", and smaller" if LARGEST < value < float("inf") else ""
