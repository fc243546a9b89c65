"""Reduce by size, on every communicator and with every algorithm.

pytest collectives/test_reduce.py --ranks 2 --benchmark-json reduce.json
"""

from d5suite.cases.collective import Collectives

REDUCE = Collectives("reduce")
