"""The recipe for a user's own network: ``--network FILE.onnx``, with ``--shape`` where needed.

Imports neutral settings, jobs and networks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from d5suite.cases.case import Settings, Shared, Test, absent
from d5suite.cases.recipe import Recipe
from d5suite.errors import ConfigurationError, UnsupportedOperatorError
from d5suite.job import CaseJob, NetworkCase, Result, is_plain_name
from d5suite.measurements.base import Measurement
from d5suite.network.given_inputs import Given as Given
from d5suite.network.given_inputs import parse_inputs as parse_inputs
from d5suite.network.given_inputs import read_sample
from d5suite.network.user_network import UserNetwork, load_user_network
from d5suite.network.user_network import parse_shapes as parse_shapes

if TYPE_CHECKING:
    from d5suite.backends import Selection
    from d5suite.levels.backend import Backend


CLIPPED = 1.0
"""Norm to which gradients of a squared error are clipped, unless ``--optimizer`` is given: outputs
may have any scale, and a step that is too large for the scale diverges."""


@dataclass(frozen=True)
class UserNetworkRecipe(Recipe):
    """Any network, on random inputs; `Recipe.network` is the network's file.

    Attributes
    ----------
    shapes : mapping of str to sequence of int
        Dimensions by input, where the file leaves the dimensions open.
    inputs : mapping of str to Given
        Values, or ranges of values, by input.
    sample : str
        Path of an ``.npz`` file with inputs, or empty.
    """

    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    inputs: Mapping[str, Given] = field(default_factory=dict)
    sample: str = ""

    every_backend = True

    def tests(self) -> Iterator[Test]:
        for measurement in self.kinds():
            yield Test(f"test_{measurement.name}", measurement, lambda settings: [self._of(settings)])

    def _of(self, settings: Settings) -> UserNetworkRecipe:
        """Return the recipe for the network in the options, named after the network's file."""
        path = settings.network
        if path is None:
            return self
        name = path.stem if is_plain_name(path.stem) else self.name
        case = replace(
            self,
            name=name,
            network=str(path.resolve()),
            shapes=settings.shapes,
            inputs=settings.inputs,
            sample="" if settings.sample is None else str(settings.sample.resolve()),
        )
        loaded = case._loaded(settings, self.preset(settings.preset)[1].batch_size)  # report errors at once
        loaded.check_inputs(settings.inputs, _read_sample(case.sample) if case.sample else {})
        return case

    def _loaded(self, settings: Settings, batch_size: int) -> UserNetwork:
        shapes = tuple(sorted((name, tuple(shape)) for name, shape in self.shapes.items()))
        return _load(self.network, shapes, tuple(sorted(self.inputs.items())), settings.batch_size or batch_size)

    def why_excluded(self, measurement: type[Measurement], settings: Settings, path: Path) -> str | None:
        return None if self.network else "measured with --network FILE.onnx"

    def why_unsupported(self, backend: Backend, measurement: type[Measurement], settings: Settings) -> str | None:
        lacking = absent(backend, measurement)
        if lacking or not self.network:
            return lacking
        given = self._loaded(settings, self.preset_for(backend, settings.preset)[1].batch_size)
        if given.unread and not backend.reads_files:
            return given.unread
        if given.untrainable and "gradient" in measurement.needs:
            return f"{self.name} has no {measurement.name}: {given.untrainable}"
        if backend.runs_as_written(given.network):
            return None
        if measurement.level == 3 and not given.network.batched:
            return f"{self.name} has no {measurement.name}: the inputs have no common first axis, the batch"
        try:
            backend.check_operators(given.network)
        except UnsupportedOperatorError as error:
            return error.what
        return None

    def check(self, backend: Backend, measurement: type[Measurement], settings: Settings) -> None:
        batch = self.preset_for(backend, settings.preset)[1].batch_size
        network = self._loaded(settings, batch).network
        fixed = network.batch_size
        if settings.batch_size not in (None, fixed or settings.batch_size):
            raise ConfigurationError(
                f"the network fixes its batch size, {fixed}", where=f"--batch-size {settings.batch_size}"
            )
        if network.batched:
            sample = 0
            for each in network.inputs:
                sizes = [size or 1 for size in network.shapes[each][1:]]
                sample += math.prod(sizes) * network.dtypes[each].itemsize
            self._require_memory(settings, fixed or settings.batch_size or batch, sample)

    def uses_option(self, option: str) -> bool:
        return option == "network"

    def job(
        self, selection: Selection | None, settings: Settings, measurements: list[str], files: dict[str, str],
        shared: Shared,
    ) -> NetworkCase:  # fmt: skip
        assert selection is not None
        part = super().job(selection, settings, measurements, files, shared)
        network, optimizer = self._loaded(settings, part.batch_size).network, part.optimizer
        written = selection.backend.runs_as_written(network)
        if settings.optimizer is None and network.has_targets:
            optimizer = {**optimizer, "clip_norm": optimizer.get("clip_norm") or CLIPPED}
        fixed = network.batch_size
        return replace(
            part,
            network={
                "given": self.network,
                "shapes": {name: list(shape) for name, shape in self.shapes.items()},
                **({"inputs": _plain(self.inputs)} if self.inputs else {}),
                **({"sample": self.sample} if self.sample else {}),
                **({"as_written": True} if written else {}),
            },
            batch_size=fixed or part.batch_size,
            optimizer=optimizer,
        )

    def _root(self, settings: Settings, classes: int) -> str:
        return ""

    def facts(self, part: CaseJob, result: Result) -> dict[str, Any]:
        assert isinstance(part, NetworkCase)
        return {**result.facts[self.name], "batch_size": part.batch_size, "optimizer": part.optimizer}


@lru_cache(maxsize=2)
def _load(
    path: str, shapes: tuple[tuple[str, tuple[int, ...]], ...], inputs: tuple[tuple[str, Given], ...], batch_size: int
) -> UserNetwork:
    return load_user_network(path, shapes=dict(shapes), batch_size=batch_size, given=dict(inputs))


@lru_cache(maxsize=1)
def _read_sample(path: str) -> dict[str, np.ndarray]:
    return read_sample(Path(path))


def _plain(inputs: Mapping[str, Given]) -> dict[str, Any]:
    """Return values and ranges as JSON types."""
    return {name: list(each) if isinstance(each, Sequence) else each for name, each in inputs.items()}
