"""Keeps on disk which samples had been trained on at each checkpoint, so that a resumed run continues from there."""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from pathlib import Path
from typing import Any, Final

from agora.observe.events import DiskTrouble, Report
from agora.state.files import sync_folder

# How many steps' states are kept in memory: the checkpoint of such a step may not be written completely yet.
REMEMBERED: Final = 256
KEPT: Final = 4  # how many states the file has: those of the newest checkpoints
MAX_BYTES: Final = 1 << 24  # how many bytes of the file are read; a longer file counts as damaged


class EpochRecord:
    """Remembers the epochs' state at each step of stage 0, and writes the state of each checkpoint to the file `path`.

    A state is the tuple of integers that EpochAssigner.snapshot returns: which samples have been trained on. The file
    is read when this object is made; a missing or malformed one counts as empty. A disk error is reported as
    DiskTrouble: the state stays in memory and goes into the file with the next one. Until then a restart would train
    again on the samples since the last good write.
    """

    def __init__(self, path: Path, report: Report) -> None:
        self._path = path
        self._report = report
        self._remembered: OrderedDict[int, tuple[int, ...]] = OrderedDict()
        self._kept = _read(path)
        self._awaited: int | None = None  # a step that `write` was called for before its state was known

    def remember(self, step: int, state: tuple[int, ...]) -> None:
        """Keeps a step's state in memory until REMEMBERED later states have come.

        If `write` was called for this step before its state was known, and for no other step since, writes the state
        now, which blocks.
        """
        self._remembered[step] = state
        while len(self._remembered) > REMEMBERED:
            self._remembered.popitem(last=False)
        if step == self._awaited:
            self.write(step)

    def write(self, step: int) -> None:
        """Writes the remembered state of `step` to the file, with the states of up to KEPT - 1 earlier steps.

        States of later steps in the file are dropped. If the state of `step` is not remembered yet, it is written as
        soon as `remember` gets it. Call it when a checkpoint of `step` was written. Blocks. A file that cannot be
        written is reported as DiskTrouble, not raised; the states for it stay in memory until the next write.
        """
        state = self._remembered.get(step)
        if state is None:
            self._awaited = step
            return
        self._awaited = None
        # States of later steps come from training that was undone by going back to an older checkpoint.
        earlier = {kept: state for kept, state in self._kept.items() if kept < step}
        self._kept = dict(sorted({**earlier, step: state}.items())[-KEPT:])
        content = json.dumps({"epochs": [[step, list(state)] for step, state in self._kept.items()]})
        temporary = self._path.with_suffix(".new")
        try:
            with temporary.open("w", encoding="ascii") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self._path)
            sync_folder(self._path.parent)
        except OSError as error:
            self._report(DiskTrouble(str(self._path), error.strerror or str(error)))

    def latest_up_to(self, step: int) -> tuple[int, ...] | None:
        """Returns the state kept for the latest step up to and including `step`; None if there is none.

        Kept are the at most KEPT states that were read from the file or given to it by `write`, even if the disk failed
        then. So an older checkpoint may have none. States that are only remembered do not count.
        """
        steps = [kept for kept in self._kept if kept <= step]
        return self._kept[max(steps)] if steps else None


def _read(path: Path) -> dict[int, tuple[int, ...]]:
    try:
        with path.open("rb") as file:
            content: Any = json.loads(file.read(MAX_BYTES))
        entries = [(step, tuple(state)) for step, state in content["epochs"]]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return {}
    if not all(type(number) is int for step, state in entries for number in (step, *state)):
        return {}
    return dict(entries)
