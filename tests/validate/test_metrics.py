"""Metrics: worked examples, properties, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from d5suite.errors import ConfigurationError, ValidationError
from d5suite.validate.metrics import METRICS, mean_average_precision, top_k_accuracy

some = settings(max_examples=40, deadline=None)
# Few different values, so that ties are common.
SCORES = st.integers(-3, 3).map(float)


@st.composite
def multi_class(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    count, classes = draw(st.integers(1, 12)), draw(st.integers(1, 7))
    logits = draw(arrays(np.float32, (count, classes), elements=SCORES))
    return logits, draw(arrays(np.int64, count, elements=st.integers(0, classes - 1)))


@st.composite
def multi_label(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    shape = draw(st.integers(1, 12)), draw(st.integers(1, 5))
    labels = draw(arrays(np.int64, shape, elements=st.integers(-1, 1)))
    labels[draw(st.integers(0, shape[0] - 1)), draw(st.integers(0, shape[1] - 1))] = 1
    return draw(arrays(np.float32, shape, elements=SCORES)), labels


def test_worked_examples() -> None:
    logits = np.array([[3.0, 2.0, 1.0], [1.0, 2.0, 3.0], [2.0, 3.0, 1.0], [1.0, 3.0, 2.0]])
    assert top_k_accuracy(logits, np.array([0, 0, 0, 0])) == 0.25
    assert top_k_accuracy(logits, np.array([0, 0, 0, 0]), k=2) == 0.5
    assert top_k_accuracy(logits, np.array([0, 2, 1, 1])) == 1.0
    # All ties but one: the sixth in the order of class numbers is outside, and class 0 is that of
    # the last image.
    assert METRICS["top-5 accuracy"].compute(np.eye(6), np.array([1, 2, 3, 4, 5, 0])) == 5 / 6
    # The first class ranks present, absent, present: (1/1 + 2/3) / 2. The second one's image 0 does
    # not count: 1/1.
    logits = np.array([[3.0, 9.0], [2.0, 1.0], [1.0, 2.0]])
    labels = np.array([[1, -1], [0, 0], [1, 1]])
    assert mean_average_precision(logits, labels) == pytest.approx((5 / 6 + 1) / 2)


@some
@given(multi_class())
def test_top_1_is_argmax_and_top_k_grows_to_1(case: tuple[np.ndarray, np.ndarray]) -> None:
    logits, labels = case
    assert top_k_accuracy(logits, labels) == np.mean(logits.argmax(axis=1) == labels)
    accuracies = [top_k_accuracy(logits, labels, k) for k in range(1, logits.shape[1] + 1)]
    assert accuracies == sorted(accuracies)
    assert accuracies[-1] == 1.0


@some
@given(multi_label())
def test_a_perfect_ranking_is_1_and_a_reversed_one_is_the_worst(case: tuple[np.ndarray, np.ndarray]) -> None:
    logits, labels = case
    assert mean_average_precision(labels.astype(np.float32), labels) == 1.0
    backwards = np.arange(labels.size).reshape(labels.shape) - 1000 * labels  # and without ties, which spare the worst
    worst = mean_average_precision(backwards, labels)
    assert 0 < worst <= mean_average_precision(logits, labels) <= 1


@some
@given(multi_label(), st.integers(0, 2**32 - 1))
def test_the_order_of_images_and_classes_does_not_matter(case: tuple[np.ndarray, np.ndarray], seed: int) -> None:
    logits, labels = case
    rng = np.random.default_rng(seed)
    rows, columns = rng.permutation(len(logits)), rng.permutation(logits.shape[1])
    expected = mean_average_precision(logits, labels)
    assert mean_average_precision(logits[rows], labels[rows]) == pytest.approx(expected, abs=1e-15)
    assert mean_average_precision(logits[:, columns], labels[:, columns]) == pytest.approx(expected, abs=1e-12)


@some
@given(multi_label(), st.integers(0, 2**32 - 1))
def test_what_is_not_verified_does_not_matter(case: tuple[np.ndarray, np.ndarray], seed: int) -> None:
    logits, labels = case
    rng = np.random.default_rng(seed)
    expected = mean_average_precision(logits, labels)
    others = np.where(labels < 0, rng.normal(size=labels.shape) * 100, logits)
    assert mean_average_precision(others, labels) == expected
    more = np.concatenate([logits, rng.normal(size=(3, logits.shape[1]))])
    unknown = np.concatenate([labels, np.full((3, labels.shape[1]), -1)])
    assert mean_average_precision(more, unknown) == expected
    # Nor does a class that is present nowhere.
    absent = np.concatenate([labels, np.zeros((len(labels), 1), np.int64)], axis=1)
    wider = np.concatenate([logits, rng.normal(size=(len(labels), 1))], axis=1)
    assert mean_average_precision(wider, absent) == expected


@some
@given(multi_label())
def test_an_increasing_function_of_the_logits_gives_the_same(case: tuple[np.ndarray, np.ndarray]) -> None:
    logits, labels = case
    sigmoid = 1 / (1 + np.exp(-logits.astype(np.float64)))
    assert mean_average_precision(sigmoid, labels) == mean_average_precision(logits, labels)


def test_chance_is_the_share_of_positives() -> None:
    rng = np.random.default_rng(0)
    labels = rng.choice([-1, 0, 1], (20_000, 3), p=[0.5, 0.4, 0.1])
    assert mean_average_precision(rng.normal(size=labels.shape), labels) == pytest.approx(0.2, abs=0.02)
    assert mean_average_precision(np.zeros(labels.shape), labels) == pytest.approx(0.2, abs=0.01)


def test_a_bound_is_in_the_direction_of_better() -> None:
    accuracy = replace(METRICS["top-1 accuracy"], bound=0.97)
    assert accuracy.accepts(0.97)
    assert not accuracy.accepts(0.9699)
    assert not accuracy.accepts(float("nan"))
    error = replace(accuracy, better="lower", bound=0.03)
    assert error.accepts(0.03)
    assert not error.accepts(0.031)
    assert not error.accepts(float("nan"))
    assert METRICS["top-1 accuracy"].accepts(0.0)
    assert not METRICS["top-1 accuracy"].accepts(float("nan"))


ONE, TWO = np.zeros((2, 3)), np.zeros((2, 3), np.int64)


@pytest.mark.parametrize(
    ("compute", "message"),
    [
        (lambda: top_k_accuracy(ONE, np.array([0, 3])), "from 0 to 2, not 0 to 3"),
        (lambda: top_k_accuracy(ONE, np.array([-1, 0])), "from 0 to 2, not -1 to 0"),
        (lambda: top_k_accuracy(ONE, np.array([0])), r"shape \(2,\)"),
        (lambda: top_k_accuracy(ONE, np.array([0.0, 1.0])), "integers"),
        (lambda: top_k_accuracy(ONE, np.array([0, 1]), k=4), "number of classes, 3"),
        (lambda: top_k_accuracy(ONE, np.array([0, 1]), k=0), "k is 0"),
        (lambda: top_k_accuracy(np.zeros((0, 3)), np.zeros(0, np.int64)), r"shape \(0, 3\)"),
        (lambda: top_k_accuracy(np.zeros(3), np.array([0])), r"shape \(3,\)"),
        (lambda: mean_average_precision(ONE, TWO[:, :2]), r"shape \(2, 3\)"),
        (lambda: mean_average_precision(ONE, TWO + 2), "-1, 0 or 1"),
        (lambda: mean_average_precision(ONE, TWO), "no class is present"),
    ],
)
def test_what_does_not_fit_is_an_error(compute: Callable[[], float], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        compute()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_logits_that_are_not_finite_are_never_scored(value: float) -> None:
    logits = np.array([[0.0, value]])
    with pytest.raises(ValidationError, match="not finite"):
        top_k_accuracy(logits, np.array([1]))
    with pytest.raises(ValidationError, match="not finite"):
        mean_average_precision(logits, np.array([[1, -1]]))
