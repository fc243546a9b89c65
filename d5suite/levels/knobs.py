"""What can be tuned in a backend: knobs as data, each with its values and a source.

A knob changes how fast an answer comes, never which answer is right: every candidate is proved. An
adapter's knobs are in its module ``knobs``, which imports no framework. What all backends share is
in `d5suite.tuning.common`. Imports the standard library.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

MODE = "mode"
"""The knob whose values are modes of the backend."""

BATCH = "batch_size"
LOADERS = "loader_workers"
WHOLE = ("threads", BATCH, LOADERS)
"""Settings that are whole numbers."""

UPDATE = "update"
"""Stands among the operators of `TuningKnob.layers` for the optimizer's update."""

OF_RANKS = ("scheme", "algorithm", "communicator")
"""Settings of ranks that train together, named like their options."""


@dataclass(frozen=True)
class TuningKnob:
    """One knob: an environment variable of the worker, or a setting of its job.

    Attributes
    ----------
    name : str
        Name in profiles and tables. For a setting it is `MODE`, one of `OF_RANKS`, or a field of
        `d5suite.cases.case.Settings`.
    values : tuple of str
        At least two; the first is the default. An empty value leaves a variable as it is.
    source : str
        Who says that it may help: a page, a file, or a measurement.
    variable : str
        The environment variable; empty if the knob is a setting.
    joins : str
        Separator of the values of several knobs of one variable; empty if it has one knob.
    texts : mapping of str to str
        By value: the text that the variable is set to, if not the value itself.
    when : mapping of str to tuple of str
        By name of another knob: the values at which this one has an effect.
    layers : tuple of str
        ONNX operators that it is for, or `UPDATE`; it is tried first where they dominate a step.
    bound : tuple of {"arithmetic", "memory"}
        The knob is tried first for steps that the roofline says are bound by one of these.
    """

    name: str
    values: tuple[str, ...]
    source: str
    variable: str = ""
    joins: str = ""
    texts: Mapping[str, str] = field(default_factory=dict)
    when: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    layers: tuple[str, ...] = ()
    bound: tuple[str, ...] = ()

    @property
    def default(self) -> str:
        """The first value."""
        return self.values[0]

    def value_of(self, value: str) -> int | str:
        """Return a value in the type of its setting."""
        return int(value) if self.name in WHOLE else value


def variable_knob(
    variable: str,
    values: tuple[str, ...],
    source: str,
    *,
    layers: tuple[str, ...] = (),
    bound: tuple[str, ...] = (),
    **when: tuple[str, ...],
) -> TuningKnob:
    """Return a knob that sets one environment variable; by default the variable is left alone."""
    return TuningKnob(variable, ("", *values), source, variable=variable, when=when, layers=layers, bound=bound)


def flag_knob(name: str, variable: str, flags: Mapping[str, str], source: str, **when: tuple[str, ...]) -> TuningKnob:
    """Return a knob that adds one of several flags to a variable of flags, by default none."""
    return TuningKnob(name, ("", *flags), source, variable=variable, joins=" ", texts=flags, when=when)


OPENMP = "OpenMP 5.2, chapter 21 (https://www.openmp.org/spec-html/5.2/openmpch21.html)"
ONEDNN = "oneDNN, CPU dispatcher control (https://uxlfoundation.github.io/oneDNN/dev_guide_cpu_dispatcher_control.html)"
LIBGOMP = "libgomp, Environment Variables (https://gcc.gnu.org/onlinedocs/libgomp/Environment-Variables.html)"
MATRIX_LAYERS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
"""Operators that are matrix products inside."""


def openmp_knobs(**when: tuple[str, ...]) -> tuple[TuningKnob, ...]:
    """Return the knobs of a framework that computes with GNU's OpenMP: how its threads wait.

    Sleeping threads cost time where one kernel follows another, and save it where others need the
    cores.
    """
    return (
        variable_knob("OMP_WAIT_POLICY", ("active", "passive"), OPENMP, **when),
        variable_knob("GOMP_SPINCOUNT", ("0", "1000000", "infinite"), LIBGOMP, OMP_WAIT_POLICY=("",), **when),
        variable_knob("OMP_PROC_BIND", ("close", "spread"), OPENMP, **when),
    )


def onednn_knobs(prefix: str = "ONEDNN", **when: tuple[str, ...]) -> tuple[TuningKnob, ...]:
    """Return the knobs of a framework that computes with oneDNN: its instruction set.

    Wide vectors lower the clock of some CPUs.
    """
    name, values = f"{prefix}_MAX_CPU_ISA", ("AVX2", "AVX512_CORE")
    return (variable_knob(name, values, ONEDNN, layers=MATRIX_LAYERS, bound=("arithmetic",), **when),)
