"""Optimizers' settings: written down, read again, refused."""

from __future__ import annotations

import math

import pytest

from d5suite.errors import ConfigurationError
from d5suite.optimizers.settings import OPTIMIZERS, optimizer_from_dict


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_survives_being_written_down(name: str) -> None:
    optimizer = OPTIMIZERS[name](0.125, weight_decay=0.5, clip_norm=2.0)
    assert optimizer_from_dict(optimizer.to_dict()) == optimizer


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"name": "sdg", "learning_rate": 1.0}, "unknown optimizer 'sdg'"),
        ({"name": "adam", "learning_rate": 1.0, "momentum": 0.9}, "no setting 'momentum'"),
        ({"name": "adam"}, "needs a learning_rate"),
        ({"name": "adam", "learning_rate": 1.0, "beta2": 1.0}, "beta2"),
        ({"name": "rmsprop", "learning_rate": 1.0, "epsilon": 0.0}, "epsilon"),
        ({"name": "adagrad", "learning_rate": math.nan}, "learning rate"),
        ({"name": "sgd", "learning_rate": 1.0, "nesterov": True}, "Nesterov"),
        ({"name": "sgd", "learning_rate": 1.0, "clip_norm": -1.0}, "clip_norm"),
    ],
)
def test_bad_optimizer_settings_are_refused(settings: dict[str, object], what: str) -> None:
    with pytest.raises(ConfigurationError, match=what):
        optimizer_from_dict(settings)
