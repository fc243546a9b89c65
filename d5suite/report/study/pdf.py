"""The report as PDF, printed from the same HTML by a browser, or by WeasyPrint.

A browser lays out the page as its readers see it, variables of style and inline pictures included,
so it is preferred; WeasyPrint is a library and needs no browser.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from d5suite.files import write_bytes

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")

PATIENCE_S = 180.0
"""Seconds that a browser has to print."""


def browser() -> str | None:
    """Return the path of a browser that prints, or None."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


def print_pdf(page: Path, out: Path) -> str:
    """Print an HTML file, and say by what and why, or what is lacking.

    Parameters
    ----------
    page : Path
        A self-contained HTML file.
    out : Path
        Replaced only by a whole PDF.
    """
    found = browser()
    if found is not None:
        problem = _by_browser(found, page, out)
        name = Path(found).name
        if not problem:
            return f"{out.name} was printed by {name}, which is installed and draws the page as its readers see it."
    if importlib.util.find_spec("weasyprint") is not None:
        why = f"{Path(found).name} failed ({problem})" if found else "no browser is installed"
        problem = _by_library(page, out)
        if not problem:
            return f"{out.name} was printed by WeasyPrint, because {why}."
        return f"There is no {out.name}: WeasyPrint failed ({problem}), and {why}."
    if found is not None:
        return (
            f"There is no {out.name}: {Path(found).name} failed ({problem}); pip install weasyprint prints without it."
        )
    return f"There is no {out.name}: install chromium, or pip install weasyprint, and run d5suite study --report again."


def _by_browser(found: str, page: Path, out: Path) -> str:
    """Print with a browser; return what went wrong."""
    with tempfile.TemporaryDirectory(prefix="d5suite-pdf-") as place:
        target = Path(place) / "report.pdf"
        words = [
            found, "--headless", "--disable-gpu", "--no-first-run", "--disable-extensions", "--disable-dev-shm-usage",
            f"--user-data-dir={place}/profile", "--no-pdf-header-footer", f"--print-to-pdf={target}",
        ]  # fmt: skip
        words += ["--no-sandbox"] if os.geteuid() == 0 else []  # a browser refuses to sandbox root's pages
        try:
            done = subprocess.run(
                [*words, page.resolve().as_uri()], capture_output=True, text=True, timeout=PATIENCE_S,
                stdin=subprocess.DEVNULL, env={**os.environ, "HOME": place},
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"it took more than {PATIENCE_S:.0f} s"
        except OSError as error:
            return error.strerror or str(error)
        if not target.is_file() or not target.read_bytes().startswith(b"%PDF"):
            return next(iter(done.stderr.strip().splitlines()[-1:]), f"code {done.returncode}")[:200]
        write_bytes(out, target.read_bytes())
        return ""


def _by_library(page: Path, out: Path) -> str:
    """Print with WeasyPrint; return what went wrong."""
    weasyprint = importlib.import_module("weasyprint")

    try:
        write_bytes(out, weasyprint.HTML(filename=str(page)).write_pdf())
    except Exception as error:  # a library of which each version fails in its own way
        return f"{type(error).__name__}: {error}"[:200]
    return ""
