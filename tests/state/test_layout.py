"""Flat arrays, named tensors and chunks are three views of the same elements."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from agora_protocol.limits import STATE_CHUNK_BYTES
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes

from agora.state import layout
from agora.state.layout import (
    Layout,
    MomentSpec,
    TensorSlot,
    chunk_hashes,
    pack_chunk,
    unpack_chunk,
)
from tests.state.world import state


def slots_of(shapes: list[tuple[int, ...]]) -> tuple[int, list[TensorSlot]]:
    """Slots with a gap after each, and the elements of all, padded as a stage's are."""
    slots, end = [], 0
    for number, shape in enumerate(shapes):
        slots.append(TensorSlot(f"layer.{number}.weight", end, shape))
        end += -(-int(np.prod(shape)) // 16) * 16
    return -(-end // 1024) * 1024, slots


@given(
    st.lists(array_shapes(min_dims=0, max_dims=3, min_side=1, max_side=9), min_size=1, max_size=8), st.integers(0, 99)
)
def test_named_tensors_and_flat_elements_are_the_same(shapes, seed) -> None:
    numel, slots = slots_of(shapes)
    stage = Layout(numel, slots)
    rng = np.random.default_rng(seed)
    tensors = {slot.name: rng.standard_normal(slot.shape).astype(np.float32) for slot in slots}
    flat = stage.flatten(tensors)
    assert flat.shape == (numel,)
    back = stage.views(flat)
    assert list(back) == list(tensors)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(back[name], tensor)
    for view in back.values():
        view[...] = 0
    assert not flat.any(), "what no slot covers is zero"


def test_tensors_of_another_stage_are_named() -> None:
    numel, slots = slots_of([(2, 3), (4,)])
    stage = Layout(numel, slots)
    good = stage.views(np.zeros(numel, np.float32))
    with pytest.raises(ValueError, match="layer.1.weight is missing"):
        stage.flatten({"layer.0.weight": good["layer.0.weight"]})
    with pytest.raises(ValueError, match="more is not a tensor"):
        stage.flatten(good | {"more": np.zeros(1, np.float32)})
    with pytest.raises(ValueError, match=r"layer.0.weight is float32 \(3, 2\)"):
        stage.flatten(good | {"layer.0.weight": np.zeros((3, 2), np.float32)})
    with pytest.raises(ValueError, match="layer.1.weight is float64"):
        stage.flatten(good | {"layer.1.weight": np.zeros(4)})


def moments_of(numel: int, cuts: list[int]) -> tuple[MomentSpec, MomentSpec]:
    """The mean of every element; the square of every second range between these places."""
    edges = sorted({0, *(cut % numel for cut in cuts), numel})
    ranges = [slice(*edge) for edge in pairwise(edges)][::2]
    return MomentSpec("mean", [slice(0, numel)]), MomentSpec("square", ranges, is_square=True)


@given(st.integers(1, 300), st.lists(st.integers(0, 10**6), max_size=6))
def test_chunks_cover_every_element_once_and_carry_its_moments(blocks, cuts) -> None:
    numel = 1024 * blocks
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "STATE_CHUNK_BYTES", 60_000)
        mean, square = moments_of(numel, cuts)
        full = state(numel)
        squares = np.concatenate([full.moments["square"][part] for part in square.ranges])
        moments = {"mean": full.moments["mean"], "square": squares}
        given_state = replace(full, layout=replace(full.layout, moments=(mean, square)), moments=moments)
        stage, parts = given_state.layout, [pack_chunk(given_state, n) for n in range(given_state.layout.chunk_count)]
        assert stage.nbytes == sum(map(len, parts)) == 4 * sum(array.size for array in given_state.arrays.values())
        assert len(parts) == -(-numel // 5000) and max(map(len, parts)) <= 60_000
        arrays = [unpack_chunk(memoryview(part), stage, number) for number, part in enumerate(parts)]
        for number, array in enumerate(given_state.arrays.values()):
            np.testing.assert_array_equal(np.concatenate([chunk[number] for chunk in arrays]), array)
        for number, (weights, _, values) in enumerate(arrays):
            elements, *_ = stage.chunk_places(number)
            inside = np.zeros(numel, bool)
            for part in square.ranges:
                inside[part] = True
            np.testing.assert_array_equal(values, np.square(weights[inside[elements]]))
        assert len(chunk_hashes(given_state)) == 32 * len(parts)


@given(
    st.lists(array_shapes(min_dims=0, max_dims=2, min_side=1, max_side=9), min_size=1, max_size=8), st.integers(0, 255)
)
def test_a_moment_of_some_tensors_holds_them_by_name(shapes, chosen) -> None:
    numel, slots = slots_of(shapes)
    stage = Layout(numel, slots)
    names = {slot.name for number, slot in enumerate(slots) if chosen >> number & 1}
    moment = MomentSpec("square", stage.ranges(lambda slot: slot.name in names))
    flat = np.arange(numel, dtype=np.float32)
    stage.clear_padding(flat)
    kept = np.concatenate([flat[part] for part in moment.ranges] or [np.zeros(0, np.float32)])
    inside = stage.of_moment(moment)
    assert kept.size == moment.numel == inside.numel
    assert inside.views(kept).keys() == names
    for name, tensor in inside.views(kept).items():
        np.testing.assert_array_equal(tensor, stage.views(flat)[name])
    np.testing.assert_array_equal(inside.flatten(inside.views(kept)), kept)


def test_a_chunk_is_never_larger_than_the_protocol_says() -> None:
    nbytes = 12 * state(10**7).layout.chunk_places(0)[0].stop
    assert nbytes <= STATE_CHUNK_BYTES < nbytes + 12
