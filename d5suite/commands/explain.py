"""``d5suite explain``: what bounds a result, in sentences that name their figures."""

from __future__ import annotations

import argparse
from pathlib import Path


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    command = commands.add_parser(
        "explain",
        help="say what bounds a result, in sentences that name their figures",
        description="Say what bounds each result in a file. Every sentence names the figures behind it; without a "
        "figure, nothing is said. Nothing is concluded from a wrong answer or a disturbed machine.",
    )
    command.add_argument("result", type=Path, metavar="RESULT.json")
    command.add_argument("case", nargs="?", metavar="CASE", help="only this case, or CASE/MEASUREMENT")
    command.add_argument("--machine", type=Path, metavar="FILE", help="ceilings, from d5suite machine -o FILE")
    command.add_argument("--json", type=Path, metavar="FILE", help="also write the sentences as JSON")
    command.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from d5suite.files import write_json
    from d5suite.models.ceilings import read_ceilings
    from d5suite.report.console import Console
    from d5suite.report.explain import explain, silent, to_dict
    from d5suite.report.outputs import check_outputs
    from d5suite.report.reading import load_results

    inputs = [options.result, *([options.machine] if options.machine else [])]
    check_outputs({"--json": options.json}, inputs)
    ceilings = read_ceilings(options.machine) if options.machine else None
    records = load_results(options.result)
    found = explain(records, options.case, ceilings)
    console = Console(markup=False, highlight=False)
    for each in found:
        console.print(f"{each.title} on {each.backend}  ({each.setting})", style="bold")
        for sentence in each.sentences:
            console.print(f"  {sentence.text}  [{', '.join(sentence.figures)}]")
    for line in silent(records, ceilings):
        console.print(f"not said, for want of figures: {line}", style="dim")
    if options.json:
        write_json(options.json, [to_dict(each) for each in found])
    return 0
