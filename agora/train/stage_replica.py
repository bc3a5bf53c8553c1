"""What a stage gives to its replicas on other peers and takes from them: blocks of its weights, and its whole state.

Knows: flat weights and moments, the two rules by which an average is applied. Must not know: peers, rounds, how an
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

from agora.state.layout import Flat, Layout, StageState
from agora.train.optimizer import half_cosine
from agora.train.trained_stage import TrainedStage

SliceRule = Literal["delta", "ema"]
"""How an average is applied: see StageReplica.apply_average."""

Blocks = NDArray[np.int64]
"""Numbers of blocks of SLICE_BLOCK elements of a stage's flat weights, each at most once."""

DRIFT_FIRST, DRIFT_LAST, DRIFT_STEPS = 0.5, 0.01, 1000


def drift_weight(step: int, optimizer: OptimizerSection) -> float:
    """Returns the weight of a new drift in the average of drifts (rule "ema") at optimizer step `step`.

    0.5 for 1000 steps, then half a cosine down to 0.01 at `total_steps`: AsyncMesh's lambda (arXiv 2601.22442).
    """
    progress = (step - DRIFT_STEPS) / max(optimizer.total_steps - DRIFT_STEPS, 1)
    return DRIFT_LAST + (DRIFT_FIRST - DRIFT_LAST) * half_cosine(min(max(progress, 0.0), 1.0))


class StageReplica(TrainedStage):
    """A trained stage that exchanges weights with its replicas. Used on the device thread, between two microbatches.

    Every change spares live graphs, and raises ProtocolError ("bad-tensor") for values that are not allowed.
    """

    _drift: Tensor | None = None
    """Rule "ema": how far this replica usually moves each weight during a round, [blocks, SLICE_BLOCK]; NaN before the
    weight's first round. No part of the stage's state: a restart begins anew."""

    def snapshot_blocks(self, blocks: Blocks) -> tuple[Tensor, int]:
        """Returns a copy of the weights in `blocks`, float32 [blocks * SLICE_BLOCK] on the CPU, and the step."""
        return self._read(self._block_numbers(blocks)).flatten().cpu(), self.step

    def apply_average(self, blocks: Blocks, delta: Tensor, snapshot: Tensor, rule: SliceRule) -> None:
        """Changes the weights in `blocks` by an average. `delta` is average - `snapshot`, both [blocks * SLICE_BLOCK].

        | rule  | new weights, from weights w and snapshot s                                                      |
        |-------|-------------------------------------------------------------------------------------------------|
        | delta | w + (average - s)                                                                               |
        | ema   | average + m, with m the moving average of the drifts w - s (AsyncMesh, arXiv 2601.22442)        |
        """
        numbers = self._block_numbers(blocks)
        change = self._checked(delta, len(numbers))
        weights = self._read(numbers)
        if rule == "delta":
            self._write(numbers, weights + change)
            return
        start = self._checked(snapshot, len(numbers))
        if self._drift is None:
            self._drift = torch.full_like(self.weights.current.flat, torch.nan).view(-1, SLICE_BLOCK)
        drift, usual = weights - start, self._drift[numbers]
        weight = drift_weight(self.step, self.optimizer.section)
        mean = torch.where(usual.isnan(), drift, torch.lerp(usual, drift, weight))
        self._write(numbers, start + change + mean)
        self._drift[numbers] = mean

    def export_state(self) -> StageState:
        """Returns a copy of weights and moments after the last step. The gradient sum is not part of it."""
        weights = self.weights.current.flat.cpu().numpy().copy()
        moments = {name: moment.cpu().numpy().copy() for name, moment in self.optimizer.moments.items()}
        optimizer = self.optimizer
        return StageState(
            self.number,
            self.step,
            optimizer.updates,
            self.tokens_stepped,
            optimizer.layout,
            weights,
            moments,
            self.progress.agreed,
            self.progress.lineage,
        )

    def load_state(self, state: StageState) -> None:
        """Replaces weights, moments and step by those of `state`, drops the gradient sum and forgets the drifts."""
        layout = self.optimizer.layout
        weights = self._checked_array("weights", state.weights, layout)
        moments = {}
        for moment in layout.moments:
            values = self._checked_array(moment.name, state.moments.get(moment.name), layout.of_moment(moment))
            if moment.is_square and bool((values < 0).any()):
                raise ProtocolError("bad-tensor", f"a value of {moment.name} of stage {self.number} is negative")
            moments[moment.name] = values
        self.writable_weights().copy_(weights)
        self.optimizer.load(state.updates, moments)
        self.restart_at(state.step, state.tokens_total, state.agreed, state.lineage)
        self._drift = None

    def _checked_array(self, name: str, array: Flat | None, layout: Layout) -> Tensor:
        """Returns a state's array on the device, its padding zero. Raises ProtocolError unless it fits `layout`."""
        fits = array is not None and array.dtype == np.float32 and array.shape == (layout.numel,)
        if array is None or not fits or not np.isfinite(array).all():
            problem = "are missing, have another size than this run's, or are not finite"
            raise ProtocolError("bad-tensor", f"the {name} of stage {self.number} {problem}")
        values = torch.tensor(array, device=self.sum.flat.device)
        layout.clear_padding(values)
        return values

    def _read(self, blocks: Tensor) -> Tensor:
        """Returns a copy of the current weights in `blocks`, [blocks, SLICE_BLOCK]."""
        return self.weights.current.flat.view(-1, SLICE_BLOCK).index_select(0, blocks)

    def _write(self, blocks: Tensor, values: Tensor) -> None:
        """Replaces the weights in `blocks` by `values` [blocks, SLICE_BLOCK]; ProtocolError when one is not finite."""
        if not bool(values.isfinite().all()):
            raise ProtocolError("bad-tensor", "a slice holds values that are not finite")
        flat = self.writable_weights()
        flat.view(-1, SLICE_BLOCK).index_copy_(0, blocks, values)
        self.weights.layout.clear_padding(flat)

    def _block_numbers(self, blocks: Blocks) -> Tensor:
        """Returns `blocks` as an int64 tensor on the device."""
        return torch.tensor(blocks, dtype=torch.int64, device=self.sum.flat.device)

    def _checked(self, values: Tensor, blocks: int) -> Tensor:
        """Returns `values` as float32 [blocks, SLICE_BLOCK] on the device. Raises ProtocolError for another shape."""
        if values.shape != (blocks * SLICE_BLOCK,) or values.dtype != torch.float32:
            raise ProtocolError("bad-tensor", f"{values.dtype} {tuple(values.shape)} is no slice of {blocks} blocks")
        return values.to(self.sum.flat.device).view(blocks, SLICE_BLOCK)
