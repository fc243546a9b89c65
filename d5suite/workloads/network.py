"""A network on a dataset: the data, executors and trainer that all measurements share."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import itertools
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from d5suite.backends import Selection
from d5suite.data.digits import Digits
from d5suite.data.drawing import class_name
from d5suite.data.formats import stored_as
from d5suite.data.formats.store import Store
from d5suite.data.imagenet import ImageNet
from d5suite.data.loader import check_workers
from d5suite.data.openimages import SparseLabels
from d5suite.data.random_inputs import RandomSource
from d5suite.data.sources import SOURCES, DataSource, ImageNetSource, Stream
from d5suite.errors import JobError, NetworkError
from d5suite.files import read_json, write_json
from d5suite.instruments.clock import now
from d5suite.instruments.threads import allowed_cpus
from d5suite.job import Job, NetworkCase
from d5suite.levels.description import capped
from d5suite.levels.network import Arrays, Executor, Native
from d5suite.levels.training import Trainer
from d5suite.network import Network
from d5suite.network.analysis import analyse
from d5suite.network.as_written import load_as_written
from d5suite.network.held import alive_bytes
from d5suite.network.layers import LayerFacts, layer_facts
from d5suite.network.user_network import load_user_network
from d5suite.network.zoo import build
from d5suite.optimizers.settings import Optimizer, optimizer_from_dict
from d5suite.validate.network.gradient_references import GradientReferences
from d5suite.validate.network.inference import ExpectedOutputs, check_reading
from d5suite.validate.training.amplification import ProvedRun
from d5suite.workloads.base import Workload
from d5suite.workloads.drawn import drawn_source, given_in_words

ORACLE_BATCH = 8
"""Most images per batch in ONNX's reference evaluator and in float64 training, which are slow."""

FEWEST = 4
"""Fewest images in such a batch, unless the whole batch has fewer: batch statistics of one or two
images are not useful."""

FEEDS = 4
"""Number of batches that timed training steps cycle through, so that none is overfitted."""

Batch = tuple[np.ndarray, np.ndarray]
"""Images, float32 (N, C, H, W), and labels, or targets of a squared error."""


def load_network(case: NetworkCase, seed: int) -> Network:
    """Return the case's network with a loss, in neutral form.

    Parameters
    ----------
    case : NetworkCase
    seed : int
        Seed for the weights of a network from the zoo.

    Raises
    ------
    NetworkError
        If the network cannot be read.
    JobError
        If the network does not fit the case's image size or batch size.
    """
    settings = case.network
    several = bool(settings.get("several_labels"))
    smoothing = settings.get("label_smoothing", 0.0)
    if "given" in settings:
        path, shapes, given = settings["given"], settings["shapes"], settings.get("inputs")
        if settings.get("as_written"):
            return load_as_written(path, shapes=shapes, given=given)
        return load_user_network(path, shapes=shapes, batch_size=case.batch_size, given=given).network
    if "zoo" in settings:
        found = build(settings["zoo"], classes=settings["classes"], image_size=settings["image_size"], seed=seed)
        return found.with_multilabel_loss() if several else found.with_label_smoothing(smoothing)
    network = Network.load(settings["onnx"])
    if any(node.op_type == "Shape" for node in network.nodes):  # it computes with its batch size
        size = settings["image_size"]
        network = Network.load(settings["onnx"], shapes={network.input: (case.batch_size, 3, size, size)})
    if several:
        network = network.with_multilabel_loss()
    else:
        network = network.with_classification_loss().with_label_smoothing(smoothing)
    fixed = network.batch_size
    expected = (fixed, 3, settings["image_size"], settings["image_size"])
    if network.shapes[network.input] != expected or fixed not in (None, case.batch_size):
        raise JobError(
            f"the network takes images of shape {network.shapes[network.input]}; the job has batches of "
            f"{case.batch_size} images of {settings['image_size']} px",
            where=settings["onnx"],
            hint="Choose a preset, --batch-size and image size that fit.",
        )
    return network


def turned(images: np.ndarray, quarters: int) -> np.ndarray:
    """Rotate square images by quarter turns, which yields further valid inputs."""
    return np.ascontiguousarray(np.rot90(images, quarters, axes=(2, 3)))


class NetworkWorkload(Workload):
    """A network on a dataset, on one backend.

    Parameters
    ----------
    job : Job
    case : NetworkCase
    selection : Selection

    Raises
    ------
    D5Error
        If the network or dataset cannot be used.

    Attributes
    ----------
    expected_outputs : ExpectedOutputs
        An evaluator's outputs for the batches that inference takes in turn, and for a batch that is
        fed after timing; set when inference is proved.
    outputs_tolerance : float
        Accepted error of these outputs; set when inference is proved.
    references : GradientReferences
        Float64 gradients at the generic point; set when gradients are proved.
    drawn : tuple
        With Dropout: a random state, and the `sampled` answer to the first batch from that state;
        set when gradients are proved.
    proved_run : ProvedRun
        A short training run in float64; set when the run is proved.
    proved_losses : tuple
        With several ranks: this rank's losses of the float64 run, and the name of the run; set when
        the scheme is proved.
    warnings : list of str
        Warnings about the network, for readers of the results.
    """

    kind = "network"

    expected_outputs: ExpectedOutputs
    outputs_tolerance: float
    references: GradientReferences
    drawn: tuple[Arrays, Arrays]
    proved_run: ProvedRun
    proved_losses: tuple[list[float], str]

    def __init__(self, job: Job, case: NetworkCase, selection: Selection) -> None:
        super().__init__(job, case, selection)
        self.case = case
        self.reference = case.reference
        self.optimizer: Optimizer = optimizer_from_dict(case.optimizer)
        self.tolerance, wide = capped(
            self.backend.tolerances[job.precision], job.precision, trains="gradient" not in self.backend.absent
        )
        self._built_s: dict[str, float] = {}
        self._shards: dict[tuple[int, int], list[Batch]] = {}
        self.warnings: list[str] = [wide] if wide else []
        check_workers(job.loader_workers, len(allowed_cpus()))

    @cached_property
    def network(self) -> Network:
        """The case's network."""
        network = load_network(self.case, self.job.seed)
        self.backend.check_operators(network)
        return network

    @cached_property
    def plain_network(self) -> Network:
        """The network without Dropout, because no two frameworks draw the same random values."""
        if self.network.as_written:
            self.warnings.append("the file is run as it is written, because d5suite does not read it")
        elif "given" in self.case.network:
            self._prove_reading()
        return self.network.without_dropout()

    def _prove_reading(self) -> None:
        """Compare the graph's answer with the answer of the file, once for all backends."""
        done = Path(self.reference).with_suffix(".json") if self.reference else None
        key = self.fingerprint()["network"]
        if done is not None and done.exists() and (known := read_json(done))["reading"] == key:
            self._note_reading(known["skipped"])
            return
        file = Path(self.case.network["given"])
        given = self.case.network.get("inputs")
        skipped = check_reading(file, self.network, self.evaluation_batch(0), threads=self.job.threads, given=given)
        self._note_reading(skipped)
        if done is not None:
            write_json(done, {"reading": key, "skipped": skipped})

    def _note_reading(self, skipped: str) -> None:
        if skipped:
            self.warnings.append(f"what is measured was not compared with the file's own answer: {skipped}")
            print(f"{self.case.network['given']}: {self.warnings[-1]}")

    @cached_property
    def generic_network(self) -> Network:
        """The plain network with noise on its weights, for checks of outputs and gradients."""
        return self.plain_network.at_generic_point()

    @cached_property
    def macs(self) -> int:
        """Multiply-accumulates of one forward pass of the batch."""
        return analyse(self.network, batch_size=self.case.batch_size).macs

    # Data.

    @cached_property
    def layer_facts(self) -> dict[str, LayerFacts]:
        """The counted work of every node, for the job's batch size and precision."""
        size = {"fp64": 8, "fp32": 4}.get(self.job.precision, 2)
        return layer_facts(self.network, batch_size=self.case.batch_size, bytes_per_value=size)

    @cached_property
    def source(self) -> DataSource:
        """The dataset."""
        if self.is_drawn:
            return drawn_source(self.network, self.case.network, seed=self.job.seed)
        channels, height, width = (n or 0 for n in self.network.shapes[self.network.input][1:])
        chosen = SOURCES[self.case.dataset["kind"]]
        return chosen(
            Path(self.case.dataset["root"]), classes=self.case.network["classes"], shape=(channels, height, width)
        )

    @property
    def is_drawn(self) -> bool:
        """Whether inputs are drawn at random, batch by batch."""
        return self.case.dataset["kind"] == "inputs"

    @cached_property
    def stored_as(self) -> str | None:
        """The dataset's storage format; None if the dataset comes with a library."""
        return stored_as(self.source.training_set) if isinstance(self.source, ImageNetSource) else None

    def facts(self) -> dict[str, Any]:
        left_out = self.source.left_out() if isinstance(self.source, ImageNetSource) else []
        dataset = {**self.dataset, **({"left_out": left_out} if left_out else {})}
        return {"dataset": dataset, **({"warnings": self.warnings} if self.warnings else {})}

    @cached_property
    def dataset(self) -> dict[str, Any]:
        """Description of the data, as in ``results/schema.json``, without paths of this machine."""
        source, kind = self.source, self.case.dataset["kind"]
        digest = hashlib.sha256()
        if isinstance(source, RandomSource):
            given = given_in_words(self.case.network)
            digest.update(repr(source.inputs).encode())
            digest.update(Path(self.case.network["given"]).read_bytes())
            if given:
                digest.update(repr(given).encode())
            found = {"kind": kind, "synthetic": True, "images": self.case.batch_size, "digest": digest.hexdigest()}
            return {**found, "inputs": given} if given else found
        if not isinstance(source, ImageNetSource):
            digits = Digits("train")
            digest.update(digits.labels.tobytes())  # computed pixels may differ in the last bit between machines
            return {"kind": kind, "synthetic": False, "images": len(digits), "digest": digest.hexdigest()}
        images = source.training_set
        names: Iterable[Any] = images.names if isinstance(images, Store) else images.files
        for name in names:  # without folders, which differ between trees of the same images
            digest.update(f"{str(name).rpartition('/')[2]}\n".encode())
        labels = images.labels
        arrays = (labels.starts, labels.classes, labels.values) if isinstance(labels, SparseLabels) else (labels,)
        for array in arrays:
            digest.update(np.asarray(array, np.int64).tobytes())
        known = enumerate(images.wnids if isinstance(images, ImageNet) else images.label_names)
        return {
            "kind": kind,
            "synthetic": all(images.class_names.get(name) == class_name(number) for number, name in known),
            "images": len(images),
            "format": self.stored_as,
            "digest": digest.hexdigest(),
        }

    def fingerprint(self) -> dict[str, str]:
        model = self.network.model.SerializeToString(deterministic=True)
        return {
            "network": hashlib.sha256(model).hexdigest()[:12],
            "data": self.dataset["digest"][:12],
            "batch": str(self.case.batch_size),
            "optimizer": ", ".join(f"{key}={value}" for key, value in self.case.optimizer.items()),
        }

    def loader(self, workers: int | None = None, *, seed: int | None = None) -> Stream:
        """Return d5suite's input pipeline for training."""
        return self.source.training(
            batch_size=self.case.batch_size,
            workers=self.job.loader_workers if workers is None else workers,
            seed=self.job.seed if seed is None else seed,
        )

    @cached_property
    def batches(self) -> list[Batch]:
        """The first training batches, decoded from files: at least one per validation step."""
        with self.loader() as loader:
            count = max(self.case.validation_steps, FEEDS) + self.is_drawn  # one is fed after timing
            return [(images.copy(), labels.copy()) for images, labels in itertools.islice(loader.batches(), count)]

    def batches_of(self, shard: int, shards: int) -> list[Batch]:
        """Return the first training batches of one rank's shard of the dataset."""
        known = self._shards.setdefault((shard, shards), [])
        if not known:
            with self.source.training(
                batch_size=self.case.batch_size, workers=0, seed=self.job.seed, shard=(shard, shards)
            ) as loader:
                known += [
                    (images.copy(), labels.copy()) for images, labels in itertools.islice(loader.batches(), FEEDS)
                ]
        return known

    @cached_property
    def evaluation_images(self) -> np.ndarray:
        """One batch of validation images as evaluation gets them: float32 (N, C, H, W).

        If the dataset has fewer images than a batch, images are repeated, every repetition shifted
        by one more column: equal images could be computed only once.
        """
        with self.source.evaluation(batch_size=self.case.batch_size, workers=0) as stream:
            images = next(stream.epoch(0))[0]
        copies = [np.roll(images, number, axis=-1) for number in range(-(-self.case.batch_size // len(images)))]
        return np.concatenate(copies)[: self.case.batch_size]

    def evaluation_batch(self, number: int) -> np.ndarray:
        """Return the evaluation batch with this number; other numbers give other batches."""
        if self.is_drawn:
            with self.source.evaluation(batch_size=self.case.batch_size, workers=0) as stream:
                return next(stream.epoch(number))[0]
        return turned(self.evaluation_images, number)

    def arrays(self, batch: Batch) -> dict[str, np.ndarray]:
        """Return a batch under the network's input names."""
        label, _ = self.network.require_loss()
        return {**self.network.arrays(batch[0]), label: batch[1]}

    def fed(self, index: int) -> Batch:
        """Return a training batch as steps take it: the first images, repeated to fill the batch.

        Loss, gradients and BatchNormalization's statistics are means over the batch, so they do not
        change with repetitions: float64 references of a few images hold for a large batch.
        """
        return self.repeated(*self.batches[index])

    @property
    def unseen(self) -> Batch:
        """A batch that is never fed before timing.

        This is the first batch with rotated images and reversed labels; with drawn inputs, the last
        batch.
        """
        if self.is_drawn:
            return self.repeated(*self.batches[-1])
        images, labels = self.batches[0]
        count = self.oracle_batch
        return self.repeated(turned(images[:count], 1), labels[:count][::-1])

    def repeated(self, images: np.ndarray, labels: np.ndarray) -> Batch:
        """Repeat a batch's first few images to fill the batch."""
        count = self.oracle_batch
        if count == len(images) == self.case.batch_size:
            return images, labels
        return tuple(np.resize(each[:count], (self.case.batch_size, *each.shape[1:])) for each in (images, labels))  # type: ignore[return-value]

    def feed(self, index: int = 0) -> Native:
        """Feed a training batch to the device."""
        return self.executor.feed(self.arrays(self.fed(index % FEEDS)))

    def feed_whole(self, index: int) -> Native:
        """Feed a training batch without repeated images to the device."""
        return self.executor.feed(self.arrays(self.batches[index % FEEDS]))

    def feed_evaluation(self, number: int) -> Native:
        """Feed an evaluation batch to the device."""
        return self.executor.feed(self.network.arrays(self.evaluation_batch(number)))

    # Native code.

    @cached_property
    def executor(self) -> Executor:
        """The network as it is timed: the same object is proved and timed."""
        network, start = self.network, now()
        made = self.backend.executor(
            network, mode=self.selection.mode, device=self.job.device, precision=self.job.precision
        )
        self._built_s["executor"] = now() - start
        return made

    @cached_property
    def trainer(self) -> Trainer:
        """The optimizer on `executor`."""
        executor, start = self.executor, now()
        made = self.backend.trainer(executor, self.optimizer)
        self._built_s["trainer"] = now() - start
        return made

    def built_s(self, *, trainer: bool = False) -> float:
        """Return the seconds that it took to build `executor` and, if asked, the trainer.

        Builds them now if they do not exist yet.
        """
        built = (self.executor, self.trainer) if trainer else (self.executor,)
        return sum(self._built_s[part] for part, _ in zip(("executor", "trainer"), built, strict=False))

    @cached_property
    def comparable(self) -> Executor:
        """`executor`; if the network has Dropout, the executor without Dropout. For proofs only."""
        if self.plain_network is self.network:
            return self.executor
        timed = self.executor
        return self.backend.executor(
            self.plain_network, mode=timed.mode, device=timed.device, precision=timed.precision
        )

    @cached_property
    def exact(self) -> Executor:
        """The plain network in float64, in the backend's proving mode; for proofs only."""
        mode = self.backend.proving_mode(self.selection.mode)
        return self.backend.executor(self.plain_network, mode=mode, device=self.job.device, precision="fp64")

    @property
    def oracle_batch(self) -> int:
        """Images per batch in float64, which is slow; a divisor of the batch size."""
        size = self.case.batch_size
        few = (n for n in range(min(ORACLE_BATCH, size), FEWEST - 1, -1) if size % n == 0)
        return self.network.batch_size or next(few, size)

    def to_generic_point(self, *executors: Executor) -> None:
        """Load the generic network's weights into executors."""
        names = (*self.network.parameters, *self.network.statistics)
        for executor in executors:
            executor.load_parameters({name: self.generic_network.initializers[name] for name in names})

    @contextlib.contextmanager
    def at_generic_point(self, *executors: Executor) -> Iterator[None]:
        """Load the generic network's weights; restore the initial weights at the end."""
        self.to_generic_point(*executors)
        yield
        for executor in executors:
            self.restore(executor)

    def restore(self, executor: Executor, initializers: dict[str, np.ndarray] | None = None) -> None:
        """Load the initial parameters and statistics, or the given ones, into an executor."""
        values = self.network.initializers if initializers is None else initializers
        names = (*self.network.parameters, *self.network.statistics)
        executor.load_parameters({name: values[name] for name in names})

    def restart(self, initializers: dict[str, np.ndarray] | None = None) -> None:
        """Restore `executor`, as `restore` does, and `trainer` to the initial state."""
        self.restore(self.executor, initializers)
        self.trainer.load_state(self.trainer.initial_state())

    def free_validation(self) -> None:
        for name in ("exact", "comparable"):
            self.__dict__.pop(name, None)
        gc.collect()  # executors hold large arrays in reference cycles

    def memory_by_definition(self, *, gradients: bool = False, optimizer: bool = False) -> dict[str, int]:
        """Return the bytes that a step must hold, as in ``results/schema.json``.

        Parameters
        ----------
        gradients, optimizer : bool
            Whether the step holds gradients and the optimizer's state.
        """
        if self.network.as_written:
            return {}
        width = 8 if self.job.precision == "fp64" else 4  # bf16 and fp16 keep their parameters in float32
        activation = 2 if self.job.precision in ("bf16", "fp16") else width
        cost = analyse(self.network, batch_size=self.case.batch_size, bytes_per_value=activation)
        held = {"parameters_bytes": width * cost.parameters, "activations_bytes": cost.activation_bytes}
        if gradients:
            held["gradients_bytes"] = width * cost.parameters
        if optimizer:
            held["optimizer_state_bytes"] = width * cost.parameters * len(self.optimizer.slots)
        with contextlib.suppress(NetworkError):  # a tensor whose size is not known
            held["alive_bytes"] = alive_bytes(
                self.network, batch_size=self.case.batch_size, bytes_per_value=activation, training=gradients
            )
        return held
