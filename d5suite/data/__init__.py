"""Datasets on disk, decoding, transforms, the loader, and synthetic datasets.

May import NumPy, Pillow and h5py, never a framework, and from d5suite only `errors` and `files`.
The names below are imported on first use, so ``import d5suite.data`` costs nothing.

- `ImageNet`: the files and labels of an ImageNet tree (`imagenet.py`).
- `OpenImages`: the files and verified labels of an Open Images tree (`openimages.py`).
- `open_store`: a dataset in any format: folders, HDF5, TFRecord, RecordIO (`formats/`;
  `convert.py`, `verify.py`).
- `d5suite.data.decode.decode`: one image file to pixels, safely. Not offered here, because the
  module has that name.
- `TrainTransform`, `EvalTransform`: pixels to network input, defined neutrally
  (`transforms.py`).
- `Loader`: batches from any number of worker processes, always the same pixels (`loader.py`).
- `make_imagenet`, `cached_imagenet`: a small learnable set in ImageNet's layout (`synthesis.py`).
- `make_openimages`, `cached_openimages`: the same in Open Images' layout.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from d5suite.data.formats import open_store as open_store
    from d5suite.data.imagenet import ImageNet as ImageNet
    from d5suite.data.loader import Loader as Loader
    from d5suite.data.openimages import OpenImages as OpenImages
    from d5suite.data.synthesis import cached_imagenet as cached_imagenet
    from d5suite.data.synthesis import cached_openimages as cached_openimages
    from d5suite.data.synthesis import make_imagenet as make_imagenet
    from d5suite.data.synthesis import make_openimages as make_openimages
    from d5suite.data.transforms import EvalTransform as EvalTransform
    from d5suite.data.transforms import TrainTransform as TrainTransform

_HOMES = {
    "EvalTransform": "transforms",
    "ImageNet": "imagenet",
    "OpenImages": "openimages",
    "Loader": "loader",
    "TrainTransform": "transforms",
    "cached_imagenet": "synthesis",
    "cached_openimages": "synthesis",
    "make_imagenet": "synthesis",
    "make_openimages": "synthesis",
    "open_store": "formats",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(importlib.import_module(f"d5suite.data.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
