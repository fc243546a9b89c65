"""The coverage table of level 0: operator by backend. Imports rich and the backends' data."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

from d5suite.backends import Backend, discover

SIGNS = {"fp64": "8", "fp32": "4", "bf16": "b", "fp16": "h"}
"""Sign of each precision: the bytes of a value; for two bytes the first letter, b or h."""


def coverage(backend: Backend, operator: str) -> str:
    """Return a code such as ``FB 84bh``: passes, precisions by `SIGNS`; empty if unsupported."""
    precisions = [p for p in backend.precisions if backend.lacks_operator(operator, p) is None]
    if not precisions:
        return ""
    backward = any(backend.lacks_operator(operator, p, backward=True) is None for p in precisions)
    return ("FB " if backward else "F  ") + "".join(sign for p, sign in SIGNS.items() if p in precisions)


def show_operators(console: Console) -> None:
    """Print the table, and below it why an operator, a backward pass or a precision is missing."""
    backends = [backend for backend in discover()[0].values() if 0 in backend.levels]
    operators = sorted({name for backend in backends for name in backend.operators | backend.single_operators})
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("")
    for backend in backends:
        table.add_column(backend.name, no_wrap=True)
    for operator in operators:
        table.add_row(operator, *(coverage(backend, operator) or "–" for backend in backends))
    console.print(table)
    console.print("F forward, B backward; 8 fp64, 4 fp32, b bf16, h fp16")
    for backend in backends:
        for missing, why in backend.absent.items():
            if missing.partition(":")[0] in operators or missing in ("gradient", *SIGNS):
                console.print(f"{backend.name} has no {missing}: {why}")
    for backend in discover()[0].values():
        if 0 not in backend.levels:
            console.print(f"{backend.name} has no level 0: {backend.absent.get('level 0', 'not declared')}")
