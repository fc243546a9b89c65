"""Why results are as they are: sentences of `d5suite explain`, rooflines and their trajectories.

Imports its neighbours.
"""

from __future__ import annotations

from typing import NamedTuple

from markupsafe import Markup

from d5suite.models.ceilings import Ceilings
from d5suite.report.explain import Told, explain
from d5suite.report.page.gather import Page
from d5suite.report.page.svg import inline
from d5suite.report.roofline import path_lines, rooflines
from d5suite.report.roofline_picture import draw_rooflines

MOST_TOLD = 60
"""Most results that are explained on a page; `d5suite explain` explains all."""

MOST_ROOFLINES = 8
"""Most measurements whose roofline a page draws."""


class Why(NamedTuple):
    """What a page explains.

    Attributes
    ----------
    told : list of Told
        Results of which more than their time is known.
    left_out : int
    pictures : list of (str, Markup)
        Title and roofline of each measurement.
    paths : list of str
        Trajectories in words.
    missing : list of str
        Why results have no roofline.
    """

    told: list[Told]
    left_out: int
    pictures: list[tuple[str, Markup]]
    paths: list[str]
    missing: list[str]


def why(page: Page, ceilings: Ceilings | None) -> Why:
    """Explain a page's results, under the roofs of a machine if its file is given.

    Raises
    ------
    ConfigurationError
        If the file is another machine's.
    """
    records = {key: record for section in page.sections for key, record in section.records.items()}
    told = [each for each in explain(records, ceilings=ceilings) if len(each.sentences) > 1] if records else []
    if ceilings is None:
        return Why(told[:MOST_TOLD], len(told[MOST_TOLD:]), [], [], [])
    found, missing = rooflines(records, ceilings)
    titles = list(dict.fromkeys(each.title for each in found))
    pictures = []
    for number, title in enumerate(titles[:MOST_ROOFLINES]):
        figure = draw_rooflines([each for each in found if each.title == title])
        svg = Markup(inline(figure, f"w{number}", f"{title} under the roofs of {ceilings.name}"))  # noqa: S704  a tree
        pictures.append((title, svg))
    reasons = list(dict.fromkeys(missing.values()))
    return Why(told[:MOST_TOLD], len(told[MOST_TOLD:]), pictures, path_lines(found), reasons)
