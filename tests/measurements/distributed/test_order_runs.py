"""An order of transfers through pytest, as a user asks for it: two ranks on gloo."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

from tests.conftest import plugin_environment

ROOT = Path(__file__).parents[3]
SCHEMA = json.loads((ROOT / "results" / "schema.json").read_text())


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="gloo comes with PyTorch")
def test_two_ranks_train_in_an_order_and_the_record_says_how_it_was_kept(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    recipe = str(ROOT / "recipes" / "test_digits_lenet.py")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rs", recipe, "-k", "distributed_step"]
    options = ["--ranks", "2", "--scheme", "all_reduce,all_reduce:cross_barrier=true,parameter_server,gossip",
               "--order", "tic", "--slice", "20000", "--benchmark-max-time", "0.05"]  # fmt: skip
    done = subprocess.run(
        [*command, "--backend", "torch", "--communicator", "gloo", "--oversubscribe", "--jobs", "jobs", *options,
         "--benchmark-json", "out.json"],
        cwd=tmp_path, capture_output=True, text=True, env=plugin_environment(), timeout=600,
    )  # fmt: skip
    assert done.returncode == 1 and "3 passed, 1 skipped" in done.stdout, done.stdout + done.stderr
    assert "gossip cannot honour order: a rank sends all its weights in one message" in done.stdout
    result = json.loads((tmp_path / "out.json").read_text())
    jsonschema.validate(result, SCHEMA)
    found = {bench["param"]: bench["extra_info"]["d5suite"] for bench in result["benchmarks"]}
    chosen, across, served = sorted(found, key=lambda name: ("parameter" in name, "cross" in name))
    for name, info in found.items():
        how = info["distributed"]["ordering"]
        assert (how["order"], how["slice_bytes"], how["credit_bytes"]) == ("tic", 20000, None)
        assert how["arrival_orders"] >= 1 if name == chosen else how["arrival_orders"] == 1
        assert how["potential"] > 0 and how["step_variance_s2"] > 0
        assert name == across or -1e-9 <= how["efficiency"] <= 1 + 1e-9  # 0 if nothing overlaps, but for roundings
        checks = {check["name"]: check["error"] for check in info["validation"]["checks"]}
        kept = (
            "steps in which a transfer that was ready was sent" if name == chosen else "steps whose transfers arrived"
        )
        assert checks[f"{kept} in another order than tic"] == 0
        (own,) = [each for each in info["distributed"]["ranks"] if each["rank"] == 1]
        if name == served:  # all bytes in slices, and the order of ten tensors
            whole = info["memory"]["parameters_bytes"] + 4 * 10
            assert own["bytes_sent"] == own["bytes_received"] == whole
            assert own["messages_sent"] > 11
