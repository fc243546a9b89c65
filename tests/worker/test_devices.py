"""A worker on a GPU that a script plays: its clock, its memory, its driver's answers.

The backend ``scripted`` computes on the CPU; NVML's answers are made up (``tests/fake_nvml``).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from d5suite.backends import discover
from d5suite.network.operation import Operation
from tests.conftest import Run, plugin_environment, run_several

pytestmark = pytest.mark.skipif(discover()[0]["torch"].problem() is not None, reason="PyTorch is not installed")

FAKE_NVML = Path(__file__).parents[1] / "fake_nvml"


MODES = ("agrees", "short", "hasty", "backwards")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The worker's results of one operator by mode."""
    folder = tmp_path_factory.mktemp("jobs")
    # Milliseconds long: on a busy machine, too, both clocks differ by less than 1% of it. Of few
    # values, so that its proof is quick.
    product = Operation("MatMul", {"A": (512, 512), "B": (512, 512)}, {}, name="product")
    for mode in MODES:
        content: dict[str, Any] = {
            "schema": "d5suite-job-3",
            "backend": {"name": "scripted", "mode": mode},
            "device": "cuda",
            "precision": "fp32",
            "threads": 1,
            "seed": 0,
            "passes": ["time"],
            "cases": [
                {
                    "kind": "operation", "name": "product", "preset": "smoke", "measurements": ["forward"],
                    "sampling": {"max_time_s": 0.02, "min_rounds": 10, "warmup": "off"},
                    "operation": product.to_dict(),
                }
            ],
        }  # fmt: skip
        (folder / f"{mode}.job.json").write_text(json.dumps(content))
        sampling = {**content["cases"][0]["sampling"], "l2_cold": True}
        content = {**content, "cases": [{**content["cases"][0], "sampling": sampling}]}
        (folder / f"{mode}-cold.job.json").write_text(json.dumps(content))
        (folder / f"{mode}-cpu.job.json").write_text(json.dumps({**content, "device": "cpu"}))
    jobs = [*MODES, "agrees-cold", "agrees-cpu"]
    done = run_several([["d5suite.worker", str(folder / f"{name}.job.json")] for name in jobs], folder)
    results = {name: json.loads((folder / f"{name}.result.json").read_text()) for name in jobs}
    return {**results, "output": {name: each.stdout for name, each in zip(jobs, done, strict=True)}}


@pytest.mark.parametrize("mode", ["agrees", "short", "backwards"])
def test_both_clocks_are_recorded_and_doubts_told(found: dict[str, Any], mode: str) -> None:
    (measured,) = found[mode]["measurements"].values()
    time = measured["passes"]["time"]
    events, host = time["device_events"], time["samples"]["samples_s"]
    assert len(events["samples_s"]) == len(host)
    assert events["launch_overhead_s"] > 0
    warnings = time["warnings"]
    if mode == "agrees":
        assert not warnings and events["agree"]
        assert all(0 < device <= each for device, each in zip(events["samples_s"], host, strict=True))
    else:
        said = {"short": "the device's events span", "backwards": "event clock went backwards"}[mode]
        assert said in warnings[0]
        assert events["trusted"] is (mode == "short")


def test_samples_that_end_before_the_device_are_set_aside(found: dict[str, Any]) -> None:
    hasty = found["hasty"]
    assert not hasty["measurements"]
    assert "samples end before the device does" in hasty["failures"]["product/forward"]["message"]
    assert hasty["kept"]["product/forward"]["samples"]["samples_s"]


def test_the_cache_is_made_cold_before_every_call_where_asked_for(found: dict[str, Any]) -> None:
    (measured,) = found["agrees-cold"]["measurements"].values()
    time = measured["passes"]["time"]
    assert time["l2_cold"] == {"cache_bytes": 1 << 20, "buffer_bytes": 2 << 20}
    assert measured["extra"]["iterations"] == 1
    assert found["output"]["agrees-cold"].count("flushed") > len(time["samples"]["samples_s"])
    assert "flushed" not in found["output"]["agrees"]
    assert "l2_cold" not in next(iter(found["agrees"]["measurements"].values()))["passes"]["time"]
    reason = "the caches of CPUs are left as they are"
    assert reason in found["agrees-cpu"]["failures"]["product/forward"]["message"]


def test_a_cold_cache_is_refused_where_nothing_makes_it_so(run_pytest: Run, recipe_folder: Path) -> None:
    done = run_pytest(str(recipe_folder), "--backend", "torch", "--l2-cold")
    assert done.returncode == 4
    assert "--l2-cold is for a GPU" in done.stderr
    asked = ("--device", "cuda", "--l2-cold", "-rs")
    done = run_pytest(str(recipe_folder), "--backend", "scripted", *asked, "-k", "pipeline")
    assert "input_pipeline takes its samples in its own way" in " ".join(done.stdout.split()), done.stdout
    if discover()[0]["tensorflow"].problem() is None:
        done = run_pytest(str(recipe_folder), "--backend", "tensorflow", *asked, "-k", "inference")
        assert done.returncode == 5
        assert "tensorflow has no L2 flush: TensorFlow's tensors are never" in " ".join(done.stdout.split())


@pytest.mark.slow
@pytest.mark.parametrize("driver", [True, False])
def test_a_recipe_on_a_gpu_has_all_that_the_driver_says(
    run_pytest: Run, recipe_folder: Path, tmp_path: Path, driver: bool
) -> None:
    """The whole way to a result file; without nvidia-ml-py each missing figure has its reason."""
    path = plugin_environment()["PYTHONPATH"]
    if not driver:
        (tmp_path / "absent").mkdir()
        (tmp_path / "absent" / "pynvml.py").write_text("raise ImportError('as if it were not installed')")
    path = f"{FAKE_NVML if driver else tmp_path / 'absent'}:{path}"
    done = run_pytest(
        str(recipe_folder), "--backend", "scripted", "--device", "cuda", "--benchmark-json", "out.json",
        "-k", "inference or training_step",
        environment={"PYTHONPATH": path, "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "0"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    records = [each["extra_info"]["d5suite"] for each in json.loads((tmp_path / "out.json").read_text())["benchmarks"]]
    assert [each["measurement"] for each in records] == ["inference", "training_step"]
    for info in records:
        assert info["device"] == "cuda" and info["device_name"] == "Scripted GPU"
        assert info["memory"]["method"] == "device" and info["peak_memory_bytes"] == 1 << 20
        assert len(info["device_events"]["samples_s"]) > 4
        if driver:
            (gpu,) = info["environment"]["gpus"]
            assert gpu["name"] == "NVIDIA H100 80GB HBM3" and len(gpu["uuid_sha256"]) == 16
            assert info["memory"]["nvml"] == {
                "peak_bytes": 2 * 2**30, "baseline_bytes": 2 * 2**30, "of": "this process",
            }  # fmt: skip
            assert info["energy"]["mean_power_w"] == pytest.approx(
                300, rel=0.5
            )  # a busy machine may stop between two readings
            assert info["energy"]["joules_per_item"] == pytest.approx(info["energy"]["joules_per_step"] / 4)
            assert info["machine"]["gpus"][0]["clock_reasons"] == ["power cap"]
        else:
            reason = "nvidia-ml-py is not installed"
            assert reason in info["memory"]["nvml"]["missing"] and reason in info["energy"]["missing"]
            assert "gpus" not in info["machine"]


def test_a_gpu_that_its_driver_has_not_seen_working_is_no_result(run_pytest: Run, recipe_folder: Path) -> None:
    done = run_pytest(
        str(recipe_folder), "--backend", "scripted", "--device", "cuda", "-k", "inference",
        environment={"PYTHONPATH": f"{FAKE_NVML}:{plugin_environment()['PYTHONPATH']}", "FAKE_NVML_IDLE": "1"},
    )  # fmt: skip
    assert done.returncode == 1, done.stdout
    said = " ".join(done.stdout.split())
    assert "a GPU that nothing was computed on" in said and "lists no process" in said, done.stdout
