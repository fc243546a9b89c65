"""One rank that trains LeNet-5 on the digits by every scheme, and prints what each reaches.

``python converge.py MEETING RANK SIZE``
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from d5suite.backends import discover
from d5suite.data.digits import Digits
from d5suite.distributed.communicators import open_communicator
from d5suite.distributed.schemes import SCHEMES, make_scheme
from d5suite.levels.distributed import Communicator
from d5suite.network.zoo import build
from d5suite.optimizers.settings import SGD

EPOCHS, BATCH = 3, 48
"""Passes over the data, and images of all ranks' batches together."""

SETTINGS: dict[str, dict[str, Any]] = {
    "asynchronous": {"schedule": [1, 2]},
    "stale_synchronous": {"bound": 2, "schedule": [1, 1, 2, 2]},
    "model_averaging": {"every": 4},
    "top_k": {"density": 0.1},
    "quantised": {"levels": 7},
}


def accuracy(executor: Any) -> float:
    test = Digits("test")
    answer = executor.fetch(executor.forward(executor.feed({"image": test.images})))
    return float(np.mean(answer[executor.network.output].argmax(axis=1) == test.labels))


def reach(name: str, communicator: Communicator) -> float:
    """Train every rank that trains on its own images, and return this rank's accuracy."""
    backend = discover()[0]["torch"]
    network = build("lenet5", classes=10, image_size=32, seed=1).with_label_smoothing(0.1)
    executor = backend.executor(network)
    replica = backend.replica(backend.trainer(executor, SGD(0.09375, momentum=0.9)))
    scheme = make_scheme(name, replica, communicator, **SETTINGS.get(name, {}))
    if scheme.serves:
        scheme.serve()
    else:
        served = "synchronous" in name
        trainers, place = communicator.size - served, communicator.rank - served
        data, batch = Digits("train"), BATCH // trainers
        replica.trainer.set_learning_rate(0.09375 / (trainers if served else 1))
        for epoch in range(EPOCHS):
            order = np.random.default_rng(epoch).permutation(len(data))[place::trainers]
            for start in range(0, len(data) // trainers - batch + 1, batch):
                chosen = order[start : start + batch]
                scheme.step(executor.feed({"image": data.images[chosen], "label": data.labels[chosen]}))
    scheme.finish()
    return accuracy(executor)


def main(meeting: str, rank: str, size: str) -> None:
    torch.set_num_threads(1)
    communicator = open_communicator("gloo", "ring", rank=int(rank), size=int(size), meeting=Path(meeting))
    for name in SCHEMES:
        begin = time.perf_counter()
        print(name, reach(name, communicator), f"{time.perf_counter() - begin:.1f}", flush=True)
    communicator.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
