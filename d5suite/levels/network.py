"""Level 1: a network as native code of a framework.

Arrays cross this interface as NumPy arrays in the neutral form (images NCHW, convolution weights OIHW, Gemm weights as
the ONNX graph has them). Inside, an adapter keeps whatever layout, fusion and compilation its framework does best;
`feed`, `fetch`, `parameters` and `load_parameters` convert, and are never timed.

Precision, the same for every backend:

``fp32``
    everything in float32. Reduced-precision shortcuts (TF32) are off.
``fp64``
    everything in float64; for validation.
``bf16``
    parameters, their gradients, running statistics and the optimizer are float32. Weights are rounded to bfloat16
    where they are used and activations are bfloat16 from the input on; BatchNormalization's statistics and the loss are
    computed in float32. `fetch` returns float32.
``fp16``
    as ``bf16``, with float16 in place of bfloat16. Its smallest number is 6e-8, so that small gradients would vanish:
    the loss is multiplied by a scale before it is differentiated and the gradients, in float32 again, are divided by it
    (Micikevicius et al., "Mixed precision training", ICLR 2018). `Executor.forward_backward` takes `GRADIENT_SCALE`, a
    trainer a scale of its own that follows the gradients (`d5suite.levels.training.LossScaling`).

Imports NumPy, `d5suite.errors` and `d5suite.network`; no framework.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from d5suite.errors import NetworkError

if TYPE_CHECKING:
    from d5suite.network import Network

Arrays = Mapping[str, np.ndarray]
"""NumPy arrays by tensor name, in the neutral layout."""

Native = Mapping[str, Any]
"""The framework's own tensors by tensor name; opaque to everything but their adapter."""

GRADIENT_SCALE = 1024.0
"""What `Executor.forward_backward` multiplies the loss by in ``fp16``, and divides the gradients by."""


class Executor(ABC):
    """One network, built for one mode, device and precision of a framework.

    A constructor takes ``(network, *, mode, device, precision)``, all already checked against the backend's
    declaration, and starts from the network's own initializers.

    Attributes
    ----------
    network : Network
    mode, device, precision : str
    backend : str
        The name of the backend that made it, set by `Backend.executor`.
    """

    backend = ""

    def __init__(self, network: Network, *, mode: str, device: str, precision: str) -> None:
        self.network = network
        self.mode = mode
        self.device = device
        self.precision = precision

    def check_feed(self, arrays: Arrays) -> None:
        """Raise `NetworkError` for an input that is missing or unknown, or one of another shape.

        The label may be missing: inference does without.
        """
        network = self.network
        for name, array in arrays.items():
            if name not in (network.input, network.label):
                raise NetworkError(f"there is no input {name!r}", where=network.name)
            self._check_shape(name, np.shape(array), network.shapes[name])
        if network.input not in arrays:
            raise NetworkError(f"input {network.input!r} is missing", where=network.name)

    def check_parameters(self, values: Arrays) -> None:
        """Raise `NetworkError` for a parameter or statistic that the network does not have, or one of another shape."""
        network = self.network
        for name, value in values.items():
            if name not in network.parameters and name not in network.statistics:
                raise NetworkError(f"there is no parameter {name!r}", where=network.name)
            self._check_shape(name, np.shape(value), network.initializers[name].shape)

    def _check_shape(self, name: str, shape: tuple[int, ...], expected: tuple[int | None, ...]) -> None:
        if len(shape) != len(expected) or any(n not in (None, m) for n, m in zip(expected, shape, strict=True)):
            wanted = ", ".join("any" if n is None else str(n) for n in expected)
            raise NetworkError(f"tensor {name!r} has shape {shape}, not ({wanted})", where=self.network.name)

    @abstractmethod
    def feed(self, arrays: Arrays) -> Native:
        """Put input arrays on the device, in the native layout and dtype.

        Parameters
        ----------
        arrays : mapping
            The network's image input, float32 of shape (N, C, H, W), and for training its label input, int64 (N,).
        """

    @abstractmethod
    def forward(self, feed: Native) -> Native:
        """Run in inference mode: BatchNormalization uses running statistics, Dropout is the identity.

        Returns
        -------
        mapping
            The network's output. The work may still be pending on the device.
        """

    @abstractmethod
    def forward_backward(self, feed: Native) -> Native:
        """Run in training mode and differentiate the loss.

        BatchNormalization uses the batch's statistics and moves its running statistics; parameters do not change.

        Returns
        -------
        mapping
            The loss under `Network.loss` and, under each name of `Network.parameters`, the loss's gradient.
        """

    @abstractmethod
    def fetch(self, values: Native) -> dict[str, np.ndarray]:
        """Bring native tensors back to NumPy, in the neutral layout, as float64 for ``fp64`` and float32 otherwise."""

    @abstractmethod
    def parameters(self) -> dict[str, np.ndarray]:
        """Copy out all parameters and running statistics (`Network.parameters`, `Network.statistics`)."""

    @abstractmethod
    def load_parameters(self, values: Arrays) -> None:
        """Overwrite the named parameters and running statistics; names not given stay as they are."""

    def random_state(self) -> dict[str, np.ndarray]:
        """Copy out what Dropout draws its next numbers from; nothing, unless the adapter says otherwise.

        Returns
        -------
        dict
            Arrays under names of the adapter's own, of no meaning to others: only an executor of the same backend,
            mode, device and network can go on from them. Empty for a network that draws nothing.
        """
        return {}

    def load_random_state(self, values: Arrays) -> None:
        """Draw from here on what the executor would have drawn whose `random_state` this is.

        Raises
        ------
        NetworkError
            If it is none of this adapter's, or of a network that draws otherwise; see `check_random_state`.
        """
        self.check_random_state(values)

    def check_random_state(self, values: Arrays) -> None:
        """Raise `NetworkError` unless the values have the names, shapes and types of this executor's `random_state`."""
        own, given = (
            {name: (value.shape, value.dtype) for name, value in arrays.items()}
            for arrays in (self.random_state(), values)
        )
        if own != given:
            raise NetworkError(
                f"the random state holds {', '.join(given) or 'nothing'}, not {', '.join(own) or 'nothing'}, or in "
                "another form",
                where=self.network.name,
                hint="Only the same backend, mode and device can go on from it.",
            )

    @property
    def drops(self) -> bool:
        """Whether a training pass draws random numbers: whether the loss depends on a Dropout."""
        network = self.network
        return network.loss is not None and any(node.op_type == "Dropout" for node in network.nodes_for([network.loss]))

    @abstractmethod
    def synchronize(self) -> None:
        """Return only when all work issued so far on the device has finished."""
