"""What a study has found, by rules: a sentence is said only if the data hold all its figures.

Who is faster is what `d5suite.report.contests` and `d5suite.statistics.decisions` decide; what they
leave undecided stays so.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from d5suite.report.compare import setting
from d5suite.report.contests import Contest, ratio_between
from d5suite.report.page.gather import Row, RowGroup, Section
from d5suite.report.study.claims import Claim, Heading, ReportTable, cell, interval, interval_cell, said, say, words
from d5suite.report.study.figures import BETWEEN_RUNS, StatedFigure, place_in
from d5suite.report.study.gathered import Gathered
from d5suite.report.study.limits import near_ceilings, pace
from d5suite.statistics.contests import veto_of
from d5suite.statistics.decisions import Threshold, decide
from d5suite.study import declaration

MOST_NAMES = 8
"""Most backends with a column of their own."""

MOST_SENTENCES = 8
"""Most comparisons of a topic that get a sentence of their own."""

LOADING = ("input_pipeline", "native_input_pipeline", "cost_of_loading")
ACCURACY = ("time_to_accuracy", "distributed_accuracy")

ALL_REDUCE, PARAMETER_SERVER = "all_reduce", "parameter_server"


class Topic(NamedTuple):
    """A section of results, and the records that belong to it."""

    key: str
    title: str
    holds: Callable[[Mapping[str, Any]], bool]


TOPICS = (
    Topic("operators", "Operators", lambda each: each["level"] == 0),
    Topic("networks", "Networks", lambda each: each["level"] == 1),
    Topic("workflows", "Coupled workflows", lambda each: bool(each.get("workflow"))),
    Topic("accuracy", "Time to accuracy", lambda each: each["measurement"] in ACCURACY),
    Topic("loading", "Loading", lambda each: each["measurement"] in LOADING),
    Topic("neutrality", "Cost of neutrality", lambda each: each["measurement"] == "cost_of_neutrality"),
    Topic("training", "Training", lambda each: each["level"] == 2),
    Topic("collectives", "Collectives", lambda each: each["measurement"] == "collectives"),
    Topic("ranks", "Scaling and schemes", lambda each: each["level"] == 3),
)
"""A record belongs to the first topic whose ``holds`` accepts it."""


def topic_of(record: Mapping[str, Any]) -> Topic:
    """Return the topic of a record."""
    return next(each for each in TOPICS if each.holds(record))


class Found(NamedTuple):
    """The findings on a topic.

    Attributes
    ----------
    topic : Topic
    summary : list of Claim
        Sentences for the abstract.
    claims : list of Claim
    tables : list of ReportTable
    rows : list of Row
    """

    topic: Topic
    summary: list[Claim]
    claims: list[Claim]
    tables: list[ReportTable]
    rows: list[Row]


class _Compared(NamedTuple):
    section: Section
    group: RowGroup
    contest: Contest[Row]


def find(found: Gathered, parts: Sequence[str] = ()) -> list[Found]:
    """Return what is found, by topic in the order of the report.

    Parameters
    ----------
    found : Gathered
    parts : sequence of str
        Only results of these parts of the study; by default of all.
    """
    compared: dict[str, list[_Compared]] = defaultdict(list)
    rows: dict[str, list[Row]] = defaultdict(list)
    titles = {topic.key: topic for topic in TOPICS}
    for section, group in found.groups:
        own = [row for row in group.rows if not parts or found.run_of(row).state.part in parts]
        if own:
            key = topic_of(own[0].record).key
            rows[key] += own
            inside = {id(row) for row in own}
            compared[key] += [
                _Compared(section, group, each) for each in group.contests
                if len(each.results) > 1 and all(id(row) in inside for row in each.results)
            ]  # fmt: skip
    made = [_found(found, titles[key], rows[key], compared[key]) for key in declaration.TOPICS if rows[key]]
    for each in made:
        if each.topic.key == "loading":
            kept = said(
                claim for _, claim in sorted(pace(found, each.rows, rows["training"]), key=lambda pair: pair[0])
            )
            each.claims.extend(kept[:MOST_SENTENCES])
            each.summary.extend(kept[:2])
    return made


def _found(found: Gathered, topic: Topic, rows: list[Row], compared: list[_Compared]) -> Found:
    summary = said([_counted(found, topic, compared)])
    sentences = [_lead(found, each) for each in _by_lead(compared) if not each.contest.rivals]
    leads = said(sentences[:MOST_SENTENCES])
    summary += leads[: 1 if len(compared) > 3 else 3]
    claims = said([_counted(found, topic, compared)]) + leads
    undecided = [each for each in compared if each.contest.rivals][:MOST_SENTENCES]
    claims += said(_undecided(found, each) for each in undecided)
    slower = sorted((pair for each in undecided for pair in _slower(found, each)), key=lambda pair: -pair[0])
    behind = said(claim for _, claim in slower[:MOST_SENTENCES])
    claims += behind
    summary += behind[:1]
    tables = [_matrix(found, topic, compared)] if compared and _narrow(compared) else []
    if topic.key == "ranks":
        scaled = said(_scaling(found, rows))
        schemes, table = _schemes(found, rows)
        claims += [*scaled, *schemes]
        summary += [*scaled[:1], *schemes[:1]]
    elif topic.key == "operators":
        near = said(near_ceilings(found, rows))
        claims += near
        summary += near
    elif topic.key == "collectives":
        claims += said(_collectives(found, rows))
    elif topic.key == "accuracy":
        claims += said(_accuracy(found, rows))
    elif topic.key == "workflows":
        claims += said(_workflows(found, rows))
        summary += claims[-1:]
    if not tables:
        tables = [_listed(found, topic, rows)]
    if topic.key == "ranks":
        tables += table
    return Found(topic, summary, claims, tables, rows)


def _by_lead(compared: Sequence[_Compared]) -> list[_Compared]:
    return sorted(compared, key=lambda each: -each.contest.standing[1][1].value)


def _counted(found: Gathered, topic: Topic, compared: Sequence[_Compared]) -> Claim | None:
    """Say how many comparisons have a clear winner, who wins how many, and how many have none."""
    places = [found.contest(each.contest) for each in compared]
    wins = Counter(
        each.contest.leaders[0].record["backend"]["name"] for each in compared if not each.contest.rivals
    )  # fmt: skip
    told: list[str | StatedFigure | None] = []
    for name, _ in sorted(wins.items(), key=lambda item: (-item[1], item[0])):
        told += [", " if told else " (", f"{name} ", found.figure(f"clear:{name}", places)]
    told += [")"] if told else []
    undecided = found.figure("undecided", places)
    end: list[str | StatedFigure | None] = ["; ", undecided, " undecided"] if undecided and undecided.value else []
    clear = found.figure("clear", places)
    return say(f"{topic.title}: a clear winner in ", clear, " of ", found.figure("contests", places),
               " comparisons", *told, *end, ".")  # fmt: skip


def named(each: _Compared) -> str:
    """Return the name of a comparison; see `named_rows`."""
    return named_rows(each.section, each.group, each.contest.results[0])


def named_rows(section: Section, group: RowGroup, row: Row) -> str:
    """Return case and measurement, and the conditions that set the section apart."""
    apart = f", {', '.join(_apart(section))}" if _apart(section) else f" ({setting(row.record)})"
    ranks = f", {row.record['ranks']} ranks" if row.record["ranks"] > 1 else ""
    return f"{section.title} {group.measurement.replace('_', ' ')}{ranks}{apart}"


def _apart(section: Section) -> list[str]:
    """Return the conditions that set a section apart from others of the same title.

    A condition that the section lacks does not count.
    """
    return [each for each in section.apart if not each.endswith(" none")]


def _lead(found: Gathered, each: _Compared) -> Claim | None:
    first, second = (row for row, _ in each.contest.standing[:2])
    return say(
        f"In {named(each)}, {first.backend} is fastest: it takes ", found.of(first, "median_s", "time"),
        f", and {second.backend} takes ", *interval(found.ratio(first, second), " times as long"), ".",
    )  # fmt: skip


def _nearest(contest: Contest[Row]) -> tuple[Row, Row]:
    """Return the fastest, and the next that may be as fast; the second one if that is decided."""
    return contest.standing[0][0], (contest.rivals or [contest.standing[1][0]])[0]


def _undecided(found: Gathered, each: _Compared) -> Claim | None:
    why = "the machine was disturbed" if each.contest.vetoes else "the interval includes 1"
    return say(
        f"In {named(each)}, it is undecided which of {', '.join(row.backend for row in each.contest.leaders)} is "
        "fastest: the ratio of the first two is ", *interval(found.ratio(*_nearest(each.contest))), f"; {why}.",
    )  # fmt: skip


def _slower(found: Gathered, each: _Compared) -> Iterator[tuple[float, Claim | None]]:
    """Yield who is clearly slower than an undecided contest's first: least ratio and sentence."""
    fastest, leaders = each.contest.standing[0][0], {id(row) for row in each.contest.leaders}
    for row, ratio in each.contest.standing:
        if id(row) not in leaders:
            yield ratio.low, say(
                f"In {named(each)}, {row.backend} is slower than {fastest.backend}: it takes ",
                *interval(found.ratio(fastest, row), " times as long"), ".",
            )  # fmt: skip


def _narrow(compared: Sequence[_Compared]) -> bool:
    return len({row.backend for each in compared for row in each.contest.results}) <= MOST_NAMES


def _matrix(found: Gathered, topic: Topic, compared: Sequence[_Compared]) -> ReportTable:
    """Return a line for each comparison, with a column for each backend."""
    names = sorted({row.backend for each in compared for row in each.contest.results})
    headings = [
        *words("case", "measurement", "verdict"), Heading("lead (95% interval)", ("lead", "lead low", "lead high")),
        *(Heading(f"{name}", (f"{name} median s",)) for name in names),
    ]  # fmt: skip
    lines: list[list[Any]] = []
    for each in compared:
        first, second = _nearest(each.contest)
        verdict = (
            "not decided: disturbed" if each.contest.vetoes else "undecided" if each.contest.rivals
            else f"{first.backend} fastest"
        )  # fmt: skip
        own = {row.backend: row for row in each.contest.results}
        best = "" if each.contest.rivals else first.backend
        apart = f" ({', '.join(_apart(each.section))})" if _apart(each.section) else ""
        what = f"{each.group.measurement}{', ' + found.machine_of(first) if found.machine_of(first) else ''}"
        medians = [
            cell(found.of(own[name], "median_s", "time") if name in own else None, mark="best" * (name == best))
            for name in names
        ]
        lead = interval_cell(found.ratio(first, second))
        lines.append([each.section.title + apart, what, verdict, lead, *medians])
    return ReportTable.of(
        topic.key, f"{topic.title}: median times; the fastest is bold where it is clear", headings, lines
    )


def _listed(found: Gathered, topic: Topic, rows: Sequence[Row]) -> ReportTable:
    """Return a line for each result."""
    headings = [
        *words("case", "measurement", "backend"), Heading("median (95% interval)", ("median s", "low s", "high s")),
        Heading("rate"), *words("unit"),
    ]  # fmt: skip
    lines = []
    for row in rows:
        if row.failed:
            continue
        low, high = (found.of(row, f"median_ci95.{end}", "time") for end in (0, 1))
        marks = "".join(mark.sign for mark in row.marks)
        lines.append([
            row.case, row.measurement, row.backend + marks,
            cell(found.of(row, "median_s", "time"), " (", low, " to ", high, ")"),
            found.of(row, "throughput.value", "figure"), row.record["throughput"]["unit"],
        ])  # fmt: skip
    return ReportTable.of(topic.key, f"{topic.title}: all results", headings, lines)


def _line(row: Row) -> tuple[Any, ...]:
    """Return the key that all results on one scaling curve share."""
    how = row.record.get("distributed") or {}
    backend = row.record["backend"]
    return row.file, row.case, row.measurement, backend["name"], backend["mode"], how.get("scheme")


def _scaling(found: Gathered, rows: Sequence[Row]) -> Iterator[Claim | None]:
    """Say how many times the rate of one rank a scaling curve reaches with the most ranks."""
    alone = {_line(row)[:5]: row for row in rows if row.record["ranks"] == 1 and not row.failed}
    lines: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        if row.record["ranks"] > 1 and not row.failed:
            known = lines.setdefault(_line(row), row)
            lines[_line(row)] = max(known, row, key=lambda each: each.record["ranks"])
    for line, row in lines.items():
        base = alone.get(line[:5])
        if base is not None and line[5] == ALL_REDUCE and found.decides(row, base):
            rates = [place_in(found.place(each), "throughput.value") for each in (row, base)]
            yield say(
                f"{row.case} on {row.record['backend']['name']}, {line[5]}: ", found.of(row, "ranks", "count"),
                " ranks give ", found.of(row, "throughput.value", "figure"), f" {row.record['throughput']['unit']}, ",
                found.figure("over sum", rates, "times"), " times the rate of one rank.",
            )  # fmt: skip


def _schemes(found: Gathered, rows: Sequence[Row]) -> tuple[list[Claim], list[ReportTable]]:
    """Return how long steps of other schemes take, as multiples of a step of all-reduce."""
    bases: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        if row.record["ranks"] > 1 and not row.failed and _line(row)[5] == ALL_REDUCE and not _order(row):
            bases.setdefault((*_line(row)[:5], row.record["ranks"]), row)
    compared = []
    for row in rows:
        base = bases.get((*_line(row)[:5], row.record["ranks"]))
        if base is not None and not row.failed and base is not row and _line(row)[5] != ALL_REDUCE:
            compared.append((base, row))
    name = "schemes", "Steps of other schemes over steps of all-reduce; those marked ≠ compute something else"
    return against(found, compared, lambda row: str(_line(row)[5]), "one of all-reduce", *name)


def against(
    found: Gathered,
    compared: Sequence[tuple[Row, Row]],
    label: Callable[[Row], str],
    over: str,
    name: str,
    caption: str,
) -> tuple[list[Claim], list[ReportTable]]:
    """Return how long steps take as multiples of others: sentences, the largest first, and a table.

    Parameters
    ----------
    found : Gathered
    compared : sequence of (Row, Row)
        The base, and the result to compare with it.
    label : callable
        Names that result.
    over : str
        Names the base.
    name, caption : str
        Name and caption of the table.
    """
    claims: list[tuple[float, Claim | None]] = []
    lines = []
    for base, row in compared:
        ratio = found.ratio(base, row)
        outcome = outcome_of(base, row)
        other = "" if row.record["distributed"].get("synchronous") else "; it computes something else"
        backend = row.record["backend"]["name"]
        claim = say(
            f"{row.case} on {backend} with ", found.of(row, "ranks", "count"), f" ranks: a step of {label(row)} takes ",
            *interval(ratio, f" times as long as {over}"), f": {outcome}{other}.",
        )  # fmt: skip
        claims.append((ratio[0].value if ratio[0] else 0.0, claim))
        lines.append([
            row.case, backend, found.of(row, "ranks", "count"), label(row) + " ≠" * bool(other), interval_cell(ratio),
            outcome,
        ])  # fmt: skip
    times = Heading("times as long (95% interval)", ("ratio", "ratio low", "ratio high"))
    headings = [*words("case", "backend"), Heading("ranks"), *words("scheme"), times, *words("verdict")]
    claims.sort(key=lambda each: -each[0])
    ends = claims[: MOST_SENTENCES // 2] + claims[MOST_SENTENCES // 2 :][-MOST_SENTENCES // 2 :]
    return said(each for _, each in ends), [ReportTable.of(name, caption, headings, lines)] if lines else []


def outcome_of(base: Row, new: Row) -> str:
    """Return the decision on two results: slower, faster, the same, or undecided."""
    vetoes = [why for row in (base, new) if (why := veto_of(row.record.get("machine") or {}))]
    ratio = ratio_between(base.record, new.record, BETWEEN_RUNS)
    outcome = decide(ratio, effect=Threshold().effect, bars=vetoes).outcome
    return {"same": "the same", "uncertain": "undecided"}.get(outcome, outcome)


def _collectives(found: Gathered, rows: Sequence[Row]) -> Iterator[Claim | None]:
    """Say the latency and bandwidth of each collective, and how far its model is off."""
    for row in rows[: 2 * MOST_SENTENCES]:
        if not row.failed:
            yield say(
                f"{row.case} on {row.backend}: the least message takes ", found.of(row, "latency_s", "time"),
                ", the best bus bandwidth is ", found.of(row, "bus_bytes_per_s", "GB/s"),
                " GB/s, and the fitted line is ", found.of(row, "line.residual", "percent"), " off.",
            )  # fmt: skip


def _accuracy(found: Gathered, rows: Sequence[Row]) -> Iterator[Claim | None]:
    """Say how long training to the target takes, and in how many runs."""
    for row in rows:
        if not row.failed and isinstance(row.record.get("runs"), list):
            target = row.record.get("target") or {}
            yield say(
                f"{row.case}: {row.backend} reached its target {target.get('metric', 'metric')} of ",
                found.of(row, "target.value", "figure"), " in ", found.of(row, "median_s", "time"),
                " of training (median of ", found.raw.figure("length", [place_in(found.place(row), "runs")], "count"),
                " runs).",
            )  # fmt: skip


def _workflows(found: Gathered, rows: Sequence[Row]) -> Iterator[Claim | None]:
    """Say how long a coupled workflow takes, and how well its parts keep each other busy."""
    for row in rows:
        if not row.failed:
            yield say(
                f"{row.case} on {row.backend} with ", found.of(row, "ranks", "count"), " ranks takes ",
                found.of(row, "median_s", "time"), "; its least efficient coupling reaches ",
                found.of(row, "efficiency", "percent"), ", and the component that waits most waits ",
                found.of(row, "idle_share", "percent"), " of the time.",
            )  # fmt: skip


def _order(row: Row) -> str:
    """Return the order and the slices of a result's transfers; empty without."""
    how = (row.record.get("distributed") or {}).get("settings") or {}
    return ", ".join(f"{key} {how[key]}" for key in ("order", "slice_bytes", "credit_bytes") if how.get(key))


def served(found: Gathered) -> list[Claim]:
    """Return how long steps of a parameter server take, as multiples of a step of all-reduce."""
    schemes = (ALL_REDUCE, PARAMETER_SERVER)
    return _schemes(found, [row for row in found.rows if row.record["level"] == 3 and _line(row)[5] in schemes])[0]


def ordered(found: Gathered) -> tuple[list[Claim], list[ReportTable]]:
    """Return how long steps with an order of transfers take, as multiples of those without."""
    rows = [row for row in found.rows if row.record["level"] == 3 and row.record["ranks"] > 1 and not row.failed]
    bases = {(_line(row), row.record["ranks"]): row for row in rows if not _order(row)}
    known = [((_line(row), row.record["ranks"]), row) for row in rows if _order(row)]
    compared = [(bases[key], row) for key, row in known if key in bases]
    name = "ordering", "Steps with an order of transfers over those of the same scheme without"
    claims, tables = against(
        found, compared, lambda row: f"{_line(row)[5]} with {_order(row)}", "one without an order", *name
    )  # fmt: skip
    efficient = (
        say(
            f"{row.case} on {row.backend}: ", found.of(row, "distributed.ordering.efficiency", "percent"),
            " of the overlap that is possible is reached (E); with all of it a step would be ",
            found.of(row, "distributed.ordering.potential", "percent"), " faster (S).",
        )
        for _, row in compared
    )  # fmt: skip
    return claims + said(efficient)[:MOST_SENTENCES], tables


def swept(found: Gathered, rows: Sequence[Row]) -> list[Claim]:
    """Return what more threads and larger batches gain: the largest number over the smallest."""
    conditions = {id(row): section.conditions for section, group in found.groups for row in group.rows}
    claims = []
    for knob, field, what in (("threads", "threads", "threads"), ("batch", "batch_size", "images a batch")):
        groups: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
        for row in rows:
            if not row.failed and not row.reduced and row.record["level"] in (1, 2) and row.record.get(field):
                fixed = tuple((name, value) for name, value in conditions[id(row)].items() if name != knob)
                groups[row.case, row.measurement, row.backend, row.file, fixed].append(row)
        for own in groups.values():
            base, most = (end(own, key=lambda row: row.record[field]) for end in (min, max))
            if base.record[field] < most.record[field] and found.decides(base, most):
                gain = interval(found.ratio(most, base), " times the rate of ", found.of(base, field, "count"))
                claims.append(say(
                    f"{most.case} {most.measurement.replace('_', ' ')} on {most.backend} ({setting(most.record)}): ",
                    found.of(most, field, "count"), f" {what} give ", *gain, ".",
                ))  # fmt: skip
    return said(claims)
