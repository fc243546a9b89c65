"""A recipe: one workload, described once, for every backend.

A recipe file declares one `Recipe`; the tests come from the library (`d5suite.pytest_plugin`). Imports the contract's
neutral settings only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from d5suite.errors import ConfigurationError
from d5suite.levels.schedule import Constant, Schedule
from d5suite.levels.training import Optimizer

if TYPE_CHECKING:
    from d5suite.levels.backend import Backend

MEASUREMENTS = ("inference", "gradient", "training_step", "input_pipeline")
"""What a recipe measures unless it says otherwise."""

NEEDS: Mapping[str, Sequence[str]] = {
    "gradient": ("gradient",),
    "training_step": ("gradient", "level 2"),
    "step_breakdown": ("gradient", "level 2"),
    "time_to_accuracy": ("gradient", "level 2"),
    "cost_of_neutrality": ("gradient", "level 2", "baseline"),
    "native_input_pipeline": ("loader", "loader:{format}"),
    "cost_of_loading": ("loader", "loader:{format}"),
}
"""By measurement: the keys of `Backend.absent` under which it cannot be made."""

LOADING = ("input_pipeline", "native_input_pipeline", "cost_of_loading")
"""Measurements that run no network."""

REDUCED = "reduced"
"""The preset for backends that are much slower than the others."""

DATASETS = ("imagenet", "openimages", "digits")
"""Datasets that a recipe can name."""

TIME_TO_ACCURACY = "time_to_accuracy"
"""The measurement that presets with a `Training` have."""

TIME_LIMIT_S = 1800.0
"""Limit of a worker in seconds, unless a preset says otherwise."""


@dataclass(frozen=True)
class Training:
    """A training run to a target.

    Attributes
    ----------
    target : float
        What the metric must reach.
    epochs : int
        Epochs in which it must be reached.
    schedule : Schedule
        Of the learning rate.
    metric : str
        A key of `d5suite.validate.metrics.METRICS`.
    runs : int
        How many runs, each with weights and image order of a seed of its own.
    accumulate : int
        Batches per update.
    source : str
        Where the target is published, and with what settings it was reached, or whose it is. A target with a source
        means the real dataset: it is not asked for on drawn images.
    time_limit_s : float or None
        Limit of the worker that trains, in seconds; None where nobody can say how long it takes. ``--job-timeout``
        goes before it.
    """

    target: float
    epochs: int
    schedule: Schedule = field(default_factory=Constant)
    metric: str = "top-1 accuracy"
    runs: int = 1
    accumulate: int = 1
    source: str = ""
    time_limit_s: float | None = TIME_LIMIT_S

    def to_dict(self) -> dict[str, Any]:
        """JSON-able settings, without the limit, which is not the worker's."""
        plain = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "time_limit_s"}
        return {**plain, "schedule": self.schedule.to_dict()}


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
    training : Training, optional
        How ``time_to_accuracy`` is measured; without it, it is not.
    leaves_out : mapping of str to str
        Measurements of the recipe that this size does without, each with the reason.
    """

    image_size: int
    batch_size: int
    classes: int
    optimizer: Optimizer | None = None
    max_time_s: float = 5.0
    note: str = ""
    training: Training | None = None
    leaves_out: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Acceptance:
    """What must hold before anything is timed, beyond the backend's own tolerances.

    Attributes
    ----------
    trajectory_steps : int
        Training steps over which backends must agree.
    """

    trajectory_steps: int = 10


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
        The first is the default. Backends that are too slow for any of them are measured at ``reduced``, if there is
        one, whatever preset is asked for.
    measurements : sequence of str
    acceptance : Acceptance
    label_smoothing : float
        Of the loss; see `d5suite.network.Network.with_label_smoothing`.
    formats : sequence of str
        Storage formats, keys of `d5suite.data.formats.KINDS`: the recipe is then one of each, see `variants`. Without
        any it takes the dataset as it is stored.
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
    label_smoothing: float = 0.0
    formats: Sequence[str] = ()
    on_request: bool = False

    def __post_init__(self) -> None:
        if self.dataset not in DATASETS:
            raise ConfigurationError(
                f"unknown dataset {self.dataset!r}", where=self.name, hint=f"Known: {', '.join(DATASETS)}."
            )
        if not self.presets:
            raise ConfigurationError("a recipe needs at least one preset", where=self.name)

    def variants(self) -> list[Recipe]:
        """The recipe itself, or one of each storage format, called by it: ``input_pipeline-hdf5``."""
        if not self.formats:
            return [self]
        return [replace(self, name=f"{self.name}-{each}", formats=(each,)) for each in self.formats]

    def cannot(self, backend: Backend, measurement: str, preset: str | None = None) -> str | None:
        """Why a measurement of this recipe is not made on a backend at a preset, or None."""
        for key in NEEDS.get(measurement, ()):
            needed = key.format(format=next(iter(self.formats), None))
            if needed in backend.absent:
                return f"{backend.name} has no {needed}: {backend.absent[needed]}"
        if self._is_reduced(backend) and REDUCED not in self.presets:
            return f"{self.name} has no {REDUCED!r} preset, and {backend.name} needs one: {backend.reduced}"
        name, chosen = self.preset_for(backend, preset)
        if measurement in chosen.leaves_out:
            return f"preset {name!r} does without {measurement}: {chosen.leaves_out[measurement]}"
        if measurement == TIME_TO_ACCURACY and chosen.training is None:
            trained = ", ".join(name for name, each in self.presets.items() if each.training) or "none"
            return f"{self.name} is trained to accuracy at other presets only: {trained}"
        return None

    def preset_for(self, backend: Backend, name: str | None) -> tuple[str, Preset]:
        """The preset that a backend is measured at when this one, or the default, is asked for."""
        return self.preset(REDUCED if self._is_reduced(backend) else name)

    def _is_reduced(self, backend: Backend) -> bool:
        """Whether a backend is too slow for this recipe: none is too slow for one that runs no network."""
        return bool(backend.reduced) and not set(self.measurements) <= set(LOADING)

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
