"""ImageNet trees: the layouts of the real set, and trees with something wrong."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from d5suite.data.imagenet import ImageNet
from d5suite.errors import ConfigurationError, DataError

WNIDS = ("n01440764", "n01751748", "n02105855")


def touch(*files: Path) -> None:
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Three classes with two training images each, and a flat val with two images."""
    for wnid in reversed(WNIDS):
        touch(tmp_path / "train" / wnid / f"{wnid}_10.JPEG", tmp_path / "train" / wnid / f"{wnid}_2.JPEG")
    touch(tmp_path / "train" / ".cache" / "x", tmp_path / "train" / WNIDS[0] / "notes.txt")
    touch(tmp_path / "val" / "ILSVRC2012_val_00000001.JPEG", tmp_path / "val" / "ILSVRC2012_val_00000002.JPEG")
    (tmp_path / "LOC_val_solution.csv").write_text(
        "ImageId,PredictionString\n"
        "ILSVRC2012_val_00000002,n01440764 10 20 30 40 \n"
        'ILSVRC2012_val_00000001,"n01751748 111 108 431 323 5 5 9 9"\n'
        "ILSVRC2012_val_00000003,n02105855 1 2 3 4\n"
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
    assert [path.name[-6] for path in dataset.paths] == ["1", "2"]
    assert dataset.labels.tolist() == [1, 0]


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
    assert ImageNet(tree, "val").labels.tolist() == [1, 0]
    (nested / "train").rename(tree / "elsewhere")
    assert ImageNet(tree, "val").labels.tolist() == [1, 0]  # classes from the mapping file


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
        (break_unknown_wnid, "val", "00000001.*unknown wnid 'n99999999'"),
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
    with pytest.raises(ConfigurationError, match="train and val"):
        ImageNet(tree, "test")  # type: ignore[arg-type]
