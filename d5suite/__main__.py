"""``python -m d5suite`` is the command ``d5suite``. Imports `d5suite.cli`."""

import sys

from d5suite.cli import main

if __name__ == "__main__":
    sys.exit(main())
