"""The table of backends: installed or not, and what each can do.

Imports rich and the backends' data.
"""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from d5suite.backends import discover


def show_backends(console: Console, *, operators: bool = False) -> None:
    """Print the modes of every backend, its capabilities, and every faulty plug-in.

    Parameters
    ----------
    console : rich.console.Console
    operators : bool
        Also list the operators of each backend.
    """
    backends, faults = discover()
    modes = Table.grid(padding=(0, 2))
    for backend in backends.values():
        for mode in backend.modes:
            default = " (default)" if mode == backend.default_mode else ""
            state = "not installed" if backend.problem() else (backend.problem(mode) and "not here") or "installed"
            modes.add_row(f"{backend.name}:{mode}{default}", state, style=None if state == "installed" else "dim")
    if backends:
        console.print("modes, for --backend NAME or NAME:MODE", style="bold")
        console.print(modes)
        console.print()
    for backend in backends.values():
        problem = backend.problem()
        table = Table.grid(padding=(0, 2))
        table.add_column(style="bold")
        table.add_column()
        table.add_row(backend.name, f"{backend.title} {backend.version() or ''}".strip())
        table.add_row("", problem or "installed")
        for mode, description in backend.modes.items():
            default = " (default)" if mode == backend.default_mode else ""
            table.add_row("", f"{backend.name}:{mode}{default} – {description}")
            problem_of_mode = None if problem else backend.problem(mode)
            if problem_of_mode:
                table.add_row("", f"  {problem_of_mode}")
        levels = ", ".join(map(str, sorted(backend.levels)))
        devices, precisions = ", ".join(backend.devices), ", ".join(backend.precisions)
        table.add_row("", f"levels {levels}; devices {devices}; precisions {precisions}")
        names = f": {', '.join(sorted(backend.operators))}" if operators else " (--operators lists them)"
        table.add_row("", f"{len(backend.operators)} operators{names}")
        for missing, why in backend.absent.items():
            table.add_row("", f"no {missing}: {why}")
        if backend.on_request:
            table.add_row("", f"measured on request: {backend.on_request}")
        if backend.reduced:
            table.add_row("", f"measured at reduced size: {backend.reduced}")
        console.print(table)
        console.print()
    for fault in faults.values():
        console.print(fault.what, style="bold red", markup=False)
    if not backends and not faults:
        console.print("No backends found; install d5suite into this environment: pip install -e .")
