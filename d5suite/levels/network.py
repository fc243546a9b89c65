"""Level 1: a network as native code of a framework.

NumPy arrays cross this interface in the neutral layout (images NCHW, convolution weights OIHW, Gemm
weights as in the ONNX graph). Inside, an adapter chooses the layout, fusion and compilation that
suit its framework; `feed`, `fetch`, `parameters` and `load_parameters` convert and are never timed.

Precisions, the same for every backend:

``fp32``
    everything in float32, without reduced-precision shortcuts (TF32).
``fp64``
    everything in float64; for validation.
``bf16``
    parameters, gradients, running statistics and the optimizer in float32. Weights are rounded to
    bfloat16 at each use, and activations are bfloat16 from the input on; BatchNormalization's
    statistics and the loss are computed in float32. `fetch` returns float32.
``fp16``
    as ``bf16``, with float16. Its smallest number is 6e-8, so small gradients would vanish: the
    loss is scaled before differentiation and the gradients, in float32, are divided by the scale
    (Micikevicius et al., "Mixed precision training", ICLR 2018). `Executor.forward_backward` uses
    `GRADIENT_SCALE`, a trainer a dynamic scale (`d5suite.optimizers.settings.LossScaling`).

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
"""The framework's own tensors by tensor name; only the adapter knows what they are."""

GRADIENT_SCALE = 1024.0
"""The loss scale of `Executor.forward_backward` in ``fp16``."""


class Executor(ABC):
    """A network built for one mode, device and precision of a framework.

    The constructor takes ``(network, *, mode, device, precision)``, already checked against the
    backend's declaration, and starts from the network's own initializers.

    Attributes
    ----------
    network : Network
    mode, device, precision : str
    backend : str
        Name of the backend, set by `Backend.executor`.
    array_type : type
        NumPy's type of parameters, and of what `fetch` returns.
    """

    backend = ""

    def __init__(self, network: Network, *, mode: str, device: str, precision: str) -> None:
        self.network = network
        self.mode = mode
        self.device = device
        self.precision = precision
        self.array_type: Any = np.float64 if precision == "fp64" else np.float32

    def check_feed(self, arrays: Arrays) -> None:
        """Raise `NetworkError` for a missing or unknown input or a wrong shape.

        The label may be missing: inference does not need it.
        """
        network = self.network
        for name, array in arrays.items():
            if name not in (*network.inputs, network.label):
                raise NetworkError(f"there is no input {name!r}", where=network.name)
            self._check_shape(name, np.shape(array), network.shapes[name])
        missing = [name for name in network.inputs if name not in arrays]
        if missing:
            raise NetworkError(f"input {missing[0]!r} is missing", where=network.name)

    def check_parameters(self, values: Arrays) -> None:
        """Raise `NetworkError` for an unknown parameter or statistic or a wrong shape."""
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
        """Copy input arrays to the device, in the native layout and dtype.

        The caller may overwrite the arrays once this returns.

        Parameters
        ----------
        arrays : mapping
            The network's inputs, such as images, float32 (N, C, H, W), or token ids, int64 (N, T),
            and for training its label input, int64 (N,).
        """

    @abstractmethod
    def forward(self, feed: Native) -> Native:
        """Run in inference mode.

        BatchNormalization uses running statistics; Dropout is the identity.

        Returns
        -------
        mapping
            The network's outputs, possibly still pending on the device. They keep their values for
            as long as the caller holds them.
        """

    @abstractmethod
    def forward_backward(self, feed: Native) -> Native:
        """Run in training mode and differentiate the loss.

        BatchNormalization uses the batch's statistics and updates its running statistics;
        parameters do not change.

        Returns
        -------
        mapping
            The loss under `Network.loss`, and its gradient under each name of
            `Network.parameters`. The loss keeps its value for as long as the caller holds it,
            gradients until the next call; copying them would make a training step slower.
        """

    @abstractmethod
    def fetch(self, values: Native) -> dict[str, np.ndarray]:
        """Convert native tensors to NumPy, neutral layout: float64 for ``fp64``, else float32.

        The axes are in the neutral order; in memory they may be in the native one.
        """

    @abstractmethod
    def parameters(self) -> dict[str, np.ndarray]:
        """Copy all of `Network.parameters` and `Network.statistics` to NumPy."""

    @abstractmethod
    def load_parameters(self, values: Arrays) -> None:
        """Overwrite the named parameters and running statistics; keep the others."""

    def random_state(self) -> dict[str, np.ndarray]:
        """Copy the state of Dropout's random generator.

        Returns
        -------
        dict
            Arrays that only an executor of the same backend, mode, device and network can load.
            Empty, as by default, if the network draws no random numbers.
        """
        return {}

    def load_random_state(self, values: Arrays) -> None:
        """Continue from the `random_state` of another executor.

        Raises
        ------
        NetworkError
            If the state does not fit; see `check_random_state`.
        """
        self.check_random_state(values)

    def check_random_state(self, values: Arrays) -> None:
        """Raise `NetworkError` unless names, shapes and types are those of `random_state`."""
        own, given = (
            {name: (value.shape, value.dtype) for name, value in arrays.items()}
            for arrays in (self.random_state(), values)
        )
        if own != given:
            raise NetworkError(
                f"the random state holds {', '.join(given) or 'nothing'}, not {', '.join(own) or 'nothing'}, or "
                "arrays of other shapes or types",
                where=self.network.name,
                hint="Only the same backend, mode and device can continue from it.",
            )

    @property
    def drops(self) -> bool:
        """Whether the loss depends on a Dropout, so that a training pass draws random numbers."""
        network = self.network
        return network.loss is not None and any(node.op_type == "Dropout" for node in network.nodes_for([network.loss]))

    @abstractmethod
    def synchronize(self) -> None:
        """Return only after all work issued on the device has finished."""
