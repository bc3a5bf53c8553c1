"""Muon: steps for a stage's hidden matrices along the orthogonalised mean of their gradients.

Sources: Jordan et al., Muon (kellerjordan.github.io/posts/muon, 2024); size of the update and weight
decay: Liu et al., Muon is Scalable for LLM Training (arXiv 2502.16982), section 2.2.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Final

import torch
from agora_protocol.manifest_sections import OptimizerSection
from torch import Tensor

from agora.state.layout import Layout, TensorSlot
from agora.train.device import has_native_bf16
from agora.train.optimizer_offload import OptimizerOffload, StateAccess, bytes_on_device
from agora.train.weight_versions import tensor_in

ITERATIONS: Final = 5
# Coefficients of an iteration's polynomial. Five iterations map singular values in 0.01..1 to 0.68..1.2 (Jordan).
LINEAR, CUBIC, QUINTIC = 3.4445, -4.7750, 2.0315
# Root mean square of an update's elements at rate 1: about that of AdamW, so that one learning rate fits the two.
UPDATE_RMS: Final = 0.2
SMALLEST_NORM: Final = 1e-30
# Maximum number of elements per batch of orthogonalised matrices: larger ones are no faster and take more memory.
BATCH_ELEMENTS: Final = 1 << 24
# For matrices with at least this many rows, computing symmetric products in halves is faster.
MIN_SPLIT_ROWS: Final = 128
# From MIN_SPLIT_ROWS on, matrices with more than this many times as many columns as rows need fewer operations by way
# of x x^T.
MIN_GRAM_RATIO: Final = 1.5


class MuonMatrices:
    """The Muon optimizer for the hidden matrices of one stage.

    | quantity  | formula, for a matrix with gradient g and weights w                                          |
    |-----------|----------------------------------------------------------------------------------------------|
    | mean      | momentum * mean + (1 - momentum) * g                                                         |
    | direction | orthogonalise(momentum * mean + (1 - momentum) * g), with the new mean (Nesterov)            |
    | weights   | w * (1 - rate * weight_decay) - rate * UPDATE_RMS * sqrt(larger side) * direction            |

    The mean is its only state; the optimizer owns it. Equal gradients give equal bits on equal machines.
    """

    def __init__(self, section: OptimizerSection, layout: Layout, mean: Tensor, offload: OptimizerOffload) -> None:
        """mean: float32 [numel], kept at `offload`."""
        self._momentum = section.momentum
        self._weight_decay = section.weight_decay
        self._mean = mean
        self._offload = offload
        self._dtype = torch.bfloat16 if has_native_bf16(offload.device) else torch.float32
        self._ranges = list(offload.pieces(layout.ranges(lambda slot: slot.is_hidden_matrix)))
        of_one_shape = defaultdict(list)
        for slot in layout.slots:
            if slot.is_hidden_matrix:
                of_one_shape[min(slot.shape), max(slot.shape)].append(slot)
        self._batches: list[list[TensorSlot]] = []
        for (rows, columns), slots in of_one_shape.items():
            size = max(BATCH_ELEMENTS // (rows * columns), 1)
            self._batches += [slots[first : first + size] for first in range(0, len(slots), size)]

    def directions(self, gradient: Tensor, scale: float = 1.0) -> Iterator[tuple[TensorSlot, Tensor]]:
        """Yields for each hidden matrix its direction along scale * gradient [numel], with the longer side as columns.

        Changes nothing.
        """
        for slots in self._batches:
            matrices = torch.stack([wide_view(gradient, slot) for slot in slots]).mul_(scale)
            mean = torch.stack([wide_view(self._mean, slot) for slot in slots]).to(self._offload.device)
            matrices.lerp_(mean.lerp_(matrices, 1.0 - self._momentum), self._momentum)
            del mean
            yield from zip(slots, orthogonalise(matrices, self._dtype), strict=True)

    def move(self, weights: Tensor, directions: Iterable[tuple[TensorSlot, Tensor]], rate: float) -> None:
        """Changes the hidden matrices in `weights` [numel] in place by one step along their directions.

        With directions that exist already nothing is allocated.
        """
        for slot, direction in directions:
            matrix = wide_view(weights, slot)
            matrix.mul_(1.0 - rate * self._weight_decay)
            matrix.sub_(direction, alpha=rate * UPDATE_RMS * math.sqrt(direction.shape[1]))

    def update_mean(self, gradient: Tensor, access: StateAccess) -> None:
        """Changes the mean in place by the gradient [numel]; allocates nothing."""
        for elements in self._ranges:
            with access.on_device(self._mean[elements]) as (mean,):
                mean.lerp_(gradient[elements], 1.0 - self._momentum)

    def bytes_on_device(self) -> int:
        """Returns the most that update_mean needs for one piece of the mean."""
        return max((bytes_on_device(self._mean[elements]) for elements in self._ranges), default=0)


def wide_view(flat: Tensor, slot: TensorSlot) -> Tensor:
    """Returns a view of the matrix at `slot` in `flat`, transposed if it has more rows than columns."""
    matrix = tensor_in(flat, slot)
    return matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix


def orthogonalise(matrices: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns about U V^T of each matrix U S V^T, float32 [n, rows, columns], by Newton-Schulz iterations in `dtype`.

    matrices: float32 [n, rows, columns], rows <= columns; not changed. The singular values of the result lie in
    0.68 to 1.2, except that those below 1 % of the matrix's norm become smaller ones; a matrix of zeros stays zero.
    """
    norms = torch.linalg.matrix_norm(matrices, keepdim=True)
    x: Tensor = (matrices / norms.clamp_min(SMALLEST_NORM)).to(dtype)
    if dtype == torch.float32 and x.shape[1] >= MIN_SPLIT_ROWS and x.shape[2] > MIN_GRAM_RATIO * x.shape[1]:
        return _factor_from_gram(symmetric_product(x, x.mT)) @ x
    for _ in range(ITERATIONS):
        polynomial = _polynomial(symmetric_product(x, x.mT))
        x = torch.baddbmm(x, polynomial, x, beta=LINEAR)
    return x.float()


def symmetric_product(a: Tensor, b: Tensor) -> Tensor:
    """Returns a @ b [n, rows, rows] for matrices whose product is symmetric, which the caller guarantees.

    One off-diagonal quarter is copied from the other, and the diagonal quarters are computed in the same way: about 5/8
    of the work.
    """
    rows = a.shape[1]
    # In bf16 a plain product: a GPU prefers one large product to several small ones.
    if rows < MIN_SPLIT_ROWS or a.dtype != torch.float32:
        return a @ b
    half = rows // 2
    product = a.new_empty(a.shape[0], rows, rows)
    product[:, :half, :half] = symmetric_product(a[:, :half], b[:, :, :half])
    product[:, half:, half:] = symmetric_product(a[:, half:], b[:, :, half:])
    corner = a[:, :half] @ b[:, :, half:]
    product[:, :half, half:] = corner
    product[:, half:, :half] = corner.mT
    return product


def _polynomial(gram: Tensor) -> Tensor:
    return symmetric_product(gram, gram).mul_(QUINTIC).add_(gram, alpha=CUBIC)


def _factor_from_gram(gram: Tensor) -> Tensor:
    # Returns Q such that Q x is what ITERATIONS iterations make of x. Each multiplies x by a polynomial of x x^T. These
    # polynomials are symmetric and commute, so they are multiplied together first, and x, which has more columns, once.
    # Not in bf16: small singular values would be lost in x x^T.
    factor = polynomial = _with_linear_term(_polynomial(gram))
    for _ in range(ITERATIONS - 1):
        gram = symmetric_product(polynomial, symmetric_product(polynomial, gram))
        polynomial = _with_linear_term(_polynomial(gram))
        factor = symmetric_product(polynomial, factor)
    return factor


def _with_linear_term(polynomial: Tensor) -> Tensor:
    polynomial.diagonal(dim1=1, dim2=2).add_(LINEAR)
    return polynomial
