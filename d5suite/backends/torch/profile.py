"""Layer times on PyTorch: `torch.profiler` over a step whose nodes are labelled.

While a profile is taken, a copy of the executor's graph of native calls runs, in which each node's
call is wrapped in `torch.profiler.record_function`. The graph that is timed otherwise has no such
call. Functions of the backward pass belong to the node whose forward call has made them, which
their sequence numbers say. Imports PyTorch, `d5suite.levels` and this adapter's `network`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.fx
from torch.profiler import ProfilerActivity, record_function

from d5suite.backends.torch.network import Executor
from d5suite.errors import BackendError
from d5suite.levels.onednn import captured, kernels_by_owner, mark
from d5suite.levels.profile import OPTIMIZER, OTHER_OPERATORS, Kernel, LayerTime, Profile
from d5suite.levels.training import Trainer

_LABEL = "d5suite node "
_EVALUATE = "autograd::engine::evaluate_function: "

_KINDS = {
    "Optimizer.": OPTIMIZER,
    _EVALUATE + "torch::autograd::AccumulateGrad": "gradients stored",
    _EVALUATE + "CompiledFunction": "compiled backward pass",
    "Torch-Compiled Region": "compiled forward pass",
}
"""What events of no node are, by how their names begin."""

_FUSED = "torch.compile fuses nodes into kernels that do not say which nodes they hold: their time is elsewhere"

_METHOD = "torch.profiler on the CPU: wall time of each node's call and of the backward functions that it made"


class _Nodes:
    """Which node a call is for, and which backward functions it makes.

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


def profile(executor: Executor, step: Callable[[], None], steps: int, folder: Path, trainer: Trainer | None) -> Profile:
    """Time every node within a step; see `d5suite.levels.profile`."""
    if executor.device != "cpu":
        raise BackendError("PyTorch's layer times are taken on the CPU only")
    compiled = executor.mode == "compile"
    nodes = _Nodes()
    with contextlib.nullcontext() if compiled else executor.rebuilt(nodes.wrap):
        step()
        with torch.profiler.profile(activities=[ProfilerActivity.CPU], acc_events=False) as recorded:
            start = perf_counter()
            for _ in range(steps):
                step()
            step_seconds = (perf_counter() - start) / steps
    found, other = _assigned(recorded.profiler.kineto_results.events(), nodes.owners)
    kernels = {} if compiled else _kernels(executor, step, folder)
    layers = tuple(
        LayerTime((name,), direction, seconds / steps, calls / steps, kernels.get(f"{direction} {name}", ()))
        for (name, direction), (seconds, calls) in found.items()
    )
    others = {name: seconds / steps for name, seconds in other.items()}
    return Profile(layers, others, step_seconds, _METHOD, notes=(_FUSED,) if compiled else ())


def _kernels(executor: Executor, step: Callable[[], None], folder: Path) -> dict[str, tuple[Kernel, ...]]:
    """Return oneDNN's kernels in one step, by direction and node."""
    verbose = torch.backends.mkldnn.verbose
    if not torch.backends.mkldnn.is_available():
        return {}
    file = folder / "onednn.txt"
    with executor.rebuilt(_Marks().wrap), captured(file), verbose(torch.backends.mkldnn.VERBOSE_ON):
        step()
    return kernels_by_owner(file.read_text(encoding="utf-8", errors="replace").splitlines())


def _assigned(
    events: Iterable[Any], owners: dict[int, str]
) -> tuple[dict[tuple[str, str], tuple[float, int]], dict[str, float]]:
    """Return seconds and calls by node and direction, and seconds of all else by name."""
    found: dict[tuple[str, str], tuple[float, int]] = {}
    other: dict[str, float] = {}
    threads: dict[int, int] = {}
    for event in sorted(events, key=lambda each: (each.start_ns(), -each.duration_ns())):
        thread, start = event.start_thread_id(), event.start_ns()
        if start < threads.get(thread, 0):
            continue  # within an event that has been counted
        name, seconds = event.name(), event.duration_ns() * 1e-9
        key = None
        if name.startswith(_LABEL):
            key = name.removeprefix(_LABEL), "forward"
        elif name.startswith(_EVALUATE) and event.sequence_nr() in owners:
            key = owners[event.sequence_nr()], "backward"
        threads[thread] = start + event.duration_ns()
        if key is not None:
            before, calls = found.get(key, (0.0, 0))
            found[key] = before + seconds, calls + 1
        else:
            where = next((kind for start, kind in _KINDS.items() if name.startswith(start)), OTHER_OPERATORS)
            other[where] = other.get(where, 0.0) + seconds
    return found, other
