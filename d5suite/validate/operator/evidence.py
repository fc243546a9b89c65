"""A picture of where an operator's answer is wrong. Imports NumPy, and Matplotlib lazily."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from d5suite.files import atomic_path


class Evidence(NamedTuple):
    """A wrong tensor and its expected value."""

    name: str
    answer: np.ndarray
    expected: np.ndarray


def save_heat_map(path: Path, title: str, answer: np.ndarray, expected: np.ndarray) -> None:
    """Draw an answer's absolute error as a plane, with all leading axes stacked.

    Parameters
    ----------
    path : Path
        A PNG file.
    title : str
    answer, expected : numpy.ndarray
        Arrays of the same shape, with any number of axes.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    got = answer.astype(np.float64)
    if got.shape != expected.shape:
        raise ValueError(f"shapes {got.shape} and {expected.shape} have no picture")
    error = np.abs(np.nan_to_num(got, nan=np.inf) - expected)
    plane = np.atleast_1d(error).reshape(-1, error.shape[-1] if error.ndim else 1)
    figure = Figure(figsize=(8, 6), layout="constrained")
    axes = figure.add_subplot()
    finite = np.where(np.isfinite(plane), plane, np.nan)
    image = axes.imshow(finite, aspect="auto", interpolation="nearest", cmap="magma")
    axes.set_title(f"{title}: absolute error", fontsize=10)
    axes.set_xlabel(f"last axis of {list(answer.shape)}")
    axes.set_ylabel("all other axes, in order")
    figure.colorbar(image, ax=axes, label="|answer - reference|")
    with atomic_path(path) as temporary:
        FigureCanvasAgg(figure).print_png(str(temporary))
