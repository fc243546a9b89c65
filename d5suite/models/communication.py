"""Seconds of messages between ranks, and of a step that waits for them, or for its loader.

A message of n bytes takes α + n β; in LogGP's terms o + (n - 1) G + L + o, with at least g between
two messages of a rank (Alexandrov et al., "LogGP", SPAA 1995). A collective takes the sum over all
messages of the rank that sends most (Thakur et al., 2005). Imports the standard library.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """What a message takes.

    Attributes
    ----------
    alpha_s : float
        Seconds of an empty one.
    beta_s_per_byte : float
    gap_s : float
        LogGP's g: least seconds between two messages that one rank takes or sends; 0 if not known.
    """

    alpha_s: float
    beta_s_per_byte: float
    gap_s: float = 0.0

    def seconds(self, messages: float, size: float) -> float:
        """Return the seconds of messages one after the other, of so many bytes together."""
        return messages * self.alpha_s + size * self.beta_s_per_byte


@dataclass(frozen=True)
class LogGP:
    """LogGP's parameters of a transport.

    Attributes
    ----------
    overhead_s : float
        o: seconds in which a processor sends or receives a message, and can do nothing else.
    gap_s : float
        g: least seconds between two messages of a rank.
    latency_s : float
        L: seconds of an empty message on its way.
    gap_s_per_byte : float
        G.
    """

    overhead_s: float
    gap_s: float
    latency_s: float
    gap_s_per_byte: float

    def message_s(self, size: float) -> float:
        """Return the seconds of a message from one rank to another."""
        return 2 * self.overhead_s + self.latency_s + max(0.0, size - 1) * self.gap_s_per_byte

    def burst_s(self, messages: int, size: float) -> float:
        """Return the seconds until the last of messages has come that follow each other at once."""
        apart = max(self.gap_s, self.overhead_s) + max(0.0, size - 1) * self.gap_s_per_byte
        return (messages - 1) * apart + self.message_s(size)


def gap_s(single_s: float, burst_s: float, messages: int) -> float:
    """Return LogGP's g from two ways to play ping-pong; see `loggp`."""
    return max(0.0, (burst_s - single_s) / (messages - 1))


def loggp(single_s: float, burst_s: float, paced_s: float, *, messages: int, pause_s: float, beta: float) -> LogGP:
    """Return LogGP's parameters from three ways to play ping-pong with small messages.

    Parameters
    ----------
    single_s, burst_s, paced_s : float
        Seconds of one message there and one back; of several there at once and one back; of several
        with a pause before each but the first.
    messages : int
        Number of messages in ``burst_s`` and ``paced_s``.
    pause_s : float
        Longer than the gap.
    beta : float
        G, from a line over sizes.

    Notes
    -----
    Hoefler et al., "Low-overhead LogGP parameter assessment for modern interconnection networks"
    (2007): g = (burst - single) / (n - 1), o = (paced - single) / (n - 1) - pause, and
    single = 2 (L + 2 o). None is less than 0.
    """
    gap = gap_s(single_s, burst_s, messages)
    overhead = max(0.0, (paced_s - single_s) / (messages - 1) - pause_s)
    overhead = min(overhead, single_s / 4)
    return LogGP(overhead, gap, max(0.0, single_s / 2 - 2 * overhead), beta)


def all_reduce_counts(size: float, ranks: int) -> tuple[int, float]:
    """Return messages and bytes of a rank in a ring's all-reduce: 2 (p - 1), and n / p in each."""
    return 2 * (ranks - 1), 2 * (ranks - 1) / ranks * size


def all_reduce_s(size: float, ranks: int, link: Link) -> float:
    """Return the seconds of an all-reduce: a ring's, or recursive doubling's if that is faster.

    Doubling sends all bytes ⌈lg p⌉ times.
    """
    if ranks < 2:
        return 0.0
    rounds = (ranks - 1).bit_length()
    return min(link.seconds(*all_reduce_counts(size, ranks)), link.seconds(rounds, rounds * size))


def exposed_s(communicating_s: float, hiding_s: float) -> float:
    """Return the seconds of communication that computing of ``hiding_s`` does not hide."""
    return max(0.0, communicating_s - hiding_s)


def fed_step_s(step_s: float, batch_s: float, *, apart: bool) -> float:
    """Return the seconds of a step with its loader.

    Parameters
    ----------
    step_s, batch_s : float
        Seconds of a step whose data are in memory, and seconds to load a batch on an idle machine.
    apart : bool
        Whether the loader has processors of its own. Else both share them, and the times add up.
    """
    return max(step_s, batch_s) if apart else step_s + batch_s
