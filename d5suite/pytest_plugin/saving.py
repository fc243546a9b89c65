"""Results put in place as a whole: JSON, the raw series beside it, and plots."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from d5suite.errors import ConfigurationError, describe_error
from d5suite.files import (
    PendingFile,
    check_writable,
    commit_all,
    is_special,
    open_special,
    stem,
    write_to_reader,
)  # fmt: skip
from d5suite.pytest_plugin import stash
from d5suite.pytest_plugin.settings import settings, taken_options
from d5suite.pytest_plugin.storage import stores

READER_PATIENCE_S = 60.0
"""Seconds to wait for the reader of a pipe: signals are ignored while results are saved."""


class AtomicDestination(os.PathLike[str]):
    """A path for results: they are written beside it, and put in place as one unit.

    If files beside the JSON cannot be saved, the JSON is saved without them.

    Parameters
    ----------
    path : Path
        Where the JSON file is to be; a symbolic link is followed. It may be a pipe or a terminal.
    option : str
        The option that names it.

    Attributes
    ----------
    direct : bool
        Whether the path is no ordinary file, so that nothing can be saved beside it.
    described : bool
        Whether the JSON's content is complete.
    faults : list of str
        What could not be saved beside the JSON.

    Raises
    ------
    ConfigurationError
        If nothing can be written there; the run then ends before anything is measured.
    """

    def __init__(self, path: Path, option: str = "--benchmark-json") -> None:
        given, where = path, f"{option} {path}"
        exists = os.path.exists(path)
        self.direct = exists and (not path.is_file() or str(path).startswith(("/dev/", "/proc/")))
        self.path = path = path if self.direct else Path(os.path.realpath(path))
        self.described, self.faults = False, list[str]()
        self._pending: dict[Path, PendingFile] = {}
        self._folders: dict[Path, Path] = {}
        self._stream: BinaryIO | None = None
        if os.path.isdir(path):
            raise ConfigurationError("this is a folder", where=where)
        if path.suffix in (".h5", ".png"):
            raise ConfigurationError(
                f"results are JSON, and files named {path.suffix} beside it hold series and pictures",
                where=where,
                hint=f"Choose a name such as {given.with_suffix('.json')}.",
            )
        try:
            if self.direct and is_special(path):
                self._stream = open_special(path)
            for each in () if self.direct else (path, *map(self.beside, (".h5", MISSED))):
                if is_special(each):
                    raise OSError(errno.EEXIST, "a folder or a device is there", str(each))
                check_writable(each)
        except OSError as error:
            beside = f", {each}" if not self.direct and each != path else ""
            raise ConfigurationError(
                f"results cannot be written here: {error.strerror}",
                where=where + beside,
                hint="Choose a file in a folder that exists and may be written to.",
            ) from error

    @property
    def written(self) -> bool:
        """Whether the JSON file was written."""
        return self.path in self._pending

    @property
    def whole(self) -> bool:
        """Whether the JSON file was written to its end."""
        try:
            return self.written and bool(json.loads(self._pending[self.path].temporary.read_bytes()))
        except (OSError, ValueError):
            return False

    def beside(self, suffix: str) -> Path:
        """Return the path of another file of this result, given its suffix, such as ``.h5``."""
        return self.path.with_name(self.path.name.removesuffix(".json") + suffix)

    def pending(self, path: Path) -> Path:
        """Return where to write a file that `commit` puts at ``path``."""
        if path not in self._pending:
            place = Path(tempfile.gettempdir(), "d5suite-results.json") if self.direct else path
            self._pending[path] = PendingFile(place)
        return self._pending[path].temporary

    @contextlib.contextmanager
    def writing(self, path: Path, what: str, told: list[str]) -> Iterator[Path]:
        """Yield where to write a file; if that fails, leave it out and tell why."""
        try:
            yield self.pending(path)
        except Exception as error:
            if pending := self._pending.pop(path, None):
                pending.discard()
            told.append(f"{what}: {_why(error)}")

    def require_free(self, suffix: str) -> None:
        """Raise `ConfigurationError` if the place of a folder is taken.

        A folder that an earlier run has made there is replaced.
        """
        path = self.beside(suffix)
        if path.exists() and not (path / OURS).is_file():
            raise ConfigurationError(
                "exists, and no earlier run has made it",
                where=str(path),
                hint="Move it, or choose another name for the results.",
            )

    def folder(self, suffix: str) -> Path:
        """Return where to write a folder that `commit` puts beside the result: `require_free`."""
        path = self.beside(suffix)
        if path not in self._folders:
            self.require_free(suffix)
            temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{stem(path)}.", suffix=".part"))
            temporary.chmod(0o755)
            (temporary / OURS).write_text(f"{self.path.name}\n")
            self._folders[path] = temporary
        return self._folders[path]

    def __fspath__(self) -> str:
        return str(self.pending(self.path))

    def __str__(self) -> str:
        return str(self.path)

    def commit(self) -> None:
        """Put all that was written in place: everything or, after an error, the JSON alone."""
        if self.direct:
            self._deliver()
            return
        try:
            commit_all(list(self._pending.values()))
        except OSError as error:
            if not self.written:
                raise
            self._commit_alone()
            self.faults.append(f"the series and pictures: {error.strerror or error}")
        for path, temporary in self._folders.items():
            try:
                shutil.rmtree(path, ignore_errors=True)
                os.rename(temporary, path)
            except OSError as error:
                self.faults.append(f"the folder {path}: {error.strerror or error}")

    def _deliver(self) -> None:
        """Write the JSON to a pipe or terminal, or to a file that is the standard output."""
        if not self.written:
            return
        content = self._pending[self.path].temporary.read_bytes()
        if self._stream is not None:
            write_to_reader(self._stream, content, READER_PATIENCE_S)
        else:
            self.path.write_bytes(content)

    def _commit_alone(self) -> None:
        """Put the JSON in place without the names of files that are not there."""
        pending = self._pending[self.path]
        content = json.loads(pending.temporary.read_bytes())
        for name in ("series", "series_token", "pictures"):
            content.get("d5suite", {}).pop(name, None)
        pending.temporary.write_text(json.dumps(content, indent=4), encoding="utf-8")
        commit_all([pending])

    def discard(self) -> None:
        """Remove what was written, if it was not committed."""
        for temporary in self._folders.values():
            shutil.rmtree(temporary, ignore_errors=True)
        for each in self._pending.values():
            each.discard()
        if self._stream is not None:
            self._stream.close()


DESTINATION = pytest.StashKey[AtomicDestination]()
"""Where the results of this run go."""

OURS = "results-of.txt"
"""File in a folder beside a result: it names the result, and that a later run may replace it."""

MISSED = ".missed.h5"
"""Suffix of a file with partial results of failures."""


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_generate_machine_info(config: pytest.Config) -> dict[str, Any] | None:
    """Describe no machine if `_as_measured` will describe the one that measured."""
    return {} if config.stash[stash.RESULTS] and settings(config).from_jobs is not None else None


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_json(config: pytest.Config, output_json: dict[str, Any]) -> None:
    """Make the JSON strictly valid, describe its measurements, write series and plots.

    pytest-benchmark asks for the JSON first, and then for the content of its storage.
    """
    samples = {id(each["extra_info"]["d5suite"]): each["stats"]["data"] for each in config.stash[stash.RESULTS]}
    ours = [bench for bench in output_json["benchmarks"] if "d5suite" in bench["extra_info"]]
    for bench in ours:
        if (data := samples.get(id(bench["extra_info"]["d5suite"]))) is not None:
            bench["stats"]["data"] = data  # which pytest-benchmark keeps with --benchmark-save-data only
        bench["options"] = taken_options(config, bench.get("options", {}))
        bench.pop("cprofile", None)  # of the replay
    add_derived([bench["extra_info"]["d5suite"] for bench in ours], config)
    finite = _finite(output_json)
    output_json.clear()
    output_json.update(finite)
    if not ours and not config.stash[stash.FAILURES] and not config.stash[stash.KEPT]:
        return
    from d5suite.session.record import SCHEMA

    facts: dict[str, Any] = {"schema": SCHEMA, "measurements": _measurements(config)}
    output_json["d5suite"] = facts
    if config.stash[stash.FAILURES]:
        facts["failures"] = config.stash[stash.FAILURES]
    gathered = settings(config).from_jobs is not None
    if gathered:
        _as_measured(output_json, ours)
    else:
        facts["command"] = ["pytest", *map(str, config.invocation_params.args)]
    destination = config.stash.get(DESTINATION, None)
    if destination is not None and not destination.described:
        destination.described = True
        if not destination.direct:
            try:
                _save_beside(config, destination, output_json, _token(output_json if gathered else None))
            except Exception as error:  # the JSON is whole without them
                destination.faults.append(_why(error))


def _save_beside(
    config: pytest.Config, destination: AtomicDestination, output_json: dict[str, Any], token: str
) -> None:
    """Write series, plots and folders of passes, and name them in the JSON."""
    from d5suite.report.series import save_series

    facts, benchmarks = output_json["d5suite"], output_json["benchmarks"]
    _save_folders(destination, [each for each in benchmarks if "d5suite" in each["extra_info"]])
    records = config.stash[stash.RECORDS]
    series = {each["fullname"]: records[each["fullname"]] for each in benchmarks if each["fullname"] in records}
    path = destination.beside(".h5")
    with destination.writing(path, f"the series {path}", destination.faults) as place:
        save_series(place, series, token)
        facts["series"], facts["series_token"] = path.name, token
    pictures = _save_plots(config, destination, benchmarks, series)
    if pictures:
        facts["pictures"] = pictures


def _why(error: Exception) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else describe_error(error)


def _save_folders(destination: AtomicDestination, benchmarks: list[dict[str, Any]]) -> None:
    """Copy the folders of passes to places beside the result, and name these in the records."""
    from d5suite.passes.base import FILES

    for bench in benchmarks:
        record = bench["extra_info"]["d5suite"]
        for name in record.get("passes", {}):
            part = record.get(name)
            if isinstance(part, dict) and isinstance(part.get(FILES), str) and Path(part[FILES]).is_dir():
                kind = f".{name}"
                own = re.sub(r"[^\w.-]+", "-", f"{record['recipe']}-{record['measurement']}-{bench['param']}")
                try:
                    shutil.copytree(part[FILES], destination.folder(kind) / own)
                    part[FILES] = f"{destination.beside(kind).name}/{own}"
                except (ConfigurationError, OSError) as error:
                    destination.faults.append(f"the folder {destination.beside(kind)}: {_why(error)}")


def _token(content: dict[str, Any] | None) -> str:
    """Return a token for a file's series: equal for equal content, random for None."""
    if content is None:
        return uuid.uuid4().hex
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


def _as_measured(output_json: dict[str, Any], ours: list[dict[str, Any]]) -> None:
    """State when and where jobs ran, instead of when and where their results were gathered."""
    records = [bench["extra_info"]["d5suite"] for bench in ours]
    output_json["datetime"] = max((each["environment"].get("time", "") for each in records), default="")
    for each in records[:1]:
        facts = each["environment"]
        nodes = dict.fromkeys(node["name"] for other in records for node in other.get("nodes", ()))
        output_json["machine_info"] = {
            "node": ",".join(nodes),
            "processor": facts["cpu"].get("model"),
            "machine": facts["os"].get("architecture"),
            "python_implementation": facts["python"]["implementation"],
            "python_version": facts["python"]["version"],
            "system": facts["os"]["system"],
            "release": facts["os"]["release"],
            "cpu": facts["cpu"],
        }


def _measurements(config: pytest.Config) -> dict[str, Any]:
    """Describe each measurement in the file, so that readers do not need its code."""
    return {each["measurement"].name: each["measurement"].describe() for each in config.stash[stash.RESULTS]}


def _save_plots(
    config: pytest.Config, destination: AtomicDestination, benchmarks: list[dict[str, Any]], series: Mapping[str, Any]
) -> list[str]:
    """Save plots of results, and of failures' partial results, beside the JSON; return their names.

    Series of failures are saved in an HDF5 file of their own: `MISSED`.
    """
    from d5suite.report.plots import PLOTS, Plotted, save_plot
    from d5suite.report.series import save_series

    kinds: dict[str, str] = {}
    found: dict[str, list[Plotted]] = {}
    plots = {each["group"]: each["measurement"].plot for each in config.stash[stash.RESULTS]}
    plots = {group: kind for group, kind in plots.items() if not (kind in PLOTS and PLOTS[kind].of_page)}
    for bench in benchmarks:
        if plots.get(bench["group"]) and bench["fullname"] in series:
            kinds[bench["group"]] = plots[bench["group"]]
            facts = bench["extra_info"]["d5suite"]
            found.setdefault(bench["group"], []).append(Plotted(bench["param"], facts, series[bench["fullname"]]))
    kept = config.stash[stash.KEPT]
    for each in kept.values():
        if each.measurement.plot in PLOTS and PLOTS[each.measurement.plot].of_series:
            kinds[each.group] = each.measurement.plot
            unfinished = Plotted(f"{each.backend}, not finished", each.facts, each.facts["series"])
            found.setdefault(each.group, []).append(unfinished)
    if kept:
        missed = destination.beside(MISSED)
        with destination.writing(missed, f"the series of failures {missed}", destination.faults) as place:
            save_series(place, {name: each.facts["series"] for name, each in kept.items()})
    pictures = []
    for group, results in found.items():
        picture = _picture_path(destination, group, kinds[group])
        with destination.writing(picture, f"no picture of {group}", config.stash[stash.REMARKS]) as place:
            save_plot(kinds[group], place, group, results)
            pictures.append(picture.name)
    return pictures


def _picture_path(destination: AtomicDestination, group: str, kind: str) -> Path:
    from d5suite.report.plots import PLOTS

    suffix = PLOTS[kind].suffix if kind in PLOTS else ""
    return destination.beside(f".{group.partition('/')[0]}{suffix}.png")


def where_kept(config: pytest.Config, kept: stash.Kept) -> str:
    """Return the end of a failure's message: where its partial results will be; or nothing."""
    destination = config.stash.get(DESTINATION, None)
    if destination is None or destination.direct:
        return ""
    from d5suite.report.plots import PLOTS

    what, plot = "its samples: ", kept.measurement.plot
    if plot in PLOTS and PLOTS[plot].of_series:
        what = f"curves of its runs: {_picture_path(destination, kept.group, plot)}, "
    return f"\n{what}{destination.beside(MISSED)}"


def add_derived(records: Sequence[dict[str, Any]], config: pytest.Config) -> None:
    """Let measurements add what needs all records of the run: `Measurement.derive`."""
    measurements = {each["measurement"].name: each["measurement"] for each in config.stash[stash.RESULTS]}
    alike: dict[Any, list[dict[str, Any]]] = {}
    for record in records:
        alike.setdefault(measurements[record["measurement"]].derive.__func__, []).append(record)
    for own in alike.values():
        measurements[own[0]["measurement"]].derive(own)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


@pytest.hookimpl(wrapper=True)
def pytest_sessionfinish(session: pytest.Session) -> Generator[None, object, object]:
    """Put the files in place once pytest-benchmark has saved; the JSON whatever else fails."""
    config = session.config
    destination = config.stash.get(DESTINATION, None)
    result, faults = None, list[str]()
    try:
        try:
            result = yield
        except Exception as error:
            if not stores(config) or not (destination is None or destination.whole):
                raise
            storage = config.option.benchmark_storage
            faults.append(f"--benchmark-storage {storage}: the results could not be stored: {_why(error)}")
        if destination is not None:
            if not destination.written and _has_failed(config):
                _save_failures(config)
            elif not destination.written and not destination.direct:
                _save_plots(config, destination, [], {})
                _tell_of_older(session, destination)
            destination.commit()
            faults += [f"--benchmark-json {destination}: could not be saved: {each}" for each in destination.faults]
    except OSError as error:
        if destination is None:
            raise
        faults.append(
            f"--benchmark-json {destination}: the results could not be saved: {error.strerror or error}; "
            "what was there before is untouched"
        )
    finally:
        if destination is not None:
            destination.discard()
        if stash.SESSION in config.stash:
            config.stash[stash.SESSION].close()
    if faults:
        config.stash[stash.REMARKS] += [f"ERROR: {each}" for each in faults]
        session.exitstatus = pytest.ExitCode.USAGE_ERROR
    return result


def _has_failed(config: pytest.Config) -> bool:
    """Return whether own measurements failed; jobs that are gathered may not have run yet."""
    return bool(config.stash[stash.FAILURES]) and settings(config).from_jobs is None


def _save_failures(config: pytest.Config) -> None:
    """Save failures where nothing succeeded: pytest-benchmark then saves no file."""
    session, hook = config._benchmarksession, config.hook  # type: ignore[attr-defined]
    commit = hook.pytest_benchmark_generate_commit_info(config=config)
    hook.pytest_benchmark_update_commit_info(config=config, commit_info=commit)
    content = hook.pytest_benchmark_generate_json(
        config=config, benchmarks=[], include_data=True, machine_info=session.get_machine_info(), commit_info=commit
    )
    hook.pytest_benchmark_update_json(config=config, benchmarks=[], output_json=content)
    session.save_json(content)


def _tell_of_older(session: pytest.Session, destination: AtomicDestination) -> None:
    ours = session.config.stash[stash.DESELECTED] or any(stash.target(item) for item in session.items)
    if ours and destination.path.exists() and not session.config.option.collectonly:
        session.config.stash[stash.REMARKS].append(
            f"{destination} is of an earlier run: this one has nothing to save there"
        )
