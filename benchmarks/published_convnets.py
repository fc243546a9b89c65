"""Errors of the model of convolutional networks against rates of training that others published.

Four constants are fitted to steps of other networks on one device, which the machine file has: the
network that is asked about is left out. What several devices add is not fitted.

Data
----
``data/tensorflow_convnet_rates.csv``; Goyal et al., "Accurate, large minibatch SGD: training
ImageNet in 1 hour" (arXiv:1706.02677): 90 epochs of ResNet-50 took 29 hours on 8 P100 and one hour
on 256, in servers of eight with 50 Gb/s Ethernet. Their framework was Caffe2, and the constants are
TensorFlow's.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from d5suite.models.ceilings import read_ceilings
from d5suite.models.communication import Link
from d5suite.models.fitting import Judged, by_network, judge
from d5suite.models.network_plans import NetworkAdvice, NetworkModel, NetworkPlan, advice_on
from d5suite.models.node_time import fit_steps, predicted_s
from d5suite.models.published import read_published
from d5suite.models.site import Site, read_site
from d5suite.network.zoo import build
from d5suite.report.network_advice import published_kind, published_model, published_points

HERE = Path(__file__).parent
MACHINES = HERE.parent / "examples" / "machines"
NAMES = {"p100-dgx1": "P100", "k80-p2": "K80"}
DEVICE = "cuda"

IMAGES, EPOCHS = 1_281_167, 90
GOYAL = {8: (256, 29 * 3600.0), 256: (8192, 3600.0)}
"""Batch, and seconds of all epochs, by number of P100."""
SERVER_BYTES_PER_S = 50e9 / 8
"""Of the Ethernet of one of Goyal et al.'s servers."""


class Rate(NamedTuple):
    """Images per second of some devices, each with its batch."""

    network: str
    devices: int
    batch: int
    images_per_s: float

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.devices * self.batch / self.images_per_s


class Predicted(NamedTuple):
    """A prediction of the time of a step on several devices, and the published one."""

    advice: NetworkAdvice
    seconds: float

    @property
    def error(self) -> float:
        """Relative error."""
        return self.advice.seconds / self.seconds - 1

    @property
    def covered(self) -> bool:
        """Whether the interval holds the published time."""
        low, high = self.advice.interval_s
        return low <= self.seconds <= high


def rates(machine: str) -> list[Rate]:
    """Return the published rates on a machine."""
    with (HERE / "data" / "tensorflow_convnet_rates.csv").open(encoding="utf-8") as file:
        return [
            Rate(row["network"], int(row["gpus"]), int(row["batch_per_gpu"]), float(row["images_per_s"]))
            for row in csv.DictReader(file)
            if row["machine"] == machine
        ]


class Published:
    """A machine with published steps, and the model of ResNet-50 that the other networks give."""

    def __init__(self, machine: str) -> None:
        self.path = MACHINES / f"{machine}.json"
        self.ceilings = read_ceilings(self.path)
        steps = read_published(self.path)
        self.kind = published_kind(steps, DEVICE, 1)
        self.points = published_points(steps, self.kind, self.site(1).roof)
        self.rates = rates(machine)
        network = build("resnet50").with_classification_loss()
        self.resnet50: NetworkModel = published_model(network, self.kind, self.points)

    def left_out(self) -> list[Judged]:
        """Judge the step of each network on one device, by the others."""
        return judge(by_network(self.points), fit_steps, predicted_s, lambda each: each.seconds)

    def site(self, devices: int) -> Site:
        """Return so many devices."""
        nodes = math.ceil(devices / 8)
        found = read_site(self.path, self.ceilings, nodes=nodes, device=DEVICE, precision="fp32", threads=1)
        return replace(found, devices=devices)

    def resnet50_steps(self) -> Iterator[tuple[Rate, Predicted]]:
        """Yield the published steps of ResNet-50 with their predictions."""
        for each in self.rates:
            if each.network == "resnet50":
                plan = NetworkPlan(each.devices, each.devices * each.batch, each.batch)
                yield each, Predicted(advice_on(self.resnet50, self.site(each.devices), plan), each.seconds)


def goyal(p100: Published) -> list[Predicted]:
    """Return the predictions of a step on 8 and on 256 devices."""
    found = []
    for devices, (batch, seconds) in GOYAL.items():
        site = p100.site(devices)
        if devices > 8:
            site = replace(site, link=Link(50e-6, 1 / SERVER_BYTES_PER_S))
        advice = advice_on(p100.resnet50, site, NetworkPlan(devices, batch, batch // devices))
        found.append(Predicted(advice, seconds * batch / IMAGES / EPOCHS))
    return found
