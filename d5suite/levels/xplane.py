"""Profiles of XLA and of graphs of kernels, as several frameworks write them; no framework needed.

A profile is a list of lines, one per thread, of events with attributes. An event is a run of a
kernel, named ``SCOPES/OPERATION:KERNEL``, or of an instruction of a compiled program, which has the
attribute ``hlo_op``. Imports the standard library, protobuf late, `d5suite.levels.attribution` and
`d5suite.levels.profile`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from d5suite.levels.attribution import Interval, Owner, innermost, labelled
from d5suite.levels.profile import ADDED, OPTIMIZER, OTHER_OPERATORS

Line = Sequence[tuple[Interval, Mapping[str, Any]]]
"""The events of one thread, each with its attributes."""

HloGraph = Mapping[str, tuple[str, Sequence[str]]]
"""The type and the names of the inputs of each operation, by name, before anything is fused."""


def lines(space: Any) -> list[Line]:
    """Read the events of an ``XSpace`` message (``xplane.proto``)."""
    found: list[Line] = []
    for plane in space.planes:
        names = {number: metadata.name for number, metadata in plane.event_metadata.items()}
        keys = {number: metadata.name for number, metadata in plane.stat_metadata.items()}
        for line in plane.lines:
            begin = line.timestamp_ns
            found.append(
                [
                    (
                        Interval(
                            begin + event.offset_ps / 1e3,
                            begin + (event.offset_ps + event.duration_ps) / 1e3,
                            names[event.metadata_id],
                        ),
                        {keys[stat.metadata_id]: keys.get(stat.ref_value) or stat.str_value for stat in event.stats},
                    )
                    for event in line.events
                ]
            )
    return found


def event_lines(planes: Iterable[Any]) -> list[Line]:
    """Return the events of each thread with their attributes, as XLA's own reader gives them."""
    return [
        [
            (Interval(event.start_ns, event.start_ns + event.duration_ns, event.name), dict(event.stats))
            for event in line.events
        ]
        for plane in planes
        for line in plane.lines
    ]


def warnings_of(serialized: bytes) -> list[str]:
    """Return the errors and warnings of a serialized ``XSpace``: its fields 2 and 3.

    The result is empty if the message is damaged.
    """
    from google.protobuf.empty_pb2 import Empty
    from google.protobuf.message import DecodeError
    from google.protobuf.unknown_fields import UnknownFieldSet

    try:
        fields = UnknownFieldSet(Empty.FromString(serialized))
    except DecodeError:
        return []
    return [each.data.decode(errors="replace") for each in fields if each.field_number in (2, 3)]


def dropped(warnings: Iterable[str]) -> int:
    """Return how many events a profile's warnings say were lost."""
    return sum(int(number) for text in warnings for number in re.findall(r"(\d+)(?: \w+)? events? .*?dropped", text))


_FUNCTION = re.compile(r"^(?:EagerLocalExecute: )?(__\w+?_\d+)(?::\w+)?$")
"""Name of the event of a traced function."""


def function_graph(found: Iterable[Line], functions: Any) -> HloGraph:
    """Return the operations of the traced functions that ran, before anything was fused.

    Parameters
    ----------
    found : iterable of Line
    functions : object
        Has ``has_function`` and ``get_function_def``, which look up functions by name.
    """
    graph: dict[str, tuple[str, list[str]]] = {}
    waiting = [match.group(1) for line in found for each, _ in line if (match := _FUNCTION.match(each.what))]
    seen = set()
    while waiting:
        name = waiting.pop()
        if name in seen or not functions.has_function(name):
            continue
        seen.add(name)
        for node in functions.get_function_def(name).node_def:
            graph[node.name] = node.op, [each.partition(":")[0] for each in node.input if not each.startswith("^")]
            waiting += [value.func.name for value in node.attr.values() if value.func.name]
    return graph


_KERNEL = re.compile(r"^(?P<name>[\w.\-/>]+):(?P<type>_?[A-Z]\w*)$")

_NOT_FUSED = frozenset(
    (
        *("Const", "Placeholder", "ReadVariableOp", "Identity", "Reshape", "ExpandDims", "Squeeze", "NoOp"),
        *("Shape", "ShapeN", "Size", "Rank", "BroadcastGradientArgs"),
    )
)
"""Operations without events of their own that no fused kernel computes."""


def kernel_runs(
    found: Iterable[Line], graph: HloGraph, update: str = OPTIMIZER
) -> tuple[list[Interval], dict[str, Owner]]:
    """Return the runs of kernels, and their owners by `Interval.what`.

    Parameters
    ----------
    found : iterable of Line
    graph : HloGraph
    update : str
        The scope of the optimizer's update.
    """
    intervals = [part for line in found for part in innermost(each for each, _ in line if _KERNEL.match(each.what))]
    named = {each.what: match for each in intervals if (match := _KERNEL.match(each.what))}
    measured = {match["name"] for match in named.values()}
    owners = {}
    for what, match in named.items():
        name = match["name"]
        nodes = {index for part in fused(name, match["type"], graph, measured) for index in labelled(part)}
        other = ADDED if match["type"].endswith("AddN") else OTHER_OPERATORS
        other = OPTIMIZER if update in name.split("/") else other
        owners[what] = Owner(tuple(sorted(nodes)), is_backward(name), other)
    return intervals, owners


def fused(name: str, kernel: str, graph: HloGraph, measured: set[str]) -> set[str]:
    """Return the names of the operations that a kernel computes.

    A fused kernel has the name of one operation, the last one or a normalization before it. The
    others have no events of their own.

    Parameters
    ----------
    name, kernel : str
        As in the event.
    graph : HloGraph
    measured : set of str
        Names of all operations with events.
    """
    parts = {name}
    operation = graph.get(name, ("", ()))[0]
    if operation in ("", kernel.removeprefix("_Mkl").removeprefix("Native")):
        return parts

    def absorbed(other: str) -> bool:
        return other in graph and other not in measured and graph[other][0] not in _NOT_FUSED

    waiting = [name]
    while waiting:
        inputs = [other for other in graph[waiting.pop()][1] if absorbed(other) and other not in parts]
        parts.update(inputs)
        waiting += inputs
    if operation.startswith("FusedBatchNorm"):  # then an addition and an activation may follow
        last = [name]
        while last:
            last = [other for other, (_, inputs) in graph.items() if last[0] in inputs and absorbed(other)][:1]
            parts.update(last)
    return parts


_END = "end: "
"""XLA's prefix of the event that ends what an instruction started on other threads."""


def with_ends(intervals: Iterable[Interval]) -> list[Interval]:
    """Extend instructions' intervals to their ends on other threads, which XLA reports separately.

    The n-th end of an instruction belongs to its n-th start. Where an end is missing, the
    instruction's own interval stays.
    """
    found: dict[str, list[Interval]] = defaultdict(list)
    ends: dict[str, list[float]] = defaultdict(list)
    for each in sorted(intervals):
        if each.what.startswith(_END):
            ends[each.what.removeprefix(_END)].append(each.end)
        else:
            found[each.what.rpartition("/")[2]].append(each)
    whole = []
    for what, runs in found.items():
        if len(ends[what]) == len(runs):
            runs = [one._replace(end=max(one.end, end)) for one, end in zip(runs, sorted(ends[what]), strict=True)]
        whole += runs
    return whole


def instructions(found: Iterable[Line]) -> tuple[list[Interval], dict[str, set[str]]]:
    """Return the runs of instructions, and which instructions ran by module.

    Returns
    -------
    intervals : list of Interval
        Their `Interval.what` is ``MODULE/INSTRUCTION``.
    modules : dict of str to set of str
    """
    intervals: list[Interval] = []
    modules: dict[str, set[str]] = defaultdict(set)
    for each, attributes in (event for line in found for event in line):
        if "hlo_op" in attributes:
            module = str(attributes.get("hlo_module", ""))
            modules[module].add(each.what)
            intervals.append(each._replace(what=f"{module}/{each.what}"))
        elif each.what.startswith(_END):
            intervals.append(each)
    return with_ends(intervals), modules


class Instruction(NamedTuple):
    """One instruction of a compiled program.

    Attributes
    ----------
    name, opcode : str
    op_name : str
        The traced operation with its scopes; empty if the compiler made the instruction.
    operands : sequence of str
        Names of instructions of the same computation.
    called : sequence of str
        Names of the computations that it calls.
    number : int
        For a parameter: the position among the parameters of the computation.
    """

    name: str
    opcode: str
    op_name: str
    operands: Sequence[str]
    called: Sequence[str]
    number: int = -1


class CompiledProgram(NamedTuple):
    """A compiled XLA program: its instructions by computation, and the name of the entry."""

    computations: Mapping[str, Sequence[Instruction]]
    entry: str


_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
_OPCODE = re.compile(r"(?:^|\s)([a-z][\w\-]*)\(")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_PARAMETER = re.compile(r" parameter\((\d+)\)")
_NAMED = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(r"\b(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
_SEVERAL_CALLED = re.compile(r"\b(?:branch_computations|called_computations)=\{([^}]*)\}")


def read_hlo(text: str) -> CompiledProgram:
    """Read an optimized HLO module as XLA prints it."""
    found: dict[str, list[Instruction]] = {}
    entry, current = "", None
    for line in text.splitlines():
        if line.endswith("{") and not line.startswith((" ", "HloModule")) and "(" in line:
            current = line.removeprefix("ENTRY ").lstrip("%").partition("(")[0].strip()
            found[current] = []
            entry = current if line.startswith("ENTRY") else entry
        elif line == "}":
            current = None
        elif current is not None and (match := _INSTRUCTION.match(line)):
            found[current].append(_instruction(*match.groups()))
    return CompiledProgram(found, entry)


def live_programs(client: Any, *, exact: bool) -> Iterator[tuple[str, CompiledProgram]]:
    """Yield the programs that an XLA client has compiled: those in float64, or all others."""
    for executable in client.live_executables():
        for module in executable.hlo_modules():
            text = module.to_string()
            if ("f64[" in text) == exact:
                yield module.name, read_hlo(text)


def _instruction(name: str, rest: str) -> Instruction:
    body, _, metadata = rest.partition(", metadata={")
    opcode, op_name = _OPCODE.search(body), _OP_NAME.search(metadata)
    called = _CALLED.findall(body)
    for several in _SEVERAL_CALLED.findall(body):
        called += _NAMED.findall(several)
    operands = _NAMED.findall(body[opcode.end() :].partition("), ")[0]) if opcode else []
    opcode_name, number = (opcode.group(1) if opcode else ""), _PARAMETER.search(body)
    traced = op_name.group(1) if op_name else ""
    return Instruction(name, opcode_name, traced, operands, called, int(number.group(1)) if number else -1)


UNNAMED = "XLA gives some instructions that it makes no name, and those count as other operators"
"""A note of profiles with compiled programs."""

_PARTS = ("fusion", "call", "custom-call", "async-start")
"""Opcodes whose called computations are their parts. A reduction's computation is one addition, and
often that of another node, because equal computations are merged."""

_CONTROL = ("while", "conditional")
"""Opcodes whose parts the profiler reports separately."""

_NO_WORK = ("parameter", "constant", "tuple", "get-tuple-element")

_LITTLE_WORK = (*_NO_WORK, *_PARTS, "iota", "broadcast", "bitcast", "reshape")
"""Opcodes that the compiler merges if equal, and that then have the name of the first node that
used them. They count only where nothing else in an instruction has a name."""


def program_owners(
    programs: Iterable[tuple[str, CompiledProgram]], modules: Mapping[str, set[str]], update: str = OPTIMIZER
) -> dict[str, Owner]:
    """Return the owners of the instructions that ran.

    Several programs may have the same name. Those count that contain all instructions that ran
    under that name, and an instruction belongs to its nodes in each of them.

    Parameters
    ----------
    programs : iterable of (str, CompiledProgram)
        All compiled programs with their names.
    modules : mapping of str to set of str
        As `instructions` returns it.
    update : str
        The scope of the optimizer's update.

    Returns
    -------
    dict of str to Owner
        By ``MODULE/INSTRUCTION``.
    """
    found: dict[str, Owner] = {}
    for name, program in programs:
        ran = modules.get(name, set())
        known = {each.name for instructions in program.computations.values() for each in instructions}
        if not ran or not ran <= known:
            continue
        for instruction, owner in hlo_owners(program, update).items():
            key = f"{name}/{instruction}"
            other = found.get(key, owner)
            nodes = tuple(sorted({*owner.nodes, *other.nodes}))
            found[key] = owner._replace(nodes=nodes, backward=owner.backward or other.backward)
    return found


def hlo_owners(program: CompiledProgram, update: str = OPTIMIZER) -> dict[str, Owner]:
    """Return the owner of each instruction of a compiled program.

    A fusion belongs to the nodes of all its parts, and is not divided. The compiler gives no names
    to some instructions that it makes: such an instruction belongs to the nodes that read it, or
    else, if it only changes a layout, to those that it reads.

    Returns
    -------
    dict of str to Owner
        By name of the instruction; without loops and branches, whose parts are included.
    """
    owners: dict[str, Owner] = {}
    waiting, seen = [program.entry], set()
    while waiting:
        name = waiting.pop()
        if name not in seen and name in program.computations:
            seen.add(name)
            instructions = program.computations[name]
            owners.update(_owners(instructions, program, update))
            waiting += [called for each in instructions if each.opcode in _CONTROL for called in each.called]
    return owners


_MOVES = ("parameter", "constant", "copy", "transpose", "bitcast", "reshape", "convert", "fusion")
"""Opcodes that a change of layout consists of."""


def _owners(instructions: Sequence[Instruction], program: CompiledProgram, update: str) -> dict[str, Owner]:
    own = {each.name: _op_names(each, program) for each in instructions if each.opcode not in (*_NO_WORK, *_CONTROL)}
    by_name = {each.name: each for each in instructions}
    users: dict[str, list[Instruction]] = defaultdict(list)
    for each in instructions:
        for operand in set(each.operands):
            users[operand].append(each)
    for name in reversed(list(own)):
        if not own[name]:
            own[name] = {
                found
                for user in users.get(name, ())
                for found in _reading(user, name, program) or own.get(user.name, set())
                if labelled(found)
            }
    for name in own:
        if not own[name] and all(part.opcode in _MOVES for part in _parts(by_name[name], program)):
            own[name] = {found for other in by_name[name].operands for found in own.get(other, ())}
    return {name: _owner(op_names, update) for name, op_names in own.items()}


def _reading(user: Instruction, name: str, program: CompiledProgram) -> set[str]:
    """Return the names of the first named parts of a fusion that read the operand ``name``."""
    if user.opcode != "fusion":
        return set()
    inner = [each for called in user.called for each in program.computations.get(called, ())]
    places = [place for place, operand in enumerate(user.operands) if operand == name]
    waiting = [each.name for each in inner if each.opcode == "parameter" and each.number in places]
    found = set()
    while waiting:
        read = waiting.pop()
        for each in inner:
            if read in each.operands:
                if each.op_name:
                    found.add(each.op_name)
                else:
                    waiting.append(each.name)
    return found


def program(module: Any) -> CompiledProgram:
    """Read an ``HloModuleProto`` message (``hlo.proto``)."""
    names = {each.id: each.name for each in module.computations}
    found = {}
    for computation in module.computations:
        operands = {each.id: each.name for each in computation.instructions}
        found[computation.name] = [
            Instruction(
                each.name,
                each.opcode,
                each.metadata.op_name,
                [operands[number] for number in each.operand_ids],
                [names[number] for number in each.called_computation_ids],
                each.parameter_number,
            )
            for each in computation.instructions
        ]
    return CompiledProgram(found, names[module.entry_computation_id])


def _op_names(instruction: Instruction, program: CompiledProgram) -> set[str]:
    """Return the names of an instruction and of its parts."""
    parts = _parts(instruction, program)
    work = {each.op_name for each in parts if each.opcode not in _LITTLE_WORK and each.op_name}
    return work or {each.op_name for each in parts if each.opcode not in _NO_WORK and each.op_name}


def _parts(instruction: Instruction, program: CompiledProgram) -> list[Instruction]:
    """Return an instruction and all that it consists of."""
    parts, waiting = [], [instruction]
    while waiting:
        each = waiting.pop()
        parts.append(each)
        if each.opcode in _PARTS:
            waiting += [inner for called in each.called for inner in program.computations.get(called, ())]
    return parts


def _owner(op_names: set[str], update: str) -> Owner:
    nodes = tuple(sorted({index for name in op_names for index in labelled(name)}))
    backward = any(is_backward(name) for name in op_names if labelled(name))
    if nodes:
        return Owner(nodes, backward)
    return Owner(other=OPTIMIZER if any(update in name.split("/") for name in op_names) else OTHER_OPERATORS)


def is_backward(name: str) -> bool:
    """Return whether an operation's scopes are those of a backward pass."""
    return "transpose(" in name or "gradient_tape" in name
