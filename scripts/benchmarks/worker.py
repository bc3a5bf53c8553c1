"""The entry point of every child process of a benchmark: `python -m benchmarks.worker ROLE SPEC`."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

ROLES: Mapping[str, str] = {
    "single": "benchmarks.single:serve",
    "gloo": "benchmarks.gloo:serve",
    "moe-stage": "benchmarks.moe:serve_stage",
    "moe-trainer": "benchmarks.moe:serve_trainer",
    "stream-echo": "benchmarks.streams:serve_echo",
    "stream-caller": "benchmarks.streams:serve_caller",
    "averaging-agora": "benchmarks.averaging_ours:serve",
    "averaging-hivemind": "benchmarks.averaging_hivemind:serve",
    "wan-loss": "benchmarks.wan_loss:serve",
    "agreement": "benchmarks.agreement_replicas:serve",
    "learning": "benchmarks.learning_plain:serve",
    "tuning-base": "benchmarks.tuning_base:serve",
    "tuning-peft": "benchmarks.tuning_peft:serve",
    "tuning-losses": "benchmarks.tuning_losses:serve",
}


class Channel:
    """The child's side of the talk. Takes standard output for itself: other prints go to standard error."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
        os.dup2(2, 1)

    def say(self, answer: Mapping[str, object]) -> None:
        """Sends one answer."""
        self._out.write(json.dumps(answer) + "\n")

    def orders(self) -> Iterator[dict[str, Any]]:
        """The parent's orders, until it closes the pipe or ends."""
        for line in sys.stdin:
            yield json.loads(line)


def main(arguments: list[str]) -> int:
    """Runs the role named first with the JSON spec given second."""
    if len(arguments) != 2 or arguments[0] not in ROLES:
        print(f"usage: python -m benchmarks.worker {{{','.join(ROLES)}}} SPEC", file=sys.stderr)
        return 2
    module, _, function = ROLES[arguments[0]].partition(":")
    serve: Callable[[dict[str, Any], Channel], None] = getattr(importlib.import_module(module), function)
    serve(json.loads(arguments[1]), Channel())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
