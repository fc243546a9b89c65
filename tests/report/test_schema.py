"""The published schema of results, and the reference result of a real run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import d5suite.job
from d5suite.measurements import discover
from d5suite.report.formats import FORMATS
from d5suite.report.plots import PLOTS
from d5suite.report.schema import compact, result_schema

RESULTS = Path(__file__).parents[2] / "results"


def test_the_published_schema_is_that_of_the_measurements() -> None:
    made = "python -m d5suite.report.schema > results/schema.json"
    assert (RESULTS / "schema.json").read_text() == compact(result_schema()) + "\n", made


@pytest.mark.parametrize("path", sorted(RESULTS.glob("reference-*.json")), ids=lambda path: path.stem)
def test_a_reference_result_fits_the_schema(path: Path) -> None:
    jsonschema.validate(json.loads(path.read_text()), result_schema())


@pytest.mark.parametrize("name", sorted(discover()))
def test_a_measurement_is_shown_by_formats_and_plots_that_exist(name: str) -> None:
    measurement = discover()[name]
    assert {column.format for column in measurement.table.columns} <= set(FORMATS)
    assert measurement.plot in (None, *PLOTS)
    jsonschema.Draft202012Validator.check_schema(dict(measurement.schema))
    missing = set(measurement.schema.get("required", ())) - set(measurement.schema.get("properties", ()))
    assert not missing


def undocumented(schema: dict[str, Any]) -> list[str]:
    """The keys without a description of their own or of the object that they are a part of."""
    found: list[str] = []
    fixed = schema["$defs"].get("record", {}).get("properties", {})

    def look(part: Any, path: tuple[str, ...], told: bool) -> None:
        if not isinstance(part, dict):
            return
        told = told or "description" in part
        for name, own in part.get("properties", {}).items():
            again = len(path) == 2 and path[0] == "record" and "description" in fixed.get(name, {})
            if not (told or again or "description" in own or "$ref" in own):
                found.append(".".join((*path, name)))
            look(own, (*path, name), again)
        for word in ("items", "additionalProperties", *(["then"] if path else [])):  # of a whole file it narrows only
            look(part.get(word), path, told)
        for each in [*part.get("allOf", ()), *part.get("anyOf", ()), *part.get("oneOf", ())]:
            named = each.get("if", {}).get("properties", {}).get("measurement", {}).get("const")
            look(each, (*path, named) if named else path, told)
        for name, each in part.get("$defs", {}).items():
            look(each, (name,), False)

    look(schema, (), False)
    return found


def test_every_key_of_results_is_documented() -> None:
    assert undocumented(result_schema()) == []
    worker = json.loads((Path(d5suite.job.__file__).parent / "result.json").read_text())
    assert undocumented(worker) == []
    samples = worker["$defs"]["measured"]["properties"]["passes"]["properties"]["time"]["properties"]["samples"]
    assert set(samples["required"]) == set(samples["properties"])  # samples_s among them
    guide = (RESULTS.parent / "docs" / "write-a-measurement.md").read_text()
    assert "`samples.samples_s` are the" in guide and "samples.samples_s," in guide  # used, and explained
    planted = {"type": "object", "properties": {"odd": {"type": "string"}}, "$defs": {}}
    assert undocumented(planted) == ["odd"]
