"""Pairs of ranks exchange messages, in both directions and all at once, by size.

pytest collectives/test_exchange_pairs.py --ranks 2,4 --benchmark-json exchange_pairs.json
"""

from d5suite.cases.collective import Collectives

EXCHANGE_PAIRS = Collectives("exchange_pairs")
