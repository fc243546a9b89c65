"""Counts of transformers and their plans."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from d5suite.errors import ConfigurationError
from d5suite.models.memory import memory_of
from d5suite.models.plan import RECOMPUTE, Plan, plans
from d5suite.models.transformer import Transformer, parse_transformer

NETWORK = Transformer(24, 1024, 16, 1024)

networks = st.builds(
    lambda layers, heads, width, sequence: Transformer(layers, heads * width, heads, sequence),
    st.sampled_from([8, 12, 24]),
    st.sampled_from([8, 16]),
    st.sampled_from([64, 128]),
    st.sampled_from([128, 2048]),
)


def test_parameters_of_gpt3_are_those_of_its_paper() -> None:
    assert Transformer(96, 12288, 96).parameters == pytest.approx(175e9, rel=0.01)  # Brown et al., table 2.1


def test_activations_on_one_device_follow_the_papers_formula() -> None:
    kept = NETWORK.activation_bytes(4, 1, sequence_parallel=False, recompute="none")
    assert kept == 1024 * 4 * 1024 * (34 + 5 * 16 * 1024 / 1024)


@given(networks, st.sampled_from([1, 2, 8]), st.booleans())
def test_what_is_recomputed_is_not_kept(network: Transformer, tensor: int, sequence_parallel: bool) -> None:
    none, selective, full = (
        network.activation_bytes(1, tensor, sequence_parallel=sequence_parallel, recompute=each) for each in RECOMPUTE
    )
    assert none > selective > full > 0


@given(networks, st.sampled_from([1, 2, 8, 16]), st.sampled_from([8, 32]))
def test_plans_use_all_devices_and_the_whole_batch(network: Transformer, devices: int, batch: int) -> None:
    for plan in plans(network, devices=devices, devices_per_node=8, batch=batch):
        assert plan.devices == devices
        assert plan.micro_batches * plan.micro_batch * plan.data == batch
        assert plan.tensor <= 8 and network.heads % plan.tensor == 0 and network.layers % plan.pipeline == 0


@given(networks)
def test_each_stage_of_sharding_needs_less_memory(network: Transformer) -> None:
    totals = [memory_of(network, Plan(8, 1, 1, 8, 1, sharding=stage)).total for stage in range(4)]
    assert totals == sorted(totals, reverse=True) and len(set(totals)) == 4


def test_a_parameter_takes_eighteen_bytes_without_sharding() -> None:
    memory = memory_of(NETWORK, Plan(1, 1, 1, 8, 1))
    assert memory.parameters + memory.gradients + memory.optimizer == 18 * NETWORK.parameters


def test_names_are_read() -> None:
    found = parse_transformer("gpt:layers=24,hidden=1024,heads=16,sequence=512,vocabulary=1000")
    assert found == Transformer(24, 1024, 16, 512, 1000)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("gpt:layers=24", "hidden, heads missing"),
        ("gpt:layers=24,hidden=1000,heads=16", "16 heads do not divide"),
        ("gpt:layers=two,hidden=1024,heads=16", "'layers=two' is not NAME=NUMBER"),
        ("gpt:depth=2", "'depth=2' is not NAME=NUMBER"),
        ("gpt:layers=0,hidden=1024,heads=16", "'layers=0'"),
    ],
)
def test_bad_names_are_refused(text: str, problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        parse_transformer(text)
