"""AdamW with moments in 8 bits: bitsandbytes' blockwise update of a range of a stage's flat weights.

Source: 8-bit optimizers via block-wise quantisation, arXiv 2110.02861.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
import torch.nn.functional as F
from agora_protocol.manifest_sections import OptimizerSection
from torch import Tensor

from agora.core.optional_packages import import_tuning
from agora.train.optimizer_offload import OptimizerOffload, StateAccess, bytes_on_device

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

        Raises PackageMissing without bitsandbytes.
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

    def encode(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Returns codes and scales of `values`, float32 [n], each rounded to the nearest level of its block.

        bitsandbytes' own quantisation is not used: on the CPU it misses the nearest level once in some thousand values.
        """
        values = values.to(self.codes.device)
        codes, all_scales = torch.empty_like(self.codes), torch.empty_like(self.scales)
        middles = (self.levels[1:] + self.levels[:-1]) / 2
        for part, scales in chunks(len(values)):
            padding = -(part.stop - part.start) % BLOCK
            blocks = F.pad(values[part], (0, padding)).view(-1, BLOCK)
            largest = blocks.abs().amax(dim=1)
            nearest = torch.bucketize(blocks / largest.clamp(min=MIN_SCALE).unsqueeze(1), middles)
            codes[part] = nearest.flatten()[: part.stop - part.start].to(torch.uint8)
            all_scales[scales] = largest
        return codes, all_scales

    def replace(self, codes: Tensor, scales: Tensor) -> None:
        """Replaces the moment's values by encoded ones; allocates nothing."""
        self.codes.copy_(codes)
        self.scales.copy_(scales)


class EightBitPart:
    """The optimizer's state for one range of the flat weights, with moments in 8 bits; takes AdamW steps for it.

    elements: the range. mean, square: the running means of the gradient and of its square.
    """

    def __init__(self, section: OptimizerSection, elements: slice, decay: float, offload: OptimizerOffload) -> None:
        """Starts with zero moments, which are kept at `offload`. decay: weight decay of this range.

        Raises PackageMissing without bitsandbytes.
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

    def bytes_on_device(self) -> int:
        """Returns the most that a step needs on the device for one chunk of the moments."""
        return max((bytes_on_device(*self._state_of(*chunk)) for chunk in chunks(len(self.mean.codes))), default=0)

    def prepare(
        self, weights: Tensor, gradient: Tensor, scale: float, learning_rate: float, step: int, access: StateAccess
    ) -> Callable[[], None]:
        """Returns a function that changes `weights` and moments in place by one AdamW step along scale * gradient.

        What needs new memory is done here, and changes nothing; the function allocates nothing. weights, gradient: of
        this range, float32 [n], on the device. step: the number of this step among those that the moments have seen, 1
        for the first; it sets AdamW's bias correction. Both must not have changed when the function is called.
        """

        def update(part: slice, weights_in_part: Tensor, state: Sequence[Tensor]) -> None:
            self._update(weights_in_part, gradient[part], state, scale, learning_rate, step)

        if self._offload.device.type != "cpu":

            def update_in_place() -> None:
                for part, scales in chunks(len(weights)):
                    with access.on_device(*self._state_of(part, scales)) as state:
                        update(part, weights[part], state)

            return update_in_place
        # On the CPU bitsandbytes' update itself allocates. Copies of weights and moments are updated instead: 6 bytes
        # for each value, of which a microbatch's gradients take more.
        changed: list[tuple[Tensor, Tensor]] = []
        for part, scales in chunks(len(weights)):
            held = [weights[part], *self._state_of(part, scales)]
            copies = [tensor.clone() for tensor in held]
            update(part, copies[0], copies[1:])
            changed += zip(held, copies, strict=True)

        def replace_all() -> None:
            for tensor, value in changed:
                tensor.copy_(value)

        return replace_all

    def _state_of(self, part: slice, scales: slice) -> tuple[Tensor, ...]:
        mean, square = self.mean, self.square
        return mean.codes[part], square.codes[part], mean.scales[scales], square.scales[scales]

    def _update(
        self,
        weights: Tensor,
        gradient: Tensor,
        state: Sequence[Tensor],
        scale: float,
        learning_rate: float,
        step: int,
    ) -> None:
        mean_codes, square_codes, mean_scales, square_scales = state
        self._functional.optimizer_update_8bit_blockwise(
            "adam",
            gradient,
            weights,
            mean_codes,
            square_codes,
            self._section.beta1,
            self._section.beta2,
            0.0,  # beta3 and alpha are AdEMAMix's
            0.0,
            self._section.epsilon,
            step,
            learning_rate,
            *self._levels,
            mean_scales,
            square_scales,
            weight_decay=self._decay,
            gnorm_scale=scale,
        )


def chunks(count: int) -> Iterator[tuple[slice, slice]]:
    """Yields (range of at most CHUNK values, range of the scales of its blocks) until `count` values are covered."""
    for start in range(0, count, CHUNK):
        stop = min(start + CHUNK, count)
        yield slice(start, stop), slice(start // BLOCK, -(-stop // BLOCK))
