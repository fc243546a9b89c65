"""Attention nodes, with all constant masks combined into one bias.

Meaning: ONNX operator specification, Attention (operator sets 23 to 25). Imports NumPy,
`d5suite.errors` and `d5suite.network`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from d5suite.errors import NetworkError
from d5suite.network import Node
from d5suite.network.nodes.context import NodeContext

NO_MODE, SCORES, CAPPED, BIASED, WEIGHTS = -1, 0, 1, 2, 3
"""Content of output 3: nothing, or a stage by its ``qk_matmul_output_mode``."""


@dataclass(frozen=True)
class Attention:
    """An Attention node.

    ``softmax(softcap(scale Q Kᵀ) + bias + mask) V``, per head.

    Attributes
    ----------
    heads, kv_heads : int
        Heads of the query, and of key and value; a key head serves `groups` consecutive query
        heads.
    split_heads : bool
        Whether Q, K, V and Y are (batch, steps, heads x size) instead of (batch, heads, steps,
        size).
    scale : float
        Factor of the scores; 1/√size by default.
    softcap : float
        If positive, scores s become softcap tanh(s / softcap).
    causal : bool
        Whether the only mask is that query i sees keys 0 to i. Kernels have a flag for this.
    bias : numpy.ndarray or None
        All masks except the input mask, causality included: float64, 0 or -inf, broadcastable to
        (batch, heads, queries, keys). None if nothing is masked.
    mask : str
        ``""`` without an input mask, ``bool`` (True where a query attends) or ``float`` (added).
    mask_padding : int
        Number of keys beyond the end of the input mask; these are masked.
    past : bool
        Whether inputs 4 and 5 hold past keys and values, which precede the new ones.
    shows : int
        The intermediate value in output 3, or `NO_MODE`.
    wanted : tuple of bool
        Whether Y, the present key, the present value and the intermediate value are wanted, for
        each output that the node has.
    """

    heads: int
    kv_heads: int
    split_heads: bool
    scale: float
    softcap: float
    causal: bool
    bias: np.ndarray | None
    mask: str
    mask_padding: int
    past: bool
    shows: int
    wanted: tuple[bool, ...]

    @property
    def groups(self) -> int:
        """Query heads per key head."""
        return self.heads // self.kv_heads

    @property
    def plain(self) -> bool:
        """Whether it is just ``softmax(scale Q Kᵀ + bias + mask) V``, which kernels compute.

        Kernels disagree about queries without any key; see `may_be_blind`.
        """
        return not (self.softcap or self.past or any(self.wanted[1:])) and not self.may_be_blind

    @property
    def may_be_blind(self) -> bool:
        """Whether a query may attend to no key; ONNX's softmax is then 0."""
        blind = self.bias is not None and bool(np.isneginf(self.bias.max(-1)).any())
        return blind or bool(self.mask)


def read_attention(node: Node, context: NodeContext) -> Attention:
    """Read an Attention node.

    Raises
    ------
    NetworkError
        If query heads are not a multiple of key heads.
    """
    shapes = context.shapes
    names = [*node.inputs, *[""] * 7]
    a = node.attributes
    q, k = ([n or 0 for n in shapes[name]] for name in names[:2])
    split = len(q) == 3
    heads = a["q_num_heads"] if split else q[1]
    kv_heads = a["kv_num_heads"] if split else k[1]
    queries, keys = (q[1], k[1]) if split else (q[2], k[2])
    size = q[2] // heads if split else q[3]
    if not heads or not kv_heads or heads % kv_heads:
        raise NetworkError(f"{heads} query heads for {kv_heads} key heads", where=node.name)
    past = (shapes[names[4]][2] or 0) if names[4] else 0
    keys += past
    lengths = context.constants.get(names[6]) if names[6] else None
    offset = np.array(past) if lengths is None else lengths.reshape(-1, 1, 1, 1) - queries
    position, key = np.arange(queries)[:, None] + offset, np.arange(keys)
    left, right = a.get("left_window_size", -1), a.get("right_window_size", -1)
    allowed = np.ones((1, 1), bool)
    if a["is_causal"]:
        allowed = allowed & (key <= position)
    if left >= 0:
        allowed = allowed & (key >= position - left)
    if right >= 0:
        allowed = allowed & (key <= position + right)
    if lengths is not None:
        allowed = allowed & (key < lengths.reshape(-1, 1, 1, 1))
    mask_shape = shapes.get(names[3]) if names[3] else None
    mask = "" if mask_shape is None else "bool" if context.dtypes[names[3]] == np.bool_ else "float"
    wanted = context.wanted(node)
    return Attention(
        heads=heads,
        kv_heads=kv_heads,
        split_heads=split,
        scale=a.get("scale") or 1 / math.sqrt(size),
        softcap=a["softcap"],
        causal=bool(a["is_causal"]) and not past and left < 0 and right < 0 and lengths is None and not mask,
        bias=None if allowed.all() else np.where(allowed, 0.0, -np.inf),
        mask=mask,
        mask_padding=keys - (mask_shape[-1] or 0) if mask_shape is not None else 0,
        past=bool(names[4]),
        shows=a["qk_matmul_output_mode"] if any(wanted[3:]) else NO_MODE,
        wanted=wanted,
    )
