"""A surrogate of the heat simulation, trained while that runs, which then takes its place.

Imports NumPy and its neighbours; the framework only through `d5suite.workflows.base.NativeBuilder`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import ClassVar

import numpy as np

from d5suite.levels.distributed import segments
from d5suite.network import Network
from d5suite.network.builder import Builder
from d5suite.optimizers.settings import Adam
from d5suite.validate.check import Check
from d5suite.validate.network.oracle import inference
from d5suite.validate.norms import relative_l2
from d5suite.workflows.base import Place, Program, proved_training
from d5suite.workflows.couplings.base import Field, Fields
from d5suite.workflows.heat import waves

TRAINED = "trained/"
"""What the optimizer's part of a state begins with."""


def stepping_network(points: int, channels: int, seed: int) -> Network:
    """Return a network that maps a field to the field some time later.

    Two convolutions find the change, which is added to the field; the loss is the squared error.
    """
    b = Builder("surrogate", seed=seed, image_size=points, channels=1)
    x = b.tanh(b.conv(b.image, "c1", channels, 5, bias=True))
    change = b.conv(x, "c2", 1, 5, bias=True, deviation=0.01)
    return b.regressor(b.add(b.image, change, "later"), 1, points, points)


class OnlineTraining(Program):
    """Trains the surrogate with pairs of neighbouring snapshots as they come.

    After the last snapshot it predicts some strides, and gives the field back.
    """

    name = "online_training"
    role = "training"
    needs = ("level 2",)
    parts = ("assemble", "train", "predict")
    options: ClassVar[Mapping[str, object]] = {
        "points": 32, "stride": 10, "batch": 4, "channels": 4, "learning_rate": 0.005, "repeats": 4, "strides": 4,
        "slow_s": 0.0,
    }  # fmt: skip

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self.points, self.batch = int(self.option("points")), int(self.option("batch"))
        self.network = stepping_network(self.points, int(self.option("channels")), place.seed)
        self.optimizer = Adam(learning_rate=float(self.option("learning_rate")))
        self.executor = place.builder.executor(self.network)
        self.trainer = place.builder.trainer(self.executor, self.optimizer)
        self._label, self._loss = self.network.require_loss()
        self._initial = self.trainer.initial_state()
        self._rows = [segments(self.points, place.sizes["snapshots"])[rank] for rank in range(place.sizes["snapshots"])]
        self.fields = np.zeros((self.batch + 1, 1, self.points, self.points), np.float32)
        self.seen = 0
        self.losses: list[float] = []

    def takes(self) -> Mapping[str, Fields]:
        rows = self._rows[0]
        return {"snapshots": {"temperature": Field((rows.stop - rows.start, self.points), "float64", "K")}}

    def gives(self) -> Mapping[str, Fields]:
        return {"predicted": {"temperature": Field((self.points, self.points), "float64", "K")}}

    def start(self) -> None:
        self.executor.load_parameters({
            name: self.network.initializers[name] for name in (*self.network.parameters, *self.network.statistics)
        })  # fmt: skip
        self.trainer.load_state(self._initial)
        self.fields[:] = 0.0
        self.seen, self.losses = 0, []

    def step(self, step: int) -> bool:
        found = self.place.into["snapshots"].get_all()
        if found is None:
            return False
        self.assemble([message.arrays["temperature"] for message in found])
        if self.seen > 1:
            self.train()
        return True

    def assemble(self, parts: list[np.ndarray]) -> None:
        """Add a field to the last ones."""
        self.fields[:-1] = self.fields[1:]
        self.fields[-1, 0] = np.concatenate(parts)
        self.seen += 1

    def pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the last fields and those that followed; few are repeated to fill the batch."""
        count = min(self.batch, self.seen - 1)
        chosen = np.arange(self.batch) % count + self.batch - count
        return self.fields[chosen], self.fields[chosen + 1]

    def train(self) -> None:
        """Make steps of training; a planted slow learner sleeps as well."""
        before, after = self.pairs()
        feed = self.executor.feed({**self.network.arrays(before), self._label: after})
        for _ in range(int(self.option("repeats"))):
            loss = self.trainer.step(feed)
        self.losses.append(float(self.executor.fetch(loss)[self._loss]))
        if self.option("slow_s"):
            time.sleep(float(self.option("slow_s")))

    def predict(self, strides: int) -> np.ndarray:
        """Return the field so many strides after the last one, float64 (points, points)."""
        field = self.fields[-1:]
        for _ in range(strides):
            feed = self.executor.feed(self.network.arrays(np.repeat(field, self.batch, 0)))
            field = self.executor.fetch(self.executor.forward(feed))[self.network.output][:1]
        return field[0, 0].astype(np.float64)

    def finish(self) -> None:
        if "predicted" in self.place.out:
            strides = int(self.option("strides"))
            field = np.ascontiguousarray(self.predict(strides))
            self.place.out["predicted"].put(self.place.steps - 1 + strides, {"temperature": field})

    def state(self) -> dict[str, np.ndarray]:
        return {
            "fields": self.fields.copy(), "seen": np.array(self.seen), **self.executor.parameters(),
            **{TRAINED + name: value for name, value in self.trainer.state().items()},
        }  # fmt: skip

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        names = (*self.network.parameters, *self.network.statistics)
        self.executor.load_parameters({name: state[name] for name in names})
        self.trainer.load_state({
            name.removeprefix(TRAINED): value for name, value in state.items() if name.startswith(TRAINED)
        })  # fmt: skip
        self.fields[:] = state["fields"]
        self.seen = int(state["seen"])

    def result(self) -> dict[str, np.ndarray]:
        return self.executor.parameters()

    def figures(self) -> dict[str, float]:
        if not self.losses:
            return {}
        return {"updates": float(len(self.losses)), "first_loss": self.losses[0], "last_loss": self.losses[-1]}

    def checks(self) -> Iterable[Check]:
        """Prove training and prediction on fields of a known simulation."""
        waves_of = [waves(self.points, [(1, 2, 1.0), (2, 1, 0.5)], steps=10 * n) for n in range(self.batch + 1)]
        fields = np.array(waves_of, np.float32)[:, None]
        before, after = fields[:-1], fields[1:]
        yield from proved_training(self.place.builder, self.network, self.optimizer, before, after)
        self.start()
        answer = self.executor.fetch(self.executor.forward(self.executor.feed(self.network.arrays(before))))
        expected, evaluator = inference(self.network, before, threads=self.place.builder.threads)
        error = relative_l2(answer[self.network.output], expected)
        yield Check(f"prediction vs {evaluator}", error, self.place.builder.tolerance.outputs)
