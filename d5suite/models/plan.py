"""How a training step is divided among devices, and all ways to divide one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from d5suite.models.transformer import Transformer

RECOMPUTE = ("none", "selective", "full")
"""What the backward pass computes again, cheapest first."""

STAGES = (0, 1, 2, 3)
"""Stages of ZeRO: optimizer state, then gradients, then parameters are divided among replicas."""


@dataclass(frozen=True)
class Plan:
    """A division of a step.

    Attributes
    ----------
    data, tensor, pipeline : int
        Replicas; devices of a layer; stages. Their product is the number of devices.
    batch, micro_batch : int
        Sequences of a step, and of one pass through a stage.
    recompute : {"none", "selective", "full"}
    sequence_parallel : bool
        Whether normalizations and Dropout are divided along the sequence.
    sharding : int
        Stage of ZeRO, 0 to 3.
    chunks : int
        Interleaved parts of a pipeline stage.
    """

    data: int
    tensor: int
    pipeline: int
    batch: int
    micro_batch: int
    recompute: str = "none"
    sequence_parallel: bool = False
    sharding: int = 0
    chunks: int = 1

    @property
    def devices(self) -> int:
        """Devices of the plan."""
        return self.data * self.tensor * self.pipeline

    @property
    def micro_batches(self) -> int:
        """Passes through the pipeline of a step."""
        return self.batch // (self.data * self.micro_batch)

    def __str__(self) -> str:
        parts = [f"data {self.data}", f"tensor {self.tensor}", f"pipeline {self.pipeline}"]
        parts += [f"micro-batch {self.micro_batch}"]
        parts += [f"recompute {self.recompute}"] * (self.recompute != "none")
        parts += [f"ZeRO {self.sharding}"] * (self.sharding > 0)
        return ", ".join(parts)


def divisors(number: int) -> list[int]:
    """Return all divisors, ascending."""
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def plans(network: Transformer, *, devices: int, devices_per_node: int, batch: int) -> Iterator[Plan]:
    """Yield all plans for a number of devices under which heads, layers and batch divide evenly.

    Tensor parallelism stays inside a node, and comes with sequence parallelism. Plans with a
    pipeline do not shard gradients: every micro-batch adds to the gradients, so ZeRO 2 and 3 would
    communicate them once per micro-batch.
    """
    for tensor in divisors(devices):
        if tensor > devices_per_node or devices_per_node % tensor or network.heads % tensor:
            continue
        for pipeline in divisors(devices // tensor):
            data = devices // tensor // pipeline
            if network.layers % pipeline or batch % data:
                continue
            for micro in divisors(batch // data):
                for recompute in RECOMPUTE:
                    for stage in STAGES if data > 1 else STAGES[:1]:
                        if pipeline > 1 and stage > 1:
                            continue
                        yield Plan(data, tensor, pipeline, batch, micro, recompute, tensor > 1, stage)
