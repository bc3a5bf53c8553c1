"""How a running daemon answers the questions of its control socket."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import asdict, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from agora_protocol.errors import AmendmentError, InputError, LocalError
from agora_protocol.ids import Span

from agora.core.clock import loop_time
from agora.core.metrics import named_means
from agora.core.tasks import run_in_thread
from agora.data.evaluation_tasks import load_task
from agora.node import run_files
from agora.node.control.control_socket import Answer, Question
from agora.node.control.node_report import report_json, status_json
from agora.node.process import evaluation
from agora.state.collector import COLLECTION_TIMEOUT_S
from agora.state.files import replace_tensors

if TYPE_CHECKING:
    from agora.node.peer.local_peer import LocalPeer
    from agora.node.peer.run_admission import Bans
    from agora.node.process.daemon import Daemon
    from agora.pipeline.origin import Origin


DRAIN_TIMEOUT_S = 90.0  # seconds that `drain` waits for open microbatches
EVALUATION_TIMEOUT_S = 300.0  # seconds within which the answers of an evaluation must be back
EVALUATE_BATCHES = 16  # maximum number of held-out batches of an evaluation, unless the question says another
MAX_EVALUATE_BATCHES = 4096
MAX_NAME_LENGTH = 100  # characters of a task's and a metric's name in events
MAX_SCORED = 1024  # items of a task that one answer has the losses of
TASK_TIMEOUT_S = 86_400.0  # seconds that a task may take, which is evaluated slowly beside training
MOVE_TIMEOUT_S = 3600.0  # seconds that a move may take, including the fetch of the new stages' state


class ControlApi:
    """Answers the control socket's questions about one daemon: each method returns its answer, or raises an AgoraError.

    An answer is a dict for JSON; its field "text", if any, is a sentence to print. Methods about the span raise
    LocalError while none is held.
    """

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon

    def questions(self) -> Mapping[str, Question]:
        """Returns all questions by name: the method that answers it, its arguments and deadline."""
        return {
            "status": Question(self.status, {}),
            "report": Question(self.report, {}),
            "invite": Question(self.invite, {}),
            "pause": Question(self.pause, {}),
            "resume": Question(self.resume, {}),
            "leave": Question(self.leave, {}),
            "move": Question(self.move, {"stages": str}, deadline_s=MOVE_TIMEOUT_S),
            "ban": Question(self.ban, {"peer": str}),
            "revoke": Question(self.revoke, {"revocation": str}),
            "amend": Question(self.amend, {"amendment": str}),
            "amendments": Question(self.amendments, {}),
            "copied_key": Question(self.copied_key, {"root": str, "pid": int}),
            "link": Question(self.link, {"rate": str}),
            "drain": Question(self.drain, {}, deadline_s=DRAIN_TIMEOUT_S + 5.0),
            "refill": Question(self.refill, {}),
            "weights": Question(self.weights, {"average": bool}, deadline_s=60.0),
            "collect": Question(self.collect, {"average": bool}, deadline_s=COLLECTION_TIMEOUT_S + 60.0),
            "evaluate": Question(self.evaluate, {"batches": int}, deadline_s=EVALUATION_TIMEOUT_S + 5.0),
            "evaluate_task": Question(
                self.evaluate_task, {"task": str, "items": int, "share": float}, deadline_s=TASK_TIMEOUT_S
            ),
            "report_task": Question(
                self.report_task, {"task": str, "values": dict, "items": int, "seconds": float, "step": int}
            ),
            "score_task": Question(self.score_task, {"task": str, "share": float}, deadline_s=TASK_TIMEOUT_S),
        }

    async def status(self) -> Answer:
        """Returns the swarm as this daemon sees it: what `swarm status --json` prints.

        Three things in it are not told to other machines: the field `result` (the folder of the result once the run has
        ended), the field `machine`, and what uses the machine in the reason of a pause.
        """
        daemon, end = self._daemon, self._daemon.completion
        report = daemon.sample_node_report()
        if reason := daemon.pausing.full_reason:
            report = replace(report, health=replace(report.health, why=f"this peer is {reason}"))
        result = asdict(end.result) if end else None
        machine = daemon.machine.describe(report.traffic) | {"queue": self._describe_queue()}
        return status_json(report) | {"result": result, "machine": machine}

    def _describe_queue(self) -> Answer | None:
        context = self._daemon.context
        if not context.queued and not context.queue_done:
            return None
        done = [{"run": run, "why": why} for run, why in context.queue_done]
        return {"done": done, "next": list(context.queued)}

    async def report(self) -> Answer:
        """Returns what this daemon has counted, and the state of its span; see report_json."""
        return report_json(self._daemon.sample_node_report())

    async def invite(self) -> Answer:
        """Returns {"invite": text of an invite}, with addresses of this peer and of some others of the run.

        Raises LocalError before this peer's run and addresses are known.
        """
        return {"invite": str(self._daemon.invite())}

    async def pause(self) -> Answer:
        """Pauses the daemon until `resume`, even after a restart; answers immediately.

        Within 10 s the daemon has ended its work and closed all connections to peers. The control socket, the metrics
        and the page stay.
        """
        self._daemon.pausing.pause()
        text = "paused: it finishes what it holds, withdraws its claim and closes all connections within 10 s"
        return {"text": f"{text}. It stays so after a restart; go on with `agora-node resume`."}

    async def resume(self) -> Answer:
        """Ends the owner's pause; answers immediately.

        The daemon joins the run again, unless it is outside its hours or its machine is in use.
        """
        reason = self._daemon.pausing.resume()
        return {"text": f"resumed, but it is {reason}." if reason else "resumed: it joins again."}

    async def leave(self) -> Answer:
        """Makes the daemon leave the run and end; answers immediately. The daemon is gone within 10 s."""
        self._daemon.leave("asked to leave by its owner")
        return {"text": "leaving: it finishes what it holds and is gone within 10 s."}

    async def move(self, stages: str = "") -> Answer:
        """Moves the daemon to `stages` ("A-B"); once it serves them, returns them and the seconds that it took.

        Raises InputError for malformed stages and for stages beyond the last, LocalError while the daemon holds no
        stages, moves, leaves or is paused, or if it holds these stages already; the error of the loading if that fails.
        """
        wanted = Span.parse(stages)
        began = loop_time()
        former = self._daemon.serving_span().span
        await self._daemon.move(wanted)
        seconds = loop_time() - began
        text = f"moved from stages {former} to stages {wanted} in {seconds:.1f} s; it serves them."
        return {"span": [wanted.first, wanted.last], "seconds": round(seconds, 3), "text": text}

    async def ban(self, peer: str = "") -> Answer:
        """Bans a peer from this machine, in every run of this data directory, until its line in banned.txt is removed.

        Adds that line, and ends the connection. A paused daemon has no connections: it only adds the line, and reads
        banned.txt when it joins again. Raises InputError for what is not a peer id, DiskError when banned.txt cannot be
        written; LocalError while the daemon starts, and then adds nothing.
        """
        is_closed = self._daemon.local_peer is None and self._daemon.pausing.reason
        bans = None if is_closed else self._require_bans()
        banned = run_files.add_banned(self._daemon.context.home, peer)
        if bans is not None:
            bans.ban_here(banned)
        return {"text": f"{banned} is neither called nor answered here any more; it stays in banned.txt."}

    async def revoke(self, revocation: str = "") -> Answer:
        """Enforces a sealed revocation, in hex, and sends it to all neighbours; returns {"new": 1}, or 0 if known.

        Raises InputError for malformed hex or an invalid revocation, LocalError while the daemon starts or is paused.
        """
        try:
            new, refused = self._require_bans().take_revocations([bytes.fromhex(revocation)])
        except ValueError:
            raise InputError("A revocation is hex, as `swarm ban` sends it.") from None
        if refused:
            raise InputError("The revocation does not count; it must be signed by the run's founder or a delegate.")
        return {"new": new}

    async def amend(self, amendment: str = "") -> Answer:
        """Takes a sealed amendment, in hex, and sends it to all neighbours; returns {"new": 1}, or 0 if known.

        Raises InputError for malformed hex, AmendmentError for one that is malformed, false, or not allowed in this run
        now; LocalError while the daemon starts or is paused.
        """
        amendments = self._require_local_peer().amendments
        try:
            taken = amendments.take([bytes.fromhex(amendment)], begins_here=True)
        except ValueError:
            raise InputError("An amendment is hex, as `swarm amend` sends it.") from None
        if taken.refused:
            raise AmendmentError(taken.why)
        return {"new": taken.new}

    async def amendments(self) -> Answer:
        """Returns {"known": all sealed amendments that are known, in hex, "step": the step that the run has come to}.

        Raises LocalError while the daemon starts or is paused.
        """
        local_peer = self._require_local_peer()
        known = [sealed.hex() for sealed in local_peer.amendments.book.sealed()]
        return {"known": known, "step": local_peer.present_step()}

    def _require_bans(self) -> Bans:
        return self._require_local_peer().bans

    def _require_local_peer(self) -> LocalPeer:
        if self._daemon.local_peer is None:
            raise LocalError(f"This daemon is {self._daemon.describe_state()}; ask again when it serves.")
        return self._daemon.local_peer

    async def copied_key(self, root: str = "", pid: int = 0) -> Answer:
        """Notes that a second daemon of this machine, with a copy of this one's key, was refused; tells the owner."""
        self._daemon.note_copied_key(root, pid)
        return {}

    async def link(self, rate: str = "") -> Answer:
        """Changes the rate of this peer's emulated link, such as "20Mbit"; returns {"link": its new RATE,RTT text}.

        Raises LocalError without a link, also while the daemon starts or is paused; LinkError for a malformed rate.
        """
        local_peer = self._daemon.local_peer
        link = local_peer.host.link if local_peer is not None else None
        if link is None:
            raise LocalError("This peer emulates no link; start it with --link RATE,RTT.")
        link.change_rate(rate)
        return {"link": link.spec.text}

    async def drain(self) -> Answer:
        """Stops this origin from opening microbatches until `refill`; waits up to DRAIN_TIMEOUT_S for the open ones.

        Returns {"in_flight": how many are still open}; 0 without an origin.
        """
        deadline = loop_time() + DRAIN_TIMEOUT_S
        origin = self._daemon.serving_span().origin
        if origin is None:
            return {"in_flight": 0}
        origin.drain()
        while origin.open_count and loop_time() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        return {"in_flight": origin.open_count}

    async def refill(self) -> Answer:
        """Has this origin, if any, open microbatches again after `drain`; returns {"in_flight": how many are open}."""
        origin = self._daemon.serving_span().origin
        if origin is not None:
            origin.refill()
        return {"in_flight": 0 if origin is None else origin.open_count}

    async def evaluate(self, batches: int = EVALUATE_BATCHES) -> Answer:
        """Sends up to `batches` held-out microbatches through the swarm; returns their mean loss per token and metrics.

        Raises LocalError without stage 0 or for a number out of range, Unavailable when the answers are not back within
        EVALUATION_TIMEOUT_S or no text is held out.
        """
        origin = self._daemon.serving_span().origin
        if origin is None:
            raise LocalError("This peer does not hold stage 0, so it has no text; ask one that does.")
        if not 1 <= batches <= MAX_EVALUATE_BATCHES:
            raise LocalError(f"Batches must be from 1 to {MAX_EVALUATE_BATCHES}.")
        began = loop_time()
        done = await origin.evaluate(batches, EVALUATION_TIMEOUT_S)
        return {
            "loss": done.loss,
            "tokens": done.tokens,
            "seconds": round(loop_time() - began, 3),
            "tuning": named_means(origin.objective, done.metrics, done.tokens),
        }

    async def evaluate_task(self, task: str = "", items: int = 0, share: float = 0.02) -> Answer:
        """Evaluates the held-out text, a built-in task, or one in a file, through the swarm.

        See evaluation.evaluate_task.

        items: how many to evaluate at most, 0 for all. share: how many microbatches are evaluated at most for each one
        that this origin trains on meanwhile. Returns the step, and what TaskResult has. Raises LocalError without stage
        0, in a dpo run, or for a number out of range; DataError or DiskError for the file.
        """
        if items < 0:
            raise LocalError("Items must be 0 or more.")
        origin, step = self._require_origin()
        local_peer = self._require_local_peer()
        result = await evaluation.evaluate_task(local_peer, origin, step, task, items, share, files=True)
        return {"step": step, **asdict(result)}

    async def score_task(self, task: str = "", share: float = 0.02) -> Answer:
        """Returns {"losses": as TaskEvaluator.losses_of has them, "step": step} of a task of at most MAX_SCORED items.

        Raises what evaluate_task raises.
        """
        origin, step = self._require_origin()
        evaluator = await evaluation.open_evaluator(self._require_local_peer(), origin, share)
        loaded_task = await run_in_thread(lambda: load_task(task))
        if len(loaded_task.texts) + len(loaded_task.questions) > MAX_SCORED:
            raise LocalError(f"The task has more than {MAX_SCORED} items; ask for a part of it.")
        return {"step": step, "losses": await evaluator.losses_of(loaded_task)}

    async def report_task(
        self,
        task: str = "",
        values: Mapping[str, float] = MappingProxyType({}),
        items: int = 0,
        seconds: float = 0.0,
        step: int = 0,
    ) -> Answer:
        """Signs a result that a program of this machine has made of this origin's losses; see Evaluations.sign.

        values: by metric. Raises LocalError without stage 0, or for values that are not numbers.
        """
        if self._daemon.serving_span().origin is None:
            raise LocalError("This peer does not hold stage 0, so it has measured nothing; tell one that does.")
        if not all(isinstance(value, int | float) for value in values.values()) or min(items, step, seconds) < 0:
            raise LocalError("Values must be numbers by metric; items, step and seconds at least 0.")
        measured = {metric[:MAX_NAME_LENGTH]: float(value) for metric, value in values.items()}
        evaluations = self._require_local_peer().evaluations
        evaluations.sign(task[:MAX_NAME_LENGTH], measured, step=step, items=items, tokens=0, seconds=seconds)
        return {}

    def _require_origin(self) -> tuple[Origin, int]:
        loaded = self._daemon.serving_span()
        if loaded.origin is None:
            raise LocalError("This peer does not hold stage 0, so it has no tokenizer; ask one that does.")
        return loaded.origin, min(loaded.own_steps.values(), default=0)

    async def weights(self, average: bool = False) -> Answer:
        """Writes the weights of every stage held here as safetensors files; returns {"files": path by stage}.

        average: writes the moving averages of the weights instead, or the plain weights in a run that keeps none.
        Replaces files written earlier.
        """
        files: dict[str, str] = {}
        worker = self._daemon.serving_span().worker
        run = self._daemon.invite().run
        folder = self._daemon.context.home.runs / run / "weights"
        for progress in worker.progress():
            tensors = await worker.copy_weights(progress.stage, average=average)
            stage = str(progress.stage)
            path = folder / f"stage-{stage}.safetensors"
            metadata = {"run": run, "stage": stage, "step": str(progress.step)}
            await asyncio.to_thread(replace_tensors, path, tensors, metadata)
            files[stage] = str(path)
        return {"files": files}

    async def collect(self, average: bool = False) -> Answer:
        """Writes the weights of every stage of the run as files; returns {"files": path, "steps": step}, each by stage.

        Fetches the stages not held here from other peers; "uncompared" lists those that only one peer gave. average:
        writes the moving averages of the weights instead, or the plain weights in a run that keeps none. Raises
        LocalError while no span is held, Unavailable if no peer gives a stage.
        """
        collected = await self._daemon.serving_span().collector.collect(average=average)
        files = {str(file.stage): str(file.path) for file in collected}
        return {
            "files": files,
            "steps": {str(file.stage): file.step for file in collected},
            "uncompared": [file.stage for file in collected if not file.is_compared],
        }
