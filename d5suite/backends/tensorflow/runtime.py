"""TensorFlow's process-wide settings, versions and devices.

Imports `d5suite.levels`, and TensorFlow only when a function is called.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from d5suite.levels.imports import lean_imports

_OPTIONAL = ("jax", "matplotlib", "sklearn")
"""Libraries for converters, plots and wrappers: nearly half the time of importing TensorFlow."""

_TF_DEVICES = {"cpu": "CPU", "cuda": "GPU"}
"""TensorFlow's name for each kind of device."""


def configure(*, threads: int, seed: int, device: str) -> None:
    """Configure TensorFlow for one measurement, before anything else uses it.

    Parameters
    ----------
    threads : int
        Size of both thread pools, intra-op and inter-op, as TensorFlow's default is; about a tenth
        faster on ResNet-50 than one operator at a time. The process's CPU affinity bounds both
        together.
    seed : int
        Seed of TensorFlow's generators, which Dropout draws from.
    device : str
        ``cpu`` hides the GPUs; ``cuda`` lets GPU memory grow on demand.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    with lean_imports(*_OPTIONAL):
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
    tf.random.set_seed(seed)


def versions() -> dict[str, str]:
    """Return the versions of TensorFlow and of the libraries it computes with."""
    import tensorflow as tf

    build = tf.sysconfig.get_build_info()
    found = {"tensorflow": tf.version.VERSION, "tensorflow_git": tf.version.GIT_VERSION}
    if build.get("is_cuda_build"):
        found["cuda"] = str(build.get("cuda_version", "unknown"))
        found["cudnn"] = str(build.get("cudnn_version", "unknown"))
    found["onednn"] = "off" if os.environ.get("TF_ENABLE_ONEDNN_OPTS", "1") == "0" else "on if the build has it"
    return found


def device_problem(device: str) -> str | None:
    """Return why a device cannot be used; None if it can."""
    import tensorflow as tf

    if device == "cpu" or tf.config.list_physical_devices(_TF_DEVICES[device]):
        return None
    if not tf.test.is_built_with_cuda():
        return (
            f"this build of TensorFlow {tf.version.VERSION} has no CUDA support; "
            "install one that does: pip install 'd5suite[tensorflow-gpu]'"
        )
    return "TensorFlow finds no GPU; is one present, and do its driver and CUDA libraries match this TensorFlow build?"


def device_name(device: str) -> str:
    """Return the device's product name; ``cpu`` for the CPU, which TensorFlow does not name."""
    import tensorflow as tf

    if device == "cpu":
        return "cpu"
    details = tf.config.experimental.get_device_details(tf.config.list_physical_devices(_TF_DEVICES[device])[0])
    return str(details.get("device_name", device))


def device_memory(device: str) -> tuple[Callable[[], None], Callable[[], int]] | None:
    """Return functions that reset and read the peak of device memory in bytes; None on the CPU."""
    if device == "cpu":
        return None
    import tensorflow as tf

    def reset() -> None:
        tf.config.experimental.reset_memory_stats(f"{_TF_DEVICES[device]}:0")

    def peak() -> int:
        return int(tf.config.experimental.get_memory_info(f"{_TF_DEVICES[device]}:0")["peak"])

    return reset, peak
