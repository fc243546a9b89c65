"""Instruments of measuring: clock, sampling, memory, environment and machine state.

They know nothing of networks, backends, jobs or workers: they time functions and describe the
machine. Imports the standard library, `d5suite.statistics`, `d5suite.errors` and, lazily, psutil
and pynvml.

=============== ====================================================================================
`clock`         the clock of all measurements, its resolution and read cost
`settings`      how many samples to take
`warmup`        calls until times are steady
`sampling`      first call, warm-up, adaptive samples; alternating runs for ratios
`events`        the device's own clock beside the host's
`freshness`     whether a step computes, or remembers answers
`memory`        free memory and peak memory
`environment`   machine and software, constant during a run
`gpus`          the machine's GPUs, through NVML or nvidia-smi
`nvml`          NVIDIA's GPUs through NVML
`energy`        energy per step, of a GPU or of CPUs
`machine`       the machine's state before and after a run, and whether the run was disturbed
`quiet`         a one-second probe of the machine's noise
`threads`       thread budget and CPU affinity
=============== ====================================================================================
"""
