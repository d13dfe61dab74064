"""`python -m tools.checks` lists the checks; `python -m tools.checks NAME [arguments]` runs one."""

from tools.lib.listing import main

if __name__ == "__main__":
    main("checks")
