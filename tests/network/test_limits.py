"""Small files that describe far too much: each is refused before anything is computed."""

from __future__ import annotations

import resource
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from d5suite.errors import NetworkError
from d5suite.network import Network

NODE = helper.make_node
OPSET = helper.make_opsetid("", 21)
MOST_BYTES, MOST_S = 1 << 30, 5.0
"""Memory, and seconds of processor time, that refusing a file may take."""


def _model(
    nodes: Sequence[onnx.NodeProto], *, shape: Sequence[int | str] = (1, 4), functions: Sequence[Any] = (), **fixed: Any
) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "small",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in fixed.items()],
    )
    domains = [OPSET, helper.make_opsetid("own", 1)]
    return helper.make_model(graph, opset_imports=domains, ir_version=10, functions=functions)


def _function(name: str, body: Sequence[onnx.NodeProto]) -> onnx.FunctionProto:
    return helper.make_function("own", name, ["a"], ["b"], body, [OPSET, helper.make_opsetid("own", 1)])


def _doubling(levels: int) -> onnx.ModelProto:
    """Functions that each call the one before twice."""
    functions = [_function("f0", [NODE("Relu", ["a"], ["b"])])]
    for level in range(1, levels):
        twice = [NODE(f"f{level - 1}", [a], [b], domain="own") for a, b in (("a", "c"), ("c", "b"))]
        functions.append(_function(f"f{level}", twice))
    return _model([NODE(f"f{levels - 1}", ["x"], ["y"], "call", domain="own")], functions=functions)


def _chain(levels: int, first: list[onnx.NodeProto], at: str) -> onnx.ModelProto:
    """Concatenations that each join the one before 16 times; the sum of the last is added."""
    nodes = first
    for level in range(levels):
        nodes.append(NODE("Concat", [at] * 16, [f"c{level}"], f"join{level}", axis=0))
        at = f"c{level}"
    nodes += [NODE("Cast", [at], ["f"], to=TensorProto.FLOAT), NODE("ReduceSum", ["f"], ["s"], keepdims=0)]
    return _model([*nodes, NODE("Add", ["x", "s"], ["y"])], shape=("N", 4), c=np.arange(2))


def _used(*nodes: onnx.NodeProto) -> list[onnx.NodeProto]:
    """Let the answer depend on the constant ``k``."""
    end = [NODE("Cast", ["k"], ["f"], to=TensorProto.FLOAT), NODE("ReduceSum", ["f"], ["s"], keepdims=0)]
    return [*nodes, *end, NODE("Add", ["x", "s"], ["y"])]


def _rnn(steps: int) -> onnx.ModelProto:
    return _model(
        [NODE("RNN", ["x", "w", "r"], ["y"], "rnn", hidden_size=2)], shape=(steps, 1, 3),
        w=np.ones((1, 2, 3), np.float32), r=np.ones((1, 2, 2), np.float32),
    )  # fmt: skip


BIG = np.array([1 << 20, 1 << 20])
FULL = np.ones((3, 4), np.float32)

REFUSED = {
    "functions": (_doubling(30), "its functions stand for 536,870,912 nodes"),
    "circle": (
        _model([NODE("f", ["x"], ["y"], domain="own")],
               functions=[_function("f", [NODE("g", ["a"], ["b"], domain="own")]),
                          _function("g", [NODE("f", ["a"], ["b"], domain="own")])]),
        "calls itself",
    ),
    "deep functions": (
        _model([NODE("f99", ["x"], ["y"], domain="own")],
               functions=[_function("f0", [NODE("Relu", ["a"], ["b"])]),
                          *(_function(f"f{n}", [NODE(f"f{n - 1}", ["a"], ["b"], domain="own")])
                            for n in range(1, 100))]),
        "100 within each other",
    ),
    "Concat of a constant": (_chain(9, [], "c"), r"join\d: Concat would make a constant of shape \[\d+\]"),
    "Concat of sizes": (_chain(9, [NODE("Shape", ["x"], ["d"])], "d"), "Concat"),
    "many constants": (
        _model(_used(*(NODE("Expand", ["c", "n"], [f"k{n}"], f"e{n}") for n in range(9)),
                     NODE("Max", [f"k{n}" for n in range(9)], ["k"])),
               c=np.ones((1, 1), np.int8), n=np.array([1 << 13, 1 << 12])),
        r"e\d: Expand: with it more values are computed from constants than d5suite folds",
    ),
    "Range": (
        _model(_used(NODE("Range", ["a", "b", "i"], ["k"], "bomb")), a=0, b=1 << 60, i=1), "bomb: Range would make",
    ),
    "Range of computed bounds": (
        _model(_used(NODE("Mul", ["b", "b"], ["e"]), NODE("Range", ["a", "e", "i"], ["k"], "bomb")),
               a=0, b=1 << 30, i=1),
        "bomb: Range would make",
    ),
    "Tile": (_model(_used(NODE("Tile", ["c", "n"], ["k"], "bomb")), c=FULL, n=BIG), "bomb: Tile"),
    "Expand": (_model(_used(NODE("Expand", ["c", "n"], ["k"], "bomb")), c=np.float32(1), n=BIG), "bomb: Expand would"),
    "ConstantOfShape": (
        _model(_used(NODE("ConstantOfShape", ["n"], ["k"], "bomb")), n=BIG), "bomb: ConstantOfShape would make",
    ),
    "Pad": (
        _model(_used(NODE("Pad", ["c", "n"], ["k"], "bomb")), c=FULL, n=np.array([0, 1 << 30, 1 << 30, 0])),
        "bomb: Pad",
    ),
    "Resize": (
        _model(_used(NODE("Resize", ["c", "", "", "n"], ["k"], "bomb")), c=FULL, n=BIG), "bomb: Resize",
    ),
    "OneHot": (
        _model(_used(NODE("OneHot", ["i", "n", "v"], ["k"], "bomb")),
               i=np.arange(4), n=np.array(1 << 40), v=np.arange(2)),
        "bomb: OneHot would make",
    ),
    "RNN": (_rnn(20_000), "rnn: RNN: 20,000 steps to unroll; d5suite unrolls up to 5,000"),
    "AffineGrid": (
        _model([NODE("AffineGrid", ["t", "n"], ["g"], "grid"), *_used(NODE("Mul", ["g", "x"], ["k"]))],
               shape=(1, 1, 1, 1), t=np.ones((1, 2, 3), np.float32), n=np.array([1, 1, 1 << 20, 1 << 20])),
        "grid",
    ),
    "rank of an input": (_model([NODE("Relu", ["x"], ["y"])], shape=(1,) * 5000), "tensor 'x' has 5,000 axes"),
    "rank of a constant": (
        _model([NODE("Unsqueeze", ["x", "n"], ["y"], "up")], n=np.arange(1, 60)), "tensor 'y' has 61 axes",
    ),
    "Gather beyond the end": (
        _model([NODE("Gather", ["x", "i"], ["y"], "pick", axis=1)], i=np.array(4)), "pick: Gather: index 4 of 4",
    ),
    "Gather beyond the end of an open batch": (
        _model([NODE("Gather", ["x", "i"], ["y"], "pick", axis=1)], shape=("N", 4), i=np.array([0, 4])),
        "pick: Gather: values of input 'i' from 0 to 4 leave the range from -4 to 3",
    ),
    "Gather of a constant": (
        _model(_used(NODE("Gather", ["c", "i"], ["k"], "pick")), c=np.arange(3), i=np.array([3])),
        "pick: Gather of constants cannot be computed",
    ),
    "integers by 0": (
        _model(_used(NODE("Div", ["c", "i"], ["k"], "half")), c=np.arange(3), i=np.array(0)),
        "half: Div of constants divides integers by 0",
    ),
    "an input by 0": (
        _model([NODE("Cast", ["x"], ["n"], to=TensorProto.INT64), NODE("Mod", ["n", "i"], ["m"], "rest"),
                NODE("Cast", ["m"], ["y"], to=TensorProto.FLOAT)], shape=("N", 4), i=np.array(0)),
        "rest: Mod: integers are divided by 0",
    ),
}  # fmt: skip


def _load(folder: Path, model: onnx.ModelProto) -> Network:
    (folder / "x.onnx").write_bytes(model.SerializeToString())
    return Network.load(folder / "x.onnx")


@pytest.mark.parametrize("case", REFUSED)
def test_a_small_file_that_grows_beyond_all_use_is_refused_at_once(tmp_path: Path, case: str) -> None:
    model, said = REFUSED[case]
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with pytest.raises(NetworkError, match=said):
        _load(tmp_path, model)
    assert time.process_time() - start < MOST_S
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < MOST_BYTES


@pytest.mark.parametrize("equation", ["a[b", "ij,jk=>ik", "i j;k", "...i...->i", "a]", "i->j->k", "1"])
@pytest.mark.parametrize("within", ["graph", "function"])
def test_an_equation_is_checked_before_onnx_reads_it(tmp_path: Path, equation: str, within: str) -> None:
    """ONNX (1.23) looks for the end of ``a[b`` for ever."""
    body = [NODE("Einsum", ["a"], ["b"], "sum", equation=equation)]
    called = _model([NODE("f", ["x"], ["y"], domain="own")], functions=[_function("f", body)])
    model = _model([NODE("Einsum", ["x"], ["y"], "sum", equation=equation)]) if within == "graph" else called
    with pytest.raises(NetworkError, match=r"sum: Einsum: .* is not an equation"):
        _load(tmp_path, model)


def test_nested_conditionals_take_no_exponential_time(tmp_path: Path) -> None:
    inner = [NODE("Identity", ["x"], ["p"]), NODE("Identity", ["x"], ["q"])]
    for _ in range(28):
        other = helper.make_graph(
            [NODE("Identity", ["x"], ["p"]), NODE("Identity", ["x"], ["q"])], "else", [], _untyped()
        )
        inner = [NODE("If", ["on"], ["p", "q"], then_branch=helper.make_graph(inner, "then", [], _untyped()),
                      else_branch=other)]  # fmt: skip
    start = time.process_time()
    network = _load(tmp_path, _model([*inner, NODE("Add", ["p", "q"], ["y"])], on=np.array(True)))
    assert {node.op_type for node in network.nodes} <= {"Add", "Identity"}
    assert time.process_time() - start < 4 * MOST_S


def _untyped() -> list[onnx.ValueInfoProto]:
    return [onnx.ValueInfoProto(name=name) for name in "pq"]


def test_what_networks_need_is_still_read(tmp_path: Path) -> None:
    """Functions, an RNN, a mask of 16 million values, and the weights of ONNX's light networks."""
    assert len(_load(tmp_path, _doubling(6)).nodes) == 32
    assert len(_load(tmp_path, _rnn(100)).nodes) > 300
    mask = _model(_used(NODE("Expand", ["c", "n"], ["m"]), NODE("Trilu", ["m"], ["k"])), c=np.float32(1),
                  n=np.array([4096, 4096]))  # fmt: skip
    assert [node.op_type for node in _load(tmp_path, mask).nodes] == ["Add"]
