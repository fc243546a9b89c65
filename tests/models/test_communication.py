"""Messages, all-reduces, LogGP, and steps that wait."""

from __future__ import annotations

import pytest

from d5suite.models.communication import Link, LogGP, all_reduce_counts, all_reduce_s, exposed_s, fed_step_s, loggp


def test_loggp_is_found_again_from_the_ping_pongs_that_it_predicts() -> None:
    true = LogGP(2e-6, 3e-6, 5e-6, 1e-9)
    single, pause, n = 2 * true.message_s(1), 50e-6, 16
    burst = single + (n - 1) * true.gap_s
    paced = single + (n - 1) * (pause + true.overhead_s)
    found = loggp(single, burst, paced, messages=n, pause_s=pause, beta=1e-9)
    assert vars(found) == pytest.approx(vars(true))
    assert found.burst_s(n, 1) == pytest.approx(true.message_s(1) + (n - 1) * true.gap_s)


def test_noise_gives_no_negative_parameters() -> None:
    found = loggp(10e-6, 9e-6, 1e-6, messages=8, pause_s=50e-6, beta=0.0)
    assert (found.overhead_s, found.gap_s, found.latency_s) == (0.0, 0.0, 5e-6)
    found = loggp(10e-6, 9e-6, 1.0, messages=8, pause_s=50e-6, beta=0.0)
    assert found.latency_s == 0.0 and found.overhead_s == 2.5e-6


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_an_all_reduce_is_a_ring_or_doubling_whichever_is_faster(ranks: int) -> None:
    slow = Link(1e-3, 1e-12)
    assert all_reduce_s(8, ranks, slow) == pytest.approx((ranks - 1).bit_length() * 1e-3, rel=1e-6)
    wide = Link(0.0, 1e-9)
    assert all_reduce_s(1e9, ranks, wide) == pytest.approx(2 * (ranks - 1) / ranks)
    assert all_reduce_counts(1e9, ranks)[0] == 2 * (ranks - 1)
    assert all_reduce_s(1e9, 1, wide) == 0


def test_what_computing_hides_is_not_waited_for() -> None:
    assert exposed_s(3.0, 2.0) == 1.0 and exposed_s(1.0, 2.0) == 0.0
    assert fed_step_s(2.0, 3.0, apart=True) == 3.0 and fed_step_s(2.0, 3.0, apart=False) == 5.0
