"""What a page says in sentences: the verdict, its conditions, its noise, and notices.

Imports its neighbours.
"""

from __future__ import annotations

from collections import Counter

from d5suite.report.contests import Contest
from d5suite.report.formats import CONFIDENCE
from d5suite.report.page.facts import shortened
from d5suite.report.page.gather import Page, Row

MOST_CONDITIONS = 6
"""Most lines of conditions beside the verdict."""


def _contests(page: Page) -> list[Contest[Row]]:
    """Return the contests of at least two results."""
    return [contest for _, group in page.groups for contest in group.contests if len(contest.results) > 1]


def summary(page: Page) -> list[tuple[str, str]]:
    """Return figures of the whole page, each with its meaning."""
    contests, rows = _contests(page), list(page.rows)
    wrong = [row for row in rows if row.failed]
    clear = sum(not each.rivals for each in contests)
    found = [(f"{clear} of {len(contests)}", "comparisons with a clear winner")] if contests else []
    found.append((f"{len(rows) - len(wrong)} of {len(rows)}", "passed their proof"))
    if wrong or page.missed:
        found.append((f"{len(wrong) + len(page.missed)}", "failed"))
    found.append((str(sum(any(m.sign == "*" for m in row.marks) for row in rows)), "disturbed"))
    return found


def headline(page: Page) -> str:
    """Return sentences about the fastest backends."""
    contests = _contests(page)
    if not contests:
        return "Nothing to compare: no case was measured on two backends under equal conditions."
    clear: Counter[str] = Counter()
    close: Counter[str] = Counter()
    for each in contests:
        if not each.vetoes:
            (close if each.rivals else clear).update({row.record["backend"]["name"] for row in each.leaders})
    sentences = [
        f"{shortened(name, 30)} is fastest in {count} of {len(contests)} comparisons (clearly)"
        for name, count in sorted(clear.items(), key=lambda item: (-item[1], item[0]))[:5]
    ]
    undecided = sum(bool(each.rivals) and not each.vetoes for each in contests)
    if undecided:
        may = ", ".join(
            f"{shortened(name, 30)} in {count}"
            for name, count in sorted(close.items(), key=lambda item: (-item[1], item[0]))[:5]
        )
        sentences.append(f"{undecided} of {len(contests)} are undecided; who may be fastest there: {may}")
    disturbed = sum(bool(each.vetoes) for each in contests)
    if disturbed:
        sentences.append(
            f"{disturbed} of {len(contests)} comparisons are not decided, because the machine was disturbed"
        )
    end = ""
    if clear:
        end = " Clearly: the 95% interval of the lead excludes 1."
    elif undecided:
        end = " No lead is certain: each 95% interval includes 1."
    return "; ".join(sentences) + "." + end


def conditions(page: Page) -> list[str]:
    """Return under which conditions the verdict holds, with the cases if they differ."""
    titles: dict[str, dict[str, None]] = {}
    for section in page.sections:
        device = section.conditions.get("device name", "")
        told = ", ".join(section.setting) + (f" ({shortened(device, 60)})" if device else "")
        titles.setdefault(told, {})[section.title] = None
    if len(titles) == 1:
        return list(titles)
    lines = []
    for told, cases in list(titles.items())[:MOST_CONDITIONS]:
        more = f" and {len(cases) - 3} more" if len(cases) > 3 else ""
        lines.append(f"{', '.join(shortened(case, 40) for case in list(cases)[:3])}{more}: {told}")
    if left_out := len(titles) - len(lines):
        lines.append(f"{left_out} more in the headings of the results")
    return lines


def noise(page: Page) -> str:
    """Return what the intervals of leads include, and how well medians are known."""
    text = f"The 95% interval includes the spread of samples and {page.between_runs:.0%} from process to process"
    text += " (--between-runs): the median of one program varies that much between two launches."
    if any(row.record.get("turns") for row in page.rows):
        text += " Backends that took turns are compared round by round instead, as in the terminal's tables, so their"
        text += " ratio is not that of the medians."
    spreads = sorted(
        (info["median_ci95"][1] - info["median_ci95"][0]) / 2 / info["median_s"]
        for info in (row.record for row in page.rows)
        if info["median_ci_confidence"] >= CONFIDENCE - 0.06
    )
    if spreads:
        text += f" Within a process medians are known to ±{spreads[len(spreads) // 2]:.1%} in half of the results,"
        text += f" to ±{spreads[int(len(spreads) * 0.95)]:.1%} in 95%."
    return text


def subtitle(page: Page) -> str:
    """Return how many results the page has, and their backends, devices and dates."""
    rows = list(page.rows)
    devices = dict.fromkeys(section.conditions.get("device name", "") for section in page.sections)
    dates = sorted({str(source.content.get("datetime", ""))[:10] for source in page.sources if source.results} - {""})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}" if dates else "date unknown"
    what = f"{len(rows):,} results of {len(page.backends)} backend{'s' * (len(page.backends) > 1)}"
    return f"{what} on {shortened(', '.join(devices), 120)}, {when}"


def notices(page: Page) -> list[str]:
    """Return what a reader must know before the verdict."""
    found = [
        f"{source.name} is left out: {shortened(source.left_out, 400)}" for source in page.sources if source.left_out
    ]
    if page.apart:
        found.append(
            "These results differ in " + shortened(", ".join(page.apart), 400)
            + ": they stand in tables of their own and are not compared with each other."
        )  # fmt: skip
    if views := sum(row.to_fastest.is_view for row in page.rows):
        one = views == 1
        found.append(
            f"{views} result{'' if one else 's'} only return{'s' if one else ''} a view of memory that was there: "
            f"nothing is computed, so {'it is' if one else 'they are'} shown as view and compared with none."
        )
    if any(row.reduced for row in page.rows):
        names = dict.fromkeys(row.record["backend"]["name"] for row in page.rows if row.reduced)
        found.append(f"† {', '.join(names)}: results at a reduced size are not compared with the others.")
    lacking = [source for source in page.sources if "not beside" in source.series]
    return found + [f"{each.mark} {each.series[0].upper()}{each.series[1:]}".lstrip() for each in lacking]
