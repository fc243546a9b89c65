"""A recipe: one workload, described once, for every backend.

A recipe file declares one `Recipe`; the tests come from the library (`d5suite.pytest_plugin`). Imports the contract's
neutral settings only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from d5suite.errors import ConfigurationError
from d5suite.levels.training import Optimizer

MEASUREMENTS = ("inference", "gradient", "training_step", "input_pipeline")
"""What a recipe measures unless it says otherwise."""

DATASETS = ("imagenet",)
"""Datasets that a recipe can name."""


@dataclass(frozen=True)
class Preset:
    """A size of a recipe.

    Attributes
    ----------
    image_size : int
        Pixels.
    batch_size : int
    classes : int
        The dataset's first so many classes, and the network's outputs.
    optimizer : Optimizer, optional
        In place of the recipe's own.
    max_time_s : float
        Sampling budget of each measurement, unless ``--benchmark-max-time`` is given.
    note : str
        Where the setting comes from.
    """

    image_size: int
    batch_size: int
    classes: int
    optimizer: Optimizer | None = None
    max_time_s: float = 5.0
    note: str = ""


@dataclass(frozen=True)
class Acceptance:
    """What must hold before anything is timed, beyond the backend's own tolerances.

    Attributes
    ----------
    trajectory_steps : int
        Training steps over which backends must agree.
    top1 : float, optional
        Published top-1 accuracy of the ``full`` preset, as a fraction.
    source : str
        Where ``top1`` is published.
    """

    trajectory_steps: int = 10
    top1: float | None = None
    source: str = ""


@dataclass(frozen=True)
class Recipe:
    """One workload.

    Attributes
    ----------
    name : str
        As reports call it.
    network : str
        A network of the zoo, or the path of an ``.onnx`` file.
    dataset : str
        One of `DATASETS`.
    optimizer : Optimizer
        Neutral settings; ``--optimizer`` changes them.
    presets : mapping of str to Preset
        The first is the default.
    measurements : sequence of str
    acceptance : Acceptance
    on_request : bool
        Whether it is skipped unless its file is named on the command line.
    """

    name: str
    network: str
    dataset: str
    optimizer: Optimizer
    presets: Mapping[str, Preset]
    measurements: Sequence[str] = MEASUREMENTS
    acceptance: Acceptance = Acceptance()
    on_request: bool = False

    def __post_init__(self) -> None:
        if self.dataset not in DATASETS:
            raise ConfigurationError(
                f"unknown dataset {self.dataset!r}", where=self.name, hint=f"Known: {', '.join(DATASETS)}."
            )
        if not self.presets:
            raise ConfigurationError("a recipe needs at least one preset", where=self.name)

    def preset(self, name: str | None) -> tuple[str, Preset]:
        """The preset of this name, or the default one.

        Raises
        ------
        ConfigurationError
            If there is none of this name.
        """
        if name is None:
            name = next(iter(self.presets))
        if name not in self.presets:
            raise ConfigurationError(
                f"recipe {self.name!r} has no preset {name!r}", hint=f"Its presets: {', '.join(self.presets)}."
            )
        return name, self.presets[name]
