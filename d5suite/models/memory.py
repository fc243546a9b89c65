"""Memory of a device in a plan, for mixed precision with Adam.

A parameter takes 18 bytes: 2 in half precision, its gradient 4, and 12 for the float32 copy and
Adam's two moments, as in Korthikanti et al. (arXiv:2205.05198), figure 1. Sharding divides what
ZeRO's stages divide (Rajbhandari et al., arXiv:1910.02054).
"""

from __future__ import annotations

from dataclasses import dataclass

from d5suite.models.plan import Plan
from d5suite.models.transformer import Transformer

WEIGHT, GRADIENT, OPTIMIZER = 2, 4, 12
"""Bytes per parameter."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on the device that needs most: one of the first pipeline stage.

    Attributes
    ----------
    parameters, gradients, optimizer, activations : float
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float

    @property
    def total(self) -> float:
        """Sum of all parts; the framework's base and its allocator's waste are not in it."""
        return self.parameters + self.gradients + self.optimizer + self.activations


def memory_of(network: Transformer, plan: Plan, *, embedding: bool = True) -> MemoryEstimate:
    """Return the memory that a plan needs on a device of the first stage.

    Parameters
    ----------
    network : Transformer
    plan : Plan
    embedding : bool
        Whether to count the embedding, which published tables leave out.

    Notes
    -----
    One forward, one backward in turn (1F1B) keeps as many micro-batches as there are stages, of
    which each has its part of the layers. Interleaving keeps 1 + (p − 1) / (p·v) times as much. A
    layer that is recomputed as a whole exists once more while its backward pass runs.
    """
    held = network.layers / plan.pipeline * network.layer_parameters
    held = (held + embedding * network.embedding_parameters) / plan.tensor
    divided = [plan.data if plan.sharding >= stage else 1 for stage in (3, 2, 1)]
    kept = network.activation_bytes(
        plan.micro_batch, plan.tensor, sequence_parallel=plan.sequence_parallel, recompute=plan.recompute
    )
    passes = min(plan.pipeline, plan.micro_batches)
    interleaved = 1 + (passes - 1) / (passes * plan.chunks) if plan.chunks > 1 else 1.0
    activations = kept * network.layers / plan.pipeline * passes * interleaved
    if plan.recompute == "full":
        activations += network.activation_bytes(
            plan.micro_batch, plan.tensor, sequence_parallel=plan.sequence_parallel, recompute="none"
        )
    return MemoryEstimate(
        WEIGHT * held / divided[0], GRADIENT * held / divided[1], OPTIMIZER * held / divided[2], activations
    )
