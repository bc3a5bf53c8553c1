"""`./scripts/bench NAME [--quick] [--json] [--write]`: the command line of the benchmarks.

Knows: the flags. Must not know: which benchmarks there are (cli.py), or how anything is measured.
"""

from __future__ import annotations

import argparse
import sys

from benchmarks import cli


def main() -> int:
    """Parses the command line and runs one benchmark; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="./scripts/bench",
        description="Run a comparison live on this machine and print its table and ratios. Both sides run on the same "
        "machine in one go, so the ratios mean something where absolute figures do not.",
        epilog="Example: ./scripts/bench pipeline --quick --json",
    )
    parser.add_argument("name", metavar="NAME", help=f"which comparison: {cli.known()}")
    parser.add_argument("--quick", action="store_true", help="end within 5 minutes on 2 cores; same ratio names")
    parser.add_argument(
        "--json", action="store_true", help="exactly one JSON object on standard output, all else on stderr"
    )
    parser.add_argument("--write", action="store_true", help="renew its section of docs/benchmarks.md")
    given = parser.parse_args()
    return cli.run(given.name, given.quick, given.json, given.write)


if __name__ == "__main__":
    sys.exit(main())
