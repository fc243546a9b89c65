"""Counts of a GPT-like transformer: parameters, operations, activations.

Activations follow Korthikanti et al., "Reducing Activation Recomputation in Large Transformer
Models" (arXiv:2205.05198): in 16 bit, with Dropout, s tokens, b sequences, width h, a heads, t
tensor-parallel devices.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from d5suite.errors import ConfigurationError

PREFIX = "gpt:"
"""How a transformer is named on the command line."""


@dataclass(frozen=True)
class Transformer:
    """A GPT-like network.

    Attributes
    ----------
    layers, hidden, heads, sequence, vocabulary : int
        Layers; width; attention heads; tokens of a sequence; words.
    """

    layers: int
    hidden: int
    heads: int
    sequence: int = 2048
    vocabulary: int = 51200

    @property
    def layer_parameters(self) -> int:
        """Parameters of a layer: four h × h matrices of attention and two h × 4h ones; 12 h².

        Biases and normalizations, 13 h, are left out, as in the paper.
        """
        return 12 * self.hidden**2

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the word embedding, which the output layer shares."""
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """All parameters that are counted."""
        return self.layers * self.layer_parameters + self.embedding_parameters

    def matrix_flops(self, sequences: float) -> float:
        """Operations of a layer's products with weights, forward."""
        return 2 * self.layer_parameters * self.sequence * sequences

    def attention_flops(self, sequences: float) -> float:
        """Operations of a layer's two products of attention, forward."""
        return 4 * self.sequence**2 * self.hidden * sequences

    def head_flops(self, sequences: float) -> float:
        """Operations of the output layer, forward."""
        return 2 * self.embedding_parameters * self.sequence * sequences

    def layer_values(self, sequences: float) -> float:
        """Return s·b·h, the unit of the paper's formulas."""
        return self.sequence * sequences * self.hidden

    def activation_bytes(self, sequences: float, tensor: int, *, sequence_parallel: bool, recompute: str) -> float:
        """Return the bytes that a layer keeps for its backward pass, on each device.

        Parameters
        ----------
        sequences : float
            Sequences of a micro-batch.
        tensor : int
            Tensor-parallel devices.
        sequence_parallel : bool
            Whether what is outside of the tensor-parallel part is divided, too.
        recompute : {"none", "selective", "full"}
            What the backward pass computes again: nothing, attention's scores, or the whole layer.
        """
        unit = self.layer_values(sequences)
        outside = 1 / tensor if sequence_parallel else 1.0
        if recompute == "full":
            return unit * 2 * outside
        scores = 0.0 if recompute == "selective" else 5 * self.heads * self.sequence / self.hidden / tensor
        return unit * (10 * outside + 24 / tensor + scores)


def parse_transformer(text: str) -> Transformer:
    """Read ``gpt:layers=24,hidden=1024,heads=16[,sequence=2048][,vocabulary=51200]``.

    Raises
    ------
    ConfigurationError
        If a part is missing, unknown or not a positive whole number, or the heads do not divide
        the width.
    """
    known = [each.name for each in dataclasses.fields(Transformer)]
    values: dict[str, int] = {}
    for part in text.removeprefix(PREFIX).split(","):
        name, _, number = part.partition("=")
        if name not in known or not number.isascii() or not number.isdigit() or not 0 < int(number) < 10**9:
            raise ConfigurationError(
                f"{part!r} is not NAME=NUMBER", where=text, hint=f"Known names: {', '.join(known)}."
            )
        values[name] = int(number)
    missing = [name for name in ("layers", "hidden", "heads") if name not in values]
    if missing:
        raise ConfigurationError(f"{', '.join(missing)} missing", where=text)
    found = Transformer(**values)
    if found.hidden % found.heads:
        raise ConfigurationError(f"{found.heads} heads do not divide a width of {found.hidden}", where=text)
    return found
