"""The file of tuned settings, which ``pytest --tuned`` reads: TOML of names and numbers.

It holds values of knobs, not variables: what a value sets is looked up in this d5suite, so that a
file of a stranger cannot set a variable of its choice. A file is for one kind of machine. Imports
`d5suite.backends`, `d5suite.instruments` and its neighbours.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from d5suite.backends import discover
from d5suite.errors import ConfigurationError, D5Error
from d5suite.files import read_toml, write_bytes
from d5suite.instruments.environment import describe
from d5suite.instruments.threads import allowed_cpus
from d5suite.job import Ranks
from d5suite.levels.backend import Backend
from d5suite.levels.knobs import LOADERS, MODE, OF_RANKS, WHOLE, TuningKnob
from d5suite.tuning.common import common_knobs, loader_knobs, rank_knobs
from d5suite.tuning.space import Space

SCHEMA = "d5suite-tuned-1"

LARGEST = {"threads": 4096, "batch_size": 2**31 - 1, LOADERS: 4096}
"""The most that numbers in the file may be."""

KINDS: Mapping[str, type | tuple[type, ...]] = {
    "case": str, "measurement": str, "backend": str, "version": str, "goal": str, "knobs": dict,
}  # fmt: skip


@dataclass(frozen=True)
class Tuned:
    """Tuned settings of one case on one backend.

    Attributes
    ----------
    case, measurement, backend, version, goal : str
        What was tuned; the version is the framework's.
    knobs : mapping of str to str
        Values that differ from the default.
    figures : mapping of str to object
        Further entries of the file: the speed-up and its interval.
    """

    case: str
    measurement: str
    backend: str
    version: str
    goal: str
    knobs: Mapping[str, str]
    figures: Mapping[str, Any] = field(default_factory=dict)


def kind_of_machine(device: str) -> dict[str, Any]:
    """Return what must be the same where a file is used."""
    found = describe()
    cpu = found["cpu"]
    return {
        "cpu": str(cpu["model"]),
        "architecture": str(found["os"]["architecture"]),
        "cpus": len(allowed_cpus()),
        "quota_cpus": float(cpu["quota_cpus"] or 0.0),
        "device": device,
    }


def space_of(
    backend: Backend, *, threads: int, device: str = "cpu", mode: str | None = None,
    further: Sequence[TuningKnob] = (), loader_workers: int | None = None, ranks: Ranks | None = None,
) -> Space:  # fmt: skip
    """Return what can be tuned of a backend here.

    Parameters
    ----------
    backend : Backend
    threads : int
        The threads of the default.
    device : str
        Modes that the device lacks are left out.
    mode : str, optional
        The mode of the default; by default the backend's.
    further : sequence of TuningKnob
        What the user allows, such as precisions.
    loader_workers : int, optional
        The loader processes of the default, where data is loaded.
    ranks : Ranks, optional
        How ranks train together by default, if they do.
    """
    mode = mode or backend.default_mode
    own = list(backend.knobs())
    for place, knob in enumerate(own):
        if knob.name == MODE:
            able = [each for each in knob.values if each != mode and _has_mode(backend, each, device)]
            own[place] = replace(knob, values=(mode, *able))
    modes = {value for knob in own if knob.name == MODE for value in knob.values} or {mode}
    held: list[TuningKnob] = []
    for knob in own:  # without modes that are not here, and what depends on them alone
        when = {name: tuple(v for v in values if name != MODE or v in modes) for name, values in knob.when.items()}
        if all(when.values()) and len(knob.values) > 1:
            when = {name: values for name, values in when.items() if name != MODE or set(values) != modes}
            held.append(replace(knob, when=when))
    cpus = len(allowed_cpus())
    loaders = [] if loader_workers is None else loader_knobs(loader_workers, cpus)
    together = [] if ranks is None or ranks.size == 1 else rank_knobs(ranks, backend, device)
    return Space((*held, *common_knobs(threads, cpus), *loaders, *together, *further))


def _has_mode(backend: Backend, mode: str, device: str) -> bool:
    return device in backend.of_mode(mode).devices and backend.problem(mode) is None


def write_tuned(path: Path, machine: Mapping[str, Any], entries: Sequence[Tuned]) -> None:
    """Write the file whole or not at all."""
    lines = [f"schema = {_toml(SCHEMA)}", "", "[machine]", *_pairs(machine)]
    for each in entries:
        known = {name: getattr(each, name) for name in KINDS if name != "knobs"}
        lines += ["", "[[tuned]]", *_pairs({**known, **each.figures}), "", "[tuned.knobs]", *_pairs(each.knobs)]
    write_bytes(path, ("\n".join(lines) + "\n").encode())


def _pairs(values: Mapping[str, Any]) -> list[str]:
    return [f"{_toml(name)} = {_toml(value)}" for name, value in values.items()]


def _toml(value: Any) -> str:
    """Return a text, number or list as TOML, whose strings are JSON's without half characters."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else json.dumps(value)


def read_tuned(path: Path) -> tuple[dict[str, Any], list[Tuned]]:
    """Read a file: the machine that it is for, and its entries.

    Raises
    ------
    ConfigurationError
        If it cannot be read or is no such file, or names what this d5suite does not know.
    """
    where = str(path)
    content, _ = read_toml(path)
    entries = content.get("tuned", [])
    shaped = isinstance(content.get("machine"), dict) and isinstance(entries, list)
    if content.get("schema") != SCHEMA or not shaped:
        raise ConfigurationError(f"not a file of tuned settings: its schema is not {SCHEMA!r}", where=where,
                                 hint="Make one with d5suite tune.")  # fmt: skip
    return content["machine"], [_entry(each, f"{where}, tuned {place}") for place, each in enumerate(entries, 1)]


def _entry(content: Any, where: str) -> Tuned:
    if not isinstance(content, dict):
        raise ConfigurationError("not a table", where=where)
    for name, kind in KINDS.items():
        if not isinstance(content.get(name), kind):
            raise ConfigurationError(f"{name!r} is missing or of another type", where=where)
    knobs = content["knobs"]
    if not all(isinstance(value, str) for value in knobs.values()):
        raise ConfigurationError("values of knobs are texts", where=f"{where}, knobs")
    figures = {name: value for name, value in content.items() if name not in KINDS}
    return Tuned(**{name: content[name] for name in KINDS}, figures=figures)


@dataclass(frozen=True)
class TunedProfile:
    """Tuned settings that are used here.

    Attributes
    ----------
    modes : mapping of (str, str) to str
        By case and backend: the tuned mode.
    settings : mapping
        As `d5suite.cases.case.Settings.tuned`.
    remarks : list of str
        What a reader of the results should know.
    """

    modes: Mapping[tuple[str, str], str]
    settings: Mapping[tuple[str, str, str], Mapping[str, Any]]
    remarks: list[str]


def use_tuned(path: Path, *, threads: int, device: str, loader_workers: int, anywhere: bool = False) -> TunedProfile:
    """Read a file for use here.

    Parameters
    ----------
    path : Path
    threads, loader_workers : int
    device : str
        Device of this run.
    anywhere : bool
        Use it on another kind of machine, too.

    Raises
    ------
    ConfigurationError
        As `read_tuned`; if it is for another kind of machine; or if a knob is not to be had here.
    """
    machine, entries = read_tuned(path)
    here = kind_of_machine(device)
    differ = [f"{name}: {machine.get(name)!r}, here {here[name]!r}" for name in here if machine.get(name) != here[name]]
    if differ and not anywhere:
        raise ConfigurationError(
            f"these settings were tuned on another kind of machine ({'; '.join(differ)})", where=f"--tuned {path}",
            hint="Tune them here with d5suite tune, or use them all the same with --tuned-anywhere.",
        )  # fmt: skip
    modes: dict[tuple[str, str], str] = {}
    settings: dict[tuple[str, str, str], Mapping[str, Any]] = {}
    remarks = [f"{path} is of another kind of machine: {'; '.join(differ)}"] if differ else []
    backends = discover()[0]
    for number, each in enumerate(entries, 1):
        where = f"--tuned {path}, tuned {number}"
        if each.backend not in backends:
            continue
        backend = backends[each.backend]
        try:
            values = dict(each.knobs)
            fields = _numbers(values)
            if (precision := values.pop("precision", None)) is not None:
                backend.check(precision=precision)
                fields["precision"] = precision
            of_ranks = {name: values.pop(name) for name in OF_RANKS if name in values}
            for name, value in of_ranks.items():
                if not re.fullmatch(r"[\w.:=-]{1,200}", value, re.ASCII):
                    raise ConfigurationError(f"{name} has no value {value!r}")
            space = space_of(backend, threads=threads, device=device, loader_workers=loader_workers)
            change = space.change(space.complete(values))
        except D5Error as error:
            raise ConfigurationError(error.what, where=where, hint=error.hint) from None
        if (version := backend.version()) != each.version:
            remarks.append(
                f"{each.case} on {each.backend} was tuned with version {each.version}, and this is {version}"
            )
        if of_ranks:
            options = " ".join(f"--{name} {value}" for name, value in of_ranks.items())
            remarks.append(f"{each.case} on {each.backend} was tuned for several ranks: give {options}, too")
        if fields.keys() & {"threads", LOADERS}:
            fields[LOADERS] = min(fields.get(LOADERS, loader_workers), fields.get("threads", threads))
        mode = change.mode or backend.default_mode
        modes[each.case, each.backend] = mode
        settings[each.case, each.backend, mode] = {**fields, "environment": change.environment}
    return TunedProfile(modes, settings, remarks)


def _numbers(values: dict[str, str]) -> dict[str, Any]:
    """Take the settings that are numbers out of an entry's knobs."""
    found: dict[str, Any] = {}
    for name in WHOLE:
        text = values.pop(name, None)
        if text is not None:
            if not (text.isascii() and text.isdigit() and 1 <= int(text) <= LARGEST[name]):
                raise ConfigurationError(f"{name} has no value {text!r}")
            found[name] = int(text)
    return found
