"""Process-wide settings, versions and devices of Keras and of its backend.

The environment variable ``KERAS_BACKEND`` names the backend;
`d5suite.levels.backend.Backend.load` sets it before importing this module. Keras does not manage
threads, device names or device memory, so its backend does. Imports `d5suite.levels`, and Keras and
its backend only when a function is called.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import os
import random
from collections.abc import Callable
from typing import Any

from d5suite.levels.device import processor_name
from d5suite.levels.imports import lean_imports

_OPTIONAL = ("jax", "matplotlib", "sklearn")
"""Libraries for checkpoints, plots and wrappers. JAX is needed where it is Keras's backend."""


def _backend() -> str:
    import keras

    return str(keras.backend.backend())


def configure(*, threads: int, seed: int, device: str) -> None:
    """Configure Keras and its backend for one measurement, before anything else uses them.

    Parameters
    ----------
    threads : int
        CPU threads. TensorFlow and PyTorch have settings for them; JAX sizes its pool by ``NPROC``
        when it first computes, and the process's CPU affinity bounds it in any case.
    seed : int
        Seed of Keras's and its backend's generators, which Dropout draws from.
    device : str
        ``cpu`` or ``cuda``.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ["NPROC"] = str(threads)
    if device == "cpu":
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    else:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    with lean_imports(*(name for name in _OPTIONAL if name != os.environ.get("KERAS_BACKEND"))):
        import keras

    configure_backend = {"tensorflow": _configure_tensorflow, "torch": _configure_torch, "jax": _configure_jax}
    configure_backend[_backend()](threads, seed, device)
    keras.config.disable_interactive_logging()
    # Random layers take their seeds from Python's generator. `keras.utils.set_random_seed` imports
    # TensorFlow wherever it is installed, and its memory and threads do not belong to a run on
    # another backend.
    random.seed(seed)
    if _backend() == "tensorflow":
        keras.utils.set_random_seed(seed)


def _configure_tensorflow(threads: int, seed: int, device: str) -> None:
    import tensorflow as tf

    tf.get_logger().setLevel("ERROR")
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(threads)
    if device == "cpu":
        tf.config.set_visible_devices([], "GPU")
    for gpu in tf.config.get_visible_devices("GPU"):
        tf.config.experimental.set_memory_growth(gpu, True)
    tf.config.experimental.set_synchronous_execution(True)
    tf.config.experimental.enable_tensor_float_32_execution(False)


def _configure_torch(threads: int, seed: int, device: str) -> None:
    import torch

    torch.set_num_threads(threads)
    if torch.get_num_interop_threads() != threads:
        with contextlib.suppress(RuntimeError):  # a started pool keeps its size; nothing here uses it
            torch.set_num_interop_threads(threads)
    torch.manual_seed(seed)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = device == "cuda"


def _configure_jax(threads: int, seed: int, device: str) -> None:
    import jax

    jax.config.update("jax_default_matmul_precision", "highest")  # no TensorFloat-32


def versions() -> dict[str, str]:
    """Return the versions of Keras and of its backend."""
    import keras

    backend = _backend()
    found = {"keras": str(keras.__version__), backend: str(importlib.import_module(backend).__version__)}
    if backend == "jax":
        found["jaxlib"] = importlib.metadata.version("jaxlib")
    return found


def mode_problem(mode: str) -> str | None:
    """Return how the environment switches off `jax.jit` where a mode needs it, else None."""
    if mode != "jax":
        return None
    import jax

    return "JAX_DISABLE_JIT switches jax.jit off" if jax.config.jax_disable_jit else None


def device_problem(device: str) -> str | None:
    """Return why a device cannot be used; None if it can."""
    if device == "cpu":
        return None
    backend = _backend()
    if backend == "tensorflow":
        import tensorflow as tf

        found = bool(tf.config.list_physical_devices("GPU"))
    elif backend == "torch":
        import torch

        found = torch.cuda.is_available()
    else:
        found = _jax_gpu() is not None
    if found:
        return None
    return f"Keras's backend {backend} finds no CUDA GPU; does its build support CUDA, and does nvidia-smi show a GPU?"


def _jax_gpu() -> Any:
    """Return JAX's first CUDA device; None if there is none."""
    import jax

    with contextlib.suppress(RuntimeError):
        return jax.devices("cuda")[0]
    return None


def device_name(device: str) -> str:
    """Return the device's product name."""
    if device == "cuda":
        backend = _backend()
        if backend == "tensorflow":
            import tensorflow as tf

            details = tf.config.experimental.get_device_details(tf.config.list_physical_devices("GPU")[0])
            return str(details.get("device_name", device))
        if backend == "torch":
            import torch

            return str(torch.cuda.get_device_name())
        return str(_jax_gpu().device_kind)
    return processor_name()


def device_memory(device: str) -> tuple[Callable[[], None], Callable[[], int]] | None:
    """Return functions that reset and read the peak of device memory in bytes; None on the CPU.

    JAX cannot reset its peak: there, the first function does nothing.
    """
    if device == "cpu":
        return None
    backend = _backend()
    if backend == "tensorflow":
        import tensorflow as tf

        memory = tf.config.experimental
        return lambda: memory.reset_memory_stats("GPU:0"), lambda: int(memory.get_memory_info("GPU:0")["peak"])
    if backend == "torch":
        import torch

        return torch.cuda.reset_peak_memory_stats, torch.cuda.max_memory_allocated
    return lambda: None, lambda: int(_jax_gpu().memory_stats()["peak_bytes_in_use"])
