"""Seconds of a training step of a plan, part by part.

A layer computes, moves its activations and reduces them among tensor-parallel devices; it takes at
least the time that launching its kernels takes. Micro-batches go through a pipeline of stages,
whose bubble is (p − 1) / v passes (Narayanan et al., arXiv:2104.04473). A ring's all-reduce moves
2 (n − 1) / n of the data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from d5suite.models.machine import Machine
from d5suite.models.memory import GRADIENT, OPTIMIZER, WEIGHT
from d5suite.models.plan import Plan
from d5suite.models.transformer import Transformer

HALF = 2
"""Bytes of a value that is sent."""

DIRECTIONS = 3
"""Work of a forward and a backward pass, in forward passes."""


@dataclass(frozen=True)
class StepTime:
    """Where the seconds of a step go.

    Attributes
    ----------
    computing : float
        Matrix products.
    memory : float
        Moving activations.
    launching : float
        What launching kernels adds, because a layer is too short.
    tensor : float
        Reducing activations among tensor-parallel devices.
    bubble : float
        Waiting for the pipeline to fill and drain, and messages between stages.
    gradients : float
        Reducing gradients among replicas, as far as computing does not hide it.
    update : float
        The optimizer's update.
    fixed : float
        What depends on nothing.
    """

    computing: float
    memory: float
    launching: float
    tensor: float
    bubble: float
    gradients: float
    update: float
    fixed: float

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(getattr(self, each.name) for each in fields(self))

    @property
    def bound(self) -> str:
        """The largest part."""
        return max((each.name for each in fields(self)), key=lambda name: float(getattr(self, name)))


def step_time(network: Transformer, machine: Machine, plan: Plan) -> StepTime:
    """Return the time of a step.

    Parameters
    ----------
    network : Transformer
    machine : Machine
    plan : Plan
        Its devices fill nodes in the order tensor, data, pipeline.
    """
    known, tensor, count = machine.calibration, plan.tensor, plan.micro_batches
    sequences = plan.micro_batch
    again = 1 if plan.recompute == "full" else 0
    scores_again = 0 if plan.recompute == "none" else 1
    size = network.layer_values(sequences) * network.hidden / tensor
    share = known.gemm_peak_share / (1 + (known.gemm_half_size / size) ** known.gemm_exponent)
    matrix = (DIRECTIONS + again) * network.matrix_flops(sequences)
    matrix += (DIRECTIONS + scores_again) * network.attention_flops(sequences)
    computing = matrix / tensor / (machine.peak_flops * share)
    memory = known.elementwise_passes / machine.memory_bandwidth * _moved(network, plan, again, scores_again)
    reduced = 0.0
    if tensor > 1:
        message = HALF * network.layer_values(sequences)
        one = known.reduction_latency_s * math.log2(tensor) + _ring(message, tensor, machine.link_bandwidth)
        reduced = (4 + 2 * again) * one
    launching = max(0.0, known.layer_floor_s * (DIRECTIONS + again) / DIRECTIONS - computing - memory - reduced)
    layers = network.layers / plan.pipeline
    stage = layers * (computing + memory + reduced + launching)
    head_computing = DIRECTIONS * network.head_flops(sequences) / tensor / (machine.peak_flops * known.gemm_peak_share)
    scores = 4 * network.sequence * sequences * network.vocabulary / tensor
    head_memory = DIRECTIONS * known.head_passes * scores / machine.memory_bandwidth
    return StepTime(
        computing=count * (layers * computing + head_computing),
        memory=count * (layers * memory + head_memory),
        launching=count * layers * launching,
        tensor=count * layers * reduced,
        bubble=(plan.pipeline - 1) / plan.chunks * stage + _messages(network, machine, plan),
        gradients=_gradients(network, machine, plan),
        update=_held(network, plan) * _update_bytes(plan) / machine.memory_bandwidth,
        fixed=known.fixed_s,
    )


def bytes_between_devices(network: Transformer, plan: Plan) -> float:
    """Return the bytes that a device sends in a step."""
    message = HALF * network.layer_values(plan.micro_batch)
    again = 1 if plan.recompute == "full" else 0
    share = 2 * (plan.tensor - 1) / plan.tensor
    inside = (4 + 2 * again) * share * message * network.layers / plan.pipeline * plan.micro_batches
    between = 2 * message / plan.tensor * plan.micro_batches if plan.pipeline > 1 else 0.0
    return inside + between + _gradient_bytes(network, plan)


def _moved(network: Transformer, plan: Plan, again: int, scores_again: int) -> float:
    """Return the bytes of activations that a layer moves in a micro-batch."""
    unit = network.layer_values(plan.micro_batch)
    outside = 10 / plan.tensor if plan.sequence_parallel else 10
    scores = 5 * network.heads * network.sequence / network.hidden / plan.tensor
    return unit * ((DIRECTIONS + again) * (outside + 24 / plan.tensor) + (DIRECTIONS + scores_again) * scores)


def _ring(message: float, devices: int, bandwidth: float) -> float:
    return 2 * (devices - 1) / devices * message / bandwidth


def _held(network: Transformer, plan: Plan) -> float:
    """Return the parameters of a device of the first stage."""
    return (network.layers / plan.pipeline * network.layer_parameters + network.embedding_parameters) / plan.tensor


def _update_bytes(plan: Plan) -> float:
    """Return the bytes per parameter that an update moves."""
    return (WEIGHT + GRADIENT + OPTIMIZER) / (plan.data if plan.sharding else 1)


def _gradient_bytes(network: Transformer, plan: Plan) -> float:
    """Return the bytes a replica sends: twice its gradients, three times if weights are sharded."""
    if plan.data == 1:
        return 0.0
    times = 1.5 if plan.sharding == 3 else 1.0
    return times * 2 * (plan.data - 1) / plan.data * HALF * _held(network, plan)


def _gradients(network: Transformer, machine: Machine, plan: Plan) -> float:
    inside = plan.tensor * plan.data <= machine.devices_per_node
    bandwidth = machine.link_bandwidth if inside else machine.network_bandwidth
    return machine.calibration.exposed_share * _gradient_bytes(network, plan) / bandwidth


def _messages(network: Transformer, machine: Machine, plan: Plan) -> float:
    """Return the seconds of the messages between stages that a filling pipeline does not hide."""
    if plan.pipeline == 1:
        return 0.0
    inside = plan.devices <= machine.devices_per_node
    bandwidth = machine.link_bandwidth if inside else machine.network_bandwidth
    message = HALF * network.layer_values(plan.micro_batch) / plan.tensor
    return 2 * (plan.pipeline - 1) * ((0.0 if inside else machine.network_latency_s) + message / bandwidth)
