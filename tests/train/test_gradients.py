"""One gradient cannot fill the sum of a step: its size is bounded by the median of those before it."""

from __future__ import annotations

import asyncio
import math

import numpy as np
import pytest
from agora_protocol.errors import ProtocolError

from agora.core.span_work import ForwardKey, SpanWork
from agora.train.gradients import FIRST_LIMIT, MAX_RECEIVED_RATIO, MIN_SAMPLES, GradientMagnitudeBound
from tests.train.support import batches_for, microbatch_id, pipeline_of, small_manifest, tokens_of, wire


def test_a_gradient_may_be_a_hundred_times_the_median_and_no_larger() -> None:
    bound = GradientMagnitudeBound()
    assert all(bound.record_and_check(size) for size in (1.0, 2.0, 3.0, 2.0, 2.0))
    assert bound.limit == 2.0 * MAX_RECEIVED_RATIO
    assert not bound.record_and_check(1e30) and not bound.record_and_check(math.inf)
    assert bound.record_and_check(150.0) and bound.record_and_check(0.0)


def test_the_first_gradients_have_a_limit_too() -> None:
    bound = GradientMagnitudeBound()
    for _ in range(MIN_SAMPLES - 1):
        assert not bound.record_and_check(1e30) and bound.limit == FIRST_LIMIT


def test_a_minority_of_huge_gradients_does_not_move_the_limit_for_long_and_a_majority_does() -> None:
    bound = GradientMagnitudeBound()
    for number in range(1000):
        if number % 3 == 2:
            assert number < 3 or not bound.record_and_check(1e30)
        else:
            assert bound.record_and_check(1.0)
    assert bound.limit == MAX_RECEIVED_RATIO
    for _ in range(200):
        bound.record_and_check(1000.0)
    assert bound.record_and_check(1000.0), "the model's gradients have become larger: it goes on"


def test_a_gradient_of_1e30_is_refused_and_the_true_one_gives_the_weights_that_it_would_have_without() -> None:
    async def weights_after(lies: bool) -> np.ndarray:
        manifest = small_manifest()
        async with pipeline_of(manifest, ["0", "1"]) as (first, last):
            for number, (batch, *_) in enumerate(batches_for(manifest, 8)):
                ids, microbatch = tokens_of(batch), microbatch_id(number)
                out = await first.forward(SpanWork(microbatch, 0, None, ids, "train"))
                result = await last.run_last_stages(SpanWork(microbatch, 1, out, ids, "train"))
                assert result.gradient is not None
                if lies:
                    garbage = wire(np.full(result.gradient.shape, 1e30, np.float32))
                    with pytest.raises(ProtocolError, match="root mean square"):
                        await first.backward(ForwardKey(microbatch, 0), garbage)
                await first.backward(ForwardKey(microbatch, 0), result.gradient)
            state = await first.export_state(0)
            return np.array(state.weights)

    honest, beside_a_liar = asyncio.run(weights_after(False)), asyncio.run(weights_after(True))
    assert np.array_equal(honest, beside_a_liar)
