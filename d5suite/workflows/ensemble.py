"""An ensemble of simulations that feeds one trainer, which decides the next parameters.

A member follows a plate's cooling for a time that is the parameter: the longer, the more steps, so
members are not equally fast. Its answer is the mean temperature, which is known in closed form. The
trainer fits a small network to the answers and asks next where that changes most and is known
least (active learning). Imports NumPy and its neighbours.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import ClassVar

import numpy as np

from d5suite.network import Network
from d5suite.network.builder import Builder
from d5suite.optimizers.settings import Adam
from d5suite.validate.check import Check
from d5suite.workflows.base import Place, Program, proved_training
from d5suite.workflows.couplings.base import Field, Fields
from d5suite.workflows.heat import ROUNDING, Stencil, waves

QUESTION: Fields = {"duration": Field((1,), "float64", "s")}
ANSWER: Fields = {"duration": Field((1,), "float64", "s"), "mean": Field((1,), "float64", "K")}
MODES = [(1, 1, 1.0), (1, 3, 0.5)]
CANDIDATES = 65
"""Durations among which the trainer chooses, evenly from 0 to 1."""


def steps_of(duration: float, longest: int) -> int:
    """Return the steps of the stencil for a duration from 0 to 1."""
    return max(1, round(duration * longest))


def expected_mean(duration: float, points: int, longest: int) -> float:
    """Return the closed form of a member's answer."""
    return float(waves(points, MODES, steps=steps_of(duration, longest)).mean())


class EnsembleMember(Program):
    """Answers with the mean temperature after the duration that it is asked for."""

    name = "ensemble_member"
    role = "simulation"
    parts = ("simulate",)
    options: ClassVar[Mapping[str, object]] = {"points": 16, "longest": 200, "slow_s": 0.0}

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self.stencil = Stencil(int(self.option("points")))
        self._worst = 0.0

    def takes(self) -> Mapping[str, Fields]:
        return {"questions": QUESTION}

    def gives(self) -> Mapping[str, Fields]:
        return {"answers": ANSWER}

    def start(self) -> None:
        self._worst = 0.0

    def simulate(self, duration: float) -> float:
        """Return the mean temperature in kelvin."""
        self.stencil.set(MODES)
        self.stencil.advance(steps_of(duration, int(self.option("longest"))))
        if self.option("slow_s"):
            time.sleep(float(self.option("slow_s")))
        return float(self.stencil.field.mean())

    def step(self, step: int) -> bool:
        asked = self.place.into["questions"].get()
        if asked is None:
            return False
        duration = float(asked.arrays["duration"][0])
        mean = self.simulate(duration)
        expected = expected_mean(duration, self.stencil.points, int(self.option("longest")))
        self._worst = max(self._worst, abs(mean - expected) / abs(expected))
        self.place.out["answers"].put(asked.step, {"duration": np.array([duration]), "mean": np.array([mean])})
        return True

    def checks(self) -> Iterable[Check]:
        yield Check(f"{self.place.component}: mean temperatures vs closed form", self._worst, ROUNDING)


def curve_network(seed: int) -> Network:
    """Return a network from one number to one number, as images of one pixel."""
    b = Builder("curve", seed=seed, image_size=1, channels=1)
    x = b.tanh(b.conv(b.image, "c1", 16, 1, bias=True, deviation=1.0))
    x = b.tanh(b.conv(x, "c2", 16, 1, bias=True, deviation=0.4))
    return b.regressor(b.conv(x, "c3", 1, 1, bias=True, deviation=0.1), 1, 1, 1)


class ActiveLearning(Program):
    """Trains a network on the answers, and chooses the next questions.

    With ``lockstep`` it waits for the answers of all members before it asks again.
    """

    name = "active_learning"
    role = "training"
    needs = ("level 2",)
    parts = ("train", "choose")
    options: ClassVar[Mapping[str, object]] = {
        "points": 16, "longest": 200, "batch": 16, "learning_rate": 0.02, "repeats": 10, "lockstep": False,
        "slow_s": 0.0,
    }  # fmt: skip

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self.members, self.batch = place.sizes["questions"], int(self.option("batch"))
        self.network = curve_network(place.seed)
        self.optimizer = Adam(learning_rate=float(self.option("learning_rate")))
        self.executor = place.builder.executor(self.network)
        self.trainer = place.builder.trainer(self.executor, self.optimizer)
        self._label, self._loss = self.network.require_loss()
        self._initial = self.trainer.initial_state()
        self.known: list[tuple[float, float]] = []
        self.asked: list[float] = []
        self._free: list[int] = []
        self._loss_now = float("nan")

    def takes(self) -> Mapping[str, Fields]:
        return {"answers": ANSWER}

    def gives(self) -> Mapping[str, Fields]:
        return {"questions": QUESTION}

    def start(self) -> None:
        names = (*self.network.parameters, *self.network.statistics)
        self.executor.load_parameters({name: self.network.initializers[name] for name in names})
        self.trainer.load_state(self._initial)
        self.known, self.asked, self._free = [], [], []

    def _ask(self, member: int, duration: float) -> None:
        self.place.out["questions"].put(len(self.asked), {"duration": np.array([duration])}, member)
        self.asked.append(duration)

    def step(self, step: int) -> bool:
        if not self.asked:
            for member in range(min(self.members, self.place.steps)):
                self._ask(member, (member + 0.5) / self.members)
        found = self.place.into["answers"].get()
        if found is None:
            return False
        self.known.append((float(found.arrays["duration"][0]), float(found.arrays["mean"][0])))
        self.train()
        self._free.append(found.source)
        if not self.option("lockstep") or len(self._free) == self.members:
            for member in self._free:
                if len(self.asked) < self.place.steps:
                    self._ask(member, self.choose())
            self._free = []
        return True

    def train(self) -> None:
        """Make steps of training with all answers, the first ones repeated to fill the batch."""
        x, y = np.array(self.known[-self.batch :], np.float32).T
        images, labels = (np.resize(each, self.batch).reshape(-1, 1, 1, 1) for each in (2 * x - 1, y))
        feed = self.executor.feed({**self.network.arrays(images), self._label: labels})
        for _ in range(int(self.option("repeats"))):
            loss = self.trainer.step(feed)
        self._loss_now = float(self.executor.fetch(loss)[self._loss])
        if self.option("slow_s"):
            time.sleep(float(self.option("slow_s")))

    def predicted(self, durations: np.ndarray) -> np.ndarray:
        """Return the network's predictions for an array of durations."""
        images = (2 * durations - 1).astype(np.float32).reshape(-1, 1, 1, 1)
        answer = self.executor.fetch(self.executor.forward(self.executor.feed(self.network.arrays(images))))
        return answer[self.network.output].reshape(-1).astype(np.float64)

    def choose(self) -> float:
        """Return the duration where the curve is steep and its nearest neighbour far."""
        candidates = np.linspace(0.0, 1.0, CANDIDATES)
        slope = np.abs(np.gradient(self.predicted(candidates), candidates))
        away = np.abs(candidates[:, None] - np.array(self.asked)).min(1)
        return float(candidates[np.argmax(away * (slope + slope.mean() + 1e-12))])

    def figures(self) -> dict[str, float]:
        points, longest = int(self.option("points")), int(self.option("longest"))
        durations = np.linspace(0.0, 1.0, CANDIDATES)
        expected = np.array([expected_mean(each, points, longest) for each in durations])
        error = float(np.sqrt(np.mean((self.predicted(durations) - expected) ** 2) / np.mean(expected**2)))
        return {"answers": float(len(self.known)), "last_loss": self._loss_now, "physical_error": error}

    def checks(self) -> Iterable[Check]:
        random = np.random.default_rng(self.place.seed)
        images = random.uniform(-1, 1, (self.batch, 1, 1, 1)).astype(np.float32)
        yield from proved_training(self.place.builder, self.network, self.optimizer, images, np.sin(images))
