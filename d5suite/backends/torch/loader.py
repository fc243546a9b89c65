"""PyTorch's own image loader: a map-style dataset over Pillow, and a DataLoader.

The baseline of d5suite's input pipeline; both share only the transform's definition. Encoded images
come from files, or from an HDF5 file through h5py. Imports PyTorch, NumPy, Pillow, `d5suite.levels`
and, for transforms and the location of images only, `d5suite.data`.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, RandomSampler

from d5suite.data.formats.store import Store
from d5suite.data.imagenet import ImageNet
from d5suite.data.transforms import MEAN, STD, EvalTransform, TrainTransform, crop_and_resize
from d5suite.levels.loader import EncodedImages

Transform = TrainTransform | EvalTransform

NAMES: Mapping[str, str] = {
    "folder": "torch.utils.data.DataLoader",
    "hdf5": "torch.utils.data.DataLoader over h5py",
}
"""The loader's name in reports, by storage format."""


class ImageFolder(Dataset):
    """Decoded, augmented and normalised images with their labels."""

    def __init__(self, labels: list[int], transform: Transform, paths: list[Path]) -> None:
        self.labels, self.transform, self.paths = labels, transform, paths
        self.mean = torch.tensor(MEAN).view(3, 1, 1)
        self.std = torch.tensor(STD).view(3, 1, 1)
        self.rng: np.random.Generator | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def open(self, index: int) -> Image.Image:
        """Open an encoded image."""
        return Image.open(self.paths[index])

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        """Return an image, float32 (3, size, size), and its label."""
        if self.rng is None:  # PyTorch seeds each worker
            self.rng = np.random.default_rng(torch.initial_seed() % 2**63)
        with self.open(index) as file:
            image = file.convert("RGB")
        pixels = torch.from_numpy(np.array(crop_and_resize(image, self.transform, self.rng)))
        pixels = pixels.permute(2, 0, 1).contiguous()
        return pixels.to(torch.float32).div_(255).sub_(self.mean).div_(self.std), self.labels[index]


class ImageStore(ImageFolder):
    """An `ImageFolder` whose encoded images come from an HDF5 file."""

    def __init__(self, images: EncodedImages, transform: Transform) -> None:
        super().__init__(images.labels.tolist(), transform, [])
        self.images = images

    def open(self, index: int) -> Image.Image:
        """Open an encoded image, read by the HDF5 library."""
        return Image.open(io.BytesIO(self.images.read(index)))


def native_loader(
    dataset: ImageNet | Store, transform: Transform, *, batch_size: int, workers: int, seed: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield batches without end, in random order.

    Parameters
    ----------
    dataset : ImageNet or Store
        In a format of `NAMES`.
    transform : TrainTransform or EvalTransform
    batch_size : int
    workers : int
        Worker processes; 0 loads in this one.
    seed : int
        Seed of the order and the augmentation.

    Yields
    ------
    images : torch.Tensor
        float32 (batch_size, 3, size, size) on the CPU.
    labels : torch.Tensor
        int64 (batch_size,).
    """
    generator = torch.Generator().manual_seed(seed)
    if isinstance(dataset, ImageNet):
        images = ImageFolder(dataset.labels.tolist(), transform, dataset.paths)
    else:
        images = ImageStore(EncodedImages(dataset.path, dataset.split, len(dataset.label_names)), transform)
    # One endless epoch, because workers idle at the end of each epoch.
    sampler = RandomSampler(images, num_samples=sys.maxsize // 2 // len(images) * len(images), generator=generator)
    yield from DataLoader(
        images, batch_size=batch_size, sampler=sampler, num_workers=workers, drop_last=True, generator=generator
    )
