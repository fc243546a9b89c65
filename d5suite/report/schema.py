"""The JSON schema of result files: the fixed part, and what measurements and passes add.

``python -m d5suite.report.schema > results/schema.json`` writes the published one. Imports
jsonschema (late), `d5suite.measurements` and `d5suite.passes`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from d5suite.errors import JobError, ValidationError
from d5suite.measurements import discover
from d5suite.passes import discover as discover_passes
from d5suite.report.figures import judged_figures

if TYPE_CHECKING:
    from d5suite.measurements.base import Measurement


def result_schema(described: Mapping[str, Mapping[str, Any]] | None = None) -> dict[str, Any]:
    """Return the schema of result files.

    Parameters
    ----------
    described : mapping, optional
        By measurement: `Measurement.describe`; by default of every measurement that is installed.
    """
    schema: dict[str, Any] = json.loads((Path(__file__).parent / "results.json").read_text(encoding="utf-8"))
    for one in discover_passes().values():
        schema["$defs"]["record"]["properties"] |= one.properties()
    if described is None:
        described = {name: measurement.describe() for name, measurement in sorted(discover().items())}
    schema["$defs"]["record"]["allOf"] = [
        {
            "if": {"properties": {"measurement": {"const": name}}},
            "then": {
                **each["schema"],
                "properties": {
                    **each["schema"].get("properties", {}),
                    "level": {"const": each["level"]},
                    "throughput": {"properties": {"unit": {"const": each["unit"]}}},
                },
            },
        }
        for name, each in described.items()
    ]
    return schema


def check_record(record: Mapping[str, Any], measurement: type[Measurement]) -> None:
    """Check what a measurement, and passes that are not d5suite's own, have added to a record.

    Raises
    ------
    ValidationError
        If it does not fit; every fault is named.
    """
    import jsonschema

    required = [name for name in measurement.schema.get("required", ()) if name not in measurement.derived]
    schemas = [{**measurement.schema, "required": required}, *record.get("passes", {}).values()]
    faults = [
        f"{'.'.join(str(part) for part in error.absolute_path) or 'the record'}: {error.message}"
        for schema in schemas
        for error in jsonschema.Draft202012Validator(schema).iter_errors(record)
    ]
    try:
        judged_figures({**record, "table": measurement.table})
    except JobError as error:
        faults.append(error.what)
    if faults:
        raise ValidationError("the record does not fit its schema: " + "; ".join(faults), where=measurement.name)


def compact(value: Any, indent: int = 0, width: int = 118) -> str:
    """Format JSON with each value on one line if it fits.

    Parameters
    ----------
    value : object
        JSON-able.
    indent, width : int
        Columns.
    """
    line = json.dumps(value, ensure_ascii=False)
    if len(line) + indent <= width or not isinstance(value, dict | list) or not value:
        return line
    inner, outer = " " * (indent + 2), " " * indent
    if isinstance(value, dict):
        items = [f"{inner}{json.dumps(key)}: {compact(each, indent + 2, width)}" for key, each in value.items()]
        return "{\n" + ",\n".join(items) + f"\n{outer}}}"
    return "[\n" + ",\n".join(inner + compact(each, indent + 2, width) for each in value) + f"\n{outer}]"


if __name__ == "__main__":
    print(compact(result_schema()))
