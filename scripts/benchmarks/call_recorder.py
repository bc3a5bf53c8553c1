"""Runs `agora-node` in this process and records which of the project's named functions run, and when.

    python call_recorder.py OUT ROOT... -- join run.toml ...

ROOTs are the folders of `agora` and `agora_protocol`. When the process ends, OUT has one JSON object: `functions`
(file, first line, qualified name) and `calls`, each [nanoseconds of Unix time, function, calling function or -1].
What counts is a function with a name, defined by `def` in one of the folders: no lambda, no comprehension, no class
body, nothing that a decorator of the standard library generated, and nothing that only an import runs.
Imports nothing but the standard library before the recording starts, so that it records any version of the project.
"""

from __future__ import annotations

import atexit
import inspect
import json
import sys
import threading
import time
from array import array
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

NOT_OURS: Final = -1
CALLERS_LOOKED_AT: Final = 12  # frames of the standard library that may lie between two functions of the project


class CallRecorder:
    """A profile function for `sys.setprofile` and `threading.setprofile`."""

    def __init__(self, roots: list[str]) -> None:
        self._roots = tuple(str(Path(root).resolve()) + "/" for root in roots)
        self._numbers: dict[CodeType, int] = {}
        self._functions: list[tuple[str, int, str]] = []
        self._calls = array("q")

    def __call__(self, frame: FrameType, what: str, _: Any) -> None:
        if what != "call":
            return
        number = self._number_of(frame.f_code)
        if number == NOT_OURS:
            return
        caller, is_import = self._caller_of(frame)
        if not is_import:
            self._calls.extend((time.time_ns(), number, caller))

    def write(self, out: Path) -> None:
        """Writes what was recorded. Recording goes on in other threads until the process ends; that is not written."""
        flat = self._calls.tolist()
        calls = [flat[at : at + 3] for at in range(0, len(flat) - len(flat) % 3, 3)]
        out.write_text(json.dumps({"functions": self._functions, "calls": calls}), encoding="utf-8")

    def _number_of(self, code: CodeType) -> int:
        number = self._numbers.get(code)
        if number is None:
            number = self._numbers[code] = self._register(code)
        return number

    def _register(self, code: CodeType) -> int:
        is_function = code.co_flags & inspect.CO_OPTIMIZED and not code.co_name.startswith("<")
        root = next((root for root in self._roots if code.co_filename.startswith(root)), None)
        if root is None or not is_function:
            return NOT_OURS
        path = Path(code.co_filename).relative_to(Path(root).parent)
        self._functions.append((path.as_posix(), code.co_firstlineno, getattr(code, "co_qualname", code.co_name)))
        return len(self._functions) - 1

    def _caller_of(self, frame: FrameType) -> tuple[int, bool]:
        """The nearest function of the project below this one on the stack, and whether an import called it."""
        below = frame.f_back
        for _ in range(CALLERS_LOOKED_AT):
            if below is None:
                break
            code = below.f_code
            if not code.co_flags & inspect.CO_OPTIMIZED and code.co_filename.startswith(self._roots):
                return NOT_OURS, True
            number = self._number_of(code)
            if number != NOT_OURS:
                return number, False
            below = below.f_back
        return NOT_OURS, False


def main() -> None:
    """Starts the recording, then `agora-node` with the arguments after `--`."""
    separator = sys.argv.index("--")
    recorder = CallRecorder(sys.argv[2:separator])
    atexit.register(recorder.write, Path(sys.argv[1]))
    sys.argv = ["agora-node", *sys.argv[separator + 1 :]]
    threading.setprofile(recorder)
    sys.setprofile(recorder)
    from agora.cli.main_node import main as agora_node

    agora_node()


if __name__ == "__main__":
    main()
