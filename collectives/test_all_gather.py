"""All-gather by size, on every communicator and with every algorithm.

pytest collectives/test_all_gather.py --ranks 2 --benchmark-json all_gather.json
"""

from d5suite.cases.collective import Collectives

ALL_GATHER = Collectives("all_gather")
