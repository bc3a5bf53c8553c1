"""One layer's graph at a time: the same gradients, and the memory of one layer instead of all."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from agora_protocol.ids import Span
from benchmarks.live_bytes import LiveBytes
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from agora.core.span_work import ForwardKey
from agora.model import RunLayer, keep_graph
from agora.train import memory
from agora.train.activation_checkpointing import GraphBudget, GraphMeasure, Kept, checkpoint, measure_saved_bytes
from agora.train.objectives import TokenBatch
from agora.train.span_trainer import SpanTrainer
from agora.train.weight_versions import DecodedWork
from tests.train.support import microbatch_id, small_manifest

LAYERS, WIDTH, ROWS = 8, 16, 512
HIDDEN_BYTES = 4 * ROWS * WIDTH


class Products(TorchDispatchMode):
    """Counts the products of matrices within it."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function.overloadpacket.__name__ in ("mm", "addmm", "bmm", "baddbmm")
        return function(*args, **(kwargs or {}))


class Layers(nn.Module):
    """Layers whose graphs are many times their inputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 8 * WIDTH), nn.GELU(), nn.Dropout(0.5), nn.Linear(8 * WIDTH, WIDTH))
            for _ in range(LAYERS)
        )

    def forward(self, hidden: Tensor, run_layer: RunLayer) -> Tensor:
        for layer in self.layers:
            hidden = run_layer(layer, layer, hidden)
        return hidden


def gradients_and_peak(run_layer: RunLayer) -> tuple[list[Tensor], int]:
    """The gradients by input and parameters, and the most bytes alive beside the parameters."""
    module, hidden = Layers(), torch.ones(ROWS, WIDTH, requires_grad=True)
    with LiveBytes() as live:
        output = module(hidden, run_layer)
        found = torch.autograd.grad([output], [hidden, *module.parameters()], [torch.ones_like(output)])
    return list(found), live.most


def test_repeated_layers_give_the_same_gradients_dropout_included() -> None:
    whole, _ = gradients_and_peak(keep_graph)
    repeated, _ = gradients_and_peak(checkpoint)
    assert all(torch.equal(a, b) for a, b in zip(whole, repeated, strict=True))


def test_the_peak_of_repeated_layers_is_one_graph_and_the_inputs_of_all() -> None:
    _, whole = gradients_and_peak(keep_graph)
    _, repeated = gradients_and_peak(checkpoint)
    layer_bytes = (whole - LAYERS * HIDDEN_BYTES) // LAYERS
    assert layer_bytes > 15 * HIDDEN_BYTES
    assert repeated < 3 * layer_bytes + LAYERS * HIDDEN_BYTES < whole / 2


def test_without_gradients_a_repeated_layer_just_runs() -> None:
    module = Layers().eval()
    with torch.no_grad():
        assert torch.equal(module(torch.ones(ROWS, WIDTH), checkpoint), module(torch.ones(ROWS, WIDTH), keep_graph))


def test_a_measure_counts_every_layer_and_holds_one() -> None:
    module, hidden = Layers(), torch.ones(ROWS, WIDTH)
    weights = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    _, whole = measure_saved_bytes(lambda: module(hidden, keep_graph), weights)
    measure = GraphMeasure(weights)
    with LiveBytes() as live, torch.enable_grad():
        output = module(hidden, measure.run_layer)
    assert len(measure.layer_bytes) == LAYERS and output.requires_grad and output.is_leaf
    assert sum(measure.layer_bytes) == pytest.approx(whole, rel=0.1)
    assert live.most < 2 * whole / LAYERS


@pytest.mark.parametrize(("free", "repeats"), [(1 << 40, False), (0, True)])
@pytest.mark.parametrize("span", ["0", "1"])
def test_auto_repeats_layers_where_a_graph_of_all_does_not_fit(
    monkeypatch: pytest.MonkeyPatch, free: int, repeats: bool, span: str
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda device: free)
    repeated = []

    def record(layer: nn.Module, compute: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        repeated.append(layer)
        return checkpoint(layer, compute, hidden)

    monkeypatch.setattr("agora.train.span_trainer.checkpoint", record)
    manifest = small_manifest(schedule={"activations": "auto"})
    trainer = SpanTrainer(manifest, Span.parse(span), torch.device("cpu"), report=lambda event: None, in_flight=1)
    batch = TokenBatch.from_wire(torch.ones(manifest.tokens_shape(), dtype=torch.int32), has_marks=False)
    if span == "0":
        boundary, _ = trainer.forward(DecodedWork(microbatch_id(0), 0, batch.inputs, batch, "train"))
        trainer.backward(ForwardKey(microbatch_id(0), 0), torch.ones_like(boundary))
    else:
        trainer.run_last_stages(DecodedWork(microbatch_id(0), 1, torch.ones(manifest.boundary_shape()), batch, "train"))
    # A stage has two layers. The backward of a second forward begins with the last one, whose graph was kept.
    assert len(repeated) == ({"0": 1, "1": 2}[span] if repeats else 0)


@pytest.mark.parametrize("span", ["0", "1", "0-1"])
def test_kept_inputs_give_the_bits_of_a_kept_graph_and_cost_one_forward_and_the_inputs(
    monkeypatch: pytest.MonkeyPatch, span: str
) -> None:
    found = {}
    for kept in (Kept.GRAPH, Kept.INPUTS):
        monkeypatch.setattr(GraphBudget, "choose", lambda *given, kept=kept: kept)
        manifest = small_manifest(model={"layers": 9}, stages={"count": 3}, schedule={"activations": "recompute"})
        numbers = Span.parse(span)
        trainer = SpanTrainer(manifest, numbers, torch.device("cpu"), report=lambda event: None, in_flight=1)
        batch = TokenBatch.from_wire(torch.ones(manifest.tokens_shape(), dtype=torch.int32), has_marks=False)
        entry = batch.inputs if numbers.first == 0 else torch.ones(manifest.boundary_shape())
        with Products() as products:
            work = DecodedWork(microbatch_id(0), numbers.first, entry, batch, "train")
            with LiveBytes() as live:
                boundary, _ = trainer.forward(work)
            waiting = live.now - boundary.nbytes
            gradient, _ = trainer.backward(ForwardKey(microbatch_id(0), numbers.first), torch.ones_like(boundary))
        sums = [stage.gradient_sum.flat for stage in trainer.stages.values()]
        found[kept] = ([*sums, *([] if gradient is None else [gradient])], products.count, waiting)
    graph, inputs = found[Kept.GRAPH], found[Kept.INPUTS]
    assert all(torch.equal(a, b) for a, b in zip(graph[0], inputs[0], strict=True))
    assert inputs[1] - graph[1] == pytest.approx(graph[1] / 3, rel=0.2), "one forward, the last layer's included"
    # Of all layers but the first, and the norm of the boundary.
    assert inputs[2] == pytest.approx((len(manifest.layers_in(numbers)) - 1) * boundary.nbytes, abs=64)
    assert graph[2] > 10 * inputs[2]


@pytest.mark.parametrize("layers", [3, 6, 9])
@pytest.mark.parametrize("span", ["0", "1", "0-1"])
def test_a_second_forward_has_the_bits_of_a_kept_graph_and_fewer_products_than_all_layers_repeated(
    layers: int, span: str
) -> None:
    found = {}
    for activations in ("keep", "recompute"):
        manifest = small_manifest(model={"layers": layers}, stages={"count": 3}, schedule={"activations": activations})
        numbers = Span.parse(span)
        trainer = SpanTrainer(manifest, numbers, torch.device("cpu"), report=lambda event: None, in_flight=1)
        batch = TokenBatch.from_wire(torch.ones(manifest.tokens_shape(), dtype=torch.int32), has_marks=False)
        entry = batch.inputs if numbers.first == 0 else torch.ones(manifest.boundary_shape())
        with Products() as products:
            work = DecodedWork(microbatch_id(0), numbers.first, entry, batch, "train")
            boundary, _ = trainer.forward(work)
            gradient, _ = trainer.backward(ForwardKey(microbatch_id(0), numbers.first), torch.ones_like(boundary))
        sums = [stage.gradient_sum.flat for stage in trainer.stages.values()]
        found[activations] = ([*sums, *([] if gradient is None else [gradient])], products.count)
    kept, repeated = found["keep"], found["recompute"]
    assert all(torch.equal(a, b) for a, b in zip(kept[0], repeated[0], strict=True))
    # Of a layer, a forward has a third of the products, the backward the others.
    in_span = len(manifest.layers_in(numbers))
    assert repeated[1] - kept[1] == pytest.approx(kept[1] / 3 * (2 * in_span - 1) / in_span, rel=0.2)


def test_a_repeated_layer_computes_in_the_autocast_of_its_forward() -> None:
    module, hidden = Layers().eval(), torch.ones(ROWS, WIDTH, requires_grad=True)
    found = []
    for run_layer in (keep_graph, checkpoint):
        with torch.autocast("cpu", torch.bfloat16):
            output = module(hidden, run_layer)
        assert output.dtype == torch.bfloat16
        found.append(torch.autograd.grad([output], [hidden, *module.parameters()], [torch.ones_like(output)]))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_autograd_raises_should_weights_change_before_a_layer_is_repeated() -> None:
    module, hidden = Layers(), torch.ones(ROWS, WIDTH, requires_grad=True)
    output = module(hidden, checkpoint)
    with torch.no_grad():
        next(module.parameters()).add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad([output.sum()], [hidden])


def test_a_run_that_repeats_layers_imports_no_compiler() -> None:
    code = (
        "import sys, torch; from agora.train.activation_checkpointing import checkpoint as repeat;"
        "layer = torch.nn.Linear(2, 2); output = repeat(layer, layer, torch.ones(1, 2, requires_grad=True));"
        "torch.autograd.grad([output.sum()], list(layer.parameters())); print('torch._dynamo' in sys.modules)"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60)
    assert done.stdout == "False\n", done.stderr


def test_a_graph_that_was_measured_is_freed() -> None:
    """Sigmoid's node saves its own output, which must not keep the node alive."""
    entry = torch.randn(ROWS, requires_grad=True)
    with LiveBytes() as live:
        result, size = measure_saved_bytes(lambda: torch.sigmoid(entry) * 2.0, set())
        assert size == 4 * ROWS and live.now >= size
        del result
    assert live.now == 0
