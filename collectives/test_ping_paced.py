"""Several messages to another rank with pauses, and one message back: LogGP's overhead.

pytest collectives/test_ping_paced.py --ranks 2 --benchmark-json ping_paced.json
"""

from d5suite.cases.collective import Collectives

PING_PACED = Collectives("ping_paced")
