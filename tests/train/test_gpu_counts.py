"""What a job costs a GPU, counted on the CPU: kernels, synchronisations, copies, bytes of the weights. None may grow.

A figure that falls is written down here, so that it does not rise again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import torch
from agora_protocol.manifest_sections import ObjectiveSection
from agora_protocol.tensors import SUPERVISED
from benchmarks.gpu_counts import JobCounter, JobCounts, count_manifest, counts

from agora.train.device import DeviceQueue, Priority
from agora.train.objectives import Head, TokenBatch, objective_of

# By codec and activations: kernels, syncs and copies of the jobs forward, backward and last stage, of one layer each.
# Within a job the host waits for nothing: one kernel puts the values that decide about it beside what it sends, for the
# one copy that is read when all has ended.
MOST = {
    ("int6/int3", "keep"): ((100, 0, 2), (133, 0, 2), (222, 0, 2)),
    ("int6/int3", "recompute"): ((100, 0, 2), (185, 0, 2), (258, 0, 2)),
    ("int5h/int2h", "keep"): ((102, 0, 2), (125, 0, 2), (219, 0, 2)),
    ("bf16", "keep"): ((57, 0, 2), (88, 0, 2), (178, 0, 2)),
    ("top48:int6/int3", "keep"): ((110, 0, 2), (143, 0, 2), (232, 0, 2)),
}
# Of each parameter of a matrix, without the products: its gradient's norm (2), and adding it to the sum (10).
MOST_BYTES_MOVED = {"keep": 12, "recompute": 12}


def counted_job(job: Callable[[], object]) -> JobCounts:
    counter = JobCounter(frozenset({(3, 4)}))

    async def run() -> None:
        queue = DeviceQueue(fault=counter.start_job)
        await queue.run(Priority.FORWARD, job)
        await queue.close()

    asyncio.run(run())
    return counter.job


def test_values_that_the_host_reads_are_syncs() -> None:
    values = torch.ones(3)
    assert counted_job(lambda: [float(values[0]), bool(values[1] > 0), values.tolist()]).syncs == 3
    assert counted_job(lambda: values.exp()).syncs == 0


def test_views_and_allocations_are_no_kernels() -> None:
    values = torch.ones(4, 3)
    assert counted_job(lambda: torch.empty_like(values.view(3, 4).T[0])).kernels == 0
    assert counted_job(lambda: (values + values).mm(values.T)) == JobCounts(kernels=2, products=1)


def test_what_would_cross_between_host_and_device_is_a_copy() -> None:
    values, cpu = torch.ones(3), torch.device("cpu")
    assert (
        counted_job(lambda: (values.to(cpu), values.cpu(), values.to("cpu", torch.int8), values.double())).copies == 3
    )


def test_passes_over_a_matrix_count_what_they_read_and_write() -> None:
    weights, others = torch.ones(3, 4), torch.ones(4, 4)
    assert counted_job(lambda: (weights.bfloat16(), others.bfloat16())).weight_bytes == 12 * (4 + 2)
    assert counted_job(lambda: torch._foreach_add_([weights], [weights.clone()])).weight_bytes == 12 * (4 + 4 + 4)


@pytest.mark.parametrize(("codec", "activations"), MOST)
def test_a_job_costs_no_more_than_it_did(codec: str, activations: str) -> None:
    hop, last = counts(count_manifest(1, codec, activations))
    for job, (kernels, syncs, copies) in zip((*hop.jobs, last), MOST[codec, activations], strict=True):
        assert job.kernels <= kernels and job.syncs <= syncs and job.copies <= copies, job


@pytest.mark.parametrize("kind", ["lm", "sft", "dpo"])
@pytest.mark.parametrize("supervised", [1.0, 0.5])
def test_the_host_waits_for_nothing_that_an_objective_computes(kind: str, supervised: float) -> None:
    logits = torch.randn(4, 6, 10)
    ids = torch.randint(0, 10, (2, 4, 7), dtype=torch.int32)
    ids[1] = SUPERVISED * (torch.rand(4, 7) < supervised)
    objective = objective_of(ObjectiveSection.model_validate({"kind": kind}))
    head = Head(lambda hidden: hidden, torch.nn.ModuleList(), 10)

    def job() -> None:
        batch = TokenBatch.from_wire(ids, has_marks=True)
        objective.loss_weight(batch)
        objective.loss(head, logits, batch, (0.0,) * 4)

    assert counted_job(job).syncs == 0


@pytest.mark.parametrize("activations", MOST_BYTES_MOVED)
def test_the_weights_are_not_read_or_written_more_often_than_they_were(activations: str) -> None:
    hop, _ = counts(count_manifest(1, activations=activations))
    assert hop.total(lambda job: job.weight_bytes) <= MOST_BYTES_MOVED[activations] * hop.parameters


def test_a_second_layer_costs_a_middle_stage_no_more_kernels_than_it_did() -> None:
    one, two = (counts(count_manifest(layers))[0].total(lambda job: job.kernels) for layers in (1, 2))
    # 40 of them are two RMSNorms, of which a GPU makes 4: torch has fused kernels for it there.
    assert two - one <= 120


def test_a_worker_keeps_no_more_bytes_for_a_value_than_it_did() -> None:
    hop, _ = counts(count_manifest(1))
    # Weights, gradient sum, Muon's mean and the moving average in float32; in bf16 weights and predicted weights.
    assert hop.kept_bytes <= 20.05 * hop.trained
