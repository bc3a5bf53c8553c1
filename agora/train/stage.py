"""One stage of a span: its weights, gradient sum and closed shares, its steps, and the history of applied means."""

from __future__ import annotations

import math
import struct
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from agora_protocol.errors import LocalError, ProtocolError
from agora_protocol.limits import SLICE_BLOCK
from agora_protocol.manifest import Manifest
from agora_protocol.records import StageAccount
from numpy.typing import NDArray
from torch import Tensor

from agora.codec.transfer import CPU
from agora.core.live_manifest import LiveManifest
from agora.core.step_instructions import ShareClosed, StageStepped, StepEvent, StepInstructions
from agora.core.step_schedule import ALL_REDUCE, SyncChangeRule, SyncSchedule, first_sync_schedule
from agora.model import StageModule, family_of
from agora.observe.events import (
    AmendmentInForce,
    GradientLate,
    GradientRefused,
    Report,
    StepsSkipped,
    StepTaken,
    StepTorn,
)
from agora.state.layout import OUTER_PARAMETERS, Flat, Layout, StageState, lay_out
from agora.train.diloco import OuterOptimizer
from agora.train.gradients import ClosedShare, GradientShare, GradientSum, SumTotals
from agora.train.history_hash import INITIAL_HASH, extend_history, hash_of
from agora.train.optimizer import StageOptimizer, StepResult, with_moments
from agora.train.optimizer_offload import OptimizerOffload
from agora.train.token_accounts import STALENESS_BINS, TokenAccounts
from agora.train.weight_prediction import WeightPrediction
from agora.train.weight_versions import StageWeights, StashedForwards, WeightVersion

# Maximum number of closed shares that wait for means, each a gradient in memory; beyond that the open share grows.
MAX_CLOSED_SHARES = 2
Blocks = NDArray[np.int64]  # numbers of blocks of SLICE_BLOCK elements of a stage's flat weights, each at most once
# A fragment's mean outer gradient, float32 [n], and for each of its shards whether the round gave a mean.
AveragedFragment = tuple[Tensor, tuple[bool, ...]]


@dataclass(frozen=True, slots=True)
class StageProgress:
    """How far a stage is, as one snapshot."""

    stage: int
    step: int  # how many optimizer steps were taken
    open_step: int  # the step whose share is open: `step` + the number of closed shares that wait for their means
    tokens_in_share: int  # counted here for the open share
    tokens_counted: int  # counted here since the stage was loaded
    tokens_total: int  # this replica's tokens in all steps and shares, those of a loaded state included
    # Number of microbatches by how many steps old their gradient was; the last bin has all older ones.
    staleness: tuple[int, ...]
    tokens_predicted: int  # of those counted here, tokens whose gradient was computed at predicted weights
    refused_nonfinite: int  # microbatches and sums of gradients refused: see GradientRefused
    account: StageAccount  # what became of the tokens counted here
    sync_schedule: SyncSchedule  # which of the stage's steps are inner steps, with how many fragments
    history: Mapping[int, int]  # history hashes of the last agreed steps, by step; see extend_history
    # Whether a step changed only a part of the weights; until the state of another replica is loaded.
    is_torn: bool = False

    @property
    def agreed_step(self) -> int:
        """The step after the last mean that this replica or its loaded state has applied; 0 for none yet.

        That is the mean of an all-reduced gradient, or of the fragment that was due after an inner step.
        """
        return max(self.history)

    @property
    def history_hash(self) -> int:
        return self.history[self.agreed_step]


class Stage:
    """One stage in training: sums its gradients, and steps along this sum or along the mean gradient of all replicas.

    step: how many optimizer steps the stage has taken, here or at its replicas. gradient_sum: of the open share;
    closed shares wait for the mean over the replicas. Used on the device thread only, except that any thread may read
    `progress` and `layout`, and call `set_instructions`.
    """

    def __init__(
        self,
        number: int,
        module: StageModule,
        offload: OptimizerOffload,
        manifest: Manifest,
        stashed: StashedForwards,  # their graphs may need the weights
        report: Report,
        on_step: Callable[[StepEvent], None],
        dtype: torch.dtype = torch.float32,
        live: LiveManifest | None = None,
    ) -> None:
        """module: gives the initial weights. on_step: called on the device thread after each step and closed share.

        live: the manifest in force at each step; None: `manifest` at every step. dtype: in which matrix products are
        computed.
        """
        self._live_manifest = live = live or LiveManifest(manifest)
        self.number = number
        self.weights = StageWeights(module, offload.device, module.hidden_matrices(), stashed, dtype)
        layout, flat = self.weights.layout, self.weights.current.flat
        self.optimizer = StageOptimizer(
            manifest.optimizer,
            manifest.stage_count,
            layout,
            flat,
            offload,
            # Not through `self`: in a cycle, the weights would outlive the stage until the garbage collector comes.
            section_at=lambda step: live.at(step).optimizer,
        )
        self.layout = self.optimizer.layout
        self.sync_schedule = first_sync_schedule(manifest)
        # During inner steps, the outer parameters and what moves them; None during all-reduces.
        self.outer: OuterOptimizer | None = self._new_outer() if self.sync_schedule.is_inner(0) else None
        self._spare_outer: OuterOptimizer | None = None
        # An average in host memory is copied to the device when it is read: see `evaluation_weights`.
        average = None if offload.in_host else self.optimizer.average
        self._average = None if average is None else WeightVersion(average, layout, module)
        self.prediction: WeightPrediction | None = None
        self.gradient_sum = GradientSum(layout, offload.device)
        self._instructions = StepInstructions(self._live_manifest.target_tokens(0))
        self.step = 0
        self._history = {0: INITIAL_HASH}
        self._is_torn = False
        # This replica's supervised tokens in the steps taken so far; those of a loaded state are included.
        self.tokens_stepped = 0
        self._report = report
        self._on_step = on_step
        self._knows_loss = number == manifest.stage_count - 1
        self._synchronous = manifest.schedule.kind == "synchronous"
        self._closed_shares: deque[ClosedShare] = deque()
        self._accounts = TokenAccounts()
        self._refused = 0
        self._tokens_predicted = 0
        self._staleness = [0] * STALENESS_BINS
        self._stepped_at = time.monotonic()
        self._update_progress()

    def _update_progress(self) -> None:
        summed = self.gradient_sum.totals.tokens
        waiting = sum(share.totals.tokens for share in self._closed_shares) + summed
        self.progress = StageProgress(
            stage=self.number,
            step=self.step,
            open_step=self._open_step,
            tokens_in_share=summed,
            tokens_counted=self._accounts.computed,
            tokens_total=self.tokens_stepped + waiting,
            staleness=tuple(self._staleness),
            tokens_predicted=self._tokens_predicted,
            refused_nonfinite=self._refused,
            account=self._accounts.account(waiting),
            sync_schedule=self.sync_schedule,
            history=self._history,
            is_torn=self._is_torn,
        )

    def record_microbatch(
        self, microbatch: str, tokens: int, loss: float, step_at_forward: int, *, is_predicted: bool = False
    ) -> None:
        """Counts a microbatch whose gradient the caller has added to the sum.

        microbatch: its name in events. loss: the sum over its `tokens`. step_at_forward: the stage's step count then.
        is_predicted: whether its gradient is at predicted weights.
        """
        # Steps whose shares are closed count as taken.
        staleness = max(self._open_step - step_at_forward, 0)
        totals = self.gradient_sum.totals
        totals.tokens += tokens
        totals.loss += loss
        totals.microbatches += 1
        totals.predicted_tokens += tokens if is_predicted else 0
        totals.sum_of_forward_steps += self._open_step - staleness
        self._accounts.computed += tokens
        self._tokens_predicted += tokens if is_predicted else 0
        self._staleness[min(staleness, STALENESS_BINS - 1)] += 1
        self._update_progress()
        if self._closed_shares and self._synchronous:  # it counts for a later step than it should
            self._report(GradientLate(self.number, self.step, microbatch, tokens))

    def record_refusal(self, microbatch: str, reason: str) -> None:
        """Counts and reports a gradient that was not used. microbatch: its name in events, or "" for the whole sum."""
        self._refused += 1
        self._update_progress()
        self._report(GradientRefused(self.number, microbatch, reason))

    @property
    def _open_step(self) -> int:
        return self.step + len(self._closed_shares)

    @property
    def moments(self) -> Mapping[str, Tensor]:
        """The optimizer's; during inner steps the outer parameters and their velocity, too: joiners fetch them."""
        return {**self.optimizer.moments, **(self.outer.moments if self.outer else {})}

    @property
    def evaluation_weights(self) -> WeightVersion:
        average = self.optimizer.average
        if self._average or average is None:
            return self._average or self.weights.current
        # About as large as the gradients of a microbatch, which an evaluation does not have. No graph may be kept on
        # the average: it changes in place at every step.
        on_device = average.to(self.gradient_sum.flat.device, copy=True)
        return WeightVersion(on_device, self.weights.layout, self.weights.current.module)

    def draw_initial_weights(self, fill: Callable[[StageModule], None]) -> None:
        """Draws the initial weights of trained parameters that have no values yet.

        fill: sets a module's trained parameters to their initial values.
        """
        if not self.weights.fill(fill):
            return
        weights = self.weights.current.flat
        if self.optimizer.average is not None:
            self.optimizer.average.copy_(weights)
        if self.outer is not None:
            self.outer.moments[OUTER_PARAMETERS].copy_(weights)
        if self.prediction:
            self.prediction.forget()

    def enable_prediction(self) -> None:
        """From now on `training_version` predicts weights, which takes as much memory as the weights."""
        self.prediction = WeightPrediction(self.weights, self.optimizer)

    def training_version(self, tokens_before: int = 0) -> WeightVersion:
        """Returns the weights for a microbatch's gradient: predicted ones if steps will be taken before it is counted.

        Those are the steps whose closed shares await their means, and the open step if its share will be complete by
        then. tokens_before: of the microbatches in progress here that will be counted before this one.
        """
        if self.prediction is None:
            return self.weights.current
        gradients = [share.gradient for share in self._closed_shares]
        if tokens_before and self._ends_within(tokens_before):
            gradients.append(GradientShare(self._open_step, self.gradient_sum.totals.tokens, self.gradient_sum.mean()))
        return self.prediction.version(gradients)

    def _ends_within(self, tokens: int) -> bool:
        # Whether the open share will be complete, and its step taken or awaited, once `tokens` more are counted.
        step, counted = self._open_step, self.gradient_sum.totals.tokens
        if self._instructions.run_ends_before(step):
            return False
        ends_here = self._instructions.must_close(
            step, self.sync_schedule
        ) or not self._instructions.uses_mean_gradient(step, self.sync_schedule)
        return ends_here and counted + tokens >= self._tokens_needed(step)

    def free_memory(self) -> None:
        """Gives up the previous versions of the weights that no graph needs."""
        self.weights.free_memory()
        if self.prediction:
            self.prediction.free_memory()

    # --- steps

    def step_or_close_share(self) -> None:
        """Once enough tokens are counted, takes the step along this replica's own gradient sum, or closes its share.

        It closes its share if the step needs the mean of the replicas.
        """
        tokens = self.gradient_sum.totals.tokens
        open_step = self._open_step
        if tokens == 0 or tokens < self._tokens_needed(open_step) or self._instructions.run_ends_before(open_step):
            return
        if not self._closed_shares and not self._instructions.uses_mean_gradient(open_step, self.sync_schedule):
            self._step_with_sum()
        elif len(self._closed_shares) < MAX_CLOSED_SHARES and self._instructions.must_close(
            open_step, self.sync_schedule
        ):
            self._close_open_share()

    def _tokens_needed(self, step: int) -> int:
        # The instructions may be of a step before an amendment: then the whole target of this step holds.
        if self._live_manifest.number_at(step) != self._live_manifest.number_at(max(self._instructions.step, 0)):
            return self._live_manifest.target_tokens(step)
        return self._instructions.tokens_needed(step)

    def catch_up(self, step: int) -> None:
        """Raises the step count to `step`, that of the other replicas; does nothing while a share is closed.

        If the stage is one step behind, or takes inner steps, it first takes one step with its summed gradient. Steps
        still missing are skipped: it reports one StepTaken for all of them, and before that StepsSkipped if tokens or
        more than one step were lost.
        """
        if step <= self.step or self._closed_shares:
            return
        uses_sum = step == self.step + 1 or self.sync_schedule.is_inner(self.step)
        if uses_sum and self.gradient_sum.totals.tokens > 0:
            self._step_with_sum()
        skipped = step - self.step
        if skipped > 0:
            self._reserve_outer(step)
            dropped = self.gradient_sum.clear().tokens  # these gradients are too old
            had_outer = self.outer is not None
            self.step = step - 1
            if skipped > 1 or dropped:
                self._report(StepsSkipped(self.number, step, skipped, dropped))
            self._count_step(SumTotals(), None)
            if self.outer is not None and not had_outer:
                self._begin_own_history()  # its outer parameters are not those of the others

    def set_instructions(self, instructions: StepInstructions) -> None:
        self._instructions = instructions

    def close_share(self) -> GradientShare:
        """Returns this replica's share of the next step; first closes the share if it is open, whatever tokens it has.

        Until that step is taken, each call returns the same share. A share that is not finite becomes zeros over 0
        tokens.
        """
        if not self._closed_shares:
            self._close_open_share()
        return self._closed_shares[0].gradient

    def _close_open_share(self) -> None:
        step = self._open_step
        # Divided where it is kept: the device needs no memory for it. The extremes are NaN if any value is.
        mean = self.gradient_sum.flat.to(CPU, copy=True).div_(max(self.gradient_sum.totals.tokens, 1))
        is_finite = all(math.isfinite(float(extreme)) for extreme in torch.aminmax(mean))
        totals = self.gradient_sum.clear()  # what may lack memory came before it
        if not is_finite:
            # The others wait for a share: zeros over 0 tokens say that there is nothing to add.
            self.record_refusal("", f"the sum over {totals.tokens} tokens is not finite")
            mean.zero_()
            totals = SumTotals()
        self._closed_shares.append(ClosedShare(GradientShare(step, totals.tokens, mean), totals))
        self._update_progress()
        self._on_step(ShareClosed(self.number, step, totals.tokens))

    def step_with_gradient(
        self, step: int, mean_gradient: Tensor, tokens: int, wanted_fragments: int = ALL_REDUCE
    ) -> None:
        """Takes step `step` along the mean gradient [numel] over all replicas' `tokens`, and reports StepTaken.

        Drops this replica's closed share of the step; an open share stays, for the step after. With 0 tokens the step
        is only counted. wanted_fragments: how many fragments all members of the round want later; it is part of
        the history. Raises LocalError when another step is the next one; ProtocolError for another shape or dtype and
        for a norm that is not finite; the step can then be taken along another gradient.
        """
        if mean_gradient.shape != self.gradient_sum.flat.shape or mean_gradient.dtype != self.gradient_sum.flat.dtype:
            form = f"{mean_gradient.dtype} {tuple(mean_gradient.shape)}"
            raise ProtocolError("bad-tensor", f"{form} is not a gradient here.")
        if step != self.step:
            raise LocalError(f"Stage {self.number} takes step {self.step} next, not {step}; average that first.")
        result = None
        checksum = 0
        if tokens > 0:
            checksum = hash_of(mean_gradient.cpu().contiguous().numpy().data, wanted_fragments.to_bytes(2, "big"))
            gradient = mean_gradient.to(self.gradient_sum.flat.device, copy=True)
            self.weights.layout.clear_padding(gradient)
            result = self._change_weights(gradient)
            if result is None:
                raise ProtocolError("bad-tensor", f"The mean gradient of stage {self.number} is not finite.")
        totals = self._closed_shares.popleft().totals if self._closed_shares else SumTotals()
        self.sync_schedule = self._change_rule_at(step).after_all_reduce(self.sync_schedule, step, wanted_fragments)
        self._count_step(totals, result, tokens or None, checksum)

    def _record_fragment_sync(self, step: int, checksum: int, wanted_fragments: int) -> None:
        amended = self._live_manifest.hash_at(step - 1)
        self._history = extend_history(self._history, step, checksum, last=self.progress.agreed_step, amended=amended)
        self.sync_schedule = self._change_rule_at(step - 1).after_fragment_sync(
            self.sync_schedule, step, wanted_fragments
        )
        self._update_progress()

    def _change_rule_at(self, step: int) -> SyncChangeRule:
        return SyncChangeRule.from_manifest(self._live_manifest.at(step))

    def _new_outer(self) -> OuterOptimizer:
        return OuterOptimizer(self.layout, self.weights.current.flat)

    def _reserve_outer(self, step: int) -> None:
        # Called before the step that makes `step` the next one: a step that is taken must not lack memory for the rest.
        if self.sync_schedule.is_inner(step) and self.outer is None and self._spare_outer is None:
            self._spare_outer = self._new_outer()

    def _begin_own_history(self) -> None:
        # A history that no other replica has, so that all replicas but one will fetch that one's state.
        self._history = {self.step: hash_of(self.weights.current.flat.cpu().numpy().data)}
        self._update_progress()

    def restart_at(
        self, step: int, tokens: int, agreed_step: int, history_hash: int, sync_schedule: SyncSchedule
    ) -> None:
        """Sets step, tokens and history to those of a loaded state; drops gradient sum, closed shares, recent accounts.

        tokens: in the state's steps. history_hash: of step `agreed_step`. Weights and moments are the state's already.
        Reports StepsSkipped if tokens are lost.
        """
        self._history = {agreed_step: history_hash}
        self._is_torn = False
        self.sync_schedule = sync_schedule
        if self.prediction:
            self.prediction.forget()
        lost = self.gradient_sum.clear().tokens + sum(share.totals.tokens for share in self._closed_shares)
        if lost:
            self._report(StepsSkipped(self.number, step, max(step - self.step, 0), lost))
        self._closed_shares.clear()
        self._accounts.forget_recent()
        self.step = step
        self.tokens_stepped = tokens
        self._stepped_at = time.monotonic()
        self._update_progress()

    def _step_with_sum(self) -> None:
        try:
            result = self._change_weights(self.gradient_sum.flat, self.gradient_sum.totals.tokens)
        finally:
            if self.optimizer.is_changing:  # the step has overwritten the sum
                self._report(StepsSkipped(self.number, self.step, 0, self.gradient_sum.clear().tokens))
                self._update_progress()
        totals = self.gradient_sum.clear()
        if result is None:
            self.record_refusal("", f"the sum over {totals.tokens} tokens is not finite")
            self._stepped_at = time.monotonic()
        else:
            checksum = hash_of(struct.pack("<qd", totals.tokens, result.gradient_norm))
            self._count_step(totals, result, checksum=checksum)

    def _change_weights(self, gradient: Tensor, tokens: int = 1) -> StepResult | None:
        self._reserve_outer(self.step + 1)
        try:
            with self.weights.writable() as flat:
                return self.optimizer.step(flat, gradient, self.step, tokens)
        finally:
            if self.optimizer.is_changing:
                # Half a step was taken, because the device failed: these weights are those of no other replica. During
                # inner steps that is so anyway.
                self._report(StepTorn(self.number, self.step))
                if not self.sync_schedule.is_inner(self.step):
                    self._is_torn = True
                    self._begin_own_history()
                if self.prediction:
                    self.prediction.forget()

    def _count_step(
        self, totals: SumTotals, result: StepResult | None, step_tokens: int | None = None, checksum: int = 0
    ) -> None:
        now = time.monotonic()
        staleness = totals.staleness(self.step)
        if not self.sync_schedule.is_inner(self.step):
            amended = self._live_manifest.hash_at(self.step)
            self._history = extend_history(self._history, self.step + 1, checksum, amended=amended)
        self.step += 1
        if (number := self._live_manifest.number_at(self.step)) != self._live_manifest.number_at(self.step - 1):
            self._report(AmendmentInForce(self.number, self.step, number))
        if self.sync_schedule.is_inner(self.step) and self.outer is None:
            self.outer, self._spare_outer = self._spare_outer or self._new_outer(), None
            self.outer.moments[OUTER_PARAMETERS].copy_(self.weights.current.flat)
        elif self.outer is not None and not self.sync_schedule.is_inner(self.step):
            # Inner steps have made the replicas differ. With an own history each, all but one fetch that one's state.
            self.outer = None
            self._begin_own_history()
        self.tokens_stepped += totals.tokens
        if result is not None:  # otherwise the weights did not change here
            self._accounts.record_step(totals.tokens, step_tokens, staleness)
        self._update_progress()
        self._report(
            StepTaken(
                stage=self.number,
                step=self.step,
                tokens=totals.tokens,
                loss=totals.loss / totals.tokens if self._knows_loss and totals.tokens else None,
                seconds=now - self._stepped_at,
                learning_rate=result.learning_rate if result else 0.0,
                gradient_norm=result.gradient_norm if result else None,
                staleness=staleness,
                predicted=totals.predicted_tokens / max(totals.tokens, 1),
                step_tokens=step_tokens,
            )
        )
        self._stepped_at = now
        self._on_step(StageStepped(self.number, self.step, totals.tokens))

    def outer_gradient(self, blocks: Blocks) -> tuple[Tensor, Tensor] | None:
        """Returns (outer parameters - weights, weights), both copied from the numbered `blocks` of the flat weights.

        Both are float32 [blocks * SLICE_BLOCK] on the CPU. None while the stage takes all-reduces.
        """
        if self.outer is None:
            return None
        rows = self.weights.current.flat.view(-1, SLICE_BLOCK)
        snapshot = rows.index_select(0, self._block_numbers(blocks)).flatten().cpu()
        return self.outer.outer_gradient(torch.from_numpy(blocks), snapshot), snapshot

    def outer_step(
        self,
        step: int,
        blocks: Blocks,
        snapshot: Tensor,
        averaged: AveragedFragment | None,
        wanted_fragments: int = ALL_REDUCE,
    ) -> None:
        """Applies the mean of step `step`'s round over `blocks` to outer parameters and weights, and to the history.

        Does nothing if a mean of this or a later step was applied before, and during all-reduces. snapshot: the weights
        that the round began with. averaged: the round's result; shards without a mean stay as they are. None if there
        is no other replica: then the snapshot becomes the outer parameters, and the weights stay. wanted_fragments: as
        in `step_with_gradient`. Raises ProtocolError for a mean that does not fit or gives weights that are not finite.
        """
        if step <= self.progress.agreed_step or self.outer is None:
            return
        rows = torch.from_numpy(blocks)
        if averaged is None:
            checksum = hash_of(snapshot.numpy().data)
            self.outer.restart(rows, snapshot)
        else:
            mean, has_mean = averaged
            averaging = self._live_manifest.at(step - 1).averaging
            pass_steps = averaging.every * self.sync_schedule.fragments_at(step - 1)
            outer_step = self.outer.prepare(averaging, rows, snapshot, mean, has_mean, pass_steps)
            change = outer_step.change.to(self.gradient_sum.flat.device)
            numbers = self._block_numbers(blocks)
            decided = bytes(has_mean) + wanted_fragments.to_bytes(2, "big")
            checksum = hash_of(mean.contiguous().numpy().data, decided)
            with self.weights.writable() as flat:
                # Nothing has changed so far, and what follows needs no new memory.
                self.outer.take(outer_step)
                flat.view(-1, SLICE_BLOCK).index_add_(0, numbers, change.view(-1, SLICE_BLOCK))
                self.layout.clear_padding(flat)
            if self.prediction:
                self.prediction.forget()
        self._record_fragment_sync(step, checksum, wanted_fragments)

    def export_state(self) -> StageState:
        """Returns a copy, on the CPU, of the stage after its last step, without gradient sum and closed shares."""
        weights = self.weights.current.flat.to(CPU, copy=True).numpy()
        moments = {name: moment.to(CPU, copy=True).numpy() for name, moment in self.moments.items()}
        return StageState(
            stage=self.number,
            step=self.step,
            updates=self.optimizer.updates,
            tokens_total=self.tokens_stepped,
            layout=self.layout.at_step(self.step, self.sync_schedule),
            weights=weights,
            moments=moments,
            agreed_step=self.progress.agreed_step,
            history_hash=self.progress.history_hash,
            sync_schedule=self.sync_schedule,
        )

    def load_state(self, state: StageState) -> None:
        """Replaces weights, moments, step and history with those of `state`; drops the gradient sum and closed shares.

        Reports StepsSkipped if that loses tokens. Raises ProtocolError, and changes nothing, for an array that is
        missing, does not fit or is not finite, and for a mean square with a negative value. If memory does not suffice,
        nothing changes.
        """
        layout = self.layout.at_step(state.step, state.sync_schedule)
        weights = self._checked("weights", state.weights, layout)
        moments = {}
        for moment in layout.moments:
            layout_of_moment = layout.of_moment(moment)
            moments[moment.name] = self._checked(
                moment.name, state.moments.get(moment.name), layout_of_moment, is_square=moment.is_square
            )
        # What needs new memory comes first.
        outer = self._new_outer() if state.sync_schedule.is_inner(state.step) else None
        with self.weights.writable() as flat:
            # Straight from the arrays to where they are used: nothing of the size of the state is allocated.
            self.optimizer.load(state.updates, moments)
            flat.copy_(weights)
        self.outer = outer
        for name, values in outer.moments.items() if outer else ():
            values.copy_(moments[name])
        self.restart_at(state.step, state.tokens_total, state.agreed_step, state.history_hash, state.sync_schedule)

    def _checked(self, name: str, array: Flat | None, layout: Layout, *, is_square: bool = False) -> Tensor:
        # The array itself, as a tensor. The least and the greatest value are NaN if any is; they allocate nothing.
        fits = array is not None and array.dtype == np.float32 and array.shape == (layout.numel,)
        least, greatest = map(float, (array.min(), array.max())) if array is not None and fits else (math.nan, math.nan)
        if array is None or not math.isfinite(least) or not math.isfinite(greatest):
            problem = "are missing, have another size than this run's, or are not finite"
            raise ProtocolError("bad-tensor", f"The {name} of stage {self.number} {problem}.")
        if is_square and least < 0:
            raise ProtocolError("bad-tensor", f"A value of {name} of stage {self.number} is negative.")
        layout.clear_padding(array)
        return torch.from_numpy(array)

    def _block_numbers(self, blocks: Blocks) -> Tensor:
        return torch.tensor(blocks, dtype=torch.int64, device=self.gradient_sum.flat.device)


def stage_layout(manifest: Manifest, stage: int) -> Layout:
    """Returns the layout of a stage's tensors and moments, without building the stage."""
    family = family_of(manifest.model)
    layers = manifest.layers_of(stage)
    layout = lay_out(family.parameter_shapes(layers).items(), family.hidden_matrices(layers))
    return with_moments(manifest.optimizer, layout)
