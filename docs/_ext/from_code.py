"""What the site says of code, read from it when the site is built, so that it cannot be old."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

SCHEMA = Path(__file__).parents[2] / "results" / "schema.json"


def pytest_options() -> argparse.ArgumentParser:
    """Return d5suite's options of pytest as a parser."""
    from d5suite.pytest_plugin.options import pytest_addoption

    parser = argparse.ArgumentParser(prog="pytest", add_help=False)

    class Parser:
        """What `pytest_addoption` uses of pytest's parser."""

        def getgroup(self, name: str, description: str) -> Parser:
            self.group = parser.add_argument_group(name, description)
            return self

        def addoption(self, *names: str, **settings: Any) -> None:
            self.group.add_argument(*names, **settings)

        def addini(self, *names: str, **settings: Any) -> None:
            """Settings in a file are no options."""

    pytest_addoption(Parser())  # type: ignore[arg-type]
    return escaped(parser)


def commands() -> argparse.ArgumentParser:
    """Return the parser of d5suite's commands."""
    from d5suite.cli import command_line

    return escaped(command_line())


def escaped(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Return a parser whose texts are reStructuredText, as sphinx-argparse reads them."""
    parser.description, parser.epilog = as_rst(parser.description), as_rst(parser.epilog)
    for action in parser._actions:
        if action.help != argparse.SUPPRESS:
            action.help = as_rst(action.help)
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                escaped(inner)
    return parser


def as_rst(text: str | None) -> str | None:
    """Return a text without markup: what stands between backticks is code, all else is plain."""
    if text is None:
        return None
    parts = text.split("`")
    return "".join(f"``{part}``" if i % 2 else re.sub(r"([\\*_|])", r"\\\1", part) for i, part in enumerate(parts))


def kind_of(schema: Mapping[str, Any]) -> str:
    """Return the type of a value in words."""
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "const" in schema:
        return json.dumps(schema["const"])
    if "enum" in schema:
        return " or ".join(map(json.dumps, schema["enum"]))
    kind = schema.get("type", "")
    text = " or ".join(kind) if isinstance(kind, list) else str(kind)
    return f"array of {kind_of(schema['items'])}" if kind == "array" and "items" in schema else text


def keys_of(schema: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield path, type and description of every key of a schema, without what it refers to."""
    for name, each in schema.get("properties", {}).items():
        here = f"{path}.{name}" if path else name
        if isinstance(each, bool):
            continue
        yield here, kind_of(each), each.get("description", "")
        yield from keys_of(each, here)
        if isinstance(each.get("items"), dict):
            yield from keys_of(each["items"], f"{here}[]")
        if isinstance(each.get("additionalProperties"), dict):
            yield from keys_of(each["additionalProperties"], f"{here}.NAME")
    for word in ("allOf", "anyOf", "oneOf"):
        for each in schema.get(word, ()):
            yield from keys_of(each, path)


class ResultSchema(SphinxDirective):
    """A section of keys for the file, and for each definition of its schema."""

    def run(self) -> list[nodes.Node]:
        """Return the sections."""
        schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
        self.env.note_dependency(str(SCHEMA))
        parts = {"file": schema, **schema["$defs"]}
        return [self.section(name, part) for name, part in parts.items() if any(keys_of(part))]

    def section(self, name: str, part: Mapping[str, Any]) -> nodes.section:
        """Return one section: a list of keys, each with its type and meaning."""
        section = nodes.section(ids=[f"schema-{name.lower().replace('_', '-')}"], names=[name])
        section += nodes.title("", name.replace("_", " "))
        listed = nodes.definition_list(classes=["schema"])
        for path, kind, meaning in keys_of(part):
            term = nodes.term("", "", nodes.Text(path), nodes.Text("  "), nodes.emphasis("", kind))
            listed += nodes.definition_list_item("", term, nodes.definition("", nodes.paragraph("", meaning)))
        section += listed
        return section


def setup(app: Sphinx) -> dict[str, Any]:
    """Add the directive."""
    app.add_directive("result-schema", ResultSchema)
    return {"parallel_read_safe": True}
