"""Predicts the weights of the step for which a microbatch will count, before the steps until then are taken.

A microbatch counts for a later step than its forward sees in two cases: a share is closed and its mean gradient is
still being formed; or the microbatches in progress before this one complete the open share. At the present weights its
gradient would be a step old. It is computed at predicted weights instead: the present ones after the optimizer's step
along this replica's own gradient, as far as it is known, which stands for the mean of all. Moments stay as they are.
Measured in docs/notes/routing.md; predicting by the last step (SpecTrain, arXiv 1809.02839) does harm where steps are
large.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from agora_protocol.manifest import Manifest

from agora.train.gradients import GradientShare
from agora.train.optimizer import StageOptimizer
from agora.train.weight_versions import VersionedWeights, WeightVersion

# Weights are predicted where that takes at most this fraction of the memory that the device has available.
MAX_MEMORY_FRACTION: Final = 1 / 8


def predicts_weights(manifest: Manifest, weights_bytes: int, available_bytes: int) -> bool:
    """Returns whether this peer predicts weights: in asynchronous runs that want it, where memory suffices.

    Each peer decides for itself. weights_bytes: of all its stages. available_bytes: what the device has left.
    """
    is_wanted = manifest.schedule.kind == "asynchronous" and manifest.schedule.predict_weights
    is_possible = manifest.optimizer.name != "adamw8bit"  # its moments cannot be tried and kept
    return is_wanted and is_possible and weights_bytes <= MAX_MEMORY_FRACTION * available_bytes


class WeightPrediction:
    """The predicted weights of one stage, in memory of their own; graphs on them are kept as on the stage's weights."""

    def __init__(self, weights: VersionedWeights, optimizer: StageOptimizer) -> None:
        self._weights = weights
        self._optimizer = optimizer
        self._predicted = weights.twin()
        # The steps that the predicted weights have taken beyond the stage's own; () before the first prediction.
        self._steps: tuple[int, ...] = ()

    def forget(self) -> None:
        """Makes the prediction void, because the weights were replaced."""
        self._steps = ()

    def free_memory(self) -> None:
        self._predicted.free_memory()

    def owns(self, version: WeightVersion) -> bool:
        """Returns whether `version` is one of predicted weights."""
        return version in (self._predicted.current, self._predicted.previous)

    def version(self, shares: Sequence[GradientShare]) -> WeightVersion:
        """Returns the weights predicted for after the steps of `shares`: this replica's, in the order of their steps.

        Without a share that has tokens, returns the stage's own weights. Weights are predicted only once for the same
        steps: what an open share gains afterwards does not change them.
        """
        shares = [share for share in shares if share.tokens]
        if not shares:
            return self._weights.current
        steps = tuple(share.step for share in shares)
        if steps != self._steps:
            self._steps = ()  # if memory lacks in between, these are no predicted weights
            with self._predicted.writable() as flat:
                flat.copy_(self._weights.current.flat)
                for share in shares:
                    self._optimizer.preview(flat, share.values.to(flat.device, copy=True), share.step)
            self._steps = steps
        return self._predicted.current
