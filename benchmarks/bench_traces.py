"""A trace of a million events: to write it, to read it, to analyse it, and to look at it.

The marks: a million events a second written, a million analysed in 10 s and 1 GiB, a page that
opens in 1 s and draws 95% of its frames in 16 ms. A frame's time is that of drawing it, as the page
takes it. ``EVENTS=100000`` in the environment makes a smaller trace.

``pytest benchmarks/bench_traces.py -s`` prints the figures.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from d5suite.report.timeline.write import page
from d5suite.traces.analysis import analyse
from d5suite.traces.archive import read_archive, write_archive
from d5suite.traces.events import Trace
from d5suite.traces.hdf5 import write_hdf5
from tests.traces.made import steps_of_ranks

EVENTS = int(os.environ.get("EVENTS", "1_000_000"))

FRAMES = 120


@pytest.fixture(scope="module")
def trace() -> Trace:
    made = steps_of_ranks(EVENTS)
    assert len(made) > 0.95 * EVENTS
    return made


def test_write_read_and_analyse(trace: Trace, tmp_path: Path) -> None:
    pytest.importorskip("otf2")
    start = time.perf_counter()
    write_archive(trace, tmp_path / "archive")
    wrote = time.perf_counter() - start
    start = time.perf_counter()
    found = read_archive(tmp_path / "archive")
    read = time.perf_counter() - start
    assert len(found) == len(trace)
    write_hdf5(trace, tmp_path / "trace.h5")
    script = (
        "import resource, sys, time\n"
        "from pathlib import Path\n"
        "from d5suite.traces.analysis import analyse\n"
        "from d5suite.traces.reading import read_trace\n"
        "trace = read_trace(Path(sys.argv[1]))\n"
        "start = time.perf_counter()\n"
        "analyse(trace)\n"
        "print(time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)\n"
    )
    words = [sys.executable, "-c", script, str(tmp_path / "trace.h5")]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    took, mebibytes = map(float, done.stdout.split())
    million_events = len(trace) / 1e6
    print(
        f"\n{len(trace):,} events: written {million_events / wrote:.2f} million/s, read {million_events / read:.2f} "
        f"million/s, analysed in {took:.1f} s with {mebibytes:.0f} MiB"
    )
    assert took <= 10 * million_events and mebibytes <= 1024 and million_events / wrote >= 1


def test_look_at_it(trace: Trace, tmp_path: Path) -> None:
    playwright = pytest.importorskip("playwright.sync_api")
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        pytest.skip("no chromium is installed")
    content = page(analyse(trace), title="a million events").encode()
    (tmp_path / "timeline.html").write_bytes(content)
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": 1280, "height": 900})
        start = time.perf_counter()
        tab.goto((tmp_path / "timeline.html").as_uri(), wait_until="load")
        tab.wait_for_function("document.documentElement.dataset.ready && timeline.frames.length")
        opened = time.perf_counter() - start
        frames = {}
        tab.focus("#canvas")
        for name, keys in {"zoomed out": [], "half way": ["+"] * 5, "zoomed in": ["+"] * 10}.items():
            for key in keys:
                tab.keyboard.press(key)
            frames[name] = tab.evaluate(_FRAMES, [FRAMES, ["ArrowRight", "ArrowLeft"] if keys else ["+", "-"]])
        browser.close()
    print(f"\npage of {len(content) / 1e6:.1f} MB opened in {opened:.2f} s")
    for name, times in frames.items():
        low, high = np.percentile(times, [50, 95])
        print(f"{name}: a frame in {low:.1f} ms, 95% in {high:.1f} ms")
    assert all(len(times) >= FRAMES / 2 and np.percentile(times, 95) <= 16 for times in frames.values()) and opened <= 1


_FRAMES = """async ([count, keys]) => {
  timeline.frames.length = 0;
  for (let number = 0; number < count; number++) {
    const key = keys[number % 2];
    document.activeElement.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true}));
    await new Promise(requestAnimationFrame);
    await new Promise(requestAnimationFrame);
  }
  return Array.from(timeline.frames);
}"""
