"""Real handwritten digits that come with scikit-learn: no download, trained to accuracy anywhere in a minute.

The test part of the UCI set "Optical recognition of handwritten digits" (E. Alpaydin and C. Kaynak, 1998): 1,797 images
of 8×8 pixels with 17 levels of grey. Imports NumPy and scikit-learn, late.
"""

from __future__ import annotations

import numpy as np

SIZE = 32
"""Height and width in pixels of the images as they are given: each original pixel becomes 4×4."""


def digits() -> tuple[np.ndarray, np.ndarray]:
    """All images and labels, in the set's own order.

    Returns
    -------
    images : numpy.ndarray
        float32 (1797, 1, 32, 32), of mean 0 and standard deviation 1 over the whole set.
    labels : numpy.ndarray
        int64 (1797,), the digit.
    """
    from sklearn.datasets import load_digits

    bundled = load_digits()
    pixels = bundled.images.astype(np.float64)
    pixels = (pixels - pixels.mean()) / pixels.std()
    images = np.kron(pixels, np.ones((SIZE // 8, SIZE // 8)))[:, None]
    return images.astype(np.float32), bundled.target.astype(np.int64)
