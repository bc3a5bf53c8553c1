"""Layers compiled by torch.compile: one compiled frame for all layers and weight versions of the same shapes.

The frame's function takes a layer with its arguments as a functools.partial, so that the weights are inputs and not
constants. Source: docs.pytorch.org/tutorials/recipes/regional_compilation. The device thread never compiles.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
import threading
import time
from collections.abc import Callable, Hashable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from agora.model import RunLayer
from agora.observe.events import CompileFailed, LayersCompiled, Report
from agora.train.device import drop_frames, is_out_of_memory

INDUCTOR: Final = "inductor"  # torch's own compiler: Triton kernels on GPUs
# How often a layer runs as it is before it is compiled: by then training has begun; a single evaluation compiles
# nothing.
RUNS_BEFORE: Final = 8
MAX_ATTEMPTS: Final = 3  # of compiling one kind of layer: memory may have been short
MAX_FRAMES: Final = 64  # of the process; torch's own limit of 8 is meant for frames that differ by accident


def compiles_on(device: torch.device, setting: str) -> bool:
    """Returns whether layers are compiled on `device`. setting: "never", or "auto" for GPUs only.

    A CPU gains little, and compiling takes the cores that it trains on for a minute.
    """
    return setting == "auto" and device.type == "cuda"


def missing_for_compiling() -> str:
    """Returns what this machine lacks to compile layers for a GPU and what to do, in a sentence; "" if nothing."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is missing; install a build of torch for this GPU, which brings it"
    compilers = filter(None, (os.environ.get("CC"), "cc", "gcc", "clang"))
    if not any(map(shutil.which, compilers)):
        return "there is no C compiler; install gcc or clang"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        return "Python's C headers are missing; install python3-dev"
    return ""


class LayerCompiler:
    """Compiles a span's layers on a background thread. Until that is done, and where it fails, they run as they are.

    Layers with dropout must not be run through it: compiled code draws other random numbers, and compiling sets torch's
    global generator.
    """

    def __init__(
        self, report: Report, *, cache: Path | None = None, backend: str | Callable[..., Any] = INDUCTOR
    ) -> None:
        """report: called on the background thread, too. cache: the folder of compiled code; None: where torch likes."""
        if cache is not None:
            os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache))
        # On the background thread: the processes of torch's pool would outlive a daemon that is killed.
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
        self._report = report
        self._backend = backend
        self._kinds: dict[Hashable, _Kind] = {}
        self._signatures: WeakKeyDictionary[nn.Module, Hashable] = WeakKeyDictionary()
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self.problem = ""  # why a kind of layer stays as it is

    def close(self) -> None:
        """Nothing is compiled any more; what is being compiled now ends by itself."""
        self._is_closed = True

    def wait(self, timeout_s: float) -> bool:
        """Waits while a layer is being compiled; returns False after `timeout_s` seconds."""
        if (thread := self._thread) is not None:
            thread.join(timeout_s)
        return thread is None or not thread.is_alive()

    @property
    def state(self) -> str:
        """In words: "none yet", "compiling", "compiled", or why a layer is not."""
        if self.problem:
            return self.problem
        if self._thread is not None and self._thread.is_alive():
            return "compiling"
        return "compiled" if any(kind.is_compiled for kind in self._kinds.values()) else "none yet"

    def wrap(self, run_layer: RunLayer) -> RunLayer:
        """Returns a RunLayer that computes compiled layers where there are some, and keeps what `run_layer` keeps."""

        def run(layer: nn.Module, compute: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
            return run_layer(layer, partial(self._compute, layer, compute), hidden)

        return run

    def _compute(self, layer: nn.Module, compute: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        if not isinstance(compute, partial):
            return compute(hidden)
        if not torch.is_grad_enabled():
            hidden = hidden.detach()  # the first run of a checkpointed layer: it needs no frame of its own
        kind = self._kinds.setdefault(self._name(layer, compute, hidden), _Kind())
        if kind.is_compiled:
            try:
                output, was_compiled = _if_compiled(compute, hidden)
            except RuntimeError as error:
                if is_out_of_memory(error):
                    raise
                kind.give_up()
                self._fail(error)
                output, was_compiled = compute(hidden), False
            if was_compiled:
                return output
        else:
            output = compute(hidden)
        # Also of a kind that is compiled: its frame may not fit this layer, by a property that the name leaves out.
        kind.runs += 1
        if kind.runs >= RUNS_BEFORE and kind.attempts < MAX_ATTEMPTS:
            self._begin(kind, _Example.of(layer, compute, hidden))
        return output

    def _name(self, layer: nn.Module, compute: partial[Tensor], hidden: Tensor) -> Hashable:
        signature = self._signatures.get(layer)
        if signature is None:
            parameters = tuple((tuple(p.shape), p.dtype, p.requires_grad) for p in layer.parameters())
            self._signatures[layer] = signature = (type(layer), parameters)
        given = (*compute.args, *compute.keywords.values())
        state = (layer.training, torch.is_grad_enabled(), torch.is_autocast_enabled(hidden.device.type))
        return signature, state, hidden.requires_grad, _shape_of((hidden, *given))

    def _begin(self, kind: _Kind, example: _Example) -> None:
        if self._is_closed or (self._thread is not None and self._thread.is_alive()):
            return
        kind.attempts, kind.runs = kind.attempts + 1, 0
        self._thread = threading.Thread(target=self._compile, args=(kind, example), name="compile", daemon=True)
        self._thread.start()

    def _compile(self, kind: _Kind, example: _Example) -> None:
        began = time.monotonic()
        try:
            example.compile(self._backend)
        except Exception as error:  # whatever compiling raises, the layers run as they are
            drop_frames(error)
            if not is_out_of_memory(error) or kind.attempts >= MAX_ATTEMPTS:
                kind.give_up()
                self._fail(error)
            return
        kind.is_compiled = True
        self._report(LayersCompiled(time.monotonic() - began))

    def _fail(self, error: Exception) -> None:
        inner = getattr(error, "inner_exception", error)  # torch.compile's own has many lines around it
        text = f"{type(inner).__name__}: {' '.join(str(inner).split())[:160]}"
        missing = missing_for_compiling() if self._backend == INDUCTOR else ""
        self.problem = f"layers are not compiled ({missing or text})"
        self._report(CompileFailed(self.problem))


@dataclass(slots=True, eq=False)
class _Kind:
    # Layers that one frame could serve.

    runs: int = 0  # as they are, since the last attempt
    attempts: int = 0
    is_compiled: bool = False

    def give_up(self) -> None:
        self.is_compiled, self.attempts = False, MAX_ATTEMPTS


@dataclass(frozen=True, slots=True)
class _Example:
    # One call of a layer, to be compiled on another thread: what frames depend on is what it was on the device thread.

    layer: nn.Module
    compute: partial[Tensor]
    hidden: Tensor
    keeps_graph: bool
    autocast_dtype: torch.dtype | None  # None: autocast is off

    @classmethod
    def of(cls, layer: nn.Module, compute: partial[Tensor], hidden: Tensor) -> _Example:
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        given = hidden.detach().requires_grad_(hidden.requires_grad)
        return cls(layer, compute, given, torch.is_grad_enabled(), dtype)

    def compile(self, backend: str | Callable[..., Any]) -> None:
        import torch._dynamo  # takes 2 s and 60 MB

        torch._dynamo.config.recompile_limit = MAX_FRAMES
        compiled = torch.compile(_compute_layer, backend=backend, fullgraph=True, dynamic=False)
        compute, trained = self._with_copied_weights()
        is_cast = self.autocast_dtype is not None
        cast = torch.autocast(self.hidden.device.type, self.autocast_dtype, enabled=is_cast)
        with torch.set_grad_enabled(self.keeps_graph), cast:
            output, was_compiled = compiled(compute, self.hidden)
        assert was_compiled
        inputs = [*([self.hidden] if self.hidden.requires_grad else []), *trained]
        if self.keeps_graph and inputs:  # the backward is compiled when it first runs
            torch.autograd.grad([output], inputs, [torch.ones_like(output)], allow_unused=True)

    def _with_copied_weights(self) -> tuple[partial[Tensor], list[nn.Parameter]]:
        # A step may change the layer's own weights between this forward and its backward.
        trained = {id(p): nn.Parameter(p.detach().clone()) for p in self.layer.parameters() if p.requires_grad}
        others = [*self.layer.buffers(), *(p for p in self.layer.parameters() if not p.requires_grad)]
        memo: dict[int, Any] = {id(tensor): tensor for tensor in others} | trained
        layer = deepcopy(self.layer, memo)
        function, *arguments = (
            layer if part is self.layer else part for part in (self.compute.func, *self.compute.args)
        )
        return partial(function, *arguments, **self.compute.keywords), list(trained.values())


def _compute_layer(compute: partial[Tensor], hidden: Tensor) -> tuple[Tensor, bool]:
    # The function whose frames are compiled; the flag is False where it runs as it is.
    return compute(hidden), torch.compiler.is_dynamo_compiling()


def _if_compiled(compute: partial[Tensor], hidden: Tensor) -> tuple[Tensor, bool]:
    # Uses an existing frame of any thread, and otherwise runs `compute` as it is: this thread never compiles.
    import torch._dynamo

    output: tuple[Tensor, bool] = torch._dynamo.run(_compute_layer)(compute, hidden)
    return output


def _shape_of(value: object) -> Hashable:
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, dict):
        return tuple((key, _shape_of(part)) for key, part in value.items())
    if isinstance(value, list | tuple):
        return tuple(map(_shape_of, value))
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return type(value).__qualname__
