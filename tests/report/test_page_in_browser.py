"""Report pages in a real browser: they render without errors, and people can use them."""

from __future__ import annotations

import copy
import itertools
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest

from d5suite.cli import main
from tests.report.pages import RANKS, SMOKE, content, hostile, many, record, write

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
playwright = pytest.importorskip("playwright.sync_api", reason="playwright drives the browser")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed"),
    pytest.mark.xdist_group("browser"),
]

Open = Callable[..., "Page"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of two real results, of which one is marked and one is wrong."""
    folder = tmp_path_factory.mktemp("report")
    found = content()
    info = record(found["benchmarks"][-1])
    info["machine"] = {"disturbed": True, "reasons": ["another process took 30% of a CPU"]}
    wrong = record(found["benchmarks"][4])
    wrong["validation"]["checks"][0]["error"] = 0.5
    out = folder / "report.html"
    assert main(["report", str(write(folder / "smoke.json", found)), str(RANKS), "-o", str(out)]) == 0
    return out


@pytest.fixture
def opened(browser: Browser) -> Iterator[Open]:
    """Open a page; whatever it says on the console, or loads, fails the test."""
    contexts, said = [], []

    def open_page(
        path: Path, fragment: str = "", *, width: int = 1280, scheme: Literal["light", "dark"] = "light"
    ) -> Page:
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: said.append(request.url) if not request.url.startswith("file:") else None)
        page.on("dialog", lambda dialog: said.append(dialog.message))
        page.goto(path.as_uri() + fragment)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert said == []


def shown_rows(page: Page) -> int:
    return int(page.evaluate("[...document.querySelectorAll('tr.row')].filter((row) => row.checkVisibility()).length"))


def test_filters_show_what_fits_and_count_it(opened: Open, report: Path) -> None:
    page = opened(report)
    assert page.inner_text("#count") == "89 results" and shown_rows(page) == 89
    page.fill("#q", "gradient torch")
    playwright.expect(page.locator("#count")).to_have_text("1 of 89 results")
    assert shown_rows(page) == 1
    assert page.locator("article.case:visible").count() == 1
    page.fill("#q", "")
    playwright.expect(page.locator("#count")).to_have_text("89 results")
    page.click(".pick[data-backend=torch]")
    assert page.get_attribute(".pick[data-backend=torch]", "aria-pressed") == "false"
    assert page.locator("tr.row[data-b=torch]:visible").count() == 0 < shown_rows(page)
    columns = page.locator("table.grid").first.locator("thead th")
    shown = [each for each in columns.all() if each.is_visible()]
    assert len(shown) == columns.count() - 1 and not any("torch" in each.inner_text() for each in shown)
    assert page.locator("table.grid td[data-b=torch]:visible").count() == 0
    assert page.locator("table.grid td[data-b=jax]:visible").count() > 0
    page.click(".pick[data-backend=torch]")
    assert columns.last.is_visible() and page.locator("table.grid td[data-b=torch]:visible").count() > 0
    page.check("#marked")
    assert 0 < shown_rows(page) < 89
    page.fill("#q", "nothing fits this")
    playwright.expect(page.locator("#count")).to_have_text("0 of 89 results")
    assert page.locator("article.case:visible").count() == 0


def test_rows_are_sorted_within_their_measurement_with_failures_last(opened: Open, report: Path) -> None:
    page = opened(report)
    table = page.locator("article.case table.rows").first
    for direction, ordered in (("ascending", sorted), ("descending", lambda v: sorted(v, reverse=True))):
        table.locator("button.sort").first.click()
        assert table.locator("th[aria-sort]").first.get_attribute("aria-sort") == direction
        for body in table.locator("tbody").all():
            cells = body.locator("tr.row:not(.wrong) td:nth-child(3)").all()
            values = [float(cell.get_attribute("data-v") or "nan") for cell in cells]
            assert values == ordered(values) and len(values) > 1
    last = table.locator("tbody").first.locator("tr.row").last
    assert "wrong" in (last.get_attribute("class") or "")


def test_two_rows_are_pinned_and_compared(opened: Open, report: Path) -> None:
    page = opened(report)
    rows = page.locator("tr.row:not(.wrong)")
    for number in (0, 1, 2):  # the third takes the first one's place
        rows.nth(number).locator(".pin").click()
    assert page.locator(".pin[aria-pressed=true]").count() == 2
    first, second = (float(rows.nth(n).locator("td:nth-child(3)").get_attribute("data-v") or 0) for n in (1, 2))
    median = page.locator("#pinned tbody tr").first.inner_text()
    assert float(re.findall(r"([\d.e+-]+)×", median)[0]) == pytest.approx(second / first, rel=1e-3)
    assert "second over first" in page.inner_text("#pinned thead")
    rows.last.locator(".pin").click()
    assert "different workloads, no ratio" in page.inner_text("#pinned thead")
    assert all(each.inner_text() == "–" for each in page.locator("#pinned tbody td:last-child").all())
    page.click("#pinned button")
    assert not page.is_visible("#pinned")


def test_details_give_proof_and_command(opened: Open, report: Path) -> None:
    page = opened(report)
    page.locator("tr.row .name").nth(6).click()
    text = page.inner_text("#details")
    assert "pytest 'recipes/test_imagenet_resnet50.py::test_" in text
    assert "✓ loss" in text and "peak memory" in text and "Versions" in text
    page.keyboard.press("Escape")
    assert not page.is_visible("#details")
    row = page.locator("tr.row").nth(6)
    row.locator(".name").click()
    page.click("text=Link to this row")
    assert not page.is_visible("#details")
    assert page.evaluate("location.hash") == f"#{row.get_attribute('id')}"


def test_a_command_is_copied_where_there_is_no_clipboard_and_a_failure_is_said(opened: Open, report: Path) -> None:
    page = opened(report)
    page.evaluate("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
    page.locator("tr.row .name").nth(6).click()
    button = page.locator("#details .copy").first
    button.click()
    playwright.expect(button).to_have_text("copied")
    command = page.locator("#details code").first.inner_text()
    page.keyboard.press("Escape")
    page.focus("#q")
    page.keyboard.press("Control+V")
    assert page.input_value("#q") == command != ""
    page.fill("#q", "")
    page.evaluate("document.execCommand = () => false")
    page.locator("tr.row .name").nth(6).click()
    button.click()
    playwright.expect(button).to_have_text("not copied")
    assert page.locator("textarea").count() == 0


def test_left_out_checks_are_told(opened: Open, tmp_path: Path) -> None:
    found = content()
    checks = record(found["benchmarks"][0])["validation"]["checks"]
    checks += [{"name": f"check {number}", "error": 0.0, "tolerance": 0.0} for number in range(100)]
    assert main(["report", str(write(tmp_path / "x.json", found)), "-o", str(tmp_path / "x.html")]) == 0
    page = opened(tmp_path / "x.html")
    page.locator("tr.row .name").first.evaluate(
        "() => { const rows = JSON.parse(document.getElementById('data').textContent).rows;"
        "const id = Object.keys(rows).find((id) => rows[id].left_out);"
        "document.getElementById(id).querySelector('.name').click(); }"
    )
    assert f"{len(checks) - 60} further checks are left out here" in page.inner_text("#details")


def test_links_lead_to_rows_even_if_a_filter_hides_them(opened: Open, report: Path) -> None:
    page = opened(report)
    row = page.locator("tr.row").nth(20).get_attribute("id")
    other = opened(report, f"#{row}")
    assert other.evaluate(f"document.getElementById('{row}').getBoundingClientRect().top") < 900
    assert other.evaluate("document.querySelector('tr:target').id") == row
    page.fill("#q", "nothing fits this")
    playwright.expect(page.locator("#count")).to_have_text("0 of 89 results")
    page.evaluate(f"location.hash = '{row}'")
    playwright.expect(page.locator(f"#{row}")).to_be_visible()
    assert page.input_value("#q") == ""
    for link in page.locator("table.grid td a").all():
        assert page.locator((link.get_attribute("href") or "#none").replace("#", "#", 1)).count() == 1


def test_numbers_appear_on_hover_and_focus(opened: Open, report: Path) -> None:
    page = opened(report)
    assert not page.is_visible("#tip")
    page.locator("table.grid td a").first.hover()
    assert "samples from" in page.inner_text("#tip")
    page.locator("figure [id*=tip-]").first.hover()
    assert " images/s (" in page.inner_text("#tip")
    page.keyboard.press("Escape")
    page.locator("table.grid td a").nth(2).focus()
    assert "samples from" in page.inner_text("#tip")


def test_the_keyboard_reaches_everything(opened: Open, report: Path) -> None:
    page = opened(report)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    reached = []
    for _ in range(1500):
        page.keyboard.press("Tab")
        at = page.evaluate(
            "(() => { const e = document.activeElement; const r = e.getBoundingClientRect();"
            "return [e.tagName, e.className || e.id, r.width > 0 && r.bottom > 0 && r.top < innerHeight]; })()"
        )
        if at[0] == "BODY":
            break
        reached.append(tuple(at))
    assert all(seen for *_, seen in reached), "focus went where nobody sees it"
    for wanted in (("BUTTON", "theme"), ("INPUT", "q"), ("BUTTON", "pick"), ("BUTTON", "sort"), ("BUTTON", "name")):
        assert (*wanted, True) in reached
    assert sum(each == ("BUTTON", "pin", True) for each in reached) == 89
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "q"
    page.locator("tr.row .pin").first.focus()
    page.keyboard.press("Enter")
    assert page.is_visible("#pinned")


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.slow)])
def test_axe_finds_nothing_that_keeps_people_out(opened: Open, report: Path, scheme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-core looks for barriers").Axe()
    page = opened(report, scheme=scheme)
    page.locator("tr.row .pin").first.click()
    found = axe.run(page).response["violations"]
    page.locator("tr.row .name").first.click()
    found += axe.run(page, context="#details").response["violations"]
    assert [(each["id"], each["nodes"][0]["html"]) for each in found] == []


def test_the_theme_follows_the_system_until_one_is_chosen(opened: Open, report: Path) -> None:
    paper = "getComputedStyle(document.body).backgroundColor"
    dark = opened(report, scheme="dark")
    assert dark.evaluate(paper) == "rgb(20, 23, 26)"
    page = opened(report)
    assert page.evaluate(paper) == "rgb(255, 255, 255)"
    page.click("#theme")
    page.click("#theme")
    assert page.inner_text("#theme") == "Theme: dark" and page.evaluate(paper) == "rgb(20, 23, 26)"


def test_a_phone_shows_all_within_its_width(opened: Open, report: Path) -> None:
    page = opened(report, width=390)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.evaluate("getComputedStyle(document.body).fontSize") == "14px"


def test_a_phone_shows_leads_and_results_or_says_that_they_scroll(opened: Open, report: Path) -> None:
    """Lead and results were off the screen without a hint."""
    page = opened(report, width=390)
    outside = page.evaluate(
        "[...document.querySelectorAll('table.leads tbody td, table.leads tbody th')].filter((e) => e.checkVisibility()"
        " && e.getBoundingClientRect().right > innerWidth).map((e) => e.textContent)"
    )
    assert outside == []
    lead = page.locator("table.leads tbody tr").first
    told = " ".join(lead.inner_text().split())
    assert re.search(r"undecided [\d.]+× \([\d.]+–[\d.]+\) .*torch, tensorflow", told), told
    first = page.locator("article.case table.rows tr.row").first
    first.scroll_into_view_if_needed()
    for place in (3, 4):  # median and × fastest
        box = first.locator(f"td:nth-child({place})").bounding_box()
        assert box is not None and box["x"] + box["width"] <= 390
    region = page.locator("article.case .scroll").first
    playwright.expect(region).to_have_attribute("data-more", "")
    assert "scroll sideways" in region.evaluate("(e) => getComputedStyle(e, '::before').content")
    region.evaluate("(e) => e.scrollTo(9999, 0)")
    playwright.expect(region).not_to_have_attribute("data-more", "")


def test_a_desk_has_no_hint_where_nothing_scrolls(opened: Open, report: Path) -> None:
    page = opened(report)
    region = page.locator("#verdict .scroll")
    region.scroll_into_view_if_needed()
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert region.get_attribute("data-wide") is None


def test_names_that_begin_alike_are_shown_apart(opened: Open, tmp_path: Path) -> None:
    """Seven rows were cut to the same text."""
    found = content()
    inference = [each for each in found["benchmarks"] if each["group"] == "imagenet_resnet50/inference"]
    (few,) = [each for each in inference if each["param"] == "torch"]
    found["benchmarks"] = []
    schemes = [f"a_scheme_with_a_very_long_name_whose_end_matters_{number}" for number in range(7)]
    for place, scheme in enumerate(schemes):
        bench = copy.deepcopy(few)
        record(bench).pop("turns", None)
        bench["param"] = f"{record(bench)['backend']['name']}-{scheme}"
        bench["fullname"] = f"{place} {bench['fullname']}"
        found["benchmarks"].append(bench)
    assert main(["report", str(write(tmp_path / "x.json", found)), "-o", str(tmp_path / "x.html")]) == 0
    for width in (1280, 390):
        page = opened(tmp_path / "x.html", width=width)
        names = page.locator("tr.row .name")
        names.first.scroll_into_view_if_needed()
        page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        assert len(set(names.all_inner_texts())) == 7
        cut = names.evaluate_all("(all) => all.filter((e) => e.scrollWidth > e.clientWidth + 1).length")
        assert cut == 0
        row = page.locator("tr.row th").first.evaluate("(e) => e.scrollWidth <= e.clientWidth + 1")
        assert row
    labels = re.findall(r"inference, [\w…-]+", (tmp_path / "x.html").read_text().partition("<figure")[2])
    assert len(set(labels)) >= 7


def test_an_error_has_three_digits(opened: Open, tmp_path: Path) -> None:
    """Errors had sixteen."""
    found = content()
    for bench in found["benchmarks"]:
        record(bench)["validation"]["checks"][0] |= {"error": 0.00012345678901234567, "tolerance": 0.0012345678901}
    assert main(["report", str(write(tmp_path / "x.json", found)), "-o", str(tmp_path / "x.html")]) == 0
    page = opened(tmp_path / "x.html")
    page.locator("tr.row .name").first.click()
    numbers = page.locator("#details-b td:not(:first-child)").all_inner_texts()
    assert "0.000123" in numbers and "0.00123" in numbers
    assert all(len(re.sub(r"e.*|^0\.0*|[.-]", "", each)) <= 3 for each in numbers)


def test_it_prints_on_a4_without_cuts(opened: Open, report: Path) -> None:
    page = opened(report, scheme="dark")
    printed = page.pdf(format="A4", prefer_css_page_size=True)
    assert printed.startswith(b"%PDF")
    page.emulate_media(media="print")
    page.set_viewport_size({"width": 703, "height": 1000})  # 186 mm at 96 dpi: A4 without margins
    assert page.evaluate("getComputedStyle(document.body).color") == "rgb(0, 0, 0)"
    wide = page.evaluate(
        "[...document.querySelectorAll('main *')].filter((e) => e.checkVisibility() && !e.closest('.vh')"
        " && e.getBoundingClientRect().right > innerWidth + 1).map((e) => e.outerHTML.slice(0, 100))"
    )
    assert wide == []
    heights = page.evaluate("[...document.querySelectorAll('figure')].map((e) => e.getBoundingClientRect().height)")
    assert max(heights) < 1016  # 269 mm: a taller one would be cut
    assert not page.is_visible(".tools")


def test_hostile_names_do_nothing(opened: Open, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    assert main(["report", str(write(tmp_path / "x.json", hostile())), "-o", str(out)]) == 0
    page = opened(out, width=390)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    for number in range(page.locator("tr.row .name").count()):
        page.locator("tr.row .name").nth(number).click()
        page.keyboard.press("Escape")
        page.locator("tr.row .pin").nth(number).click()
    page.click("#pinned button")
    page.locator(".mark").first.hover()  # a long name does not push it out of its cell
    assert "disturbed" in page.inner_text("#tip")
    assert page.evaluate("window.hacked") is None
    assert page.locator("img").count() == 0
    assert "<script>window.hacked=1" in page.inner_text("#failed + ul")


@pytest.mark.slow
def test_a_frame_in_another_page_works(opened: Open, tmp_path: Path) -> None:
    assert main(["report", str(SMOKE), "-o", str(tmp_path / "frame.html"), "--embed"]) == 0
    around = tmp_path / "notebook.html"
    around.write_text("<!doctype html><title>x</title><h1>notebook</h1>" + (tmp_path / "frame.html").read_text())
    page = opened(around)
    inside = page.frame_locator("iframe")
    inside.locator("tr.row .name").first.click()
    assert inside.locator("#details").is_visible()


@pytest.mark.slow
@pytest.mark.alone
def test_ten_thousand_benchmarks_open_at_once_and_scroll_smoothly(opened: Open, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    assert main(["report", str(write(tmp_path / "x.json", many(10_000))), "-o", str(out)]) == 0
    opening, loaded = [], []
    for _ in range(3):
        page = opened(out)
        opening.append(page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime / 1000"))
        loaded.append(page.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd / 1000"))
    frames = page.evaluate(
        """async () => {
          const times = [];
          for (let i = 0; i < 60; i += 1) {
            scrollBy(0, 700);
            times.push(await new Promise(requestAnimationFrame));
          }
          return times;
        }"""
    )
    gaps = sorted(after - before for before, after in itertools.pairwise(frames))
    told = f"{out.stat().st_size / 1e6:.1f} MB, shown after {opening} s, loaded after {loaded} s"
    print(f"{told}, frames in {gaps[30]:.0f} to {gaps[-1]:.0f} ms")
    assert shown_rows(page) == 10_000
    assert min(opening) < 2
    assert gaps[len(gaps) // 2] < 100
