"""Short forms of JSON schema for records of measurements and passes. Imports the standard library.

Keywords that a form has no argument for are given by name, such as ``minimum=0``.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any


def record(properties: dict[str, Any], optional: Collection[str] = ()) -> dict[str, Any]:
    """Return a measurement's part of the record; it must have all properties but the optional."""
    return {"required": [name for name in properties if name not in optional], "properties": properties}


def mapping(properties: dict[str, Any], optional: Collection[str] = (), **more: Any) -> dict[str, Any]:
    """Return the schema of an object that has all properties but the optional."""
    return {"type": "object", **record(properties, optional), **more}


def by_name(values: dict[str, Any], description: str = "", **more: Any) -> dict[str, Any]:
    """Return the schema of an object with any names, whose values are alike."""
    return _value("object", description, {"additionalProperties": values, **more})


def array(items: dict[str, Any], description: str = "", **more: Any) -> dict[str, Any]:
    """Return the schema of a list."""
    return _value("array", description, {"items": items, **more})


def pair(description: str = "", **more: Any) -> dict[str, Any]:
    """Return the schema of two numbers, such as the ends of an interval."""
    return array(number(**more), description, minItems=2, maxItems=2)


def number(description: str = "", **more: Any) -> dict[str, Any]:
    """Return the schema of a number."""
    return _value("number", description, more)


def integer(description: str = "", **more: Any) -> dict[str, Any]:
    """Return the schema of an integer."""
    return _value("integer", description, more)


def text(description: str = "") -> dict[str, Any]:
    """Return the schema of a string."""
    return _value("string", description, {})


def boolean(description: str = "") -> dict[str, Any]:
    """Return the schema of a truth value."""
    return _value("boolean", description, {})


def choice(*values: str, description: str = "") -> dict[str, Any]:
    """Return the schema of one of some strings."""
    return {"enum": list(values), **({"description": description} if description else {})}


def or_null(schema: dict[str, Any]) -> dict[str, Any]:
    """Let a value also be null."""
    return {**schema, "type": [schema["type"], "null"]}


def _value(kind: str, description: str, more: dict[str, Any]) -> dict[str, Any]:
    return {"type": kind, **more, **({"description": description} if description else {})}
