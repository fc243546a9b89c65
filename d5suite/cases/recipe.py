"""A recipe: a network on a dataset, described once for every backend.

A recipe file declares one `Recipe`; `d5suite.pytest_plugin` makes the tests.
Imports neutral settings, jobs and measurements.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from d5suite.cases.case import TIME_LIMIT_S, Case, Declaration, Settings, Shared, Test, absent, declared_in
from d5suite.errors import ConfigurationError, D5Error
from d5suite.job import CaseJob, NetworkCase, Result, is_plain_name
from d5suite.measurements import discover, find
from d5suite.measurements.base import Measurement
from d5suite.optimizers.schedules import Constant, Schedule
from d5suite.optimizers.settings import Optimizer

if TYPE_CHECKING:
    from d5suite.backends import Selection
    from d5suite.levels.backend import Backend

MEASUREMENTS = ("inference", "gradient", "training_step", "input_pipeline")
"""A recipe's default measurements."""

REDUCED = "reduced"
"""The preset for backends that are much slower than the others."""

DATASETS = ("imagenet", "openimages", "digits", "inputs")
"""Datasets of recipes; ``inputs`` are random inputs, for a `UserNetworkRecipe`."""

SYNTHETIC_IMAGES = 320
"""Training images in a recipe's synthetic dataset, but at least `LEAST_PER_CLASS` per class."""

LEAST_PER_CLASS = 2
"""See `SYNTHETIC_IMAGES`."""


@dataclass(frozen=True)
class Training:
    """A training run to a target.

    Attributes
    ----------
    target : float
        Value that the metric must reach.
    epochs : int
        Number of epochs in which the target must be reached.
    schedule : Schedule
        Schedule of the learning rate.
    metric : str
        A key of `d5suite.validate.metrics.METRICS`.
    runs : int
        Number of runs; every run has its own seed for weights and image order.
    accumulate : int
        Batches per update.
    source : str
        Where the target is published, and with which settings it was reached; or who set the
        target. A target with a source is for the real dataset, and not measured on synthetic
        images.
    time_limit_s : float or None
        Time limit of the worker that trains, in seconds; None if the duration is unknown.
        ``--job-timeout`` overrides it.
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
        """Return the settings as JSON types, without the limit, which the parent enforces."""
        plain = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "time_limit_s"}
        return {**plain, "schedule": self.schedule.to_dict()}


SIZES = {"image_size": (0, 2**16), "batch_size": (1, 2**31 - 1), "classes": (0, 2**31 - 1)}
"""Ranges of a preset's numbers."""


@dataclass(frozen=True)
class Acceptance:
    """Requirements before timing, beyond the backend's own tolerances.

    Attributes
    ----------
    trajectory_steps : int
        Training steps over which backends must agree.

    Raises
    ------
    ConfigurationError
        If it is not a whole number from 1.
    """

    trajectory_steps: int = 10

    def __post_init__(self) -> None:
        if type(self.trajectory_steps) is not int or self.trajectory_steps < 1:
            raise ConfigurationError(
                f"trajectory_steps is {self.trajectory_steps!r}; it must be a whole number from 1", where="Acceptance"
            )


@dataclass(frozen=True)
class Preset:
    """A size of a recipe.

    Attributes
    ----------
    image_size : int
        Height and width in pixels; 0 in a `UserNetworkRecipe`, whose file determines it.
    batch_size : int
    classes : int
        Number of classes: the first classes of the dataset, and the outputs of the network; 0 as
        above.
    optimizer : Optimizer, optional
        Replaces the recipe's optimizer.
    max_time_s : float
        Sampling budget of a measurement in seconds; ``--benchmark-max-time`` overrides it.
    note : str
        Where the settings come from.
    training : Training, optional
        Settings of ``time_to_accuracy``, which is not measured without them.
    leaves_out : mapping of str to str
        Measurements of the recipe that this preset leaves out, with the reasons.
    acceptance : Acceptance, optional
        Replaces the recipe's acceptance.
    """

    image_size: int
    batch_size: int
    classes: int
    optimizer: Optimizer | None = None
    max_time_s: float = 5.0
    note: str = ""
    training: Training | None = None
    leaves_out: Mapping[str, str] = field(default_factory=dict)
    acceptance: Acceptance | None = None

    def __post_init__(self) -> None:
        for name, (least, most) in SIZES.items():
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= most:
                raise ConfigurationError(
                    f"{name} is {value!r}; it must be a whole number from {least} to {most}", where="Preset"
                )
        if not isinstance(self.max_time_s, int | float) or not 0 <= self.max_time_s < math.inf:
            raise ConfigurationError(
                f"max_time_s is {self.max_time_s!r}; it must be seconds, 0 or more", where="Preset"
            )


@dataclass(frozen=True)
class Recipe(Case, Declaration):
    """One network on one dataset.

    Attributes
    ----------
    name : str
        Name in reports.
    network : str
        Name of a network of the zoo, or the path of an ``.onnx`` file.
    dataset : str
        One of `DATASETS`.
    optimizer : Optimizer
        Neutral settings; ``--optimizer`` changes them.
    presets : mapping of str to Preset
        The first preset is the default. Backends that are too slow are measured at the preset
        ``reduced``, if there is one, whichever preset is requested.
    measurements : sequence of str or type of Measurement
        Names of known measurements, or classes that the recipe file defines.
    acceptance : Acceptance
    label_smoothing : float
        Label smoothing of the loss; see `d5suite.network.Network.with_label_smoothing`.
    formats : sequence of str
        Storage formats, from `d5suite.data.formats.KINDS`; the recipe is measured once per format,
        see `variants`. Without formats, the dataset is used as it is stored.
    on_request : bool
        Whether the recipe is measured only if the command line names its file.
    file : Path
        The Python file that declares the recipe, for messages.
    """

    name: str
    network: str
    dataset: str
    optimizer: Optimizer
    presets: Mapping[str, Preset]
    measurements: Sequence[str | type[Measurement]] = MEASUREMENTS
    acceptance: Acceptance = Acceptance()
    label_smoothing: float = 0.0
    formats: Sequence[str] = ()
    on_request: bool = False
    file: Path = field(default_factory=declared_in, compare=False, repr=False)

    @property
    def knobs(self) -> tuple[str, ...]:  # type: ignore[override]
        """Settings that can be swept; digits and a file have only one image size."""
        own = ("image-size",) if self.dataset in ("imagenet", "openimages") else ()
        return ("threads", "batch-size", "precision", *own)

    def __post_init__(self) -> None:
        if self.dataset not in DATASETS:
            raise ConfigurationError(
                f"unknown dataset {self.dataset!r}", where=self.name, hint=f"Known: {', '.join(DATASETS)}."
            )
        if not self.presets:
            raise ConfigurationError("a recipe needs at least one preset", where=self.name)
        for name, preset in self.presets.items():
            if self.dataset != "inputs" and not (preset.image_size and preset.classes):
                raise ConfigurationError(f"preset {name!r} needs an image size and classes, 1 or more", where=self.name)
        for what, name in (("recipe", self.name), *(("preset", each) for each in self.presets)):
            if not is_plain_name(name):
                raise ConfigurationError(
                    f"a {what} cannot be called {name!r}",
                    where=str(self.file),
                    hint="Files are named after it: no / and \\, no dot in front, at most 100 bytes.",
                )

    @property
    def batch(self) -> str:
        """A recipe has its own job on every backend."""
        return self.name

    @property
    def origin(self) -> str:  # type: ignore[override]
        """The file that declares the recipe."""
        return str(self.file)

    def variants(self) -> list[Recipe]:
        """Return the recipe, or a recipe per storage format, such as ``input_pipeline-hdf5``."""
        if not self.formats:
            return [self]
        return [replace(self, name=f"{self.name}-{each}", formats=(each,)) for each in self.formats]

    def kinds(self) -> list[type[Measurement]]:
        """Return the recipe's measurements, including the measurements with several ranks.

        Raises
        ------
        ConfigurationError
            If a name is unknown.
        """
        own = [find(each) if isinstance(each, str) else each for each in self.measurements]
        names = {each.name for each in own}
        ranked = [each for each in discover().values() if each.ranks_of in names]
        return list(dict.fromkeys([*own, *ranked]))

    def tests(self) -> Iterator[Test]:
        for variant in self.variants():
            for measurement in self.kinds():
                function = "_".join(("test", measurement.name, *variant.formats))
                yield Test(function, measurement, lambda settings, variant=variant: [variant])  # type: ignore[misc]

    def why_excluded(self, measurement: type[Measurement], settings: Settings, path: Path) -> str | None:
        if self.on_request and path not in settings.named:
            return f"measured when its file is named: pytest {path.name}"
        return self._stored_otherwise(settings)

    def _stored_otherwise(self, settings: Settings) -> str | None:
        """Return why a recipe for one storage format does not use the user's dataset, or None."""
        given = settings.datasets.get(self.dataset)
        if not self.formats or given is None:
            return None
        from d5suite.data.formats import kind_of

        try:
            stored = kind_of(given)
        except D5Error:  # the job will report it
            return None
        if stored in self.formats:
            return None
        return f"--{self.dataset} {given} is stored as {stored}; it is not converted"

    def why_unsupported(self, backend: Backend, measurement: type[Measurement], settings: Settings) -> str | None:
        from d5suite.levels.description import NOT_BY_RANKS

        lacking = absent(backend, measurement, format=next(iter(self.formats), None))
        if lacking:
            return lacking
        if measurement.level == 3 and settings.precision in NOT_BY_RANKS:
            return f"level 3 has no {settings.precision}: {NOT_BY_RANKS[settings.precision]}"
        if self._is_reduced(backend) and REDUCED not in self.presets:
            return f"{self.name} has no {REDUCED!r} preset, and {backend.name} needs one: {backend.reduced}"
        if not self._is_reduced(backend) and settings.preset not in (None, *self.presets):
            return None  # `check` raises
        name, chosen = self.sized_preset(backend, settings)
        if measurement.name in chosen.leaves_out:
            return f"preset {name!r} leaves out {measurement.name}: {chosen.leaves_out[measurement.name]}"
        if measurement.trains and chosen.training is None:
            trained = ", ".join(name for name, each in self.presets.items() if each.training) or "none"
            return f"{self.name} is trained to accuracy at other presets only: {trained}"
        return self._lacks_operators(backend, chosen) if measurement.runs_network else None

    def _lacks_operators(self, backend: Backend, preset: Preset) -> str | None:
        """Return which operators of a network of the zoo a backend lacks, or None.

        A backend with all operators that d5suite expects has the operators of the zoo, so no
        network is built for it. For other networks, the worker reports what is missing.
        """
        from d5suite.network.operators import MORE_OPERATORS, ZOO_OPERATORS

        if self.network.endswith(".onnx") or not (ZOO_OPERATORS | MORE_OPERATORS) - backend.operators:
            return None
        try:
            needed = _operators(self.network, preset.classes, preset.image_size, self.label_smoothing,
                                several_labels=self.dataset == "openimages",
                                inference_only="gradient" in backend.absent)  # fmt: skip
        except D5Error:  # the job will report it
            return None
        lacking = sorted(needed - backend.operators)
        return f"{backend.name} has no operator {', '.join(lacking)} of {self.network}" if lacking else None

    def check(self, backend: Backend, measurement: type[Measurement], settings: Settings) -> None:
        from d5suite.data.drawing import MAX_CLASSES

        name, preset = self.sized_preset(backend, settings)
        batch = settings.batch_size or preset.batch_size
        self._require_memory(settings, batch, 3 * 4 * preset.image_size**2)
        if self.dataset == "digits" or settings.datasets.get(self.dataset) is not None:
            return
        where = f"{self.name}, preset {name!r}"
        if measurement.trains and preset.training is not None and preset.training.source:
            raise ConfigurationError(
                f"target {preset.training.metric} {preset.training.target} needs the real {self.dataset}; without "
                f"--{self.dataset}, images are synthetic",
                where=where,
                hint=f"Give --{self.dataset} PATH, or leave this measurement out: -k 'not {measurement.name}'.",
            )
        if preset.classes > MAX_CLASSES:
            raise ConfigurationError(
                f"this needs a dataset of {preset.classes} classes, and drawn images have at most {MAX_CLASSES}",
                where=where,
                hint=f"Give --{self.dataset} PATH.",
            )

    def _require_memory(self, settings: Settings, batch: int, sample_bytes: int) -> None:
        """Raise `ConfigurationError` if the inputs of one batch exceed the free memory."""
        if settings.elsewhere is not None:
            return
        from d5suite.instruments.control_groups import available_memory

        free = min(settings.memory_bytes, available_memory())
        if batch * sample_bytes > free:
            raise ConfigurationError(
                f"a batch of {batch:,} needs {batch * sample_bytes / 2**30:,.1f} GiB for its inputs alone, and "
                f"{free / 2**30:,.1f} GiB are free",
                where=f"--batch-size {batch}" if settings.batch_size else self.name,
                hint="Give a smaller --batch-size.",
            )

    def uses_option(self, option: str) -> bool:
        return option == self.dataset

    def job(
        self, selection: Selection | None, settings: Settings, measurements: list[str], files: dict[str, str],
        shared: Shared,
    ) -> NetworkCase:  # fmt: skip
        assert selection is not None
        name, preset = self.sized_preset(selection.backend, settings)
        network = {"onnx" if self.network.endswith(".onnx") else "zoo": self.network}
        optimizer = settings.optimizer or preset.optimizer or self.optimizer
        return NetworkCase(
            name=self.name,
            preset=name,
            measurements=measurements,
            files=files,
            sampling={"max_time_s": preset.max_time_s, **settings.sampling},
            reference=shared.reference,
            network={
                **network,
                "classes": preset.classes,
                "image_size": preset.image_size,
                "label_smoothing": self.label_smoothing,
                "several_labels": self.dataset == "openimages",
            },
            dataset={"kind": self.dataset, "root": self._root(settings, preset.classes)},
            batch_size=settings.batch_size or preset.batch_size,
            optimizer=optimizer.to_dict(),
            validation_steps=(preset.acceptance or self.acceptance).trajectory_steps,
            training=preset.training.to_dict() if preset.training else {},
            peers=shared.peers,
            trajectory=shared.trajectory,
        )

    def _root(self, settings: Settings, classes: int) -> str:
        """Return the dataset's path; empty for a dataset that comes with a library."""
        if self.dataset == "digits":
            return ""
        given = settings.datasets.get(self.dataset)
        if given is not None:
            return str(given.resolve())
        from d5suite.data.synthesis import cached_conversion, cached_imagenet, cached_openimages

        # Drawing a thousand classes takes long, and only speed is measured: few images per class.
        train = max(LEAST_PER_CLASS, SYNTHETIC_IMAGES // classes)
        if self.dataset == "openimages":
            root = cached_openimages(classes)
        else:
            root = cached_imagenet(classes=classes, train_per_class=train, val_per_class=-(-train // 4))
        converted = [each for each in self.formats if each != "folder"]
        return str(cached_conversion(root, converted[0]) if converted else root)

    def facts(self, part: CaseJob, result: Result) -> dict[str, Any]:
        assert isinstance(part, NetworkCase)
        return {
            **result.facts[self.name],
            "batch_size": part.batch_size,
            "image_size": part.network["image_size"],
            "classes": part.network["classes"],
            "optimizer": part.optimizer,
        }

    def preset_name(self, selection: Selection | None, settings: Settings) -> str:
        assert selection is not None
        return self.preset_for(selection.backend, settings.preset)[0]

    def time_limit_s(self, selection: Selection, settings: Settings, trains: bool) -> float:
        _, preset = self.preset_for(selection.backend, settings.preset)
        if preset.training is None or not trains:
            return TIME_LIMIT_S
        return math.inf if preset.training.time_limit_s is None else preset.training.time_limit_s

    def preset_for(self, backend: Backend, name: str | None) -> tuple[str, Preset]:
        """Return the preset at which a backend runs if ``name`` is requested; None: the default."""
        return self.preset(REDUCED if self._is_reduced(backend) else name)

    def sized_preset(self, backend: Backend, settings: Settings) -> tuple[str, Preset]:
        """Return the preset of `preset_for`, with the image size of the sweep, if any."""
        name, preset = self.preset_for(backend, settings.preset)
        return name, replace(preset, image_size=settings.image_size) if settings.image_size else preset

    def _is_reduced(self, backend: Backend) -> bool:
        """Return whether a backend is too slow for the recipe; False if no network runs."""
        return bool(backend.reduced) and any(each.runs_network for each in self.kinds())

    def preset(self, name: str | None) -> tuple[str, Preset]:
        """Return the preset with this name; None is the default.

        Raises
        ------
        ConfigurationError
            If there is no such preset.
        """
        if name is None:
            name = next(iter(self.presets))
        if name not in self.presets:
            raise ConfigurationError(
                f"recipe {self.name!r} has no preset {name!r}", hint=f"Its presets: {', '.join(self.presets)}."
            )
        return name, self.presets[name]


@lru_cache
def _operators(
    network: str, classes: int, image_size: int, label_smoothing: float, *, several_labels: bool, inference_only: bool
) -> frozenset[str]:
    """Return the operators of a network of the zoo, with the loss or only up to the outputs."""
    from d5suite.network.zoo import build

    made = build(network, classes=classes, image_size=image_size)
    made = made.with_multilabel_loss() if several_labels else made.with_label_smoothing(label_smoothing)
    nodes = made.nodes_for(made.outputs) if inference_only else made.nodes
    return frozenset(node.op_type for node in nodes)
