"""What memory a machine offers: a GPU's own, host memory beside it for optimizer state, and limits on both."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from agora_protocol.errors import OutOfMemory
from agora_protocol.ids import Span
from agora_protocol.manifest import preset

from agora.core.machine_limits import OwnersMemory
from agora.cost.manifest_cost import min_memory, run_cost
from agora.node.limits import memory
from agora.node.limits.memory import MemoryBudget, check_memory, keeps_state_in_host, limit_budget, measure_budget
from agora.node.peer.capacity_probe import longest_spans

SMALL = preset("small")
SPAN = Span(0, 1)
BASE = 2**28


def gpu_with(nbytes: float, host: int = 2**36) -> MemoryBudget:
    """A GPU with `nbytes` free, beside plenty of host memory."""
    return MemoryBudget(host, int(nbytes))


def test_without_a_gpu_stages_take_what_the_daemon_leaves_of_the_host() -> None:
    machine = MemoryBudget(10 * BASE).for_stages(BASE)
    assert (machine.memory, machine.host_memory) == (9 * BASE, 0)
    assert MemoryBudget(BASE // 2).for_stages(BASE).memory == 0


def test_with_a_gpu_stages_take_its_memory_and_optimizer_state_the_hosts() -> None:
    machine = gpu_with(3 * BASE, host=10 * BASE).for_stages(BASE)
    assert (machine.memory, machine.host_memory) == (3 * BASE, 9 * BASE)


def test_an_owners_limit_holds_for_each_kind_of_memory() -> None:
    assert limit_budget(MemoryBudget(2**33, 2**34), OwnersMemory(2**30, 2**30)) == MemoryBudget(2**30, 2**30)
    assert limit_budget(MemoryBudget(2**20, 2**34), OwnersMemory(2**30, 2**30)) == MemoryBudget(2**20, 2**30)
    assert limit_budget(MemoryBudget(2**33, None), OwnersMemory()) == MemoryBudget(2**33, None)


def test_a_gpu_is_measured_by_its_own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    free = {"cpu": 2**36, "cuda": 2**33}
    monkeypatch.setattr(memory, "choose_device", lambda name: torch.device(name))
    monkeypatch.setattr(memory, "available_bytes", lambda device, within_limit: free[device.type])
    monkeypatch.setattr(
        memory, "product_dtype", lambda device: torch.bfloat16 if device.type == "cuda" else torch.float32
    )
    assert measure_budget("cuda", OwnersMemory()) == MemoryBudget(2**36, 2**33, in_16_bits=True)
    assert measure_budget("cuda", OwnersMemory(2**32, 2**32)) == MemoryBudget(2**32, 2**32, in_16_bits=True)
    assert measure_budget("cpu", OwnersMemory()) == MemoryBudget(2**36)


def test_a_device_that_is_not_there_counts_as_the_cpu() -> None:
    assert measure_budget("tpu", OwnersMemory()).gpu is None


def test_optimizer_state_goes_to_the_host_only_where_the_gpu_has_no_room_for_it() -> None:
    least, roomy = min_memory(SMALL, SPAN, state_in_host=True), 64 * min_memory(SMALL, SPAN).device
    assert not keeps_state_in_host(SMALL, SPAN, gpu_with(roomy), BASE)
    assert keeps_state_in_host(SMALL, SPAN, gpu_with(least.device), BASE)
    assert not keeps_state_in_host(SMALL, SPAN, gpu_with(least.device, host=0), BASE), "no host memory"
    assert not keeps_state_in_host(SMALL, SPAN, MemoryBudget(2**36), BASE), "no GPU"


def test_a_gpu_that_computes_in_bf16_is_planned_so() -> None:
    least, in_float32 = (min_memory(SMALL, SPAN, in_16_bits=in_16_bits).device for in_16_bits in (True, False))
    assert least < in_float32
    budget = gpu_with(least)
    assert check_memory(SMALL, SPAN, budget, BASE).endswith("in host memory")
    assert check_memory(SMALL, SPAN, replace(budget, in_16_bits=True), BASE).endswith("GPU memory needed")


def test_spans_are_as_long_as_the_gpu_allows_not_the_host() -> None:
    cost = run_cost(SMALL, in_flight=1)
    one = max(cost.memory(Span(stage, stage)).device for stage in range(cost.stage_count))
    on_gpu = longest_spans(cost, gpu_with(one).for_stages(BASE), 0)
    without_host = longest_spans(cost, gpu_with(one, host=0).for_stages(BASE), 0)
    on_cpu = longest_spans(cost, MemoryBudget(2**36).for_stages(BASE), 0)
    assert min(without_host) >= 1 and max(without_host) <= 2 < cost.stage_count
    assert all(more >= less for more, less in zip(on_gpu, without_host, strict=True)) and on_gpu != on_cpu


def test_a_note_says_where_the_state_lies_and_a_refusal_names_both_memories() -> None:
    least, whole = min_memory(SMALL, SPAN, state_in_host=True), min_memory(SMALL, SPAN)
    assert "GPU memory needed" in check_memory(SMALL, SPAN, gpu_with(whole.device), BASE)
    note = check_memory(SMALL, SPAN, gpu_with(least.device), BASE)
    assert note.endswith("GPU memory needed, the optimizer's state in host memory")
    with pytest.raises(OutOfMemory, match=r"of GPU memory and .* of host memory at least, and .* fewer stages"):
        check_memory(SMALL, SPAN, gpu_with(least.device - 2**20), BASE)
    with pytest.raises(OutOfMemory, match="of host memory at least"):
        check_memory(SMALL, SPAN, gpu_with(least.device, host=BASE), BASE)


def test_a_cpu_that_computes_in_bf16_needs_what_the_formula_for_bf16_says() -> None:
    budget = measure_budget("cpu", OwnersMemory(), torch.bfloat16)
    assert budget.in_16_bits and budget.gpu is None and not measure_budget("cpu", OwnersMemory()).in_16_bits
    need = min_memory(SMALL, SPAN, in_16_bits=True).device
    check_memory(SMALL, SPAN, MemoryBudget(int(need) + BASE + 1, in_16_bits=True), BASE)
    with pytest.raises(OutOfMemory):
        check_memory(SMALL, SPAN, MemoryBudget(int(need) + BASE - 1, in_16_bits=True), BASE)
