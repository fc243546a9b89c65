"""``d5suite bench``: measure the recipes that d5suite ships, with pytest, from any folder."""

from __future__ import annotations

import argparse
import ast
import datetime
from collections.abc import Sequence
from pathlib import Path

from d5suite.errors import ConfigurationError

PACKAGE = Path(__file__).parents[1]
OWN = ("--list", "-h", "--help")


def recipes_folder() -> Path:
    """Return the folder of the recipes: inside an installed package, else the checkout's.

    ``setup.py`` copies the checkout's ``recipes/`` into the package that is installed.
    """
    inside = PACKAGE / "recipes"
    return inside if inside.is_dir() else PACKAGE.parent / "recipes"


def find_pytest_options(words: Sequence[str]) -> int:
    """Return the index of the first word of ``d5suite bench WORD…`` that is for pytest."""
    return next((i for i, word in enumerate(words) if word.startswith("-") and word not in OWN), len(words))


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    command = commands.add_parser(
        "bench",
        help="measure the recipes that d5suite ships, and print a table",
        usage="d5suite bench [-h] [--list] [NAME ...] [option of pytest ...]",
        description="Measure recipes, as `pytest recipes/ --benchmark-json FILE` does in a checkout. The first option "
        "that is not listed here, and all that follows it, goes to pytest: d5suite bench digits_lenet -k inference",
        epilog="options of pytest: docs/reference/pytest.md or pytest --help; exit codes are pytest's",
    )
    command.add_argument("recipes", nargs="*", metavar="NAME", help="recipes (default: those that --list marks)")
    command.add_argument("--list", action="store_true", help="list the recipes and where their files are")
    command.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    folder = recipes_folder()
    known = {path.stem.removeprefix("test_"): path for path in sorted(folder.glob("test_*.py"))}
    if options.list:
        _list(known)
        print(f"* measured if no NAME is given (your_network with --network FILE.onnx); all lie in {folder}")
        return 0
    unknown = [name for name in options.recipes if name not in known]
    if unknown:
        raise ConfigurationError(f"there is no recipe {unknown[0]!r}", hint=f"The recipes are: {', '.join(known)}.")
    if not any(word.partition("=")[0] in ("--backend", "--from-jobs") for word in options.further):
        _require_framework()
    return _measure([known[name] for name in options.recipes] or [folder], options.further)


def _list(known: dict[str, Path]) -> None:
    """Print each recipe's name and the first line of its docstring; run none of them."""
    widest = max(map(len, known), default=0)
    for name, path in known.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        flags = {each.arg for each in ast.walk(tree) if isinstance(each, ast.keyword)}
        by_default = " " if "on_request" in flags else "*"
        print(f"{by_default} {name:{widest}}  {(ast.get_docstring(tree) or '').partition(chr(10))[0]}")


def _require_framework() -> None:
    """Raise `ConfigurationError` if no backend that is measured by default can run here."""
    from d5suite.backends import discover
    from d5suite.launch.base import interpreter

    backends = [each for each in discover()[0].values() if not each.on_request]
    if all(each.problem() and interpreter(each.name, {}) is None for each in backends):
        commands = "\n  ".join(each.install for each in backends)
        raise ConfigurationError("no framework is installed", hint=f"Install one or several:\n  {commands}")


def _measure(paths: Sequence[Path], further: Sequence[str]) -> int:
    """Run pytest on recipes with ``bench.ini``, whatever the current folder's settings are."""
    import pytest

    chosen = ["-c", str(Path(__file__).with_name("bench.ini")), "--rootdir", ".", "-o", "cache_dir=.d5suite/bench"]
    if not any(word.partition("=")[0] == "--benchmark-json" for word in further):
        now = datetime.datetime.now().astimezone()
        chosen += ["--benchmark-json", f"d5suite-{now:%Y-%m-%d-%H%M%S}.json"]
    return int(pytest.main([*map(str, paths), *chosen, *further]))
