"""``d5suite backends``."""

from __future__ import annotations

import argparse


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    command = commands.add_parser("backends", help="list backends with their modes, devices and operators")
    command.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    from rich.console import Console

    from d5suite.report.backends import show_backends

    show_backends(Console(markup=False))
