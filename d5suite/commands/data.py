"""``d5suite data``: make, convert and verify datasets."""

from __future__ import annotations

import argparse

from d5suite.errors import escaped
from d5suite.files import given_path


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command and its actions."""
    data = commands.add_parser("data", help="make, convert and verify datasets")
    data_commands = data.add_subparsers(metavar="COMMAND", required=True)
    convert = data_commands.add_parser("convert", help="store a dataset in another format; images keep their bytes")
    convert.add_argument("source", type=given_path, metavar="SOURCE", help="dataset in any format")
    convert.add_argument(
        "destination", type=given_path, metavar="DESTINATION", help="file for hdf5, otherwise a folder"
    )
    convert.add_argument("--to", required=True, choices=["folder", "hdf5", "tfrecord", "recordio"])
    convert.set_defaults(run=_convert)
    verify = data_commands.add_parser("verify", help="check that two datasets hold the same images and labels")
    verify.add_argument("first", type=given_path, metavar="A", help="dataset in any format")
    verify.add_argument("second", type=given_path, metavar="B", help="dataset to compare with A")
    verify.set_defaults(run=_verify)
    make = data_commands.add_parser("make", help="draw a small synthetic dataset in a real dataset's layout")
    sets = make.add_subparsers(metavar="SET", required=True)
    for name, (what, sizes) in _SETS.items():
        command = sets.add_parser(name, help=what)
        command.add_argument("--out", type=given_path, required=True, metavar="DIR", help="new or empty folder")
        for size, default in {**sizes, "seed": 0}.items():
            option = f"--{size.replace('_', '-')}"
            command.add_argument(option, type=int, default=default, metavar="N", help="default: %(default)s")
        command.set_defaults(run=_make, set=name)


_SETS = {
    "imagenet": ("JPEG files in ImageNet's layout", {"classes": 10, "train_per_class": 32, "val_per_class": 8}),
    "openimages": (
        "JPEG files with several labels each, in Open Images' layout",
        {"classes": 10, "train_images": 320, "validation_images": 80, "test_images": 80},
    ),
}
"""Datasets that can be drawn: what they are, and their default sizes."""


def _convert(options: argparse.Namespace) -> None:
    from d5suite.data.convert import convert

    for store in convert(options.source, options.destination, options.to):
        print(f"{store.split}: {len(store):,} images, {len(store.label_names):,} classes")
    print(f"{options.destination}: verify it with d5suite data verify {options.source} {options.destination}")


def _verify(options: argparse.Namespace) -> int:
    from d5suite.data.verify import compare

    differences = 0
    for split in compare(options.first, options.second):
        differences += split.differences
        verdict = f"{split.differences:,} differences" if split.differences else f"same, sha256 {split.digest[:16]}"
        print(f"{split.split}: {split.images:,} images in both, {split.size:,} bytes: {verdict}")
        for difference in split.named:
            print(escaped(f"  {difference}"))
        if split.differences > len(split.named):
            print("  ...")
    return 1 if differences else 0


def _make(options: argparse.Namespace) -> None:
    from d5suite.data.synthesis import make_imagenet, make_openimages

    draw = {"imagenet": make_imagenet, "openimages": make_openimages}[options.set]
    draw(options.out, **{size: getattr(options, size) for size in (*_SETS[options.set][1], "seed")})
    recipes = {"imagenet": "recipes/", "openimages": "recipes/test_openimages_resnet50.py"}[options.set]
    print(f"{options.out}: {options.classes} classes; use it with pytest {recipes} --{options.set} {options.out}")
