"""Validation of job and result files against the JSON schemas beside this module."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from d5suite.errors import JobError
from d5suite.files import read_json


@lru_cache(maxsize=2)
def _validator(name: str) -> Any:
    import jsonschema

    schema = json.loads((Path(__file__).parent / name).read_text(encoding="utf-8"))
    return jsonschema.Draft202012Validator(schema)


def read(path: Path, schema: str, what: str) -> dict[str, Any]:
    """Read a JSON file, and check that it fits a schema.

    Parameters
    ----------
    path : Path
    schema : str
        File name of the schema.
    what : str
        What the file should be, for the message.

    Raises
    ------
    JobError
        If the file cannot be read or does not fit; every fault is named.
    """
    content = read_json(path)
    faults = [
        f"{'.'.join(str(part) for part in error.absolute_path) or 'the file'}: {error.message}"
        for error in _validator(schema).iter_errors(content)
    ]
    if faults:
        raise JobError(f"not a valid {what}: " + "; ".join(faults), where=str(path))
    found: dict[str, Any] = content
    return found
