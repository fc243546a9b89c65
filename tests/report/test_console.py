"""What a stranger's file says is safe for a terminal, wherever a command prints it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from d5suite.cli import main
from d5suite.traces.hdf5 import write_hdf5
from tests.report import planted
from tests.report.test_odd_files import EVIL, is_harmless
from tests.traces.made import call, trace_of


def network(folder: Path, operator: str = "Relu", kind: int = TensorProto.FLOAT) -> Path:
    node = helper.make_node(operator, ["x"], [f"y{EVIL}"], f"node{EVIL}")
    graph = helper.make_graph(
        [node],
        f"graph{EVIL}",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 4])],
        [helper.make_tensor_value_info(f"y{EVIL}", kind, None)],
    )
    path = folder / "odd.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)
    return path


@pytest.mark.parametrize(
    ("operator", "kind", "code"),
    [("Relu", TensorProto.FLOAT, 0), ("NonZero", TensorProto.INT64, 0), (f"Frob{EVIL}", TensorProto.FLOAT, 2)],
    ids=["a layer", "an operator that backends lack", "an unknown operator"],
)
def test_names_of_a_network(
    tmp_path: Path, operator: str, kind: int, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["network", str(network(tmp_path, operator, kind)), "--layers"]) == code
    text = "".join(capsys.readouterr())
    assert "\\x1b" in text and is_harmless(text)


def test_names_of_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evil = EVIL.replace("\0", "")
    step = [*call("step", 10, 40), *call("conv1", 50, 60)]
    trace = trace_of(step, step)
    regions = [replace(each, name=f"{each.name}{evil}") for each in trace.regions]
    write_hdf5(replace(trace, regions=regions, notes=(f"note{evil}",)), tmp_path / "t.h5")
    assert main(["trace", "analyze", str(tmp_path / "t.h5"), "--step", f"step{evil}"]) == 0
    text = "".join(capsys.readouterr())
    assert "\\x1b" in text and is_harmless(text)


def test_names_of_a_machine_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = planted.machine(tmp_path / "machine.json")
    content = json.loads(path.read_text())
    for each in content["ceilings"]:
        each |= {"level": f"{each.get('level', '')}{EVIL}", "agrees": False, "source": f"planted{EVIL}"}
    path.write_text(json.dumps(content))
    results = planted.result(tmp_path / "out.json", planted.bench(part=planted.layers()))
    assert main(["roofline", str(results), "--machine", str(path)]) == 0
    text = "".join(capsys.readouterr())
    assert "\\x1b" in text and is_harmless(text)
