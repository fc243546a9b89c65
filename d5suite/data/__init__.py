"""Datasets on disk, decoding, transforms, the loader, and synthetic datasets.

May import NumPy, Pillow, h5py and, from d5suite, `errors` and `files`; never a framework.

- `imagenet`, `openimages`: the files and labels of a folder of images.
- `formats`: a dataset in any format: folders, HDF5, TFRecord, RecordIO; `convert` and `verify`.
- `decode`: one image file to pixels, safely.
- `transforms`: pixels to network input, defined neutrally.
- `loader`: batches from any number of worker processes, always the same pixels.
- `sources`: the datasets that a job can name. `random_inputs`: inputs of any network.
- `synthesis`, `drawing`: small learnable datasets in ImageNet's and Open Images' layouts.

The names in ``__all__`` are imported on first use, so ``import d5suite.data`` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    **dict.fromkeys(("EvalTransform", "TrainTransform"), "transforms"),
    **dict.fromkeys(("cached_imagenet", "cached_openimages", "make_imagenet", "make_openimages"), "synthesis"),
    "ImageNet": "imagenet",
    "Loader": "loader",
    "OpenImages": "openimages",
    "open_store": "formats",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"d5suite.data.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
