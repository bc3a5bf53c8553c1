"""Layers are compiled once for all, while training goes on, and never change what it computes."""

from __future__ import annotations

import gc
import importlib.util
import shutil
import sys
import sysconfig
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from agora_protocol.ids import Span
from agora_protocol.manifest import Manifest
from torch import Tensor
from torch._dynamo.backends.registry import lookup_backend

from agora.core.span_work import ForwardKey
from agora.core.step_instructions import StepInstructions
from agora.model.subspace_stage import Attention
from agora.observe.events import CompileFailed, LayersCompiled
from agora.train.activation_checkpointing import GraphBudget, Kept
from agora.train.compiled_layers import RUNS_BEFORE, LayerCompiler, compiles_on, missing_for_compiling
from agora.train.objectives import TokenBatch
from agora.train.span_trainer import SpanTrainer
from agora.train.weight_versions import DecodedWork
from tests.model.tiny_models import make_model, save
from tests.train.support import Events, batches_for, microbatch_id, small_manifest
from tests.train.test_tuning_oracle import answered_batches, base_of, lora_manifest
from tests.train.trl_loops import answered_samples

CPU = torch.device("cpu")
WAIT_S = 120.0


@pytest.fixture(autouse=True)
def no_earlier_frames() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Backend:
    """Counts the frames. Their operations are those of eager: the same bits. "aot_eager" traces the backward, too."""

    def __init__(self, before: Callable[[], None] = lambda: None, kind: str = "aot_eager") -> None:
        self.frames: list[bool] = []  # of each, whether it has gradients
        self._before = before
        self._kind = kind

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        self._before()
        self.frames.append(torch.is_grad_enabled())
        made: Callable[..., Any] = lookup_backend(self._kind)(graph, inputs)
        return made


class Training:
    """A trainer of a middle span, driven by hand; the same inputs in the same order give the same gradients."""

    def __init__(
        self, manifest: Manifest, span: str, backend: Callable[..., Any] | None, base: Path | None = None
    ) -> None:
        self.events = Events()
        self.compiler = None if backend is None else LayerCompiler(self.events, backend=backend)
        self.trainer = SpanTrainer(
            manifest,
            Span.parse(span),
            CPU,
            report=self.events,
            in_flight=8,
            compiler=self.compiler,
            base_model=base,
        )
        self.manifest = manifest
        for stage in self.trainer.stages.values():
            stage.set_instructions(StepInstructions(1))
        self._random = torch.Generator().manual_seed(3)
        self._number = 0

    def microbatch(self, batch: Tensor, purpose: str = "train") -> Tensor:
        """Its boundary; when training, after the backward and the step that follows."""
        entry = self.trainer.span.first
        tokens = TokenBatch.from_wire(batch, has_marks=self.manifest.has_marks)
        boundary = torch.randn(self.manifest.boundary_shape(), generator=self._random) if entry else tokens.inputs
        self._number += 1
        work = DecodedWork(microbatch_id(self._number), entry, boundary, tokens, purpose)
        output, forward = self.trainer.forward(work)
        if forward is not None:
            gradient = torch.randn(output.shape, generator=self._random)
            self.trainer.backward(ForwardKey(work.microbatch, entry), gradient)
            self.trainer.take_due_steps()
        return output

    def weights(self) -> Tensor:
        return torch.cat([stage.weights.current.flat for stage in self.trainer.stages.values()])

    def compile_all(self, batch: Tensor) -> None:
        """Trains and evaluates until nothing more is compiled."""
        assert self.compiler is not None
        for _ in range(RUNS_BEFORE + 2):
            self.microbatch(batch)
            self.microbatch(batch, "evaluate")
            assert self.compiler.wait(WAIT_S)


def batches(count: int, manifest: Manifest) -> list[Tensor]:
    return [torch.from_numpy(batch) for step in batches_for(manifest, count) for batch in step]


def run_together(ours: Training, theirs: Training, given: list[Tensor]) -> None:
    for batch in given:
        for purpose in ("train", "evaluate"):
            assert torch.equal(ours.microbatch(batch, purpose), theirs.microbatch(batch, purpose))
            if ours.compiler is not None:
                ours.compiler.wait(WAIT_S)
    assert torch.equal(ours.weights(), theirs.weights())


@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_one_frame_with_gradients_and_one_without_serve_all_layers_and_weight_versions(activations: str) -> None:
    sections: dict[str, Any] = {
        "model": {"layers": 8},
        "stages": {"count": 4},
        "schedule": {"activations": activations},
    }
    manifest, backend = small_manifest(**sections), Backend()
    ours, theirs = Training(manifest, "1-2", backend), Training(manifest, "1-2", None)
    run_together(ours, theirs, batches(4, manifest))
    assert sorted(backend.frames) == [False, True]
    assert len(ours.events.of(LayersCompiled)) == 2 and ours.compiler is not None and ours.compiler.state == "compiled"


def test_a_second_version_of_the_weights_and_another_span_compile_nothing_more() -> None:
    manifest = small_manifest(model={"layers": 8}, stages={"count": 4}, schedule={"activations": "keep"})
    backend = Backend(kind="eager")
    first = Training(manifest, "1", backend)
    (batch, *_) = batches(1, manifest)
    first.compile_all(batch)
    for stage in first.trainer.stages.values():
        stage.weights.begin_version()
    first.microbatch(batch)
    moved = Training(manifest, "2", backend)
    moved.compile_all(batch)
    assert sorted(backend.frames) == [False, True]


class LayerCalls:
    """Counts how often Python runs a layer's attention, which compiled code does not."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> LayerCalls:
        sys.setprofile(self._record)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _record(self, frame: FrameType, event: str, _: object) -> None:
        self.count += event == "call" and frame.f_code is Attention.forward.__code__


@pytest.mark.parametrize(("activations", "runs"), [("keep", 4), ("recompute", 11), ("inputs", 8)])
def test_compiled_frames_compute_all_layers_once_they_exist(
    activations: str, runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if activations == "inputs":
        monkeypatch.setattr(GraphBudget, "choose", lambda *given: Kept.INPUTS)
        activations = "recompute"
    manifest = small_manifest(model={"layers": 8}, stages={"count": 2}, schedule={"activations": activations})
    (batch, *_) = batches(1, manifest)
    ours, theirs = Training(manifest, "0", Backend()), Training(manifest, "0", None)
    ours.compile_all(batch)
    with LayerCalls() as compiled:
        ours.microbatch(batch)
        ours.microbatch(batch, "evaluate")
    with LayerCalls() as eager:
        theirs.microbatch(batch)
    # Repeated: four in the forward, four in the second one, and in the backward all but the last once more. With kept
    # inputs the second one computes the last alone.
    assert eager.count == runs and compiled.count == 0


def test_nothing_waits_while_layers_are_compiled() -> None:
    go_on = threading.Event()
    manifest = small_manifest(model={"layers": 8}, stages={"count": 4})
    ours = Training(manifest, "1", Backend(before=lambda: None if go_on.wait(WAIT_S) else None))
    theirs = Training(manifest, "1", None)
    given = batches(4, manifest)
    for batch in given:
        assert torch.equal(ours.microbatch(batch), theirs.microbatch(batch))
    assert ours.compiler is not None and ours.compiler.state == "compiling"
    assert torch.equal(ours.weights(), theirs.weights())
    go_on.set()
    assert ours.compiler.wait(WAIT_S) and ours.compiler.state == "compiled"


def fail() -> None:
    raise RuntimeError("no such kernel")


def test_a_failed_compilation_leaves_training_as_it_was_and_says_so() -> None:
    manifest = small_manifest(model={"layers": 8}, stages={"count": 4})
    ours, theirs = Training(manifest, "1-2", Backend(fail)), Training(manifest, "1-2", None)
    run_together(ours, theirs, batches(4, manifest))
    assert ours.compiler is not None and "no such kernel" in ours.compiler.state
    failed = ours.events.of(CompileFailed)
    assert 1 <= len(failed) <= 2, "each kind of layer is given up at once"
    assert "no such kernel" in failed[0].problem and not ours.events.of(LayersCompiled)


def test_a_frame_that_fails_when_it_runs_is_given_up_and_the_microbatch_is_not_lost() -> None:
    manifest = small_manifest(model={"layers": 8}, stages={"count": 4})
    (batch, *_) = batches(1, manifest)
    is_broken = threading.Event()

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        made = Backend(kind="eager")(graph, inputs)

        def run(*args: Tensor) -> Any:
            return fail() if is_broken.is_set() else made(*args)

        return run

    ours, theirs = Training(manifest, "1", backend), Training(manifest, "1", None)
    for _ in range(RUNS_BEFORE + 4):
        if ours.compiler is not None and ours.compiler.state == "compiled":
            is_broken.set()
        assert torch.equal(ours.microbatch(batch), theirs.microbatch(batch))
        assert ours.compiler is not None and ours.compiler.wait(WAIT_S)
    assert torch.equal(ours.weights(), theirs.weights())
    assert ours.events.of(CompileFailed) and "no such kernel" in ours.compiler.problem


def test_memory_that_was_short_while_compiling_is_no_failure_for_good() -> None:
    failures = iter([True])

    def short_at_first() -> None:
        if next(failures, False):
            raise torch.OutOfMemoryError("out of memory")

    manifest, backend = small_manifest(model={"layers": 8}, stages={"count": 4}), Backend(short_at_first, "eager")
    training = Training(manifest, "1", backend)
    (batch, *_) = batches(1, manifest)
    training.compile_all(batch)
    training.compile_all(batch)
    assert sorted(backend.frames) == [False, True] and not training.events.of(CompileFailed)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_layers_of_other_families_are_compiled_with_packed_rows(name: str, tmp_path: Path) -> None:
    base = save(base_of(name), tmp_path)
    manifest = lora_manifest(base, "sft", stages=1, model={"lora_dropout": 0.0}).with_values(
        stages={"count": 2}, schedule={"activations": "keep"}
    )
    given = [torch.from_numpy(batch) for batch in answered_batches(answered_samples(32))]
    backend = Backend()
    ours, theirs = Training(manifest, "0", backend, base), Training(manifest, "0", None, base)
    run_together(ours, theirs, given)
    assert len(backend.frames) >= 2 and not ours.events.of(CompileFailed)


def test_layers_with_dropout_are_not_compiled(tmp_path: Path) -> None:
    base = save(make_model("llama"), tmp_path)
    manifest = lora_manifest(base, "sft", stages=1, model={"lora_dropout": 0.5}).with_values(stages={"count": 2})
    backend = Backend()
    training = Training(manifest, "0", backend, base)
    for batch in answered_batches(answered_samples(32)):
        training.microbatch(torch.from_numpy(batch))
    assert not backend.frames


def test_nothing_is_compiled_after_close() -> None:
    manifest, backend = small_manifest(model={"layers": 8}, stages={"count": 4}), Backend()
    training = Training(manifest, "1", backend)
    assert training.compiler is not None
    training.compiler.close()
    (batch, *_) = batches(1, manifest)
    training.compile_all(batch)
    assert not backend.frames and training.compiler.state == "none yet"


def test_a_frame_keeps_no_weights_alive() -> None:
    manifest = small_manifest(model={"layers": 8}, stages={"count": 4})
    training = Training(manifest, "1", Backend(kind="eager"))
    (batch, *_) = batches(1, manifest)
    training.compile_all(batch)
    weights = [weakref.ref(stage.weights.current.flat) for stage in training.trainer.stages.values()]
    del training
    gc.collect()
    assert [weight() for weight in weights] == [None]


@pytest.mark.parametrize(
    ("device", "setting", "compiles"), [("cuda:1", "auto", True), ("cuda:1", "never", False), ("cpu", "auto", False)]
)
def test_only_gpus_compile_and_only_if_the_owner_lets_them(device: str, setting: str, compiles: bool) -> None:
    assert compiles_on(torch.device(device), setting) is compiles


@pytest.mark.parametrize(
    ("present", "missing"),
    [({"triton", "gcc"}, ""), ({"gcc"}, "triton"), ({"triton"}, "C compiler"), ({"triton", "clang"}, "")],
)
def test_what_compiling_lacks_is_named(present: set[str], missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in present else None)
    monkeypatch.setattr(shutil, "which", lambda name: name if name in present else None)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(headers)})
    headers = Path(__file__).parent
    assert "python3-dev" in missing_for_compiling() or missing
    monkeypatch.setattr(Path, "exists", lambda path: True)
    assert missing in missing_for_compiling() and bool(missing_for_compiling()) is bool(missing)
