"""Reduce-scatter by size, on every communicator and with every algorithm.

pytest collectives/test_reduce_scatter.py --ranks 2 --benchmark-json reduce_scatter.json
"""

from d5suite.cases.collective import Collectives

REDUCE_SCATTER = Collectives("reduce_scatter")
