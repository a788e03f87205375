"""Fields of configs from elsewhere, checked as they are read."""

import math
from collections.abc import Mapping
from typing import Any


def whole(name: str, value: Any, least: int | None = 1, most: int | None = None, *, place: str = "config.json") -> int:
    """A whole number within these bounds; ValueError names the place, the field, its value and what was expected."""
    low, high = (-math.inf if least is None else least), (math.inf if most is None else most)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        bounds = f" of at least {least}" if most is None else f" within {least}..{most}"
        raise refusal(place, name, value, "a whole number" + ("" if least is None else bounds))
    return int(value)


def number(name: str, value: Any, *, place: str = "config.json") -> float:
    """A finite number of at least 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise refusal(place, name, value, "a number of at least 0")
    return float(value)


def given(config: Mapping[str, Any], name: str, default: Any) -> Any:
    """The value of a field; absent and null are the default."""
    value = config.get(name)
    return default if value is None else value


def flag(config: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """True or false; absent and null are the default."""
    value = given(config, name, default)
    if value not in (False, True):
        raise refusal("config.json", name, value, "true or false")
    return bool(value)


def items(config: Mapping[str, Any], name: str) -> list[Any]:
    """A list; absent and null are the empty one."""
    value = given(config, name, [])
    if not isinstance(value, list | tuple):
        raise refusal("config.json", name, value, "a list")
    return list(value)


def section(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """An object; absent and null are the empty one."""
    value = given(config, name, {})
    if not isinstance(value, Mapping):
        raise refusal("config.json", name, value, "an object")
    return dict(value)


def refusal(place: str, name: str, value: Any, expected: str) -> ValueError:
    """The error of a field that cannot be followed."""
    return ValueError(f"{place}: {name} is {value!r:.60}, expected {expected}.")
