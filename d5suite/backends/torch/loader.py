"""PyTorch's own image loader, as its users write it: a map-style dataset over Pillow, and a DataLoader.

The yardstick for d5suite's input pipeline, whose code it does not use. Imports PyTorch, NumPy, Pillow and, for the
transform's definition only, `d5suite.data`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, RandomSampler

from d5suite.data.imagenet import ImageNet
from d5suite.data.transforms import MEAN, STD, EvalTransform, TrainTransform

Transform = TrainTransform | EvalTransform


class ImageFolder(Dataset):
    """Decoded, augmented and normalised images with their labels."""

    def __init__(self, paths: list[Path], labels: list[int], transform: Transform) -> None:
        self.paths, self.labels, self.transform = paths, labels, transform
        self.mean = torch.tensor(MEAN).view(3, 1, 1)
        self.std = torch.tensor(STD).view(3, 1, 1)
        self.rng: np.random.Generator | None = None

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        """One image, float32 (3, size, size), and its label."""
        if self.rng is None:  # in each worker, whose seed PyTorch has set
            self.rng = np.random.default_rng(torch.initial_seed() % 2**63)
        with Image.open(self.paths[index]) as file:
            image = file.convert("RGB")
        size = self.transform.size
        if isinstance(self.transform, TrainTransform):
            top, left, height, width, flip = self.transform.parameters(image.height, image.width, self.rng)
            image = image.crop((left, top, left + width, top + height)).resize((size, size), Image.Resampling.BILINEAR)
            if flip:
                image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        else:
            height, width, top, left = self.transform.parameters(image.height, image.width)
            image = image.resize((width, height), Image.Resampling.BILINEAR)
            image = image.crop((left, top, left + size, top + size))
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()
        return pixels.to(torch.float32).div_(255).sub_(self.mean).div_(self.std), self.labels[index]


def native_loader(
    dataset: ImageNet, transform: Transform, *, batch_size: int, workers: int, seed: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches without end, in random order.

    Parameters
    ----------
    dataset : ImageNet
    transform : TrainTransform or EvalTransform
    batch_size : int
    workers : int
        Worker processes; 0 works in this one.
    seed : int
        Of the order and of the augmentation.

    Yields
    ------
    images : torch.Tensor
        float32 (batch_size, 3, size, size) on the CPU.
    labels : torch.Tensor
        int64 (batch_size,).
    """
    generator = torch.Generator().manual_seed(seed)
    images = ImageFolder(dataset.paths, dataset.labels.tolist(), transform)
    # Epoch after epoch without a pause: the workers of a small dataset would otherwise idle at each end.
    sampler = RandomSampler(images, num_samples=sys.maxsize // 2 // len(images) * len(images), generator=generator)
    yield from DataLoader(
        images, batch_size=batch_size, sampler=sampler, num_workers=workers, drop_last=True, generator=generator
    )
