"""What replicas of every backend share."""

from __future__ import annotations

import numpy as np
import pytest

from d5suite.backends import backend
from d5suite.backends.onnxruntime import BACKEND
from d5suite.errors import BackendError
from d5suite.levels.distributed import owned
from d5suite.optimizers.settings import SGD
from d5suite.testing.networks import layers


def test_arrays_that_overlap_or_cannot_be_written_are_copied() -> None:
    whole = np.arange(12.0)
    frozen = np.ones(3)
    frozen.flags.writeable = False
    given = {
        "first": whole[:6],
        "again": whole[:6].reshape(2, 3),
        "within": whole[4:8],
        "after": whole[8:],
        "across": np.arange(6.0).reshape(2, 3).T,
        "frozen": frozen,
        "none": whole[4:4],
        "number": np.array(3.0),
    }
    found = owned(given)
    assert list(found) == list(given)
    for name, array in found.items():
        assert np.array_equal(array, given[name]) and array.flags.c_contiguous and array.flags.writeable
    for one in found:
        for other in found:
            assert one == other or not np.shares_memory(found[one], found[other])
    assert found["after"] is given["after"] and found["number"] is given["number"]


def test_what_cannot_train_with_ranks_is_refused_with_a_reason() -> None:
    torch = backend("torch")
    if torch.problem():
        pytest.skip(str(torch.problem()))
    trainer = torch.trainer(torch.executor(layers(), precision="fp16"), SGD(0.5))
    with pytest.raises(BackendError, match="no fp16: the loss scale"):
        torch.replica(trainer)
    with pytest.raises(BackendError, match="'onnxruntime' has no level 3: onnxruntime does inference only"):
        BACKEND.replica(trainer)
