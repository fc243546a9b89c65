"""ImageNet trees: the layouts of the real set, and trees with something wrong."""

from __future__ import annotations

import codecs
import os
import shutil
import socket
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from d5suite.data.imagenet import ImageNet
from d5suite.errors import ConfigurationError, DataError

pytestmark = pytest.mark.filterwarnings("ignore:.* are left out")

WNIDS = ("n01440764", "n01751748", "n02105855")


def touch(*files: Path) -> None:
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Three classes with two training images each, and a flat val with three images."""
    for wnid in reversed(WNIDS):
        touch(tmp_path / "train" / wnid / f"{wnid}_10.JPEG", tmp_path / "train" / wnid / f"{wnid}_2.JPEG")
    touch(tmp_path / "train" / ".cache" / "x", tmp_path / "train" / WNIDS[0] / "notes.txt")
    touch(*(tmp_path / "val" / f"ILSVRC2012_val_0000000{number}.JPEG" for number in (1, 2, 3)))
    (tmp_path / "LOC_val_solution.csv").write_text(
        "ImageId,PredictionString\n"
        "ILSVRC2012_val_00000002,n01440764 10 20 30 40 \n"
        'ILSVRC2012_val_00000001,"n01751748 111 108 431 323 n01751748 5 5 9 9"\n'
        "ILSVRC2012_val_00000003,n02105855 1 2 3 4 \n"
    )
    (tmp_path / "LOC_synset_mapping.txt").write_text(
        "n01440764 tench, Tinca tinca\nn01751748 sea snake\nn02105855 Shetland sheepdog\n"
    )
    return tmp_path


def test_training_images_by_class_and_name(tree: Path) -> None:
    dataset = ImageNet(tree, "train")
    assert dataset.wnids == list(WNIDS)
    assert [path.name for path in dataset.paths[:2]] == ["n01440764_10.JPEG", "n01440764_2.JPEG"]
    assert dataset.paths[0].parent == tree / "train" / "n01440764"
    assert dataset.labels.dtype == np.int64
    assert dataset.labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert len(dataset) == len(dataset.files) == 6
    assert dataset.class_names["n01440764"] == "tench, Tinca tinca"


def test_flat_val_takes_its_labels_from_the_solution_file(tree: Path) -> None:
    dataset = ImageNet(tree, "val")
    assert [path.name[-6] for path in dataset.paths] == ["1", "2", "3"]
    assert dataset.labels.tolist() == [1, 0, 2]


def test_lists_may_begin_with_a_byte_order_mark(tree: Path) -> None:
    """Excel and PowerShell write one."""
    for name in ("LOC_synset_mapping.txt", "LOC_val_solution.csv"):
        (file,) = tree.rglob(name)
        file.write_bytes(codecs.BOM_UTF8 + file.read_bytes())
    dataset = ImageNet(tree, "val")
    assert dataset.labels.tolist() == [1, 0, 2]
    assert dataset.class_names["n01440764"] == "tench, Tinca tinca"


def test_val_with_class_folders(tree: Path) -> None:
    for wnid in WNIDS:
        touch(tree / "val" / wnid / "a.jpg")
    dataset = ImageNet(tree, "val")
    assert dataset.labels.tolist() == [0, 1, 2]


def test_the_first_classes_only(tree: Path) -> None:
    assert ImageNet(tree, "train", classes=2).labels.tolist() == [0, 0, 1, 1]
    val = ImageNet(tree, "val", classes=1)
    assert [path.name[-6] for path in val.paths] == ["2"]
    assert val.wnids == ["n01440764"]


def test_kaggle_nesting_and_a_tree_with_val_only(tree: Path, tmp_path: Path) -> None:
    nested = tree / "ILSVRC" / "Data" / "CLS-LOC"
    nested.mkdir(parents=True)
    (tree / "train").rename(nested / "train")
    (tree / "val").rename(nested / "val")
    assert len(ImageNet(tree, "train")) == 6
    assert ImageNet(tree, "val").labels.tolist() == [1, 0, 2]
    (nested / "train").rename(tree / "elsewhere")
    assert ImageNet(tree, "val").labels.tolist() == [1, 0, 2]  # classes from the mapping file


def test_a_part_of_the_classes_with_the_lists_of_all(tree: Path) -> None:
    shutil.rmtree(tree / "train" / WNIDS[1])
    with pytest.raises(DataError, match=r"line 3: image ILSVRC2012_val_00000001 .*unknown wnid 'n01751748'"):
        ImageNet(tree, "val")
    (tree / "val" / "ILSVRC2012_val_00000001.JPEG").unlink()
    dataset = ImageNet(tree, "val")
    assert dataset.wnids == [WNIDS[0], WNIDS[2]]
    assert dataset.labels.tolist() == [0, 1]


def test_lines_that_are_there_twice_count_once(tree: Path) -> None:
    for name in ("LOC_val_solution.csv", "LOC_synset_mapping.txt"):
        text = (tree / name).read_text()
        (tree / name).write_text(text + text.splitlines()[-1] + "\n")
    dataset = ImageNet(tree, "val")
    assert dataset.labels.tolist() == [1, 0, 2]
    assert dataset.class_names[WNIDS[2]] == "Shetland sheepdog"


def break_missing_root(tree: Path) -> None:
    tree.rename(tree.with_name("moved"))


def break_missing_split(tree: Path) -> None:
    (tree / "train").rename(tree / "training")


def break_no_classes(tree: Path) -> None:
    (tree / "train").rename(tree / "training")
    (tree / "LOC_synset_mapping.txt").unlink()
    touch(tree / "train" / "readme")


def break_empty_class(tree: Path) -> None:
    for file in (tree / "train" / WNIDS[1]).iterdir():
        file.rename(file.with_suffix(".txt"))


def break_unlabelled(tree: Path) -> None:
    touch(tree / "val" / "ILSVRC2012_val_00000009.JPEG")


def break_unknown_wnid(tree: Path) -> None:
    file = tree / "LOC_val_solution.csv"
    file.write_text(file.read_text().replace("n01751748", "n99999999"))


def break_no_solution(tree: Path) -> None:
    (tree / "LOC_val_solution.csv").unlink()


def break_solution_header(tree: Path) -> None:
    (tree / "LOC_val_solution.csv").write_text("a,b,c\n")


def break_solution_line(tree: Path) -> None:
    (tree / "LOC_val_solution.csv").write_text("ImageId,PredictionString\nILSVRC2012_val_00000001\n")


def break_solution_encoding(tree: Path) -> None:
    (tree / "LOC_val_solution.csv").write_bytes(b"ImageId,PredictionString\n\xff\xfe,n01440764\n")


def append(file: Path, text: str) -> None:
    file.write_text(file.read_text() + text)


def break_contradiction(tree: Path) -> None:
    append(tree / "LOC_val_solution.csv", "ILSVRC2012_val_00000002,n01751748 1 2 3 4\n")


def break_missing_images(tree: Path) -> None:
    (tree / "val" / "ILSVRC2012_val_00000001.JPEG").unlink()
    (tree / "val" / "ILSVRC2012_val_00000003.JPEG").unlink()


def break_unknown_wnid_without_image(tree: Path) -> None:
    append(tree / "LOC_val_solution.csv", "ILSVRC2012_val_00000004,n99999999 1 2 3 4\n")


def break_incomplete_mapping(tree: Path) -> None:
    (tree / "LOC_synset_mapping.txt").write_text("n01440764 tench, Tinca tinca\n")


def break_second_name(tree: Path) -> None:
    append(tree / "LOC_synset_mapping.txt", "n01751748 adder\n")


def break_mapping_is_folder(tree: Path) -> None:
    (tree / "LOC_synset_mapping.txt").unlink()
    (tree / "LOC_synset_mapping.txt").mkdir()


def break_unknown_folder(tree: Path) -> None:
    touch(*(tree / "val" / wnid / "a.JPEG" for wnid in (*WNIDS, "n77777777")))


@pytest.mark.parametrize(
    ("damage", "split", "message"),
    [
        (break_missing_root, "train", "does not exist"),
        (break_missing_split, "train", "no 'train' folder"),
        (break_no_classes, "train", "no classes"),
        (break_empty_class, "train", "n01751748.*holds no images"),
        (break_unlabelled, "val", "00000009.*no label"),
        (break_unknown_wnid, "val", "LOC_val_solution.csv: line 3: image .*00000001 .*unknown wnid 'n99999999'"),
        (break_unknown_wnid_without_image, "val", "line 5: image .*00000004 .*unknown wnid 'n99999999'"),
        (break_contradiction, "val", "lines 2, 5 contradict each other about .*00000002: n01440764 and n01751748"),
        (break_missing_images, "val", "line 3: image .*00000001 is not in .*/val, nor are 1 others\n  Add"),
        (break_incomplete_mapping, "train", "mapping.txt: class n01751748 is not in this list, nor are 1 others"),
        (break_incomplete_mapping, "val", "class n01751748 is not in this list"),
        (break_second_name, "train", "mapping.txt: line 4 gives class 'n01751748' a second name"),
        (break_no_solution, "val", "LOC_val_solution.csv.*missing"),
        (break_solution_header, "val", "first line"),
        (break_solution_line, "val", "line 2"),
        (break_solution_encoding, "val", "not a valid text file"),
        (break_mapping_is_folder, "train", "LOC_synset_mapping.txt: cannot be read"),
        (break_unknown_folder, "val", "unknown wnid 'n77777777'"),
    ],
)
def test_a_damaged_tree_is_one_clear_error(tree: Path, damage: object, split: str, message: str) -> None:
    assert callable(damage)
    damage(tree)
    with pytest.raises(DataError, match=message) as caught:
        ImageNet(tree, split)  # type: ignore[arg-type]
    assert caught.value.where is not None
    assert caught.value.where.startswith(str(tree))


def test_settings_out_of_range(tree: Path) -> None:
    with pytest.raises(DataError, match="only 3"):
        ImageNet(tree, "train", classes=4)
    with pytest.raises(ConfigurationError, match="at least 1"):
        ImageNet(tree, "train", classes=0)
    with pytest.raises(ConfigurationError, match="train, val"):
        ImageNet(tree, "test")  # type: ignore[arg-type]


LOOK_ALIKES: dict[str, Callable[[Path], object]] = {
    "a FIFO": os.mkfifo,
    "a folder": Path.mkdir,
    "a socket": lambda path: socket.socket(socket.AF_UNIX).bind(os.path.relpath(path)),
    "a dangling link": lambda path: path.symlink_to("absent"),
}


@pytest.mark.parametrize("kind", LOOK_ALIKES)
@pytest.mark.parametrize("place", [f"train/{WNIDS[1]}/{WNIDS[1]}_7.JPEG", "val/ILSVRC2012_val_00000004.JPEG"])
def test_what_has_the_name_of_an_image_and_is_none_is_an_error(
    tree: Path, kind: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tree)  # names of sockets are short
    LOOK_ALIKES[kind](tree / place)
    LOOK_ALIKES[kind](tree / place.replace("4.JPEG", "5.JPEG").replace("_7.", "_8."))
    with pytest.raises(DataError, match=f"2 entries .*; this one is {kind}") as error:
        ImageNet(tree, "train" if place.startswith("train") else "val")
    assert str(error.value).startswith(str(tree / place))


@pytest.mark.parametrize(("kind", "name"), [("a FIFO", "n03"), ("a dangling link", "n03"), ("a folder", "a.JPEG")])
def test_what_looks_like_a_class_folder_and_is_none_is_an_error(tree: Path, kind: str, name: str) -> None:
    LOOK_ALIKES[kind](tree / "train" / name)
    with pytest.raises(DataError, match=f"{name}: this entry among the class folders"):
        ImageNet(tree, "train")


def test_what_is_left_out_is_counted(tree: Path) -> None:
    touch(
        tree / "train" / f".{WNIDS[0]}" / "a.JPEG", tree / "train" / WNIDS[0] / "more" / "b.JPEG",
        tree / "train" / WNIDS[1] / "._c.JPEG", tree / "train" / "loose.JPEG", tree / "train" / ".DS_Store",
    )  # fmt: skip
    with pytest.warns(UserWarning, match=rf"{tree / 'train'}: 6 files or folders are left out, such as '.cache'"):
        assert len(ImageNet(tree, "train")) == 6
    shutil.rmtree(tree / "train" / ".cache")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ImageNet(tree, "val")


def test_a_list_of_classes_without_an_end_is_not_read(tree: Path) -> None:
    (tree / "LOC_synset_mapping.txt").unlink(missing_ok=True)
    (tree / "LOC_synset_mapping.txt").symlink_to("/dev/zero")
    with pytest.raises(DataError, match=r"LOC_synset_mapping\.txt: cannot be read: this is not a regular file"):
        ImageNet(tree, "train")
