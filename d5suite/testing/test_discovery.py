"""Discovery: the plug-in is found, imports nothing until it is loaded, and declares what it has."""

from __future__ import annotations

import subprocess
import sys

import pytest

from d5suite.backends import backend as find
from d5suite.backends import discover
from d5suite.errors import BackendError, UnsupportedOperatorError
from d5suite.levels.backend import MODULES
from d5suite.levels.description import DEVICES, PRECISIONS
from d5suite.testing.networks import classifier
from d5suite.testing.subject import Subject

OFFERED = {
    "runtime": ("configure", "versions", "device_problem", "device_name", "device_memory"),
    "operators": ("OPERATORS",),
    "custom": ("factory",),
    "network": ("Executor",),
    "profile": ("profile",),
    "training": ("Trainer",),
    "distributed": ("Replica",),
    "baseline": ("resnet50_training_step",),
    "loader": ("native_loader", "NAMES"),
}

SHORT = 10
"""Most characters of a text that is too short to be a reason."""


def test_it_is_found_under_its_name(subject: Subject) -> None:
    found, faults = discover()
    name = subject.backend.name
    if name in faults:
        raise faults[name]
    subject.hold("backend.name", found[name] is find(name), "each discovery returns another Backend")


def test_importing_the_description_imports_no_framework(subject: Subject) -> None:
    backend = subject.backend
    frameworks = {*backend.requires, *(module for modules in backend.mode_requires.values() for module in modules)}
    code = "import sys, d5suite.backends as b; b.backend(sys.argv[1]); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, backend.name], capture_output=True, text=True, check=True)
    loaded = frameworks & set(done.stdout.split())
    subject.hold("backend.hygiene", not loaded, f"importing it imports {', '.join(sorted(loaded))}")


def test_it_declares_known_things(subject: Subject) -> None:
    backend = subject.backend
    wrong = [d for d in backend.devices if d not in DEVICES] + [p for p in backend.precisions if p not in PRECISIONS]
    levels = sorted(backend.levels)
    data = "backend.data"
    subject.hold(data, not wrong, f"unknown: {', '.join(wrong)}")
    subject.hold(data, bool(backend.modes), "it has no mode")
    subject.hold(data, bool(backend.operators), "it has no operator")
    subject.hold(data, all(backend.modes.values()), "a mode has no description")
    known = 1 in levels and backend.levels <= {0, 1, 2, 3} and (2 in levels or 3 not in levels)
    subject.hold(data, known, f"levels are 1 and, perhaps, 0, 2 and, with 2, 3, not {levels}")
    for mode in (*backend.environment, *backend.mode_requires, *backend.mode_absent):
        subject.hold(data, mode in backend.modes, f"there is no mode {mode!r}")


def test_what_is_absent_has_a_reason(subject: Subject) -> None:
    backend = subject.backend
    lacking = [d for d in DEVICES if d not in backend.devices] + [p for p in PRECISIONS if p not in backend.precisions]
    lacking += [f"level {level}" for level in (0, 2) if level not in backend.levels]
    for name in lacking:
        subject.hold("backend.absent", bool(backend.absent.get(name)), f"no reason for {name!r}")
    given = [*backend.absent.items(), *backend.expected_failures.items()]
    given += [pair for lacking in backend.mode_absent.values() for pair in lacking.items()]
    for name, reason in given:
        subject.hold("backend.absent", len(reason) > SHORT, f"{reason!r} says too little of {name!r}")


@pytest.mark.parametrize("module", MODULES)
def test_its_modules_offer_their_interface(subject: Subject, module: str) -> None:
    backend = subject.backend
    if module in backend.absent:
        pytest.skip(f"no {module}: {backend.absent[module]}")
    if module in ("training", "baseline", "distributed"):
        subject.require(level=3 if module == "distributed" else 2)
    loaded = backend.load(module, subject.mode)
    offered = (*OFFERED[module], "Operator") if module == "operators" and 0 in backend.levels else OFFERED[module]
    for name in offered:
        subject.hold("backend.modules", hasattr(loaded, name), f"{module} has no {name}")


@pytest.mark.parametrize(("name", "what"), [("event_timer", "device events"), ("l2_flush", "L2 flush")])
def test_it_has_what_gpus_need_or_says_why_not(subject: Subject, name: str, what: str) -> None:
    backend = subject.backend
    if "cuda" not in backend.devices or what in backend.absent:
        pytest.skip(f"no {what}: {backend.absent.get(what, 'it has no GPU')}")
    offered = hasattr(backend.load("runtime", subject.mode), name)
    subject.hold("backend.modules", offered, f"runtime has no {name}, and {what!r} is not absent")


def test_it_implements_the_operators_it_declares(subject: Subject) -> None:
    backend = subject.backend
    if "operators" in backend.absent:
        pytest.skip(f"no operators module: {backend.absent['operators']}")
    implemented = set(backend.load("operators", subject.mode).OPERATORS)
    difference = ", ".join(sorted(implemented ^ (backend.operators | backend.single_operators)))
    subject.hold("backend.operators", not difference, f"declared or implemented, not both: {difference}")


def test_every_precision_has_tolerances_with_a_reason(subject: Subject) -> None:
    backend = subject.backend
    for precision in backend.precisions:
        tolerance = backend.tolerances.get(precision)
        subject.hold("backend.tolerances", tolerance is not None, f"{precision} has none")
        reason = backend.tolerances[precision].reason
        subject.hold("backend.tolerances", len(reason) > SHORT, f"{reason!r} says too little of those of {precision}")


def test_it_refuses_what_it_does_not_declare(subject: Subject) -> None:
    backend = subject.backend
    network = classifier()
    absent = [("device", d) for d in DEVICES if d not in backend.devices]
    absent += [("precision", p) for p in PRECISIONS if p not in backend.precisions]
    for kind, value in [("mode", "no-such-mode"), ("precision", "fp3"), *absent]:
        with subject.refuses("backend.refusal", f"{kind} {value!r}", backend.name, value, error=BackendError):
            backend.executor(network, **{"mode": subject.mode, kind: value})


def test_it_refuses_operators_that_it_does_not_declare(subject: Subject) -> None:
    from onnx import helper

    from d5suite.network import Network
    from d5suite.testing.cases import model_of

    unknown = [o for o in ("Bernoulli", "RandomNormalLike", "Erf") if o not in subject.backend.operators]
    if len(unknown) < 2:
        pytest.skip("the backend has every operator that this test uses")
    tensors = ["x", "a", "y"]
    nodes = [helper.make_node(o, [tensors[i]], [tensors[i + 1]], f"node{i}") for i, o in enumerate(unknown[:2])]
    network = Network(model_of(nodes, {"x": [1, 3, 4, 4]}, {"y": [1, 3, 4, 4]}))
    names = [subject.backend.name, *unknown[:2], "node0", "node1"]
    with subject.refuses("backend.refusal", "a network of unknown operators", *names, error=UnsupportedOperatorError):
        subject.backend.executor(network, mode=subject.mode, precision=subject.exact)


def test_the_runtime_describes_itself(subject: Subject) -> None:
    runtime = subject.backend.load("runtime", subject.mode)
    device, modules = subject.device, "backend.modules"
    problem, memory = runtime.device_problem(device), runtime.device_memory(device)
    subject.hold(modules, bool(runtime.versions()), "runtime.versions is empty")
    subject.backend.check_version(runtime.versions())
    subject.hold(modules, problem is None, f"runtime.device_problem({device!r}) is {problem!r}")
    subject.hold(modules, bool(runtime.device_name(device)), f"runtime.device_name({device!r}) is empty")
    callables = memory is None or all(callable(each) for each in memory)
    subject.hold(modules, callables, f"runtime.device_memory({device!r}) is not a pair of functions")
