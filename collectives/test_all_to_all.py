"""All-to-all by size, on every communicator and with every algorithm.

pytest collectives/test_all_to_all.py --ranks 2 --benchmark-json all_to_all.json
"""

from d5suite.cases.collective import Collectives

ALL_TO_ALL = Collectives("all_to_all")
