"""The formats that image datasets are stored in: to each other, against the frameworks' own
readers, and damaged."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from d5suite import cli
from d5suite.data.convert import convert, work_folder
from d5suite.data.formats import open_store, read_split, recordio, splits_of, tfrecord
from d5suite.data.formats.store import Store
from d5suite.data.imagenet import ImageNet
from d5suite.data.loader import Loader
from d5suite.data.openimages import OpenImages
from d5suite.data.reading import FileLocation, ImageReader, masked_crc32c_bytes
from d5suite.data.synthesis import make_openimages
from d5suite.data.transforms import EvalTransform, TrainTransform
from d5suite.data.verify import compare
from d5suite.errors import ConfigurationError, DataError

RECORDS = ("hdf5", "tfrecord", "recordio")
MAGIC = struct.pack("<I", 0xCED7230A)


@pytest.fixture(scope="module")
def openimages_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small set in Open Images' layout."""
    out = tmp_path_factory.mktemp("data") / "openimages"
    make_openimages(out, classes=5, train_images=12, validation_images=4, test_images=4, progress=False)
    return out


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory, imagenet_tree: Path) -> dict[str, Path]:
    """The ImageNet tree and what it is converted to, one after another and back."""
    return _chain(tmp_path_factory.mktemp("stores"), imagenet_tree)


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory, openimages_tree: Path) -> dict[str, Path]:
    """The same of the Open Images tree."""
    return _chain(tmp_path_factory.mktemp("several"), openimages_tree)


def _chain(out: Path, tree: Path) -> dict[str, Path]:
    made = {"source": tree}
    for kind in (*RECORDS, "folder"):
        source = list(made.values())[-1]
        made[kind] = out / kind
        convert(source, made[kind], kind)
    return made


@pytest.fixture
def copy(stores: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    """A copy of a store, to be damaged."""

    def make(kind: str) -> Path:
        target = tmp_path / kind
        shutil.copytree(stores[kind], target) if stores[kind].is_dir() else shutil.copy(stores[kind], target)
        return target

    return make


def contents(store: Store) -> list[bytes]:
    reader = ImageReader()
    try:
        return [reader.read(location, number) for number, location in enumerate(store.files)]
    finally:
        reader.close()


def tree_of(contents: list[bytes], root: Path) -> Path:
    """An ImageNet tree of two classes with these bytes as its images, which need not be any."""
    for label in ("n00000001", "n00000002"):
        (root / "train" / label).mkdir(parents=True)
        for number, content in enumerate(contents):
            (root / "train" / label / f"{number:03}.JPEG").write_bytes(content)
    return root


def files_under(path: Path) -> dict[str, str]:
    """The SHA-256 of every file."""
    paths = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return {str(file.relative_to(path)): hashlib.sha256(file.read_bytes()).hexdigest() for file in paths}


def rewrite(file: Path, change: Callable[[bytearray], object]) -> None:
    content = bytearray(file.read_bytes())
    result = change(content)
    file.write_bytes(result if isinstance(result, bytes) else content)


def flip(at: int) -> Callable[[bytearray], None]:
    def change(content: bytearray) -> None:
        content[at] ^= 1

    return change


# Conversion


def test_a_tree_comes_back_byte_by_byte(stores: dict[str, Path]) -> None:
    assert files_under(stores["folder"]) == files_under(stores["source"])


@pytest.mark.parametrize("kind", [*RECORDS, "folder"])
def test_every_format_holds_the_same(stores: dict[str, Path], several: dict[str, Path], kind: str) -> None:
    for made, images in ((stores, [32, 16]), (several, None)):
        found = list(compare(made["source"], made[kind]))
        assert [split.differences for split in found] == [0] * len(found)
        if images:
            assert [split.images for split in found] == images
        for split in splits_of(made["source"]):
            expected, actual = read_split(made["source"], split), read_split(made[kind], split)
            assert actual.names == expected.names
            assert contents(actual) == contents(expected)
            everything = np.arange(len(expected))
            np.testing.assert_array_equal(actual.labels[everything], expected.labels[everything])
            assert (actual.label_names, actual.class_names) == (expected.label_names, expected.class_names)


@pytest.mark.parametrize("kind", RECORDS)
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_the_same_from_every_format(stores: dict[str, Path], kind: str, workers: int) -> None:
    datasets = ImageNet(stores["source"], "train", classes=3), open_store(stores[kind], "train", classes=3)
    batches = []
    for dataset in datasets:
        with Loader(dataset, TrainTransform(32), batch_size=7, workers=workers, cores=2, seed=5) as loader:
            batches.append([(images.copy(), labels) for epoch in (0, 1) for images, labels in loader.epoch(epoch)])
    assert len(batches[0]) == 6
    for (images, labels), (expected, expected_labels) in zip(batches[1], batches[0], strict=True):
        np.testing.assert_array_equal(images, expected)
        np.testing.assert_array_equal(labels, expected_labels)
        assert labels.dtype == np.int64


@pytest.mark.parametrize("kind", [*RECORDS, "folder"])
def test_batches_with_several_labels_per_image(several: dict[str, Path], kind: str) -> None:
    expected = OpenImages(several["source"], "validation", classes=3)
    dataset = open_store(several[kind], "val", classes=3)
    with Loader(dataset, EvalTransform(32), batch_size=len(expected), shuffle=False) as loader:
        ((_, labels),) = loader.epoch(0)
    np.testing.assert_array_equal(labels, expected.labels[np.arange(len(expected))])
    assert labels.shape == (len(expected), 3)


def test_folders_open_as_what_they_were(stores: dict[str, Path], several: dict[str, Path]) -> None:
    assert isinstance(open_store(stores["source"], "validation"), ImageNet)
    assert isinstance(open_store(several["source"], "val"), OpenImages)
    with pytest.raises(ConfigurationError, match="unknown split"):
        open_store(stores["hdf5"], "everything")
    with pytest.raises(DataError, match="no split 'test'"):
        open_store(stores["hdf5"], "test")
    with pytest.raises(DataError, match="only 4"):
        open_store(stores["recordio"], "val", classes=5)


@settings(max_examples=12, deadline=None)
@given(
    images=st.lists(
        st.lists(st.one_of(st.binary(max_size=9), st.just(MAGIC)), max_size=12).map(b"".join), min_size=1, max_size=5
    )
)
def test_any_bytes_survive(images: list[bytes]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        last = tree_of(images, Path(folder) / "source")
        for kind in RECORDS:
            last = (convert(last, Path(folder) / kind, kind), Path(folder) / kind)[1]
            assert contents(read_split(last, "train")) == images * 2


def test_several_files_per_split(
    imagenet_tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tfrecord, "SHARD_BYTES", 400_000)
    convert(imagenet_tree, tmp_path / "shards", "tfrecord")
    shards = sorted(path.name for path in (tmp_path / "shards").glob("train-*"))
    assert len(shards) > 2
    assert shards[1] == f"train-00001-of-{len(shards):05}"
    assert cli.main(["data", "verify", str(imagenet_tree), str(tmp_path / "shards")]) == 0
    assert capsys.readouterr().out.startswith("train: 32 images in both, ")
    (tmp_path / "shards" / shards[1]).unlink()
    with pytest.raises(DataError, match="missing: 1"):
        read_split(tmp_path / "shards", "train")


def test_indexes_are_made_again(copy: Callable[[str], Path]) -> None:
    for kind in ("tfrecord", "recordio"):
        path = copy(kind)
        before = files_under(path)
        names = read_split(path, "train").names
        for file in [*path.glob("*.index.h5"), *path.glob("*.idx")]:
            file.unlink()
        assert read_split(path, "train").names == names
        assert files_under(path)["train.index.h5"] == before["train.index.h5"]


def test_a_destination_that_exists_is_left_alone(imagenet_tree: Path, tmp_path: Path) -> None:
    (tmp_path / "there").write_text("mine")
    with pytest.raises(DataError, match="exists already"):
        convert(imagenet_tree, tmp_path / "there", "hdf5")
    assert (tmp_path / "there").read_text() == "mine"
    assert os.listdir(tmp_path) == ["there"]


SLOW = """
    import sys, time
    from d5suite.data import convert
    from d5suite.data.reading import ImageReader

    read = ImageReader.read
    def slow(*arguments):
        time.sleep(0.02)
        return read(*arguments)

    ImageReader.read, convert.NOTE_S = slow, 0
    convert.convert(*sys.argv[1:])
"""


@pytest.mark.parametrize("kind", [*RECORDS, "folder"])
def test_a_killed_conversion_goes_on(
    imagenet_tree: Path, stores: dict[str, Path], tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "made"
    command = [sys.executable, "-c", textwrap.dedent(SLOW), str(imagenet_tree), str(target), kind]
    process = subprocess.Popen(command)
    note = work_folder(target) / "progress.json"
    deadline = time.monotonic() + 60
    while not (note.exists() and json.loads(note.read_text())["done"]["train"] >= 10):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = json.loads(note.read_text())["done"]
    assert 10 <= done["train"] + done["val"] < 48
    assert not target.exists()

    with pytest.raises(DataError, match="here already"):
        convert(stores["source"], target, "folder" if kind == "hdf5" else "hdf5")
    read, images = ImageReader.read, []

    def counted(reader: ImageReader, location: FileLocation, number: int) -> bytes:
        images.append(number)
        return read(reader, location, number)

    monkeypatch.setattr(ImageReader, "read", counted)
    convert(imagenet_tree, target, kind)
    assert len(images) == 48 - done["train"] - done["val"]
    time.sleep(1.1)  # HDF5 files hold times in seconds, unless one takes care
    convert(imagenet_tree, tmp_path / "whole", kind)
    assert files_under(target) == files_under(tmp_path / "whole")
    assert sorted(os.listdir(tmp_path)) == ["made", "whole"]


@pytest.mark.parametrize("kind", RECORDS)
@pytest.mark.parametrize("limit", [300_000, 9000])
def test_a_full_disk_is_one_error_and_room_lets_it_go_on(
    imagenet_tree: Path, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, kind: str, limit: int
) -> None:
    # Of tiny images the index is larger than the records.
    tree = imagenet_tree if limit > 9000 else tree_of([b"tiny"] * 60, tmp_path_factory.mktemp("tiny"))
    target = tmp_path / "made"
    command = [sys.executable, "-m", "d5suite.cli", "data", "convert", str(tree), str(target), "--to", kind]

    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    whole = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}  # else Python's own files are cut
    done = subprocess.run(command, capture_output=True, text=True, env=whole, preexec_fn=small_files, timeout=300)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(f"error: {target}: cannot be written: File too large")
    assert "\n  Free some space, then run the same command again" in done.stderr
    assert done.stderr.count("\n") == 2
    assert not target.exists()
    assert cli.main(command[3:]) == 0
    assert {split.differences for split in compare(tree, target)} == {0}
    assert os.listdir(tmp_path) == ["made"]


def test_too_little_room_is_found_before_anything_is_written(
    imagenet_tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    little = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: little)
    with pytest.raises(DataError, match="bytes are needed and 1,000 are free"):
        convert(imagenet_tree, tmp_path / "made", "tfrecord")
    assert not (tmp_path / "made").exists()


def test_one_process_converts_at_a_time(imagenet_tree: Path, tmp_path: Path) -> None:
    work = work_folder(tmp_path / "made")
    work.mkdir()
    with open(work / "lock", "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        with pytest.raises(DataError, match="another process"):
            convert(imagenet_tree, tmp_path / "made", "hdf5")
    convert(imagenet_tree, tmp_path / "made", "hdf5")


def test_a_conversion_killed_at_its_very_end(
    imagenet_tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*arguments: object) -> None:
        raise KeyboardInterrupt

    for module, name in ((os, "rename"), (shutil, "rmtree")):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, killed)
            with pytest.raises(KeyboardInterrupt):
                convert(imagenet_tree, tmp_path / name, "recordio")
        assert work_folder(tmp_path / name).exists()
        convert(imagenet_tree, tmp_path / name, "recordio")
        assert not work_folder(tmp_path / name).exists()
        assert files_under(tmp_path / name).keys() == files_under(tmp_path / "rename").keys()


def test_an_image_that_changes_meanwhile(imagenet_tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = ImageReader.read
    monkeypatch.setattr(ImageReader, "read", lambda *arguments: read(*arguments) + b"x")
    with pytest.raises(DataError, match="changed"):
        convert(imagenet_tree, tmp_path / "made", "recordio")


# Comparison


def test_differences_are_named(stores: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other"
    shutil.copytree(stores["source"], other)
    first, second, third = sorted((other / "train").rglob("*.JPEG"))[:3]
    rewrite(first, lambda content: content.append(0))
    second.unlink()
    elsewhere = sorted((other / "train").iterdir())[1]
    third.rename(elsewhere / third.name)
    mapping = other / "LOC_synset_mapping.txt"
    mapping.write_text(mapping.read_text().replace("red", "pale"))
    assert cli.main(["data", "verify", str(stores["hdf5"]), str(other)]) == 1
    out = capsys.readouterr().out
    assert "train: 31 images in both" in out
    assert "4 differences" in out
    assert f"{first.name}: the images differ" in out
    assert f"{second.name} is in {stores['hdf5']} only" in out
    assert f"{third.name}: the labels differ, {third.parent.name} and {elsewhere.name}" in out
    assert "is called" in out


def test_a_missing_split_is_a_difference(stores: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(stores["source"], tmp_path / "other")
    shutil.rmtree(tmp_path / "other" / "val")
    assert [split.differences for split in compare(tmp_path / "other", stores["tfrecord"])] == [0, 1]


def test_the_command_line_is_quiet_in_a_pipe(stores: dict[str, Path]) -> None:
    command = [sys.executable, "-m", "d5suite.cli", "data", "verify", str(stores["source"]), str(stores["recordio"])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr, done.stdout.count("\n")) == (0, "", 2)


# Damage


def second_record(file: Path) -> int:
    """Where the second record of a TFRecord file begins."""
    return int(struct.unpack("<Q", file.read_bytes()[:8])[0]) + 16


@pytest.mark.parametrize(
    ("change", "message", "at"),
    [
        (lambda content: bytes(content[:-9]), "the file ends inside this record", None),
        (lambda content: bytes(content[: len(content) // 2]), "the file ends inside this record", None),
        (lambda content: bytes(content) + b"abc", "the file ends inside this record", "end"),
        (flip(3), "not a TFRecord file", 0),
        (lambda content: MAGIC + content[4:], "not a TFRecord file: its content is RecordIO", 0),
        (
            lambda content: b"".join(
                [struct.pack("<Q", 1 << 60), masked_crc32c_bytes(struct.pack("<Q", 1 << 60)), content[12:]]
            ),
            "ends inside this record of 1,152,921,504,606,846,976 bytes",
            0,
        ),
    ],
)
@pytest.mark.parametrize("indexed", [False, True])
def test_damaged_tfrecord(
    copy: Callable[[str], Path],
    change: Callable[[bytearray], object],
    message: str,
    at: int | str | None,
    indexed: bool,
) -> None:
    path = copy("tfrecord")
    file = path / "train-00000-of-00001"
    size = file.stat().st_size
    rewrite(file, change)
    if not indexed:
        (path / "train.index.h5").unlink()
        with pytest.raises(DataError, match=message) as caught:
            read_split(path, "train")
        assert str(caught.value.where).startswith(f"{file}, byte ")
        if at is not None:
            assert caught.value.where == f"{file}, byte {size if at == 'end' else at}"
    elif file.stat().st_size != size:
        shorter = min(size, file.stat().st_size)
        what = "It was cut short" if shorter < size else r"changed since train\.index\.h5 was made"
        with pytest.raises(DataError, match=what) as caught:
            read_split(path, "train")
        assert caught.value.where == f"{file}, byte {shorter}"
    else:
        with pytest.raises(DataError, match=r"checksum of the record's length|file ends inside this record"):
            contents(read_split(path, "train"))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_changed_bit_of_a_tfrecord_is_found_by_its_checksum(copy: Callable[[str], Path], workers: int) -> None:
    path = copy("tfrecord")
    file = path / "train-00000-of-00001"
    at = second_record(file)
    rewrite(file, flip(at + 5000))
    dataset = open_store(path, "train")
    with Loader(dataset, EvalTransform(32), batch_size=1, workers=workers, shuffle=False) as loader:
        batches = loader.epoch(0)
        next(batches)
        with pytest.raises(DataError, match="checksum of the record's data") as caught:
            next(batches)
    assert caught.value.where == f"{file}, byte {at}"
    with pytest.raises(DataError, match="checksum of the record's data"):
        convert(path, path.parent / "made", "recordio")


def test_a_record_that_is_no_example(copy: Callable[[str], Path]) -> None:
    path = copy("tfrecord")
    (path / "train.index.h5").unlink()
    length = struct.pack("<Q", 5)
    for data in (b"\x0a\xff\xff\xff\x0f", b"\x07aaaa", b"\xff" * 5):
        record = length + masked_crc32c_bytes(length) + data + masked_crc32c_bytes(data)
        (path / "train-00000-of-00001").write_bytes(record)
        with pytest.raises(DataError, match=r"not a tf\.train\.Example") as caught:
            read_split(path, "train")
        assert str(caught.value.where).endswith("train-00000-of-00001, byte 0")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: bytes(content[:-4]), "the file ends inside this record"),
        (lambda content: bytes(content) + MAGIC, "the file ends inside this record"),
        (lambda content: bytes(content) + MAGIC + struct.pack("<I", 1 << 29 | 0), "the file ends inside this record"),
        (lambda content: bytes(content) + MAGIC + struct.pack("<I", 3 << 29 | 0), "not in order"),
        (lambda content: bytes(content) + MAGIC + struct.pack("<I", 4) + bytes(4), "shorter than its header of 24"),
        (
            lambda content: bytes(content) + MAGIC + struct.pack("<II", 24, 1 << 31) + bytes(20),
            "shorter than its header of 8,589,934,616",
        ),
        (flip(0), "not a RecordIO file"),
        (lambda content: b"\x89HDF\r\n\x1a\n" + content[8:], "its content is HDF5"),
        (flip(8), "label -147486123600849666048, but there are 4"),
        (lambda content: content.__setitem__(slice(12, 16), struct.pack("<f", 1.5)), "not a whole number"),
        (lambda content: content.__setitem__(slice(12, 16), struct.pack("<f", float("nan"))), "not a whole number"),
        (lambda content: content.__setitem__(slice(12, 16), struct.pack("<f", 4)), "label 4, but there are 4"),
    ],
)
def test_damaged_recordio(copy: Callable[[str], Path], change: Callable[[bytearray], object], message: str) -> None:
    path = copy("recordio")
    (path / "train.index.h5").unlink()
    rewrite(path / "train.rec", change)
    with pytest.raises(DataError, match=message) as caught:
        read_split(path, "train")
    assert f"{path / 'train.rec'}, byte " in str(caught.value.where)


def test_indexes_that_do_not_fit(copy: Callable[[str], Path]) -> None:
    path = copy("recordio")
    lines = (path / "train.idx").read_text().splitlines()
    for wrong, message in (
        (lines[:-1], "31 entries for 32 records"),
        ([*lines[:-1], "31\t8"], "no record of train.rec begins at byte 8"),
        (["what"], "not an index"),
    ):
        (path / "train.idx").write_text("\n".join(wrong))
        with pytest.raises(DataError, match=message):
            read_split(path, "train")
    (path / "train.idx").write_text("\n".join(lines))
    file = path / "train.rec"
    size = file.stat().st_size
    for change, message, at in (
        (lambda content: bytes(content) + bytes(4), r"changed since train\.index\.h5 was made", size),
        (lambda content: bytes(content[:-1004]), "It was cut short: fetch or convert it again", size - 1000),
    ):
        rewrite(file, change)
        with pytest.raises(DataError, match=message) as caught:
            read_split(path, "train")
        assert caught.value.where == f"{file}, byte {at}"


def relabel_record(path: Path) -> None:
    rewrite(path / "train.rec", lambda content: content.__setitem__(slice(12, 16), struct.pack("<f", 2)))


def relabel_record_without_list(path: Path) -> None:
    (path / "train.lst").unlink()
    relabel_record(path)


def replace_in_list(old: str, new: str) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        text = (path / "train.lst").read_text()
        (path / "train.lst").write_text(text.replace(old, new, 1))

    return damage


def twice_in_list(path: Path) -> None:
    with open(path / "train.lst", "a") as file:
        file.write("1\t0\ttrain/other.JPEG\n")


def reverse_keys(path: Path) -> None:
    rows = [line.split("\t") for line in (path / "train.idx").read_text().splitlines()]
    lines = (f"{one[0]}\t{other[1]}\n" for one, other in zip(rows, reversed(rows), strict=True))
    (path / "train.idx").write_text("".join(lines))


def relabel_index(path: Path) -> None:
    with h5py.File(path / "train.index.h5", "r+") as file:
        file["labels"][1] = 3


def exchange_places(path: Path) -> None:
    with h5py.File(path / "train.index.h5", "r+") as file:
        for name in ("record", "offset", "length"):
            file[name][:2] = file[name][:2][::-1]


def rename_class_in_index(path: Path) -> None:
    with h5py.File(path / "train.index.h5", "r+") as file:
        file["class_names"][0] = ord("X")


def change_example(name: bytes, after: int, to: int) -> Callable[[Path], None]:
    """Change a byte of the first record, so many after a name in it, and mend the checksum."""

    def damage(path: Path) -> None:
        file = path / "train-00000-of-00001"
        end = second_record(file) - 4

        def change(content: bytearray) -> None:
            content[content.index(name, 12, end) + len(name) + after] = to
            content[end : end + 4] = masked_crc32c_bytes(bytes(content[12:end]))

        rewrite(file, change)

    return damage


@pytest.mark.parametrize(
    ("kind", "damage", "where", "message"),
    [
        ("recordio", relabel_record, "train.rec, byte 0", r"record 0 has label 2, and train\.lst says 0 of its id 0"),
        (
            "recordio",
            relabel_record_without_list,
            "train.rec, byte 0",
            r"record 0 has label n\d+, but n\d+ in the index",
        ),
        ("recordio", replace_in_list("1\t0\t", "1\t3\t"), "train.rec, byte", "record 1 has label 0, and .* says 3"),
        ("recordio", replace_in_list("0\ttrain/n", "0\ttrain/x"), "train.rec, byte 0", "record 0 is 'train/x"),
        ("recordio", twice_in_list, "train.lst", "line 33 has the id 1 a second time"),
        ("recordio", reverse_keys, "train.idx, line 1", "key 0 names byte .* record 31 begins, which has the id 31"),
        ("recordio", relabel_index, "train.rec, byte", r"record 1 has label n\d+, but n\d+ in the index"),
        ("recordio", exchange_places, "train.rec, byte 0", "record 0 is not where the index places it"),
        ("recordio", rename_class_in_index, "train.index.h5", "different classes from the records"),
        ("tfrecord", relabel_index, "train-00000-of-00001, byte", r"record 1 has label n\d+, but n\d+ in the index"),
        ("tfrecord", exchange_places, "train-00000-of-00001, byte 0", "record 0 is not where the index places it"),
        (
            "tfrecord",
            change_example(b"image/class/label", 6, 2),
            "train-00000-of-00001, byte 0",
            "record 0 gives class 'n.*' the number 2 instead of 0",
        ),
        (
            "tfrecord",
            change_example(b"image/filename", 12, ord("x")),
            "train-00000-of-00001, byte 0",
            "record 0 is 'train/.*', but 'train/.* in the index",
        ),
    ],
)
def test_verify_and_convert_believe_records_and_no_index(
    copy: Callable[[str], Path],
    stores: dict[str, Path],
    kind: str,
    damage: Callable[[Path], None],
    where: str,
    message: str,
) -> None:
    path = copy(kind)
    damage(path)
    with pytest.raises(DataError, match=message) as caught:
        list(compare(stores["source"], path))
    assert str(caught.value.where).startswith(str(path / where))
    with pytest.raises(DataError, match=message):
        convert(path, path.parent / "made", "hdf5")


def test_indexes_of_records_in_another_order_than_their_ids(tmp_path: Path) -> None:
    ids = (7, 2, 5)  # as im2rec writes a shuffled list
    offsets, content = [], b""
    for image_id in ids:
        offsets.append(len(content))
        content += recordio.framed(struct.pack("<IfQQ", 0, image_id % 2, image_id, 0) + b"image", "")
    (tmp_path / "train.rec").write_bytes(content)
    (tmp_path / "train.idx").write_text("".join(f"{key}\t{at}\n" for key, at in zip(ids, offsets, strict=True)))
    listed = "".join(f"{image_id}\t{image_id % 2}.000000\t{image_id}.jpg\n" for image_id in ids)
    (tmp_path / "train.lst").write_text(listed)
    assert [split.differences for split in compare(tmp_path, tmp_path, progress=False)] == [0]
    # As rec2idx.py makes them: MXNet would take the list's label of 0 for the image with id 7.
    (tmp_path / "train.idx").write_text("".join(f"{key}\t{at}\n" for key, at in enumerate(offsets)))
    with pytest.raises(DataError, match=r"key 0 names byte 0 of train\.rec, where record 0 begins, which has the id 7"):
        list(compare(tmp_path, tmp_path))
    (tmp_path / "train.lst").unlink()
    assert [split.differences for split in compare(tmp_path, tmp_path)] == [0]


def test_numbers_of_classes_that_others_write(copy: Callable[[str], Path]) -> None:
    path = copy("tfrecord")
    for file in (path / "classes.json", path / "train.index.h5", path / "val.index.h5"):
        file.unlink()
    assert [split.differences for split in compare(path, path)] == [0, 0]
    change_example(b"image/class/label", 6, 3)(path)  # the first class now has the numbers of two
    with pytest.raises(DataError, match=r"record 1 gives class 'n.*' the number 0 instead of 3"):
        list(compare(path, path))
    change_example(b"image/class/label", 6, 0)(path)
    label = b"image/class/label\x12\x05\x1a\x03\x0a\x01"
    for file in path.iterdir():
        rewrite(file, lambda content: bytes(content).replace(label + b"\3", label + b"\0"))
    with pytest.raises(DataError, match=r"record 24 gives class 'n.*' the number 0, which 'n.*' has"):
        list(compare(path, path))


def test_a_tree_where_not_all_classes_have_a_name(imagenet_tree: Path, tmp_path: Path) -> None:
    shutil.copytree(imagenet_tree, tmp_path / "tree")
    mapping = tmp_path / "tree" / "LOC_synset_mapping.txt"
    first, *rest = mapping.read_text().splitlines()
    mapping.write_text("\n".join([first.split()[0], *rest]))
    last = tmp_path / "tree"
    for kind in (*RECORDS, "folder"):
        last = (convert(last, tmp_path / kind, kind), tmp_path / kind)[1]
    assert len(read_split(last, "train").class_names) == 3
    assert [split.differences for split in compare(tmp_path / "tree", last)] == [0, 0]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("offset", 1 << 40, "outside of its file"),
        ("length", 1 << 62, "outside of its file"),
        ("length", -1, "outside of its file"),
        ("file", 1, "outside of its file"),
        ("labels", 4, "a label is outside of the 4 classes"),
        ("labels", -1, "a label is outside of the 4 classes"),
        ("start", 7, "not ascending"),
    ],
)
def test_an_index_with_wrong_numbers(copy: Callable[[str], Path], name: str, value: int, message: str) -> None:
    path = copy("tfrecord")
    with h5py.File(path / "train.index.h5", "r+") as file:
        file[name][3] = value
    with pytest.raises(DataError, match=message) as caught:
        read_split(path, "train")
    assert "train.index.h5" in str(caught.value.where)


def test_classes_that_do_not_match(copy: Callable[[str], Path]) -> None:
    path = copy("tfrecord")
    classes = json.loads((path / "classes.json").read_text())
    del classes["classes"][1]
    (path / "classes.json").write_text(json.dumps(classes))
    with pytest.raises(DataError, match="has different classes"):
        read_split(path, "train")
    (path / "train.index.h5").unlink()
    with pytest.raises(DataError, match="is not in the list of classes") as caught:
        read_split(path, "train")
    assert ", byte " in str(caught.value.where)
    for wrong in ("{}", "[]", '{"several labels per image": 1, "classes": [["a", "b"]]}', "\xff"):
        (path / "classes.json").write_text(wrong, encoding="latin-1")
        with pytest.raises(DataError, match="is not a list of"):
            read_split(path, "train")


def test_damaged_hdf5(copy: Callable[[str], Path], tmp_path: Path) -> None:
    path = copy("hdf5")
    whole = path.read_bytes()
    path.write_bytes(whole[:100_000])
    with pytest.raises(DataError, match="truncated") as caught:
        read_split(path, "train")
    assert caught.value.where == f"{path}, byte 100000"
    path.write_bytes(whole)
    for name, make, message in (
        ("train/bytes", {"data": np.zeros(1000, np.uint8)}, "outside of the 1,000 bytes"),
        ("train/length", {"data": np.full(32, -1)}, "image 0 is outside"),
        ("train/offset", {"data": np.full(32, 1 << 62)}, "image 0 is outside"),
        ("train/offset", {"data": np.zeros(31, np.int64)}, "31 entries, not 32"),
        ("train/offset", {"data": np.zeros(32, np.float32)}, "not a one-dimensional array of int64"),
        ("train/offset", {"data": np.zeros(32, np.int64), "compression": "gzip"}, "compressed"),
        ("train/length", {"shape": (1 << 40,), "chunks": (1024,), "dtype": np.int64}, "should hold"),
        ("train/labels", {"data": np.full(32, 4)}, "outside of the 4 classes"),
        ("class_names", {"data": np.zeros(3, np.uint8)}, "does not match their names"),
        ("label_names", {"data": np.full(8, 255, np.uint8)}, "damaged"),
    ):
        path.write_bytes(whole)
        with h5py.File(path, "r+") as file:
            del file[name]
            file.create_dataset(name, **make)
        with pytest.raises(DataError, match=message):
            read_split(path, "train")
    path.write_bytes(whole)
    with h5py.File(tmp_path / "secret.h5", "w") as file:
        file["x"] = np.zeros(32, np.int64)
    with h5py.File(path, "r+") as file:
        del file["train/labels"]
        file["train/labels"] = h5py.ExternalLink(str(tmp_path / "secret.h5"), "/x")
    with pytest.raises(DataError, match="is missing"):
        read_split(path, "train")
    with pytest.raises(DataError, match="is not in format 'd5suite images'"):
        read_split(tmp_path / "secret.h5", "train")


def test_hdf5_written_anew_by_other_programs(stores: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "anew.h5"
    for layout in ({}, {"chunks": (1000,)}):
        with h5py.File(stores["hdf5"]) as source, h5py.File(path, "w") as target:
            target.attrs.update(source.attrs)
            for name in source:
                source.copy(name, target)
            for split in ("train", "val"):
                images = source[f"{split}/bytes"][...]
                del target[f"{split}/bytes"]
                target[split].create_dataset("bytes", shape=images.shape, dtype=np.uint8, **layout)
            for split in ("val", "train"):  # in turn, so that the chunks do not follow each other
                images = source[f"{split}/bytes"][...]
                step = 5000
                for begin in [*range(0, len(images), 2 * step), *range(step, len(images), 2 * step)]:
                    target[f"{split}/bytes"][begin : begin + step] = images[begin : begin + step]
        assert contents(read_split(path, "train")) == contents(read_split(stores["source"], "train"))


def test_names_that_lead_elsewhere(copy: Callable[[str], Path]) -> None:
    path = copy("recordio")
    (path / "train.index.h5").unlink()
    lines = (path / "train.lst").read_text().splitlines()
    for name in ("train/../../x.JPEG", "train/" + "x" * 300, "train/a\x1b[2J.JPEG", "train//x"):
        (path / "train.lst").write_text("\n".join([f"0\t0\t{name}", *lines[1:]]))
        with pytest.raises(DataError, match="unsafe name"):
            read_split(path, "train")


def test_a_store_of_another_kind_than_its_name_says(stores: dict[str, Path], tmp_path: Path) -> None:
    shutil.copy(stores["recordio"] / "train.rec", tmp_path / "images.h5")
    with pytest.raises(DataError, match="neither a folder nor an HDF5 file: its content is RecordIO"):
        open_store(tmp_path / "images.h5", "train")
    with pytest.raises(DataError, match="does not exist"):
        open_store(tmp_path / "nothing", "train")
    (tmp_path / "both").mkdir()
    for name, kind in (("train.rec", "recordio"), ("train-00000-of-00001", "tfrecord")):
        shutil.copy(stores[kind] / name, tmp_path / "both" / name)
    with pytest.raises(DataError, match="both TFRecord and RecordIO"):
        open_store(tmp_path / "both", "train")


def test_checksums() -> None:
    # RFC 3720, B.4: 0x8A9136AA and 0x62A8AB43; rotated by 15 bits to the right, plus 0xA282EAD8
    assert masked_crc32c_bytes(bytes(32)) == struct.pack("<I", 0x0FD7FFFA)
    assert masked_crc32c_bytes(b"\xff" * 32) == struct.pack("<I", 0xF909B029)


# The frameworks' own readers and writers


def foreign(code: str, *arguments: object) -> dict[str, list[list[object]]]:
    """Run a framework in a process of its own, and return the JSON that it prints last."""
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, list[list[object]]] = json.loads(done.stdout.splitlines()[-1])
    return result


TENSORFLOW = """
    import hashlib, json, sys
    from pathlib import Path
    import tensorflow as tf

    one, several, out = map(Path, sys.argv[1:])
    sha = lambda content: hashlib.sha256(content).hexdigest()
    feature = tf.io.FixedLenFeature
    text = {name: feature([], tf.string) for name in
            ("image/encoded", "image/filename", "image/class/synset", "image/class/text", "image/format")}
    number = {name: feature([], tf.int64) for name in ("image/class/label", "image/height", "image/width")}
    rows = []
    for record in tf.data.TFRecordDataset(str(one / "train-00000-of-00001")):
        found = tf.io.parse_single_example(record, text | number)
        image = tf.io.decode_image(found["image/encoded"]).shape
        assert image[:2] == [found["image/height"], found["image/width"]]
        rows.append([found["image/filename"].numpy().decode(), int(found["image/class/label"]),
                     found["image/class/synset"].numpy().decode(), found["image/class/text"].numpy().decode(),
                     sha(found["image/encoded"].numpy()), found["image/format"].numpy().decode()])
    ragged = {f"image/class/{name}": tf.io.VarLenFeature(tf.int64) for name in ("positive", "negative")}
    more = []
    for record in tf.data.TFRecordDataset(str(several / "train-00000-of-00001")):
        found = tf.io.parse_single_example(record, ragged | {"image/filename": feature([], tf.string)})
        verified = [found[name].values.numpy().tolist() for name in ragged]
        more.append([found["image/filename"].numpy().decode(), *verified])

    # As build_imagenet_data.py writes them: labels from 1, names of files only, boxes
    out.mkdir()
    for shard in range(2):
        with tf.io.TFRecordWriter(str(out / f"validation-{shard:05}-of-00002")) as writer:
            for i in range(shard * 3, shard * 3 + 3):
                bytes_of = lambda value: tf.train.Feature(bytes_list=tf.train.BytesList(value=[value]))
                ints = lambda *value: tf.train.Feature(int64_list=tf.train.Int64List(value=value))
                floats = tf.train.Feature(float_list=tf.train.FloatList(value=[0.25, 0.5]))
                record = {"image/encoded": bytes_of(bytes([i]) * 1000 * i), "image/class/label": ints(i % 3 + 1),
                          "image/class/synset": bytes_of(b"n0%d" % (9 - i % 3)), "image/height": ints(7),
                          "image/filename": bytes_of(b"ILSVRC2012_val_0000000%d.JPEG" % i),
                          "image/object/bbox/xmin": floats, "image/class/negative": ints(-5, 2**40)}
                example = tf.train.Example(features=tf.train.Features(feature=record))
                writer.write(example.SerializeToString())
    print(json.dumps({"one": rows, "several": more}))
"""


@pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="needs TensorFlow")
def test_tensorflow_reads_ours_and_we_read_its(
    stores: dict[str, Path], several: dict[str, Path], tmp_path: Path
) -> None:
    found = foreign(TENSORFLOW, stores["tfrecord"], several["tfrecord"], tmp_path / "theirs")
    ours = read_split(stores["source"], "train")
    assert isinstance(ours.labels, np.ndarray)
    assert found["one"] == [
        [name, label, ours.label_names[label], ours.class_names[ours.label_names[label]],
         hashlib.sha256(content).hexdigest(), "JPEG" if content.startswith(b"\xff\xd8") else "PNG"]
        for name, label, content in zip(ours.names, ours.labels.tolist(), contents(ours), strict=True)
    ]  # fmt: skip
    labels = read_split(several["source"], "train")
    rows = labels.labels[np.arange(len(labels))]
    assert found["several"] == [
        [name, np.flatnonzero(row == 1).tolist(), np.flatnonzero(row == 0).tolist()]
        for name, row in zip(labels.names, rows, strict=True)
    ]
    theirs = read_split(tmp_path / "theirs", "val")
    assert theirs.label_names == ["n07", "n08", "n09"]
    assert theirs.labels[np.arange(6)].tolist() == [2, 1, 0, 2, 1, 0]
    assert theirs.names[3] == "validation/n09/ILSVRC2012_val_00000003.JPEG"
    assert contents(theirs) == [bytes([i]) * 1000 * i for i in range(6)]
    assert read_split(tmp_path / "theirs", "val").names == theirs.names  # from the index that was made


MXNET = """
    import hashlib, json, sys
    from pathlib import Path
    from d5suite.backends.mxnet.runtime import mx

    recordio = mx.recordio
    one, several, raw, out = map(Path, sys.argv[1:])
    sha = lambda content: hashlib.sha256(content).hexdigest()
    def rows(folder):
        file = recordio.MXIndexedRecordIO(str(folder / "train.idx"), str(folder / "train.rec"), "r")
        for key in file.keys:
            header, image = recordio.unpack(file.read_idx(key))
            label = header.label if isinstance(header.label, float) else header.label.tolist()
            yield [key, header.id, label, sha(image)]
    result = {"one": list(rows(one)), "several": list(rows(several)), "raw": list(rows(raw))}
    out.mkdir()
    writer = recordio.MXIndexedRecordIO(str(out / "train.idx"), str(out / "train.rec"), "w")
    magic = bytes.fromhex("0a23d7ce")
    for i in range(6):
        content = (magic * i + b"ab" * i + magic) * 3
        writer.write_idx(i, recordio.pack(recordio.IRHeader(0, float(i % 3), i, 0), content))
    writer.close()
    print(json.dumps(result))
"""


@pytest.mark.skipif(importlib.util.find_spec("mxnet") is None, reason="needs MXNet")
def test_mxnet_reads_ours_and_we_read_its(stores: dict[str, Path], several: dict[str, Path], tmp_path: Path) -> None:
    images = [MAGIC, b"", MAGIC * 3 + b"x", b"abcd" + MAGIC, b"abc" + MAGIC, b"a" * 101 + MAGIC * 2 + b"bc"]
    convert(tree_of(images, tmp_path / "tree"), tmp_path / "raw", "recordio")
    found = foreign(MXNET, stores["recordio"], several["recordio"], tmp_path / "raw", tmp_path / "theirs")
    for name, store in (
        ("one", read_split(stores["source"], "train")),
        ("raw", read_split(tmp_path / "tree", "train")),
    ):
        labels = store.labels[np.arange(len(store))].tolist()
        digests = [hashlib.sha256(content).hexdigest() for content in contents(store)]
        expected = zip(range(len(store)), range(len(store)), labels, digests, strict=True)
        assert found[name] == [list(row) for row in expected]
    labels = read_split(several["source"], "train")
    rows = labels.labels[np.arange(len(labels))]
    for row, (_, _, label, _) in zip(rows, found["several"], strict=True):
        assert label == [(row == 1).sum(), *np.flatnonzero(row == 1), *np.flatnonzero(row == 0)]
    theirs = read_split(tmp_path / "theirs", "train")
    assert theirs.labels[np.arange(6)].tolist() == [0, 1, 2] * 2
    assert theirs.label_names == ["0", "1", "2"]
    assert contents(theirs) == [(MAGIC * i + b"ab" * i + MAGIC) * 3 for i in range(6)]
