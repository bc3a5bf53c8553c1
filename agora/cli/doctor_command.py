"""`agora-node doctor`: prints what was measured on this machine, against which limit, and what is to be done."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from agora.cli import console
from agora.core.terminal_text import printable
from agora.node import paths
from agora.node.doctor.checks import Check, State, judge_machine, worst_state
from agora.node.doctor.probes import take_readings

EXIT_CODES: Mapping[State, int] = {
    "pass": console.EXIT_DONE,
    "warn": console.EXIT_DEGRADED,
    "fail": console.EXIT_FAILED,
}
SIGNS: Mapping[State, str] = {"pass": "ok  ", "warn": "warn", "fail": "FAIL"}
COLOURS: Mapping[State, str] = {"pass": "32", "warn": "33", "fail": "31"}


def examine(run: str | None, home: paths.Home, flags: Mapping[str, Any], *, as_json: bool) -> int:
    """Prints all checks and returns the exit code of the worst: DONE, DEGRADED for a warning, FAILED. With a run, its
    peers are called.
    """
    checks = judge_machine(take_readings(home, flags, run))
    state = worst_state(checks)
    if as_json:
        console.print_json({"schema": 1, "ok": state != "fail", "checks": [asdict(check) for check in checks]})
    else:
        print("\n".join(lines_of(checks, in_colour=sys.stdout.isatty())), flush=True)
    return EXIT_CODES[state]


def lines_of(checks: list[Check], *, in_colour: bool = False) -> list[str]:
    """One line a check, below it the remedy if it has one; the last says how many passed, warn and failed."""
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        sign = f"\x1b[{COLOURS[check.state]}m{SIGNS[check.state]}\x1b[0m" if in_colour else SIGNS[check.state]
        limit = f"  (limit: {check.limit})" if check.limit else ""
        value = printable(check.value, keep="")  # others wrote parts of some
        lines.append(f"{sign}  {check.name.ljust(width)}  {value}{limit}")
        if check.remedy:
            lines.append(f"      {' ' * width}  do: {check.remedy}")
    counts = {state: sum(check.state == state for check in checks) for state in SIGNS}
    return [*lines, f"{counts['pass']} passed, {counts['warn']} warn, {counts['fail']} failed"]
