"""Memory limits of a container or a batch job: Linux's control groups, versions 1 and 2.

The kernel kills what exceeds them, even if the machine has memory left (cgroups(7); Linux,
admin-guide/cgroup-v2 and cgroup-v1/memory). Imports the standard library, and psutil lazily.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")


def control_groups(controller: str) -> list[Path]:
    """List the folders of this process's control groups, innermost first.

    Parameters
    ----------
    controller : str
        Such as ``cpu`` or ``memory``; groups without a ``cpu.stat`` or ``memory.stat`` are left
        out.
    """
    folders: list[Path] = []
    for _, controllers, path in (line.split(":", 2) for line in _lines(OWN_GROUPS) if line.count(":") >= 2):
        if controllers == "":  # version 2
            roots = [ROOT, ROOT / "unified"]
        elif controller in controllers.split(","):
            roots = [ROOT / controllers, ROOT / controller]
        else:
            continue
        for root in roots:
            group = root / path.lstrip("/")
            folders += [folder for folder in (group, *group.parents) if folder.is_relative_to(root)]
    return list(dict.fromkeys(each for each in folders if (each / f"{controller}.stat").exists()))


def total_memory() -> int:
    """Return the bytes that this process may use: the machine's memory, or the least limit."""
    return min([_machine().total, *(limit for _, limit in _limited())])


def available_memory() -> int:
    """Return the bytes that are still available to this process without swapping.

    In a group with a limit: the limit less the memory in use, cached files not counted.
    """
    free = [limit - _used(group) for group, limit in _limited()]
    return max(0, min([int(_machine().available), *free]))


def memory_limit() -> int | None:
    """Return the least memory limit of this process's control groups; None without a limit."""
    return min((limit for _, limit in _limited()), default=None)


def _machine() -> Any:
    import psutil

    return psutil.virtual_memory()


def _limited() -> Iterator[tuple[Path, int]]:
    """Yield control groups with a limit below the machine's memory, and the limit in bytes."""
    most = _machine().total
    for group in control_groups("memory"):
        for name in ("memory.max", "memory.high", "memory.limit_in_bytes"):
            limit = _number(group / name)
            if limit is not None and limit < most:
                yield group, limit


def _used(group: Path) -> int:
    """Return the bytes in use, without cached files, which the kernel gives up first."""
    used = _number(group / "memory.current")
    total = "" if used is not None else "total_"  # version 1's names of sums over nested groups
    used = used if used is not None else _number(group / "memory.usage_in_bytes") or 0
    cached = {f"{total}inactive_file", f"{total}active_file"}
    pairs = (line.split() for line in _lines(group / "memory.stat"))
    return max(0, used - sum(int(pair[1]) for pair in pairs if len(pair) == 2 and pair[0] in cached))


def _number(path: Path) -> int | None:
    """Return what a file holds; None if there is no such file, or no number, as in ``max``."""
    with contextlib.suppress(ValueError):
        return int("".join(_lines(path)[:1]))
    return None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []
