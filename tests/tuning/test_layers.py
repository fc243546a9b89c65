"""What the layers of a step ask for is tried first."""

from __future__ import annotations

from d5suite.backends import discover
from d5suite.tuning.profiles import space_of
from d5suite.tuning.proposals import by_layers


def test_a_knob_is_first_where_its_layers_dominate() -> None:
    space = space_of(discover()[0]["torch"], threads=2)
    ordered, first = by_layers(space, {"Conv": 0.7, "Relu": 0.2})
    assert first[0] == "mode" and "ONEDNN_MAX_CPU_ISA" in first
    assert ordered.knobs[0].name == "mode" and ordered.knobs[1].name in first
    assert sorted(ordered.places) == sorted(space.places) and ordered.size() == space.size()


def test_nothing_is_first_without_layers_that_dominate() -> None:
    space = space_of(discover()[0]["torch"], threads=2)
    assert by_layers(space, {}) == (space, []) == by_layers(space, {"Relu": 0.9, "Conv": 0.1})
