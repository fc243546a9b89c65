"""Spread processes that the tests start over the CPUs, and collect their garbage less often.

d5suite runs a budget of one thread on the first CPU, so that results can be compared. Test
processes run side by side, and all their workers would share that CPU. Here each test process
numbers the CPUs in another order, given by `VARIABLE`. Python runs this file as it starts.
"""

import gc
import os
from collections.abc import Iterable

VARIABLE = "D5SUITE_TESTS_CPUS"
"""Environment variable: all CPUs that the tests may use, the one that counts as the first first."""


def renumber_cpus(order: list[int]) -> None:
    """Let this process number the CPUs in an order, in both directions."""
    number = dict(zip(sorted(order), order, strict=True))
    back = {cpu: each for each, cpu in number.items()}
    get, put = os.sched_getaffinity, os.sched_setaffinity

    def sched_getaffinity(pid: int, /) -> set[int]:
        return {back.get(cpu, cpu) for cpu in get(pid)}

    def sched_setaffinity(pid: int, mask: Iterable[int], /) -> None:
        put(pid, [number.get(cpu, cpu) for cpu in mask])

    os.sched_getaffinity, os.sched_setaffinity = sched_getaffinity, sched_setaffinity


gc.set_threshold(50_000, 20, 20)  # collecting takes a sixth of the time of importing a framework
if os.environ.get(VARIABLE):
    renumber_cpus([int(each) for each in os.environ[VARIABLE].split(",")])
