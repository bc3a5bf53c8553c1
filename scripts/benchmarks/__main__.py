"""`./scripts/bench NAME [--quick] [--json] [--write]`: the command line of the benchmarks."""

from __future__ import annotations

import argparse
import datetime
import difflib
import importlib
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import torch
from agora_protocol.errors import AgoraError

from benchmarks.children import BenchFailed, terminable
from benchmarks.report import Report, print_tables, write_section

DONE, FAILED, BAD_ARGUMENTS = 0, 1, 2
PAGE: Final = Path(__file__).resolve().parents[2] / "docs" / "reference" / "benchmarks.md"

# Measures, given whether to be quick and a temporary folder, and returns the report. One of WITH_OPTIONS gets, third,
# the command line's options that are its own.
Benchmark = Callable[..., Report]

NAMES: Final = (
    "learning",
    "pipeline",
    "averaging",
    "join",
    "agreement",
    "codecs",
    "optimizer",
    "activations",
    "wan",
    "tuning",
    "simulate",
    "plan",
    "uneven",
    "journeys",
    "gpu",
    "scaling",
)
# Name to `module:function`; a module is imported only when its benchmark runs.
BENCHES: Final[Mapping[str, str]] = {name: f"benchmarks.{name}:run" for name in NAMES}
# The same for benchmarks that have options of their own; used when some are given.
WITH_OPTIONS: Final[Mapping[str, str]] = {
    name: f"benchmarks.{name}:run_with_options" for name in ("learning", "wan", "tuning", "simulate", "gpu", "scaling")
}


def run(
    name: str,
    quick: bool,
    as_json: bool,
    write: bool,
    *,
    options: Sequence[str] = (),
    benches: Mapping[str, str] = BENCHES,
    page: Path = PAGE,
) -> int:
    """Runs one benchmark and returns the exit code.

    Prints the table, or the one JSON object, on standard output and everything else on standard error.
    options: the benchmark's own. benches: name to `module:function`. page: the file whose section `write` renews.
    """
    if name not in benches:
        close = difflib.get_close_matches(name, benches, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"the benchmarks are {', '.join(benches)}"
        _print_line(f"error: there is no benchmark {name!r}; {hint}")
        return BAD_ARGUMENTS
    try:
        with terminable(), tempfile.TemporaryDirectory(prefix="agora-bench-") as folder:
            if options:
                report = _import_bench(WITH_OPTIONS[name])(quick, Path(folder), options)
            else:
                report = _import_bench(benches[name])(quick, Path(folder))
        if as_json:
            print(json.dumps(report.to_json(), allow_nan=False), flush=True)
        else:
            print_tables(report, sys.stdout)
        if write:
            command = shlex.join(["./scripts/bench", name, *options, *(["--quick"] if quick else []), "--write"])
            write_section(page, report, command, datetime.date.today().isoformat())
            _print_line(f"renewed the section {name} of {page}")
    except (BenchFailed, AgoraError, ValueError, OSError) as error:
        _print_line(f"error: {error}")
        return FAILED
    return DONE


def main() -> int:
    """Parses the command line and runs one benchmark; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="./scripts/bench",
        description="Run a comparison live on this machine and print its table and ratios. Both sides run on the same "
        "machine in one go, so the ratios mean something where absolute figures do not.",
        epilog="Example: ./scripts/bench pipeline --quick --json. For experiments `learning` takes more options: "
        "--peers 2,4,8 --steps 100,400 --seeds 3 --schedule synchronous --link 200Mbit,50ms --kill-every 10 "
        "--set SECTION.FIELD=VALUE (of the manifest, again and again); `wan` takes --losses --widths 64 128 --seeds 3; "
        "`tuning` takes --speeds or --losses, --codecs int8,int4h/int3h --stages 2 --steps 100 --seeds 3; "
        "`simulate` takes --churn, --fleets or --real: one of its parts, with a section of its own; `gpu` takes --part "
        "and a list of machine, counts, stage, memory, head, step, codec, averaging, emulated, swarm, tuning, oom; "
        "`scaling` takes --machines 2,8 --stages 4 --link RATE,RTT --steps 24 --rounds 2 "
        "--set SECTION.FIELD=VALUE.",
    )
    parser.add_argument("name", metavar="NAME", help=f"which comparison: {', '.join(BENCHES)}")
    parser.add_argument("--quick", action="store_true", help="end within 5 minutes on 2 cores; same ratio names")
    parser.add_argument(
        "--json", action="store_true", help="exactly one JSON object on standard output, all else on stderr"
    )
    parser.add_argument("--write", action="store_true", help="renew its section of docs/reference/benchmarks.md")
    given, options = parser.parse_known_args()
    if not torch.cuda.is_available():
        # Of the daemons: what they are compared with computes in float32 on a CPU.
        os.environ.setdefault("AGORA_PRECISION", "float32")
    if options and given.name not in WITH_OPTIONS:
        parser.error(f"unrecognized arguments: {' '.join(options)}")
    return run(given.name, given.quick, given.json, given.write, options=options)


def _import_bench(function: str) -> Benchmark:
    module, _, name = function.partition(":")
    benchmark: Benchmark = getattr(importlib.import_module(module), name)
    return benchmark


def _print_line(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
