"""Output of ``d5suite doctor``: what is installed and usable, and how quiet the machine is.

Each framework is imported in its own process, so a crash costs only its line of the table. Imports
rich, `d5suite.instruments` and the backends' data.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Collection

from rich.console import Console
from rich.table import Table

from d5suite.backends import Backend, backend, discover
from d5suite.instruments.environment import describe
from d5suite.instruments.quiet import probe_noise

IMPORT_LIMIT_S = 120
"""Seconds after which a framework that is still importing is reported as not usable."""

_PROBE = (
    "import sys\n"
    "from d5suite.backends import backend\n"
    "chosen = backend(sys.argv[1])\n"
    "runtime = chosen.load('runtime')\n"
    "for device in chosen.devices:\n"
    "    print(device, runtime.device_problem(device) or 'usable', sep='\\t')\n"
)


def show_doctor(console: Console, names: Collection[str] = ()) -> None:
    """Print the machine, the backends (all, or ``names``) and a short measurement of noise.

    Raises
    ------
    BackendError
        If one of the names is unknown.
    """
    backends, faults = discover()
    for name in names:
        if name not in faults:
            backend(name)
    machine = describe(["d5suite", "numpy", "onnx", "onnxruntime", "pytest-benchmark"])
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()
    cpu = machine["cpu"]
    table.add_row("processor", str(cpu.get("model") or "unknown"))
    table.add_row(
        "cores",
        ", ".join(f"{cpu[f'{kind}_cores']} {kind}" for kind in ("physical", "logical") if cpu.get(f"{kind}_cores")),
    )
    memory = machine["memory"]
    limit = f", of which {memory['limit_bytes'] / 2**30:.1f} GiB may be used" if "limit_bytes" in memory else ""
    table.add_row("memory", f"{memory.get('total_bytes', 0) / 2**30:.1f} GiB{limit}")
    table.add_row("GPUs", ", ".join(gpu.get("name", "?") for gpu in machine["gpus"]) or "none found")
    table.add_row("Python", f"{sys.version.split()[0]} ({sys.executable})")
    for name, version in machine["distributions"].items():
        table.add_row(name, version or "not installed")
    console.print(table, highlight=False)
    console.print()

    table = Table(title="Backends", title_justify="left")
    for column in ("backend", "version", "cpu", "cuda", "remark"):
        table.add_column(column, overflow="fold")
    for name, each in backends.items():
        if names and name not in names:
            continue
        with console.status(f"trying {name}"):
            devices, remark = _try(each)
        table.add_row(
            name,
            each.version() or "–",
            *("yes" if devices.get(device) == "usable" else "no" for device in ("cpu", "cuda")),
            remark or "; ".join(f"{d}: {p}" for d, p in devices.items() if p != "usable"),
        )
    for name, fault in faults.items():
        if not names or name in names:
            table.add_row(name, "–", "no", "no", fault.what)
    console.print(table, highlight=False)
    console.print()
    with console.status("sampling machine load for one second"):
        noise = probe_noise()
    console.print(f"Noise: {noise.verdict}", highlight=False)


def _try(backend: Backend) -> tuple[dict[str, str], str]:
    """Probe in a separate process which devices a backend can use; add a remark if none."""
    problem = backend.problem()
    if problem:
        return {}, problem
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE, backend.name], capture_output=True, text=True, timeout=IMPORT_LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return {}, f"importing it took more than {IMPORT_LIMIT_S} s"
    if done.returncode != 0:
        return {}, f"importing it failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}"
    lines = (line.split("\t") for line in done.stdout.splitlines() if "\t" in line)
    return {line[0]: line[1] for line in lines}, ""
