"""Where results are from: machines, commits and versions, and which of these differ by part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from d5suite.report.runs import machine_of
from d5suite.report.study.gathered import Gathered
from d5suite.study.state import COMMIT, WITH_CHANGES, parts_by

Facts = list[tuple[str, str, dict[str, str]]]
"""The part, the name and the facts of each run."""


class Origin(NamedTuple):
    """A machine of a study.

    Attributes
    ----------
    name : str
    machine, software : Facts
        Facts of every run that has a result.
    """

    name: str
    machine: Facts
    software: Facts


def origins(found: Gathered) -> list[Origin]:
    """Return where results are from, as the study has noted and as the results say."""
    every: dict[str, Origin] = {}
    places: dict[tuple[str, str], tuple[dict[str, str], dict[str, str]]] = {}
    for run in found.runs:
        if run.file:
            origin = every.setdefault(run.machine, Origin(run.machine, [], []))
            facts = dict(run.state.made_on), {**run.state.made_with, COMMIT: run.commit}
            places[run.machine, run.name] = facts
            origin.machine.append((run.state.part, run.name, facts[0]))
            origin.software.append((run.state.part, run.name, facts[1]))
    versions: dict[tuple[str, str], dict[str, set[str]]] = {}
    for row in found.rows:
        key = found.run_of(row).machine, found.run_of(row).name
        places[key][0].update(machine_of(row.record["environment"]) | _system(row.record["environment"]))
        for name, version in _versions(row.record).items():  # backends may bring several versions of a library
            versions.setdefault(key, {}).setdefault(name, set()).add(version)
    for key, several in versions.items():
        places[key][1].update({name: " / ".join(sorted(each)) for name, each in several.items()})
    for origin in every.values():
        _name_builds(origin.software)
    return list(every.values())


def _system(environment: Mapping[str, Any]) -> dict[str, str]:
    system = environment.get("os")
    if not isinstance(system, dict):
        return {}
    return {"system": " ".join(str(system[key]) for key in ("name", "release") if key in system)}


def _versions(record: Mapping[str, Any]) -> dict[str, str]:
    python, known = record["environment"].get("python"), record["backend"].get("versions")
    found = {"Python": str(python["version"])} if isinstance(python, dict) and "version" in python else {}
    found |= {str(name): str(value) for name, value in known.items()} if isinstance(known, dict) else {}
    return found | {record["backend"]["name"]: str(record["backend"]["version"])}


def _name_builds(software: Facts) -> None:
    """Add the build, such as ``+cpu``, to versions that lack it, as in a package's metadata."""
    longest: dict[tuple[str, str], str] = {}
    for *_, facts in software:
        for name, value in facts.items():
            public = name, value.partition("+")[0]
            longest[public] = max(longest.get(public, ""), value, key=len)
    for *_, facts in software:
        facts.update({name: longest[name, value.partition("+")[0]] for name, value in facts.items()})


def told(facts: Facts) -> dict[str, str]:
    """Return facts as the report states them; if values differ, each one names its parts."""
    found = {}
    for name in _names(facts):
        values = parts_by(facts, name)
        each = [f"{value} ({', '.join(parts)})" if len(values) > 1 else value for value, parts in values.items()]
        if each:
            found[name] = ", ".join(each)
    return found


def mixed(found: Gathered) -> Iterator[str]:
    """Say which parts were measured with other software or on another machine than the rest."""
    every = origins(found)
    for origin in every:
        on = f" on {origin.name}" if len(every) > 1 else ""
        commits = parts_by(origin.software, COMMIT)
        if len(commits) > 1:
            each = ", ".join(f"{commit} measured {joined(parts)}" for commit, parts in commits.items())
            yield f"Parts were measured by different commits of d5suite{on}: {each}. They may differ for this reason."
        changed = [part for commit, parts in commits.items() if commit.endswith(WITH_CHANGES) for part in parts]
        if changed:
            yield f"The working tree had changes that no commit holds when {joined(changed)} ran{on}."
        for facts in (origin.machine, origin.software):
            for name in _names(facts):
                values = parts_by(facts, name)
                if name != COMMIT and len(values) > 1:
                    each = ", ".join(f"{value} for {joined(parts)}" for value, parts in values.items())
                    yield f"{name} differs between parts{on}: {each}."


def _names(facts: Facts) -> list[str]:
    return list(dict.fromkeys(name for *_, each in facts for name in each))


def joined(names: Sequence[str]) -> str:
    """Return names as a sentence lists them."""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
