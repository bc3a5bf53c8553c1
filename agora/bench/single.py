"""The baseline that needs no network: the same model in one process, in a plain PyTorch loop with all threads.

Knows: the work. Must not know: other contenders. Kept as good as a plain loop gets: gradients set to None, fused AdamW,
no copy, no synchronisation but the loss read once per step.
"""

from __future__ import annotations

import time
from typing import Any

from torch import nn

from agora.bench.task import MICROBATCHES_PER_STEP
from agora.bench.worker import Channel
from agora.bench.workload import Work, loss_sum


def serve(spec: dict[str, Any], channel: Channel) -> None:
    """Answers {"steps": n} with the tokens, the seconds and the mean loss of each of n more optimizer steps."""
    work = Work(spec)
    model = nn.Sequential(*(work.stage(k) for k in range(work.manifest.stage_count)))
    optimizer = work.optimizer(model)
    step = 0
    channel.say({"ready": True, "parameters": sum(p.numel() for p in model.parameters())})
    for order in channel.orders():
        begin, losses = time.perf_counter(), []
        for _ in range(order["steps"]):
            loss = 0.0
            for index in range(step * MICROBATCHES_PER_STEP, (step + 1) * MICROBATCHES_PER_STEP):
                tokens_bs, targets_bs = work.microbatch(index)
                mean = loss_sum(model(tokens_bs), targets_bs) / work.tokens_per_step
                mean.backward()  # type: ignore[no-untyped-call]
                loss += mean.item()
            work.take_step(step, model, optimizer)
            losses.append(loss)
            step += 1
        seconds = time.perf_counter() - begin
        channel.say({"tokens": len(losses) * work.tokens_per_step, "seconds": seconds, "losses": losses})
