"""Dropout's meaning: how much it drops, what it keeps, and that it draws anew."""

from __future__ import annotations

import pytest

from d5suite.optimizers.settings import SGD
from d5suite.testing.subject import Subject
from d5suite.validate.network.dropout import check_masks, masking_batch, masking_network, masks_of, masks_of_passes

CALLS = 130
"""Number of passes: masks that repeat after 64 passes show twice."""

STEPS = 3
"""Training steps, which may have a Dropout of their own."""


@pytest.mark.parametrize("ratio", [0.25, pytest.param(0.5, marks=pytest.mark.slow)])
def test_dropout_drops_scales_and_draws_as_it_should(subject: Subject, ratio: float) -> None:
    network = masking_network(ratio)
    precision = subject.timed
    subject.require(network, gradient=True, precision=precision)
    executor = subject.executor(network, precision)
    found = masks_of_passes(executor, CALLS)
    subject.prove("operators.meaning", check_masks(f"{CALLS} passes", found, ratio, precision))
    if 2 not in subject.backend.levels:
        return
    trainer, feed, start = subject.trainer(executor, SGD(1.0)), executor.feed(masking_batch()), executor.parameters()
    gradients = []
    for _ in range(STEPS):
        trainer.step(feed)
        end = executor.parameters()
        gradients.append({name: start[name] - end[name] for name in ("scale", "shift")})
        executor.load_parameters(start)
    subject.prove("operators.meaning", check_masks(f"{STEPS} steps", masks_of(gradients), ratio, precision))
