"""``d5suite operators``."""

from __future__ import annotations

import argparse


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    command = commands.add_parser("operators", help="show which backend has which operator at level 0")
    command.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    from d5suite.report.console import Console
    from d5suite.report.operators import show_operators

    show_operators(Console(markup=False))
