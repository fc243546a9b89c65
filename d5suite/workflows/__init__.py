"""Coupled workflows: programs that run side by side, and the couplings that join them.

A workflow has *components*, each a `base.Program` on one or more ranks, and *couplings*, each from
one component to another. `couplings` moves the data, `heat`, `surrogate`, `ensemble` and `external`
are programs, `account` says where the time went. Imports NumPy, h5py and the parts below
`d5suite.workloads`; frameworks only through `d5suite.levels.backend.Backend`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from d5suite.registry import Registry

if TYPE_CHECKING:
    from d5suite.workflows.base import Program

_REGISTRY: Registry[Program] = Registry("d5suite.workflows", "Program")

discover = _REGISTRY.discover
find = _REGISTRY.find
is_installed = _REGISTRY.is_installed
