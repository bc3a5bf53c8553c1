"""What the page shows: the run's status while somebody looks, its history, and what has happened.

It looks only while a browser does, and the less often the larger the run is, so that the daemon that is asked spends
less than half a percent of a core on it.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

from agora_protocol.errors import AgoraError
from agora_protocol.ids import PeerId, peer_name

from agora.core.tasks import run_in_thread
from agora.core.terminal_text import one_line, printable
from agora.observe import events, faults
from agora.observe.journal import JournalTail, from_json
from agora.observe.metrics import FILE_NAME, Row

LOOK_INTERVAL_S: Final = 2.0  # seconds between two looks at the status of a small run
# A look takes up to 15 microseconds of a processor for each peer (python -m tests.page.figures): 0.4 % of a core.
LOOK_S_PER_PEER: Final = 0.004
STATUS_INTERVAL_S: Final = 1.0  # a status is not asked for again within this time
INVITE_INTERVAL_S: Final = 300.0  # addresses change: after this time the invite is asked for again
TEXT_INTERVAL_S: Final = 600.0  # seconds between two texts of the model
TEXT_RETRY_INTERVAL_S: Final = 60.0
TAIL_BYTES: Final = 4 * 2**20  # of journal and metrics, so much is read when somebody begins to look
MAX_POINTS: Final = 2000
MAX_HAPPENINGS: Final = 200
MAX_TASKS: Final = 400
MAX_REMEMBERED: Final = 1000  # peers whose stages are known when they go
MAX_PEERS: Final = 100  # a run with more is shown by stage, and its peers so many at a time
MAX_COMPARED: Final = 256  # a run with more peers is read in part: who is missing from one look may be there
MAX_TEXT: Final = 1024  # characters of one text that a peer wrote
MAX_INT: Final = 2**53  # a browser's numbers are exact up to here

Status = Mapping[str, Any]

# What the time line has of a daemon's journal.
SHOWN: Final = (
    events.HealthChanged,
    events.PeerSeen,
    events.PeerGone,
    events.PeerBanned,
    events.AmendmentTaken,
    events.AmendmentDropped,
    events.AmendmentRefused,
    events.AmendmentInForce,
    events.OffenceRecorded,
    events.MoveChosen,
    events.StateChanged,
    events.StageDiverged,
    events.StageFellBehind,
    events.StateFetched,
    events.StepPlanChanged,
    events.StepsSkipped,
    events.StepTorn,
    events.MicrobatchDropped,
    events.EvaluationDone,
    events.TaskEvaluated,
    events.EvaluationTaken,
    events.ResultExported,
    events.OwnerTold,
    events.TaskFailed,
    events.DiskTrouble,
)
READ: Final = frozenset(kind.__name__ for kind in (*SHOWN, events.RoundDone))


@dataclass(frozen=True, slots=True)
class Invitation:
    """How others can join. mode: of the manifest's [admission], "" if unknown. invite: without any ticket."""

    invite: str
    mode: str = ""


class Source(Protocol):
    """Where the page gets what it shows: a daemon itself, or `swarm page`, which asks daemons and peers."""

    look_s: float  # seconds between two looks at least

    async def status(self) -> Status:
        """Returns what `swarm status --json` prints. Raises AgoraError."""

    async def folder(self) -> Path | None:
        """Returns the data directory of the daemon that gave the last status; None if a peer did."""

    async def invitation(self) -> Invitation | None:
        """None while there is no invite. Raises AgoraError."""

    async def text(self) -> str:
        """Returns text that the model writes now. Raises AgoraError, which says why it cannot."""


class Feed:
    """Looks at a Source while anybody follows, see `run`; keeps what has changed for those who come later."""

    def __init__(self, source: Source, pause: Callable[[int, float], float] | None = None) -> None:
        """pause: as pause_s, which is the default."""
        self._source = source
        self._pause = pause or pause_s
        self._subscribers = 0
        self._is_wanted = asyncio.Event()
        self._looked = asyncio.Event()  # replaced at every look
        self._asking = asyncio.Lock()
        self._status: Status | None = None
        self._asked_at = -STATUS_INTERVAL_S
        self._history = History()
        self._next_s = LOOK_INTERVAL_S
        self._join: Mapping[str, str] | None = None
        self._joined_at = 0.0
        self._text: Mapping[str, Any] = {"text": "", "why": "", "step": 0}

    async def run(self) -> None:
        """Looks until cancelled, while anybody follows."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._look_again_and_again())
            group.create_task(self._write_again_and_again())

    async def status(self) -> Status:
        """Returns the source's status, STATUS_INTERVAL_S old at most; if the source raises, one with its reason."""
        async with self._asking:
            if self._status is None or time.monotonic() - self._asked_at >= STATUS_INTERVAL_S:
                try:
                    self._status = await self._source.status()
                except AgoraError as error:
                    self._status = _unreachable(self._status, str(error))
                self._asked_at = time.monotonic()
        return self._status

    async def peers(self, stage: int | None, start: int) -> dict[str, Any]:
        """Returns MAX_PEERS peers of the status from number `start` on, of one stage or of all, and how many it has."""
        held = [peer for peer in (await self.status())["peers"] if stage is None or _holds(peer, stage)]
        return {"total": len(held), "start": start, "peers": shown(held[start : start + MAX_PEERS])}

    async def follow(self) -> AsyncGenerator[str, None]:
        """Yields JSON after each look: the status in short and what is new; the first one has all that is kept."""
        self._subscribers += 1
        self._is_wanted.set()
        seen = 0
        try:
            while True:
                looked = self._looked
                if self._status is not None and self._history.looks:
                    yield json.dumps(self._update(self._status, seen), separators=(",", ":"), allow_nan=False)
                    seen = self._history.looks
                await looked.wait()
        finally:
            self._subscribers -= 1
            if not self._subscribers:
                self._is_wanted.clear()

    @property
    def subscribers(self) -> int:
        return self._subscribers

    def _update(self, status: Status, seen: int) -> dict[str, Any]:
        return {
            "is_first": not seen,
            "next_s": self._next_s,
            "status": shown(in_short(status)),
            "join": self._join,
            "text": self._text,
            **self._history.since(seen),
        }

    async def _look_again_and_again(self) -> None:
        while True:
            await self._is_wanted.wait()
            await faults.inject_fault("page.look")
            status = await self.status()
            try:
                folder = await self._source.folder()
                await run_in_thread(partial(self._history.take, status, folder, time.time()))
            except (AttributeError, LookupError, TypeError, ValueError):  # a peer of the network wrote it
                self._status = status = _unreachable(None, "the peer that was asked sent a malformed status")
            if self._join is None or time.monotonic() - self._joined_at >= INVITE_INTERVAL_S:
                with suppress(AgoraError):  # it is asked for again
                    self._join = how_to_join(await self._source.invitation())
                    self._joined_at = time.monotonic()
            self._next_s = self._pause(len(status["peers"]), self._source.look_s)
            self._looked.set()
            self._looked = asyncio.Event()
            await asyncio.sleep(self._next_s)

    async def _write_again_and_again(self) -> None:
        while True:
            await self._is_wanted.wait()
            step = (await self.status())["step"]
            try:
                self._text = {"text": shown(await self._source.text()), "why": "", "step": step}
                await asyncio.sleep(TEXT_INTERVAL_S)
            except AgoraError as error:
                self._text = {**self._text, "why": shown(str(error))}
                await asyncio.sleep(TEXT_RETRY_INTERVAL_S)


def pause_s(peers: int, least_s: float = LOOK_INTERVAL_S) -> float:
    """Returns the seconds until the next look at a run in whose status there are so many peers."""
    return max(least_s, LOOK_S_PER_PEER * peers)


def in_short(status: Status) -> dict[str, Any]:
    """Returns the status with MAX_PEERS peers at most; `peer_count` has their number, `states` and `paths` counts."""
    peers = status["peers"]
    return {
        **{name: value for name, value in status.items() if name != "peers"},
        "peers": peers[:MAX_PEERS],
        "peer_count": len(peers) + int(status.get("peers_left_out", 0)),
        "states": _counts(peers, "state"),
        "paths": _counts(peers, "path"),
    }


def _counts(peers: Iterable[Mapping[str, Any]], name: str) -> dict[str, int]:
    counts: dict[str, int] = {}
    for peer in peers:
        key = str(peer.get(name))
        counts[key] = counts.get(key, 0) + 1
    return counts


def _holds(peer: Mapping[str, Any], stage: int) -> bool:
    match peer.get("span"):
        case [int(first), int(last)]:
            return first <= stage <= last
    return False


def _unreachable(before: Status | None, why: str) -> Status:
    known: dict[str, Any] = dict(before or {"schema": 1, "run_id": "", "name": "", "step": 0})
    known |= {"loss": None, "tokens_per_second": 0.0, "stages": [], "peers": []}
    return known | {"health": {"state": "UNREACHABLE", "why": why, "do": "start `swarm page` again"}}


def shown(value: Any) -> Any:
    """Returns a value of JSON whose texts are bounded and have no signs that hide or reorder others.

    Numbers that a browser cannot represent become None.
    """
    match value:
        case str():
            return printable(value)[:MAX_TEXT]
        case dict():
            return {shown(str(name)): shown(inner) for name, inner in value.items()}
        case list() | tuple():
            return [shown(inner) for inner in value]
        case bool() | None:
            return value
        case int():
            return value if abs(value) <= MAX_INT else None
    return value


def how_to_join(invitation: Invitation | None) -> dict[str, str] | None:
    """Returns the command that joins the run, and a sentence on who may; None without an invite."""
    if invitation is None:
        return None
    command = f"agora-node join {invitation.invite}"
    match invitation.mode:
        case "open":
            note = "Everyone who has this invite may take part."
        case "ticket":
            command = "agora-node join INVITE"
            note = "Take part with an invite that carries a ticket: its founder makes one with `swarm invite RUN`."
        case "listed":
            note = "Only the machines that the manifest lists may take part; this is the command for them."
        case _:
            note = "If the run asks for a ticket, its founder makes an invite that carries one: `swarm invite RUN`."
    return {"command": command, "note": note, "mode": invitation.mode, "invite": invitation.invite}


# --- history


class Kept:
    """What is kept of one kind, with the look that found it."""

    def __init__(self, most: int, *, thins: bool = False) -> None:
        """most: how much is kept at most. thins: whether of the older half then every other one stays, or none."""
        self._most = most
        self._step = 2 if thins else 0
        self._found: list[tuple[int, list[Any]]] = []

    def add(self, look: int, value: list[Any]) -> None:
        self._found.append((look, value))
        if len(self._found) > self._most:
            half = self._most // 2
            self._found[:half] = self._found[: half : self._step] if self._step else []

    def since(self, look: int) -> list[list[Any]]:
        return [value for found, value in self._found if found > look]


class History:
    """What the page shows over time, `looks` looks so far: points, happenings, results of tasks; the last rounds.

    With a daemon's data directory it comes from the daemon's journal and metrics, otherwise from what the statuses say.
    """

    def __init__(self) -> None:
        self.looks = 0
        # [unix, step, loss, held-out loss, tokens per second]; losses in nats per token, None if unknown
        self._points = Kept(MAX_POINTS, thins=True)
        self._newest_unix = 0.0
        self._happenings = Kept(MAX_HAPPENINGS)  # [unix, name of the event, sentence]
        self._tasks = Kept(MAX_TASKS)  # [unix, task, metric, value]
        self._rounds: dict[tuple[Any, Any], dict[str, Any]] = {}
        self._work: dict[str, float] = {}
        self._tails: tuple[JournalTail, JournalTail] | None = None
        self._before: Status | None = None
        self._peers: Sequence[Mapping[str, Any]] = ()  # of the last status that had any
        self._held: dict[str, str] = {}  # by peer, in words: the stages that it was seen at last

    def since(self, look: int) -> dict[str, Any]:
        """Returns what looks after number `look` have found, for JSON; rounds and work as they are now."""
        return {
            "points": self._points.since(look),
            "happenings": self._happenings.since(look),
            "tasks": self._tasks.since(look),
            "rounds": list(self._rounds.values()),
            "work": self._work,
        }

    def take(self, status: Status, folder: Path | None, unix: float) -> None:
        """Takes in one look. folder: of a daemon of the run on this machine, None without one. unix: now."""
        look = self.looks + 1
        if folder is not None and isinstance(told := status.get("unix"), int | float):
            unix = told  # the swarm's clock, as in the daemon's files
        if folder is not None:
            with suppress(OSError):  # the daemon's files are rotated, or gone with it
                self._read(look, folder, str(status["run_id"]))
        elif self._before is not None:
            for name, sentence in changes(self._before, status, self._peers):
                self._happenings.add(look, [unix, name, sentence])
        if folder is None or look == 1:  # a journal's tail need not reach back to them
            self._take_evaluations(look, status)
        if status["stages"]:
            heldout = self._work.get("heldout_loss_nats")
            self._add_point(
                look, [round(unix, 1), status["step"], status["loss"], heldout, status["tokens_per_second"]]
            )
        self._before = status
        if status["stages"]:  # while no peer answers, nobody is known to have gone
            self._peers = status["peers"]
        self.looks = look

    def _take_evaluations(self, look: int, status: Status) -> None:
        known = {_key_of(each) for each in (self._before or {}).get("evaluations") or []}
        of_journal = {(task, metric, value) for _, task, metric, value in self._tasks.since(look - 1)}
        for each in status.get("evaluations") or []:
            for metric, value in each["values"].items() if _key_of(each) not in known else ():
                if (each["task"], metric, value) not in of_journal:
                    self._tasks.add(look, shown([each["unix"], each["task"], metric, value]))

    def _add_point(self, look: int, point: list[Any]) -> None:
        if point[0] > self._newest_unix:  # a chart's times grow
            self._newest_unix = point[0]
            self._points.add(look, point)

    def _read(self, look: int, folder: Path, run: str) -> None:
        if self._tails is None or self._tails[0].directory != folder:
            self._tails = JournalTail(folder), JournalTail(folder, FILE_NAME)
        journal, metrics = self._tails
        is_first = look == 1  # later points come from the statuses, which are newer
        metrics.skip_to_tail(TAIL_BYTES)
        for fields in metrics.read_new():
            if (row := Row.from_json(fields)) is None or row.run != run:
                continue
            self._work = work_of(row)
            if is_first:
                names = ("run_loss_nats", "heldout_loss_nats", "run_tokens_per_second")
                self._add_point(look, [row.unix, row.step, *(row.metrics.get(name) for name in names)])
        journal.skip_to_tail(TAIL_BYTES)
        for fields in journal.read_new():
            self._take_event(look, fields)

    def _take_event(self, look: int, fields: Mapping[str, Any]) -> None:
        if fields.get("event") not in READ:  # most are of microbatches
            return
        event, unix = from_json(fields), fields.get("at_unix")
        match event:
            case events.RoundDone():
                self._rounds[event.stage, event.what] = dict(fields)
            case events.TaskEvaluated() | events.EvaluationTaken():
                self._tasks.add(look, [unix, event.task, event.metric, event.value])
        if isinstance(event, events.PeerSeen):
            self._held.pop(event.peer, None)
            self._held[event.peer] = _stages_in_words([event.first_stage, event.last_stage])
            if len(self._held) > MAX_REMEMBERED:
                del self._held[next(iter(self._held))]
        if isinstance(event, SHOWN):
            self._happenings.add(look, [unix, type(event).__name__, shown(in_words(event, self._held))])


def _key_of(evaluation: Mapping[str, Any]) -> tuple[str, str, float]:
    return str(evaluation["peer"]), str(evaluation["task"]), float(evaluation["unix"])


def work_of(row: Row) -> dict[str, float]:
    """Returns what a daemon has counted of its own microbatches, and its last held-out loss, as far as it is known."""
    names = ("microbatches_started", "microbatches_completed", "microbatches_dropped", "microbatches_rerouted")
    found = {
        name: sum(value for tag, value in row.metrics.items() if tag.startswith(f"{name}/") and "evaluate" not in tag)
        for name in names
    }
    heldout = row.metrics.get("heldout_loss_nats")
    return found | ({"heldout_loss_nats": heldout} if heldout is not None else {})


def in_words(event: events.Event, held: Mapping[str, str]) -> str:
    """Returns a sentence for the time line. held: by peer, the stages that it was seen at last, in words."""
    match event:
        case events.PeerSeen(peer, first, last, state):
            return f"{peer_name(PeerId(peer))} is {state} at {_stages_in_words([first, last])}"
        case events.PeerGone(peer, reason):
            return f"{peer_name(PeerId(peer))} has gone{_from(held.get(peer, ''))}: {reason}"
        case events.PeerBanned(peer, by):
            return f"{peer_name(PeerId(peer))} is banned {by}"
    return one_line(event.describe())


def changes(before: Status, after: Status, known: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yields in what two statuses differ, as events' names and sentences: health, and peers of a run read whole.

    known: the peers of the last status before that had any.
    """
    health = after["health"]
    if health["state"] != before["health"]["state"]:
        yield "HealthChanged", shown(f"health {health['state']}: {health['why']}")
    if max(len(known), len(after["peers"])) > MAX_COMPARED or not (known and after["stages"]):
        return
    former, present = ({peer["peer"]: peer for peer in peers} for peers in (known, after["peers"]))
    for peer, row in present.items():
        if peer not in former or former[peer]["state"] != row["state"]:
            yield "PeerSeen", shown(f"{row['name']} is {row['state']} at {_stages_in_words(row['span'])}")
    for peer in former.keys() - present.keys():
        gone, where = former[peer], _from(_stages_in_words(former[peer]["span"]))
        yield "PeerGone", shown(f"{gone['name']} has gone{where}: it is not in the status any more")


def _stages_in_words(span: Sequence[int]) -> str:
    held = list(dict.fromkeys(span))
    return f"stage {held[0]}" if len(held) == 1 else "stages " + "-".join(map(str, held))


def _from(stages: str) -> str:
    return f" from {stages}" if stages else ""
