"""`Network`: a neural network in neutral form, read from a file or rewritten from another one.

May import ONNX, NumPy and, from d5suite, `errors` and `network`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx

from d5suite.errors import NetworkError
from d5suite.network import rewrites
from d5suite.network.given_inputs import Given, fix_inputs
from d5suite.network.graph import Graph
from d5suite.network.onnx_file import read
from d5suite.network.validity import require_sound


class Network(Graph):
    """A neural network in neutral form; `Graph` has its parameters and attributes.

    Attributes
    ----------
    fixed : tuple of str
        Inputs of the file that `load` turned into constants.
    """

    fixed: tuple[str, ...] = ()

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        shapes: Mapping[str, Sequence[int]] | None = None,
        given: Mapping[str, Given] | None = None,
        **names: str | None,
    ) -> Network:
        """Read an ``.onnx`` file.

        Parameters
        ----------
        path : str or Path
            The file. External data must lie in its folder or below.
        shapes : mapping, optional
            As in `Network`.
        given : mapping of str to Given, optional
            Values by input; inputs of one element become constants: see
            `d5suite.network.given_inputs.fix_inputs`.
        **names
            ``name``, ``input``, ``output``, ``label`` and ``loss`` as in `Network`.

        Raises
        ------
        NetworkError
            If the file is missing, corrupt, older than opset 9 or newer than the installed onnx,
            invalid, or points outside its folder; or a weight is not finite, or a node too large.
        """
        path = Path(path)
        model = read(path)
        names.setdefault("name", path.stem)
        fixed = fix_inputs(model, shapes or {}, given) if given else {}
        shapes = {name: shape for name, shape in (shapes or {}).items() if name not in fixed}
        try:
            network = cls(model, shapes=shapes, **names)
            require_sound(network)
            network.fixed = tuple(fixed)
        except NetworkError as error:
            where = str(path) if error.where in (None, names["name"]) else f"{path}, {error.where}"
            raise type(error)(error.what, where=where, hint=error.hint) from error
        return network

    def at_generic_point(self) -> Network:
        """Return the network with noise on all weights, for validation.

        Initial weights hide errors: biases are zero, running variances one, and the last scale of a
        residual branch may be zero, which hides the whole branch. Every parameter and running mean
        gets normal noise of a tenth of its root mean square (of 1 if that is zero), and every
        running variance is multiplied by a factor near 1.
        """
        return self.with_weights(rewrites.generic_weights(self))

    def with_weights(self, values: dict[str, np.ndarray]) -> Network:
        """Return the network with some initializers replaced.

        Parameters
        ----------
        values : dict of str to numpy.ndarray
            By initializer name, in its shape and dtype.
        """
        other = copy.copy(self)
        other.initializers = {**self.initializers, **values}
        other.model = rewrites.with_initializers(self.model, other.initializers)
        return other

    def with_classification_loss(self, axis: int | None = None) -> Network:
        """Return the network with a label input and mean softmax cross-entropy, for training.

        The loss takes the logits: the input of the final Softmax, if there is one. A network with a
        loss is returned unchanged.

        Parameters
        ----------
        axis : int, optional
            The axis of the classes, 1 or the last, of an output that scores every token or pixel.
            The label is then int64 of the output's shape without that axis, such as (N, tokens).
        """
        if self.loss is not None:
            return self
        return self._with_last(rewrites.with_classification_loss(self, axis))

    def with_squared_error(self, outputs: Sequence[str]) -> Network:
        """Return the network with a label input and the mean squared error of outputs.

        With several outputs, each is flattened to (N, size), and they are joined: the loss is the
        mean over all their elements. It is computed in float32 at least. A network with a loss is
        returned unchanged.

        Parameters
        ----------
        outputs : sequence of str
            Floating-point outputs with the batch as their first axis. The label, the target, is
            float32 of the output's shape; (N, total size) for several outputs. If the inputs have
            no common batch, all outputs form one row, (1, total size).
        """
        if self.loss is not None:
            return self
        return self._with_last(rewrites.with_squared_error(self, outputs))

    def with_multilabel_loss(self) -> Network:
        """Return the network with a loss for several labels per image, verified or unknown.

        The label input becomes int64 (N, classes): 1 for a class verified as present, 0 for one
        verified as absent, -1 for an unknown one. The loss is sigmoid cross-entropy, averaged over
        all verified labels of the batch. It replaces an earlier loss.

        Raises
        ------
        NetworkError
            If the output does not have shape (N, classes).
        """
        return self._with_last(rewrites.with_multilabel_loss(self))

    def with_label_smoothing(self, smoothing: float) -> Network:
        """Return the network with smoothed labels in every softmax cross-entropy of the loss.

        With smoothing e and K classes the label's probability is ``1 - e + e / K`` and that of
        every other class ``e / K`` (Szegedy et al., "Rethinking the inception architecture", CVPR
        2016, section 7), so the loss is ``(1 - e) H(label) + e H(uniform)``.

        Parameters
        ----------
        smoothing : float
            0 <= e < 1; 0 changes nothing.

        Raises
        ------
        NetworkError
            If the network has no mean softmax cross-entropy of one label per image.
        """
        if not 0 <= smoothing < 1:
            raise NetworkError(f"label smoothing must lie in [0, 1), not {smoothing}", where=self.name)
        return self._with(rewrites.with_label_smoothing(self, smoothing), *self.require_loss()) if smoothing else self

    def without_dropout(self) -> Network:
        """Return the network without Dropout, for validation: frameworks drop different values."""
        if all(node.op_type != "Dropout" for node in self.nodes):
            return self
        return self._with(rewrites.without_dropout(self), self.label, self.loss)

    def _with_last(self, model: onnx.ModelProto) -> Network:
        """Return a network whose label and loss are the model's last input and output."""
        return self._with(model, model.graph.input[-1].name, model.graph.output[-1].name)

    def _with(self, model: onnx.ModelProto, label: str | None, loss: str | None) -> Network:
        return Network(model, name=self.name, input=self.input, output=self.output, label=label, loss=loss)
