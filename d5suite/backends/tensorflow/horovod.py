"""Horovod in TensorFlow: its all-reduce of gradients within a traced function.

Imports Horovod, `d5suite.distributed.horovod`, `d5suite.levels` and the adapter's
`distributed`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import horovod.tensorflow as hvd

from d5suite.backends.tensorflow.distributed import AveragedGradients
from d5suite.distributed.horovod import HorovodScheme
from d5suite.levels.native import FrameworkScheme


class Horovod(AveragedGradients, HorovodScheme):
    """As ``hvd.DistributedGradientTape``, a scheme whose all-reduces begin with their gradients."""

    hvd = hvd

    def _average(self, gradients: list[Any]) -> list[Any]:
        return [
            hvd.allreduce(gradient, op=hvd.Average, compression=self.compression, name=name, ignore_name_scope=True)
            for name, gradient in zip(self.replica.names, gradients, strict=True)
        ]


SCHEMES: Mapping[str, type[FrameworkScheme]] = {"horovod": Horovod}
