"""The baseline that a datacentre would use: `torch.distributed.pipelining`, 1F1B, over gloo, one process per stage.

Boundaries are float32, as the library sends what the modules return; losses are sums divided by the step's tokens, so
gradients need no scaling by the schedule.
"""

from __future__ import annotations

import datetime
import os
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from benchmarks.task import MICROBATCHES_PER_STEP
from benchmarks.worker import Channel
from benchmarks.workload import Work, loss_sum

TIMEOUT = datetime.timedelta(seconds=120)


def serve(spec: dict[str, Any], channel: Channel) -> None:
    """One rank: answers {"steps": n} like the single loop; losses are known to the last rank only, others answer []."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    work = Work(spec)
    rank, world = int(spec["rank"]), work.manifest.stage_count
    dist.init_process_group(
        "gloo", init_method=f"file://{spec['meeting']}", rank=rank, world_size=world, timeout=TIMEOUT
    )
    module = work.stage(rank)
    optimizer = work.optimizer(module)

    def mean_loss(leaving: Tensor, targets_bs: Tensor) -> Tensor:
        return loss_sum(leaving, targets_bs) / work.tokens_per_step

    stage = PipelineStage(module, rank, world, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROBATCHES_PER_STEP, loss_fn=mean_loss, scale_grads=False)
    step = 0
    channel.say({"ready": True})
    for order in channel.orders():
        losses: list[float] = []
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(order["steps"]):
            losses += _one_step(work, schedule, rank, step)
            work.take_step(step, module, optimizer)
            step += 1
        dist.barrier()
        seconds = time.perf_counter() - begin
        channel.say({"tokens": order["steps"] * work.tokens_per_step, "seconds": seconds, "losses": losses})
    dist.destroy_process_group()


def _one_step(work: Work, schedule: Schedule1F1B, rank: int, step: int) -> list[float]:
    last = work.manifest.stage_count - 1
    tokens, targets = work.step_batch(step) if rank in (0, last) else (None, None)
    if rank == 0:
        schedule.step(tokens, return_outputs=False)
        return []
    if rank < last:
        schedule.step(return_outputs=False)
        return []
    parts: list[Tensor] = []
    schedule.step(target=targets, losses=parts, return_outputs=False)
    return [sum(part.item() for part in parts)]
