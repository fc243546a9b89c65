"""Batches of transformed images from worker processes, in order and reproducibly.

The loader prepares `prefetch` batches ahead of the consumer. A batch is cut into tasks of a few
images, in one queue for all workers, so a slow image delays no other. Workers write images directly
into the batch's slot of shared memory. Batches are yielded in order, when they are complete.

**A batch's arrays stay valid as long as you keep them.** They are views of shared memory, which is
reused only after the last reference to them (or to a view, or a tensor that shares the memory) is
gone. A consumer that keeps more than a few batches gets copies, so that the shared memory stays
small.

Workers are fresh single-threaded interpreters (neither forks nor spawned by multiprocessing, so
they import neither the parent's frameworks nor its main module) and live until the loader is
closed. The shared memory and the sockets are unnamed, so nothing is left behind, even after ``kill
-9``.

May import NumPy and, from d5suite, `data` and `errors`. Worker processes need Linux; ``workers=0``
runs anywhere.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import mmap
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from d5suite.data import loader_worker
from d5suite.data.arrays import Batch, Stream
from d5suite.data.prefetch import prefetch_by_default
from d5suite.data.reading import FileLocation, ImageReader, name_of
from d5suite.data.samplers import Ordered, Sampler, Shuffled
from d5suite.data.transforms import Transform
from d5suite.errors import ConfigurationError, DataError

Watcher = Callable[[int, int, int], object]
"""See `Loader.watch`."""

_Samples = tuple[np.ndarray, np.ndarray]  # of a batch: epoch (see `Loader._plan`) and index, int64

_IMAGES_PER_TASK = 8  # few enough to share a batch evenly, many enough that messages cost nothing
_MAX_WORKERS = loader_worker.HEADER_BYTES // 8
_KEPT_BATCHES = 4  # held by the consumer before it gets copies
_PARENT_CHECK_S = 5
_STOP_S = 2.0
# Workers get the parent's path, not its environment, so that they find the same packages.
_START = (
    "import sys; sys.path[:] = sys.argv[4:]; "
    "from d5suite.data.loader_worker import serve; serve(*map(int, sys.argv[1:4]))"
)


class Labels(Protocol):
    """The labels of a dataset: an array, or an object that is indexed like one."""

    def __getitem__(self, indices: np.ndarray, /) -> np.ndarray: ...


class ImageFiles(Protocol):
    """A dataset for the loader, such as `ImageNet` or `Store`: locations of images, and labels."""

    @property
    def files(self) -> Sequence[FileLocation]:
        """The location of every image: its path, or pieces of a larger file."""

    @property
    def labels(self) -> Labels:
        """Indexed by an array: int64 (n,), or (n, classes) if images have several labels."""

    def __len__(self) -> int: ...


@dataclass
class _InFlight:
    images: np.ndarray
    labels: np.ndarray
    remaining: int
    wanted: bool = True
    failures: list[tuple[int, str, str | None, str | None]] = field(default_factory=list)


def check_workers(workers: int, cores: int) -> None:
    """Refuse more worker processes than cores, because they would slow each other down.

    Raises
    ------
    ConfigurationError
        If there are too many.
    """
    if workers > cores:
        raise ConfigurationError(
            f"{workers} loader workers, but this job may use {cores} {'core' if cores == 1 else 'cores'}",
            hint=f"Use --loader-workers {cores} or less, or more --threads if the machine has the cores. In Python: "
            "fewer `workers`, or more `cores`.",
        )


class Loader(Stream):
    """Iterate over a dataset in batches.

    Parameters
    ----------
    dataset : ImageFiles
        For example `ImageNet`, or the result of `d5suite.data.formats.open_store`.
    transform : Transform
        For example `TrainTransform(224)`.
    batch_size : int
        Images per batch.
    workers : int
        Worker processes; 0 does the work in the calling thread.
    seed : int
        Seed of the order and of the transform. Pixels depend only on (seed, epoch, index) and on
        how often the image occurred before in the epoch.
    shuffle : bool
        Use a new random order in every epoch; otherwise the dataset's own order.
    sampler : Sampler, optional
        The images and their order in an epoch, for example `ClassBalanced`; replaces ``shuffle``.
    drop_last : bool
        Whether to drop a last batch that is not full.
    prefetch : int, optional
        Batches to prepare while the consumer works on one; by default `prefetch_by_default`.
    cores : int, optional
        Maximum number of workers; by default the CPUs of this process. More workers help only if
        they wait for a slow disk or network.

    Raises
    ------
    ConfigurationError
        If a setting is out of range, there is no full batch, or the transform cannot be sent to
        workers; while iterating, if the sampler takes an image that the dataset lacks.

    Notes
    -----
    A file that cannot be decoded raises a `DataError` with the file's name when its batch is due;
    earlier batches are delivered, and the loader stays usable. A dead worker raises a `DataError`
    with the name of the worker's file, and closes the loader. Use the loader in a ``with``
    statement, or call `close`; garbage collection closes it, too.
    """

    def __init__(
        self,
        dataset: ImageFiles,
        transform: Transform,
        *,
        batch_size: int,
        workers: int = 0,
        seed: int = 0,
        shuffle: bool = True,
        sampler: Sampler | None = None,
        drop_last: bool = True,
        prefetch: int | None = None,
        cores: int | None = None,
    ) -> None:
        prefetch = prefetch_by_default() if prefetch is None else prefetch
        for name, value, least in (
            ("batch_size", batch_size, 1),
            ("workers", workers, 0),
            ("seed", seed, 0),
            ("prefetch", prefetch, 1),
        ):
            if value < least:
                raise ConfigurationError(f"{name} is {value}; it must be at least {least}")
        if workers > _MAX_WORKERS:
            raise ConfigurationError(f"workers is {workers}; it must be at most {_MAX_WORKERS}")
        if workers and not sys.platform.startswith("linux"):
            raise ConfigurationError("loader processes need Linux", hint="Use workers=0.")
        if workers:
            check_workers(workers, len(os.sched_getaffinity(0)) if cores is None else cores)
        self.dataset = dataset
        self.transform = transform
        self.batch_size = batch_size
        self.workers = workers
        self.seed = seed
        if sampler is None:
            sampler = Shuffled(len(dataset), seed) if shuffle else Ordered(len(dataset))
        self.sampler = sampler
        self.drop_last = drop_last
        self.prefetch = prefetch
        if len(self) == 0:
            raise ConfigurationError(
                f"{len(self.sampler)} images do not fill one batch of {batch_size}",
                hint="Use a smaller batch size, more images, or drop_last=False.",
            )
        self._closed = False
        self._turn = 0
        self._reader = ImageReader()
        self._pool = _Pool(self) if workers else None

    def __len__(self) -> int:
        whole, rest = divmod(len(self.sampler), self.batch_size)
        return whole + (1 if rest and not self.drop_last else 0)

    def epoch(self, number: int, *, start: int = 0) -> Iterator[Batch]:
        """Iterate over epoch `number` from batch `start`, both from 0; ends earlier iterators."""
        return self._run(itertools.islice(self._plan(number), start, None))

    def batches(self, first_epoch: int = 0) -> Iterator[Batch]:
        """Iterate endlessly from `first_epoch`, without a pause between epochs."""
        return self._run(itertools.chain.from_iterable(map(self._plan, itertools.count(first_epoch))))

    def watch(self, watcher: Watcher | None) -> None:
        """Report each task of a worker process to a function; None stops the reports.

        Parameters
        ----------
        watcher : callable or None
            Takes the worker's number, and the task's begin and end by `time.perf_counter_ns`.
        """
        if self._pool is not None:
            self._pool.watcher = watcher

    def close(self) -> None:
        """Stop the worker processes and wait for them; idempotent. Yielded arrays stay valid."""
        self._closed = True
        self._reader.close()
        if self._pool is not None:
            self._pool.close()

    def _plan(self, number: int) -> Iterator[_Samples]:
        order, length = self.sampler.order(number), len(self.dataset)
        if len(order) and not 0 <= order.min() <= order.max() < length:
            raise ConfigurationError(
                f"the sampler takes images {order.min()} to {order.max()} of a dataset of {length}",
                hint="Make it for this dataset.",
            )
        # A repeated image uses the random numbers of a made-up epoch, so it gets a new crop.
        epochs = number + (_times_before(order) << 32)
        for batch in range(len(self)):
            chosen = slice(batch * self.batch_size, (batch + 1) * self.batch_size)
            yield epochs[chosen], order[chosen]

    def _run(self, plan: Iterator[_Samples]) -> Iterator[Batch]:
        self._turn += 1
        return self._inline(plan, self._turn) if self._pool is None else self._pooled(plan, self._turn, self._pool)

    def _check(self, turn: int) -> None:
        if self._closed or (self._pool is not None and self._pool.closed):
            raise ConfigurationError("the loader is closed", hint="Make a new one.")
        if turn != self._turn:
            raise ConfigurationError("a later epoch of this loader has begun", hint="Use one iterator at a time.")

    def _inline(self, plan: Iterable[_Samples], turn: int) -> Iterator[Batch]:
        for epochs, indices in plan:
            self._check(turn)
            images = np.empty((len(indices), 3, self.transform.size, self.transform.size), np.float32)
            for out, epoch, index in zip(images, epochs.tolist(), indices.tolist(), strict=True):
                location = self.dataset.files[index]
                loader_worker.load_sample(location, self._reader, self.transform, self.seed, epoch, index, out)
            yield images, self.dataset.labels[indices]
            del images, out

    def _pooled(self, plan: Iterator[_Samples], turn: int, pool: _Pool) -> Iterator[Batch]:
        self._check(turn)
        pool.abandon()
        window: deque[int] = deque()
        try:
            while True:
                for epochs, indices in itertools.islice(plan, self.prefetch + 1 - len(window)):
                    window.append(pool.submit(epochs, indices))
                if not window:
                    return
                yield pool.wait(window.popleft())
                self._check(turn)
        except KeyboardInterrupt:  # it may arrive after a reply is read and before it is recorded
            self.close()
            raise
        finally:
            if turn == self._turn:
                pool.abandon()


def _times_before(order: np.ndarray) -> np.ndarray:
    """Return how often each entry occurs earlier in the order."""
    by_image = np.argsort(order, kind="stable")
    places = np.arange(len(order))
    first = np.append(True, np.diff(order[by_image]) != 0)[: len(order)]
    times = np.empty(len(order), np.int64)
    times[by_image] = places - np.maximum.accumulate(np.where(first, places, 0))
    return times


class _Pool:
    """A loader's worker processes, the shared memory they write to, and the batches in flight."""

    watcher: Watcher | None = None

    def __init__(self, loader: Loader) -> None:
        self._dataset = loader.dataset
        self._shape = (loader.batch_size, 3, loader.transform.size, loader.transform.size)
        page = mmap.ALLOCATIONGRANULARITY
        self._slot_bytes = -(-int(np.prod(self._shape)) * 4 // page) * page
        self._slots: list[mmap.mmap] = []
        self._most_slots = loader.prefetch + 1 + _KEPT_BATCHES
        self._free: deque[int] = deque()
        self._in_flight: dict[int, _InFlight] = {}
        self._queue: deque[tuple[int, int, bytes]] = deque()
        self._numbers = itertools.count()
        self._images_per_task = max(1, min(_IMAGES_PER_TASK, loader.batch_size // (2 * loader.workers)))

        transform = loader_worker.describe(loader.transform)
        self._memory = os.memfd_create("d5suite-loader")
        self._processes: list[subprocess.Popen[bytes]] = []
        self._replies: list[socket.socket] = []
        self._tasks, worker_tasks = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._close = weakref.finalize(
            self, _close, os.getpid(), self._processes, [self._tasks], self._replies, self._memory
        )
        with worker_tasks:
            try:
                os.ftruncate(self._memory, loader_worker.HEADER_BYTES)
                self._current = np.frombuffer(mmap.mmap(self._memory, loader_worker.HEADER_BYTES), np.int64)
                worker_tasks.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", _PARENT_CHECK_S, 0))
                self._tasks.setblocking(False)
                for number in range(loader.workers):
                    self._start_worker(number, worker_tasks, transform, loader.seed)
            except BaseException:
                self.close()
                raise

    def _start_worker(self, number: int, worker_tasks: socket.socket, transform: dict[str, Any], seed: int) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._replies.append(ours)
        threads = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL", "NUMEXPR", "VECLIB")}
        inherited = (self._memory, worker_tasks.fileno(), theirs.fileno())
        command = [sys.executable, "-I", "-c", _START, *map(str, inherited), *_import_path()]
        # Ctrl-C goes to the whole process group; the parent handles it, so workers block it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=inherited,
                env={**os.environ, **threads, "OPENCV_FOR_THREADS_NUM": "1"},
            )
            self._processes.append(process)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()
        setup = loader_worker.LoaderSetup(transform, seed, self._shape, self._slot_bytes, number, os.getpid())
        with contextlib.suppress(OSError):  # `_receive` reports a dead worker
            ours.send(json.dumps(setup).encode())

    def submit(self, epochs: np.ndarray, indices: np.ndarray) -> int:
        """Queue a batch and return its number."""
        number = next(self._numbers)
        slot, images = self._take_slot()
        self._in_flight[number] = _InFlight(images[: len(indices)], self._dataset.labels[indices], len(indices))
        chosen = enumerate(zip(epochs.tolist(), indices.tolist(), strict=True))
        samples = [(row, epoch, index, self._dataset.files[index]) for row, (epoch, index) in chosen]
        for start in range(0, len(samples), self._images_per_task):
            task = samples[start : start + self._images_per_task]
            self._queue.append((number, len(task), json.dumps((number, slot, task)).encode()))
        self._send()
        return number

    def wait(self, number: int) -> Batch:
        """Wait until a batch is complete and return it."""
        batch = self._in_flight[number]
        while batch.remaining:
            self._send()
            self._receive()
        del self._in_flight[number]
        if batch.failures:
            _, what, where, hint = min(batch.failures, key=lambda failure: failure[0])
            raise DataError(what, where=where, hint=hint)
        crowded = len(self._slots) >= self._most_slots and not self._free
        return batch.images.copy() if crowded else batch.images, batch.labels

    def abandon(self) -> None:
        """Drop all batches in flight; a batch that is being written keeps its memory until done."""
        for number, batch in list(self._in_flight.items()):
            batch.wanted = False
            self._book(number, 0)
        while self._queue:
            number, length, _ = self._queue.popleft()
            self._book(number, length)

    def close(self) -> None:
        self._close()

    @property
    def closed(self) -> bool:
        return not self._close.alive

    def _take_slot(self) -> tuple[int, np.ndarray]:
        if self._free:
            slot = self._free.popleft()
        else:
            slot = len(self._slots)
            offset = loader_worker.HEADER_BYTES + slot * self._slot_bytes
            os.ftruncate(self._memory, offset + self._slot_bytes)
            self._slots.append(mmap.mmap(self._memory, self._slot_bytes, offset=offset))
        # Every view of a batch keeps `whole` alive, because NumPy's chains of views end at the
        # array made from the buffer. When `whole` is freed, the slot has no user.
        whole = np.frombuffer(self._slots[slot], np.float32, int(np.prod(self._shape)))
        weakref.finalize(whole, self._free.append, slot).atexit = False
        return slot, whole.reshape(self._shape)

    def _send(self) -> None:
        while self._queue:
            try:
                self._tasks.send(self._queue[0][2])
            except BlockingIOError:  # the queue is full
                return
            except OSError:  # all workers are dead; `_receive` raises the error
                return
            self._queue.popleft()

    def _receive(self) -> None:
        poll = select.poll()
        for replies in self._replies:
            poll.register(replies, select.POLLIN)
        # With tasks left, also wake up when the queue has room; there is no message for that.
        if self._queue:
            poll.register(self._tasks, select.POLLOUT)
        ready = {descriptor for descriptor, _ in poll.poll()}
        for worker, replies in enumerate(self._replies):
            if replies.fileno() not in ready:
                continue
            try:
                message = replies.recv(loader_worker.MESSAGE_BYTES)
            except ConnectionError:
                message = b""
            if not message:
                raise self._death(worker)
            number, length, failures, begin_ns, end_ns = json.loads(message)
            if self.watcher is not None:
                self.watcher(worker, begin_ns, end_ns)
            self._book(number, length, failures)

    def _book(self, number: int, length: int, failures: Sequence[tuple[int, str, str | None, str | None]] = ()) -> None:
        batch = self._in_flight[number]
        batch.remaining -= length
        batch.failures.extend(failures)
        if not batch.remaining and not batch.wanted:
            del self._in_flight[number]

    def _death(self, worker: int) -> DataError:
        index = int(self._current[worker]) - 1
        process = self._processes[worker]
        self.close()
        code = process.returncode
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
        return DataError(
            f"loader process {worker} was {how}" if code < 0 else f"loader process {worker} {how}",
            where=name_of(self._dataset.files[index]) if index >= 0 else None,
            hint="See standard error. SIGKILL often means that memory ran out.",
        )


def _import_path() -> list[str]:
    """Return this process's import path, absolute, including d5suite's folder."""
    path = [os.path.abspath(entry) for entry in sys.path]
    home = str(Path(__file__).resolve().parents[2])
    return path if home in path else [*path, home]


def _close(
    owner: int,
    processes: list[subprocess.Popen[bytes]],
    tasks: list[socket.socket],
    replies: list[socket.socket],
    memory: int,
) -> None:
    """Stop a pool's workers; a function, so that the finaliser does not reference the pool."""
    forked = os.getpid() != owner  # a fork closes its copies, and leaves the workers to their owner
    for end in (*tasks, *replies):
        if not forked:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)  # ends the workers even if a fork holds the socket open
        end.close()
    os.close(memory)
    if forked:
        return
    for process in processes:
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
