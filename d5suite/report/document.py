"""What the pages that d5suite writes share: their head, and how a template is filled in.

A page is one file, and needs no network. Jinja2 escapes all texts from results. The page names its
own script by digest, so no other may run. Imports jinja2 late.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
"""Folder of ``head.html``, with which each page's template begins."""


def document(
    template: Path, *, title: str, filters: Mapping[str, Callable[..., Any]] | None = None, data: Any, **values: Any
) -> str:
    """Return a template filled in, with the style and the script that lie beside it.

    Parameters
    ----------
    template : Path
        ``NAME.html``; ``NAME.css`` and ``NAME.js`` become its ``style`` and ``script``.
    title : str
    filters : mapping of str to callable, optional
        Further filters of the template.
    data : object
        The template's ``data``: JSON-able values for the script.
    **values
        Further values that the template names.
    """
    from markupsafe import Markup

    style, script = (_stripped(template.with_suffix(f".{kind}").read_text(encoding="utf-8")) for kind in ("css", "js"))
    return filled_in(
        template,
        filters or {},
        title=title,
        style=Markup(style),  # noqa: S704  our own files
        script=Markup(script),  # noqa: S704
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        data=Markup(_embedded(data)),  # noqa: S704  JSON without <, > and &
        **values,
    )


def filled_in(template: Path, filters: Mapping[str, Callable[..., Any]], **values: Any) -> str:
    """Return a template filled in: all but `Markup` is escaped, and no value may be missing."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader([template.parent, HERE]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(filters)
    return environment.get_template(template.name).render(**values)


def _stripped(text: str) -> str:
    return "\n".join(line.strip() for line in text.splitlines() if line.strip())


def _embedded(value: Any) -> str:
    """Return JSON that is safe inside HTML."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
