"""A trained stage's exchange with its replicas on other peers: differences to the anchor, and its whole state."""

from __future__ import annotations

import zlib

import numpy as np
import torch
from agora_protocol.errors import ProtocolError
from agora_protocol.limits import SLICE_BLOCK
from numpy.typing import NDArray
from torch import Tensor

from agora.core.sync_mode import EXACT
from agora.state.layout import Flat, Layout, StageState
from agora.train.trained_stage import TrainedStage

Blocks = NDArray[np.int64]  # numbers of blocks of SLICE_BLOCK elements of a stage's flat weights, each at most once
# A slice's mean difference to the anchor, float32 [n], and for each of its parts whether the round gave a mean.
AveragedSlice = tuple[Tensor, tuple[bool, ...]]


class StageReplica(TrainedStage):
    """A trained stage whose weights can be averaged with those of its replicas, exported and replaced.

    Used on the device thread, between two microbatches. Weights that live graphs need are copied before a change. Wrong
    shapes and values raise ProtocolError ("bad-tensor").
    """

    def difference_to_anchor(self, blocks: Blocks) -> tuple[Tensor, Tensor] | None:
        """Returns (anchor - weights, weights), both copied from the numbered `blocks` of the stage's flat weights.

        The two tensors are float32 [blocks * SLICE_BLOCK] on the CPU. None while the stage takes exact steps.
        """
        if self.outer is None:
            return None
        rows = self.weights.current.flat.view(-1, SLICE_BLOCK)
        snapshot = rows.index_select(0, self._block_numbers(blocks)).flatten().cpu()
        return self.outer.difference(torch.from_numpy(blocks), snapshot), snapshot

    def step_anchor(
        self,
        step: int,
        blocks: Blocks,
        snapshot: Tensor,
        averaged: AveragedSlice | None,
        wanted_slices: int = EXACT,
    ) -> None:
        """Applies the mean of step `step`'s round over `blocks` to anchor and weights, and records it in the lineage.

        Does nothing if a mean of this or a later step was applied before, and during exact steps. snapshot: the weights
        that the round began with. averaged: the round's result; parts without a mean stay as they are. None if there is
        no other replica: then the snapshot becomes the anchor, and the weights stay. wanted_slices: in how many slices
        all means of the round want to agree later, which the lineage includes. Raises ProtocolError for a mean that
        does not fit or gives weights that are not finite.
        """
        if step <= self.progress.agreed or self.outer is None:
            return
        rows = torch.from_numpy(blocks)
        if averaged is None:
            self.outer.set_anchor(rows, snapshot)
            checksum = zlib.crc32(snapshot.numpy().data)
        else:
            mean, has_mean = averaged
            pass_steps = self._averaging.every * self.plan.slices_at(step - 1)
            change = self.outer.step(rows, snapshot, mean, has_mean, pass_steps).to(self.sum.flat.device)
            numbers = self._block_numbers(blocks)
            flat = self.writable_weights()
            flat.view(-1, SLICE_BLOCK).index_add_(0, numbers, change.view(-1, SLICE_BLOCK))
            self.layout.clear_padding(flat)
            decided = bytes(has_mean) + wanted_slices.to_bytes(2, "big")
            checksum = zlib.crc32(decided, zlib.crc32(mean.contiguous().numpy().data))
            if self.prediction:
                self.prediction.forget()
        self.record_slice(step, checksum, wanted_slices)

    def export_state(self) -> StageState:
        """Returns a copy, on the CPU, of the stage's weights, moments, step, tokens and lineage after the last step.

        The gradient sum and closed shares are not part of this state.
        """
        weights = self.weights.current.flat.cpu().numpy().copy()
        moments = {name: moment.cpu().numpy().copy() for name, moment in self.moments.items()}
        optimizer = self.optimizer
        return StageState(
            self.number,
            self.step,
            optimizer.updates,
            self.tokens_stepped,
            self.layout.at_step(self.step, self.plan),
            weights,
            moments,
            self.progress.agreed,
            self.progress.lineage,
            self.plan,
        )

    def load_state(self, state: StageState) -> None:
        """Replaces weights, moments, step and lineage with those of `state`; drops the gradient sum and closed shares.

        Reports StepsSkipped if that loses tokens. Raises ProtocolError, and changes nothing, for an array that is
        missing, does not fit or is not finite, and for a mean square with a negative value.
        """
        layout = self.layout.at_step(state.step, state.plan)
        weights = self._copy_checked("weights", state.weights, layout)
        moments = {}
        for moment in layout.moments:
            values = self._copy_checked(moment.name, state.moments.get(moment.name), layout.of_moment(moment))
            if moment.is_square and bool((values < 0).any()):
                raise ProtocolError("bad-tensor", f"a value of {moment.name} of stage {self.number} is negative")
            moments[moment.name] = values
        self.writable_weights().copy_(weights)
        self.optimizer.load(state.updates, moments)
        self.outer = None
        if state.plan.is_local(state.step):
            self.outer = self._new_outer()
            for name, values in self.outer.moments.items():
                values.copy_(moments[name])
        self.restart_at(state.step, state.tokens_total, state.agreed, state.lineage, state.plan)

    def _copy_checked(self, name: str, array: Flat | None, layout: Layout) -> Tensor:
        fits = array is not None and array.dtype == np.float32 and array.shape == (layout.numel,)
        if array is None or not fits or not np.isfinite(array).all():
            problem = "are missing, have another size than this run's, or are not finite"
            raise ProtocolError("bad-tensor", f"the {name} of stage {self.number} {problem}")
        values = torch.tensor(array)
        layout.clear_padding(values)
        return values

    def _block_numbers(self, blocks: Blocks) -> Tensor:
        return torch.tensor(blocks, dtype=torch.int64, device=self.sum.flat.device)
