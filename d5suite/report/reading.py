"""Result files as records: read strictly, checked against the schema, grouped by their conditions.

Files come from anywhere. Imports jsonschema (late), `d5suite.measurements` and its neighbours.
"""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from d5suite.errors import ConfigurationError, JobError, escaped
from d5suite.files import read_json
from d5suite.measurements import discover
from d5suite.measurements.tables import Table
from d5suite.report.contests import check_rounds
from d5suite.report.formats import text_of, with_passes
from d5suite.report.schema import result_schema
from d5suite.report.series import check_pair

Conditions = tuple[tuple[str, str], ...]
"""Conditions of a result, by name; a table holds results of one set of conditions."""

ResultKey = tuple[str, Conditions, str]
"""Group (case/measurement), conditions, and backend."""

MEDIANS_APART = 0.01
"""Largest relative difference between a stated median and the median of the samples."""

AT = "@"
"""Precedes the point of a sweep in a test's parameter."""

_NAMED_FAULTS = 3
_LONGEST_FAULT = 200

_OUT_OF_RANGE = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
"""Rules of the schema about the size of a number."""


class Results(NamedTuple):
    """What a result file holds, printable.

    Attributes
    ----------
    records : dict
        See `read_benchmarks`.
    failures : list of dict
        As in ``results/schema.json``, with the first line of each message.
    refused : list of dict
        In the same form: benchmarks with an impossible number, such as a sample of 0 s. The message
        says where it stands.
    """

    records: dict[ResultKey, dict[str, Any]]
    failures: list[dict[str, Any]]
    refused: list[dict[str, Any]]


def load_results(path: Path) -> dict[ResultKey, dict[str, Any]]:
    """Read the d5suite benchmarks of a result file, without those that `results_of` refuses.

    Raises
    ------
    JobError, ConfigurationError
        As `results_of`, or if the file cannot be read.
    """
    return results_of(read_json(path, any_number=True), path).records


def results_of(content: Any, path: Path) -> Results:
    """Return the d5suite benchmarks and failures in the content of a file.

    Parameters
    ----------
    content : object
        From `d5suite.files.read_json` with ``any_number``.
    path : Path

    Raises
    ------
    JobError
        If the content does not fit the schema, has two results of one name and equal conditions, or
        has an impossible number in every result.
    ConfigurationError
        If the file holds no results and no failures, or none that can be shown.
    """
    try:
        if not isinstance(content, dict) or not isinstance(content.get("benchmarks", []), list):
            raise JobError("this is not a result file: an object with a list of benchmarks", where=str(path))
        ours = {place: each for place, each in enumerate(content.get("benchmarks", [])) if is_ours(each)}
        failures = content["d5suite"]["failures"] if has_failures(content) else []
        if not ours and not failures:
            others = len(content.get("benchmarks", []))
            raise ConfigurationError(
                "no d5suite results here" + (f", but {others} benchmarks of pytest-benchmark" if others else ""),
                where=str(path),
                hint="pytest-benchmark compare shows those." if others
                else "Make some: pytest recipes/ (or operators/) --benchmark-json FILE",
            )  # fmt: skip
        refused = _check(content, ours, str(path))
        sound = {place: each for place, each in ours.items() if place not in refused}
        if not sound and not failures:
            raise next(iter(refused.values()))
        check_pair(path, content.get("d5suite", {}))
        shown = printable([{**each, "stats": {}} for each in sound.values()])
        for each, (place, given) in zip(shown, sound.items(), strict=True):
            each.update(stats=given["stats"], place=f"benchmarks.{place}")
        records = read_benchmarks(shown, printable(content.get("d5suite", {}).get("measurements", {})))
        for each in records.values():
            for column in with_passes(each["table"], [each]).columns:
                text_of(column, each, True)  # raises before anything is shown
        check_rounds(records.values())
        return Results(
            records,
            [printable({**each, "message": each["message"].partition("\n")[0]}) for each in failures],
            [_as_failure(ours[place], error, str(path)) for place, error in sorted(refused.items())],
        )
    except (JobError, ConfigurationError) as error:
        if str(error.where).startswith(str(path)):
            raise
        where = f"{path}, {error.where}" if error.where else str(path)
        raise type(error)(error.what, where=where, hint=error.hint) from None


def has_failures(content: Mapping[str, Any]) -> bool:
    """Return whether a file lists measurements without a result."""
    facts = content.get("d5suite")
    return isinstance(facts, dict) and bool(facts.get("failures"))


def is_ours(bench: Any) -> bool:
    """Return whether a benchmark is from d5suite, or malformed."""
    info = bench.get("extra_info", {}) if isinstance(bench, dict) else None
    return not isinstance(info, dict) or "d5suite" in info


def _as_failure(bench: Any, error: JobError, path: str) -> dict[str, Any]:
    """Return a refused benchmark in the form of a failure, printable."""
    place = str(error.where).removeprefix(f"{path}, ")
    group, param, info = bench.get("group"), bench.get("param"), _record(bench)
    backend = _backend_of(param, info) if isinstance(param, str) and isinstance(info, dict) else param
    told: dict[str, Any] = {"group": str(group), "backend": str(backend), "message": f"{place}: {error.what}"}
    return {**printable(told), "wrong": False}


def _check(content: Mapping[str, Any], ours: Mapping[int, Any], path: str) -> dict[int, JobError]:
    """Check a file against the schema; ignore benchmarks of other tools.

    Returns
    -------
    dict of int to JobError
        Benchmarks with an impossible number, by place.
    """
    import jsonschema

    schema = result_schema()
    known = schema["$defs"]["record"]["properties"]["schema"]["const"]
    for place, named in [("", content.get("d5suite")), *((_place(i), _record(each)) for i, each in ours.items())]:
        if isinstance(named, dict) and named.get("schema", known) != known:
            raise JobError(
                f"its schema is {_short(repr(named['schema']))}, and this version of d5suite reads {known!r}",
                where=f"{path}{place}",
                hint="Read it with the version of d5suite that wrote it.",
            )
    _check_names(ours, path)
    slow, refused = dict[int, Any](), dict[int, JobError]()
    for number, each in ours.items():
        try:
            slow[number] = _check_numbers(each, f"{path}{_place(number)}")
        except JobError as fault:
            refused[number] = fault
    if ours and not slow and not has_failures(content):
        return refused
    checked, places = {**content, "benchmarks": list(slow.values())}, list(slow)
    faults = []
    for error in jsonschema.Draft202012Validator(schema).iter_errors(checked):
        at = list(error.absolute_path)
        if at[:1] == ["benchmarks"] and len(at) > 1:
            at[1] = number = places[int(at[1])]
            if error.validator in _OUT_OF_RANGE:
                where = f"{path}, {'.'.join(map(str, at))}"
                refused.setdefault(number, JobError(_escaped(_short(error.message)), where=where))
                continue
        faults.append(f"{'.'.join(map(str, at)) or 'the file'}: {_short(error.message)}")
        if len(faults) == _NAMED_FAULTS:
            break
    if faults:
        bare = any(each.endswith(".stats: 'data' is a required property") for each in faults)
        raise JobError(
            "this does not fit results/schema.json: " + _escaped("; ".join(faults)),
            where=path,
            hint="It was stored without its samples: measure again, or give --benchmark-json." if bare else None,
        )
    for number, each in ours.items():
        if number not in refused:
            _check_agreement(each, f"{path}{_place(number)}")
    return refused


def _check_names(ours: Mapping[int, Any], path: str) -> None:
    """Raise `JobError` if a benchmark occurs twice, before the check by the schema takes long."""
    seen: dict[ResultKey, int] = {}
    for place, bench in ours.items():
        try:
            info = bench["extra_info"]["d5suite"]
            key = (bench["group"], conditions(info), _backend_of(bench["param"], info))
            if key in seen:
                raise _twice(bench["group"], key[2], f"benchmarks.{seen[key]}", f"{path}{_place(place)}")
            seen[key] = place
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):  # the schema tells what is wrong
            continue


def _twice(group: str, backend: str, first: str, where: str) -> JobError:
    what = _escaped(_short(f"{group} of {backend} occurs twice, also as {first}"))
    return JobError(what, where=where, hint="Remove one of them.")


def _check_agreement(bench: Mapping[str, Any], where: str) -> None:
    """Raise `JobError` if a benchmark contradicts itself."""
    info, stats = bench["extra_info"]["d5suite"], bench["stats"]
    record = f"{where}.extra_info.d5suite"
    low, high = info["median_ci95"]
    if low > high:
        raise JobError(f"the interval begins at {low:g} s and ends at {high:g} s", where=f"{record}.median_ci95")
    median = statistics.median(stats["data"])
    for value, place in ((info["median_s"], f"{record}.median_s"), (stats["median"], f"{where}.stats.median")):
        if not math.isclose(value, median, rel_tol=MEDIANS_APART):
            raise JobError(f"it is {value:g} s, and the samples' median {median:g} s", where=place)
    for value, place in (
        (info["peak_memory_bytes"], "peak_memory_bytes"),
        (info.get("memory", {}).get("peak_bytes"), "memory.peak_bytes"),
    ):
        if value is not None and value < 0:
            raise JobError(f"{value} bytes are less than none", where=f"{record}.{place}")
    group, name = f"{info['recipe']}/{info['measurement']}", info["backend"]["name"]
    if bench["group"] != group:
        what = f"it is {bench['group']!r}, and the record's recipe and measurement are {group!r}"
        raise JobError(_escaped(_short(what)), where=f"{where}.group")
    if not re.match(re.escape(name) + r"(?!\w)", _backend_of(bench["param"], info)):
        what = f"it is {bench['param']!r}, and the record's backend {name!r}"
        raise JobError(_escaped(_short(what)), where=f"{where}.param")


def _backend_of(param: str, info: Mapping[str, Any]) -> str:
    """Return the backend in a test's parameter.

    At level 0 a problem's name and - precede it; in a sweep, a point follows.
    """
    own = param.partition("-")[2] if info.get("level") == 0 else param
    return own.partition(AT)[0]


def _check_numbers(bench: Any, where: str) -> Any:
    """Check all numbers; return one sample only, because the schema checks samples slowly."""
    stats = bench.get("stats") if isinstance(bench, dict) else None
    median = stats.get("median") if isinstance(stats, dict) else None
    for value, part in ((_record(bench), ".extra_info.d5suite"), (median, ".stats.median")):
        if (odd := _odd_number(value)) is not None:
            raise JobError(f"{_short(str(odd[1]))} is not finite, or beyond 64 bits", where=f"{where}{part}{odd[0]}")
    data = stats.get("data") if isinstance(stats, dict) else None
    if not isinstance(data, list):
        return bench
    for place, each in enumerate(data):
        if isinstance(each, bool) or not isinstance(each, int | float) or not 0 < each < 1 << 64:
            what = f"sample {_short(repr(each))} is not a positive number, or beyond 64 bits"
            raise JobError(what, where=f"{where}.stats.data.{place}")
    return {**bench, "stats": {**stats, "data": data[:1]}}  # type: ignore[dict-item]


def _odd_number(value: Any) -> tuple[str, float] | None:
    """Return a number that is not finite or beyond 64 bits, after the place where it stands."""
    if isinstance(value, dict | list):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            if (found := _odd_number(each)) is not None:
                return f".{key}{found[0]}", found[1]
    elif (isinstance(value, float) and not math.isfinite(value)) or (isinstance(value, int) and abs(value) >= 1 << 64):
        return "", value
    return None


def _record(bench: Any) -> Any:
    info = bench.get("extra_info") if isinstance(bench, dict) else None
    return info.get("d5suite") if isinstance(info, dict) else None


def _place(number: int) -> str:
    return f", benchmarks.{number}"


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST_FAULT else f"{text[:_LONGEST_FAULT]}..."


def printable(value: Any) -> Any:
    """Return a value with the control characters in its texts escaped."""
    if isinstance(value, str):
        return _escaped(value)
    if isinstance(value, dict):
        return {_escaped(key): printable(each) for key, each in value.items()}
    return [printable(each) for each in value] if isinstance(value, list) else value


def _escaped(text: str) -> str:
    return escaped(text, keep="")


def read_benchmarks(
    benchmarks: Iterable[Mapping[str, Any]], described: Mapping[str, Any] | None = None
) -> dict[ResultKey, dict[str, Any]]:
    """Return the records of benchmarks, each with ``data`` (samples in seconds) and ``table``.

    Parameters
    ----------
    benchmarks : iterable of mapping
        As pytest-benchmark writes them.
    described : mapping, optional
        Descriptions in the file, by measurement, for measurements that are not installed.

    Raises
    ------
    JobError
        If two benchmarks have the same name and conditions.
    ConfigurationError
        If a measurement is neither installed nor described.
    """
    records: dict[ResultKey, dict[str, Any]] = {}
    for number, bench in enumerate(benchmarks):
        info = bench.get("extra_info", {}).get("d5suite")
        if info is None:
            continue
        backend = _backend_of(bench["param"], info)
        place = bench.get("place", f"benchmarks.{number}")
        table = bench["measurement"].table if "measurement" in bench else _table_of(info, described or {}, place)
        key = (bench["group"], conditions(info), backend)
        if key in records:
            raise _twice(bench["group"], backend, records[key]["place"], place)
        records[key] = {
            **info,
            "data": bench["stats"]["data"],
            "table": table,
            "place": place,
            "fullname": bench.get("fullname", ""),
        }
    return records


def _table_of(info: Mapping[str, Any], described: Mapping[str, Any], place: str) -> Table:
    """Return the table of a record's measurement: the installed one, or the one in the file."""
    name = info["measurement"]
    if name in discover():
        return discover()[name].table
    if name in described:
        return Table.from_dict(described[name]["table"])
    raise ConfigurationError(
        f"the results of {name!r} are not described in the file, and no plug-in knows them",
        where=place,
        hint="Install the plug-in that measured them.",
    )


def conditions(info: Mapping[str, Any]) -> Conditions:
    """Return the conditions of a record."""
    named = {
        "preset": info["preset"],
        "device": info["device"],
        "device name": _device_name(info),
        "precision": info["precision"],
        "batch": info.get("batch_size"),
        "image size": info.get("image_size"),
        "classes": info.get("classes"),
        "data": data_of(info),
        "inputs": _given_of(info),
        **_threads_and_ranks(info),
        "seed": info["seed"],
        "L2 cache": "cold" if "l2_cold" in info else None,
        **_workflow_of(info),
        "schema": info["schema"],
        **{f"optimizer {key}": value for key, value in sorted(info.get("optimizer", {}).items())},
    }
    return tuple((name, str(value)) for name, value in named.items() if value not in (None, ""))


def _workflow_of(info: Mapping[str, Any]) -> dict[str, str]:
    """Return how the ranks of a workflow are placed, and the buffers of its couplings."""
    if info["measurement"] != "workflow":
        return {}
    workflow = info["workflow"]
    buffers = {name: f"{each['capacity']} ({each['policy']})" for name, each in workflow["couplings"].items()}
    return {"placement": workflow["placement"], **{f"buffer of {name}": text for name, text in buffers.items()}}


def _threads_and_ranks(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return threads and ranks; at level 3 the number of ranks distinguishes rows, not tables."""
    if info["level"] == 3:
        return {"threads per rank": info["threads"] // info["ranks"]}
    return {"threads": info["threads"], "ranks": info["ranks"]}


def data_of(info: Mapping[str, Any], digits: int = 64) -> str:
    """Name a result's data, with `digits` digits of its digest; empty if there is no data."""
    if "dataset" not in info:
        return ""
    data = info["dataset"]
    stored = f", {data['format']}" if data.get("format", "folder") != "folder" else ""
    return f"{'drawn ' if data['synthetic'] else ''}{data['kind']} {data['digest'][:digits]}{stored}"


def _given_of(info: Mapping[str, Any]) -> str:
    """Return what the user gave the inputs of a network, such as ``sr=16000, ids=0..256``."""
    return ", ".join(f"{name}={value}" for name, value in info.get("dataset", {}).get("inputs", {}).items())


def _device_name(info: Mapping[str, Any]) -> str:
    """Return the device's model, from the machine's description if the framework lacks it."""
    name = info.get("device_name", info["device"])
    if name.lower() != info["device"]:
        return str(name)
    cpu, gpus = (info["environment"].get(key) or {} for key in ("cpu", "gpus"))
    known = [cpu.get("model")] if info["device"] == "cpu" else [gpu.get("name") for gpu in itertools.islice(gpus, 1)]
    return str(next(filter(None, known), name))
