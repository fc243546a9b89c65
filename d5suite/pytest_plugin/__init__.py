"""Cases as pytest tests, their samples as ordinary pytest-benchmark results.

A module-level `d5suite.Recipe` or `d5suite.cases.problem.Problems` becomes one test per case,
measurement and backend. The samples that a worker took are replayed through pytest-benchmark's
timer; everything else goes to ``extra_info["d5suite"]``. Uses public hooks of pytest and
pytest-benchmark only, and imports no framework.

================ ==============================================================
`options`        command-line options and their validation
`settings`       the session's `Settings` from them
`collection`     declarations to tests, parametrised over cases and backends
`sweep`          a case over knobs: one session for each point
`turns`          options: backends in turn or one by one, launches, a quiet machine
`busy`           what else uses the machine when a run starts
`measuring`      what was collected, measured in the order that the session decides
`replay`         a record as a benchmark
`progress`       what is running, provisional rows, the tables at the end
`saving`         JSON, series and pictures, put in place whole
`storage`        what pytest-benchmark reads and writes itself, checked before measuring
`interrupts`     finished results survive interrupts
`escapes`        what is printed is safe for a terminal
`output`         output that nobody reads any more is discarded
`missing`        missing results are reported
`stash`          what these parts keep in pytest's configuration
`selected_tests` the tests that a command line selects, without measuring
`ab`             two sides measured in turn: ``d5suite ab``
`bisect`         the revision that made a benchmark slower: ``d5suite bisect``
`preload`        pytest, imported before its run begins
================ ==============================================================
"""

from d5suite.pytest_plugin.collection import (
    pytest_collection_finish,
    pytest_collection_modifyitems,
    pytest_generate_tests,
    pytest_pycollect_makeitem,
)
from d5suite.pytest_plugin.escapes import pytest_make_collect_report
from d5suite.pytest_plugin.interrupts import (
    pytest_runtest_logreport,
    pytest_runtest_logstart,
    pytest_runtestloop,
)
from d5suite.pytest_plugin.missing import pytest_sessionfinish
from d5suite.pytest_plugin.options import pytest_addoption, pytest_configure
from d5suite.pytest_plugin.progress import (
    pytest_benchmark_group_stats,
    pytest_report_teststatus,
    pytest_runtest_makereport,
    pytest_terminal_summary,
)

__all__ = [
    "pytest_addoption",
    "pytest_benchmark_group_stats",
    "pytest_collection_finish",
    "pytest_collection_modifyitems",
    "pytest_configure",
    "pytest_generate_tests",
    "pytest_make_collect_report",
    "pytest_pycollect_makeitem",
    "pytest_report_teststatus",
    "pytest_runtest_logreport",
    "pytest_runtest_logstart",
    "pytest_runtest_makereport",
    "pytest_runtestloop",
    "pytest_sessionfinish",
    "pytest_terminal_summary",
]
