"""What machine and software a measurement ran on: what does not change during a run (see `machine` for what does).

Imports the standard library, and psutil late. What cannot be read is absent from the description; nothing here raises.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from d5suite.measure.clock import measure_clock
from d5suite.measure.threads import allowed_cpus

VARIABLE_PREFIXES = (
    "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "BLIS_", "VECLIB_", "NUMEXPR_", "DNNL_", "ONEDNN_",
    "CUDA_", "CUBLAS_", "CUDNN_", "NCCL_", "NVIDIA_", "MALLOC_", "LD_PRELOAD", "PYTHONHASHSEED", "PYTHONMALLOC",
)  # fmt: skip
"""Variables that begin so change speed or results: threads, numerical libraries, GPUs, allocators."""

NVIDIA_SMI_LIMIT_S = 10.0
"""A healthy nvidia-smi answers within a second or two; with a hung driver it never does."""


def describe(distributions: Iterable[str] = (), variables: Iterable[str] = ()) -> dict[str, Any]:
    """Describe the machine and its software by JSON-able values.

    Parameters
    ----------
    distributions : iterable of str
        Names of installed Python distributions whose versions to record; None stands for one that is not installed.
    variables : iterable of str
        More beginnings of environment variables to record, such as an adapter's own.

    Returns
    -------
    dict
        ``cpu``, ``memory``, ``os``, ``python``, ``virtualization``, ``environment_variables``, ``distributions``,
        ``gpus``, ``clock``.
    """
    prefixes = (*VARIABLE_PREFIXES, *variables)
    return {
        "cpu": _describe_cpu(),
        "memory": _describe_memory(),
        "os": {"system": platform.system(), "release": platform.release(), "architecture": platform.machine()}
        | _distribution_of_os(),
        "python": {
            "implementation": platform.python_implementation(),
            "version": platform.python_version(),
            "compiler": platform.python_compiler(),
        },
        "virtualization": _virtualization(),
        "environment_variables": {
            name: value for name, value in sorted(os.environ.items()) if name.startswith(prefixes)
        },
        "distributions": {name: _version(name) for name in distributions},
        "gpus": describe_gpus(),
        "clock": measure_clock().to_dict(),
    }


def describe_gpus() -> list[dict[str, str]]:
    """List name, driver and memory of each NVIDIA GPU; empty where nvidia-smi is missing or does not answer."""
    keys = ("name", "driver_version", "memory.total", "compute_cap", "power.limit", "mig.mode.current")
    rows = query_nvidia_smi("gpu", keys) or query_nvidia_smi("gpu", keys[:3]) or []  # older drivers know fewer keys
    return [{key.replace(".", "_"): value for key, value in row.items()} for row in rows]


def query_nvidia_smi(what: str, keys: tuple[str, ...]) -> list[dict[str, str]] | None:
    """Return the rows of ``nvidia-smi --query-<what>=<keys>``; None where it is missing, fails or takes too long."""
    command = ["nvidia-smi", f"--query-{what}={','.join(keys)}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=NVIDIA_SMI_LIMIT_S, check=True, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError):
        return None
    rows = [[cell.strip() for cell in line.split(",")] for line in answer.stdout.splitlines() if line.strip()]
    return [dict(zip(keys, row, strict=True)) for row in rows if len(row) == len(keys)]


def cpu_quota() -> float | None:
    """Return the CPUs that the control groups above this process allow on average; None without a limit.

    The least ``cpu.max`` (version 2) or ``cpu.cfs_quota_us / cpu.cfs_period_us`` (version 1) from this process's group
    up to the root (cgroups(7)).
    """
    quotas: list[float] = []
    for folder in cpu_control_groups():
        try:
            if (folder / "cpu.max").exists():
                quota, period = (folder / "cpu.max").read_text().split()
            else:
                quota, period = (
                    (folder / name).read_text().strip() for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")
                )
            if quota not in ("max", "-1"):
                quotas.append(int(quota) / int(period))
        except (OSError, ValueError, ZeroDivisionError):
            continue
    return min(quotas, default=None)


def cpu_control_groups() -> list[Path]:
    """List the control groups of this process that have a CPU controller, innermost first, as folders."""
    lines = [line.split(":", 2) for line in (read_text("/proc/self/cgroup") or "").splitlines()]
    folders: list[Path] = []
    for _, controllers, path in (line for line in lines if len(line) == 3):
        if controllers == "":
            roots = [Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified")]
        elif "cpu" in controllers.split(","):
            roots = [Path("/sys/fs/cgroup") / controllers, Path("/sys/fs/cgroup/cpu")]
        else:
            continue
        for root in roots:
            group = root / path.lstrip("/")
            folders += [folder for folder in (group, *group.parents) if folder.is_relative_to(root)]
    with_cpu = [folder for folder in folders if (folder / "cpu.stat").exists()]
    return list(dict.fromkeys(with_cpu))


def read_text(path: str | Path) -> str | None:
    """Return the text of a small system file; None where it cannot be read."""
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return None


def current_frequency_mhz(cpus: Iterable[int]) -> float | None:
    """Return the mean frequency of the given CPUs now, in MHz; None where the system does not tell, as in many VMs."""
    values = [read_text(f"/sys/devices/system/cpu/cpu{cpu}/cpufreq/scaling_cur_freq") for cpu in cpus]
    known = [int(value) / 1000 for value in values if value and value.isdigit()]
    return sum(known) / len(known) if known else None


def _describe_cpu() -> dict[str, Any]:
    import psutil

    allowed = allowed_cpus()
    information = _first_processor()
    cpufreq = Path("/sys/devices/system/cpu") / f"cpu{allowed[0]}" / "cpufreq"
    frequency = {
        "current": current_frequency_mhz(allowed),
        "reported": _as_float(information.get("cpu MHz")),
        "least": _kilohertz(read_text(cpufreq / "scaling_min_freq")),
        "most": _kilohertz(read_text(cpufreq / "scaling_max_freq")),
    }
    flags = information.get("flags", "").split()
    return {
        "model": information.get("model name") or platform.processor() or platform.machine(),
        "logical_cores": psutil.cpu_count(logical=True),
        "physical_cores": psutil.cpu_count(logical=False),
        "allowed_cpus": allowed,
        "quota_cpus": cpu_quota(),
        "frequency_mhz": {name: value for name, value in frequency.items() if value is not None},
        "governor": read_text(cpufreq / "scaling_governor"),
        "vector_extensions": [flag for flag in flags if flag.startswith(("avx", "amx", "sse4_2", "sve", "asimd"))],
    }


def _first_processor() -> dict[str, str]:
    """Read the fields of the first processor in /proc/cpuinfo."""
    first = (read_text("/proc/cpuinfo") or "").split("\n\n")[0]
    pairs = (line.split(":", 1) for line in first.splitlines() if ":" in line)
    return {key.strip(): value.strip() for key, value in pairs}


def _describe_memory() -> dict[str, int]:
    import psutil

    try:
        return {"total_bytes": psutil.virtual_memory().total, "swap_bytes": psutil.swap_memory().total}
    except OSError:
        return {}


def _distribution_of_os() -> dict[str, str]:
    try:
        return {"name": platform.freedesktop_os_release()["PRETTY_NAME"]}
    except (OSError, KeyError):
        return {}


def _virtualization() -> dict[str, Any]:
    """Hints, not proof: files and flags that containers and virtual machines leave."""
    container = next(
        (
            kind
            for kind, present in (
                ("docker", Path("/.dockerenv").exists()),
                ("podman", Path("/run/.containerenv").exists()),
                (os.environ.get("container", ""), "container" in os.environ),  # noqa: SIM112 (set so by systemd)
                ("kubernetes", "KUBERNETES_SERVICE_HOST" in os.environ),
                ("singularity", "SINGULARITY_NAME" in os.environ or "APPTAINER_NAME" in os.environ),
            )
            if present
        ),
        None,
    )
    return {
        "container": container,
        "virtual_machine": "hypervisor" in _first_processor().get("flags", "").split(),
        "vendor": read_text("/sys/class/dmi/id/sys_vendor"),
    }


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _as_float(text: str | None) -> float | None:
    try:
        return float(text) if text else None
    except ValueError:
        return None


def _kilohertz(text: str | None) -> float | None:
    value = _as_float(text)
    return None if value is None else value / 1000
