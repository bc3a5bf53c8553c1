"""What a stage here and its replicas elsewhere give each other: slices of weights, and everything at once.

Knows: flat weights and moments, the two rules by which an average is taken in. Must not know: peers, rounds, how an
average comes about, files.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from agora_protocol.errors import ProtocolError
from agora_protocol.limits import SLICE_BLOCK
from agora_protocol.manifest import OptimizerSection
from numpy.typing import NDArray
from torch import Tensor

from agora.state.layout import Flat, StageState
from agora.train.schedule import drift_share
from agora.train.stage import TrainedStage

SliceRule = Literal["delta", "ema"]
"""What becomes of the progress made since the snapshot: it is kept, or replaced by its running average."""

Blocks = NDArray[np.int64]
"""Numbers of blocks of SLICE_BLOCK elements of a stage's flat weights, each at most once."""


class DriftAverage:
    """For each element the running average of how far this replica moves while a round takes place.

    Not part of a stage's state: after a restart an element's first drift is its average, as on the first visit.
    """

    def __init__(self, flat: Tensor) -> None:
        self._mean = torch.zeros_like(flat).view(-1, SLICE_BLOCK)
        self._visited = torch.zeros(len(self._mean), 1, dtype=torch.bool, device=flat.device)

    def preview(self, blocks: Tensor, drift: Tensor, share: float) -> Tensor:
        """The averages of `blocks` with `drift` [blocks, SLICE_BLOCK] taken in by `share`; nothing is changed yet."""
        return torch.where(self._visited[blocks], torch.lerp(self._mean[blocks], drift, share), drift)

    def keep(self, blocks: Tensor, mean: Tensor) -> None:
        """Makes what `preview` gave the averages of `blocks`."""
        self._mean[blocks] = mean
        self._visited[blocks] = True


class StageReplica:
    """One stage as its replicas see it. Everything here runs on the device thread, between two microbatches.

    Whatever changes weights first lets no live graph need them, as a step does, and leaves them finite or untouched.
    """

    def __init__(self, stage: TrainedStage, optimizer: OptimizerSection) -> None:
        self._stage = stage
        self._optimizer = optimizer
        self._drift: DriftAverage | None = None

    def snapshot_blocks(self, blocks: Blocks) -> tuple[Tensor, int]:
        """A copy of the weights in `blocks`, float32 [blocks * SLICE_BLOCK] on the CPU, and the step they are of."""
        rows = self._rows(self._stage.weights.current.flat)
        return rows.index_select(0, self._numbers(blocks)).flatten().cpu(), self._stage.step

    def apply_average(self, blocks: Blocks, delta: Tensor, snapshot: Tensor, rule: SliceRule) -> None:
        """Takes in an average: `delta` is how far it lies from `snapshot`, both float32 [blocks * SLICE_BLOCK].

        With weights w and snapshot s, delta: w + (average - s). ema: average + m, where m is the running average of the
        drifts w - s (AsyncMesh, arXiv 2601.22442). Raises ProtocolError ("bad-tensor").
        """
        numbers = self._numbers(blocks)
        moved = self._checked(delta, len(numbers))
        now = self._rows(self._stage.weights.current.flat).index_select(0, numbers)
        mean = None
        if rule == "delta":
            fresh = now + moved
        else:
            before = self._checked(snapshot, len(numbers))
            self._drift = self._drift or DriftAverage(self._stage.weights.current.flat)
            mean = self._drift.preview(numbers, now - before, drift_share(self._stage.step, self._optimizer))
            fresh = before + moved + mean
        self._write(numbers, fresh)
        if self._drift is not None and mean is not None:
            self._drift.keep(numbers, mean)

    def replace_blocks(self, blocks: Blocks, values: Flat) -> None:
        """Replaces the weights in `blocks` by `values`, float32 [blocks * SLICE_BLOCK]. Raises ProtocolError."""
        numbers = self._numbers(blocks)
        self._write(numbers, self._checked(torch.tensor(values), len(numbers)))

    def step_with_gradient(self, number: int, mean_gradient: Tensor, tokens: int) -> None:
        """Step `number` of the stage, see TrainedStage.step_with_gradient; the given tensor is left as it is."""
        gradient = self._stage.weights.gradient
        if mean_gradient.shape != gradient.shape or mean_gradient.dtype != gradient.dtype:
            raise ProtocolError("bad-tensor", f"{mean_gradient.dtype} {tuple(mean_gradient.shape)} is no gradient here")
        self._stage.step_with_gradient(number, mean_gradient.to(gradient.device, copy=True), tokens)

    def export_state(self) -> StageState:
        """A copy of weights and moments as they are after the last step; the gradient sum is not part of it."""
        stage, optimizer = self._stage, self._stage.optimizer
        weights, mean, square = (
            flat.cpu().numpy().copy() for flat in (stage.weights.current.flat, optimizer.mean, optimizer.square)
        )
        return StageState(
            stage.number, stage.step, optimizer.updates, stage.tokens_stepped, weights=weights, mean=mean, square=square
        )

    def load_state(self, state: StageState) -> None:
        """Goes on from `state`; what was summed here is dropped. Raises ProtocolError ("bad-tensor")."""
        stage = self._stage
        flats = []
        for name, array in (("weights", state.weights), ("mean", state.mean), ("square", state.square)):
            if array.dtype != np.float32 or array.shape != (stage.weights.numel,) or not np.isfinite(array).all():
                raise ProtocolError(
                    "bad-tensor", f"the {name} of stage {stage.number} are not of this run, or no numbers"
                )
            flats.append(torch.tensor(array, device=stage.weights.gradient.device))
        weights, mean, square = flats
        if bool((square < 0).any()):
            raise ProtocolError("bad-tensor", f"a square of stage {stage.number} is negative")
        for flat in flats:
            stage.weights.clear_gaps(flat)
        stage.make_way().copy_(weights)
        stage.optimizer.load(state.updates, mean, square)
        stage.restart(state.step, state.tokens_total)
        self._drift = None

    def _write(self, blocks: Tensor, values: Tensor) -> None:
        """The one place where weights change by another way than a step. values: [blocks, SLICE_BLOCK]."""
        if not bool(values.isfinite().all()):
            raise ProtocolError("bad-tensor", "a slice holds values that are not finite")
        flat = self._stage.make_way()
        self._rows(flat).index_copy_(0, blocks, values)
        self._stage.weights.clear_gaps(flat)

    def _rows(self, flat: Tensor) -> Tensor:
        return flat.view(-1, SLICE_BLOCK)

    def _numbers(self, blocks: Blocks) -> Tensor:
        return torch.tensor(blocks, dtype=torch.int64, device=self._stage.weights.gradient.device)

    def _checked(self, values: Tensor, blocks: int) -> Tensor:
        """`values` as float32 [blocks, SLICE_BLOCK] on the device."""
        if values.shape != (blocks * SLICE_BLOCK,) or values.dtype != torch.float32:
            raise ProtocolError("bad-tensor", f"{values.dtype} {tuple(values.shape)} is no slice of {blocks} blocks")
        return values.to(self._stage.weights.gradient.device).view(blocks, SLICE_BLOCK)
