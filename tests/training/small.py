"""Small networks and data for the tests of training."""

from __future__ import annotations

import pytest

from d5suite.backends import discover
from d5suite.data.arrays import ArrayBatches
from d5suite.data.digits import Digits
from d5suite.data.samplers import Ordered, Sampler, Shuffled
from d5suite.levels.training import Trainer
from d5suite.network import Network
from d5suite.network.builder import Builder
from d5suite.network.zoo import build
from d5suite.optimizers.settings import SGD, Optimizer
from d5suite.training.loop import Event, Run
from d5suite.validate.metrics import METRICS

TOP1 = METRICS["top-1 accuracy"]
OPTIMIZER = SGD(0.0625, momentum=0.9, weight_decay=2.0**-12)

needs_torch = pytest.mark.skipif(discover()[0]["torch"].problem() is not None, reason="trains on PyTorch")


def lenet() -> Network:
    return build("lenet5", classes=10, image_size=32, seed=1)


def with_dropout() -> Network:
    b = Builder("with_dropout", seed=1, image_size=32, channels=1)
    x = b.relu(b.linear(b.flatten(b.dropout(b.image, "drop1", ratio=0.25), "flatten", size=32), "hidden", 24))
    return b.classifier(b.linear(b.dropout(x, "drop2"), "output", 10))


def trainer_on(
    backend: str, optimizer: Optimizer = OPTIMIZER, *, network: Network | None = None, precision: str = "fp32"
) -> Trainer:
    chosen = discover()[0][backend]
    if chosen.problem():
        pytest.skip(str(chosen.problem()))
    return chosen.trainer(chosen.executor(network or lenet(), precision=precision), optimizer)


def digits(split: str = "train", *, batch_size: int = 32, images: int | None = None) -> ArrayBatches:
    data = Digits("train" if split == "train" else "test")
    kept = len(data) if images is None else images
    sampler: Sampler = Shuffled(kept, seed=3) if split == "train" else Ordered(kept)
    return ArrayBatches(
        data.images[:kept], data.labels[:kept], sampler, batch_size=batch_size, drop_last=split == "train"
    )


class Watch(Event):
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.rates: list[float] = []

    def on_start(self, run: Run) -> None:
        self.told.append("start")

    def on_batch(self, run: Run) -> None:
        self.told.append("batch")

    def on_step(self, run: Run) -> None:
        self.told.append("step")
        self.rates.append(run.trainer.learning_rate)

    def on_epoch(self, run: Run) -> None:
        self.told.append("epoch")

    def on_end(self, run: Run) -> None:
        self.told.append("end")
