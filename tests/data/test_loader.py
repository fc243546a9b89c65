"""The loader, with real files and real worker processes."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from d5suite.data.decode import decode_image
from d5suite.data.loader import Loader
from d5suite.data.samplers import ClassBalanced, Ordered
from d5suite.data.transforms import EvalTransform, TrainTransform, sample_rng
from d5suite.errors import ConfigurationError, DataError

SIZE = 24
SHARED = "/dev/shm"  # noqa: S108
IMAGES = 23


@dataclass
class Files:
    files: list[str]
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.files)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    files = []
    for index in range(IMAGES):
        height, width = rng.integers(30, 90, 2)
        file = folder / f"{index:02}.JPEG"
        Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(file, "JPEG")
        files.append(str(file))
    return Files(files, np.arange(100, 100 + IMAGES))


OTHER_CHILDREN: list[psutil.Process] = []
"""This process's children before the test: another file's fixture may have started daemons."""


def worker_processes() -> list[psutil.Process]:
    """Return the processes that the test has started."""
    return [child for child in psutil.Process().children() if child not in OTHER_CHILDREN]


def own_shared_memory() -> set[str]:
    """Shared memory that this process maps, or whose name holds its number."""
    mapped = {line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines() if SHARED in line}
    return mapped | {name for name in os.listdir(SHARED) if f"{os.getpid()}" in name}


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Every test must leave no process, no shared memory and no open file descriptor behind."""
    gc.collect()
    OTHER_CHILDREN[:] = psutil.Process().children()
    descriptors, memory = len(os.listdir("/proc/self/fd")), own_shared_memory()
    yield
    gc.collect()
    assert worker_processes() == []
    assert own_shared_memory() <= memory
    assert len(os.listdir("/proc/self/fd")) <= descriptors


def broken(dataset: Files, tmp_path: Path, *indices: int) -> Files:
    """The dataset with the files at `indices` cut short."""
    files = list(dataset.files)
    for index in indices:
        file = tmp_path / f"broken-{index}.JPEG"
        file.write_bytes(Path(files[index]).read_bytes()[:200])
        files[index] = str(file)
    return Files(files, dataset.labels)


def with_fifo(dataset: Files, tmp_path: Path, index: int) -> tuple[Files, str]:
    """The dataset with a named pipe at `index`: whoever decodes it blocks, and a writer's `open`
    waits for that."""
    fifo = str(tmp_path / "fifo.JPEG")
    os.mkfifo(fifo)
    return Files([*dataset.files[:index], fifo, *dataset.files[index + 1 :]], dataset.labels), fifo


def when_opened(fifo: str, action: Callable[[], object]) -> threading.Thread:
    """Call `action` in a thread as soon as a worker has opened the pipe for reading."""

    def wait() -> None:
        with open(fifo, "wb"):
            action()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def kill_workers(signal_number: int = signal.SIGKILL) -> None:
    for child in worker_processes():
        child.send_signal(signal_number)


def collect(loader: Loader, epoch: int = 0) -> tuple[np.ndarray, np.ndarray]:
    batches = list(loader.epoch(epoch))
    return np.concatenate([images for images, _ in batches]), np.concatenate([labels for _, labels in batches])


@pytest.mark.parametrize("workers", [0, 2])
def test_every_image_once_with_its_own_pixels_and_label(dataset: Files, workers: int) -> None:
    transform = TrainTransform(SIZE)
    with Loader(dataset, transform, batch_size=5, workers=workers, cores=3, seed=7, drop_last=False) as loader:
        images, labels = collect(loader, epoch=3)
    assert images.dtype == np.float32
    assert labels.dtype == np.int64
    assert sorted(labels.tolist()) == dataset.labels.tolist()
    for image, label in zip(images, labels.tolist(), strict=True):
        index = label - 100
        expected = transform(decode_image(dataset.files[index]), sample_rng(7, 3, index))
        np.testing.assert_array_equal(image, expected)


@settings(max_examples=6, deadline=None)
@given(
    seed=st.integers(0, 2**40),
    epoch=st.integers(0, 1000),
    batch_size=st.integers(1, IMAGES),
    workers=st.integers(1, 3),
    prefetch=st.integers(1, 4),
    drop_last=st.booleans(),
)
def test_batches_do_not_depend_on_workers_or_prefetch(
    dataset: Files, seed: int, epoch: int, batch_size: int, workers: int, prefetch: int, drop_last: bool
) -> None:
    transform = TrainTransform(SIZE)
    common = {"batch_size": batch_size, "seed": seed, "drop_last": drop_last}
    with Loader(dataset, transform, workers=workers, cores=3, prefetch=prefetch, **common) as loader:  # type: ignore[arg-type]
        actual = list(loader.epoch(epoch))
    expected = list(Loader(dataset, transform, workers=0, **common).epoch(epoch))  # type: ignore[arg-type]
    assert len(actual) == len(expected) == len(loader)
    for (images, labels), (expected_images, expected_labels) in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(images, expected_images)
        np.testing.assert_array_equal(labels, expected_labels)


def test_order_without_shuffle_and_partial_batches(dataset: Files) -> None:
    with Loader(dataset, EvalTransform(SIZE), batch_size=10, workers=1, shuffle=False, drop_last=False) as loader:
        batches = [labels.tolist() for _, labels in loader.epoch(0)]
    assert [len(batch) for batch in batches] == [10, 10, 3] == [10] * 2 + [IMAGES % 10]
    assert list(itertools.chain.from_iterable(batches)) == dataset.labels.tolist()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sampler_says_which_images_come_and_a_repeated_one_is_cropped_anew(dataset: Files, workers: int) -> None:
    classes = np.array([0] * (IMAGES - 2) + [1, 1])
    sampler, transform = ClassBalanced(classes, seed=3), TrainTransform(SIZE)
    with Loader(
        Files(dataset.files, classes), transform, batch_size=IMAGES, workers=workers, cores=2, seed=7, sampler=sampler
    ) as loader:
        ((images, labels),) = loader.epoch(1)
        rest = list(loader.epoch(1, start=1))
    order = sampler.order(1)
    np.testing.assert_array_equal(labels, classes[order])
    assert rest == [] and abs(2 * labels.sum() - IMAGES) == 1
    rare = images[order == IMAGES - 1]
    assert len(rare) >= 5 and len({image.tobytes() for image in rare}) == len(rare)
    first = transform(decode_image(dataset.files[IMAGES - 1]), sample_rng(7, 1, IMAGES - 1))
    np.testing.assert_array_equal(rare[0], first)


def test_a_sampler_of_another_dataset_is_refused(dataset: Files) -> None:
    loader = Loader(dataset, TrainTransform(SIZE), batch_size=5, sampler=Ordered(IMAGES + 1))
    with pytest.raises(ConfigurationError, match=f"images 0 to {IMAGES} of a dataset of {IMAGES}"):
        next(loader.epoch(0))


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_from_the_middle_on_is_the_rest_of_it(dataset: Files, workers: int) -> None:
    with Loader(dataset, TrainTransform(SIZE), batch_size=4, workers=workers, cores=3) as loader:
        whole = [(images.copy(), labels) for images, labels in loader.epoch(2)]
        rest = [(images.copy(), labels) for images, labels in loader.epoch(2, start=3)]
        assert list(loader.epoch(2, start=len(loader))) == []
    assert len(rest) == len(whole) - 3
    for (images, labels), (expected_images, expected_labels) in zip(rest, whole[3:], strict=True):
        np.testing.assert_array_equal(images, expected_images)
        np.testing.assert_array_equal(labels, expected_labels)


def test_endless_batches_are_the_epochs_one_after_another(dataset: Files) -> None:
    with Loader(dataset, TrainTransform(SIZE), batch_size=10, workers=2, cores=2) as loader:
        endless = [labels.tolist() for _, labels in itertools.islice(loader.batches(first_epoch=1), 5)]
        epochs = [labels.tolist() for epoch in (1, 2, 3) for _, labels in loader.epoch(epoch)]
    assert endless == epochs[:5]
    assert len(loader) == 2


def test_workers_live_through_epochs_and_abandoned_iterators(dataset: Files) -> None:
    with Loader(dataset, TrainTransform(SIZE), batch_size=2, workers=2, cores=2) as loader:
        expected = collect(loader)
        workers = worker_processes()
        for epoch in range(4):
            next(loader.epoch(epoch))
        np.testing.assert_array_equal(collect(loader)[0], expected[0])
        assert worker_processes() == workers


def test_a_batch_stays_valid_as_long_as_it_is_kept(dataset: Files) -> None:
    with Loader(dataset, TrainTransform(SIZE), batch_size=1, workers=2, cores=2) as loader:
        view = next(loader.epoch(0))[0][0, 1]  # the batch itself is dropped
        kept, copies = view, view.copy()
        everything = [images for images, _ in loader.epoch(1)]
        everything_then = [images.copy() for images in everything]
        for epoch in range(2, 5):
            for images, _ in loader.epoch(epoch):
                images[:] = -1  # a batch is the consumer's own
        np.testing.assert_array_equal(kept, copies)
    np.testing.assert_array_equal(np.stack(everything), np.stack(everything_then))  # even after closing


def test_memory_is_reused(dataset: Files) -> None:
    with Loader(dataset, TrainTransform(SIZE), batch_size=2, workers=2, cores=2, prefetch=2) as loader:
        addresses = {images.ctypes.data for epoch in range(6) for images, _ in loader.epoch(epoch)}
    assert len(addresses) <= 7


@pytest.mark.parametrize("workers", [0, 2])
def test_a_broken_file_is_one_error_in_its_turn(dataset: Files, tmp_path: Path, workers: int) -> None:
    damaged = broken(dataset, tmp_path, 13, 11)
    with Loader(damaged, TrainTransform(SIZE), batch_size=5, workers=workers, cores=3, shuffle=False) as loader:
        for _ in range(2):  # the loader stays usable, and says the same again
            iterator = loader.epoch(0)
            assert [next(iterator)[1][0] for _ in range(2)] == [100, 105]
            with pytest.raises(DataError, match=r"broken-11\.JPEG.*truncated"):
                next(iterator)
            assert list(iterator) == []


def test_a_killed_worker_is_an_error_naming_its_file(dataset: Files, tmp_path: Path) -> None:
    files, fifo = with_fifo(dataset, tmp_path, index=12)
    with Loader(files, TrainTransform(SIZE), batch_size=5, workers=1, shuffle=False) as loader:
        thread = when_opened(fifo, kill_workers)
        with pytest.raises(DataError, match="SIGKILL") as caught:
            collect(loader)
        thread.join()
        assert caught.value.where == fifo
        with pytest.raises(ConfigurationError, match="closed"):
            next(loader.epoch(0))


def test_all_workers_killed_between_batches(dataset: Files) -> None:
    with Loader(dataset, TrainTransform(SIZE), batch_size=1, workers=2, cores=2, prefetch=1) as loader:
        iterator = loader.epoch(0)
        next(iterator)
        kill_workers()
        with pytest.raises(DataError, match="SIGKILL"):
            list(iterator)


def test_a_worker_that_cannot_start_is_an_error(
    dataset: Files, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "numpy.py").write_text("raise RuntimeError('no numpy here')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with (
        Loader(dataset, TrainTransform(SIZE), batch_size=5, workers=2, cores=2) as loader,
        pytest.raises(DataError, match="ended with exit status 1"),
    ):
        collect(loader)
    assert "no numpy here" in capfd.readouterr().err


def test_an_interrupt_stops_the_workers(dataset: Files, tmp_path: Path) -> None:
    files, fifo = with_fifo(dataset, tmp_path, index=7)
    loader = Loader(files, TrainTransform(SIZE), batch_size=5, workers=2, cores=2, shuffle=False)
    thread = when_opened(fifo, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        collect(loader)
    thread.join()
    assert worker_processes() == []


def test_garbage_collection_stops_the_workers(dataset: Files) -> None:
    loader = Loader(dataset, TrainTransform(SIZE), batch_size=5, workers=2, cores=2)
    iterator = loader.epoch(0)
    images, _ = next(iterator)
    expected = images.copy()
    workers = worker_processes()
    assert len(workers) == 2
    del loader, iterator
    gc.collect()
    assert not any(worker.is_running() for worker in workers)
    np.testing.assert_array_equal(images, expected)


SCRIPT = """
    import sys
    import numpy as np
    from types import SimpleNamespace
    from d5suite.data.loader import Loader
    from d5suite.data.transforms import TrainTransform

    class Files(SimpleNamespace):
        def __len__(self):
            return len(self.files)

    files = sys.argv[1:]
    loader = Loader(Files(files=files, labels=np.zeros(len(files), np.int64)), TrainTransform(24), batch_size=4,
                    workers=2, cores=2, shuffle=False)
    for images, labels in loader.epoch(0):
        print(float(images.sum()), flush=True)
"""


def start_script(files: list[str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-X", "dev", "-W", "error", "-c", textwrap.dedent(SCRIPT), *files]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, env=environment
    )


def test_a_program_that_never_closes_its_loader_ends_silently(dataset: Files) -> None:
    process = start_script(dataset.files)
    output, errors = process.communicate(timeout=300)
    assert (process.returncode, errors) == (0, "")
    assert len(output.split()) == IMAGES // 4


def test_control_c_reaches_the_whole_group_and_leaves_nothing(dataset: Files, tmp_path: Path) -> None:
    files, fifo = with_fifo(dataset, tmp_path, index=9)
    process = start_script(files.files)
    with open(fifo, "wb"):  # a worker has it open
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=300)
    assert process.returncode != 0
    assert errors.count("Traceback") == 1
    assert errors.rstrip().endswith("KeyboardInterrupt")
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


def test_workers_do_not_outlive_a_killed_parent(dataset: Files, tmp_path: Path) -> None:
    files, fifo = with_fifo(dataset, tmp_path, index=9)
    process = start_script(files.files)
    with open(fifo, "wb"):
        workers = psutil.Process(process.pid).children()
        process.kill()
        process.wait(timeout=300)
    assert len(workers) == 2
    assert psutil.wait_procs(workers, timeout=300)[1] == []
    process.communicate(timeout=300)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0"),
        ({"batch_size": 1, "workers": -1}, "workers is -1"),
        ({"batch_size": 1, "prefetch": 0}, "prefetch is 0"),
        ({"batch_size": 1, "seed": -1}, "seed is -1"),
        ({"batch_size": IMAGES + 1}, "do not fill one batch"),
        ({"batch_size": 1, "workers": 8000}, "8000 loader workers, but this job may use"),
        ({"batch_size": 1, "workers": 3, "cores": 2}, "3 loader workers, but this job may use 2 cores"),
    ],
)
def test_settings_out_of_range(dataset: Files, settings: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Loader(dataset, TrainTransform(SIZE), **settings)  # type: ignore[arg-type]


def test_a_transform_that_workers_cannot_have(dataset: Files) -> None:
    class Local(TrainTransform):
        pass

    assert len(next(Loader(dataset, Local(SIZE), batch_size=5).epoch(0))[0]) == 5
    with pytest.raises(ConfigurationError, match=r"Local.*cannot be sent"):
        Loader(dataset, Local(SIZE), batch_size=5, workers=1)


def test_one_iterator_at_a_time(dataset: Files) -> None:
    with Loader(dataset, TrainTransform(SIZE), batch_size=5, workers=1) as loader:
        first = loader.epoch(0)
        next(first)
        second = loader.epoch(1)
        next(second)
        with pytest.raises(ConfigurationError, match="later epoch"):
            next(first)
        assert len(list(second)) == len(loader) - 1


def test_workers_import_no_framework_and_use_one_thread(dataset: Files) -> None:
    with Loader(dataset, TrainTransform(SIZE), batch_size=5, workers=1) as loader:
        collect(loader)
        (worker,) = worker_processes()
        assert worker.num_threads() == 1
        libraries = {Path(mapping.path).name for mapping in worker.memory_maps()}
    assert not any(name.startswith(("libtorch", "libtensorflow", "libjax", "cv2")) for name in libraries)
