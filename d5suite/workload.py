"""A job's workload in this process: its data, its executors, their validation and their measurements.

One method per measurement validates it, and one measures it; `MEASUREMENTS` pairs them. Imports the contract, data,
validation and measuring; frameworks only through `d5suite.levels.backend.Backend`.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from d5suite.backends import Selection, select
from d5suite.data.digits import Digits
from d5suite.data.formats import open_store, stored_as
from d5suite.data.formats.store import Store
from d5suite.data.imagenet import ImageNet
from d5suite.data.loader import check_workers
from d5suite.data.openimages import SparseLabels
from d5suite.data.sources import SOURCES, ImageNetSource, Source, Stream
from d5suite.data.synthesis import class_name
from d5suite.errors import ConfigurationError, JobError, ValidationError
from d5suite.job import Job
from d5suite.levels.network import Executor, Native
from d5suite.levels.schedule import schedule_from_dict
from d5suite.levels.training import SGD, Optimizer, Trainer, optimizer_from_dict
from d5suite.measure.clock import now
from d5suite.measure.memory import PeakMemory, peak_memory
from d5suite.measure.sampling import Samples, SamplingSettings, paired_ratio, sample, sample_alternating
from d5suite.measure.threads import allowed_cpus
from d5suite.network import Network
from d5suite.network.analysis import analyse
from d5suite.network.zoo import build
from d5suite.training.events import Series, StopOnDivergence, Target
from d5suite.training.loop import Event, Run, evaluator
from d5suite.validate import checks, trajectories
from d5suite.validate.checks import Check, Validation
from d5suite.validate.metrics import METRICS
from d5suite.validate.norms import relative_l2

ORACLE_BATCH = 8
"""Images per batch of ONNX's reference evaluator and of validating training, at most: in float64 they are slow."""

FEEDS = 4
"""Batches that a timed step takes in turn, so that training neither ends at once nor depends on one batch."""

LOADER_BATCHES = 8
"""Batches per sample of a loader: several, because loaders deliver in bursts."""

LOADER_IMAGES = 128
"""Least images per sample of a loader, for small batches."""

FORMULA_STEPS = 3
"""Steps over which the native optimizer must follow its formula: from the second on momentum shows, from the third on
its decay."""

BASELINE_STEPS = 3
"""Steps over which the hand-written step must agree with d5suite's before both are timed."""

NEUTRAL_LOADER = "d5suite.data.Loader"
"""What results call the neutral input pipeline."""

LOADER_SPREAD = 0.5
"""How far the standard deviation of the framework's own loader's first batch may lie from the neutral one's, which
holds other images in another order: a forgotten normalisation is off by a factor of four."""

TELL_EPOCHS_S, TELL_STEPS_S = 1.0, 10.0
"""How often a long run says where it is, after an epoch and within one; in between the device would have to be waited
for."""

Batch = tuple[np.ndarray, np.ndarray]


class Measured(NamedTuple):
    """What one measurement found.

    Attributes
    ----------
    samples : Samples
    items : int
        Images per sample.
    macs : int or None
        Multiply-accumulates of one forward pass of the batch; None where no network runs.
    series : dict
        Further per-sample or per-step series: lists of floats.
    extra : dict
        Further facts, JSON-able.
    """

    samples: Samples
    items: int
    macs: int | None
    series: dict[str, list[float]]
    extra: dict[str, Any]


def load_network(job: Job) -> Network:
    """The job's network with a loss, in neutral form.

    Raises
    ------
    NetworkError
        If it cannot be read or does not fit the job's image size, classes or batch size.
    """
    settings = job.network
    several = bool(settings.get("several_labels"))
    smoothing = settings.get("label_smoothing", 0.0)
    if "zoo" in settings:
        found = build(settings["zoo"], classes=settings["classes"], image_size=settings["image_size"], seed=job.seed)
        return found.with_multilabel_loss() if several else found.with_label_smoothing(smoothing)
    network = Network.load(settings["onnx"])
    if several:
        network = network.with_multilabel_loss()
    else:
        network = network.with_classification_loss().with_label_smoothing(smoothing)
    fixed = network.batch_size
    expected = (fixed, 3, settings["image_size"], settings["image_size"])
    if network.shapes[network.input] != expected or fixed not in (None, job.batch_size):
        raise JobError(
            f"the network takes images of shape {network.shapes[network.input]}; the job has batches of "
            f"{job.batch_size} images of {settings['image_size']} px",
            where=settings["onnx"],
            hint="Choose a preset, --batch-size and image size that fit.",
        )
    return network


class Workload:
    """Everything a job's measurements share.

    Parameters
    ----------
    job : Job

    Raises
    ------
    D5Error
        If the backend, network or dataset cannot be used.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.selection: Selection = select(f"{job.backend['name']}:{job.backend['mode']}")
        self.backend = self.selection.backend
        self.backend.check(device=job.device, precision=job.precision)
        self.optimizer: Optimizer = optimizer_from_dict(job.optimizer)
        self.settings = SamplingSettings.from_dict(job.sampling)
        check_workers(job.loader_workers, len(allowed_cpus()))
        self.tolerance = self.backend.tolerances[job.precision]
        self.validations: dict[str, Validation] = {}
        self.tell: Callable[[str, dict[str, Any]], None] = lambda where, kept: None
        """Told where a long measurement is, and what there is of it should it not come to its end: JSON-able."""
        self._first_call_s: dict[str, float] = {}

    @cached_property
    def network(self) -> Network:
        """The job's network."""
        network = load_network(self.job)
        self.backend.check_operators(network)
        return network

    @cached_property
    def plain_network(self) -> Network:
        """The network without Dropout, which no two frameworks draw alike."""
        return self.network.without_dropout()

    @cached_property
    def generic_network(self) -> Network:
        """The plain network with noise on its weights, for the checks of outputs and gradients."""
        return self.plain_network.at_generic_point()

    @cached_property
    def source(self) -> Source:
        """The dataset."""
        channels, height, width = (n or 0 for n in self.network.shapes[self.network.input][1:])
        chosen = SOURCES[self.job.dataset["kind"]]
        return chosen(
            Path(self.job.dataset["root"]), classes=self.job.network["classes"], shape=(channels, height, width)
        )

    @cached_property
    def dataset(self) -> dict[str, Any]:
        """Which data this is, as a record: see ``results/schema.json``. Holds no path of this machine."""
        source, kind = self.source, self.job.dataset["kind"]
        digest = hashlib.sha256()
        if not isinstance(source, ImageNetSource):
            digits = Digits("train")
            digest.update(digits.labels.tobytes())  # pixels are computed, to the last bit perhaps not everywhere alike
            return {"kind": kind, "synthetic": False, "images": len(digits), "digest": digest.hexdigest()}
        images = source.training_set
        names: Iterable[Any] = images.names if isinstance(images, Store) else images.files
        for name in names:  # without folders, of which trees have more and fewer
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
            "format": self._stored_as,
            "digest": digest.hexdigest(),
        }

    def loader(self, workers: int | None = None, *, seed: int | None = None) -> Stream:
        """The neutral input pipeline for training."""
        return self.source.training(
            batch_size=self.job.batch_size,
            workers=self.job.loader_workers if workers is None else workers,
            seed=self.job.seed if seed is None else seed,
        )

    @cached_property
    def batches(self) -> list[Batch]:
        """The first training batches, one per validation step, decoded from files."""
        with self.loader() as loader:
            count = max(self.job.validation_steps, FEEDS)
            return [(images.copy(), labels.copy()) for images, labels in itertools.islice(loader.batches(), count)]

    @cached_property
    def evaluation_images(self) -> np.ndarray:
        """One batch of validation images as evaluation sees them: float32 (N, 3, H, W)."""
        with self.source.evaluation(batch_size=self.job.batch_size, workers=0) as stream:
            images = next(stream.epoch(0))[0]
        return np.resize(images, (self.job.batch_size, *images.shape[1:]))

    @cached_property
    def executor(self) -> Executor:
        """The network as it is timed: the very object that is validated is measured afterwards."""
        return self.backend.executor(
            self.network, mode=self.selection.mode, device=self.job.device, precision=self.job.precision
        )

    @cached_property
    def trainer(self) -> Trainer:
        """The optimizer on `executor`."""
        return self.backend.trainer(self.executor, self.optimizer)

    @cached_property
    def _comparable(self) -> Executor:
        """`executor`, or where that drops values at random, its twin without Dropout: for validation only."""
        if self.plain_network is self.network:
            return self.executor
        timed = self.executor
        return self.backend.executor(
            self.plain_network, mode=timed.mode, device=timed.device, precision=timed.precision
        )

    @cached_property
    def _proved(self) -> Executor:
        """The plain network in float64 and the backend's plainest mode, for validation only."""
        mode = self.backend.proving_mode(self.selection.mode)
        return self.backend.executor(self.plain_network, mode=mode, device=self.job.device, precision="fp64")

    @contextlib.contextmanager
    def _at_generic_point(self, *executors: Executor) -> Iterator[None]:
        """Give executors the generic network's weights for a while."""
        names = (*self.network.parameters, *self.network.statistics)
        for executor in executors:
            executor.load_parameters({name: self.generic_network.initializers[name] for name in names})
        yield
        for executor in executors:
            executor.load_parameters({name: self.network.initializers[name] for name in names})

    def _call_first(self, measurement: str, step: Callable[[], Any]) -> None:
        """Time a step's very first call, compilation included; what follows reuses what it compiled."""
        if measurement not in self._first_call_s:
            start = now()
            step()
            self.executor.synchronize()
            self._first_call_s[measurement] = now() - start

    def order(self) -> Iterator[list[str]]:
        """Measurements that are validated before any of them is measured: all, because they share executors."""
        yield self.job.measurements

    def level(self, measurement: str) -> int:
        """The benchmark level that a measurement belongs to."""
        return MEASUREMENTS[measurement].level

    def measure(self, measurement: str) -> Measured:
        """Take the samples of one measurement."""
        return MEASUREMENTS[measurement].measure(self)

    def release(self) -> None:
        """Let go of what only validation needs, before anything is timed."""
        for name in ("_proved", "_comparable", "generic_network"):
            self.__dict__.pop(name, None)
        gc.collect()  # executors hold large arrays in reference cycles

    def arrays(self, batch: Batch) -> dict[str, np.ndarray]:
        """A batch under the network's input names."""
        label, _ = self.network.require_loss()
        return {self.network.input: batch[0], label: batch[1]}

    # Validation: one method per measurement; each raises ValidationError at the first check that fails.

    def validate(self, measurement: str) -> Validation:
        """Run the checks of one measurement.

        Returns
        -------
        Validation
            Also kept in `validations`, where a failed one stays with the checks made so far.

        Raises
        ------
        ValidationError
            At the first check that fails.
        """
        validation = self.validations[measurement] = Validation()
        MEASUREMENTS[measurement].validate(self, validation)
        return validation

    def validate_inference(self, validation: Validation) -> None:
        """The output against an independent evaluator."""
        executor, images = self.executor, self.evaluation_images
        feed = executor.feed({self.network.input: images})
        self._call_first("inference", lambda: executor.forward(feed))
        with self._at_generic_point(executor):
            validation.require(
                checks.check_inference(
                    executor,
                    images,
                    network=self.generic_network,
                    tolerance=self.tolerance.outputs,
                    threads=self.job.threads,
                )
            )

    @cached_property
    def _gradient_checks(self) -> Iterable[Check]:
        """The gradient checks, made when first asked for."""
        return _Once(self._check_gradient())

    def _check_gradient(self) -> Iterator[Check]:
        images, labels = self.batches[0]
        count = self._oracle_batch
        proved, timed = self._proved, self._comparable
        executor = self.executor
        feed = executor.feed(self.arrays((images, labels)))
        start = executor.parameters()
        self._call_first("gradient", lambda: executor.forward_backward(feed))
        if timed is not executor:
            yield checks.check_dropout(executor, feed)
        executor.load_parameters(start)
        recorded = Path(self.job.reference) if self.job.reference else None
        known: dict[str, np.ndarray] = {}
        with self._at_generic_point(proved, timed):
            found = checks.check_gradient_float64(
                proved, images[:count], labels[:count], network=self.generic_network, recorded=recorded, keep=known
            )
            if all(check.passed for check in found):
                found += checks.check_gradient(
                    timed,
                    proved,
                    images,
                    labels,
                    self.tolerance,
                    reference=known if count == len(images) else None,
                    recorded=recorded and recorded.with_suffix(".json"),
                )
        yield from found

    @property
    def _oracle_batch(self) -> int:
        """Images per batch where float64 is involved, which is slow."""
        return self.network.batch_size or min(ORACLE_BATCH, self.job.batch_size)

    def validate_gradient(self, validation: Validation) -> None:
        """Every gradient, through float64 gradients proved by central differences."""
        validation.require(self._gradient_checks)

    def validate_training_step(self, validation: Validation) -> None:
        """A short training run, through a float64 run proved by the update formula and by other backends."""
        validation.require(self._gradient_checks)
        validation.require(self._training_checks)

    def validate_step_breakdown(self, validation: Validation) -> None:
        """As `validate_training_step`."""
        self.validate_training_step(validation)

    def validate_time_to_accuracy(self, validation: Validation) -> None:
        """As `validate_training_step`: the target itself is what the measurement tells.

        Raises
        ------
        ConfigurationError
            If the target is one of the real dataset, and the images are drawn.
        """
        settings = self.job.training
        if settings.get("source") and self.dataset["synthetic"]:
            raise ConfigurationError(
                f"these images are drawn by d5suite, and {settings['metric']} {settings['target']} means the real "
                f"{self.job.dataset['kind']}",
                where=self.job.dataset["root"],
                hint=f"Give the real one with --{self.job.dataset['kind']}.",
            )
        self.validate_training_step(validation)

    @cached_property
    def _training_checks(self) -> Iterable[Check]:
        """The checks of a short training run, made when first asked for."""
        return _Once(self._check_training())

    def _check_training(self) -> Iterator[Check]:
        count = self._oracle_batch
        steps = [(images[:count], labels[:count]) for images, labels in self.batches[: self.job.validation_steps]]
        proved = self._proved
        proved.load_parameters({name: self.network.initializers[name] for name in proved.parameters()})
        label = f"{proved.mode} fp64"
        expected = checks.train_by_formula(proved, self.optimizer, steps[:FORMULA_STEPS])
        early = min(FORMULA_STEPS, len(steps))
        short, found = checks.train(self.backend.trainer(proved, self.optimizer), steps, early=early)
        yield from checks.check_trajectory(
            f"{label} vs the update formula", short, expected, tolerance=checks.FLOAT64, parameters=True
        )
        if self.job.trajectory:
            trajectories.save(Path(self.job.trajectory), found, str(self.selection))
        for path in self.job.peers:
            peer, peer_name = trajectories.load(Path(path))
            yield from checks.check_trajectory(
                f"{label} vs {peer_name} fp64", found, peer, tolerance=checks.FLOAT64, parameters=True
            )
        executor = self._comparable
        trainer = self.trainer if executor is self.executor else self.backend.trainer(executor, self.optimizer)
        durations: list[float] = []
        (timed,) = checks.train(trainer, steps, durations=durations)
        if count == self.job.batch_size and trainer is self.trainer:
            self._first_call_s.setdefault("training_step", durations[0])
        yield from checks.check_trajectory(
            f"{executor.mode} {executor.precision} vs {label}",
            timed,
            found,
            tolerance=self.tolerance.trajectory,
            parameters=False,
        )

    def validate_input_pipeline(self, validation: Validation) -> None:
        """The pixels from the worker processes against the same images decoded in this process."""
        with self.loader(workers=0) as inline:
            expected, labels = next(inline.batches())
        images, found = self.batches[0]
        validation.require(
            [
                Check("pixels from workers vs decoded in process", relative_l2(images, expected), 0.0),
                Check("labels from workers vs decoded in process", relative_l2(found, labels), 0.0),
            ]
        )

    @cached_property
    def _pair(self) -> tuple[Trainer, Native, Any]:
        """A trainer, its feed, and the same step written by hand in the framework's own style."""
        images, labels = self.batches[0]
        if not isinstance(self.optimizer, SGD):
            raise ConfigurationError(
                f"the hand-written step trains with SGD, not with {self.optimizer.name}", where=self.job.recipe
            )
        baseline = self.backend.load("baseline").resnet50_training_step(
            self.network,
            self.optimizer,
            images,
            labels,
            mode=self.selection.mode,
            device=self.job.device,
            precision=self.job.precision,
        )
        trainer = self.backend.trainer(self.executor, self.optimizer)  # a new one: its velocity is zero
        return trainer, self.executor.feed(self.arrays(self.batches[0])), baseline

    def validate_cost_of_neutrality(self, validation: Validation) -> None:
        """The hand-written step's losses against d5suite's, from the same weights on the same batch."""
        trainer, feed, baseline = self._pair
        executor = trainer.executor
        _, loss = self.network.require_loss()
        for step in range(BASELINE_STEPS):
            ours = float(executor.fetch(trainer.step(feed))[loss])
            baseline.step()
            baseline.synchronize()
            error = relative_l2(np.array(ours), np.array(baseline.loss()))
            name = f"loss of step {step + 1} ({executor.mode} {executor.precision}) vs hand-written"
            validation.require([Check(name, error, self.tolerance.trajectory)])

    def validate_cost_of_loading(self, validation: Validation) -> None:
        """The neutral pixels, and as `validate_native_input_pipeline`."""
        self.validate_input_pipeline(validation)
        self.validate_native_input_pipeline(validation)

    def validate_native_input_pipeline(self, validation: Validation) -> None:
        """That the framework's own loader gives batches of the neutral one's shape and range, and known labels."""
        native = self._native_loader()
        try:
            images, labels = (np.asarray(array) for array in next(native))
        finally:
            native.close()
        expected = self.batches[0][0]
        if images.size != expected.size or len(labels) != len(expected):
            raise ValidationError(f"the framework's own loader gives images of shape {images.shape}")
        if labels.min() < 0 or labels.max() >= self.job.network["classes"]:
            raise ValidationError(
                f"the framework's own loader gives labels from {labels.min()} to {labels.max()}, of "
                f"{self.job.network['classes']} classes"
            )
        difference = abs(float(images.std()) - float(expected.std())) / float(expected.std())
        validation.require([Check("spread of the pixels of the framework's own loader", difference, LOADER_SPREAD)])

    # Measurements: one method each; nothing is converted, decoded or set up inside the timing.

    def _sample(self, step: Callable[[Native], Any]) -> Samples:
        executor = self.executor
        feeds = itertools.cycle([executor.feed(self.arrays(batch)) for batch in self.batches[:FEEDS]])
        feed: list[Native] = [{}]

        def next_feed() -> None:
            feed[0] = next(feeds)

        return sample(lambda: step(feed[0]), executor.synchronize, self.settings, before_sample=next_feed)

    def _measured(self, measurement: str, samples: Samples, **more: Any) -> Measured:
        macs = analyse(self.network, batch_size=self.job.batch_size).macs
        if measurement in self._first_call_s:  # validation made it
            samples = replace(samples, first_call_s=self._first_call_s[measurement])
        return Measured(samples, self.job.batch_size, macs, more.pop("series", {}), more)

    def measure_inference(self) -> Measured:
        """The forward pass in inference mode."""
        executor = self.executor
        feed = executor.feed({self.network.input: self.evaluation_images})
        samples = sample(lambda: executor.forward(feed), executor.synchronize, self.settings)
        return self._measured("inference", samples)

    def measure_gradient(self) -> Measured:
        """Forward and backward in training mode, without an update."""
        return self._measured("gradient", self._sample(self.executor.forward_backward))

    def measure_training_step(self) -> Measured:
        """Forward, backward and update."""
        executor, trainer = self.executor, self.trainer
        samples = self._sample(trainer.step)
        _, loss = self.network.require_loss()
        feeds = [executor.feed(self.arrays(batch)) for batch in self.batches[:FEEDS]]
        losses = [float(executor.fetch(trainer.step(feed))[loss]) for feed in feeds]
        if not np.isfinite(losses).all():
            raise ValidationError(
                f"training diverged while it was timed: the loss is {losses[-1]}",
                hint="Lower the learning rate (--optimizer).",
            )
        return self._measured("training_step", samples, series={"final_losses": losses})

    def measure_step_breakdown(self) -> Measured:
        """Where the time of a step goes, from files to updated parameters.

        Rounds wait for a batch, feed it and compute, each to its end; what is left is ``other``. They compute in turn a
        whole step, a forward pass in inference mode, and forward and backward, so that all three meet the same caches
        and the same loader. ``backward`` is what the third takes longer than the second, ``update`` what the step takes
        longer than the third: differences of nested measurements, which are not seen one by one and may come out
        slightly negative where a framework fuses them. The parts are medians; their sum is given as a part of the whole
        step's median, which it is to agree with to 2%.
        """
        executor, trainer, image = self.executor, self.trainer, self.network.input
        compute: dict[str, Callable[[Native], Any]] = {
            "step": trainer.step,
            "forward": lambda feed: executor.forward({image: feed[image]}),
            "both": executor.forward_backward,
        }
        laps: dict[str, list[list[float]]] = {kind: [] for kind in compute}
        with self.loader() as loader:
            batches = loader.batches()

            def one_round(kind: str) -> list[float]:
                times = [now()]
                batch = next(batches)
                times.append(now())
                feed = executor.feed(self.arrays(batch))
                executor.synchronize()
                times.append(now())
                compute[kind](feed)
                executor.synchronize()
                times.append(now())
                del batch, feed
                times.append(now())
                return [after - before for before, after in itertools.pairwise(times)]

            first_call_s = sum(one_round("step"))
            for kind in (*compute, *compute):
                one_round(kind)
            end = now() + len(compute) * self.settings.max_time_s
            while len(laps["both"]) < self.settings.min_rounds or now() < end:
                for kind, rounds in laps.items():
                    rounds.append(one_round(kind))
        whole = [sum(times) for times in laps["step"]]
        samples = Samples(first_call_s, [], whole, True, "time")
        wait, host_to_device, _, other = (float(np.median(part)) for part in zip(*laps["step"], strict=True))
        step, forward, both = (float(np.median([times[2] for times in laps[kind]])) for kind in compute)
        breakdown = {
            "data_wait": wait,
            "host_to_device": host_to_device,
            "forward": forward,
            "backward": both - forward,
            "update": step - both,
            "other": other,
        }
        series = {f"{kind}_s": [times[2] for times in rounds] for kind, rounds in laps.items()}
        extra = {"breakdown_s": breakdown, "sum_over_step": sum(breakdown.values()) / samples.median_s}
        return self._measured("step_breakdown", samples, series=series, **extra)

    def measure_time_to_accuracy(self) -> Measured:
        """Training runs to the target, each from weights and in an order of its own.

        Compilation is not counted: the step is compiled before the first run, and all runs use it. Evaluation and the
        making of loaders are off the clock, waiting for data is on it.

        Raises
        ------
        ValidationError
            If a run does not reach the target: a time to accuracy is then not a number. What `tell` was told last are
            all runs with their curves.
        """
        settings = self.job.training
        metric = replace(METRICS[settings["metric"]], bound=settings["target"])
        executor, trainer = self.executor, self.trainer
        accumulate = settings["accumulate"]
        feeds = [
            executor.feed(self.arrays(batch)) for batch in itertools.islice(itertools.cycle(self.batches), accumulate)
        ]
        self._call_first("time_to_accuracy", lambda: trainer.step(*feeds))
        extra: dict[str, Any] = {
            "target": {"metric": metric.name, "value": metric.bound, "source": settings.get("source", "")},
            "runs": [],
        }
        runs: list[dict[str, Any]] = extra["runs"]
        series: dict[str, list[float]] = {}
        for index in range(settings["runs"]):
            seed = self.job.seed + index
            start = load_network(replace(self.job, seed=seed)).initializers
            executor.load_parameters(
                {name: start[name] for name in (*self.network.parameters, *self.network.statistics)}
            )
            trainer.load_state(trainer.initial_state())
            target, told, found = Target(metric), Series(), {"seed": seed}
            runs.append(found)

            def keep(
                run: Run,
                index: int = index,
                target: Target = target,
                told: Series = told,
                found: dict[str, Any] = found,
            ) -> None:
                progress = run.progress
                found.update({"epochs": progress.epoch, metric.name: progress.metrics.get(metric.name)})
                if target.reached is not None:
                    found.update(zip(("seconds", "steps", "samples"), target.reached, strict=True))
                elif progress.stopped:
                    found["stopped"] = progress.stopped
                for key in ("seconds", "loss", metric.name):
                    series[f"run_{index}_{key}"] = [row[key] for row in told.epochs]
                at = f" at {found[metric.name]:.4g}" if progress.metrics else ""
                done = f", step {progress.batch // accumulate}/{run.steps_per_epoch}" if progress.batch else ""
                self.tell(
                    f"run {index + 1}/{settings['runs']}, epoch {progress.epoch}/{run.epochs}{at}{done}",
                    {**extra, "series": {key: _or_none(values) for key, values in series.items()}},
                )

            with (
                self.loader(seed=seed) as stream,
                self.source.evaluation(batch_size=self.job.batch_size, workers=self.job.loader_workers) as unseen,
            ):
                run = Run(
                    trainer,
                    stream,
                    epochs=settings["epochs"],
                    schedule=schedule_from_dict(settings["schedule"]),
                    accumulate=accumulate,
                    events=[StopOnDivergence(), told, target, _Reports(keep)],
                    evaluate=evaluator(unseen, [metric]),
                )
                try:
                    run.train()
                except ValidationError as error:  # such as logits that are no numbers: the other runs may do better
                    run.stop(str(error))
            keep(run)
        missed = [found for found in runs if "seconds" not in found]
        if missed:
            worst = missed[0]
            at, why = worst[metric.name], worst.get("stopped")
            raise ValidationError(
                f"{len(missed)} of {len(runs)} runs did not reach {metric.name} {metric.bound}: that of seed "
                f"{worst['seed']} ended after {worst['epochs']} epochs "
                f"{'before it was evaluated' if at is None else f'at {at}'}{f': {why}' if why else ''}",
                hint="A time to accuracy is a number only if all runs get there: see learning rate and schedule.",
            )
        times = [float(found["seconds"]) for found in runs]
        samples = Samples(self._first_call_s["time_to_accuracy"], [], times, True, "rounds")
        trained = int(np.median([found["samples"] for found in runs]))
        macs = analyse(self.network, batch_size=self.job.batch_size).macs
        return Measured(samples, trained, macs, series, extra)

    def _loader_batches(self) -> int:
        return max(LOADER_BATCHES, -(-LOADER_IMAGES // self.job.batch_size))

    def measure_input_pipeline(self) -> Measured:
        """Files to batches on the device: read, decode, augment, normalise, feed."""
        executor = self.executor
        with self.loader() as loader:
            return self._loading(
                NEUTRAL_LOADER,
                loader.batches(),
                lambda batch: executor.feed(self.arrays(batch)),
                executor.synchronize,
            )

    def measure_native_input_pipeline(self) -> Measured:
        """Files to batches in the framework's own hands, by its own loader on the same files and transform."""
        native = self._native_loader()
        name = self.backend.load("loader").NAMES[self._stored_as]
        try:
            return self._loading(name, native, lambda batch: None, lambda: None)
        finally:
            native.close()

    def _loading(
        self,
        loader: str,
        batches: Iterator[Any],
        use: Callable[[Any], object],
        synchronize: Callable[[], None],
    ) -> Measured:
        """Take batches from a loader; the waiting for them is noted, too, apart from their use."""
        count = self._loader_batches()
        waits: list[float] = []

        def step() -> None:
            for _ in range(count):
                start = now()
                batch = next(batches)
                waits.append(now() - start)
                use(batch)

        samples = sample(step, synchronize, self.settings)
        items = count * self.job.batch_size
        waits = waits[-count * len(samples.samples_s) :]  # without those of the warm-up
        extra = {
            "loader": loader,
            "loader_workers": self.job.loader_workers,
            "batches_per_sample": count,
            "images_per_s_per_core": items / samples.median_s / len(allowed_cpus()),
            "wait_s": float(np.median(waits)),
        }
        if self._stored_as is not None:
            extra["format"] = self._stored_as
        return Measured(samples, items, None, {"wait_s": waits}, extra)

    def measure_cost_of_neutrality(self) -> Measured:
        """The training step and the same one written by hand in the framework's own style, in turn."""
        trainer, feed, baseline = self._pair
        found = sample_alternating(
            {"d5suite": lambda: trainer.step(feed), "hand_written": baseline.step},
            {"d5suite": trainer.executor.synchronize, "hand_written": baseline.synchronize},
            self.settings,
        )
        return self._ratio(found, "hand_written", self.job.batch_size)

    @cached_property
    def _stored_as(self) -> str | None:
        """The dataset's storage format; None where it comes with a library."""
        return stored_as(self.source.training_set) if isinstance(self.source, ImageNetSource) else None

    def _native_loader(self) -> Any:
        if self.job.loader_workers < 1:
            raise ConfigurationError("comparing loaders needs at least one loader worker", hint="Use --loader-workers.")
        stored, root = self._stored_as, self.job.dataset["root"]
        if not isinstance(self.source, ImageNetSource) or self.source.several:
            raise ConfigurationError("frameworks' own loaders are compared on images with one label", where=root)
        if f"loader:{stored}" in self.backend.absent:
            raise ConfigurationError(self.backend.absent[f"loader:{stored}"], where=f"loader:{stored}")
        images = self.source.training_set
        if stored in ("tfrecord", "recordio") and len(images) < len(open_store(root, "train")):
            raise ConfigurationError(
                f"frameworks' own readers of record files take all classes, and this preset the first "
                f"{self.job.network['classes']}",
                where=root,
                hint="Choose a preset with as many classes as the dataset.",
            )
        return self.backend.load("loader").native_loader(
            images,
            self.source.training_transform,
            batch_size=self.job.batch_size,
            workers=self.job.loader_workers,
            seed=self.job.seed,
        )

    def measure_cost_of_loading(self) -> Measured:
        """The neutral input pipeline and the framework's own loader on the same files and transform, in turn."""
        count = self._loader_batches()
        native = self._native_loader()
        try:
            with self.loader() as loader:
                streams: dict[str, Iterator[Any]] = {"d5suite": loader.batches(), "native": native}

                def consume(name: str, batches: int) -> Callable[[], None]:
                    def run() -> None:
                        for _ in itertools.islice(streams[name], batches):
                            pass

                    return run

                found = sample_alternating(
                    {name: consume(name, count) for name in streams},
                    dict.fromkeys(streams, lambda: None),
                    self.settings,
                    # Untimed batches let this loader reach its pace and the other one fill its buffers, some of which
                    # hold ten batches, and rest.
                    before_sample={name: consume(name, 2 + count // 2) for name in streams},
                )
        finally:
            native.close()
        name = self.backend.load("loader").NAMES[self._stored_as]
        return self._ratio(found, "native", count * self.job.batch_size, loader=name, format=self._stored_as)

    def _ratio(self, found: dict[str, Samples], other: str, items: int, **more: Any) -> Measured:
        ratio = paired_ratio(found["d5suite"], found[other])
        extra = {
            "compared_with": other,
            "ratio": {"median": ratio.median, "ci95": list(ratio.ci95), "rounds": ratio.n},
            "compared_median_s": found[other].median_s,
            **more,
        }
        return Measured(found["d5suite"], items, None, {f"{other}_s": list(found[other].samples_s)}, extra)

    # Peak memory, in a process where nothing is validated or timed.

    def peak_memory(self, measurement: str) -> dict[str, Any]:
        """Peak memory of a measurement's step, and what a network needs of it by its definition, as a record."""
        return {"memory": {**self.memory(measurement).to_dict(), **self._memory_by_definition(measurement)}}

    def _memory_by_definition(self, measurement: str) -> dict[str, int]:
        """Bytes of what must be held: see ``results/schema.json``."""
        if measurement == "input_pipeline":
            return {}
        width = 8 if self.job.precision == "fp64" else 4  # bf16 and fp16 keep their parameters in float32
        activation = 2 if self.job.precision in ("bf16", "fp16") else width
        cost = analyse(self.network, batch_size=self.job.batch_size, bytes_per_value=activation)
        held = {"parameters_bytes": width * cost.parameters, "activations_bytes": cost.activation_bytes}
        if measurement in ("gradient", "training_step"):
            held["gradients_bytes"] = width * cost.parameters
        if measurement == "training_step":
            held["optimizer_state_bytes"] = width * cost.parameters * len(self.optimizer.slots)
        return held

    def memory(self, measurement: str) -> PeakMemory:
        """Peak memory over two calls of a step: of the device where it has its own, else of this process."""
        device_peak = self.backend.load("runtime").device_memory(self.job.device)
        executor = self.executor
        if measurement == "inference":
            feed = executor.feed({self.network.input: self.evaluation_images})
            step: Callable[[], Any] = lambda: executor.forward(feed)  # noqa: E731
        elif measurement == "gradient":
            feed = executor.feed(self.arrays(self.batches[0]))
            step = lambda: executor.forward_backward(feed)  # noqa: E731
        elif measurement == "training_step":
            trainer = self.trainer
            feed = executor.feed(self.arrays(self.batches[0]))
            step = lambda: trainer.step(feed)  # noqa: E731
        else:
            with self.loader() as loader:
                batches = loader.batches()
                return peak_memory(lambda: executor.feed(self.arrays(next(batches))), device_peak)

        def twice() -> None:
            for _ in range(2):
                step()
                executor.synchronize()

        return peak_memory(twice, device_peak)


class _Reports(Event):
    """Tells where a run is, off its clock, and at most once in `TELL_EPOCHS_S` or `TELL_STEPS_S`."""

    def __init__(self, tell: Callable[[Run], None]) -> None:
        self._tell = tell
        self._last = now()

    def on_step(self, run: Run) -> None:
        if now() - self._last >= TELL_STEPS_S:
            run.off_the_clock(lambda: self._now(run))

    def on_epoch(self, run: Run) -> None:
        if now() - self._last >= TELL_EPOCHS_S:
            self._now(run)

    def _now(self, run: Run) -> None:
        self._tell(run)
        self._last = now()


def _or_none(values: Iterable[float]) -> list[float | None]:
    """JSON knows no NaN."""
    return [value if math.isfinite(value) else None for value in values]


class _Once:
    """An iterable that computes its items once; iterating again repeats them, and its exception."""

    def __init__(self, items: Iterator[Check]) -> None:
        self._items = items
        self._seen: list[Check] = []
        self._error: Exception | None = None

    def __iter__(self) -> Iterator[Check]:
        yield from self._seen
        if self._error is not None:
            raise self._error
        try:
            for item in self._items:
                self._seen.append(item)
                yield item
        except Exception as error:
            self._error = error
            raise


class Measurement(NamedTuple):
    """The two halves of a measurement; ``level`` is the benchmark level it belongs to."""

    level: int
    validate: Callable[[Workload, Validation], None]
    measure: Callable[[Workload], Measured]


MEASUREMENTS: dict[str, Measurement] = {
    "inference": Measurement(1, Workload.validate_inference, Workload.measure_inference),
    "gradient": Measurement(1, Workload.validate_gradient, Workload.measure_gradient),
    "training_step": Measurement(2, Workload.validate_training_step, Workload.measure_training_step),
    "step_breakdown": Measurement(2, Workload.validate_step_breakdown, Workload.measure_step_breakdown),
    "time_to_accuracy": Measurement(2, Workload.validate_time_to_accuracy, Workload.measure_time_to_accuracy),
    "input_pipeline": Measurement(2, Workload.validate_input_pipeline, Workload.measure_input_pipeline),
    "native_input_pipeline": Measurement(
        2, Workload.validate_native_input_pipeline, Workload.measure_native_input_pipeline
    ),
    "cost_of_neutrality": Measurement(2, Workload.validate_cost_of_neutrality, Workload.measure_cost_of_neutrality),
    "cost_of_loading": Measurement(2, Workload.validate_cost_of_loading, Workload.measure_cost_of_loading),
}
