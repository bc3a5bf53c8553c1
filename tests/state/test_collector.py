"""Claims about collecting the stages of a run: all of them or none, each consistent, one collection at a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from agora_protocol.errors import Busy, DiskError, LocalError, Unavailable
from agora_protocol.identity import Identity
from agora_protocol.ids import PeerId, Span
from agora_protocol.manifest import SignedManifest, preset
from safetensors import safe_open

from agora.core.live_manifest import LiveManifest
from agora.model import family_of
from agora.state import collector
from agora.state.collector import StageCollector
from agora.state.files import replace_tensors
from agora.state.layout import Layout, MomentSpec, StageState
from agora.swarm.view import PeerView, View
from agora.train.stage import stage_layout
from agora.train.weight_versions import StageWeights
from tests.state.world import Replica, World, flipped, state

MODEL = {"width": 32, "layers": 3, "heads": 2, "key_value_heads": 1, "feed_forward": 64, "context": 32}
MANIFEST = preset("tiny", name="collected", model=MODEL, stages={"count": 3}, optimizer={"name": "adamw"})


@pytest.fixture(scope="module")
def signed() -> SignedManifest:
    return SignedManifest.sign(MANIFEST, Identity.generate())


@pytest.fixture(scope="module")
def layouts() -> list[Layout]:
    """As the peers that hold the stages have them."""
    built = [family_of(MANIFEST.model).build_stage(MANIFEST.layers_of(k), MANIFEST.seed) for k in range(3)]
    weights = [StageWeights(stage, torch.device("cpu")) for stage in built]
    return [each.layout for each in weights]


def averaged(given: StageState) -> StageState:
    """The same state with a moving average, in which the weights are 100 larger."""
    moment = MomentSpec("average", [slice(0, given.layout.numel)])
    layout = replace(given.layout, moments=(*given.layout.moments, moment))
    return replace(given, layout=layout, moments={**given.moments, "average": given.weights + 100})


class Held:
    """A peer that holds stage 1; `hang` makes its export wait for ever."""

    span = Span(1, 1)

    def __init__(self, own: StageState) -> None:
        self.own = own
        self.hang = False
        self.exporting = asyncio.Event()

    async def export_state(self, stage: int) -> StageState:
        assert stage == 1
        self.exporting.set()
        if self.hang:
            await asyncio.Event().wait()
        return self.own


class Scene:
    """Peer "first" gives stage 0, "last" and "late" give stage 2; stage 1 is held here."""

    def __init__(self, signed: SignedManifest, layouts: list[Layout], folder: Path) -> None:
        self.world = World()
        self.states = [averaged(state(layouts[k].numel, value=k + 1.0, step=10 + k, stage=k)) for k in range(3)]
        self.held = Held(self.states[1])
        self.view = View()
        self.add("first", 0)
        self.add("last", 2)
        self.folder = folder / "run" / "collected"
        self.collector = StageCollector(
            LiveManifest(signed.manifest),
            self.folder,
            lambda: [stage_layout(signed.manifest, stage) for stage in range(3)],
            self.held,
            lambda stage: {holder.peer: holder.step_of(stage) for holder in self.view.replicas(stage)},
            self.world,
            self.world.report_violation,
        )

    def add(self, name: str, stage: int, *, claimed: int = 1) -> Replica:
        peer = PeerView(PeerId(name), Span(stage, stage), 1, state="serving", steps=(claimed,))
        self.view = View({**self.view.peers, peer.peer: peer})
        return self.world.add(name, self.states[stage])

    def left(self) -> list[str]:
        """What lies where collections are put."""
        return sorted(path.name for path in self.folder.iterdir()) if self.folder.exists() else []


def played(
    signed: SignedManifest,
    layouts: list[Layout],
    folder: Path,
    scenario: Callable[[Scene], Awaitable[None]],
) -> None:
    async def main() -> None:
        scene = Scene(signed, layouts, folder)
        await asyncio.wait_for(scenario(scene), 30)
        assert scene.world.open == 0 and len(asyncio.all_tasks()) == 1, "nothing is still under way"

    asyncio.run(main())


@pytest.mark.parametrize("average", [False, True])
def test_every_stage_is_written_as_those_who_hold_it_have_it(
    signed: SignedManifest, layouts: list[Layout], tmp_path: Path, average: bool
) -> None:
    async def scenario(scene: Scene) -> None:
        files = await scene.collector.collect(average=average)
        assert [(file.stage, file.step) for file in files] == [(0, 10), (1, 11), (2, 12)]
        for file, layout, given in zip(files, layouts, scene.states, strict=True):
            assert file.path == scene.folder / "1" / f"stage-{file.stage}.safetensors"
            with safe_open(file.path, framework="numpy") as opened:
                assert opened.metadata() == {"run": signed.run_id, "stage": str(file.stage), "step": str(file.step)}
                found = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - it is not a mapping
            expected = layout.views(given.weights + (100 if average else 0))
            assert found.keys() == expected.keys()
            assert all(np.array_equal(found[name], expected[name]) for name in expected)
        assert scene.left() == ["1"] and scene.world.violations == []

    played(signed, layouts, tmp_path, scenario)


def test_an_export_is_read_from_three_peers_and_of_one_liars_average_nothing_comes_in(
    signed: SignedManifest, layouts: list[Layout], tmp_path: Path
) -> None:
    async def scenario(scene: Scene) -> None:
        liar = scene.world.replicas[PeerId("last")]
        for name in ("second", "third"):
            scene.add(name, 2)
        assert liar.state is not None
        false = liar.state.moments["average"].copy()
        false[: len(false) // 3] *= -1
        liar.state = replace(liar.state, moments={**liar.state.moments, "average": false})
        files = await scene.collector.collect(average=True)
        with safe_open(files[2].path, framework="numpy") as opened:
            expected = layouts[2].views(scene.states[2].moments["average"])
            assert all(np.array_equal(opened.get_tensor(name), expected[name]) for name in expected)
        assert [peer for peer, _ in scene.world.violations] == ["last"]
        assert [file.is_compared for file in files] == [False, True, True], "stage 0 has one holder, 1 is held here"

    played(signed, layouts, tmp_path, scenario)


def test_a_collection_stays_while_a_later_one_is_made_for_whoever_still_reads_it(
    signed: SignedManifest, layouts: list[Layout], tmp_path: Path
) -> None:
    async def scenario(scene: Scene) -> None:
        first = await scene.collector.collect()
        # What earlier versions, and collections that were killed, have left.
        (scene.folder / "stage-3.safetensors").write_bytes(b"of a life before")
        (scene.folder / ".7.0123.new").mkdir()
        scene.held.own = replace(scene.held.own, step=30)
        second = await scene.collector.collect()
        assert [file.step for file in first] == [10, 11, 12] and [file.step for file in second] == [10, 30, 12]
        for files in (first, second):
            for file in files:
                with safe_open(file.path, framework="numpy") as opened:
                    assert opened.metadata()["step"] == str(file.step)
        assert scene.left() == ["1", "2"]
        third = await scene.collector.collect()
        assert scene.left() == ["2", "3"] and {file.path.parent.name for file in third} == {"3"}

    played(signed, layouts, tmp_path, scenario)


def test_a_stage_that_nobody_holds_is_named_before_anything_is_fetched(
    signed: SignedManifest, layouts: list[Layout], tmp_path: Path
) -> None:
    async def scenario(scene: Scene) -> None:
        scene.view = scene.view.without(PeerId("last"))
        with pytest.raises(Unavailable, match=r"stage 2 .*no peer .* serves it; start a peer .*--stages 2`") as caught:
            await scene.collector.collect()
        assert caught.value.stage == 2
        assert scene.world.asked() == 0 and scene.left() == []

    played(signed, layouts, tmp_path, scenario)


def test_replicas_that_came_meanwhile_are_asked_when_the_others_fail(
    signed: SignedManifest, layouts: list[Layout], tmp_path: Path
) -> None:
    async def scenario(scene: Scene) -> None:
        liar = scene.world.replicas[PeerId("last")]

        def lie(answer, _):
            if "late" not in scene.world.replicas:
                scene.add("late", 2)
            return flipped(answer)

        liar.fault = lie
        assert [file.step for file in await scene.collector.collect()] == [10, 11, 12]
        assert [peer for peer, _ in scene.world.violations] == ["last"]

    played(signed, layouts, tmp_path, scenario)


def test_what_no_replica_can_give_names_the_stage_and_each_reason_and_leaves_nothing(
    signed: SignedManifest, layouts: list[Layout], tmp_path: Path
) -> None:
    async def scenario(scene: Scene) -> None:
        scene.world.replicas[PeerId("last")].state = None
        with pytest.raises(Unavailable, match=r"stage 2 .*last: has no snapshot .*; start a peer .*--stages 2`"):
            await scene.collector.collect()
        assert scene.left() == []

    played(signed, layouts, tmp_path, scenario)


def test_the_furthest_replicas_are_asked_first(signed: SignedManifest, layouts: list[Layout], tmp_path: Path) -> None:
    async def scenario(scene: Scene) -> None:
        for number in range(6):
            scene.add(f"replica-{number}", 2, claimed=10 + number)
        await scene.collector.collect()
        asked = {peer for peer, replica in scene.world.replicas.items() if replica.calls["GetState"]}
        assert asked == {"first", "replica-5", "replica-4", "replica-3", "replica-2"}

    played(signed, layouts, tmp_path, scenario)


def test_one_collection_at_a_time_and_a_cancelled_one_makes_way(
    signed: SignedManifest, layouts: list[Layout], tmp_path: Path
) -> None:
    async def scenario(scene: Scene) -> None:
        scene.held.hang = True
        first = asyncio.create_task(scene.collector.collect())
        await scene.held.exporting.wait()
        with pytest.raises(Busy, match="for somebody else"):
            await scene.collector.collect()
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert scene.left() == []
        scene.held.hang = False
        assert len(await scene.collector.collect()) == 3

    played(signed, layouts, tmp_path, scenario)


def test_a_daemon_that_leaves_ends_it_with_a_word_to_the_asker(
    signed: SignedManifest, layouts: list[Layout], tmp_path: Path
) -> None:
    async def scenario(scene: Scene) -> None:
        hanging = scene.world.replicas[PeerId("first")]
        hanging.hang_after = 1
        asker = asyncio.create_task(scene.collector.collect())
        while not hanging.open_chunks:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        scene.collector.close()
        with pytest.raises(LocalError, match="is leaving, and has not collected all stages"):
            await asker
        with pytest.raises(LocalError, match="is leaving; ask another one"):
            await scene.collector.collect()
        assert scene.left() == []

    played(signed, layouts, tmp_path, scenario)


def test_the_loop_goes_on_while_files_are_written(
    signed: SignedManifest, layouts: list[Layout], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slowly(*arguments: object) -> None:
        time.sleep(0.2)
        replace_tensors(*arguments)

    monkeypatch.setattr(collector, "replace_tensors", slowly)

    async def scenario(scene: Scene) -> None:
        asker, ticks = asyncio.create_task(scene.collector.collect()), 0
        while not asker.done():
            ticks += 1
            await asyncio.sleep(0.01)
        assert len(asker.result()) == 3 and ticks > 20

    played(signed, layouts, tmp_path, scenario)


def test_a_disk_without_room_is_said_before_anything_is_fetched(
    signed: SignedManifest, layouts: list[Layout], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collector, "SPARE_BYTES", 2**62)

    async def scenario(scene: Scene) -> None:
        with pytest.raises(DiskError, match=r"need 4611686018\.4 GB .* are free; free some space"):
            await scene.collector.collect()
        assert scene.world.asked() == 0 and scene.left() == []

    played(signed, layouts, tmp_path, scenario)
