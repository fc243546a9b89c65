"""The published schema of results, and the reference result of a real run."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

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
