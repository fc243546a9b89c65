"""The parent side of a run: cases become jobs, workers run them, results become records.

One job per (batch of cases, backend) holds all wanted measurements. Knows cases, jobs and results,
and backends as data; never imports a framework or the worker.
"""

from d5suite.session.session import Found, Session

__all__ = ["Found", "Session"]
