"""Datasets on disk, decoding, transforms, the loader, and synthetic datasets.

May import NumPy, Pillow, h5py and, from d5suite, `errors` and `files`; never a framework.

- `imagenet`, `openimages`: the files and labels of a folder of images.
- `formats`: a dataset in any format: folders, HDF5, TFRecord, RecordIO; `convert` and `verify`.
- `decode`: one image file to pixels, safely.
- `transforms`: pixels to network input, defined neutrally.
- `loader`: batches from any number of worker processes, always the same pixels.
- `sources`: the datasets that a job can name. `random_inputs`: inputs of any network.
- `synthesis`, `drawing`: small learnable datasets in ImageNet's and Open Images' layouts.
"""
