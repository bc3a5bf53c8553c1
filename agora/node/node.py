"""One daemon in its event loop: started, served until something ends it, left in order; and asked on its socket.

Knows: the order of a life. Must not know: processes and signals (daemon.py), or how any room does its work.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from agora_protocol.errors import AgoraError, LocalError

from agora.node import paths
from agora.node.building import Builder
from agora.node.collecting import COLLECT_SECONDS
from agora.node.control import Answer, Ask, ControlSocket
from agora.node.facts import Facts
from agora.node.parts import Early, Parts, Where
from agora.node.pulse import Heart
from agora.node.service import Notifier
from agora.node.steps import Steps
from agora.observe import events
from agora.observe.report import Reporter
from agora.state.weights import write_weights

LEAVE_SECONDS = 9.0
"""All of leaving, a second less than promised."""
SAY_SECONDS = 1.5
ORIGIN_SECONDS = 5.0
DRAIN_SECONDS = 90.0
EVALUATE_SECONDS = 300.0
EVALUATE_BATCHES = 16
WEIGHTS_SECONDS = 60.0
MAX_EVALUATE_BATCHES = 4096


@dataclass(frozen=True, slots=True)
class Ending:
    """Why the daemon ended: exit code 0 when it was asked to, else 1 and the sentence for standard error."""

    code: int
    reason: str


class Node:
    """`live` from start to end. `stop` is set by whoever wants it to leave."""

    def __init__(self, where: Where, reporter: Reporter, notifier: Notifier) -> None:
        self._where = where
        self._report = reporter.report
        self._notifier = notifier
        self._steps = Steps(reporter.report, notifier)
        self._early = Early()
        self._facts = Facts(where, self._early, reporter.counters, self._steps)
        self._heart = Heart(where, self._early, self._facts, reporter.counters, reporter.report, notifier)
        self._closing = AsyncExitStack()
        self._tasks: dict[str, asyncio.Task[Any]] = {}
        self.stop = asyncio.Event()
        self.reason = "asked to leave"

    async def live(self) -> Ending:
        """The whole life; AgoraErrors of the start come out as they are, after what was built is closed again."""
        control = ControlSocket(paths.socket_of(self._where.home), self._asks())
        await control.start()
        try:
            parts = await self._start()
            ending = await self._serve(parts) if parts is not None else Ending(0, self.reason)
            await self._leave(parts, ending)
        finally:
            await self._close()
            await control.close()
        return ending

    # --- start and serve

    async def _start(self) -> Parts | None:
        """The parts; None when it was asked to leave meanwhile."""
        builder = Builder(self._where, self._report, self._steps, self._closing, self._early, self._spawn)
        building = asyncio.create_task(builder.build(self._facts.status), name="start")
        stopping = asyncio.create_task(self.stop.wait(), name="stop")
        await asyncio.wait((building, stopping), return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not building.done():
            building.cancel()
            await asyncio.wait((building,))
            return None
        return building.result()

    async def _serve(self, parts: Parts) -> Ending:
        """Serves until asked to leave, or until something that must not end has ended."""
        self._facts.parts = parts
        await self._announce(parts)
        spawn = asyncio.create_task
        self._spawn("heart", self._heart.beat(parts))
        if parts.origin is not None:
            self._spawn("origin", parts.origin.run())
        stop, died = spawn(self.stop.wait(), name="stop"), spawn(parts.host.died.wait(), name="p2pd")
        try:
            await asyncio.wait((stop, died, *self._tasks.values()), return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.cancel()
            died.cancel()
        if self.stop.is_set():
            return Ending(0, self.reason)
        if parts.host.died.is_set():
            return Ending(1, "the network process p2pd ended by itself; start the daemon again, and look at its memory")
        return self._failed()

    def _spawn(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        self._tasks[name] = asyncio.create_task(work, name=name)

    async def _announce(self, parts: Parts) -> None:
        with self._steps.step("serve") as note:
            parts.membership.speak_progress(self._facts.progress)
            self._report(
                events.PeerStarted(
                    self._where.peer,
                    parts.signed.run_id,
                    parts.span.first,
                    parts.span.last,
                    self._where.incarnation,
                    os.getpid(),
                    self._early.addresses,
                )
            )
            await parts.membership.say("serving")
            note.text = f"stages {parts.span}"
        self._report(events.StateChanged("serving", f"stages {parts.span}"))
        print(f"invite {self._facts.invite()}", flush=True)

    def _failed(self) -> Ending:
        """A task that should run for ever is done: the error of the first that has one."""
        for name, task in self._tasks.items():
            if task.done():
                error = _first_of(task.exception())
                text = f"{type(error).__name__}: {error}" if error is not None else "it ended"
                self._report(events.TaskFailed(name, text))
                known = isinstance(error, AgoraError)
                return Ending(1, str(error) if known else f"its task {name} failed ({text}); please report this")
        return Ending(1, "a task ended; please report this")

    # --- leave

    async def _leave(self, parts: Parts | None, ending: Ending) -> None:
        """Says so to the others, finishes what is in hand, and hands back what cannot be finished in time."""
        self._notifier.send(STOPPING=1, STATUS=f"leaving: {ending.reason}")
        self._report(events.StateChanged("leaving", ending.reason))
        if parts is None:
            return
        parts.collector.close()
        loop = asyncio.get_running_loop()
        until = loop.time() + LEAVE_SECONDS - 3.0
        if not parts.host.died.is_set():
            try:
                async with asyncio.timeout(ORIGIN_SECONDS):
                    await asyncio.gather(self._say_leaving(parts), self._finish_own(parts))
            except TimeoutError:
                self._report(events.TaskFailed("leave", "what was in hand could not be ended in time"))
            await parts.hop.leave(max(0.1, until - loop.time()))
        parts.replicas.rest()
        await self._keep(parts, max(1.0, until + 1.0 - loop.time()))
        self._heart.tell_traffic(parts)

    async def _keep(self, parts: Parts, within_s: float) -> None:
        """A last checkpoint of what this peer holds; one that takes too long is not begun again."""
        try:
            async with asyncio.timeout(within_s):
                await parts.keeper.write_all()
        except (TimeoutError, AgoraError) as error:
            self._report(events.TaskFailed("checkpoint", str(error) or f"not written in {within_s:.0f} s"))

    async def _say_leaving(self, parts: Parts) -> None:
        try:
            async with asyncio.timeout(SAY_SECONDS):
                await parts.membership.say("leaving")
        except TimeoutError:
            self._report(events.DirectoryTrouble("leave", "the directory did not answer in time"))

    async def _finish_own(self, parts: Parts) -> None:
        if parts.origin is not None:
            await parts.origin.leave(ORIGIN_SECONDS - 1.0)

    async def _close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        try:
            async with asyncio.timeout(3.0):
                await self._closing.aclose()
        except TimeoutError:
            self._report(events.TaskFailed("close", "not everything could be closed within 3 s"))
        self._report(events.StateChanged("left", "the daemon has ended"))

    # --- asked

    def _asks(self) -> Mapping[str, Ask]:
        return {
            "status": Ask(self._ask_status, {}),
            "report": Ask(self._ask_report, {}),
            "invite": Ask(self._ask_invite, {}),
            "addresses": Ask(self._ask_addresses, {}),
            "pause": Ask(self._ask_pause, {}),
            "resume": Ask(self._ask_resume, {}),
            "leave": Ask(self._ask_leave, {}),
            "drain": Ask(self._ask_drain, {}, deadline_s=DRAIN_SECONDS + 5.0),
            "weights": Ask(self._ask_weights, {}, deadline_s=WEIGHTS_SECONDS),
            "collect": Ask(self._ask_collect, {}, deadline_s=COLLECT_SECONDS + 60.0),
            "evaluate": Ask(self._ask_evaluate, {"batches": int}, deadline_s=EVALUATE_SECONDS + 5.0),
        }

    async def _ask_status(self, _: Mapping[str, Any]) -> Answer:
        return self._facts.status()

    async def _ask_report(self, _: Mapping[str, Any]) -> Answer:
        return self._facts.report()

    async def _ask_invite(self, _: Mapping[str, Any]) -> Answer:
        return {"invite": str(self._facts.invite())}

    async def _ask_addresses(self, _: Mapping[str, Any]) -> Answer:
        return {"addresses": list(self._facts.addresses())}

    async def _ask_pause(self, _: Mapping[str, Any]) -> Answer:
        parts = self._serving()
        self._facts.paused = True
        parts.hop.pause()
        if parts.origin is not None:
            parts.origin.pause()
        self._report(events.StateChanged("paused", "by its owner"))
        return {"text": f"paused; {parts.in_hand} microbatches in hand are finished. Go on with `agora-node resume`."}

    async def _ask_resume(self, _: Mapping[str, Any]) -> Answer:
        parts = self._serving()
        self._facts.paused = False
        parts.hop.resume()
        if parts.origin is not None:
            parts.origin.resume()
        self._report(events.StateChanged("serving", "resumed by its owner"))
        return {"text": "resumed."}

    async def _ask_leave(self, _: Mapping[str, Any]) -> Answer:
        self.reason = "asked to leave by its owner"
        self.stop.set()
        return {"text": "leaving: it finishes what it holds and is gone within 10 s."}

    async def _ask_drain(self, _: Mapping[str, Any]) -> Answer:
        """Opens no more microbatches and waits until those in flight are back; others' work is served meanwhile."""
        origin = self._serving().origin
        deadline = asyncio.get_running_loop().time() + DRAIN_SECONDS
        if origin is not None:
            origin.pause()
            while origin.open_microbatches and asyncio.get_running_loop().time() < deadline:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        return {"in_flight": origin.open_microbatches if origin else 0}

    async def _ask_evaluate(self, arguments: Mapping[str, Any]) -> Answer:
        """The held-out loss through the swarm, by this peer as origin."""
        origin = self._serving().origin
        if origin is None:
            raise LocalError("this peer does not hold stage 0, so it has no text; ask one that does")
        batches = arguments.get("batches", EVALUATE_BATCHES)
        if not 1 <= batches <= MAX_EVALUATE_BATCHES:
            raise LocalError(f"batches must be from 1 to {MAX_EVALUATE_BATCHES}")
        began = asyncio.get_running_loop().time()
        found = await origin.evaluate(batches, EVALUATE_SECONDS)
        seconds = asyncio.get_running_loop().time() - began
        return {"loss": found.loss, "tokens": found.tokens, "seconds": round(seconds, 3)}

    async def _ask_weights(self, _: Mapping[str, Any]) -> Answer:
        """Writes the weights of every stage held, as they are now, into the data directory; says where."""
        parts, files = self._serving(), {}
        folder = self._where.home.manifest(parts.signed.run_id).parent / "weights"
        for progress in parts.compute.progress():
            tensors = await parts.compute.weights(progress.stage)
            path = folder / f"stage-{progress.stage}.safetensors"
            named = {"run": parts.signed.run_id, "stage": str(progress.stage), "step": str(progress.step)}
            await asyncio.to_thread(write_weights, path, tensors, named)
            files[str(progress.stage)] = str(path)
        return {"files": files}

    async def _ask_collect(self, _: Mapping[str, Any]) -> Answer:
        """Files with the weights of every stage of the run, fetched from the swarm where they are not held here."""
        found = await self._serving().collector.collect()
        files = {str(file.stage): str(file.path) for file in found}
        return {"files": files, "steps": {str(file.stage): file.step for file in found}}

    def _serving(self) -> Parts:
        if self._facts.parts is None:
            raise LocalError("this daemon is still starting; ask again when it serves")
        return self._facts.parts


def _first_of(error: BaseException | None) -> BaseException | None:
    """The first single error in what may be a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
