"""The timeline of a trace in a real browser, and one step as SVG."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from xml.etree import ElementTree

import numpy as np
import pytest

from d5suite.cli import main
from d5suite.errors import TraceError
from d5suite.report.timeline.pack import pack
from d5suite.report.timeline.picture import picture
from d5suite.report.timeline.write import page
from d5suite.traces.analysis import analyse
from d5suite.traces.events import CollectiveOp, Comm, Location, MetricSeries, Region, Trace
from tests.report.pages import HOSTILE
from tests.traces.made import REGIONS, Row, call, collective, recv, send, trace_of

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
playwright = pytest.importorskip("playwright.sync_api", reason="playwright drives the browser")
in_browser = [
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed"),
    pytest.mark.xdist_group("browser"),
]

Show = Callable[..., "Page"]
US = 1000
"""Ticks of a microsecond."""


def steps(count: int, regions: list[Region] | None = None) -> Trace:
    """Steps of two ranks: rank 1 computes longer, then a message, then an all-reduce."""
    rows: list[list[Row]] = [[], []]
    for number in range(count):
        at = number * 1000 * US
        for rank, computing in enumerate((300, 500)):
            inside = call("conv1", at, at + computing * US)
            if rank == 0:
                inside += call("MPI_Recv", at + 300 * US, at + 520 * US, recv(at + 519 * US, of=1))
            else:
                inside += call("MPI_Send", at + 500 * US, at + 510 * US, send(at + 501 * US, to=0))
            reduced = collective("MPI_Allreduce", CollectiveOp.ALLREDUCE, at + 600 * US, at + 700 * US)
            rows[rank] += call("step", at, at + 900 * US, *inside, *reduced)
    trace = trace_of(*rows)
    times = np.arange(0, count * 1000 * US, 100 * US)
    trace.metrics = [MetricSeries("memory", "B", rank, times, np.linspace(1e9, 2e9, len(times))) for rank in (0, 1)]
    trace.regions = regions or REGIONS
    return trace


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def shown(browser: Browser, tmp_path: Path) -> Iterator[Show]:
    """Show a trace's page; whatever it says on the console, or loads, fails the test."""
    contexts, said = [], []

    def show(trace: Trace, *, width: int = 1280, scheme: Literal["light", "dark"] = "light") -> Page:
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        tab = context.new_page()
        tab.on("console", lambda message: said.append(message.text))
        tab.on("pageerror", lambda error: said.append(str(error)))
        tab.on("request", lambda request: said.append(request.url) if not request.url.startswith("file:") else None)
        path = tmp_path / "timeline.html"
        path.write_text(page(analyse(trace), title="a trace"), encoding="utf-8")
        tab.goto(path.as_uri())
        tab.wait_for_function("document.documentElement.dataset.ready")
        return tab

    yield show
    for context in contexts:
        context.close()
    assert said == []


def at(tab: Page, microseconds: float, location: int, depth: int) -> str:
    """Point at a place; what the page then says."""
    x, y = tab.evaluate(
        """([time, location, depth]) => {
            const { view, rows } = window.timeline; const frame = document.getElementById('canvas');
            const gutter = frame.clientWidth < 560 ? 72 : 110;
            const x = gutter + (time - view.begin) / (view.end - view.begin) * (frame.clientWidth - gutter);
            return [x, rows[location].top - view.scroll + (depth < 0 ? 3 : 6 + depth * 16 + 7)];
        }""",
        [microseconds * 1000, location, depth],
    )
    tab.locator("#canvas").hover(position={"x": x, "y": y})
    return tab.locator("#detail").inner_text()


def colours(tab: Page, *places: tuple[float, int, int]) -> list[str]:
    """Return the colours at times, some pixels below the tops of locations' rows."""
    found: list[str] = tab.evaluate(
        """(places) => {
            const canvas = document.getElementById('canvas'); const ratio = devicePixelRatio;
            const gutter = 110; const { view, rows } = timeline;
            const image = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
            return places.map(([microseconds, location, below]) => {
                const part = (microseconds * 1000 - view.begin) / (view.end - view.begin);
                const x = Math.round((gutter + part * (canvas.clientWidth - gutter)) * ratio);
                const place = 4 * (Math.round((rows[location].top + below) * ratio) * image.width + x);
                return [...image.data.slice(place, place + 3)].join();
            });
        }""",
        places,
    )
    return found


class TestPage:
    pytestmark = in_browser

    def test_a_slice_says_what_it_is(self, shown: Show) -> None:
        tab = shown(steps(3))
        assert at(tab, 150, 0, 1) == "conv1: 300 µs from 0, rank 0 on host0"
        assert at(tab, 400, 0, -1) == "late sender: 200 µs from 300 µs, rank 0 on host0, for rank 1"
        assert at(tab, 2250, 1, 1) == "conv1: 500 µs from 2 ms, rank 1 on host1"

    def test_a_step_is_shown_alone(self, shown: Show) -> None:
        tab = shown(steps(5))
        tab.select_option("#step", "3")
        begin, end = tab.evaluate("[timeline.view.begin, timeline.view.end]")
        assert begin == pytest.approx(3000e3, abs=30e3) and end == pytest.approx(3900e3, abs=30e3)

    def test_a_search_finds_and_visits(self, shown: Show) -> None:
        tab = shown(steps(4))
        tab.fill("#find", "late send")
        assert tab.locator("#hits").inner_text() == "4 hits"
        tab.press("#find", "Enter")
        tab.press("#find", "Enter")
        assert tab.locator("#hits").inner_text() == "2 of 4"
        assert tab.locator("#detail").inner_text().startswith("late sender: 200 µs from 1.3 ms")

    def test_keys_move_and_zoom(self, shown: Show) -> None:
        tab = shown(steps(4))
        tab.focus("#canvas")
        for key in ("+", "+", "ArrowRight"):
            tab.keyboard.press(key)
        begin, end = tab.evaluate("[timeline.view.begin, timeline.view.end]")
        assert 0 < begin < end < 3900e3
        tab.keyboard.press("0")
        assert tab.evaluate("timeline.view.begin") == 0
        tab.mouse.move(*_middle(tab))
        tab.mouse.wheel(0, -500)
        tab.wait_for_function("timeline.view.begin > 0")

    def test_what_waits_is_drawn_in_its_colour(self, shown: Show) -> None:
        tab = shown(steps(1))
        assert colours(tab, (400, 0, 3), (400, 1, 3), (100, 0, 3)) == ["217,72,15", "255,255,255", "255,255,255"]

    def test_waiting_for_the_other_end_of_a_coupling_has_this_colour_too(self, shown: Show) -> None:
        waiting = call("wait for writer: data", 100 * US, 800 * US)
        coupled, step = colours(shown(trace_of(call("step", 0, 900 * US, *waiting))), (790, 0, 24), (890, 0, 8))
        assert coupled == "217,72,15" != step

    def test_steps_fold_on_each_other(self, shown: Show) -> None:
        tab = shown(steps(6))
        tab.check("#fold")
        assert tab.evaluate("timeline.view.end") == 900e3

    @pytest.mark.parametrize(("width", "scheme"), [(1280, "dark"), (390, "light")])
    def test_people_can_use_it(self, shown: Show, width: int, scheme: Literal["light", "dark"]) -> None:
        axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-core looks for barriers").Axe()
        tab = shown(steps(3), width=width, scheme=scheme)
        found = axe.run(tab)
        assert found.violations_count == 0, found.generate_report()
        assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")

    def test_hostile_names_are_only_text(self, shown: Show) -> None:
        trace = steps(1, [Region(f"{name} {index}") for index, name in enumerate(HOSTILE * 3)][: len(REGIONS)])
        trace.locations = [Location(HOSTILE[0], HOSTILE[1], HOSTILE[2]), Location(HOSTILE[3], HOSTILE[0], HOSTILE[1])]
        tab = shown(trace)
        assert tab.evaluate("window.hacked") is None

    def test_many_events_are_joined_and_none_is_lost(self, shown: Show) -> None:
        """Zoomed out, the strip shows as much waiting as the tables say."""
        tab = shown(steps(3000))
        tab.evaluate("timeline.draw()")
        heights = tab.evaluate(
            """() => {
                const canvas = document.getElementById('strip-canvas'); const ratio = devicePixelRatio;
                const image = canvas.getContext('2d').getImageData(
                    130 * ratio, 0, canvas.width - 150 * ratio, canvas.height);
                let filled = 0;
                for (let i = 0; i < image.data.length; i += 4) {
                    if (image.data[i] === 217 && image.data[i + 1] === 72) filled += 1;
                }
                return filled / (image.width * image.height);
            }"""
        )
        # One of two ranks waits 200 of 1000 µs: a tenth. Bars have gaps, and the canvas a margin.
        assert 0.05 < heights < 0.12


def _middle(tab: Page) -> tuple[float, float]:
    box = tab.locator("#canvas").bounding_box()
    assert box is not None
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


def test_the_page_needs_nothing_else_and_shows_the_tables_without_scripts() -> None:
    text = page(analyse(steps(2)), title="two steps")
    assert not re.findall(r"""(?:src|href)=["']?https?:""", text)
    assert "late sender" in text and "on the critical path" in text


def test_a_trace_of_hours_is_rounded_and_says_so() -> None:
    trace = trace_of([*call("step", 0, 10), *call("step", 20 * 10**12, 20 * 10**12 + 10)], [])
    facts, _, notices = pack(analyse(trace), step="step")
    assert facts["unit"] > 1 and "rounded" in notices[0]
    assert facts["length"] == 20 * 10**12 + 10


def test_nested_too_deep_is_said() -> None:
    inside: list[Row] = []
    for depth in range(100, 0, -1):
        inside = call("conv1", 100 - depth, 100 + depth, *inside)
    assert pack(analyse(trace_of(inside)), step="step")[2] == [
        "60 regions that lie more than 40 deep in others are not shown"
    ]


def test_a_trace_without_events_is_a_page() -> None:
    assert "0 events of 1 ranks" in page(
        analyse(Trace([Location("", "p")], [], [Comm("", (0,))], [trace_of([]).events[0]])), title="x"
    )


def test_a_step_is_a_picture() -> None:
    found = analyse(steps(3))
    root = ElementTree.fromstring(picture(found, number=2))  # noqa: S314  our own
    titles = [each.text for each in root.iter("{http://www.w3.org/2000/svg}title")]
    assert titles.count("conv1") == 2 and titles.count("late sender") == 1
    with pytest.raises(TraceError, match="there is no step 4: the trace has 3"):
        picture(found, number=4)
    with pytest.raises(TraceError, match="no region is called 'epoch'"):
        picture(found, number=1, step="epoch")


def test_the_command_writes_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("otf2")
    from d5suite.traces.archive import write_archive

    write_archive(steps(2), tmp_path / "run")
    for name in ("page.html", "step.svg"):
        assert main(["trace", "show", str(tmp_path / "run"), "-o", str(tmp_path / name)]) == 0
        assert (tmp_path / name).stat().st_size > 1000
    assert main(["trace", "show", str(tmp_path / "run"), "-o", str(tmp_path / "page.pdf")]) == 2
    assert "ends neither with .html nor with .svg" in capsys.readouterr().err
