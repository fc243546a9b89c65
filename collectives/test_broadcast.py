"""Broadcast by size, on every communicator and with every algorithm.

pytest collectives/test_broadcast.py --ranks 2 --benchmark-json broadcast.json
"""

from d5suite.cases.collective import Collectives

BROADCAST = Collectives("broadcast")
