"""Every rank of the first half sends to a rank of the second half, all at once, by size.

pytest collectives/test_send_pairs.py --ranks 2,4 --benchmark-json send_pairs.json
"""

from d5suite.cases.collective import Collectives

SEND_PAIRS = Collectives("send_pairs")
