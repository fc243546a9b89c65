"""Several messages to another rank without pauses, and one message back, by size: LogGP's gap.

pytest collectives/test_ping_burst.py --ranks 2 --benchmark-json ping_burst.json
"""

from d5suite.cases.collective import Collectives

PING_BURST = Collectives("ping_burst")
