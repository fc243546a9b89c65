"""All-reduce by size, on every communicator and with every algorithm.

pytest collectives/test_all_reduce.py --ranks 2 --benchmark-json all_reduce.json
"""

from d5suite.cases.collective import Collectives

ALL_REDUCE = Collectives("all_reduce")
