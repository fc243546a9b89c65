"""Runs to compare: files of d5suite, pytest-benchmark and asv, read into one form.

Files come from anywhere: a malformed file is one error, and control characters in names are
escaped. Imports its neighbours and `d5suite.statistics`.
"""

from __future__ import annotations

import itertools
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from d5suite.errors import ConfigurationError, JobError
from d5suite.files import read_json
from d5suite.report.compare import failures
from d5suite.report.figures import judged_figures
from d5suite.report.formats import worst_share
from d5suite.report.reading import Conditions, has_failures, is_ours, printable, results_of
from d5suite.statistics.contests import veto_of
from d5suite.statistics.decisions import Costs
from d5suite.statistics.figures import Figure
from d5suite.statistics.medians import Summary, summarize

LARGEST = sys.float_info.max / 2
"""Largest sample: the mean of two samples must not overflow."""

LARGEST_SPREAD = 1e9
"""Largest distance of quartiles over the median: no timer has such a range."""

IQR_ERROR = 1.2533 / 1.349
"""Standard error of the median of n normal samples, times √n, over their interquartile range."""

_LOUD = re.compile(r"^the machine was not quiet after |^node .+ is slow: ")
"""Warnings of a session that count as a disturbance."""


@dataclass(frozen=True)
class Entry:
    """One benchmark of a run.

    Attributes
    ----------
    name : str
        Key of the comparison.
    summary : Summary
        Seconds; bytes if ``is_memory``.
    conditions : dict of str to str
        Must be equal for a comparison.
    facts : dict of str to str
        May differ, such as versions; differences are reported.
    wrong : list of str
        Failed validations.
    disturbed : list of str
        Disturbances, a machine that never became quiet, and slow nodes.
    warnings : list of str
        Notes that decide nothing.
    undecidable : str
        Why not even "the same" follows from its times; empty if it may.
    costs : Costs
    figures : dict of str to Figure
        Judged figures by heading.
    is_memory : bool
    """

    name: str
    summary: Summary
    conditions: dict[str, str] = field(default_factory=dict)
    facts: dict[str, str] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    disturbed: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    undecidable: str = ""
    costs: Costs = field(default_factory=Costs)
    figures: dict[str, Figure] = field(default_factory=dict)
    is_memory: bool = False


@dataclass(frozen=True)
class Failed:
    """A benchmark that failed.

    Attributes
    ----------
    wrong : bool
        Whether its answer was wrong.
    message : str
        First line of the failure's message.
    """

    wrong: bool
    message: str


@dataclass(frozen=True)
class BenchmarkRun:
    """A result file.

    Attributes
    ----------
    path : Path
    kind : {"d5suite", "pytest-benchmark", "asv"}
    entries : list of Entry
    failed : dict of str to Failed
        By name.
    date : str
        When it was measured, in ISO 8601; empty if unknown.
    left_out : list of str
        Benchmarks that cannot be compared, with reasons.
    """

    path: Path
    kind: str
    entries: list[Entry]
    failed: dict[str, Failed]
    date: str = ""
    left_out: list[str] = field(default_factory=list)


def read_run(path: Path) -> BenchmarkRun:
    """Read a result file.

    A benchmark with an impossible number, such as a sample of 0 s, counts as failed.

    Raises
    ------
    JobError
        If the file is malformed, has a benchmark twice, or such a number in every benchmark.
    ConfigurationError
        If the file holds no benchmarks and no failures.
    """
    content = read_json(path, any_number=True)
    if isinstance(content, dict) and "result_columns" in content:
        return _asv(path, printable(content))
    if isinstance(content, dict) and isinstance(content.get("benchmarks"), list):
        ours = any(map(is_ours, content["benchmarks"])) or has_failures(content)
        others = [each for each in enumerate(content["benchmarks"]) if not is_ours(each[1])]
        entries, failed = _ours(path, content) if ours else ([], {})
        plain, refused = _plain(path, printable(content.get("machine_info")), others)
        entries += plain
        failed |= _refused(refused, alone=not entries and not failed)
        date = content.get("datetime")
        if entries or failed:
            kind = "d5suite" if ours else "pytest-benchmark"
            return BenchmarkRun(path, kind, entries, failed, printable(date) if isinstance(date, str) else "")
    raise ConfigurationError(
        "no benchmarks here", where=str(path), hint="Make some: pytest recipes/ (or operators/) --benchmark-json FILE"
    )


def _ours(path: Path, content: Mapping[str, Any]) -> tuple[list[Entry], dict[str, Failed]]:
    """Return results of d5suite, and failures by name.

    A wrong answer outweighs other failures of its name, and is moved to results of that name.
    """
    found = results_of(content, path)
    failed: dict[str, Failed] = {}
    for told in (*found.failures, *found.refused):
        name = f"{told['group']} {told['backend']}"
        if name not in failed or told["wrong"]:
            failed[name] = Failed(told["wrong"], told["message"])
    entries = [
        entry_of(f"{group} {backend}", conditions, info, failures(info))
        for (group, conditions, backend), info in found.records.items()
    ]
    for name in {each.name for each in entries} & failed.keys():
        if failed[name].wrong:
            message = failed.pop(name).message
            for each in entries:
                each.wrong.extend([message] if each.name == name else [])
    return entries, failed


def _refused(refused: Mapping[str, JobError], *, alone: bool) -> dict[str, Failed]:
    """Return benchmarks that hold an impossible number, as failed benchmarks.

    Raises
    ------
    JobError
        If the file has no other benchmarks (``alone``).
    """
    if refused and alone:
        raise next(iter(refused.values()))
    told = {name: f"{str(error.where).rpartition(', ')[2]}: {error.what}" for name, error in refused.items()}
    return {name: Failed(False, message) for name, message in told.items()}


def entry_of(name: str, conditions: Conditions, info: Mapping[str, Any], wrong: list[str]) -> Entry:
    """Convert a record of d5suite, with its samples as ``data`` and its ``table``, to an entry."""
    warnings = info.get("warnings", [])
    loud = [each for each in warnings if _LOUD.search(each)]
    return Entry(
        name,
        summarize(info["data"]),
        {**dict(conditions), **_set_up(info), **machine_of(info["environment"])},
        _facts(info),
        wrong,
        [*(info["machine"]["reasons"] or ["disturbed"] * info["machine"]["disturbed"]), *loud],
        [each for each in warnings if each not in loud],
        veto_of(info["machine"]),
        Costs(info["peak_memory_bytes"], info["first_call_s"], worst_share(info["validation"]["checks"])),
        judged_figures(info),
    )


def _set_up(info: Mapping[str, Any]) -> dict[str, str]:
    """Return how ranks trained together, except for what the benchmark's name says."""
    together = _table(info.get("distributed"))
    ranks = together.get("ranks")
    hosts = {str(each.get("host")) for each in ranks if isinstance(each, dict)} if isinstance(ranks, list) else ()
    places = info.get("placement")
    places = places if isinstance(places, list) else []
    interfaces = sorted({str(each.get("interface")) for each in places if isinstance(each, dict)})
    named = {
        **{f"scheme {key}": value for key, value in sorted(_table(together.get("settings")).items())},
        **{key: together.get(key) for key in ("algorithm", "launcher", "oversubscribed")},
        "hosts": len(hosts) or None,
        "interfaces": ", ".join(interfaces) if len(hosts) > 1 and interfaces else None,
    }
    return {name: str(value) for name, value in named.items() if value is not None}


def machine_of(environment: Mapping[str, Any]) -> dict[str, str]:
    """Return the facts that are equal for results of one kind of machine."""
    cpu, memory = (_table(environment.get(name)) for name in ("cpu", "memory"))
    total = memory.get("limit_bytes", memory.get("total_bytes"))
    gpus = environment.get("gpus") or []
    named = {
        "CPU": cpu.get("model"),
        "cores": cpu.get("logical_cores"),
        "CPU quota": cpu.get("quota_cpus"),
        "governor": cpu.get("governor"),
        "architecture": _table(environment.get("os")).get("architecture"),
        "memory": f"{total / 2**30:.0f} GiB" if isinstance(total, int | float) else None,
        "GPUs": ", ".join(str(gpu.get("name")) for gpu in gpus),
        "driver": _of_gpus(gpus, "driver_version"),
        "GPU ECC": _of_gpus(gpus, "ecc_mode_current"),
        "GPU MIG": _of_gpus([gpu for gpu in gpus if gpu.get("mig_mode_current") != "Disabled"], "mig_mode_current"),
        "GPU power limit (W)": _of_gpus(gpus, "power_limit"),
    }
    return {name: str(value) for name, value in named.items() if value not in (None, "")}


def _of_gpus(gpus: Sequence[Mapping[str, Any]], key: str) -> str:
    """Return the distinct values of the GPUs under a key."""
    return ", ".join(dict.fromkeys(str(gpu[key]) for gpu in gpus if gpu.get(key) is not None))


def _facts(info: Mapping[str, Any]) -> dict[str, str]:
    environment = info["environment"]
    gpus = environment.get("gpus") or []
    of_gpus = {
        "GPU (hashed UUID)": "uuid_sha256",
        "CUDA of the driver": "cuda_version",
        "GPU's highest clock (MHz)": "clocks_max_sm",
        "GPU's set clock (MHz)": "clocks_applications_sm",
    }
    named = {
        **_table(info["backend"].get("versions")),
        **_table(environment.get("distributions")),
        info["backend"]["name"]: info["backend"]["version"],
        "Python": _table(environment.get("python")).get("version"),
        "kernel": _table(environment.get("os")).get("release"),
        **_table(environment.get("environment_variables")),
        "CPUs": info.get("cpus"),
        **{name: found for name, key in of_gpus.items() if (found := _of_gpus(gpus, key))},
    }
    return {str(name): str(value) for name, value in named.items() if value is not None}


def _table(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _plain(path: Path, machine: Any, benchmarks: Sequence[tuple[int, Any]]) -> tuple[list[Entry], dict[str, JobError]]:
    """Read pytest-benchmark's results, with or without samples (``--benchmark-save-data``).

    Returns
    -------
    entries : list of Entry
    refused : dict of str to JobError
        Benchmarks with an impossible number, by name.
    """
    cpu = _table(_table(machine).get("cpu"))
    unnamed = not cpu.get("brand_raw")
    flags = cpu.get("flags")
    named = {
        "CPU": cpu.get("brand_raw"),
        "CPU's instruction sets": ", ".join(sorted(map(str, flags))) if unnamed and isinstance(flags, list) else None,
        "CPU's architecture": cpu.get("arch_string_raw") if unnamed else None,
        "cores": cpu.get("count"),
        "architecture": _table(machine).get("machine"),
        "system": _table(machine).get("system"),
    }
    conditions = {name: str(value) for name, value in named.items() if value not in (None, "")}
    facts = {"Python": str(_table(machine).get("python_version")), "kernel": str(_table(machine).get("release"))}
    noted = ["the file does not name the CPU's model, so another CPU may have measured it"] if unnamed else []
    entries: dict[str, Entry] = {}
    refused: dict[str, JobError] = {}
    for place, given in benchmarks:
        where = f"{path}, benchmarks.{place}"
        bench = printable({name: given.get(name) for name in ("name", "fullname")})
        name, stats = bench["fullname"] or bench["name"], given.get("stats")
        if not isinstance(name, str) or not isinstance(stats, dict):
            raise JobError("this benchmark has no name or no stats", where=where)
        if name in entries or name in refused:
            raise JobError(f"{name} occurs twice", where=where, hint="Remove one of them.")
        try:
            entries[name] = Entry(name, _plain_series(stats, where), conditions, facts, warnings=list(noted))
        except JobError as error:
            refused[name] = error
    return list(entries.values()), refused


def _plain_series(stats: Mapping[str, Any], where: str) -> Summary:
    data = stats.get("data")
    if data is not None:
        if not isinstance(data, list) or not data:
            raise JobError("this benchmark has no samples", where=f"{where}.stats.data")
        return summarize([positive(each, f"{where}.stats.data.{place}") for place, each in enumerate(data)])
    median = positive(stats.get("median"), f"{where}.stats.median")
    rounds, spread = stats.get("rounds"), stats.get("iqr")
    counted = isinstance(rounds, int) and 1 < rounds < LARGEST
    if not counted or not isinstance(spread, int | float) or not 0 <= spread < LARGEST:
        return Summary(median, math.inf, 1)
    return _summarised(median, float(spread), rounds, f"{where}.stats.iqr")  # type: ignore[arg-type]


def _summarised(median: float, spread: float, rounds: int, where: str) -> Summary:
    """Summarize samples of which only the median and the interquartile range are known."""
    if not spread / median <= LARGEST_SPREAD:
        raise JobError(f"quartiles {spread:g} apart cannot be those of a median of {median:g}", where=where)
    return Summary(median, IQR_ERROR * spread / median / math.sqrt(rounds), rounds)


def positive(value: Any, where: str) -> float:
    """Return a sample as a float.

    Raises
    ------
    JobError
        If it is not a positive number: a clock that went backwards gives a negative one.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise JobError(f"sample {str(value)[:100]!r} is not a positive number", where=where)
    if isinstance(value, int) and value >= 1 << 64:
        raise JobError(f"sample {str(value)[:20]}... is beyond 64 bits", where=where)
    if value > LARGEST:
        raise JobError(f"sample {value:g} is larger than {LARGEST:.2g}", where=where)
    return float(value)


_ASV_KINDS = {"time": False, "timeraw": False, "mem": True, "peakmem": True}
"""Whether asv's benchmarks measure memory, by the first part of their names."""

_ASV_NAME = re.compile(r"(timeraw|time|peakmem|mem)_.|(Timeraw|Time|PeakMem|Mem)[A-Z_].")
"""How these names begin: https://asv.readthedocs.io/en/stable/benchmarks.html."""


def _asv(path: Path, content: Mapping[str, Any]) -> BenchmarkRun:
    """Read results of asv, file format 2: https://asv.readthedocs.io/en/stable/dev.html."""
    where = str(path)
    columns, results = content["result_columns"], content.get("results")
    well = isinstance(columns, list) and all(isinstance(each, str) for each in columns)
    if not well or not isinstance(results, dict) or content.get("version") != 2:
        raise JobError("this is not a result file of asv, format 2", where=where)
    params = _table(content.get("params"))
    names = {"CPU": "cpu", "cores": "num_cpu", "architecture": "arch", "memory": "ram", "machine": "machine"}
    conditions = {name: str(params[key]) for name, key in names.items() if params.get(key)}
    facts = {**_table(content.get("requirements")), "Python": content.get("python"), "system": params.get("os")}
    entries: list[Entry] = []
    failed: dict[str, Failed] = {}
    refused: dict[str, JobError] = {}
    left_out: list[str] = []
    names_seen: set[str] = set()
    for benchmark, row in results.items():
        place = f"{where}, results.{benchmark}"
        named = _ASV_NAME.match(benchmark.rpartition(".")[2])
        if named is None:
            left_out.append(f"{benchmark}: whether more of it is better is not known")
            continue
        if not isinstance(row, list):
            row = [row]
        cells = dict(zip(columns, row, strict=False))
        for name, cell in _asv_cells(benchmark, cells, place):
            if name in names_seen:
                raise JobError(f"{name} occurs twice", where=place, hint="Remove one of them.")
            names_seen.add(name)
            value = cell["result"]
            if value is None:
                failed[name] = Failed(False, "asv could not run it")
            elif not (isinstance(value, float) and math.isnan(value)):  # NaN: skipped
                try:
                    series = _asv_series(value, cell, place)
                except JobError as error:
                    refused[name] = error
                    continue
                version = {"version": str(cells["version"])} if cells.get("version") else {}
                own_facts = {each: str(known) for each, known in facts.items()}
                entries.append(
                    Entry(
                        name,
                        series,
                        {**conditions, **version},
                        own_facts,
                        is_memory=_ASV_KINDS[(named[1] or named[2]).lower()],
                    )
                )
    failed |= _refused(refused, alone=not entries and not failed)
    if not entries and not failed:
        raise ConfigurationError("no benchmarks here that can be compared", where=where)
    return BenchmarkRun(path, "asv", entries, failed, _asv_date(content.get("date"), where), left_out)


def _asv_date(date: Any, where: str) -> str:
    """Convert a commit's date, milliseconds since 1970."""
    if isinstance(date, bool) or not isinstance(date, int | float):
        return ""
    try:
        return datetime.fromtimestamp(date / 1000, timezone.utc).isoformat()
    except (ValueError, OverflowError, OSError):
        raise JobError(f"its date is {date!r:.100}", where=where) from None


def _asv_cells(benchmark: str, cells: Mapping[str, Any], where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a name and the columns' values for each combination of a benchmark's parameters."""
    params = cells.get("params") or []
    if not isinstance(params, list) or not all(isinstance(each, list) for each in params):
        raise JobError("its params are not lists", where=where)
    count = math.prod(map(len, params))
    results = cells.get("result")
    if results is None:
        results = [None] * min(count, 1 << 16)
    if not isinstance(results, list) or len(results) != count:
        raise JobError(f"its number of results differs from the combinations of params, {count:,}", where=where)
    for number, values in enumerate(itertools.product(*params)):
        name = f"{benchmark}({', '.join(map(str, values))})" if params else benchmark
        part = {"result": results[number]}
        for column in ("samples", "stats_q_25", "stats_q_75", "stats_repeat"):
            given = cells.get(column)
            part[column] = given[number] if isinstance(given, list) and number < len(given) else None
        yield name, part


def _asv_series(value: Any, cell: Mapping[str, Any], where: str) -> Summary:
    median = positive(value, f"{where}.result")
    samples = cell["samples"]
    if isinstance(samples, list) and samples:
        return summarize([positive(each, f"{where}.samples.{place}") for place, each in enumerate(samples)])
    low, high, count = cell["stats_q_25"], cell["stats_q_75"], cell["stats_repeat"]
    if all(isinstance(each, int | float) and 0 < each < LARGEST for each in (low, high, count)) and count >= 2:
        return _summarised(median, float(abs(high - low)), int(count), f"{where}.stats_q_75")
    return Summary(median, math.inf, 1)
