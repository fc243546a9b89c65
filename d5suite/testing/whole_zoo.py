"""Every network of the zoo: its output, and its gradients in float64 and float32.

Run by ``d5suite conformance NAME --zoo`` only, because it takes twice as long as the kit. ONNX's
evaluator takes minutes for some networks, so its answers are kept in d5suite's cache.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from d5suite.files import cache_folder
from d5suite.network.zoo import NETWORKS, build
from d5suite.testing.networks import random_batch
from d5suite.testing.subject import Subject
from d5suite.validate.network.gradient import check_gradient, check_gradient_float64
from d5suite.validate.network.inference import check_inference

IMAGES = 4

SIZES = {"lenet5": 32, "alexnet": 63, "vgg16": 63, "vgg19": 63, "inception_v3": 139}
"""Image sizes other than `SIZE`: the smallest for AlexNet and VGG, 3×3 maps for Inception."""

SIZE = 64


@pytest.mark.parametrize("name", NETWORKS)
def test_network_of_the_zoo(subject: Subject, name: str) -> None:
    """Run the checks that precede timing, on small images."""
    network = build(name, classes=10, image_size=SIZES.get(name, SIZE)).without_dropout().at_generic_point()
    subject.require(network, gradient=True, precision="fp64")
    images, labels = random_batch(network, IMAGES)
    recorded = _answers(name)
    proved = subject.executor(network, "fp64")
    known: dict[str, np.ndarray] = {}
    subject.prove("gradient.meaning", check_gradient_float64(proved, images, labels, recorded=recorded, keep=known))
    if "fp32" in subject.backend.precisions:
        timed = subject.executor(network, "fp32")
        tolerance = subject.backend.tolerances["fp32"]
        inference = check_inference(timed, images, tolerance=tolerance.outputs, threads=subject.threads)
        subject.prove("executor.forward", inference)
        sensitivity = recorded.with_suffix(".json")
        subject.prove(
            "gradient.meaning",
            check_gradient(timed, proved, images, labels, tolerance, reference=known, recorded=sensitivity),
        )


def _answers(name: str) -> Path:
    """Return the file of the evaluator's answers, which are used for equal weights and images."""
    folder = cache_folder() / "zoo"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{name}.h5"
