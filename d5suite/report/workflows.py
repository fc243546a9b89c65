"""Lines under a table of workflows: what limits each one, and the settings that were tried.

Imports its neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from d5suite.report.formats import figure
from d5suite.report.reading import printable

Shown = tuple[str, Mapping[str, Any]]


def workflow_lines(shown: Sequence[Shown]) -> Iterator[str]:
    """Yield a line for the bottleneck of each workflow, and one for the settings that were tried.

    Settings are kinds of couplings, placements and buffers; everything else must be equal.

    Parameters
    ----------
    shown : sequence of (str, mapping)
        Names and records.
    """
    groups: dict[str, list[Shown]] = {}
    for name, info in shown:
        if info["measurement"] == "workflow":
            groups.setdefault(_what(name, info), []).append((name, info))
    for what, found in groups.items():
        settings = [_setting(info) for _, info in found]
        keys = dict.fromkeys(key for each in settings for key in each)
        differ = [key for key in keys if len({each.get(key) for each in settings}) > 1]
        labels = [", ".join(f"{key} {each[key]}" for key in differ if key in each) for each in settings]
        for label, (name, info) in zip(labels, found, strict=True):
            told = info["workflow"]["bottleneck"]
            yield printable(f"{name}{f' ({label})' * bool(label)}: {told['sentence']}; to mend it, {told['mend']}")
        if differ:
            yield printable(f"{what}: {_tried(labels, [info for _, info in found])}")


def _what(name: str, info: Mapping[str, Any]) -> str:
    """Return the name of a workflow on a backend without the kind of its couplings."""
    title, _, backend = name.partition("/")
    kinds = {each["kind"] for each in info["workflow"]["couplings"].values()}
    for kind in kinds:
        title = title.removesuffix(f"-{kind}")
    parts = [title, backend.partition(", ")[2], info["preset"], info["precision"]]
    return ", ".join([*parts, f"{info['threads'] // info['ranks']} threads per rank"])


def _setting(info: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings that may differ between runs of a workflow."""
    found = {"placement": str(info["workflow"]["placement"])}
    for key, what in (("kind", "coupling"), ("capacity", "capacity"), ("policy", "policy")):
        values = {name: str(each[key]) for name, each in info["workflow"]["couplings"].items()}
        alike = len(set(values.values())) == 1
        found |= {what: next(iter(values.values()))} if alike else {f"{what} of {k}": v for k, v in values.items()}
    return found


def _tried(labels: Sequence[str], infos: Sequence[Mapping[str, Any]]) -> str:
    """Return the makespans of several settings, the shortest first, and what limits that one."""
    order = sorted(range(len(infos)), key=lambda each: float(infos[each]["median_s"]))
    times = [
        f"{labels[each]} {figure(infos[each]['median_s'])} s "
        f"({'–'.join(figure(bound) for bound in infos[each]['median_ci95'])})"
        for each in order
    ]
    left = infos[order[0]]["workflow"]["bottleneck"]["sentence"]
    return f"makespans of {len(infos)} settings, one after the other: {', '.join(times)}; with the first, {left}"
