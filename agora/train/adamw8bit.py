"""AdamW with moments in 8 bits: bitsandbytes' blockwise update of a range of a stage's flat weights.

Source: 8-bit optimizers via block-wise quantisation, arXiv 2110.02861.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch
import torch.nn.functional as F
from agora_protocol.manifest_sections import OptimizerSection
from torch import Tensor

from agora.core.tuning_packages import import_tuning
from agora.train.optimizer_offload import OptimizerOffload

BLOCK: Final = 256  # how many values share a scale; bitsandbytes' update supports no other block size
# How many values are updated at a time: on the CPU the update makes float32 copies of their moments.
CHUNK: Final = BLOCK << 12

MIN_SCALE: Final = torch.finfo(torch.float32).tiny  # the divisor for a block of zeros


class QuantisedMoment:
    """A moment of n values in 8 bits: a code for each, and a float32 scale for each block of BLOCK values.

    A code is an index into 256 levels, from -1 (if signed) or 0 to 1; a value is its level times its block's scale. The
    levels have exactly -1 and 1, so that a block's largest value gives its scale: decoding and encoding again gives the
    same codes and scales. Moments can therefore travel as float32, and replicas stay equal to the last bit.
    """

    def __init__(self, count: int, offload: OptimizerOffload, *, is_signed: bool) -> None:
        """Starts with `count` zeros at `offload`. is_signed: values may be negative.

        Raises TuningMissing without bitsandbytes.
        """
        levels: Tensor = import_tuning("bitsandbytes.functional").create_dynamic_map(signed=is_signed)
        if is_signed:
            # bitsandbytes has -0.993 there: the scale of a block whose largest value is negative would shrink each time
            levels[0] = -1.0
        self.codes = offload.zeros(count, torch.uint8).fill_(int((levels == 0).nonzero()))
        self.scales = offload.zeros(-(-count // BLOCK))
        self.levels = levels.to(self.codes.device)

    def decode(self) -> Tensor:
        decoded: Tensor = torch.ops.bitsandbytes.dequantize_blockwise(
            self.codes, self.scales, self.levels, BLOCK, torch.float32
        )
        return decoded

    def encode(self, values: Tensor) -> None:
        """Replaces the moment's values by `values`, float32 [n], each rounded to the nearest level of its block.

        bitsandbytes' own quantisation is not used: on the CPU it misses the nearest level once in some thousand values.
        """
        values = values.to(self.codes.device)
        middles = (self.levels[1:] + self.levels[:-1]) / 2
        for part, scales in chunks(len(values)):
            padding = -(part.stop - part.start) % BLOCK
            blocks = F.pad(values[part], (0, padding)).view(-1, BLOCK)
            largest = blocks.abs().amax(dim=1)
            nearest = torch.bucketize(blocks / largest.clamp(min=MIN_SCALE).unsqueeze(1), middles)
            self.codes[part] = nearest.flatten()[: part.stop - part.start].to(torch.uint8)
            self.scales[scales] = largest


class EightBitPart:
    """The optimizer's state for one range of the flat weights, with moments in 8 bits; takes AdamW steps for it.

    elements: the range. mean, square: the running means of the gradient and of its square.
    """

    def __init__(self, section: OptimizerSection, elements: slice, decay: float, offload: OptimizerOffload) -> None:
        """Starts with zero moments, which are kept at `offload`. decay: weight decay of this range.

        Raises TuningMissing without bitsandbytes.
        """
        self._functional: Any = import_tuning("bitsandbytes.functional")
        self._section = section
        self._decay = decay
        self.elements = elements
        count = elements.stop - elements.start
        self.mean = QuantisedMoment(count, offload, is_signed=True)
        self.square = QuantisedMoment(count, offload, is_signed=False)
        self._offload = offload
        self._levels = [moment.levels.to(offload.device) for moment in (self.mean, self.square)]

    def step(self, weights: Tensor, gradient: Tensor, learning_rate: float, step: int) -> None:
        """Changes `weights` and the moments in place by one AdamW step.

        weights, gradient: of this range, float32 [n], on the device. step: the number of this step among those that
        the moments have seen, 1 for the first; it sets AdamW's bias correction.
        """
        section = self._section
        mean = self.mean
        square = self.square
        for part, scales in chunks(len(weights)):
            with self._offload.on_device(
                mean.codes[part], square.codes[part], mean.scales[scales], square.scales[scales]
            ) as (mean_codes, square_codes, mean_scales, square_scales):
                self._functional.optimizer_update_8bit_blockwise(
                    "adam",
                    gradient[part],
                    weights[part],
                    mean_codes,
                    square_codes,
                    section.beta1,
                    section.beta2,
                    0.0,  # beta3 and alpha are AdEMAMix's
                    0.0,
                    section.epsilon,
                    step,
                    learning_rate,
                    *self._levels,
                    mean_scales,
                    square_scales,
                    weight_decay=self._decay,
                )


def chunks(count: int) -> Iterator[tuple[slice, slice]]:
    """Yields (range of at most CHUNK values, range of the scales of its blocks) until `count` values are covered."""
    for start in range(0, count, CHUNK):
        stop = min(start + CHUNK, count)
        yield slice(start, stop), slice(start // BLOCK, -(-stop // BLOCK))
