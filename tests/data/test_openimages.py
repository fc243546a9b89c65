"""Open Images trees: the published layout, untidy and damaged trees, and the small set that is
made in that layout."""

from __future__ import annotations

import csv
import hashlib
import os
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from d5suite.cli import main
from d5suite.data.decode import decode, decode_image
from d5suite.data.drawing import class_name
from d5suite.data.loader import Loader
from d5suite.data.openimages import OpenImages, SparseLabels
from d5suite.data.synthesis import cached_openimages, make_openimages
from d5suite.data.transforms import EvalTransform
from d5suite.errors import ConfigurationError, DataError
from d5suite.validate.metrics import mean_average_precision

pytestmark = pytest.mark.filterwarnings("ignore:.* are left out")

CAT, DOG, TREE, RARE = "/m/01yrx", "/m/0bt9lr", "/m/07j7r", "/m/zzz"
HEADER = "ImageID,Source,LabelName,Confidence\n"
LABELS = "train-annotations-human-imagelabels.csv"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Three trainable classes, one that is not, and five training images."""
    (tmp_path / "class-descriptions.csv").write_text(
        f'{TREE},Tree\n{CAT},Cat\n{RARE},"Thing, rare"\n{DOG},Dog, tame\n', encoding="utf-8"
    )
    (tmp_path / "classes-trainable.txt").write_text(f"{TREE}\n{CAT}\n{DOG}\n")
    (tmp_path / "train").mkdir()
    for image in ("0a", "05", "ff", "b0", "c0"):
        (tmp_path / "train" / f"{image}.jpg").touch()
    for other in (".0a.jpg", "notes.txt", "d0.png"):
        (tmp_path / "train" / other).touch()
    (tmp_path / LABELS).write_text(
        HEADER
        + f"ff,verification,{CAT},0\n"
        + f"05,verification,{CAT},1\n"
        + f"05,crowdsource-verification,{RARE},0\n"
        + f"05,verification,{TREE},1.0\n"
        + f"c0,verification,{RARE},1\n"
        + f"0a,verification,{DOG},0.0\n"
        + f"05,crowdsource-verification,{CAT},1\n"
    )
    return tmp_path


def labels(root: Path, *rows: str) -> None:
    with open(root / LABELS, "a") as file:
        file.write("".join(f"{row}\n" for row in rows))


def test_images_by_id_and_classes_in_the_order_of_the_list(tree: Path) -> None:
    dataset = OpenImages(tree, "train")
    assert dataset.label_names == [TREE, CAT, DOG]
    assert list(dataset.files) == [str(tree / "train" / f"{image}.jpg") for image in ("05", "0a", "ff")]
    assert dataset.files[1:] == list(dataset.files)[1:]
    assert dataset.files[-1] == str(tree / "train" / "ff.jpg")
    assert len(dataset) == len(dataset.labels) == 3
    assert dataset.labels[:].dtype == np.int64
    assert dataset.labels[:].tolist() == [[1, 1, -1], [-1, -1, 0], [-1, 0, -1]]
    assert dataset.skipped == 2  # b0 without any row, c0 with one of a label that is not trainable
    assert dataset.class_names == {TREE: "Tree", CAT: "Cat", DOG: "Dog, tame", RARE: "Thing, rare"}


def test_the_first_classes_and_the_images_verified_for_them(tree: Path) -> None:
    dataset = OpenImages(tree, "train", classes=1)
    assert dataset.label_names == [TREE]
    assert [Path(file).stem for file in dataset.files] == ["05"]
    assert dataset.labels[:].tolist() == [[1]]
    assert dataset.skipped == 4
    assert [Path(file).stem for file in OpenImages(tree, "train", classes=2).files] == ["05", "ff"]


def test_without_the_list_all_splits_number_all_labels_alike(tree: Path) -> None:
    (tree / "classes-trainable.txt").unlink()
    (tree / "validation").mkdir()
    (tree / "validation" / "10.jpg").touch()
    (tree / "validation" / LABELS.replace("train", "validation")).write_text(f"{HEADER}10,verification,{CAT},1\n")
    train, validation = OpenImages(tree, "train"), OpenImages(tree, "validation")
    assert train.label_names == validation.label_names == sorted([CAT, DOG, RARE, TREE])
    assert validation.labels[:].tolist() == [[1, -1, -1, -1]]
    assert len(train) == 4


def test_other_places_and_forms_of_the_files(tree: Path) -> None:
    expected = OpenImages(tree, "train").labels[:].tolist()
    (tree / LABELS).rename(tree / "train" / LABELS)
    descriptions = tree / "class-descriptions.csv"
    descriptions.write_text("LabelName,DisplayName\n" + descriptions.read_text())
    for file in (descriptions, tree / "train" / LABELS, tree / "classes-trainable.txt"):
        file.write_bytes(file.read_bytes().replace(b"\n", b"\r\n").removesuffix(b"\r\n"))
    dataset = OpenImages(tree, "train")
    assert dataset.labels[:].tolist() == expected
    assert "LabelName" not in dataset.class_names


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (f"05,verification,{CAT},0", rf"lines 3, 8, 9 contradict each other about label {CAT} of image 05"),
        ("05,verification,/m/unheard,1", r"line 9: label '/m/unheard' is not in class-descriptions.csv"),
        (f"77,verification,{CAT},1", r"line 9: image 77 is not in .*train\n"),
        (f"d0,verification,{CAT},1", r"line 9: image d0 is not in"),
        (f"../train/05,verification,{CAT},1", r"line 9: '../train/05' is not an ImageID"),
        (f"..,verification,{CAT},1", r"line 9: '..' is not an ImageID"),
        (f"/etc/x,verification,{CAT},1", r"line 9: '/etc/x' is not an ImageID"),
        (f",verification,{CAT},1", r"line 9: '' is not an ImageID"),
        (f"05,verification,{CAT},0.7", r"line 9 has confidence '0.7', not 0 or 1"),
        (f"05,verification,{CAT},", r"line 9 has confidence ''"),
        (f"05,verification,{CAT}", r"line 9 is not 'ImageID,Source,LabelName,Confidence'"),
        (f"05,verification,{CAT},1,0.5", r"line 9 is not"),
        (f"05,verification,{CAT},1,05\nverification,{CAT},1", r"line 9 is not"),
        ("", r"line 9 is not"),
        (f"05\0,verification,{CAT},1", r"line 9 is not"),
        (f"{'0' * 256},verification,{CAT},1", r"line 9 is not"),
        (f'"05,verification,{CAT},1', r"""line 9: '"05' is not an ImageID"""),
        (f"05,verification,{CAT},1\r5", r"line 9 has confidence '1\\r5'"),
        (f"0\u00e9,verification,{CAT},1", r"line 9 is not"),
    ],
)
def test_a_bad_row_is_one_clear_error(tree: Path, row: str, message: str) -> None:
    labels(tree, row)
    with pytest.raises(DataError, match=message) as caught:
        OpenImages(tree, "train")
    assert caught.value.where == str(tree / LABELS)


def test_several_missing_images_are_counted(tree: Path) -> None:
    labels(tree, *(f"{image},verification,{CAT},1" for image in (90, 77, 85)))
    with pytest.raises(DataError, match=r"line 10: image 77 .* nor are 2 others"):
        OpenImages(tree, "train")
    labels(tree, f"85,verification,{RARE},1")
    with pytest.raises(DataError, match=r"line 10: image 77 .* nor are 2 others"):
        OpenImages(tree, "train", classes=2)
    assert len(OpenImages(tree, "train", classes=1)) == 1  # no image that has a label of this class is missing


def test_a_bad_row_far_down_is_named(tree: Path) -> None:
    """Beyond the piece of the file that is read at once."""
    labels(tree, *[f"0a,verification,{DOG},0"] * 200_000)
    assert OpenImages(tree, "train").labels[:].tolist() == [[1, 1, -1], [-1, -1, 0], [-1, 0, -1]]
    labels(tree, f"ff,verification,{CAT},1")
    with pytest.raises(DataError, match=r"lines 2, 200009 contradict each other"):
        OpenImages(tree, "train")
    labels(tree, "ff,verification", "05,,,,,")
    with pytest.raises(DataError, match=r"line 200010 is not"):
        OpenImages(tree, "train")


def replace(name: str, text: str | bytes) -> Callable[[Path], None]:
    return lambda tree: cast("None", (tree / name).write_bytes(text.encode() if isinstance(text, str) else text))


def append(name: str, text: str) -> Callable[[Path], None]:
    return lambda tree: cast("None", (tree / name).write_text((tree / name).read_text() + text))


def make_folder(name: str) -> Callable[[Path], None]:
    def damage(tree: Path) -> None:
        (tree / name).unlink()
        (tree / name).mkdir()

    return damage


@pytest.mark.parametrize(
    ("damage", "where", "message"),
    [
        (shutil.rmtree, "", "does not exist"),
        (lambda tree: (tree / "train").rename(tree / "training"), "", "no 'train' folder"),
        (lambda tree: (tree / LABELS).unlink(), LABELS, "verified labels is missing"),
        (replace(LABELS, ""), LABELS, "first line"),
        (replace(LABELS, f"05,verification,{CAT},1\n"), LABELS, "first line"),
        (replace(LABELS, HEADER), LABELS, "no image has a verified label"),
        (replace(LABELS, f"{HEADER}05"), LABELS, "line 2 is not"),
        (replace(LABELS, f"{HEADER}05,verification,{RARE},1\n"), LABELS, "no image has a verified label"),
        (make_folder(LABELS), LABELS, "cannot be read"),
        (lambda tree: (tree / "class-descriptions.csv").unlink(), "class-descriptions.csv", "missing"),
        (append("class-descriptions.csv", "/m/1\n"), "class-descriptions.csv", "line 5 is not"),
        (append("class-descriptions.csv", ",Nameless\n"), "class-descriptions.csv", "line 5 is not"),
        (append("class-descriptions.csv", f"{CAT},Tiger\n"), "class-descriptions.csv", "line 5 .* a second name"),
        (replace("class-descriptions.csv", b"/m/1,\xff\xfe\n"), "class-descriptions.csv", "not a valid text file"),
        (append("classes-trainable.txt", "/m/unheard\n"), "classes-trainable.txt", "line 4: label '/m/unheard'"),
        (append("classes-trainable.txt", f"{CAT}\n"), "classes-trainable.txt", "line 4 has .* second time"),
        (replace("classes-trainable.txt", "\n"), "classes-trainable.txt", "empty"),
    ],
)
def test_a_damaged_tree_is_one_clear_error(
    tree: Path, damage: Callable[[Path], object], where: str, message: str
) -> None:
    damage(tree)
    with pytest.raises(DataError, match=message) as caught:
        OpenImages(tree, "train")
    assert caught.value.where == str(tree / where)


def test_without_the_list_a_label_without_description_is_an_error(tree: Path) -> None:
    (tree / "classes-trainable.txt").unlink()
    labels(tree, "05,verification,/m/unheard,1")
    with pytest.raises(DataError, match="line 9: label '/m/unheard' is not in"):
        OpenImages(tree, "train")


def test_settings_out_of_range(tree: Path) -> None:
    with pytest.raises(DataError, match="only 3"):
        OpenImages(tree, "train", classes=4)
    with pytest.raises(ConfigurationError, match="at least 1"):
        OpenImages(tree, "train", classes=0)
    with pytest.raises(ConfigurationError, match="train, validation, test"):
        OpenImages(tree, "val")  # type: ignore[arg-type]


@settings(deadline=None)
@given(st.data())
def test_sparse_labels_are_the_dense_ones(data: st.DataObject) -> None:
    classes = data.draw(st.integers(1, 4))
    dense = np.array(data.draw(st.lists(st.lists(st.integers(-1, 1), min_size=classes, max_size=classes), min_size=1)))
    image, number = np.nonzero(dense >= 0)
    starts = np.searchsorted(image, np.arange(len(dense) + 1))
    sparse = SparseLabels(starts, number.astype(np.int32), dense[image, number].astype(np.int8), classes)
    assert sparse.shape == dense.shape
    place = st.integers(-len(dense), len(dense) - 1)
    chosen = np.array(data.draw(st.lists(place)), np.int64)
    assert np.array_equal(sparse[chosen], dense[chosen])
    one = data.draw(place)
    assert np.array_equal(sparse[one], dense[one])
    piece = data.draw(st.slices(len(dense)))
    assert np.array_equal(sparse[piece], dense[piece])
    for outside in (len(dense), -len(dense) - 1):
        with pytest.raises(IndexError, match=f"{outside} .* size {len(dense)}"):
            sparse[np.array([0, outside])]


SMALL: dict[str, Any] = {
    "classes": 10,
    "train_images": 100,
    "validation_images": 40,
    "test_images": 20,
    "min_side": 64,
    "max_side": 128,
    "progress": False,
}


def fingerprint(root: Path) -> dict[str, str]:
    files = sorted(path for path in root.rglob("*") if path.is_file())
    return {str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data") / "openimages"
    make_openimages(root, **SMALL)
    return root


def test_the_made_set_has_the_published_layout(small: Path) -> None:
    for split, count in (("train", 100), ("validation", 40), ("test", 20)):
        dataset = OpenImages(small, cast("Any", split))
        assert len(dataset) == count
        assert dataset.skipped == 1
        assert all(len(Path(file).stem) == 16 and int(Path(file).stem, 16) >= 0 for file in dataset.files)
        dense = dataset.labels[:]
        assert (dense == 1).any(axis=0).all()
        for value in (-1, 0, 1):
            assert 0.1 < np.mean(dense == value) < 0.7
        assert set(np.unique((dense == 1).sum(axis=1))) == {1, 2, 3, 4}
    assert [dataset.class_names[name] for name in dataset.label_names] == [class_name(i) for i in range(10)]
    assert len(dataset.class_names) > 10
    assert dataset.label_names != sorted(dataset.label_names)
    with open(small / LABELS, newline="") as lines:
        rows = list(csv.reader(lines))
    assert rows[0] == ["ImageID", "Source", "LabelName", "Confidence"]
    assert {row[1] for row in rows[1:]} == {"verification", "crowdsource-verification"}
    assert (small / "class-descriptions.csv").read_text().startswith("/m/")


def test_it_holds_the_odd_files(small: Path) -> None:
    kinds: Counter[tuple[str | None, str]] = Counter()
    for file in OpenImages(small, "train").files:
        with Image.open(file) as image:
            kinds[image.format, image.mode] += 1
            assert 64 <= min(image.size) <= max(image.size) <= 128
        assert decode(Path(file)).ndim == 3
    assert kinds == {("JPEG", "RGB"): 97, ("JPEG", "L"): 1, ("JPEG", "CMYK"): 1, ("PNG", "RGB"): 1}


def test_same_seed_same_bytes(small: Path, tmp_path: Path) -> None:
    make_openimages(tmp_path / "again", **SMALL)
    assert fingerprint(tmp_path / "again") == fingerprint(small)
    make_openimages(tmp_path / "other", **SMALL | {"seed": 1})
    common = fingerprint(tmp_path / "other").items() & fingerprint(small).items()
    assert {name for name, _ in common} == {"class-descriptions.csv", "classes-trainable.txt"}


def test_what_an_image_shows_can_be_learnt(small: Path) -> None:
    """A linear model on coarse colour histograms, fitted to verified labels only, ranks
    validation images well."""

    def features(split: Literal["train", "validation"]) -> tuple[np.ndarray, np.ndarray]:
        dataset = OpenImages(small, split)
        rows = []
        for file in dataset.files:
            pixels = np.asarray(decode_image(Path(file)).resize((32, 32))).reshape(-1, 3)
            rows.append(np.bincount((pixels // 64).astype(int) @ [16, 4, 1], minlength=64) / 1024)
        return np.sqrt(rows), dataset.labels[:]

    (x, y), (x_val, y_val) = features("train"), features("validation")
    scores = []
    for number in range(10):
        known = y[:, number] >= 0
        centre = x[known].mean(axis=0)
        a = x[known] - centre
        weights = np.linalg.solve(a.T @ a + 0.1 * np.eye(64), a.T @ (y[known, number] - y[known, number].mean()))
        scores.append((x_val - centre) @ weights)
    assert mean_average_precision(np.stack(scores, axis=1), y_val) > 0.75
    shuffled = np.random.default_rng(0).permutation(np.stack(scores, axis=1))
    assert mean_average_precision(shuffled, y_val) < 0.65


@pytest.mark.parametrize("workers", [0, 2])
def test_the_loader_gives_rows_of_labels(small: Path, workers: int) -> None:
    dataset = OpenImages(small, "validation", classes=7)
    with Loader(dataset, EvalTransform(32), batch_size=4, workers=workers, cores=2, shuffle=False) as loader:
        for number, (images, rows) in enumerate(loader.epoch(0)):
            assert images.shape == (4, 3, 32, 32)
            assert np.array_equal(rows, dataset.labels[4 * number : 4 * number + 4])
    assert rows.dtype == np.int64


def test_as_few_as_possible(tmp_path: Path) -> None:
    make_openimages(
        tmp_path / "one", classes=1, train_images=1, validation_images=1, test_images=1, min_side=16, max_side=16
    )
    dataset = OpenImages(tmp_path / "one", "train")
    assert dataset.labels[:].tolist() == [[1]]


def test_an_existing_directory_and_bad_numbers_are_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(DataError, match="not empty"):
        make_openimages(tmp_path, **SMALL)
    with pytest.raises(ConfigurationError, match="test_images is 0"):
        make_openimages(tmp_path / "out", **SMALL | {"test_images": 0})
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_the_cache_is_keyed_and_reused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("D5SUITE_CACHE", str(tmp_path))
    options: dict[str, Any] = {"min_side": 16, "max_side": 20, "progress": False}
    first = cached_openimages(2, 2, 2, 2, **options)
    written = (first / LABELS).stat().st_mtime_ns
    assert cached_openimages(2, 2, 2, 2, **options) == first
    assert (first / LABELS).stat().st_mtime_ns == written
    others = {cached_openimages(2, 3, 2, 2, **options), cached_openimages(2, 2, 2, 2, seed=1, **options)}
    assert len(others | {first}) == 3


def test_the_command_makes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["data", "make", "openimages", "--out", str(tmp_path / "set"), "--classes", "3", "--seed", "1"]
    images = ["--train-images", "4", "--validation-images", "3", "--test-images", "3"]
    assert main([*arguments, *images]) == 0
    assert str(tmp_path / "set") in capsys.readouterr().out
    assert len(OpenImages(tmp_path / "set", "train")) == 4
    assert main([*arguments, *images]) == 2
    assert "not empty" in capsys.readouterr().err


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to("absent")])
def test_what_has_the_name_of_an_image_and_is_none_is_an_error(tree: Path, make: Callable[[Path], object]) -> None:
    make(tree / "train" / "e0.jpg")
    with pytest.raises(DataError, match=r"e0\.jpg: 1 entries with image names are not regular files"):
        OpenImages(tree, "train")


def test_what_is_left_out_is_counted(tree: Path) -> None:
    with pytest.warns(UserWarning, match=r"train: 3 files or folders are left out, such as '\.0a\.jpg'"):
        OpenImages(tree, "train")
