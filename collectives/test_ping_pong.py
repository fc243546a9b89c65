"""A message to another rank and back, by size: latency and bandwidth in one direction.

pytest collectives/test_ping_pong.py --ranks 2 --benchmark-json ping_pong.json
"""

from d5suite.cases.collective import Collectives

PING_PONG = Collectives("ping_pong")
