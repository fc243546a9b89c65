"""A framework's own schemes: two ranks train like one process with both batches."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from d5suite.distributed.communicators import problem
from d5suite.distributed.schemes import SCHEMES, settings_from_dict
from d5suite.files import read_json
from d5suite.levels.native import FrameworkScheme, NativeSettings
from d5suite.testing import native_rank
from d5suite.testing.native_rank import RANKS
from d5suite.testing.networks import classifier
from d5suite.testing.ranks import run_ranks
from d5suite.testing.subject import Subject, chosen
from d5suite.validate.check import Check
from d5suite.validate.distributed.rules import IN_TURN

AGREEMENT = {"fp64": 1e-10, "fp32": 5e-3}
"""Accepted relative error of a tensor, by precision. A framework may update by different kernels in
each precision: a scheme with an error of 1e-10 in float64 has one of 9e-4 in float32. A sum instead
of a mean makes an error of 1."""

AMPLIFIED = 16
"""Accepted error after all steps, in units of the rounding that the scheme declares for a step."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each scheme that the backend declares; a short run, the first one if it is quick."""
    if "scheme" in metafunc.fixturenames:
        backend = chosen().backend
        described, kinds = backend.schemes, [each for each in AGREEMENT if each in backend.precisions]
        short = [name for name in [*described][:1] if described[name].quick]
        metafunc.parametrize(
            ("scheme", "precision"),
            [
                pytest.param(name, kind, marks=[] if name in short else [pytest.mark.slow])
                for name, kind in itertools.product(described, kinds)
            ],
        )


def test_schemes_are_described(subject: Subject) -> None:
    if not subject.backend.schemes:
        pytest.skip("it has no schemes of its own")
    for name, described in subject.backend.schemes.items():
        clause = "scheme.data"
        subject.hold(clause, name not in SCHEMES, f"{name} is the name of one of d5suite's own schemes")
        subject.hold(clause, bool(described.title), f"{name} has no title")
        unknown = [device for device in described.transports if device not in subject.backend.devices]
        subject.hold(clause, bool(described.transports), f"{name} runs on no device")
        subject.hold(clause, not unknown, f"{name} has the device {', '.join(unknown)}, which the backend lacks")
        for key, knob in described.knobs.items():
            wrong = knob.problem(knob.default)
            subject.hold(clause, wrong is None and bool(knob.meaning), f"{name}:{key}: {wrong or 'has no meaning'}")
        ordered = described.synchronous or (IN_TURN in described.knobs and described.knobs[IN_TURN].default is False)
        subject.hold(clause, ordered, f"{name} is not synchronous, and has no {IN_TURN} that is False by default")


def test_a_scheme_trains_as_one_process(subject: Subject, scheme: str, precision: str, tmp_path: Path) -> None:
    subject.require(classifier(), gradient=True, level=3)
    backend = subject.backend
    lacking = problem("gloo") or backend.lacks_scheme(
        scheme, mode=subject.mode, device=subject.device, precision=precision
    )
    if lacking:
        pytest.skip(lacking)
    made = backend.framework_scheme(scheme, subject.mode)
    subject.hold("scheme.class", issubclass(made, FrameworkScheme), f"{scheme} is {made!r}")
    failure = run_ranks(native_rank.__name__, tmp_path, RANKS, subject.selection, subject.device, precision, scheme)
    subject.hold("scheme.meaning", not failure, f"{scheme}: {failure}")
    found = read_json(tmp_path / native_rank.FINDINGS)
    settings = settings_from_dict({"name": scheme}, backend)
    assert isinstance(settings, NativeSettings)
    limit = max(AGREEMENT[precision], AMPLIFIED * settings.rounding)
    subject.prove(
        "scheme.meaning",
        [Check(f"{scheme}, {what}", error, limit) for what, error in found["errors"].items()],
    )
    differ = ", ".join(found["differ"])
    subject.hold("scheme.finish", not differ, f"{scheme}: ranks end with different parameters: {differ}")
