"""The documentation as a site: built without a warning, searched and looked at in a browser."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from playwright.sync_api import Page, sync_playwright

from d5suite.cli import COMMANDS
from tests.conftest import made_once, require_installed

require_installed("sphinx", "myst_parser", "furo", "sphinxarg")

ROOT = Path(__file__).parents[1]
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the site, built by the command of ``make docs``."""

    def build() -> Path:
        out = tmp_path_factory.mktemp("site")
        (command,) = re.findall(r"^\t@\$\(RUN\) -m (sphinx .*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
        places = {"build/doctrees": str(out / "doctrees"), "build/docs": str(out / "html")}
        words = [places.get(word, word) for word in command.split()]
        done = subprocess.run([sys.executable, "-m", *words], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-5000:]
        return out / "html"

    return Path(made_once(tmp_path_factory, "site", lambda: str(build())))


@pytest.mark.slow
def test_commands_options_keys_and_modules_are_there(site: Path) -> None:
    commands = (site / "reference/commands.html").read_text()
    for command in COMMANDS:
        assert f"d5suite {command.__name__.rpartition('.')[2]}" in commands
    assert "--max-pairs" in commands
    assert "--backend" in (site / "reference/pytest.html").read_text()
    assert "series_token" in (site / "reference/results.html").read_text()
    recipe = (site / "reference/api/d5suite.cases.recipe.html").read_text()
    assert 'id="d5suite.cases.recipe.Recipe"' in recipe


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed")
def test_files_are_enough_to_search_and_nothing_is_fetched(site: Path) -> None:
    fetched: list[str] = []
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 390, "height": 844})
        page.on("request", lambda request: fetched.append(request.url))
        page.goto((site / "index.html").as_uri())
        assert width_of(page) <= 390, "the page scrolls sideways on a phone"
        for task, name in (("add a backend", "Write a backend"), ("read a trace", "Read a trace"),
                            ("gate a pull request", "Gate a pull request")):  # fmt: skip
            page.goto((site / "index.html").as_uri())
            page.locator("tr", has_text=task).get_by_role("link", name=name).click()
            assert name in page.title()
            assert width_of(page) <= 390
            page.goto(f"{(site / 'search.html').as_uri()}?q={name.split()[-1]}")
            page.locator("#search-results a", has_text=name).first.wait_for(timeout=20_000)
        browser.close()
    assert not [url for url in fetched if not url.startswith(("file:", "data:"))]


def width_of(page: Page) -> int:
    return int(page.evaluate("document.documentElement.scrollWidth"))
