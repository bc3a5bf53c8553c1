"""What `./scripts/bench NAME` does: find the benchmark, run it in a temporary folder, show the result, write the page.

Knows: the names of the benchmarks, the flags, where docs/benchmarks.md is. Must not know: how anything is measured.
"""

from __future__ import annotations

import datetime
import difflib
import importlib
import json as json_text
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import agora
from benchmarks.children import BenchFailed, terminable
from benchmarks.report import Report, print_tables, write_section
from benchmarks.wan_plots import require_matplotlib

DONE, FAILED, USAGE = 0, 1, 2
PAGE = Path("docs") / "benchmarks.md"

BENCHES: Mapping[str, str] = {
    "pipeline": "benchmarks.pipeline:run",
    "averaging": "benchmarks.averaging:run",
    "join": "benchmarks.join:run",
    "agreement": "benchmarks.agreement:run",
    "codecs": "benchmarks.codecs:run",
    "wan": "benchmarks.wan:run",
}
"""Name to `module:function`; the function takes (quick, folder) and returns a Report."""

WITH_FIGURES: Final = frozenset({"wan"})
"""Those whose section of the page has figures: what draws them must be there before anything is measured."""


def run(name: str, quick: bool, json: bool, write: bool) -> int:
    """Runs one benchmark; the exit code. Standard output gets the table or the one JSON object, and nothing else."""
    if name not in BENCHES:
        close = difflib.get_close_matches(name, BENCHES, n=1)
        _say(f"error: there is no bench {name!r}; " + (f"did you mean {close[0]!r}?" if close else f"known: {known()}"))
        return USAGE
    try:
        page = find_page() if write else None
        if write and name in WITH_FIGURES:
            require_matplotlib()
        with terminable(), tempfile.TemporaryDirectory(prefix="agora-bench-") as folder:
            report = _function(name)(quick, Path(folder))
        _show(report, json)
        if page is not None:
            write_section(page, report, command_line(name, quick), datetime.date.today().isoformat())
            _say(f"renewed the section {name} of {page}")
    except (BenchFailed, ValueError, OSError) as error:
        _say(f"error: {error}")
        return FAILED
    return DONE


def known() -> str:
    """The names of all benchmarks."""
    return ", ".join(BENCHES)


def command_line(name: str, quick: bool) -> str:
    """The command as the page shows it."""
    return f"./scripts/bench {name}{' --quick' if quick else ''} --write"


def find_page() -> Path:
    """docs/benchmarks.md of the checkout that this program runs from. Raises BenchFailed where there is none."""
    root = Path(agora.__file__).resolve().parent.parent
    if not (root / "pyproject.toml").exists():
        raise BenchFailed(
            f"--write renews {PAGE} of a checkout, and {root} is none; run it from a clone of the project"
        )
    return root / PAGE


def _function(name: str) -> Callable[[bool, Path], Report]:
    module, _, function = BENCHES[name].partition(":")
    found: Callable[[bool, Path], Report] = getattr(importlib.import_module(module), function)
    return found


def _show(report: Report, json: bool) -> None:
    if json:
        print(json_text.dumps(report.to_json(), allow_nan=False), flush=True)
    else:
        print_tables(report, sys.stdout)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
