"""ONNX on JAX: reductions, softmax and its loss.

Imports JAX, Optax, `d5suite.levels`, `d5suite.network` and `context`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from d5suite.backends.jax.operators.context import (
    Call,
    Context,
    Factory,
    highest,
    in_float32,
    largest,
    lowest,
    smallest,
)
from d5suite.levels.layouts import same
from d5suite.levels.operator import after
from d5suite.network import Node
from d5suite.network.nodes.layouts import channels_last
from d5suite.network.nodes.loss import read_softmax_cross_entropy_loss
from d5suite.network.nodes.reduction import read_reduce
from d5suite.network.nodes.shape import read_axis


def softmax(function: Call) -> Factory:
    """Return a factory for Softmax or LogSoftmax."""

    def factory(node: Node, context: Context) -> Call:
        axis = context.keep_layout(node).index(read_axis(node, context))
        # XLA may recompute fused values with different rounding: logits around 1e10 (ONNX's
        # SqueezeNet) can then exceed, by hundreds, the maximum that softmax subtracts. So the
        # maximum is subtracted twice.
        return lambda x: function(x - lax.stop_gradient(x.max(axis, keepdims=True)), axis=axis)

    return factory


def reduce(function: Call, empty: Call | None = None) -> Factory:
    """Return a factory for a reduction.

    Parameters
    ----------
    function : callable
    empty : callable, optional
        Returns a tensor's value of no elements, if the function has none.
    """

    def factory(node: Node, context: Context) -> Call:
        plan, layout = read_reduce(node, context), context.keep_layout(node)
        if plan is None:
            return same
        keep = plan.keep
        context.layouts[node.outputs[0]] = plan.layout(layout)
        axes = tuple(layout.index(axis) for axis in plan.axes)
        if empty is not None and plan.empty:
            return lambda x, *_: function(x, axes, keepdims=keep, initial=empty(x))
        return lambda x, *_: function(x, axes, keepdims=keep)

    return factory


def extreme(function: Call, native: Call, empty: Call) -> Factory:
    """Return a factory for a maximum or minimum.

    It uses ``native``, JAX's own, at level 0, where XLA recomputes no input, and for reductions of
    no elements; otherwise it uses ``function``.
    """
    factories = {True: reduce(native, empty), False: reduce(function)}

    def factory(node: Node, context: Context) -> Call:
        plan = read_reduce(node, context)
        return factories[context.single or (plan is not None and bool(plan.empty))](node, context)

    return factory


_sum_square = after(jnp.sum, jnp.square)


def _norm(x: Any, axes: Sequence[int], *, keepdims: bool) -> Any:
    return jnp.sqrt(_sum_square(x, axes, keepdims=keepdims))


def softmax_cross_entropy_loss(node: Node, context: Context) -> Call:
    plan = read_softmax_cross_entropy_loss(node, context)
    ignored, logged = plan.ignored, plan.logged
    rank = context.rank(node.inputs[0])
    classes_last = context.convert(node.inputs[0], channels_last(rank))

    def call(scores: Any, labels: Any, weight: Any = None) -> Any:
        kept = None if ignored is None else labels != ignored
        used = labels if kept is None else jnp.where(kept, labels, 0)
        losses = optax.softmax_cross_entropy_with_integer_labels(in_float32(classes_last(scores)), used)
        weights = None if weight is None else weight[used]
        kept = None if kept is None else kept.astype(losses.dtype)
        return plan.reduce(losses, weights, kept, jnp.sum, jnp.mean)

    if not context.single:
        return call
    if not logged:
        return lambda scores, *rest: call(scores, *rest).astype(scores.dtype)
    context.layouts[node.outputs[1]] = channels_last(rank)

    def with_logarithms(scores: Any, *rest: Any) -> Any:
        logarithms = jax.nn.log_softmax(in_float32(classes_last(scores)))
        return call(scores, *rest).astype(scores.dtype), logarithms.astype(scores.dtype)

    return with_logarithms


OPERATORS: dict[str, Factory] = {
    "LogSoftmax": softmax(jax.nn.log_softmax),
    "ReduceL1": reduce(after(jnp.sum, jnp.abs)),
    "ReduceL2": reduce(_norm),
    "ReduceLogSumExp": reduce(jax.nn.logsumexp),
    "ReduceMax": extreme(largest, jnp.max, lowest),
    "ReduceMean": reduce(jnp.mean),
    "ReduceMin": extreme(smallest, jnp.min, highest),
    "ReduceProd": reduce(jnp.prod),
    "ReduceSum": reduce(jnp.sum),
    "ReduceSumSquare": reduce(_sum_square),
    "Softmax": softmax(jax.nn.softmax),
}
