"""Vision transformer ViT-B/16.

Dosovitskiy et al., "An image is worth 16x16 words" (ICLR 2021), section 3.1 and table 1, without
the representation layer, as torchvision builds it. Names are torchvision's; its weights of fully
connected layers along tokens are stored transposed, (input, output). Initial weights are
torchvision's too, which are those of the paper's code: Xavier-uniform matrices, a convolution of
variance 1 / inputs, positions of deviation 0.02, and zeros in class token and classifier. Attention
is written out as two matrix products and a softmax. Dropout is left out: torchvision's rate is 0.
May import `d5suite.network` and `d5suite.errors`.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from d5suite.errors import NetworkError
from d5suite.network.builder import Builder
from d5suite.network.model import Network

_PATCH = 16

_EPSILON = 1e-6
"""Epsilon of layer normalisation, as in the paper's code and torchvision."""


def _xavier(inputs: int, outputs: int) -> float:
    return float(np.sqrt(2 / (inputs + outputs)))


def _attention(b: Builder, x: str, name: str, tokens: int, width: int, heads: int) -> str:
    size = width // heads
    joined = b.dense(x, f"{name}.in_proj", width, 3 * width, deviation=_xavier(width, 3 * width), uniform=True)
    parts = []
    for index, (each, order) in enumerate((("query", (0, 2, 1, 3)), ("key", (0, 2, 3, 1)), ("value", (0, 2, 1, 3)))):
        part = b.part(joined, f"{name}.{each}", index * width, (index + 1) * width, axis=2)
        part = b.reshape(part, f"{name}.{each}.heads", (0, tokens, heads, size))
        parts.append(b.transpose(part, f"{name}.{each}.each", order, heads))
    query, key, value = parts
    query = b.multiply(query, b.scalar("attention.scale", size**-0.5), f"{name}.query.scaled")
    weights = b.softmax(b.node("MatMul", f"{name}.scores", [query, key], heads))
    x = b.transpose(b.node("MatMul", f"{name}.mixed", [weights, value], heads), f"{name}.last", (0, 2, 1, 3), tokens)
    x = b.reshape(x, f"{name}.joined", (0, tokens, width))
    return b.dense(x, f"{name}.out_proj", width, width, deviation=(3 * width) ** -0.5, uniform=True)


def embedded(b: Builder, x: str, *, pixels: int, width: int) -> str:
    """Turn (N, width, H, W), H · W = ``pixels``, into tokens after a class token; add positions."""
    x = b.transpose(b.reshape(x, "patches", (0, width, pixels)), "tokens", (0, 2, 1), pixels)
    # The class token is added to one zero per image: an open batch has no size to repeat it by.
    zero = b.multiply(b.part(x, "first", 0, 1), b.scalar("zero", 0.0), "class_token.zero")
    token = b.add(zero, b.parameter("class_token", np.zeros((1, 1, width))), "class_token.repeated")
    x = b.concat([token, x], "encoder.tokens")
    return b.add(x, b.draw("encoder.pos_embedding", (1, pixels + 1, width), 0.02), "encoder.input")


def layer(b: Builder, x: str, name: str, *, tokens: int, width: int, heads: int, hidden: int) -> str:
    """Append a layer of the encoder to tokens (N, tokens, width)."""
    y = b.layer_norm(x, f"{name}.ln_1", width, epsilon=_EPSILON)
    x = b.add(_attention(b, y, f"{name}.self_attention", tokens, width, heads), x, f"{name}.attended")
    y = b.layer_norm(x, f"{name}.ln_2", width, epsilon=_EPSILON)
    y = b.dense(y, f"{name}.mlp.0", width, hidden, deviation=_xavier(width, hidden), uniform=True, bias=1e-6)
    y = b.dense(b.gelu(y), f"{name}.mlp.3", hidden, width, deviation=_xavier(width, hidden), uniform=True, bias=1e-6)
    return b.add(x, y, name)


def representation(b: Builder, x: str, width: int) -> str:
    """Return the class token, normalised: (N, width)."""
    x = b.part(b.layer_norm(x, "encoder.ln", width, epsilon=_EPSILON), "class", 0, 1)
    return b.reshape(x, "representation", (0, width))


def transformer(
    name: str, width: int, depth: int, heads: int, hidden: int, *, classes: int, image_size: int, seed: int
) -> Network:
    """Return a vision transformer.

    Parameters
    ----------
    name : str
        The network's name.
    width, depth, heads, hidden : int
        Features of a token, layers, attention heads, and features inside a layer's perceptron.
    classes, image_size, seed : int
        See `d5suite.network.zoo.build`.

    Raises
    ------
    NetworkError
        If the image size is not a multiple of the patch size.
    """
    if image_size < _PATCH or image_size % _PATCH:
        what = f"the images must have a multiple of {_PATCH} pixels a side, not {image_size}"
        raise NetworkError(what, where=name)
    b = Builder(name, seed=seed, image_size=image_size)
    pixels = (image_size // _PATCH) ** 2
    deviation = (3 * _PATCH**2) ** -0.5
    x = b.conv(b.image, "conv_proj", width, _PATCH, stride=_PATCH, padding=0, bias=True, deviation=deviation)
    x = embedded(b, x, pixels=pixels, width=width)
    for index in range(depth):
        x = layer(
            b, x, f"encoder.layers.encoder_layer_{index}", tokens=pixels + 1, width=width, heads=heads, hidden=hidden
        )
    return b.classifier(b.linear(representation(b, x, width), "heads.head", classes, deviation=0.0))


NETWORKS = {"vit_b_16": partial(transformer, "vit_b_16", 768, 12, 12, 3072)}
