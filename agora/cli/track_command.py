"""`swarm track`: sends a run's metrics to trackers, from a daemon's file or from the status of a peer.

Any reader of the run can do so, and the run goes on when the tracker is gone. What a daemon of this machine has written
while nothing was tracked is sent at the next start, each row once: how far each tracker is, is kept on disk.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agora_protocol.errors import DiskError
from prometheus_client import CollectorRegistry

from agora.cli import console, status_command
from agora.cli.trackers import Tracker, TrackerFailed, open_tracker
from agora.node import daemon_registry, paths, runs
from agora.observe.journal import JournalTail
from agora.observe.metrics import FILE_NAME, STATUS_METRICS, Row, SnapshotCollector, make_row

MAX_WAITING = 10_000  # rows that wait for a tracker that does not answer
POLL_INTERVAL_S = 5.0  # seconds between two looks for new rows
QUESTION_INTERVAL_S = 10.0  # seconds between two questions to a peer, while no daemon of this machine writes rows


def track(run: str, targets: Sequence[str], directory: Path | None, *, once: bool) -> int:
    """Sends rows until Ctrl-C, or with `once` those that are there. Returns the exit code.

    Raises Failure for a wrong target, and what RowSource raises.
    """
    if not targets:
        raise console.Failure("say where to: --to tensorboard:DIR, --to wandb or --to mlflow:URI", console.EXIT_USAGE)
    home = paths.home_at(directory)
    source = RowSource.of(run, home)
    with ExitStack() as closing:
        sendings = []
        for target in targets:
            tracker = open_tracker(target, source.run, source.name)
            closing.callback(tracker.close)
            sendings.append(Sending(target, tracker, home.tracked(source.run)))
        with contextlib.suppress(KeyboardInterrupt):
            while True:
                rows = source.new_rows()
                failed = [sending.target for sending in sendings if not sending.send(rows)]
                if once:
                    return console.EXIT_FAILED if failed else console.EXIT_DONE
                time.sleep(POLL_INTERVAL_S)
    return console.EXIT_DONE


class Sending:
    """Sends rows to one tracker, each once. What it has got is kept in `file`; what it would not take is sent again."""

    def __init__(self, target: str, tracker: Tracker, file: Path) -> None:
        self.target = target
        self._tracker = tracker
        self._file = file
        self._sent_unix = float(_read_sent(file).get(target, 0.0))
        self._waiting: deque[Row] = deque(maxlen=MAX_WAITING)

    def send(self, rows: Iterable[Row]) -> bool:
        """Sends what is newer than all that was sent. Returns whether the tracker took it. Raises DiskError."""
        self._waiting += [row for row in rows if row.unix > self._sent_unix]
        sent = 0
        try:
            while self._waiting:
                self._tracker.send(self._waiting[0])
                self._sent_unix = self._waiting.popleft().unix
                sent += 1
            self._tracker.flush()
        except TrackerFailed as error:
            console.print_to_stderr(f"{self.target}: {error}; {len(self._waiting)} rows are sent again later")
        if sent:
            self._remember()
            console.print_to_stderr(f"{self.target}: {sent} rows")
        return not self._waiting

    def _remember(self) -> None:
        try:
            self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            paths.replace_text(self._file, json.dumps(_read_sent(self._file) | {self.target: self._sent_unix}))
        except OSError as error:
            raise DiskError(f"Cannot write {self._file} ({error.strerror}); free some space.") from error


def _read_sent(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


@dataclass
class RowSource:
    """The rows of one run: those in the files of this machine's daemons, and while none runs, from the status."""

    run: str
    name: str
    text: str  # as the user named the run
    home: paths.Home
    _tails: dict[Path, JournalTail] = field(default_factory=dict)
    _asked_at: float = -QUESTION_INTERVAL_S
    _step: int = -1

    @classmethod
    def of(cls, text: str, home: paths.Home) -> RowSource:
        """Raises InputError for an unknown run, ManifestError for a bad manifest, Failure for one without an id yet."""
        reference = runs.resolve(text, home)
        entries = [entry for entry in daemon_registry.find_running_daemons() if reference.is_of(entry)]
        run = reference.run or (entries[0].run if entries else "")
        if not run:
            raise console.Failure(f"{text} is not signed yet; start `agora-node join {text}` first")
        return cls(run, reference.name or (entries[0].name if entries else "run"), text, home)

    def new_rows(self) -> list[Row]:
        """Returns the rows since the last call, the oldest first."""
        entries = [entry for entry in daemon_registry.find_running_daemons() if entry.run == self.run]
        # One daemon's rows are enough, and two would take turns with two views of the swarm.
        folder = Path(entries[0].root) if entries else self.home.root
        tail = self._tails.setdefault(folder, JournalTail(folder, FILE_NAME))
        rows = [row for fields in tail.read_new() if (row := Row.from_json(fields)) and row.run == self.run]
        if not entries and time.monotonic() - self._asked_at >= QUESTION_INTERVAL_S:
            rows += self._ask()
        return sorted(rows, key=lambda row: row.unix)

    def _ask(self) -> Iterator[Row]:
        self._asked_at = time.monotonic()
        status = status_command.fetch(self.text, self.home)
        if not status["stages"] or not isinstance(status["step"], int) or status["step"] == self._step:
            return
        self._step = status["step"]
        registry = CollectorRegistry()
        registry.register(SnapshotCollector(STATUS_METRICS, lambda: status))
        yield make_row(registry, self.run, self._step, time.time())
