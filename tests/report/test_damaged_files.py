"""Result files that something has damaged: every command ends with an exit code that is documented,
and never with a traceback."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import math
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from d5suite.cli import main
from tests.report.pages import RANKS
from tests.report.test_verdicts import REFERENCE, asv, plain, write

CODES = {"compare": range(7), "history": (0, 2, 3, 6), "layers": (0, 2), "report": (0, 1, 2)}

ODD: list[Any] = [
    None, "", "\0", "x" * 3000, "\x1b[2J", -1, 0, 0.5, 1e308, math.nan, math.inf, 2**100, 10**400, True, [], {}, [[]],
    {"a": {}}, [None], [{}], ["x", 1],
]  # fmt: skip
"""What stands in the place of something else."""


def _few(path: Path, *chosen: int) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    content["benchmarks"] = [content["benchmarks"][number] for number in chosen]
    content["d5suite"].pop("series_token", None)
    return content


WHOLE: dict[str, Any] = {
    "d5suite": _few(REFERENCE, 0, 5),
    "ranks": _few(RANKS, 0, 1),
    "pytest-benchmark": plain({"a": 1e-3, "b": 1e-4}),
    "asv": json.loads(asv({"b.time_x": [[1.0, 2.0], [["1", "2"]], "v"], "b.mem_y": [[1.0], [], "v"]})),
}


@st.composite
def damaged(draw: st.DrawFn) -> Any:
    """A file in which some parts are replaced, removed or doubled."""
    content = copy.deepcopy(WHOLE[draw(st.sampled_from(sorted(WHOLE)))])
    for _ in range(draw(st.integers(1, 3))):
        at: Any = None
        key: Any = None
        inside = content
        while isinstance(inside, dict | list) and inside and (at is None or draw(st.integers(0, 9))):
            at, key = inside, draw(st.sampled_from(sorted(inside) if isinstance(inside, dict) else range(len(inside))))
            inside = at[key]
        if at is None:
            break
        how = draw(st.sampled_from(["replace", "replace", "replace", "remove", "double"]))
        if how == "replace":
            at[key] = draw(st.sampled_from(ODD))
        elif how == "remove":
            del at[key]
        elif isinstance(at, list):
            at.append(copy.deepcopy(inside))
    return content


def told(*words: str) -> str:
    """Run a command, and hold its exit code; what it says of an error."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(words)
    assert code in CODES[words[0]], words
    assert "Traceback" not in err.getvalue(), err.getvalue()
    return err.getvalue()


@contextlib.contextmanager
def saved(content: Any) -> Iterator[tuple[Path, Path]]:
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder, "base.json"), WHOLE["d5suite"])
        yield Path(folder), write(Path(folder, "x.json"), json.dumps(content))


@settings(max_examples=40)
@given(damaged())
def test_no_damage_is_a_traceback_of_a_command_that_reads_results(content: Any) -> None:
    with saved(content) as (folder, path):
        told("compare", str(path))
        told("compare", str(folder / "base.json"), str(path))
        forms = ("--markdown", str(folder / "x.md"), "--junit", str(folder / "x.xml"))
        told("compare", str(path), str(path), "--force", *forms)
        told("history", "add", str(folder / "h"), str(path))
        told("layers", str(path))


@settings(max_examples=10)
@given(damaged())
def test_no_damage_is_a_traceback_of_a_page(content: Any) -> None:
    with saved(content) as (folder, path):
        told("report", str(path), "-o", str(folder / "x.html"), "--csv", str(folder / "csv"))


def name_series(content: dict[str, Any], name: str) -> None:
    content["d5suite"] |= {"series": name, "series_token": "0" * 32}


SEEN: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a long series name": (lambda c: name_series(c, "x" * 3000), "d5suite.series"),
    "a series name with NUL": (lambda c: name_series(c, "a\0b"), "d5suite.series"),
    "a number as fullname": (lambda c: c["benchmarks"][0].update(fullname=3), "benchmarks.0.fullname"),
    "JSON of 900 levels": (lambda c: c.update(odd="deep"), "nested too deeply"),
}
"""Damage that once was a traceback, and what is said of it."""


@pytest.mark.parametrize("kind", SEEN)
def test_what_was_a_traceback_is_one_sentence(kind: str, tmp_path: Path) -> None:
    damage, said = SEEN[kind]
    content = copy.deepcopy(WHOLE["d5suite"])
    damage(content)
    text = json.dumps(content).replace('"deep"', "[" * 900 + "]" * 900)
    path = str(write(tmp_path / "x.json", text))
    for words in (["compare", path], ["report", path, "-o", str(tmp_path / "x.html")], ["layers", path],
                  ["compare", path, path, "--json", str(tmp_path / "y.json")]):  # fmt: skip
        assert said in told(*words)


@pytest.mark.parametrize("host", [["a"], {}, None, 3])
def test_a_host_that_is_no_text_is_shown_as_it_is(host: Any, tmp_path: Path) -> None:
    content = copy.deepcopy(WHOLE["ranks"])
    for bench in content["benchmarks"]:
        for rank in bench["extra_info"]["d5suite"]["distributed"]["ranks"]:
            rank["host"] = host
    path = str(write(tmp_path / "x.json", content))
    told("compare", path, path)
    told("history", "add", str(tmp_path / "h"), path)


@pytest.mark.parametrize("token", [3, np.arange(3), b"\xff", 0.5, h5py.Empty("f")], ids=str)
def test_a_token_of_another_type_is_of_another_run(token: Any, tmp_path: Path) -> None:
    content = copy.deepcopy(WHOLE["d5suite"])
    content["d5suite"] |= {"series": "x.h5", "series_token": "0" * 32}
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.attrs["token"] = token
    path = write(tmp_path / "x.json", content)
    for words in (["compare", str(path)], ["report", str(path), "-o", str(tmp_path / "x.html")]):
        assert "it and its series, x.h5, come from different runs" in told(*words)


@pytest.mark.parametrize("name", ["/dev/zero"])
def test_no_file_without_an_end_is_read(name: str, tmp_path: Path) -> None:
    path = str(write(tmp_path / "x.json", WHOLE["d5suite"]))
    for words in (["compare", path, name], ["compare", path, path, "--thresholds", name],
                  ["report", name, "-o", str(tmp_path / "x.html")], ["layers", name]):  # fmt: skip
        assert f"error: {name}: " in told(*words)


def test_a_refused_sample_of_another_tool_leaves_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = copy.deepcopy(WHOLE["pytest-benchmark"])
    whole = str(write(tmp_path / "a.json", content))
    content["benchmarks"][0]["stats"]["data"][3] = 0.0
    damaged = str(write(tmp_path / "b.json", content))
    assert main(["compare", whole, damaged]) == 4
    shown = " ".join(capsys.readouterr().out.split())
    assert "it failed: benchmarks.0.stats.data.3: sample '0.0' is not a positive number" in shown
    assert main(["history", "add", str(tmp_path / "h"), damaged]) == 0
    assert "1 benchmarks kept" in (shown := capsys.readouterr().out) and "left out: test_x.py::a: it failed: " in shown
