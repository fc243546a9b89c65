"""Short forms of JSON schema for measurements' records. Imports the standard library only."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any


def record(properties: dict[str, Any], optional: Collection[str] = ()) -> dict[str, Any]:
    """Return a measurement's part of the record; it must have all properties but the optional."""
    return {"required": [name for name in properties if name not in optional], "properties": properties}


def mapping(properties: dict[str, Any], optional: Collection[str] = (), **more: Any) -> dict[str, Any]:
    """Return the schema of an object that has all properties but the optional."""
    return {"type": "object", **record(properties, optional), **more}


def number(description: str = "", **more: Any) -> dict[str, Any]:
    """Return the schema of a number."""
    return _value("number", description, more)


def integer(description: str = "", **more: Any) -> dict[str, Any]:
    """Return the schema of an integer."""
    return _value("integer", description, more)


def text(description: str = "") -> dict[str, Any]:
    """Return the schema of a string."""
    return _value("string", description, {})


def or_null(schema: dict[str, Any]) -> dict[str, Any]:
    """Let a value also be null."""
    return {**schema, "type": [schema["type"], "null"]}


def _value(kind: str, description: str, more: dict[str, Any]) -> dict[str, Any]:
    return {"type": kind, **more, **({"description": description} if description else {})}
