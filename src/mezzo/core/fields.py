"""Checks the fields of a dataclass against their annotations, for settings that come from files and flags."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any, Literal

from mezzo.core.errors import UserError


def check_fields(settings: Any, names: typing.Iterable[str] | None = None) -> None:
    """Checks that every field of a dataclass instance (or those named) holds a value of its annotated type.

    Raises:
        UserError: a value of another type; the field is named. A whole number serves as a float, a bool never as a
            number.
    """
    hints = typing.get_type_hints(type(settings))
    for name in [item.name for item in dataclasses.fields(settings)] if names is None else names:
        value = getattr(settings, name)
        if not fits(value, hints[name]):
            raise UserError(f"{value!r} does not fit", where=name, todo=f"Give {_said(hints[name])}")


def fits(value: Any, hint: Any) -> bool:
    """Returns whether a value is of an annotated type: plain types, |, Literal, list, set, tuple and dict of these."""
    if hint is Any:
        return True
    if hint is None:
        return value is None
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return any(fits(value, option) for option in inner)
    if origin is Literal:
        return any(type(value) is type(option) and value == option for option in inner)
    if isinstance(value, bool):
        return hint is bool
    if origin is dict:
        key, held = inner
        return isinstance(value, dict) and all(fits(k, key) and fits(v, held) for k, v in value.items())
    if origin in (list, set):
        return isinstance(value, origin) and all(fits(item, inner[0]) for item in value)
    return isinstance(value, (int, float) if hint is float else hint)


def _said(hint: Any) -> str:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_said(option) for option in inner)
    if origin is Literal:
        return " or ".join(map(repr, inner))
    if origin is dict:
        return f"a mapping of {_said(inner[0])} to {_said(inner[1])}"
    if origin in (list, set):
        return f"a list of {_said(inner[0])}"
    return {type(None): "none", int: "a whole number", float: "a number", str: "text", bool: "true or false"}.get(
        hint, getattr(hint, "__name__", str(hint))
    )
