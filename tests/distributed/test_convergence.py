"""Every scheme trains LeNet-5 on the digits further than a rank gets alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from d5suite.distributed.schemes import SCHEMES
from tests.distributed import test_communicators as processes

CONVERGE = str(Path(__file__).with_name("converge.py"))
TARGET = 0.94
"""A rank that is left alone with its part of the images reaches 0.914, every scheme 0.95."""


@pytest.mark.slow
@processes.needs_torch
def test_every_scheme_reaches_the_same_target(tmp_path: Path) -> None:
    ended = processes.in_processes(CONVERGE, str(tmp_path), ranks=3)
    for code, said in ended:
        assert not code, said
        reached = {name: float(value) for name, value, _ in map(str.split, said.splitlines())}
        assert list(reached) == list(SCHEMES)
        assert min(reached.values()) >= TARGET, said
