"""`python -m tools.bench` lists the benchmarks; `python -m tools.bench NAME [arguments]` runs one."""

from tools.lib.listing import main

if __name__ == "__main__":
    main("bench")
