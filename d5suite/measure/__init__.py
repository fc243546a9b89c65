"""Measuring: clock, sampling, statistics, memory, environment and machine state.

Knows nothing of networks, backends, jobs or workers: it times callables and describes the machine they ran on.
Imports the standard library, NumPy, and (late) SciPy and psutil; of d5suite, only ``d5suite.errors``.

============= ==========================================================================================
`clock`       the one clock, its resolution and what a reading costs
`sampling`    first call, warm-up, adaptive samples; alternating runs for ratios
`statistics`  intervals of the median, trends, outliers
`memory`      peak memory, in a pass of its own
`environment` what machine and software this is (does not change during a run)
`machine`     the state before and after a run, and whether the run was disturbed
`quiet`       a one-second probe of how quiet the machine is
`threads`     thread budget and CPU affinity
============= ==========================================================================================
"""
