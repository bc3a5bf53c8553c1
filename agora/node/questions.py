"""The questions that the control socket answers, each by its name.

Knows: what can be asked of a daemon, and how long an answer may take. Must not know: sockets, how anything is done.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING

from agora_protocol.errors import InputError, LocalError
from agora_protocol.ids import Span

from agora.clock import loop_time
from agora.metrics import named_means
from agora.node import admission_files
from agora.node.control import Answer, Question
from agora.node.node_report import report_json, status_json
from agora.state.collector import COLLECT_S
from agora.state.files import replace_tensors

if TYPE_CHECKING:
    from agora.node.lifecycle import Node
    from agora.node.run_admission import RunAdmission

DRAIN_S = 90.0
"""Seconds that `drain` waits for open microbatches."""
EVALUATE_S = 300.0
EVALUATE_BATCHES = 16
"""Held-out batches of an evaluation, unless the question says how many."""
MAX_EVALUATE_BATCHES = 4096
MOVE_S = 3600.0
"""Seconds that a move may take, including the fetch of the new stages' state."""


def questions_of(node: Node) -> Mapping[str, Question]:
    """Returns all questions that the control socket of `node` answers, by name, with arguments and deadlines."""
    answers = ControlAnswers(node)
    return {
        "status": Question(answers.status, {}),
        "report": Question(answers.report, {}),
        "invite": Question(answers.invite, {}),
        "pause": Question(answers.pause, {}),
        "resume": Question(answers.resume, {}),
        "leave": Question(answers.leave, {}),
        "move": Question(answers.move, {"stages": str}, deadline_s=MOVE_S),
        "ban": Question(answers.ban, {"peer": str}),
        "revoke": Question(answers.revoke, {"revocation": str}),
        "link": Question(answers.link, {"rate": str}),
        "drain": Question(answers.drain, {}, deadline_s=DRAIN_S + 5.0),
        "refill": Question(answers.refill, {}),
        "weights": Question(answers.weights, {"average": bool}, deadline_s=60.0),
        "collect": Question(answers.collect, {"average": bool}, deadline_s=COLLECT_S + 60.0),
        "evaluate": Question(answers.evaluate, {"batches": int}, deadline_s=EVALUATE_S + 5.0),
    }


class ControlAnswers:
    """Answers the control socket's questions about one node, each by a method, which may raise an AgoraError."""

    def __init__(self, node: Node) -> None:
        self._node = node

    async def status(self) -> Answer:
        """Returns the swarm as this daemon sees it: what `swarm status --json` prints."""
        return status_json(self._node.take_node_report())

    async def report(self) -> Answer:
        """Returns what this daemon has counted, and the state of its span."""
        return report_json(self._node.take_node_report())

    async def invite(self) -> Answer:
        """Returns the invite of the run, with addresses of this peer and of some others in it."""
        return {"invite": str(self._node.invite())}

    async def pause(self) -> Answer:
        """Makes the daemon rest until `resume`, and answers at once; within 10 s only its control socket is left."""
        self._node.pause.pause()
        text = "paused: it finishes what it holds, withdraws its claim and closes all connections within 10 s"
        return {"text": f"{text}. It stays so after a restart; go on with `agora-node resume`."}

    async def resume(self) -> Answer:
        """Ends a pause, and answers at once: the daemon joins again unless it is outside its hours."""
        still = self._node.pause.resume()
        return {"text": f"resumed, but it is {still}." if still else "resumed: it joins again."}

    async def leave(self) -> Answer:
        """Makes the daemon leave, and answers at once; it is gone within 10 s."""
        self._node.reason = "asked to leave by its owner"
        self._node.stop.set()
        return {"text": "leaving: it finishes what it holds and is gone within 10 s."}

    async def move(self, stages: str = "") -> Answer:
        """Changes the stages that the daemon holds to `stages` ("A-B"); returns when the new ones are served."""
        wanted, began = Span.parse(stages), loop_time()
        former = self._node.serving_span().span
        await self._node.move(wanted)
        seconds = loop_time() - began
        text = f"moved from stages {former} to stages {wanted} in {seconds:.1f} s; it serves them."
        return {"span": [wanted.first, wanted.last], "seconds": round(seconds, 3), "text": text}

    async def ban(self, peer: str = "") -> Answer:
        """Bans a peer from this machine, in every run, until its line in banned.txt is removed.

        Raises InputError for what is not a peer id, DiskError or LocalError when banned.txt cannot take it.
        """
        banned = admission_files.add_banned(self._node.startup.home, peer)
        self._admission().ban_here(banned)
        return {"text": f"{banned} is neither called nor answered here any more; it stays in banned.txt."}

    async def revoke(self, revocation: str = "") -> Answer:
        """Enforces a sealed revocation, in hex, and sends it to all neighbours; returns {"new": how many were new}.

        Raises InputError for one that does not count.
        """
        try:
            new, refused = self._admission().take([bytes.fromhex(revocation)])
        except ValueError:
            raise InputError("A revocation is hex, as `swarm ban` sends it.") from None
        if refused:
            raise InputError("The revocation does not count; it must be signed by the run's founder or a delegate.")
        return {"new": new}

    def _admission(self) -> RunAdmission:
        """Returns the node's admission. Raises LocalError while the daemon has no network."""
        if self._node.local_peer is None:
            raise LocalError("this daemon is still starting; ask again in a moment")
        return self._node.local_peer.admission

    async def link(self, rate: str = "") -> Answer:
        """Changes the rate of this peer's imitated link, such as "20Mbit"; returns the link as text.

        Raises LocalError without a link, LinkError for a malformed rate.
        """
        local_peer = self._node.local_peer
        link = local_peer.host.link if local_peer is not None else None
        if link is None:
            raise LocalError("this peer imitates no link; start it with --link RATE,RTT")
        link.change_rate(rate)
        return {"link": link.spec.text}

    async def drain(self) -> Answer:
        """Makes this origin open no more microbatches until `refill`; returns how many are open after 90 s at most."""
        origin, deadline = self._node.serving_span().origin, loop_time() + DRAIN_S
        if origin is None:
            return {"in_flight": 0}
        origin.pause()
        while origin.open_count and loop_time() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        return {"in_flight": origin.open_count}

    async def refill(self) -> Answer:
        """Lets this origin, if there is one, open microbatches again after `drain`; returns how many are open now."""
        origin = self._node.serving_span().origin
        if origin is not None:
            origin.resume()
        return {"in_flight": 0 if origin is None else origin.open_count}

    async def evaluate(self, batches: int = EVALUATE_BATCHES) -> Answer:
        """Sends held-out batches from this peer through the swarm; returns their loss.

        Raises LocalError without stage 0.
        """
        origin = self._node.serving_span().origin
        if origin is None:
            raise LocalError("this peer does not hold stage 0, so it has no text; ask one that does")
        if not 1 <= batches <= MAX_EVALUATE_BATCHES:
            raise LocalError(f"batches must be from 1 to {MAX_EVALUATE_BATCHES}")
        began = loop_time()
        evaluation = await origin.evaluate(batches, EVALUATE_S)
        return {
            "loss": evaluation.loss,
            "tokens": evaluation.tokens,
            "seconds": round(loop_time() - began, 3),
            "tuning": named_means(origin.objective, evaluation.metrics, evaluation.tokens),
        }

    async def weights(self, average: bool = False) -> Answer:
        """Writes the weights of every stage held, or their moving averages, as files; returns the files' paths."""
        compute, files = self._node.serving_span().compute, {}
        run = self._node.invite().run
        folder = self._node.startup.home.runs / run / "weights"
        for progress in compute.progress():
            tensors = await compute.copy_weights(progress.stage, average=average)
            stage, path = str(progress.stage), folder / f"stage-{progress.stage}.safetensors"
            about = {"run": run, "stage": stage, "step": str(progress.step)}
            await asyncio.to_thread(replace_tensors, path, tensors, about)
            files[stage] = str(path)
        return {"files": files}

    async def collect(self, average: bool = False) -> Answer:
        """Writes the weights of every stage, or their moving averages, as files; returns the paths, and the steps.

        Fetches the stages not held here. Without averages in the run, it writes the weights.
        """
        collected = await self._node.serving_span().collector.collect(average=average)
        files = {str(file.stage): str(file.path) for file in collected}
        return {"files": files, "steps": {str(file.stage): file.step for file in collected}}
