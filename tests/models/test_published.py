"""Predictions against published measurements, as ``benchmarks/bench_models.py`` prints them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import bench_models
from d5suite.models.machine import Machine, read_machine

MACHINES = Path(__file__).parents[2] / "examples" / "machines"


@pytest.fixture(scope="module")
def small() -> Machine:
    return read_machine(MACHINES / "a100-40gb.json")


@pytest.fixture(scope="module")
def large() -> Machine:
    return read_machine(MACHINES / "a100-80gb.json")


def test_activations_are_those_that_megatron_published() -> None:
    assert np.abs(bench_models.activation_errors()).max() < 1e-3


def test_iterations_left_out_of_the_fit_are_predicted_better_than_by_vtrain(small: Machine) -> None:
    errors = np.abs(bench_models.errors(bench_models.single_node()[1::2], small))
    assert errors.size == 360
    assert errors.mean() < 0.0837
    assert np.mean(errors < small.calibration.error_90) == pytest.approx(0.9, abs=0.02)


def test_megatrons_iterations_left_out_of_the_fit_are_predicted_better_than_by_calculon(large: Machine) -> None:
    errors = np.abs(bench_models.errors(bench_models.megatron(bench_models.SELECTIVE_S, selective=True), large))
    assert errors.mean() < 0.0365 and errors.max() < 0.0887


@pytest.mark.parametrize(
    "wrong",
    [
        {"peak_flops": 624e12},
        {"memory_bandwidth": 0.7e12},
        {"link_bandwidth": 60e9},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_a_wrong_figure_of_the_machine_is_seen(small: Machine, large: Machine, wrong: dict[str, Any]) -> None:
    node = bench_models.errors(bench_models.single_node()[1::2], replace(small, **wrong))
    far = bench_models.errors(bench_models.megatron(bench_models.SELECTIVE_S, selective=True), replace(large, **wrong))
    assert np.abs(node).mean() > 0.0837 or np.abs(far).mean() > 0.0365
