"""Faults of deep500, without d5suite's adapter: see docs/findings.md."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.findings.mended import require

REPAIRS = "d5suite/backends/deep500/{}"

PROGRAM = """
import collections, collections.abc, json, sys, types
import numpy as np

found = {}
try:
    import deep500
    found["import"] = False
except ImportError:
    found["import"] = True
for name in [name for name in sys.modules if name.startswith("deep500")]:
    del sys.modules[name]
collections.Iterator = collections.abc.Iterator
sys.modules["mpi4py"] = None
sys.modules["deep500.frameworks.reference.distributed_optimizers"] = types.ModuleType("stub")
from deep500.frameworks.reference import optimizers
from deep500.frameworks.reference.custom_operators.custom_op_python import ReluOp

gradient = ReluOp([], []).backward([np.ones(1)], [np.zeros(1)], [np.zeros(1)])
found["relu"] = float(np.ravel(gradient)[0])
adam = optimizers.AdamOptimizer.__new__(optimizers.AdamOptimizer)
vars(adam).update(lr=1.0, beta1=0.5, beta2=0.75, epsilon=0.0, first_momentum={}, second_momentum={"p": 1.0}, t=1)
adam.update_rule(0.0, 0.0, "p")
found["adam"] = adam.second_momentum["p"]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found() -> dict[str, float]:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    if "No module named 'deep500'" in done.stderr:
        pytest.skip("needs deep500")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_it_fails_to_import(found: dict[str, float]) -> None:
    require(bool(found["import"]), "deep500", REPAIRS.format("repairs.py (_importable)"))


def test_relu_has_a_slope_at_zero(found: dict[str, float]) -> None:
    require(found["relu"] == 1, "deep500", REPAIRS.format("operators/elementwise.py"))


def test_adams_second_moment_decays_with_beta1(found: dict[str, float]) -> None:
    require(found["adam"] == 0.5, "deep500", REPAIRS.format("repairs.py (_adam)"))
