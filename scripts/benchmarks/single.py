"""The baseline that needs no network: the same model in one process, in a plain PyTorch loop with all threads.

Kept as good as a plain loop gets: gradients set to None, fused AdamW, no copy, no synchronisation but the loss read
once per microbatch.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from torch import nn

from benchmarks.task import MICROBATCHES_PER_STEP
from benchmarks.worker import Channel
from benchmarks.workload import Work, loss_sum


def serve(spec: dict[str, Any], channel: Channel) -> None:
    """{"steps": n} takes n optimizer steps, {"seconds": s} as many microbatches as fill s; steps come every 16th.

    Answers with the tokens, the seconds and the mean loss of each whole step.
    """
    work = Work(spec)
    model = nn.Sequential(*(work.stage(k) for k in range(work.manifest.stage_count)))
    losses = train(work, model)
    channel.say({"ready": True, "parameters": sum(p.numel() for p in model.parameters())})
    for order in channel.orders():
        begin = time.perf_counter()
        taken: list[float] = []
        microbatches = order["steps"] * MICROBATCHES_PER_STEP if "steps" in order else 0
        while len(taken) < microbatches if microbatches else time.perf_counter() - begin < order["seconds"]:
            taken.append(next(losses))
        seconds = time.perf_counter() - begin
        size = MICROBATCHES_PER_STEP
        means = [sum(taken[i : i + size]) / size for i in range(0, len(taken) - size + 1, size)]
        channel.say({"tokens": len(taken) * work.tokens_per_microbatch, "seconds": seconds, "losses": means})


def train(work: Work, model: nn.Module) -> Iterator[float]:
    """Trains without end, and yields the mean loss per token of each microbatch."""
    optimizer = work.optimizer(model)
    step = 0
    while True:
        for index in range(step * MICROBATCHES_PER_STEP, (step + 1) * MICROBATCHES_PER_STEP):
            tokens_bs, targets_bs = work.microbatch(index)
            mean = loss_sum(model(tokens_bs), targets_bs) / work.tokens_per_step
            mean.backward()  # type: ignore[no-untyped-call]
            if (index + 1) % MICROBATCHES_PER_STEP == 0:
                work.take_step(step, model, optimizer)
                step += 1
            yield mean.item() * MICROBATCHES_PER_STEP
