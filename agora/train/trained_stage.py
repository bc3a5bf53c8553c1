"""One stage in training: its weights, the gradient sum of its next step, and the step itself.

Knows: weights, the optimizer, which graphs are alive. Must not know: how gradients are computed, queues, peers.
"""

from __future__ import annotations

import struct
import time
import zlib
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from agora_protocol.errors import LocalError, ProtocolError
from agora_protocol.manifest import ALL_STEPS, Manifest
from agora_protocol.records import StageAccount
from torch import Tensor

from agora.model import Stage, family_of
from agora.observe.events import GradientLate, GradientRefused, Report, StepsSkipped, StepTaken
from agora.state.layout import AVERAGE, Layout, lay_out
from agora.stepping import ShareClosed, StageStepped, StepEvent, StepPolicy
from agora.train.lineage import INITIAL_LINEAGE, with_step
from agora.train.optimizer import StageOptimizer, StepResult, with_moments
from agora.train.outer_step import OuterOptimizer, with_outer_moments
from agora.train.token_accounts import TokenAccounts
from agora.train.weight_versions import StageWeights, StashedForwards, WeightVersion, tensor_in

MAX_CLOSED_SHARES = 2
"""Maximum number of closed shares that wait for means, each a gradient in memory; beyond that the open share grows."""
STALENESS_BINS = 33
"""Staleness 0, 1, ... 31, and one bin for everything older."""


@dataclass(frozen=True, slots=True)
class StageProgress:
    """Immutable snapshot of the training progress of one of this peer's stages. step: optimizer steps taken.

    open_step: number of the step whose share is open, step + closed shares that wait for their means. tokens_in_share:
    counted for the open share. tokens_counted: counted since the stage was loaded. tokens_total: in all steps and
    shares, those of a loaded state included. staleness[i]: microbatches whose gradient was i steps old; the last bin
    has all older ones. refused_nonfinite: gradients and sums dropped because they were not finite. account: what became
    of the tokens counted here. lineages: step -> lineage of the last agreed steps, see train.lineage.
    """

    stage: int
    step: int
    open_step: int
    tokens_in_share: int
    tokens_counted: int
    tokens_total: int
    staleness: tuple[int, ...]
    refused_nonfinite: int
    account: StageAccount
    lineages: Mapping[int, int]

    @property
    def agreed(self) -> int:
        """The last step whose mean this replica has applied: an exact step's gradient, or a local step's slice."""
        return max(self.lineages)

    @property
    def lineage(self) -> int:
        """The lineage of step `agreed`; 0 when it is not known."""
        return self.lineages[self.agreed]


@dataclass(frozen=True, slots=True)
class GradientShare:
    """A replica's share of step number `step` (0 the first): its own mean gradient, over its own `tokens`.

    values: float32 [numel] on the CPU, finite, not to be changed; zeros if `tokens` is 0.
    """

    step: int
    tokens: int
    values: Tensor


@dataclass(slots=True)
class SumContents:
    """The totals of a gradient sum: supervised tokens, the sum of their losses, the number of microbatches.

    forward_steps: for each microbatch the step of the weights of its forward, summed.
    """

    tokens: int = 0
    loss: float = 0.0
    microbatches: int = 0
    forward_steps: int = 0

    def staleness(self, step: int) -> float:
        """Returns the mean age, in steps, of the summed gradients when step number `step` uses them; 0 without any."""
        return step - self.forward_steps / self.microbatches if self.microbatches else 0.0


class ClosedShare(NamedTuple):
    """This replica's closed share of a step, held until the mean of all replicas arrives.

    gradient: its mean gradient. contents: the totals of the sum behind it.
    """

    gradient: GradientShare
    contents: SumContents


class GradientSum:
    """The summed gradients of a stage's next step. flat: float32 [numel].

    tensors: views of it, in the layout's order.
    """

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.flat = torch.zeros(layout.numel, dtype=torch.float32, device=device)
        self.tensors = [tensor_in(self.flat, slot) for slot in layout.slots]
        self.contents = SumContents()

    def clear(self) -> SumContents:
        """Sets the sum and its totals to zero, and returns the totals that it had."""
        self.flat.zero_()
        contents, self.contents = self.contents, SumContents()
        return contents


def stage_layout(manifest: Manifest, stage: int) -> Layout:
    """Returns the layout of a stage's tensors and moments, computed from the manifest; no stage is built."""
    family, layers = family_of(manifest.model), manifest.layers_of(stage)
    layout = lay_out(family.parameter_shapes(layers).items(), family.hidden_matrices(layers))
    layout = with_moments(manifest.optimizer, layout)
    return layout if manifest.exact_steps == ALL_STEPS else with_outer_moments(layout)


class TrainedStage:
    """Sums one stage's gradients and takes its optimizer steps: alone, or along the mean gradient of all replicas.

    step: the optimizer steps that the stage has taken, here or by its replicas. sum: the gradients of the open share;
    closed shares wait for the mean of the replicas. Used on the device thread only, except that any thread may read
    `progress` and replace `policy`, which decides when the stage steps or closes a share by itself.
    """

    def __init__(
        self,
        number: int,
        module: Stage,
        device: torch.device,
        manifest: Manifest,
        stashed: StashedForwards,
        report: Report,
        on_step: Callable[[StepEvent], None],
    ) -> None:
        """number: of the stage. on_step: called after each step and each closed share, on the device thread."""
        self.number = number
        self.weights = StageWeights(module, device, module.hidden_matrices())
        self.optimizer = StageOptimizer(
            manifest.optimizer, manifest.stage_count, self.weights.layout, self.weights.current.flat
        )
        self.layout, self.outer, flat = self.optimizer.layout, None, self.weights.current.flat
        self._exact_steps = manifest.exact_steps
        if self._exact_steps < ALL_STEPS:
            self.layout = with_outer_moments(self.layout)
            self.outer = OuterOptimizer(manifest.averaging, self.layout, flat)
        average = self.optimizer.moments.get(AVERAGE)
        self._average = None if average is None else WeightVersion(average, self.weights.layout, module)
        self.sum = GradientSum(self.weights.layout, device)
        self.policy = StepPolicy(manifest.optimizer.target_tokens)
        self.step = 0
        self._lineages = {0: INITIAL_LINEAGE}
        self.tokens_stepped = 0
        """This replica's supervised tokens in the steps taken so far; those of a loaded state are included."""
        self._stashed = stashed
        self._report = report
        self._on_step = on_step
        self._knows_loss = number == manifest.stage_count - 1
        self._synchronous = manifest.schedule.kind == "synchronous"
        self._closed_shares: deque[ClosedShare] = deque()
        self._accounts = TokenAccounts()
        self._refused = 0
        self._staleness = [0] * STALENESS_BINS
        self._stepped_at = time.monotonic()
        self._update_progress()

    def _update_progress(self) -> None:
        """Replaces `progress`, which other threads read, by a new immutable copy of the stage's counts."""
        summed = self.sum.contents.tokens
        waiting = sum(share.contents.tokens for share in self._closed_shares) + summed
        self.progress = StageProgress(
            stage=self.number,
            step=self.step,
            open_step=self._open_step,
            tokens_in_share=summed,
            tokens_counted=self._accounts.computed,
            tokens_total=self.tokens_stepped + waiting,
            staleness=tuple(self._staleness),
            refused_nonfinite=self._refused,
            account=self._accounts.account(waiting),
            lineages=self._lineages,
        )

    def count_microbatch(self, microbatch: str, tokens: int, loss: float, step_at_forward: int) -> None:
        """Counts a microbatch whose gradient was added to the sum.

        microbatch: its name in events. loss: the sum over its `tokens`. Its staleness is max(0, open step -
        step_at_forward): steps whose shares are closed count as taken. In a synchronous run, reports GradientLate if
        the share of its step is closed already.
        """
        staleness = max(self._open_step - step_at_forward, 0)
        contents = self.sum.contents
        contents.tokens += tokens
        contents.loss += loss
        contents.microbatches += 1
        contents.forward_steps += self._open_step - staleness
        self._accounts.computed += tokens
        self._staleness[min(staleness, STALENESS_BINS - 1)] += 1
        self._update_progress()
        if self._closed_shares and self._synchronous:
            self._report(GradientLate(self.number, self.step, microbatch, tokens))

    def count_refused(self, microbatch: str, reason: str) -> None:
        """Counts a gradient that is not finite and reports GradientRefused. microbatch: "" for a whole sum."""
        self._refused += 1
        self._update_progress()
        self._report(GradientRefused(self.number, microbatch, reason))

    @property
    def _open_step(self) -> int:
        """The number of the step whose share is open: `step` + the number of closed shares."""
        return self.step + len(self._closed_shares)

    @property
    def moments(self) -> Mapping[str, Tensor]:
        """The moments of the stage's state by name: the optimizer's, and with local steps anchor and velocity."""
        return {**self.optimizer.moments, **(self.outer.moments if self.outer else {})}

    @property
    def evaluated(self) -> WeightVersion:
        """The weights that evaluations and exports use: the moving average, or without one the current weights.

        The average changes in place at every step, so no graph on it may be kept.
        """
        return self._average or self.weights.current

    def writable_weights(self) -> Tensor:
        """Returns the flat weights [numel] to change in place; if live graphs need them, a copy becomes current first.

        See StageWeights.make_writable.
        """
        return self.weights.make_writable(self._stashed)

    # --- steps

    def step_if_due(self) -> None:
        """Steps along the sum, or closes the open share, as the policy says, if the sum has the tokens needed.

        While closed shares wait for their means, it does not step along the sum. At most MAX_CLOSED_SHARES are closed.
        """
        tokens, open_step = self.sum.contents.tokens, self._open_step
        if not 0 < tokens >= self.policy.tokens_needed(open_step):
            return
        if not self._closed_shares and not self.policy.is_along_mean(open_step):
            self._step_along_sum()
        elif len(self._closed_shares) < MAX_CLOSED_SHARES and self.policy.must_close(open_step):
            self._close_share()

    def catch_up(self, step: int) -> None:
        """Sets the step count to `step`, that of the other replicas, if it is behind and no share is closed.

        If the stage is one step behind, or takes local steps, it first takes one step along its sum, if that has
        tokens. For the steps that are still missing it only counts, and drops the sum, whose gradients are too old;
        then StepsSkipped is reported if tokens or more than one step were lost.
        """
        if step <= self.step or self._closed_shares:
            return
        uses_sum = step == self.step + 1 or self.step >= self._exact_steps
        if uses_sum and self.sum.contents.tokens > 0:
            self._step_along_sum()
        skipped = step - self.step
        if skipped > 0:
            dropped = self.sum.clear().tokens
            self.step = step - 1
            if skipped > 1 or dropped:
                self._report(StepsSkipped(self.number, step, skipped, dropped))
            self._count_step(SumContents(), None)

    def take_gradient_share(self) -> GradientShare:
        """Returns this replica's share of the next step, and closes it if it is open.

        Until the step is taken, it returns the same share. A share that is not finite becomes zeros over 0 tokens.
        """
        if not self._closed_shares:
            self._close_share()
        return self._closed_shares[0].gradient

    def _close_share(self) -> None:
        """Moves the sum's mean into a closed share, clears the sum for the next step, and reports ShareClosed."""
        number = self._open_step
        mean = (self.sum.flat / max(self.sum.contents.tokens, 1)).cpu()
        contents = self.sum.clear()
        if not bool(mean.isfinite().all()):
            self.count_refused("", f"the sum over {contents.tokens} tokens is not finite")
            mean.zero_()
            contents = SumContents()
        self._closed_shares.append(ClosedShare(GradientShare(number, contents.tokens, mean), contents))
        self._update_progress()
        self._on_step(ShareClosed(self.number, number, contents.tokens))

    def step_with_gradient(self, number: int, mean: Tensor, tokens: int) -> None:
        """Takes step `number`, the next one, along the `mean` gradient [numel] over all replicas' `tokens`.

        Drops this replica's closed share of the step; an open one stays, for the step after. With 0 tokens the step is
        only counted. Raises LocalError when another step is the next one; ProtocolError for another shape or dtype and
        for a norm that is not finite; the step can then be taken along another gradient.
        """
        if mean.shape != self.sum.flat.shape or mean.dtype != self.sum.flat.dtype:
            raise ProtocolError("bad-tensor", f"{mean.dtype} {tuple(mean.shape)} is not a gradient here")
        if number != self.step:
            raise LocalError(f"stage {self.number} takes step {self.step} next, not {number}; ask for its share")
        result, checksum = None, 0
        if tokens > 0:
            checksum = zlib.crc32(mean.cpu().contiguous().numpy().data)
            gradient = mean.to(self.sum.flat.device, copy=True)
            self.weights.layout.clear_padding(gradient)
            result = self.optimizer.step(self.writable_weights(), gradient, number)
            if result is None:
                raise ProtocolError("bad-tensor", f"the mean gradient of stage {self.number} is not finite")
        contents = self._closed_shares.popleft().contents if self._closed_shares else SumContents()
        self._count_step(contents, result, tokens or None, checksum)

    def record_agreed(self, step: int, checksum: int) -> None:
        """Records in the lineage that this replica has applied the mean of local step `step`'s slice.

        checksum: the CRC of the mean.
        """
        self._lineages = with_step(self._lineages, step, checksum, last=self.progress.agreed)
        self._update_progress()

    def restart_at(self, step: int, tokens: int, agreed: int, lineage: int) -> None:
        """Sets step, tokens and lineage to those of a loaded state; drops the gradient sum and the closed shares.

        tokens: behind the state's steps. lineage: of step `agreed`. The caller has replaced weights and moments before.
        Reports StepsSkipped if tokens are lost.
        """
        self._lineages = {agreed: lineage}
        lost = self.sum.clear().tokens + sum(share.contents.tokens for share in self._closed_shares)
        if lost:
            self._report(StepsSkipped(self.number, step, max(step - self.step, 0), lost))
        self._closed_shares.clear()
        self._accounts.forget_recent()
        self.step, self.tokens_stepped = step, tokens
        self._stepped_at = time.monotonic()
        self._update_progress()

    def _step_along_sum(self) -> None:
        """Takes the optimizer step along the sum's mean and clears the sum; one that is not finite is only dropped."""
        result = self.optimizer.step(self.writable_weights(), self.sum.flat, self.step, self.sum.contents.tokens)
        contents = self.sum.clear()
        if result is None:
            self.count_refused("", f"the sum over {contents.tokens} tokens is not finite")
            self._stepped_at = time.monotonic()
        else:
            checksum = zlib.crc32(struct.pack("<qd", contents.tokens, result.gradient_norm))
            self._count_step(contents, result, checksum=checksum)

    def _count_step(
        self, contents: SumContents, result: StepResult | None, step_tokens: int | None = None, checksum: int = 0
    ) -> None:
        """Counts a step, reports StepTaken and calls `on_step`. result: None if the weights did not change here.

        contents: this replica's totals in it. step_tokens: of all replicas, in the step's mean gradient; None if it was
        not taken along such a mean. checksum: of the gradient, for the lineage.
        """
        now, staleness = time.monotonic(), contents.staleness(self.step)
        self.step += 1
        if self.step <= self._exact_steps:
            self._lineages = with_step(self._lineages, self.step, checksum)
            if self.outer and self.step == self._exact_steps:
                self.outer.restart(self.weights.current.flat)
        self.tokens_stepped += contents.tokens
        if result is not None:
            self._accounts.add_step(contents.tokens, step_tokens, staleness)
        self._update_progress()
        self._report(
            StepTaken(
                stage=self.number,
                step=self.step,
                tokens=contents.tokens,
                loss=contents.loss / contents.tokens if self._knows_loss and contents.tokens else None,
                seconds=now - self._stepped_at,
                learning_rate=result.learning_rate if result else 0.0,
                gradient_norm=result.gradient_norm if result else None,
                staleness=staleness,
                step_tokens=step_tokens,
            )
        )
        self._stepped_at = now
        self._on_step(StageStepped(self.number, self.step, contents.tokens))
