"""`python -m tools.bench` lists the benchmarks; `python -m tools.bench NAME [arguments]` runs one; `--quick`, `--full`
and `--compare` run many, or compare their results.
"""

import sys

from tools.lib import listing, suite

if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1].split("=")[0] in suite.OPTIONS:
        suite.main()
    else:
        listing.main("bench", more=f"{', '.join(suite.OPTIONS)}: see `python -m tools.bench --quick --help`")
