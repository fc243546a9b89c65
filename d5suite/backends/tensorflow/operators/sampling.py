"""ONNX in TensorFlow: images sampled at the points of a grid.

Imports TensorFlow, `d5suite.network` and `context`.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from d5suite.backends.tensorflow.operators.context import Call, Context, in_float32
from d5suite.network import Node
from d5suite.network.nodes.layouts import channels_last
from d5suite.network.nodes.sampling import SamplingFunctions, read_grid_sample, taps

_FUNCTIONS = SamplingFunctions(tf.floor, tf.round, tf.abs, tf.clip_by_value, lambda x: tf.cast(x, tf.int32))


def grid_sample(node: Node, context: Context) -> Call:
    """Return a sum over the cells near every point; TensorFlow has no kernel."""
    plan, (image, grid) = read_grid_sample(node, context), node.inputs
    layout = context.layouts[node.outputs[0]] = channels_last(context.rank(image))
    to_last, to_onnx = context.convert(image, layout), context.to_onnx(grid)

    def run(x: Any, grid: Any) -> Any:
        rows = tf.reshape(in_float32(to_last(x)), [x.shape[0], -1, plan.channels])
        points = tf.reshape(in_float32(to_onnx(grid)), [x.shape[0], -1, len(plan.sizes)])
        y = tf.add_n([
            tf.gather(rows, tap.cell, batch_dims=1) * tap.weight[..., tf.newaxis]
            for tap in taps(plan, _FUNCTIONS, tf.unstack(points, axis=-1))
        ])  # fmt: skip
        return tf.cast(tf.reshape(y, [x.shape[0], *plan.outputs, plan.channels]), x.dtype)

    return run
