"""Validates arguments against the annotations of the function that takes them, by pydantic in
strict mode.

    @checked
    class Proximal(ClientPart):
        def __init__(self, mu: Weight = 0.1) -> None: ...

    Proximal(-1)    # SettingError: mu=-1 must be at least 0.

Strict: "3" is not a number, 1.0 is not an integer, and 1 is not true.

:mod:`gcfed.utils.instantiate` adds the key.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from functools import wraps
from inspect import BoundArguments, signature
from typing import Annotated, Any, TypeVar, get_type_hints

from pydantic import ConfigDict, Field, PydanticUserError, TypeAdapter, ValidationError
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
NonEmpty = Annotated[str, Field(min_length=1)]  # an empty path would be the working folder
Whole = Annotated[int, Field(ge=0, lt=2**63)]
Count = Annotated[int, Field(ge=1, lt=2**63)]

A_LIST = "a list, such as [{value}]"
#: Pydantic's name of an error → what the value must be. Braces hold names of its context.
EXPECTED = {
    "bool_type": "true or false",
    "callable_type": "a class or function, which _target_ names",
    "dict_type": "keys with values",
    "finite_number": "a finite number",
    "float_type": "a number",
    "greater_than": "above {gt:g}",
    "greater_than_equal": "at least {ge:g}",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "less_than": "below {lt:g}",
    "less_than_equal": "at most {le:g}",
    "list_type": A_LIST,
    "literal_error": "{expected}",
    "sequence_str": A_LIST,
    "string_pattern_mismatch": "a text of the form {pattern}",
    "string_too_short": "a text with letters",
    "string_type": "a text",
    "tuple_type": A_LIST,
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
        raise SettingError(name, sentence(error.errors())) from None


def refuse_wrong_types(target: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Raises SettingError for the first argument whose value cannot be of its annotated type, where
    ``target`` belongs to another package. What pydantic cannot read is left out.
    """
    function = target.__init__ if isinstance(target, type) else target  # type: ignore[misc]
    try:
        hints = get_type_hints(function)
    except (NameError, TypeError):
        return
    for name in arguments.keys() & hints.keys():
        try:
            adapter = TypeAdapter(hints[name], config=ConfigDict(arbitrary_types_allowed=True))
        except PydanticUserError:
            continue
        validated(name, arguments[name], adapter)


def sentence(findings: Sequence[ErrorDetails]) -> str:
    """What pydantic finds about one value, as the end of a sentence: ``=2.5 must be a whole
    number.``, ``.0=2 must be at most 1.`` for the first entry of a list.

    A value that may have one of several types has a finding for each of them.
    """
    first = findings[0]
    place = [part for part in first["loc"] if isinstance(part, int)]
    entry = "".join(f".{index}" for index in place)
    value = f"{entry}={as_typed(first['input'])}"
    expected = dict.fromkeys(filter(None, map(_expected, findings)))
    if expected:
        return f"{value} must be {' or '.join(expected)}{_as_share(first)}."
    # a validator of ours, or a rare type
    return f"{value}: {first['msg'].removeprefix('Value error, ')}"


def _expected(finding: ErrorDetails) -> str:
    """What the value must be, in words; "" if there are none."""
    limits = finding.get("ctx", {})
    given = finding["input"]
    value = given if isinstance(given, str | int | float) else "1,2"
    if limits.get("ge") == SMALLEST:
        return "above 0"
    if limits.get("class") == "Sequence":
        return A_LIST.format(value=value)
    return EXPECTED.get(finding["type"], "").format(**limits, value=value)


def _as_share(finding: ErrorDetails) -> str:
    """`` (50 % is 0.5)``, if a share was given in percent, as 50 or as 50%; else ""."""
    limits = finding.get("ctx", {})
    given = finding["input"]
    if isinstance(given, str) and finding["type"] == "float_type":
        percent = re.fullmatch(r"(\d+(?:\.\d+)?) ?%", given)
        return f" ({percent[1]} % is {float(percent[1]) / 100:g})" if percent else ""
    is_share = limits.get("lt", limits.get("le")) == 1
    if is_share and isinstance(given, int | float) and 1 < given <= 100:
        return f" ({given:g} % is {given / 100:g})"
    return ""


def as_typed(value: Any) -> str:
    """A value as a user writes it in YAML."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
