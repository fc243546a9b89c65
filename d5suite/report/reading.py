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
from typing import Any

from d5suite.errors import ConfigurationError, JobError
from d5suite.files import read_json
from d5suite.measurements import discover
from d5suite.measurements.tables import Table
from d5suite.report.contests import check_rounds
from d5suite.report.formats import text_of, with_passes
from d5suite.report.schema import result_schema
from d5suite.report.series import check_pair

Conditions = tuple[tuple[str, str], ...]
"""Conditions of a result, by name; a table holds results of one set of conditions."""

Key = tuple[str, Conditions, str]
"""Group (case/measurement), conditions, and backend."""

MEDIANS_APART = 0.01
"""Largest relative difference between a stated median and the median of the samples."""

_NAMED_FAULTS = 3
_LONGEST_FAULT = 200


def load_results(path: Path) -> dict[Key, dict[str, Any]]:
    """Read the d5suite benchmarks of a result file.

    Raises
    ------
    JobError
        If the file cannot be read, does not fit the schema, or has two results of one name and
        equal conditions.
    ConfigurationError
        If the file holds no results and no failures, or none that can be shown.
    """
    return results_of(read_json(path), path)


def failures_in(content: Any, path: Path) -> list[dict[str, Any]]:
    """Return the failures in a file's content, printable, with the first line of each message.

    Raises
    ------
    JobError
        If the content does not fit the schema.
    """
    facts = content.get("d5suite") if isinstance(content, dict) else None
    if not isinstance(facts, dict) or not facts.get("failures"):
        return []
    _check(content, {}, str(path))
    return [printable({**each, "message": each["message"].partition("\n")[0]}) for each in facts["failures"]]


def results_of(content: Any, path: Path) -> dict[Key, dict[str, Any]]:
    """Return what `load_results` returns, from the content of a file."""
    try:
        if not isinstance(content, dict) or not isinstance(content.get("benchmarks", []), list):
            raise JobError("this is not a result file: an object with a list of benchmarks", where=str(path))
        ours = {place: each for place, each in enumerate(content.get("benchmarks", [])) if is_ours(each)}
        if not ours and not failures_in(content, path):
            others = len(content.get("benchmarks", []))
            raise ConfigurationError(
                "no d5suite results here" + (f", but {others} benchmarks of pytest-benchmark" if others else ""),
                where=str(path),
                hint="pytest-benchmark compare shows those." if others
                else "Make some: pytest recipes/ (or operators/) --benchmark-json FILE",
            )  # fmt: skip
        _check(content, ours, str(path))
        check_pair(path, content.get("d5suite", {}))
        shown = printable([{**each, "stats": {}} for each in ours.values()])
        for each, (place, given) in zip(shown, ours.items(), strict=True):
            each.update(stats=given["stats"], place=f"benchmarks.{place}")
        records = read_benchmarks(shown, printable(content.get("d5suite", {}).get("measurements", {})))
        for each in records.values():
            for column in with_passes(each["table"], [each]).columns:
                text_of(column, each, True)  # raises before anything is shown
        check_rounds(records.values())
        return records
    except RecursionError:
        raise JobError("it is nested too deeply", where=str(path)) from None
    except (JobError, ConfigurationError) as error:
        if str(error.where).startswith(str(path)):
            raise
        where = f"{path}, {error.where}" if error.where else str(path)
        raise type(error)(error.what, where=where, hint=error.hint) from None


def is_ours(bench: Any) -> bool:
    """Return whether a benchmark is from d5suite, or malformed."""
    info = bench.get("extra_info", {}) if isinstance(bench, dict) else None
    return not isinstance(info, dict) or "d5suite" in info


def _check(content: Mapping[str, Any], ours: Mapping[int, Any], path: str) -> None:
    """Check a file against the schema; ignore benchmarks of other tools."""
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
    slow = {place: _samples(each, f"{path}{_place(place)}") for place, each in ours.items()}
    checked = {**content, "benchmarks": list(slow.values())}
    faults = []
    for error in jsonschema.Draft202012Validator(schema).iter_errors(checked):
        at = list(error.absolute_path)
        if at[:1] == ["benchmarks"] and len(at) > 1:
            at[1] = list(slow)[int(at[1])]
        faults.append(f"{'.'.join(map(str, at)) or 'the file'}: {_short(error.message)}")
        if len(faults) == _NAMED_FAULTS:
            break
    if faults:
        raise JobError("this does not fit results/schema.json: " + _escaped("; ".join(faults)), where=path)
    for number, each in ours.items():
        _check_agreement(each, f"{path}{_place(number)}")


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
    """Return the backend in a test's parameter; at level 0 a problem's name and - precede it."""
    return param.partition("-")[2] if info["level"] == 0 else param


def _samples(bench: Any, where: str) -> Any:
    """Check all samples; keep only the first, because checking each by the schema is slow."""
    stats = bench.get("stats") if isinstance(bench, dict) else None
    data = stats.get("data") if isinstance(stats, dict) else None
    if not isinstance(data, list):
        return bench
    for place, each in enumerate(data):
        if isinstance(each, bool) or not isinstance(each, int | float) or not each > 0:
            raise JobError(f"sample {_short(repr(each))} is not a positive number", where=f"{where}.stats.data.{place}")
    return {**bench, "stats": {**stats, "data": data[:1]}}  # type: ignore[dict-item]


def _record(bench: Any) -> Any:
    info = bench.get("extra_info") if isinstance(bench, dict) else None
    return info.get("d5suite") if isinstance(info, dict) else None


def _place(number: int) -> str:
    return f", benchmarks.{number}"


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST_FAULT else f"{text[:_LONGEST_FAULT]}..."


def printable(value: Any) -> Any:
    """Return the text with a terminal's control characters escaped."""
    if isinstance(value, str):
        return _escaped(value)
    if isinstance(value, dict):
        return {_escaped(key): printable(each) for key, each in value.items()}
    return [printable(each) for each in value] if isinstance(value, list) else value


def _escaped(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def read_benchmarks(
    benchmarks: Iterable[Mapping[str, Any]], described: Mapping[str, Any] | None = None
) -> dict[Key, dict[str, Any]]:
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
    records: dict[Key, dict[str, Any]] = {}
    for number, bench in enumerate(benchmarks):
        info = bench.get("extra_info", {}).get("d5suite")
        if info is None:
            continue
        backend = _backend_of(bench["param"], info)
        place = bench.get("place", f"benchmarks.{number}")
        table = bench["measurement"].table if "measurement" in bench else _table_of(info, described or {}, place)
        key = (bench["group"], conditions(info), backend)
        if key in records:
            raise JobError(
                f"{bench['group']} of {backend} occurs twice, also as {records[key]['place']}",
                where=place,
                hint="Remove one of them.",
            )
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
        "schema": info["schema"],
        **{f"optimizer {key}": value for key, value in sorted(info.get("optimizer", {}).items())},
    }
    return tuple((name, str(value)) for name, value in named.items() if value not in (None, ""))


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
