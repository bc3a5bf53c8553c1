"""The baseline on the same network stack: hivemind's own remote modules, what SWARM and Petals were built on.

Each stage is a `ModuleBackend` behind a hivemind `Server` in its own process; a trainer chains `RemoteExpert` calls
and lets autograd run them backward, with a step's worth of microbatches in flight on threads. By hivemind's design the
trainer carries every boundary itself (star, not chain), a stage runs its forward again inside its backward, and a
backend steps on every call. Here a backend steps once per 16 microbatches, so that the optimizer's work is the same.
The last stage computes the loss, so that only a number per sequence comes back from that stage. Boundaries are 16-bit
floats, as many bytes as the swarm's.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from hivemind.dht import DHT
from hivemind.moe.server.dht_handler import get_experts
from hivemind.moe.server.module_backend import ModuleBackend
from hivemind.moe.server.server import Server
from hivemind.proto.runtime_pb2 import CompressionType
from hivemind.utils.tensor_descr import BatchTensorDescriptor
from torch import Tensor, nn

from benchmarks.children import BenchFailed
from benchmarks.task import MICROBATCHES_PER_STEP
from benchmarks.worker import Channel
from benchmarks.workload import Work, loss_sum

LOOPBACK = ["/ip4/127.0.0.1/tcp/0"]
FIND_S = 60.0
SERVE_S = 10.0  # a server starts within 3 s, or never
HANDLERS = 2


class SteppingBackend(ModuleBackend):  # type: ignore[misc]
    """A backend whose optimizer steps when it has seen a step's sequences, with gradients divided by their tokens."""

    def __init__(self, name: str, work: Work, module: nn.Module, **schemas: Any) -> None:
        super().__init__(name, module, optimizer=work.optimizer(module), max_batch_size=work.sequences, **schemas)
        self._work, self._sequences, self._steps = work, 0, 0

    def on_backward(self, batch_size: int) -> None:
        """Called by hivemind after each backward."""
        self._sequences += batch_size
        if self._sequences < self._work.sequences * MICROBATCHES_PER_STEP:
            return
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        torch._foreach_mul_(gradients, 1.0 / (self._sequences * self._work.context))
        self._work.take_step(self._steps, self.module, self.optimizer)
        self._sequences, self._steps = 0, self._steps + 1


class LossStage(nn.Module):
    """The last stage with its loss: hidden states and targets to [b, 1], which sum to the microbatch's loss sum."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, hidden_bsd: Tensor, targets_bs: Tensor) -> Tensor:
        """[b, s, width] and [b, s] to [b, 1]."""
        sequences = hidden_bsd.shape[0]
        return (loss_sum(self.stage(hidden_bsd), targets_bs) / sequences).reshape(1, 1).expand(sequences, 1)


def serve_stage(spec: dict[str, Any], channel: Channel) -> None:
    """One server process: sends its addresses, then serves until the parent closes the pipe.

    Answers that it is not ready when hivemind's server does not start: that server forks its handlers from a process
    with threads, and now and then a fork inherits a held lock. `start_moe_stage` then starts another process.
    """
    work, stage = Work(spec), int(spec["stage"])
    last = work.manifest.stage_count - 1
    tokens = BatchTensorDescriptor(work.context, dtype=torch.int64)
    hidden = BatchTensorDescriptor(
        work.context, work.manifest.model.boundary_width, requires_grad=True, compression=CompressionType.FLOAT16
    )
    module = LossStage(work.stage(stage)) if stage == last else work.stage(stage)
    backend = SteppingBackend(
        uid(stage),
        work,
        module,
        args_schema=(tokens,) if stage == 0 else (hidden, tokens) if stage == last else (hidden,),
        outputs_schema=BatchTensorDescriptor(1, requires_grad=True) if stage == last else hidden,
    )
    dht = DHT(initial_peers=spec["peers"], start=True, host_maddrs=LOOPBACK)
    server = Server(dht, {backend.name: backend}, num_connection_handlers=HANDLERS, device=torch.device("cpu"))
    try:
        server.run_in_background(await_ready=True, timeout=SERVE_S)
    except TimeoutError:
        channel.say({"ready": False})
        return
    channel.say({"ready": True, "addresses": [str(address) for address in dht.get_visible_maddrs()]})
    for _ in channel.orders():
        channel.say({})
    server.shutdown()


def serve_trainer(spec: dict[str, Any], channel: Channel) -> None:
    """The trainer process: {"seconds": s} measures a steady window, {"steps": n} runs exactly n steps' microbatches."""
    work = Work(spec)
    dht = DHT(initial_peers=spec["peers"], start=True, host_maddrs=LOOPBACK, client_mode=True)
    flow = Flow(work, _find_experts(dht, work.manifest.stage_count))
    channel.say({"ready": True})
    for order in channel.orders():
        channel.say(flow.steps(order["steps"]) if "steps" in order else flow.window(order["seconds"]))
    dht.shutdown()


class Flow:
    """Microbatches in flight: as many threads as a step has microbatches, each taking the next one again and again."""

    def __init__(self, work: Work, experts: list[nn.Module]) -> None:
        self._work, self._experts = work, experts
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._finished: list[tuple[float, int, float]] = []
        self._failures: list[BaseException] = []

    def steps(self, count: int) -> dict[str, Any]:
        """Exactly `count` steps' worth of microbatches, without a flush between; the mean loss of each step's worth."""
        begin = time.perf_counter()
        left = iter(range(count * MICROBATCHES_PER_STEP))
        finished = sorted(self._run(lambda: next(left, None) is not None), key=lambda entry: entry[1])
        losses = [loss / self._work.tokens_per_microbatch for _, _, loss in finished]
        size = MICROBATCHES_PER_STEP
        means = [sum(losses[first : first + size]) / size for first in range(0, len(losses), size)]
        seconds = time.perf_counter() - begin
        return {"tokens": len(losses) * self._work.tokens_per_microbatch, "seconds": seconds, "losses": means}

    def window(self, seconds: float) -> dict[str, Any]:
        """A steady window: fills the pipeline first, counts once it is full, drains uncounted."""
        begin = time.perf_counter()
        settled: list[float] = []

        def more() -> bool:
            if not settled and len(self._finished) >= MICROBATCHES_PER_STEP:
                settled.append(self._finished[MICROBATCHES_PER_STEP - 1][0])
            return time.perf_counter() < (settled[0] if settled else begin) + seconds

        finished = self._run(more)
        first = finished[min(MICROBATCHES_PER_STEP, len(finished)) - 1][0]
        counted = [entry for entry in finished if first < entry[0] <= first + seconds]
        last = max((entry[0] for entry in counted), default=first + seconds)
        tokens = self._work.tokens_per_microbatch
        losses = [entry[2] / tokens for entry in counted]
        trained = len(finished) * tokens
        return {"tokens": len(counted) * tokens, "seconds": last - first, "losses": losses, "trained": trained}

    def _run(self, more: Callable[[], bool]) -> list[tuple[float, int, float]]:
        self._finished, self._failures = [], []
        threads = [threading.Thread(target=self._work_on, args=(more,)) for _ in range(MICROBATCHES_PER_STEP)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._failures or not self._finished:
            raise BenchFailed(f"hivemind's remote modules failed: {self._failures[:1]}")
        return self._finished

    def _work_on(self, more: Callable[[], bool]) -> None:
        while not self._failures:
            with self._lock:
                if not more():
                    return
                number = next(self._numbers)
            try:
                loss = self._one(number)
            except (RuntimeError, OSError, TypeError) as failure:
                self._failures.append(failure)
                return
            with self._lock:
                self._finished.append((time.perf_counter(), number, loss))

    def _one(self, number: int) -> float:
        tokens_bs, targets_bs = self._work.microbatch(number)
        hidden = self._experts[0](tokens_bs)
        for expert in self._experts[1:-1]:
            hidden = expert(hidden)
        loss = self._experts[-1](hidden, targets_bs).sum()
        loss.backward()
        return float(loss.item())


def uid(stage: int) -> str:
    """The name of a stage in hivemind's directory."""
    return f"stage.{stage}"


def _find_experts(dht: Any, count: int) -> list[nn.Module]:
    deadline = time.monotonic() + FIND_S
    while True:
        experts = get_experts(dht, [uid(stage) for stage in range(count)])
        if all(experts):
            for expert in experts:
                getattr(expert, "info")  # noqa: B009 - hivemind makes a stub on first use, and threads would race for it
            return list(experts)
        if time.monotonic() > deadline:
            raise BenchFailed(f"hivemind's directory does not know all {count} stages after {FIND_S:.0f} s")
        time.sleep(0.1)
