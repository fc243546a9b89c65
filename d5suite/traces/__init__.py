"""Traces: what ranks did, when, and for whom they waited.

A trace is a set of events in columns (`d5suite.traces.events`). Writers and readers turn it into
files: an OTF2 archive (`archive`), a Chrome trace (`chrome`). An analysis takes a trace, wherever
it was recorded: `waits` finds wait states, `path` the critical path. Nothing here needs a
framework. Imports NumPy, and otf2 where an archive is written or read.
"""
