"""A state is believed when others have the same bytes, or lie as near as replicas do; who gives another one pays."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from agora_protocol.ids import PeerId
from agora_protocol.messages import Sketches
from agora_protocol.tensors import WireTensor

from agora.core.calls import Reply
from agora.core.step_schedule import ONLY_ALL_REDUCE, SyncSchedule
from agora.state.comparison import FAR, ChunkSample, distance, judge_sample, sketch_chunk
from agora.state.layout import AVERAGE, OUTER_PARAMETERS, VELOCITY, Flat, Layout, MomentSpec, StageState, TensorSlot
from agora.state.state_fetch import StateFetch
from tests.state.world import CHANGE_RULE, World, chunks, layout_of, state
from tests.virtual_time import run

NUMEL = chunks(5.5)
RANDOM = np.random.default_rng(7)
TRUE = RANDOM.normal(0, 0.02, 4096).astype(np.float32)
GARBAGE = RANDOM.normal(0, 0.02, 4096).astype(np.float32)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Virtual time must not pass while a real thread works."""

    async def inline(work, *arguments):
        return work(*arguments)

    monkeypatch.setattr(asyncio, "to_thread", inline)
    return


def drifted(by: float) -> np.ndarray:
    return (TRUE + by * 0.02 * RANDOM.normal(0, 1, TRUE.size)).astype(np.float32)


def test_distances_are_relative_to_the_larger_of_the_two() -> None:
    assert distance(TRUE, TRUE) == 0.0 and distance(0 * TRUE, 0 * TRUE) == 0.0
    assert distance(TRUE, 0 * TRUE) == pytest.approx(1.0) and 1.3 < distance(TRUE, GARBAGE) < 1.5
    assert distance(TRUE, 1e30 * TRUE) == pytest.approx(1.0) and distance(TRUE, np.inf * TRUE) == np.inf


@pytest.mark.parametrize(
    ("own", "others", "verdict"),
    [
        (TRUE, [], "plausible"),
        (TRUE, [drifted(0.1)], "plausible"),
        (TRUE, [GARBAGE], "undecided"),
        (0 * TRUE, [TRUE], "undecided"),
        (drifted(0.02), [TRUE, TRUE], "plausible"),
        (drifted(0.3), [drifted(0.3), drifted(0.3)], "plausible"),
        (GARBAGE, [TRUE, drifted(0.1)], "corrupt"),
        (2 * TRUE, [TRUE, TRUE], "corrupt"),
        (0 * TRUE, [TRUE, TRUE], "corrupt"),
        (TRUE, [GARBAGE, drifted(0.1)], "plausible"),
    ],
)
def test_a_chunk_is_plausible_when_it_is_near_another_ones(
    own: np.ndarray, others: list[np.ndarray], verdict: str
) -> None:
    assert judge_sample(ChunkSample(own, 10), [ChunkSample(other, 10) for other in others]) == verdict


def test_replicas_of_different_steps_may_differ_more_but_not_without_bound() -> None:
    apart = drifted(0.3)
    assert judge_sample(ChunkSample(apart, 10), [ChunkSample(TRUE, 10), ChunkSample(TRUE, 10)]) == "corrupt"
    assert judge_sample(ChunkSample(apart, 18), [ChunkSample(TRUE, 10), ChunkSample(TRUE, 10)]) == "plausible"
    assert distance(GARBAGE, TRUE) > FAR
    assert judge_sample(ChunkSample(GARBAGE, 10_000), [ChunkSample(TRUE, 10), ChunkSample(TRUE, 10)]) == "corrupt"


async def fetched(world: World, **options: object):
    fetch = StateFetch(world, 0, layout_of(NUMEL), world.report_violation, CHANGE_RULE, **options)
    return await fetch.run(list(world.replicas), deadline=asyncio.get_running_loop().time() + 300.0)


@pytest.mark.parametrize("honest", [2, 3])
def test_whoever_offers_a_later_step_with_other_weights_pays_and_the_state_is_the_honest_ones(honest: int) -> None:
    async def work() -> None:
        world = World()
        for number in range(honest):
            world.add(f"honest {number}", state(NUMEL, value=1.0, step=100, agreed_step=100, history_hash=5))
        world.add("liar", state(NUMEL, value=-40.0, step=105, agreed_step=105, history_hash=6))
        got = await fetched(world)
        assert got.step == 100 and np.array_equal(got.weights, world.replicas["honest 0"].state.weights)
        assert {peer for peer, _ in world.violations} == {"liar"}

    run(work())


def test_a_liar_that_claims_the_others_history_gets_no_chunk_in() -> None:
    async def work() -> None:
        world = World()
        for number in range(2):
            world.add(f"honest {number}", state(NUMEL, value=1.0, step=100, agreed_step=100, history_hash=5))
        world.add("liar", state(NUMEL, value=-40.0, step=100, agreed_step=100, history_hash=5))
        got = await fetched(world)
        assert np.array_equal(got.weights, world.replicas["honest 0"].state.weights)
        assert {peer for peer, _ in world.violations} == {"liar"}

    run(work())


def test_of_two_that_disagree_the_later_step_is_not_taken_and_nobody_pays() -> None:
    async def work() -> None:
        world = World()
        world.add("honest", state(NUMEL, value=1.0, step=100, agreed_step=100, history_hash=5))
        world.add("liar", state(NUMEL, value=-40.0, step=105, agreed_step=105, history_hash=6))
        got = await fetched(world)
        assert got.step == 100 and not world.violations

    run(work())


def test_a_state_at_the_median_and_799_is_not_even_fetched() -> None:
    async def work() -> None:
        world = World()
        for number in range(2):
            world.add(f"honest {number}", state(NUMEL, value=1.0, step=100, agreed_step=100, history_hash=5))
        liar = world.add("liar", state(NUMEL, value=-40.0, step=899, agreed_step=899, history_hash=6))
        got = await fetched(world, highest_plausible_step=lambda: 200.0)
        assert got.step == 100 and not liar.calls["GetChunk"]

    run(work())


def test_equal_chunks_are_compared_without_being_fetched_twice() -> None:
    async def work() -> None:
        world = World()
        for name in "abc":
            world.add(name, state(NUMEL))
        await fetched(world)
        assert world.asked() == 6

    run(work())


# --- all arrays of all chunks: one liar among honest replicas

COUNT = 12
WHOLE = [slice(0, COUNT * 2**18)]
LAYOUT = Layout(
    COUNT * 2**18,
    [TensorSlot("all", 0, (COUNT * 2**18,))],
    [MomentSpec("mean", WHOLE), MomentSpec("square", WHOLE, is_square=True), MomentSpec(AVERAGE, WHOLE)],
)
ARRAYS = ["weights", "mean", "square", AVERAGE]


def learnt(layout: Layout = LAYOUT, seed: int = 1) -> dict[str, Flat]:
    """Arrays of a stage after 500 steps."""
    rng = np.random.default_rng(seed)
    weights = rng.normal(0, 0.02, layout.numel).astype(np.float32)
    arrays = {"weights": weights, "mean": 1e-4 * weights[::-1], "square": np.square(1e-3 * weights), AVERAGE: weights}
    arrays |= {OUTER_PARAMETERS: weights * np.float32(1.01), VELOCITY: 1e-3 * weights[::-1]}
    return {name: arrays[name].copy() for name in ["weights", *(moment.name for moment in layout.moments)]}


TRUTH = learnt()


def replica(
    arrays: Mapping[str, Flat], layout: Layout = LAYOUT, step: int = 500, sync_schedule: SyncSchedule = ONLY_ALL_REDUCE
) -> StageState:
    moments = {name: values for name, values in arrays.items() if name != "weights"}
    agreed_step = 18 if sync_schedule.is_inner(step) else step
    return StageState(0, step, step, 1000, layout, arrays["weights"], moments, agreed_step, 77, sync_schedule)


def rounded(arrays: Mapping[str, Flat], seed: int) -> dict[str, Flat]:
    """As another kind of device has them."""
    rng = np.random.default_rng(seed)
    return {
        name: (values * (1 + 1e-6 * rng.normal(0, 1, values.size))).astype(np.float32)
        for name, values in arrays.items()
    }


def poisoned(
    arrays: Mapping[str, Flat], how: str, name: str, chunks: Sequence[int], layout: Layout = LAYOUT
) -> dict[str, Flat]:
    changed = {each: values.copy() for each, values in arrays.items()}
    for chunk in chunks:
        place = layout.chunk_places(chunk)[list(arrays).index(name)]
        part = changed[name][place]
        part[:] = {"negated": -part, "zero": 0 * part, "huge": 1e4 + 0 * part, "small": part * 0.25}[how]
        if name == "square":
            np.abs(part, out=part)
    return changed


async def fetched_from(world: World, layout: Layout = LAYOUT) -> tuple[StageState, StateFetch]:
    fetch = StateFetch(world, 0, layout, world.report_violation, CHANGE_RULE)
    sources = list(world.replicas)
    return await fetch.run(sources, deadline=asyncio.get_running_loop().time() + 300.0), fetch


def worst(got: StageState, truth: Mapping[str, Flat]) -> float:
    """The largest relative error of any chunk of any array."""
    errors = []
    for chunk in range(got.layout.chunk_count):
        for (name, values), place in zip(truth.items(), got.layout.chunk_places(chunk), strict=True):
            errors.append(distance(got.arrays[name][place], values[place]))
    return max(errors)


POISONS = [
    *(("negated", name, [7]) for name in ("weights", "mean", AVERAGE)),
    *(("zero", name, [0]) for name in ARRAYS),
    *(("huge", name, [COUNT - 1]) for name in ARRAYS),
    ("small", "square", [3]),
    ("negated", AVERAGE, range(COUNT)),
    ("zero", "square", range(COUNT)),
    ("huge", "mean", range(COUNT)),
]


@pytest.mark.parametrize(("how", "name", "where"), POISONS)
@pytest.mark.parametrize(("count", "kinds"), [(4, "one kind"), (4, "kinds"), (16, "one kind"), (16, "kinds")])
def test_one_fast_liar_gets_nothing_false_into_a_state_and_pays(
    how: str, name: str, where: Sequence[int], count: int, kinds: str
) -> None:
    async def work() -> None:
        world = World()
        world.add("liar", replica(poisoned(TRUTH, how, name, where)), uplink=200e6)
        for number in range(count - 1):
            given = TRUTH if kinds == "one kind" or count == 16 and number > 3 else rounded(TRUTH, number)
            world.add(f"honest {number}", replica(given), uplink=10e6)
        got, fetch = await fetched_from(world)
        assert worst(got, TRUTH) < 1e-4
        assert {peer for peer, _ in world.violations} <= {"liar"}
        liar = world.replicas[PeerId("liar")]
        assert world.violations or not any(liar.given[chunk] for chunk in where)
        assert fetch.is_compared

    run(work())


@pytest.mark.parametrize("count", [2, 3, 4, 16])
def test_honest_replicas_of_one_kind_are_compared_without_a_byte_more(count: int) -> None:
    async def work() -> None:
        world = World()
        for number in range(count):
            world.add(f"honest {number}", replica(TRUTH))
        got, fetch = await fetched_from(world)
        assert worst(got, TRUTH) == 0 and fetch.is_compared and not world.violations
        assert world.asked() == COUNT and not any(each.calls["GetSketches"] for each in world.replicas.values())

    run(work())


@pytest.mark.parametrize("count", [2, 3, 4])
def test_honest_replicas_of_several_kinds_cost_some_kilobytes_and_no_violation(count: int) -> None:
    async def work() -> None:
        world = World()
        for number in range(count):
            world.add(f"honest {number}", replica(rounded(TRUTH, number)), uplink=20e6)
        got, fetch = await fetched_from(world)
        assert worst(got, TRUTH) < 1e-4 and fetch.is_compared and not world.violations
        sketches = sum(each.calls["GetSketches"] for each in world.replicas.values())
        assert sum(each.given.total() for each in world.replicas.values()) == COUNT and sketches == min(count, 3)

    run(work())


def test_a_replica_of_another_kind_than_most_gives_nothing_and_is_no_offender() -> None:
    async def work() -> None:
        world = World()
        for number in range(3):
            world.add(f"usual {number}", replica(TRUTH))
        other = world.add("other", replica(rounded(TRUTH, 5)), uplink=200e6)
        got, _ = await fetched_from(world)
        assert worst(got, TRUTH) == 0 and not world.violations
        assert other.given.total() == 1, "one chunk, to see that it only rounds differently"

    run(work())


def test_a_state_of_the_only_source_is_taken_and_called_uncompared() -> None:
    async def work() -> None:
        world = World()
        world.add("only", replica(TRUTH))
        got, fetch = await fetched_from(world)
        assert worst(got, TRUTH) == 0 and not fetch.is_compared

    run(work())


def test_a_liar_that_sketches_falsely_drives_no_honest_source_out() -> None:
    def lie(answer: Reply, _: int) -> Reply:
        if not isinstance(answer.message, Sketches):
            return answer
        tensor = answer.tensors[0]
        sums = -3 * np.frombuffer(tensor.data, "<f4")
        return Reply(answer.message, [WireTensor("float32", tensor.shape, sums.data.cast("B"))])

    async def work() -> None:
        world = World()
        for number in range(3):
            world.add(f"honest {number}", replica(rounded(TRUTH, number)), uplink=20e6)
        world.add("liar", replica(rounded(TRUTH, 9)), uplink=20e6, fault=lie)
        got, _ = await fetched_from(world)
        assert worst(got, TRUTH) < 1e-4
        assert not {peer for peer, _ in world.violations} - {"liar"}

    run(work())


INNER_STEPS = SyncSchedule(0, 10, 4)
OUTER = LAYOUT.at_step(20, INNER_STEPS)


def inner(seed: int, step: int) -> StageState:
    """A replica in its inner steps: outer parameters and velocity are all replicas', the rest is its own."""
    arrays, rng = learnt(OUTER), np.random.default_rng(seed)
    for name in ("weights", AVERAGE):
        arrays[name] += (0.3 * 0.02 * rng.normal(0, 1, OUTER.numel)).astype(np.float32)
    arrays["mean"] = (2e-6 * rng.normal(0, 1, OUTER.numel)).astype(np.float32)
    arrays["square"] *= np.exp(rng.normal(0, 0.5, OUTER.numel)).astype(np.float32)
    return replica(arrays, OUTER, step, INNER_STEPS)


@pytest.mark.parametrize("steps", [(20, 20, 20), (20, 23, 31)])
def test_replicas_in_their_inner_steps_differ_and_are_no_offenders(steps: tuple[int, ...]) -> None:
    async def work() -> None:
        world = World()
        for number, step in enumerate(steps):
            world.add(f"honest {number}", inner(number, step), uplink=20e6)
        _, fetch = await fetched_from(world)
        assert not world.violations and fetch.is_compared

    run(work())


@pytest.mark.parametrize("name", [OUTER_PARAMETERS, VELOCITY])
def test_a_false_outer_parameter_is_found_among_replicas_in_their_inner_steps(name: str) -> None:
    async def work() -> None:
        world = World()
        for number in range(3):
            world.add(f"honest {number}", inner(number, 20 + number), uplink=10e6)
        lie = inner(9, 20)
        everywhere = range(OUTER.chunk_count)
        arrays = poisoned(lie.arrays, "negated", name, everywhere, OUTER)
        world.add("liar", replica(arrays, OUTER, 20, INNER_STEPS), uplink=200e6)
        got, _ = await fetched_from(world)
        assert distance(got.arrays[name], learnt(OUTER)[name]) < 1e-6
        assert {peer for peer, _ in world.violations} == {"liar"}

    run(work())


# --- sketches


def test_a_sketch_is_that_of_the_vectors() -> None:
    path = Path(__file__).parents[2] / "protocol" / "vectors" / "sketches.json"
    for vector in json.loads(path.read_text(encoding="ascii")):
        values = np.array(vector["values"], np.float32)
        moments = [MomentSpec("square", [slice(0, 40)], is_square=True)]
        layout = Layout(40, [TensorSlot("all", 0, (40,))], moments)
        made = sketch_chunk([values, np.abs(values)], layout, vector["chunk"], bytes.fromhex(vector["seed"]["hex"]))
        np.testing.assert_allclose(made[1 if vector["square"] else 0], vector["sums"], atol=2e-6)


def test_the_difference_of_two_sketches_is_about_as_long_as_that_of_the_arrays() -> None:
    layout, ratios = Layout(4096, [TensorSlot("all", 0, (4096,))]), []
    for chunk in range(500):
        a, b = (sketch_chunk([values], layout, chunk, bytes(16))[0] for values in (TRUE, drifted(0.1)))
        ratios.append(float(np.linalg.norm(a - b)) / (0.1 * 0.02 * 64))
    assert min(ratios) > 0.3 and max(ratios) < 1.8 and np.mean(np.square(ratios)) == pytest.approx(1.0, abs=0.1)
