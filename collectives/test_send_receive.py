"""Every rank sends to the next rank and receives from the previous rank, by size.

pytest collectives/test_send_receive.py --ranks 2 --benchmark-json send_receive.json
"""

from d5suite.cases.collective import Collectives

SEND_RECEIVE = Collectives("send_receive")
