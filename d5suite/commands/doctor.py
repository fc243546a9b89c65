"""``d5suite doctor``."""

from __future__ import annotations

import argparse


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    command = commands.add_parser("doctor", help="show what is installed and usable, and how quiet the machine is")
    command.add_argument("backend", nargs="*", help="try only these backends")
    command.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    from d5suite.report.console import Console
    from d5suite.report.doctor import show_doctor

    show_doctor(Console(markup=False), options.backend)
