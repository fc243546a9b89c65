"""The machine and software of a measurement: facts that do not change during a run.

See `machine` for the state that does. Unreadable facts are omitted; nothing here raises. Imports
the standard library, its neighbours, and psutil lazily.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from d5suite.instruments.clock import measure_clock
from d5suite.instruments.control_groups import control_groups, memory_limit
from d5suite.instruments.gpus import describe_gpus
from d5suite.instruments.nvml import hide_uuids
from d5suite.instruments.threads import allowed_cpus

VARIABLES = frozenset(
    """
OMP_NUM_THREADS OMP_THREAD_LIMIT OMP_DYNAMIC OMP_PROC_BIND OMP_PLACES OMP_SCHEDULE OMP_STACKSIZE OMP_WAIT_POLICY
OMP_NESTED OMP_MAX_ACTIVE_LEVELS GOMP_CPU_AFFINITY GOMP_SPINCOUNT GOMP_STACKSIZE
KMP_AFFINITY KMP_BLOCKTIME KMP_HW_SUBSET KMP_LIBRARY KMP_STACKSIZE KMP_DUPLICATE_LIB_OK
MKL_NUM_THREADS MKL_DOMAIN_NUM_THREADS MKL_DYNAMIC MKL_CBWR MKL_DEBUG_CPU_TYPE MKL_ENABLE_INSTRUCTIONS
MKL_INTERFACE_LAYER MKL_THREADING_LAYER MKL_VERBOSE
OPENBLAS_NUM_THREADS OPENBLAS_CORETYPE GOTO_NUM_THREADS BLIS_NUM_THREADS BLIS_ARCH_TYPE VECLIB_MAXIMUM_THREADS
NUMEXPR_NUM_THREADS NUMEXPR_MAX_THREADS
DNNL_MAX_CPU_ISA DNNL_CPU_ISA_HINTS DNNL_DEFAULT_FPMATH_MODE DNNL_PRIMITIVE_CACHE_CAPACITY DNNL_VERBOSE
ONEDNN_MAX_CPU_ISA ONEDNN_CPU_ISA_HINTS ONEDNN_DEFAULT_FPMATH_MODE ONEDNN_PRIMITIVE_CACHE_CAPACITY ONEDNN_VERBOSE
CUDA_VISIBLE_DEVICES CUDA_DEVICE_ORDER CUDA_DEVICE_MAX_CONNECTIONS CUDA_LAUNCH_BLOCKING CUDA_MODULE_LOADING
CUDA_CACHE_DISABLE CUDA_FORCE_PTX_JIT CUDA_MPS_ACTIVE_THREAD_PERCENTAGE
CUBLAS_WORKSPACE_CONFIG CUBLASLT_WORKSPACE_SIZE NVIDIA_TF32_OVERRIDE NVIDIA_VISIBLE_DEVICES
NCCL_ALGO NCCL_PROTO NCCL_P2P_DISABLE NCCL_SHM_DISABLE NCCL_IB_DISABLE NCCL_IB_HCA NCCL_SOCKET_IFNAME
GLOO_SOCKET_IFNAME OMPI_MCA_btl OMPI_MCA_pml OMPI_MCA_btl_tcp_if_include UCX_NET_DEVICES UCX_TLS
FI_PROVIDER FI_TCP_IFACE
MALLOC_ARENA_MAX MALLOC_CHECK_ MALLOC_CONF MALLOC_MMAP_MAX_ MALLOC_MMAP_THRESHOLD_ MALLOC_PERTURB_ MALLOC_TOP_PAD_
MALLOC_TRIM_THRESHOLD_ GLIBC_TUNABLES LD_PRELOAD PYTHONHASHSEED PYTHONMALLOC PYTHONOPTIMIZE
MIMALLOC_ALLOW_LARGE_OS_PAGES D5SUITE_PLACEMENT D5SUITE_PREFETCH
""".split()  # noqa: SIM905 (one name a line would be 70 lines)
)
"""Variables that affect speed or results: threads, libraries, GPUs, allocators.

Exact names, not prefixes: results are published, and a variable with the same prefix may hold a
licence or a password.
"""


def describe(distributions: Iterable[str] = (), variables: Iterable[str] = ()) -> dict[str, Any]:
    """Describe the machine and its software as JSON-able values.

    Parameters
    ----------
    distributions : iterable of str
        Python distributions whose versions to record; the version is None if not installed.
    variables : iterable of str
        Further environment variables to record, such as an adapter's own. UUIDs of GPUs in their
        values are hashed.

    Returns
    -------
    dict
        ``cpu``, ``memory``, ``os``, ``python``, ``virtualization``, ``environment_variables``,
        ``distributions``, ``gpus``, ``clock``, ``time``; under Slurm ``slurm``.
    """
    listed = VARIABLES.union(variables)
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
            name: hide_uuids(value) for name, value in sorted(os.environ.items()) if name in listed
        },
        "distributions": {name: _version(name) for name in distributions},
        "gpus": describe_gpus(),
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        **_slurm(),
        "clock": asdict(measure_clock()),
    }


def _slurm() -> dict[str, dict[str, str]]:
    """Return the Slurm node and job of this process."""
    names = {"node": "SLURMD_NODENAME", "job": "SLURM_JOB_ID", "partition": "SLURM_JOB_PARTITION"}
    found = {name: os.environ[variable] for name, variable in names.items() if variable in os.environ}
    return {"slurm": found} if "node" in found else {}


def cpu_quota() -> float | None:
    """Return the CPU limit of this process's control groups; None without a limit.

    The lowest ``cpu.max`` (version 2) or ``cpu.cfs_quota_us / cpu.cfs_period_us`` (version 1) from
    this process's group up to the root (cgroups(7)).
    """
    quotas: list[float] = []
    for folder in control_groups("cpu"):
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


def read_text(path: str | Path) -> str | None:
    """Return the text of a small system file; None if unreadable."""
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return None


def current_frequency_mhz(cpus: Iterable[int]) -> float | None:
    """Return the CPUs' current mean frequency in MHz; None if unreported, as in many VMs."""
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
    flags = (information.get("flags") or information.get("Features", "")).split()
    return {
        "model": information.get("model name") or _arm_model(information) or platform.processor() or platform.machine(),
        "logical_cores": psutil.cpu_count(logical=True),
        "physical_cores": psutil.cpu_count(logical=False),
        "allowed_cpus": allowed,
        "quota_cpus": cpu_quota(),
        "frequency_mhz": {name: value for name, value in frequency.items() if value is not None},
        "governor": read_text(cpufreq / "scaling_governor"),
        "cache_bytes": last_level_cache(allowed),
        "vector_extensions": [
            flag for flag in flags if flag.startswith(("avx", "amx", "sse4_2", "sve", "asimd", "bf16", "i8mm"))
        ],
    }


def last_level_cache(cpus: Iterable[int], root: Path = Path("/sys/devices/system/cpu")) -> int | None:
    """Return the bytes of the last-level data caches that these CPUs use; None if unknown.

    See `data_caches`.
    """
    caches = data_caches(cpus, root)
    return caches.get(max(caches, default=0)) or None


def data_caches(cpus: Iterable[int], root: Path = Path("/sys/devices/system/cpu")) -> dict[int, int]:
    """Return the bytes of the data caches that these CPUs use, by level, in ascending order.

    Parameters
    ----------
    cpus : iterable of int
    root : Path
        Holds ``cpuN/cache/index*``: Linux, Documentation/ABI/testing/sysfs-devices-system-cpu.
    """
    found: dict[tuple[int, str], int] = {}
    for cpu in cpus:
        for cache in (root / f"cpu{cpu}" / "cache").glob("index*"):
            size = re.fullmatch(r"(\d+)([KM])", read_text(cache / "size") or "")
            level, kind = read_text(cache / "level"), read_text(cache / "type")
            if size and level and kind != "Instruction":
                shared = read_text(cache / "shared_cpu_list") or str(cpu)
                found[int(level), shared] = int(size[1]) << (10 if size[2] == "K" else 20)
    totals: dict[int, int] = {}
    for (number, _), each in sorted(found.items()):
        totals[number] = totals.get(number, 0) + each
    return totals


def _first_processor() -> dict[str, str]:
    """Read the fields of the first processor in /proc/cpuinfo."""
    first = (read_text("/proc/cpuinfo") or "").split("\n\n")[0]
    pairs = (line.split(":", 1) for line in first.splitlines() if ":" in line)
    return {key.strip(): value.strip() for key, value in pairs}


def _arm_model(information: Mapping[str, str]) -> str:
    """Return the numbers that identify a 64-bit ARM processor; "" for other processors.

    On ARM, /proc/cpuinfo has no model name, but the fields of the MIDR_EL1 register (Arm
    Architecture Reference Manual).
    """
    keys = ("CPU implementer", "CPU part", "CPU variant", "CPU revision")
    known = [f"{key.removeprefix('CPU ')} {information[key]}" for key in keys if key in information]
    return f"{platform.machine()} ({', '.join(known)})" if known else ""


def _describe_memory() -> dict[str, int]:
    import psutil

    try:
        found = {"total_bytes": psutil.virtual_memory().total, "swap_bytes": psutil.swap_memory().total}
        limit = memory_limit()
        return found if limit is None else {**found, "limit_bytes": limit}
    except OSError:
        return {}


def _distribution_of_os() -> dict[str, str]:
    try:
        return {"name": platform.freedesktop_os_release()["PRETTY_NAME"]}
    except (OSError, KeyError):
        return {}


def _virtualization() -> dict[str, Any]:
    """Collect hints (files, flags) of containers and virtual machines; no proof."""
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
