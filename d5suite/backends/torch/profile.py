"""Layer times on PyTorch: `torch.profiler` over a step whose nodes are labelled.

While a profile is taken, the executor runs a copy of its graph, in which each node's call is
wrapped in `torch.profiler.record_function`. The graph that is timed otherwise has no such wrappers.
Functions of the backward pass belong to the node whose forward call has made them, as their
sequence numbers tell. In mode ``compile`` the copy is compiled, and its program times each of
inductor's kernels. Imports PyTorch, `d5suite.levels` and this adapter's `network`.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.fx
from torch.profiler import ProfilerActivity, record_function

from d5suite.backends.torch.network import Executor
from d5suite.errors import BackendError
from d5suite.levels.attribution import Owner
from d5suite.levels.network import Native
from d5suite.levels.onednn import captured, kernels_by_owner, kernels_of, mark
from d5suite.levels.profile import OPTIMIZER, OTHER_OPERATORS, Kernels, LayerTime, Profile, seconds_per_step
from d5suite.levels.training import Trainer

_LABEL = "d5suite node "
_EVALUATE = "autograd::engine::evaluate_function: "

_COMPILED = {"forward": "compiled forward pass", "backward": "compiled backward pass"}
"""Key in `Profile.other` for a compiled program's time between its kernels, by direction."""

_KINDS = {
    "Optimizer.": OPTIMIZER,
    _EVALUATE + "torch::autograd::AccumulateGrad": "gradients stored",
    _EVALUATE + "CompiledFunction": _COMPILED["backward"],
    "Torch-Compiled Region": _COMPILED["forward"],
}
"""Key in `Profile.other` for events that belong to no node, by the prefix of their names."""

_METHOD = "torch.profiler on the CPU: wall time of each node's call and of the backward functions that it made"

_METHOD_COMPILED = (
    "a clock around each kernel of inductor's programs: wall time; a kernel belongs to all nodes of whose operations "
    "it is made"
)

_Times = dict[tuple[tuple[str, ...], str], tuple[float, float]]
"""Seconds and calls, by nodes and direction."""


class _Nodes:
    """Labels on nodes' calls, and a record of the backward functions that each node makes.

    Attributes
    ----------
    owners : dict of int to str
        The node by sequence number of a backward function.
    """

    def __init__(self) -> None:
        self.owners: dict[int, str] = {}

    def wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return the call with its node's label."""

        def labelled(*arguments: Any) -> Any:
            before = torch.autograd._get_sequence_nr()
            with record_function(_LABEL + name):
                result = call(*arguments)
            self.owners.update(dict.fromkeys(range(before, torch.autograd._get_sequence_nr()), name))
            return result

        return labelled


class _Marks:
    """Marks in standard output before and after each node's kernels, forward and backward."""

    def wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return the call between two marks; its backward functions write marks, too."""

        def marked(*arguments: Any) -> Any:
            before = torch.autograd._get_sequence_nr()
            mark(f"forward {name}")
            result = call(*arguments)
            mark("")
            made = range(before, torch.autograd._get_sequence_nr())
            results = result if isinstance(result, tuple) else (result,)
            waiting = [each.grad_fn for each in results if isinstance(each, torch.Tensor)]
            seen = set()
            while waiting:
                function = waiting.pop()
                if function is None or function in seen or function._sequence_nr() not in made:
                    continue
                seen.add(function)
                function.register_prehook(lambda *_: mark(f"backward {name}"))
                function.register_hook(lambda *_: mark(""))
                waiting += [each for each, _ in function.next_functions]
            return result

        return marked


class _Kernels:
    """Which nodes inductor's kernels compute, and for how long they run.

    Traced operations and their backward operations carry the name of their node (`wrap`). While a
    program is generated (`followed`), inductor tells the operations of each kernel. The program
    then calls `started` before each kernel, and at its end.
    """

    _NODE = "d5suite node"
    _END = -1

    def __init__(self) -> None:
        self._owners: list[tuple[frozenset[str], str]] = []
        self.runs: list[tuple[int, float]] = []

    def wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return the call whose operations carry their node's name."""
        note = {self._NODE: name}

        def annotated(*arguments: Any) -> Any:
            with torch.fx.traceback.annotate(note):
                return call(*arguments)

        return annotated

    def started(self, number: int) -> None:
        """Note that a kernel begins, or that a program ends; compiled programs call it."""
        self.runs.append((number, perf_counter()))

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """Within the context, make compiled programs call `started`."""
        from torch._functorch import config as autograd_config
        from torch._inductor import config, debug
        from torch._inductor.codegen import cpp
        from torch._inductor.codegen.wrapper import PythonWrapperCodegen

        call = f"__import__('sys').modules[{__name__!r}].KERNELS.started"
        end = PythonWrapperCodegen.generate_return

        def write_start(wrapper: Any, _: str, number: int | None = None) -> None:
            if number is not None:
                wrapper.writeline(f"{call}({number})")

        def write_end(wrapper: Any, outputs: list[str]) -> None:
            wrapper.wrapper_call.writeline(f"{call}({self._END})")
            end(wrapper, outputs)

        uncached = {"fx_graph_cache": False, "fx_graph_remote_cache": False, "trace.provenance_tracking_level": 1}
        with (
            config.patch(uncached),
            autograd_config.patch(enable_autograd_cache=False),
            contextlib.ExitStack() as stack,
        ):
            for holder, name, value in (
                (debug, "set_kernel_post_grad_provenance_tracing", self._made),
                (cpp, "set_kernel_post_grad_provenance_tracing", self._made),
                (PythonWrapperCodegen, "write_provenance_debug_handle", write_start),
                (PythonWrapperCodegen, "generate_return", write_end),
            ):
                stack.callback(setattr, holder, name, getattr(holder, name))
                setattr(holder, name, value)
            yield

    def _made(self, schedule: Any, kernel: str, is_extern: bool = False) -> int:
        """Note the nodes of a kernel whose call inductor generates; return the kernel's number."""
        from torch._inductor.virtualized import V

        parts = [schedule] if is_extern else [each.node for each in schedule if getattr(each, "node", None) is not None]
        notes = (origin.meta.get("custom") or {} for part in parts for origin in part.origins)
        nodes = frozenset(note[self._NODE] for note in notes if self._NODE in note)
        self._owners.append((nodes, "backward" if V.graph.is_backward else "forward"))
        return len(self._owners) - 1

    def times(self, order: Iterable[str]) -> _Times:
        """Return the seconds and calls of all `runs`, by their nodes (maybe none) and direction."""
        place = {name: number for number, name in enumerate(order)}
        found: _Times = {}
        for (number, start), (_, stop) in itertools.pairwise(self.runs):
            if number != self._END:
                nodes, direction = self._owners[number]
                key = tuple(sorted(nodes, key=place.__getitem__)), direction
                seconds, calls = found.get(key, (0.0, 0))
                found[key] = seconds + stop - start, calls + 1
        return found


KERNELS = _Kernels()
"""The kernels of all programs compiled for profiles in this process, which call it by this name."""


def profile(executor: Executor, step: Callable[[], None], steps: int, folder: Path, trainer: Trainer | None) -> Profile:
    """Time every node within a step; see `d5suite.levels.profile`."""
    if executor.device != "cpu":
        raise BackendError("PyTorch's layer times are taken on the CPU only")
    compiled = executor.mode == "compile"
    nodes = _Nodes()
    with (
        KERNELS.followed() if compiled else contextlib.nullcontext(),
        executor.rebuilt(KERNELS.wrap if compiled else nodes.wrap),
    ):
        step()
        KERNELS.runs.clear()
        with torch.profiler.profile(activities=[ProfilerActivity.CPU], acc_events=False) as recorded:
            step_seconds = seconds_per_step(step, steps)
    found, other = _assigned(recorded.profiler.kineto_results.events(), nodes.owners)
    if compiled:
        found, other = _within(other, KERNELS.times(node.name for node in executor.network.nodes))
    layers = tuple(
        LayerTime(names, direction, seconds / steps, calls / steps)
        for (names, direction), (seconds, calls) in found.items()
    )
    others = {name: seconds / steps for name, seconds in other.items()}
    return Profile(layers, others, step_seconds, _METHOD_COMPILED if compiled else _METHOD)


def _within(other: dict[str, float], kernels: _Times) -> tuple[_Times, dict[str, float]]:
    """Subtract the kernels' times from those of the compiled programs in which they run."""
    other = dict(other)
    for (names, direction), (seconds, _) in kernels.items():
        around = _COMPILED[direction]
        other[around] = max(0.0, other.get(around, 0.0) - seconds)
        if not names:
            other[OTHER_OPERATORS] = other.get(OTHER_OPERATORS, 0.0) + seconds
    return {key: time for key, time in kernels.items() if key[0]}, other


def kernels(executor: Executor, step: Callable[[], None], feed: Native, backward: bool, folder: Path) -> Kernels:
    """Return oneDNN's kernels in a step; see `d5suite.levels.profile`."""
    verbose = torch.backends.mkldnn.verbose
    if executor.mode == "compile" or not torch.backends.mkldnn.is_available():
        return Kernels()
    file = folder / "onednn.txt"
    with executor.rebuilt(_Marks().wrap), captured(file), verbose(torch.backends.mkldnn.VERBOSE_ON):
        step()
    found = kernels_by_owner(file.read_text(encoding="utf-8", errors="replace").splitlines())
    places = {node.name: index for index, node in enumerate(executor.network.nodes)}
    owners = {
        owner: Owner((places[name],), direction == "backward")
        for owner in found
        for direction, _, name in [owner.partition(" ")]
        if name
    }
    return kernels_of(executor.network, found, owners)


def _assigned(events: Iterable[Any], owners: dict[int, str]) -> tuple[_Times, dict[str, float]]:
    """Return seconds and calls by node and direction, and seconds of all else by name."""
    found: _Times = {}
    other: dict[str, float] = {}
    threads: dict[int, int] = {}
    for event in sorted(events, key=lambda each: (each.start_ns(), -each.duration_ns())):
        thread, start = event.start_thread_id(), event.start_ns()
        if start < threads.get(thread, 0):
            continue  # within an event that has been counted
        name, seconds = event.name(), event.duration_ns() * 1e-9
        key = None
        if name.startswith(_LABEL):
            key = (name.removeprefix(_LABEL),), "forward"
        elif name.startswith(_EVALUATE) and event.sequence_nr() in owners:
            key = (owners[event.sequence_nr()],), "backward"
        threads[thread] = start + event.duration_ns()
        if key is not None:
            before, calls = found.get(key, (0.0, 0))
            found[key] = before + seconds, calls + 1
        else:
            where = next((kind for start, kind in _KINDS.items() if name.startswith(start)), OTHER_OPERATORS)
            other[where] = other.get(where, 0.0) + seconds
    return found, other
