"""What else uses the machine when a run starts, said before anything is measured.

Watching begins when the first declaration is collected, so most of it overlaps with the collection.
"""

from __future__ import annotations

from typing import Any

import pytest

from d5suite.errors import escaped
from d5suite.pytest_plugin import stash
from d5suite.pytest_plugin.progress import progress_of
from d5suite.pytest_plugin.settings import elsewhere, settings


def begin(config: pytest.Config) -> None:
    """Begin to watch, if this run measures here."""
    option = config.option
    measures = not option.collectonly and not elsewhere(config)
    if stash.MACHINE in config.stash or not measures or (option.benchmark_disable and not option.benchmark_enable):
        return
    from d5suite.instruments.machine import snapshot

    config.stash[stash.MACHINE] = snapshot()


def tell(config: pytest.Config) -> None:
    """Say what else uses the machine, if the load is so high that the results decide nothing."""
    reporter: Any = config.pluginmanager.getplugin("terminalreporter")
    if stash.MACHINE not in config.stash or reporter is None:
        return
    from d5suite.instruments.quiet import taken_share, watch
    from d5suite.statistics.contests import UNDECIDED_SHARE

    chosen, since = settings(config), config.stash[stash.MACHINE]
    found = watch(chosen.threads, since)
    if not found.reasons or taken_share(found, chosen.threads, len(since.cpus)) <= UNDECIDED_SHARE:
        return
    took_s = progress_of(config).earlier_s()
    lines = [f"the machine is busy: {'; '.join(found.reasons)}"]
    named = [f"{each['pid']} {each['name']}" for each in found.details.get("competitors", ())]
    lines += [f"these processes use most of it: {', '.join(named)}"] * bool(named)
    lines.append("disturbed results are marked *, and decide nothing")
    if took_s is not None:
        lines.append(f"an earlier run took {_duration(took_s)}")
    if chosen.wait_quiet_s is None:
        lines.append("to wait for a quiet machine first, give --wait-quiet")
    for line in lines:
        reporter.write_line(f"d5suite: {escaped(line)}", yellow=True)


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
