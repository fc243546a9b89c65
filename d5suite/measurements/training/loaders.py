"""Steps that load images, for the measurements of input pipelines."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from d5suite.data.formats import open_store
from d5suite.data.sources import ImageNetSource
from d5suite.errors import ConfigurationError, ValidationError
from d5suite.instruments.clock import now
from d5suite.instruments.sampling import Samples
from d5suite.instruments.settings import SamplingSettings
from d5suite.instruments.threads import allowed_cpus
from d5suite.measurements.base import Phase, Step
from d5suite.measurements.schemas import choice, integer, number, record, text
from d5suite.measurements.training.loader_proof import prove_known_images
from d5suite.validate.check import Check
from d5suite.validate.norms import relative_l2
from d5suite.workloads.network import NetworkWorkload

LOADER_BATCHES = 8
"""Batches per sample of a loader: several, because loaders deliver batches in bursts."""

LOADER_IMAGES = 128
"""Fewest images per sample of a loader; more than `LOADER_BATCHES` if batches are small."""

LOADER_SPREAD = 0.5
"""Accepted relative difference between the standard deviations of a batch from the framework's own
loader and one from d5suite's. They hold different images; a forgotten normalisation is off by a
factor of four."""


FORMAT = choice("folder", "hdf5", "tfrecord", "recordio", description="how the images are stored")

SCHEMA = record(
    {
        "loader": text("name of the loader"),
        "loader_workers": integer("its processes or threads", minimum=0),
        "batches_per_sample": integer("batches of one sample; its time is divided by them", minimum=1),
        "format": FORMAT,
        "images_per_s_per_core": number("of the cores it may use", exclusiveMinimum=0),
        "wait_s": number("median time that a request for a batch blocks", minimum=0),
    },
    optional=["format"],
)
"""The part of the record that all loaders share."""


def batches_per_sample(workload: NetworkWorkload) -> int:
    """Return the number of batches in one sample of a loader."""
    return max(LOADER_BATCHES, -(-LOADER_IMAGES // workload.case.batch_size))


Opener = Callable[[NetworkWorkload], contextlib.AbstractContextManager[Iterator[Any]]]
"""Starts a loader; its context yields the batches."""


@contextlib.contextmanager
def neutral_batches(workload: NetworkWorkload) -> Iterator[Iterator[Any]]:
    """Start d5suite's own loader."""
    with workload.loader() as loader:
        yield loader.batches()


class LoadingStep(Step):
    """Several batches from a loader. The time spent waiting for them is recorded separately.

    Parameters
    ----------
    workload : NetworkWorkload
    loader : str
        The loader's name in results.
    opener : Opener

    Attributes
    ----------
    taken : int
        Batches since timing began.
    first, last : tuple or None
        The last batch of the first and of the last call.
    """

    _batches: Iterator[Any]
    _running: contextlib.AbstractContextManager[Iterator[Any]]
    first: tuple[np.ndarray, np.ndarray] | None = None

    def __init__(self, workload: NetworkWorkload, loader: str, opener: Opener) -> None:
        self._opener = opener
        self.workload = workload
        self.loader = loader
        self.count = batches_per_sample(workload)
        self.items = self.count * workload.case.batch_size
        self._waits: list[float] = []
        self.taken = 0
        self.last: Any = None

    def __enter__(self) -> Step:
        """Start the loader."""
        self._running = self._opener(self.workload)
        self._batches = self._running.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        """Stop the loader; the last batch may lie in its memory."""
        self.last = None if self.last is None else copied(self.last)
        self._running.__exit__(None, None, None)

    def time(self, settings: SamplingSettings) -> Samples:
        self.taken = 0
        return super().time(settings)

    def next_input(self) -> None:
        """Free the last batch, as training does, but keep a copy of the first one."""
        if self.first is None and self.last is not None:
            self.first = copied(self.last)
        self.last = None

    def use(self, batch: Any) -> None:
        """Use a batch as training does."""

    def phases(self) -> Iterable[Phase]:
        yield from super().phases()
        yield Phase(self, "_batches", "wait for data", "iterator", "file_io")
        yield Phase(self, "use", "use a batch")

    def run(self) -> object:
        for _ in range(self.count):
            start = now()
            batch = next(self._batches)
            self._waits.append(now() - start)
            self.use(batch)
        self.taken += self.count
        self.last = batch
        return None

    def call_first(self) -> None:
        """Do nothing: a loader has not started yet, and the sampler makes the first call."""

    def _sampled_waits(self, samples: int) -> list[float]:
        return self._waits[-self.count * samples :]  # without those of the warm-up

    def record(self, samples: Samples) -> dict[str, Any]:
        found = {
            "loader": self.loader,
            "loader_workers": self.workload.job.loader_workers,
            "batches_per_sample": self.count,
            "images_per_s_per_core": self.items / samples.median_s / len(allowed_cpus()),
            "wait_s": float(np.median(self._sampled_waits(len(samples.samples_s)))),
        }
        self._waits = self._sampled_waits(len(samples.samples_s))
        if self.workload.stored_as is not None:
            found["format"] = self.workload.stored_as
        return found

    def series(self) -> dict[str, list[float]]:
        return {"wait_s": self._waits}


def native_batches(workload: NetworkWorkload) -> contextlib.AbstractContextManager[Iterator[Any]]:
    """Start the framework's own loader."""
    return contextlib.closing(native_loader(workload))


def native_loader(workload: NetworkWorkload) -> Any:
    """Return the framework's own loader of the same files and transform; the caller closes it.

    Raises
    ------
    ConfigurationError
        If there is no such loader for the dataset and its storage format.
    """
    if workload.job.loader_workers < 1:
        raise ConfigurationError("comparing loaders needs at least one loader worker", hint="Use --loader-workers.")
    stored, root = workload.stored_as, workload.case.dataset["root"]
    source = workload.source
    if not isinstance(source, ImageNetSource) or source.several:
        raise ConfigurationError("frameworks' own loaders are compared on images with one label", where=root)
    if f"loader:{stored}" in workload.backend.absent:
        raise ConfigurationError(workload.backend.absent[f"loader:{stored}"], where=f"loader:{stored}")
    images = source.training_set
    if stored in ("tfrecord", "recordio") and len(images) < len(open_store(root, "train")):
        raise ConfigurationError(
            f"frameworks' own readers of record files take all classes, and this preset the first "
            f"{workload.case.network['classes']}",
            where=root,
            hint="Choose a preset with as many classes as the dataset.",
        )
    return workload.backend.load("loader").native_loader(
        images,
        source.training_transform,
        batch_size=workload.case.batch_size,
        workers=workload.job.loader_workers,
        seed=workload.job.seed,
    )


def native_loader_name(workload: NetworkWorkload) -> str:
    """Return the name of the framework's own loader for the dataset's format."""
    name: str = workload.backend.load("loader").NAMES[workload.stored_as]
    return name


def copied(batch: Any) -> tuple[np.ndarray, np.ndarray]:
    """Copy a native batch's images and labels to arrays."""
    images, labels = (np.array(part) for part in batch)
    return images, labels


def prove_neutral_loader(workload: NetworkWorkload) -> Iterator[Check]:
    """Compare pixels from loader processes with the same images decoded in this process."""
    return check_neutral_batch(workload, workload.batches[0], 0, "")


def check_neutral_batch(workload: NetworkWorkload, batch: Any, number: int, name: str) -> Iterator[Check]:
    """Compare a batch of d5suite's loader with the same images decoded in this process.

    Parameters
    ----------
    workload : NetworkWorkload
    batch : tuple
        Images and labels.
    number : int
        The batch's number since the loader started, from 0.
    name : str
        The batch in words, such as " of the last timed batch".
    """
    with workload.loader(workers=0) as inline:
        epoch, start = divmod(number, len(inline))
        images, labels = next(inline.epoch(epoch, start=start))
    yield Check(f"pixels{name} from workers vs decoded in process", relative_l2(batch[0], images), 0.0)
    yield Check(f"labels{name} from workers vs decoded in process", relative_l2(batch[1], labels), 0.0)


def prove_native_loader(workload: NetworkWorkload) -> Iterator[Check]:
    """Check a batch of the framework's own loader, and, once per case, its known images."""
    with native_batches(workload) as native:
        yield from check_native_batch(workload, copied(next(native)), "")
    yield from workload.once(
        "known images",
        lambda: prove_known_images(
            workload.backend.load("loader").native_loader,
            stored=workload.stored_as or "folder",
            size=workload.batches[0][0].shape[-1],
            workers=workload.job.loader_workers,
            seed=workload.job.seed,
        ),
    )


def check_native_batch(workload: NetworkWorkload, batch: Any, name: str, before: Any = None) -> Iterator[Check]:
    """Check shape, labels and spread of a batch of the framework's own loader.

    The loader chooses order and crops, so no pixel is known.

    Parameters
    ----------
    workload : NetworkWorkload
    batch : tuple
        Native images and labels.
    name : str
        The batch in words, such as "the last timed batch of ".
    before : tuple, optional
        An earlier batch, which must differ.
    """
    images, labels = copied(batch)
    expected, classes = workload.batches[0][0], workload.case.network["classes"]
    if images.size != expected.size or len(labels) != len(expected):
        raise ValidationError(f"{name}the framework's own loader gives images of shape {images.shape}")
    if labels.min() < 0 or labels.max() >= classes:
        raise ValidationError(
            f"{name}the framework's own loader gives labels from {labels.min()} to {labels.max()}, of {classes} classes"
        )
    difference = abs(float(images.std()) - float(expected.std())) / float(expected.std())
    yield Check(f"spread of the pixels of {name}the framework's own loader", difference, LOADER_SPREAD)
    if before is not None:
        same = float(np.array_equal(images, before[0]))
        yield Check(f"{name}the framework's own loader is the first one again", same, 0.0)
