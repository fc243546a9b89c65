"""``d5suite backends``."""

from __future__ import annotations

import argparse


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    command = commands.add_parser("backends", help="list backends with their modes, devices and what they lack")
    command.add_argument("--operators", action="store_true", help="also list the operators of each backend")
    command.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    from d5suite.report.backends import show_backends
    from d5suite.report.console import Console

    show_backends(Console(markup=False), operators=options.operators)
