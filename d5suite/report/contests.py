"""Which results compete, and how they rank: one grouping for the terminal and the page.

Results compete if they have the same case, measurement and conditions, the same number of ranks,
and a scheme that computes the same. Imports `d5suite.statistics` and its neighbours.
"""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from d5suite.errors import JobError
from d5suite.report.ceilings import not_believed
from d5suite.report.formats import times
from d5suite.statistics.contests import Competitor, Ranking, veto_of
from d5suite.statistics.decisions import Threshold
from d5suite.statistics.ratios import Ratio
from d5suite.statistics.rounds import least_lead


class Competing(Protocol):
    """A row with its backend, the mark of its file, and its record."""

    @property
    def backend(self) -> str:
        """The backend, and what distinguishes its rows."""

    @property
    def file(self) -> str:
        """The mark of the row's file; empty if there is one file."""

    @property
    def record(self) -> Mapping[str, Any]:
        """As `d5suite.report.reading.read_benchmarks` returns it."""


R = TypeVar("R", bound=Competing)


@dataclass(frozen=True)
class Contest(Generic[R]):
    """Results that compete.

    Attributes
    ----------
    ranks : str
        Number of ranks, and their scheme.
    file : str
        The mark of their file; empty if results of all files compete.
    results : list of Competing
    between_runs : float
        See `d5suite.statistics.contests.Ranking`.
    """

    ranks: str
    file: str
    results: Sequence[R]
    between_runs: float

    @property
    def name(self) -> str:
        """Case and measurement."""
        return "{recipe}/{measurement}".format(**self.results[0].record)

    @cached_property
    def _ranking(self) -> Ranking:
        return Ranking([_competitor(result.record) for result in self.results], self.between_runs)

    @cached_property
    def standing(self) -> list[tuple[R, Ratio]]:
        """Results, the fastest first, with the ratio of their times to the fastest one's."""
        order = self._ranking.order
        return [(self.results[place], self._ranking.ratio(order[0], place)) for place in order]

    @cached_property
    def rivals(self) -> list[R]:
        """Results that may be as fast as the fastest."""
        fastest, *others = self._ranking.order
        return [self.results[place] for place in others if self._ranking.is_tie(fastest, place)]

    @cached_property
    def leaders(self) -> list[R]:
        """Results of which each may be the fastest; only one if the contest is decided."""
        return [self.standing[0][0], *self.rivals]

    @property
    def ties(self) -> Iterator[tuple[R, R]]:
        """Pairs of results of which either may be the faster one."""
        for one, other in itertools.combinations(self._ranking.order, 2):
            if self._ranking.is_tie(one, other):
                yield self.results[one], self.results[other]

    @cached_property
    def vetoes(self) -> dict[str, str]:
        """By backend: why its times decide nothing. Pairs with such a backend are ties."""
        found = {result.backend: veto_of(result.record.get("machine") or {}) for result in self.results}
        return {backend: veto for backend, veto in found.items() if veto}

    @property
    def notes(self) -> list[str]:
        """Why not all backends took turns with each other."""
        turns = (turn for result in self.results for turn in result.record.get("turns", ()))
        return list(dict.fromkeys(turn["note"] for turn in turns if "note" in turn))


def contests_of(
    results: Iterable[R], *, in_turn: bool = False, between_runs: float = Threshold().between_runs
) -> list[Contest[R]]:
    """Group results of one case and measurement under equal conditions into contests.

    A backend that several files measured does not compete with itself: then each file has contests
    of its own. Results that only return views compute nothing, and rates above a ceiling that
    nothing explains are not believed: neither kind competes.

    Parameters
    ----------
    results : iterable of Competing
        Without those that failed their validation.
    in_turn : bool
        Only results that took turns compete, and only with those they took turns with.
    between_runs : float
        See `d5suite.statistics.contests.Ranking`.
    """
    by_ranks: dict[tuple[int, str], list[R]] = defaultdict(list)
    for result in results:
        if (turns_of(result.record) or not in_turn) and not (
            is_view(result.record) or any(not_believed(result.record))
        ):
            by_ranks[result.record["ranks"], ranks_of(result.record)].append(result)
    contests = []
    for (_, ranks), own in sorted(by_ranks.items()):
        measured = {(result.backend, result.file) for result in own}
        by_file = len({backend for backend, _ in measured}) < len(measured)
        groups: dict[Any, list[R]] = defaultdict(list)
        for result in own:
            groups[result.file if by_file else "", turns_of(result.record) if in_turn else ()].append(result)
        contests += [Contest(ranks, file, members, between_runs) for (file, _), members in groups.items()]
    return contests


def check_rounds(records: Iterable[Mapping[str, Any]]) -> None:
    """Check the rounds of records.

    Raises
    ------
    JobError
        If rounds do not fit the samples, or differ between results that took turns.
    """
    counts: dict[Any, list[int]] = {}
    for record in records:
        counted = [len(rounds) for rounds in rounds_of(record)]
        if counted != counts.setdefault((record["recipe"], record["measurement"], turns_of(record)), counted):
            raise JobError("its rounds differ from those of a backend measured in turn", where=record["place"])


def turns_of(record: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the group of turns of each launch; empty if the result took no turns."""
    return tuple(turn["group"] for turn in record.get("turns", ()))


def rounds_of(record: Mapping[str, Any]) -> list[list[float]]:
    """Return the median time of each round in seconds, by launch; empty without turns.

    Raises
    ------
    JobError
        If the rounds do not hold all of the record's samples.
    """
    launches = [launch["rounds"] for launch in record.get("turns", ())]
    samples = iter(record["data"])
    count = sum(map(sum, launches))
    if launches and count != len(record["data"]):
        raise JobError(f"its rounds hold {count} samples, not {len(record['data'])}", where=record["place"])
    return [[statistics.median(itertools.islice(samples, size)) for size in launch] for launch in launches]


def ranks_of(record: Mapping[str, Any]) -> str:
    """Return ranks and scheme; other schemes compute something else, so they do not compete."""
    ranks, how = record["ranks"], record.get("distributed") or {}
    scheme = "synchronous" if how.get("synchronous") else how.get("scheme", "")
    return f"{ranks} rank{'s' * (ranks > 1)}" + (f", {scheme}" if scheme and ranks > 1 else "")


def is_view(record: Mapping[str, Any]) -> bool:
    """Return whether all answers of an operator are views, so that nothing is computed or moved."""
    return bool(record.get("views")) and (record.get("work") or {}).get("bytes") == 0


class RatioToFastest(NamedTuple):
    """How a result compares with the fastest of those that it competes with.

    Attributes
    ----------
    ratio : Ratio or None
        None if it competes with no other result.
    is_fastest : bool
    undecided : bool
        Whether nothing follows, because one of the two was disturbed.
    is_close : bool
        Whether another of the competing results may be the fastest.
    is_view : bool
        See `is_view`.
    """

    ratio: Ratio | None = None
    is_fastest: bool = False
    undecided: bool = False
    is_view: bool = False
    is_close: bool = False

    @property
    def value(self) -> float | None:
        """The ratio; None if there is none, or if it is undecided."""
        return None if self.undecided or self.ratio is None else self.ratio.value

    def text(self, *, interval: bool = False) -> str:
        """Format the ratio, with its interval if wanted and if the two took turns."""
        if self.undecided or self.is_view:
            return "?" if self.undecided else "view"
        if self.ratio is None or self.is_fastest:
            return "1" if self.is_fastest else "–"
        value, low, high = map(times, self.ratio[:3])
        return f"{value} ({low}–{high})" if interval and self.ratio.method in IN_TURN else value


IN_TURN = ("rounds", "launches")
"""Methods of `Ratio` for results that took turns with each other."""


def ranked(
    results: Sequence[R], unranked: Callable[[R], object], between_runs: float = Threshold().between_runs
) -> list[tuple[R, RatioToFastest]]:
    """Sort results of one measurement: the fastest first, then views, then the unranked ones.

    Parameters
    ----------
    results : sequence of Competing
    unranked : callable
        Returns a key to sort by, empty or zero for results that are ranked.
    between_runs : float
        See `d5suite.statistics.contests.Ranking`.
    """
    found: list[tuple[R, RatioToFastest]] = []
    for contest in contests_of((each for each in results if not unranked(each)), between_runs=between_runs):
        fastest = contest.standing[0][0]
        for place, (row, ratio) in enumerate(contest.standing):
            undecided = row.backend in contest.vetoes or fastest.backend in contest.vetoes
            alone, close = len(contest.results) == 1, bool(contest.rivals)
            compared = RatioToFastest(ratio, place == 0, undecided, is_close=close)
            found.append((row, RatioToFastest() if alone else compared))
    placed = {id(row) for row, _ in found}
    others = [each for each in results if id(each) not in placed]
    others.sort(key=lambda each: (unranked(each), each.record["median_s"]))
    return found + [(each, RatioToFastest(is_view=is_view(each.record))) for each in others]


def ratio_between(one: Mapping[str, Any], other: Mapping[str, Any], between_runs: float) -> Ratio:
    """Return how many times as long ``other`` takes as ``one``, from their records."""
    return Ranking([_competitor(one), _competitor(other)], between_runs).ratio(0, 1)


def _competitor(record: Mapping[str, Any]) -> Competitor:
    items = record["throughput"]["value"] * record["median_s"]
    samples = [seconds / items for seconds in record["data"]]
    return Competitor(samples, rounds_of(record), veto_of(record.get("machine") or {}), turns_of(record))


def notes_on(contests: Sequence[Contest[Any]]) -> list[str]:
    """Return what a table of backends that took turns does not show; empty if none took turns."""
    compared = [contest for contest in contests if len(contest.results) > 1]
    lines = [
        f"{contest.name} is not decided (?), because the machine was disturbed: {', '.join(contest.vetoes)}"
        for contest in compared
        if contest.vetoes
    ]
    calm = [contest for contest in compared if not contest.vetoes]
    lines += [
        f"{contest.name} is undecided: {', '.join(each.backend for each in contest.leaders)}"
        for contest in calm
        if contest.rivals
    ]
    ties = {
        contest.name: [
            f"{one.backend} and {other.backend}" for one, other in contest.ties if one is not contest.leaders[0]
        ]
        for contest in calm
    }
    lines += [f"{name}, within noise: {', '.join(pairs)}" for name, pairs in ties.items() if pairs]
    if any(ratio.method == "rounds" for contest in compared for _, ratio in contest.standing):
        lead = least_lead()
        lines.append(f"one launch cannot decide leads below {lead:.2f}, as runs vary; --launches 3 may")
    return lines + [f"! {note}" for note in dict.fromkeys(note for contest in contests for note in contest.notes)]
