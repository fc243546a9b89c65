"""Owners of a compiled program's instructions and of kernels, on profiles made by hand."""

from __future__ import annotations

import pytest

from d5suite.levels.attribution import Interval, Owner, divided, innermost, label
from d5suite.levels.profile import ADDED, OPTIMIZER
from d5suite.levels.xplane import (
    HloGraph,
    Line,
    dropped,
    hlo_owners,
    instructions,
    kernel_runs,
    program_owners,
    read_hlo,
    warnings_of,
)
from d5suite.network.zoo import build

HLO = """HloModule jit_step, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b), metadata={op_name="jit(step)/jvp(d5node7)/reduce_sum"}
}

%fused (p.0: f32[8], p.1: f32[8]) -> f32[8] {
  %p.0 = f32[8]{0} parameter(0)
  %p.1 = f32[8]{0} parameter(1)
  %zero = f32[8]{0} broadcast(%p.1), metadata={op_name="jit(step)/jvp(d5node5)/max"}
  %product = f32[8]{0} multiply(%p.0, %p.1), metadata={op_name="jit(step)/jvp(d5node0)/mul"}
  ROOT %tanh = f32[8]{0} tanh(%product), metadata={op_name="jit(step)/jvp(d5node1)/tanh" stack_frame_id=3}
}

%updated (p.2: f32[8], p.3: f32[8]) -> f32[8] {
  %p.3 = f32[8]{0} parameter(1)
  %p.2 = f32[8]{0} parameter(0)
  %flat = f32[8]{0} bitcast(%p.3), metadata={op_name="jit(step)/transpose(jvp(d5node0))/conv"}
  ROOT %minus = f32[8]{0} subtract(%p.2, %flat), metadata={op_name="jit(step)/optimizer/sub"}
}

%product_of_weights (p.4: f32[8], p.5: f32[8]) -> f32[8] {
  %p.4 = f32[8]{0} parameter(0)
  %p.5 = f32[8]{0} parameter(1)
  ROOT %convolution.1 = f32[8]{0} convolution(%p.4, %p.5), window={size=1}
}

%body (state: f32[8]) -> f32[8] {
  %state = f32[8]{0} parameter(0)
  ROOT %inside = f32[8]{0} add(%state, %state), metadata={op_name="jit(step)/jvp(d5node2)/while/body/add"}
}

ENTRY %main.9 (x.1: f32[8], y.1: f32[8]) -> (f32[8], f32[8]) {
  %x.1 = f32[8]{0} parameter(0), metadata={op_name="inputs['d5node3']"}
  %y.1 = f32[8]{0} parameter(1)
  %copy.1 = f32[8]{0} copy(%x.1)
  %loop_fusion = f32[8]{0} fusion(%copy.1, %y.1), kind=kLoop, calls=%fused
  %while.1 = f32[8]{0} while(%loop_fusion), condition=%cond, body=%body
  %total = f32[] reduce(%while.1, %y.1), dimensions={0}, to_apply=%add, metadata={op_name="jit(step)/d5node12/sum"}
  %gradient = f32[8]{0} dot(%loop_fusion, %y.1), metadata={op_name="jit(step)/transpose(jvp(d5node1))/mul"}
  %copy.2 = f32[8]{0} copy(%gradient)
  %weights = f32[8]{0} fusion(%gradient, %gradient), kind=kCustom, calls=%product_of_weights
  %new = f32[8]{0} fusion(%y.1, %weights), kind=kLoop, calls=%updated
  %unknown = f32[8]{0} fusion(%gradient, %gradient), kind=kCustom, calls=%product_of_weights
  ROOT %tuple.1 = (f32[8]{0}, f32[8]{0}) tuple(%copy.2, %new, %unknown)
}
"""


def test_a_fusion_belongs_to_all_its_nodes_and_what_has_no_name_to_those_beside_it() -> None:
    owners = hlo_owners(read_hlo(HLO))
    assert owners["loop_fusion"] == Owner((0, 1))  # not node 5, whose constant it shares
    assert owners["copy.1"] == Owner((0,))  # the part of the fusion that reads it
    assert owners["gradient"] == owners["copy.2"] == Owner((1,), backward=True)
    assert owners["total"] == Owner((12,))  # and not node 7, whose equal addition was merged with it
    assert owners["inside"] == Owner((2,))
    assert "while.1" not in owners  # its parts are listed
    assert owners["new"] == Owner(other=OPTIMIZER)
    assert owners["weights"] == Owner((0,), backward=True)  # by the part of the update that reads it
    assert owners["unknown"] == Owner()  # it computes, and nothing names it


def test_programs_of_one_name_are_told_apart_by_what_ran() -> None:
    other = HLO.replace("d5node12", "d5node11").replace("%total", "%another")
    programs = [("jit_step", read_hlo(text)) for text in (HLO, other)]
    owners = program_owners(programs, {"jit_step": {"total", "loop_fusion"}})
    assert owners["jit_step/total"] == Owner((12,))
    assert "jit_step/another" not in owners
    assert not program_owners(programs, {"jit_other": {"total"}})


def test_an_instruction_ends_when_its_threads_do() -> None:
    attributes = {"hlo_op": "dot", "hlo_module": "m"}
    first = [(Interval(0, 2, "dot"), attributes), (Interval(10, 11, "dot"), attributes)]
    second: Line = [
        (Interval(7, 8, "end: dot"), {}),
        (Interval(19, 20, "end: dot"), {}),
        (Interval(3, 4, "elsewhere"), {}),
    ]
    intervals, modules = instructions([first, second])
    assert sorted(intervals) == [Interval(0, 8, "m/dot"), Interval(10, 20, "m/dot")]
    assert modules == {"m": {"dot"}}


def test_inner_intervals_interrupt_outer_ones() -> None:
    nested = [Interval(0, 10, "a"), Interval(2, 5, "b"), Interval(5, 6, "c"), Interval(12, 13, "d")]
    parts = [Interval(0, 2, "a"), *nested[1:3], Interval(6, 10, "a"), nested[3]]
    assert innermost(nested) == parts


GRAPH: HloGraph = {
    "d5node0/MatMul": ("MatMul", ["x", "weight"]),
    "d5node0/BiasAdd": ("BiasAdd", ["d5node0/MatMul", "bias"]),
    "d5node1/Tanh": ("Tanh", ["d5node0/BiasAdd"]),
    "d5node2/FusedBatchNormV3": ("FusedBatchNormV3", ["d5node1/Tanh"]),
    "d5node3/Relu": ("Relu", ["d5node2/FusedBatchNormV3"]),
    "d5node4/MatMul": ("MatMul", ["d5node3/Relu", "weight2"]),
    "gradient_tape/d5node4/ShapeN": ("ShapeN", ["d5node3/Relu"]),  # reads it, and is no part of its kernel
}


def test_a_fused_kernel_belongs_to_the_operations_without_events() -> None:
    events = [
        Interval(0, 4e6, "d5node1/Tanh:_MklNativeFusedMatMul"),
        Interval(4e6, 6e6, "d5node2/FusedBatchNormV3:_FusedBatchNormEx"),
        Interval(6e6, 7e6, "d5node4/MatMul:_MklMatMul"),
        Interval(7e6, 8e6, "gradient_tape/d5node4/MatMul/MatMul:_MklMatMul"),
        Interval(8e6, 9e6, "optimizer/ResourceApplyMomentum:ResourceApplyMomentum"),
        Interval(9e6, 9.5e6, "AddN_3:AddN"),
        Interval(0, 9e6, "ExecutorState::Process"),
    ]
    intervals, owners = kernel_runs([[(each, {}) for each in events]], GRAPH)
    network = build("lenet5", classes=10, image_size=32)
    names = [node.name for node in network.nodes]
    layers, other = divided(network, intervals, owners, steps=2)
    assert {(each.nodes, each.direction): (round(each.seconds, 9), each.calls) for each in layers} == {
        ((names[0], names[1]), "forward"): (2e-3, 0.5),
        ((names[2], names[3]), "forward"): (1e-3, 0.5),
        ((names[4],), "forward"): (0.5e-3, 0.5),
        ((names[4],), "backward"): (0.5e-3, 0.5),
    }
    assert {name: round(seconds, 9) for name, seconds in other.items()} == {OPTIMIZER: 0.5e-3, ADDED: 0.25e-3}


def test_two_kernels_at_once_count_half() -> None:
    network = build("lenet5", classes=10, image_size=32)
    threads: list[Line] = [
        [(Interval(0, 4e6, f"{label(0)}/A:Conv"), {})],
        [(Interval(2e6, 6e6, f"{label(1)}/B:Conv"), {})],
    ]
    layers, _ = divided(network, *kernel_runs(threads, {}), steps=1)
    assert [round(each.seconds, 9) for each in layers] == [3e-3, 3e-3]


def test_events_that_a_profiler_lost_are_read_from_its_file() -> None:
    def field(number: int, content: bytes) -> bytes:
        length = (
            bytes((len(content) % 128 | 128, len(content) // 128)) if len(content) > 127 else bytes((len(content),))
        )
        return bytes((number << 3 | 2,)) + length + content

    warning = "Host tracer: 1200 trace events were dropped " + "x" * 200
    space = field(1, b"a plane") + field(2, b"7 events dropped") + field(3, warning.encode()) + field(4, b"host")
    assert warnings_of(space) == ["7 events dropped", warning]
    assert dropped(warnings_of(space)) == 1207
    for end in range(len(space)):
        warnings_of(space[:end])


def test_a_node_has_one_time_whatever_else_its_kernels_are_called() -> None:
    network = build("lenet5", classes=10, image_size=32)
    intervals = [Interval(0, 2, "a"), Interval(2, 3, "b"), Interval(3, 5, "c"), Interval(5, 9, "d")]
    owners = {
        "a": Owner((1,), False, "one"), "b": Owner((1,), False, ADDED),
        "c": Owner((), False, OPTIMIZER), "d": Owner((), True, OPTIMIZER),
    }  # fmt: skip
    layers, other = divided(network, intervals, owners, steps=1)
    assert [(each.nodes, each.direction, each.calls) for each in layers] == [((network.nodes[1].name,), "forward", 2)]
    assert layers[0].seconds == pytest.approx(3e-9) and other == {OPTIMIZER: pytest.approx(6e-9)}
