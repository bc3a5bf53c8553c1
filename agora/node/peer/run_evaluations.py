"""The signed results of evaluations of the run, for one daemon: signs its own, takes others', publishes them.

They travel in lists in the DHT, and are kept on the disk. What counts is decided by `agora.swarm.evaluations`.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Final

from agora_protocol.directory_shards import DirectoryShard
from agora_protocol.errors import AgoraError, DiskError, ProtocolError
from agora_protocol.evaluations import MAX_METRIC_BYTES, Evaluation, seal_evaluation
from agora_protocol.ids import PeerId, RunId, Span
from agora_protocol.limits import MAX_EVALUATION_VALUES, MAX_NAME_BYTES
from agora_protocol.records import EvaluationList

from agora.node import run_files
from agora.node.daemon_context import DaemonContext
from agora.node.peer.run_admission import RunAdmission
from agora.observe import events
from agora.swarm.directory_reader import RecordStore
from agora.swarm.evaluations import EvaluationBook, choose_published

# Seconds between two reads of the lists in the DHT: results are for people, and a list has up to 18 kB.
LIST_INTERVAL_S: Final = 30.0
LIST_LIFETIME_S: Final = 120.0  # seconds after which a published list expires, unless it is published again
SHARD: Final = DirectoryShard(0)  # under which lists are published


class Evaluations:
    """Signs, takes, keeps and publishes the results of evaluations in a run."""

    def __init__(
        self, context: DaemonContext, run: RunId, admission: RunAdmission, *, unix: Callable[[], float] = time.time
    ) -> None:
        """Reads the results that are on this disk. Raises DiskError."""
        self.book = EvaluationBook(run, lambda peer, proof: admission.book.admits_signer(peer, proof, unix()))
        self._context = context
        self._run = run
        self._admission = admission
        self._unix = unix
        self._is_new = asyncio.Event()
        for sealed in run_files.read_evaluations(context.home, run):
            with contextlib.suppress(ProtocolError):  # one of a peer that is no member any more
                self.book.add(sealed, unix())

    def sign(
        self, task: str, values: Mapping[str, float], *, step: int, items: int, tokens: int, seconds: float
    ) -> None:
        """Reports what this peer has measured of a task, signs it, and has it published.

        What records do not allow is left out: signs other than printable ASCII, values that are not finite, metrics
        after the first MAX_EVALUATION_VALUES. Without a value nothing is signed.
        """
        for metric, value in values.items():
            self._context.report_event(events.TaskEvaluated(task, metric, value, items, tokens, seconds))
        named = {_name(metric, MAX_METRIC_BYTES): float(value) for metric, value in values.items() if _fits(value)}
        if not named:
            return
        evaluation = Evaluation(
            issuer=self._context.me,
            task=_name(task, MAX_NAME_BYTES),
            step=step,
            values=tuple(islice(named.items(), MAX_EVALUATION_VALUES)),
            items=items,
            tokens=tokens,
            seconds=float(seconds),
            issued_unix=int(self._unix()),
            proof=self._admission.proof,
        )
        self.book.add(seal_evaluation(evaluation, self._run, self._context.identity), self._unix())
        self._write()
        self._is_new.set()

    def take(self, sealed: Sequence[bytes]) -> int:
        """Verifies sealed results, keeps and reports those that are new; returns how many these are.

        Leaves out what does not count. That is no offence of whoever passed it on: see protocol/SPEC.md, section 4.
        """
        new = 0
        for data in sealed:
            with contextlib.suppress(ProtocolError):
                if (found := self.book.add(data, self._unix())) is not None:
                    new += 1
                    for metric, value in found.values:
                        taken = events.EvaluationTaken(found.task, metric, value, found.items, found.step, found.issuer)
                        self._context.report_event(taken)
        if new:
            self._write()
        return new

    def forget_refused(self) -> None:
        """As PeerDataHolder: drops the results of peers that are not admitted any more."""
        self.book.forget_refused()

    async def exchange_lists(self, directory: RecordStore) -> None:
        """Every LIST_INTERVAL_S, and when this peer has signed a result, takes the results that others publish, and
        publishes its own and those that too few publish. Until cancelled; ignores failures of the DHT until then.
        """
        while True:
            self._is_new.clear()
            with contextlib.suppress(AgoraError):
                found = await directory.read_many(EvaluationList, [SHARD])
                lists = {each.peer: each.evaluations for each in found.get(SHARD, ()) if type(each) is EvaluationList}
                for peer, sealed in lists.items():
                    if peer != self._context.me:
                        self.take(sealed)
                await self._publish(directory, lists)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._is_new.wait(), LIST_INTERVAL_S)

    async def _publish(self, directory: RecordStore, lists: Mapping[PeerId, Sequence[bytes]]) -> None:
        me = self._context.me
        if chosen := choose_published(self.book.known(), lists, me, self._run):
            record = EvaluationList(me, Span(0, 0), tuple(chosen))
            await directory.publish(record, self._context.identity, LIST_LIFETIME_S, [SHARD])

    def _write(self) -> None:
        home = self._context.home
        try:
            run_files.write_evaluations(home, self._run, [each.sealed for each in self.book.known()])
        except DiskError as error:  # they then hold only until the daemon ends
            self._context.report_event(events.DiskTrouble(str(home.evaluations(self._run)), str(error)))


def _name(text: str, most: int) -> str:
    return re.sub("[^ -~]", "?", text)[:most] or "unnamed"


def _fits(value: float) -> bool:
    return math.isfinite(value) and abs(value) <= 1e30
