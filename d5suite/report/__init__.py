"""Reports: tables, plots, pages, the schema of results. Knows results, never adapters."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from d5suite.report.page.write import NotebookPage


def show(*paths: str | os.PathLike[str]) -> NotebookPage:
    """Show result files as a page in a notebook.

    Parameters
    ----------
    *paths : path-like
        Result files.

    Returns
    -------
    NotebookPage
        A notebook displays it in a frame; its ``page`` is the HTML.

    Raises
    ------
    JobError, ConfigurationError
        If a file is malformed, or none has results.
    """
    from pathlib import Path

    from d5suite.report.page.write import NotebookPage, page_of

    return NotebookPage(page_of([Path(each) for each in paths])[1])
