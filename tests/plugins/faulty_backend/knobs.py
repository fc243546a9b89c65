"""What can be tuned of the faulty backend: its fault; and a knob that does nothing."""

from d5suite.levels.knobs import variable_knob

KNOBS = (
    variable_knob("FAULTY_FAULT", ("wrong:4", "segfault:4", "none:4"), "network.py of this plug-in"),
    variable_knob("FAULTY_MORE", ("hangs", "memory"), "network.py of this plug-in", FAULTY_FAULT=("none:4",)),
)
