"""Where a span's tensors of the base model come from: the owner's files, the store, the other peers, or a sentence."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from agora_protocol.errors import DiskError, Refused
from agora_protocol.ids import PeerId, Span
from agora_protocol.manifest import Manifest, preset
from agora_protocol.manifest_model import ADAPTER_FILE
from agora_protocol.messages import GetBase
from safetensors.torch import load_file, save_file

from agora.core.clock import loop_time
from agora.model import family_of
from agora.net.rpc.connection import IncomingCall
from agora.node.daemon_context import StartPhases, SystemdNotifier
from agora.node.paths import Home
from agora.node.peer import base_supply
from agora.node.peer.base_supply import BaseSupply, MissingTensors, describe_fetch
from agora.observe import events
from agora.swarm.peer_score import Violation
from agora.swarm.view import PeerView, View
from agora.tuning.base import fetch
from agora.tuning.base.model_files import tensor_list_hash, weight_files
from agora.tuning.base.store import BaseModelError
from tests.memory_network import MemoryCall, MemoryNetwork
from tests.model.tiny_models import make_model, manifest_of, save
from tests.tuning.test_going_on_from_adapter import begun, make_adapter, make_base

STAGES = 3


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    return save(make_model("qwen2"), tmp_path / "whole", "14KB")


def run_of(folder: Path, **model: Any) -> Manifest:
    hash_ = tensor_list_hash([folder / name for name in weight_files(folder)])
    return manifest_of(folder, STAGES, model={"tensors_hash": hash_, **model})


class Swarm:
    """Peers in memory, each with a data directory, and a BaseSupply instead of a daemon."""

    def __init__(self, root: Path, manifest: Manifest) -> None:
        self.root, self.manifest = root, manifest
        self.network = MemoryNetwork()
        self.views: dict[PeerId, PeerView] = {}
        self.supplies: dict[PeerId, BaseSupply] = {}
        self.events: list[events.Event] = []
        self.violations: list[tuple[PeerId, Violation]] = []

    def add(
        self,
        name: str,
        folder: Path | None = None,
        *,
        adapter: Path | None = None,
        stage: int = 0,
        state: str = "serving",
    ) -> BaseSupply:
        peer = PeerId(name)
        context = SimpleNamespace(
            home=Home(self.root / name),
            settings=SimpleNamespace(named_base_model=folder, named_adapter=adapter),
            me=peer,
            report_event=self.events.append,
            phases=StartPhases(self.events.append, SystemdNotifier({})),
        )
        joined = self.network.join(peer, self.handle)
        supply = BaseSupply(context, self.manifest, joined, lambda: View(self.views), self.report_violation)
        self.views[peer] = PeerView(peer, Span(stage, stage), 1, state=state)
        self.supplies[peer] = supply
        joined.handler = lambda call: self.handle(call, peer)
        return supply

    async def handle(self, call: MemoryCall, peer: PeerId = PeerId("")) -> Any:
        return await self.supplies[peer].answer(IncomingCall(call.peer, call.message, [], call.deadline))

    def report_violation(self, peer: PeerId, violation: Violation, text: str, dedup_key: str = "") -> None:
        self.violations.append((peer, violation))

    @property
    def notes(self) -> list[str]:
        return [event.note for event in self.events if isinstance(event, events.StartStep) and event.name == "base"]

    def assert_stage(self, stage: int, folder: Path | None, whole: Path) -> None:
        """The stage that is built from `folder` is that of the whole model."""
        family, layers = family_of(self.manifest.model), self.manifest.layers_of(stage)
        built, expected = (dict(family.build_stage(layers, 0, f).named_parameters()) for f in (folder, whole))
        assert built.keys() == expected.keys()
        assert all(torch.equal(built[name], expected[name]) for name in built)


def test_a_machine_with_all_files_fetches_nothing(tmp_path: Path, whole: Path) -> None:
    async def work() -> None:
        swarm = Swarm(tmp_path, run_of(whole))
        supply = swarm.add("a", whole)
        assert supply.folder_to_check() == whole
        assert await supply.provide(Span(0, STAGES - 1)) == whole
        assert not swarm.notes
        assert not swarm.network.calls
        assert not (tmp_path / "a").exists()

    asyncio.run(work())


def test_a_machine_without_files_fetches_its_spans_tensors_and_a_move_fetches_the_rest(
    tmp_path: Path, whole: Path
) -> None:
    async def work() -> None:
        swarm = Swarm(tmp_path, run_of(whole))
        swarm.add("giver", whole)
        supply = swarm.add("joiner")
        checked = supply.folder_to_check()
        assert checked is not None and checked.is_dir()
        family_of(swarm.manifest.model).check_machine(checked)
        folder = await supply.provide(Span(0, 0))
        swarm.assert_stage(0, folder, whole)
        with pytest.raises(BaseModelError):
            swarm.assert_stage(1, folder, whole)
        swarm.assert_stage(1, await supply.provide(Span(1, 1)), whole)
        assert await supply.provide(Span(0, 1)) == folder
        first, second, third = swarm.notes
        assert first.endswith(" from 1 peer")
        assert second.endswith(" from 1 peer")
        assert third.endswith("tensors are here from earlier")
        assert not swarm.violations

    asyncio.run(work())


def test_a_folder_that_lacks_some_files_is_used_for_the_others(tmp_path: Path, whole: Path) -> None:
    async def work() -> None:
        swarm = Swarm(tmp_path, run_of(whole))
        part = tmp_path / "part"
        part.mkdir()
        for name in weight_files(whole)[::2]:
            (part / name).write_bytes((whole / name).read_bytes())
        swarm.add("giver", whole)
        supply = swarm.add("joiner", part)
        folder = await supply.provide(Span(1, 1))
        swarm.assert_stage(1, folder, whole)
        assert folder is not None and folder != part
        total = len(
            dict(family_of(swarm.manifest.model).make_meta_stage(swarm.manifest.layers_of(1)).named_parameters())
        )
        fetched = len(list((folder / "tensors").glob("*.safetensors")))
        assert 0 < fetched < total
        assert swarm.notes[0].startswith(f"fetched {fetched} of ")

    asyncio.run(work())


def test_who_has_fetched_tensors_gives_them_to_the_next(tmp_path: Path, whole: Path) -> None:
    async def work() -> None:
        swarm = Swarm(tmp_path, run_of(whole))
        swarm.add("giver", whole)
        await swarm.add("first", stage=1).provide(Span(1, 1))
        del swarm.views[PeerId("giver")]
        swarm.assert_stage(1, await swarm.add("second", stage=1).provide(Span(1, 1)), whole)
        assert swarm.network.calls[PeerId("second"), PeerId("giver")] == 0

    asyncio.run(work())


def test_a_second_run_with_the_same_model_on_the_same_machine_fetches_nothing(tmp_path: Path, whole: Path) -> None:
    async def work() -> None:
        swarm = Swarm(tmp_path, run_of(whole))
        swarm.add("giver", whole)
        await swarm.add("joiner").provide(Span(0, 0))
        other = Swarm(tmp_path, run_of(whole, context=8))
        assert other.manifest.run_id != swarm.manifest.run_id
        other.assert_stage(0, await other.add("joiner").provide(Span(0, 0)), whole)
        assert not other.network.calls

    asyncio.run(work())


def test_peers_that_serve_are_asked_first_and_this_one_never(tmp_path: Path, whole: Path, monkeypatch: Any) -> None:
    orders = []

    class Fetch(fetch.BaseFetch):
        async def fetch_list(self, known: Any) -> Any:
            orders.extend(self._list_sources() for _ in range(20))
            raise BaseModelError("enough")

    monkeypatch.setattr(base_supply, "BaseFetch", Fetch)

    async def work() -> None:
        swarm = Swarm(tmp_path, run_of(whole))
        for number in range(3):
            swarm.add(f"joining {number}", state="joining")
            swarm.add(f"serving {number}")
        with pytest.raises(BaseModelError, match="enough"):
            await swarm.add("me").provide(Span(0, 0))

    asyncio.run(work())
    assert all([peer[:7] for peer in order] == ["serving"] * 3 + ["joining"] * 3 for order in orders)
    assert len({tuple(order) for order in orders}) > 1, "not always in one order"


# --- an adapter that the run goes on from


def of_folder(made: Manifest, swarm: Swarm, folder: Path | None) -> None:
    """Every tensor of stage 1, built from this folder, is that of base model and adapter."""
    family, layers = family_of(made.model), swarm.manifest.layers_of(1)
    assert folder is not None
    stage = family.build_stage(layers, 0, folder)
    adapter = load_file(swarm.root / "adapter" / ADAPTER_FILE)
    for name, parameter in stage.trained_parameters():
        assert torch.equal(parameter, adapter[f"base_model.model.{name}".replace(".default.", ".")]), name


def test_an_adapter_travels_like_the_base_model_and_is_kept_for_later_starts(tmp_path: Path) -> None:
    base = make_base("qwen2", tmp_path / "base")
    adapter = make_adapter(base, tmp_path / "adapter")
    manifest = begun(base, adapter).with_values(stages={"count": STAGES})

    async def work() -> None:
        swarm = Swarm(tmp_path, manifest)
        founder = swarm.add("founder", base, adapter=adapter)
        assert founder.folder_to_check() == base
        of_folder(manifest, swarm, await founder.provide(Span(0, STAGES - 1)))
        of_folder(manifest, swarm, await swarm.add("with base", base).provide(Span(1, 1)))
        alone = swarm.add("with adapter", adapter=adapter)
        assert alone.folder_to_check() is not None
        of_folder(manifest, swarm, await alone.provide(Span(1, 1)))
        of_folder(manifest, swarm, await swarm.add("with nothing").provide(Span(1, 1)))
        assert swarm.notes[0].startswith("fetched 4 of "), "of two matrices in one layer, A and B"
        assert not swarm.violations
        later = Swarm(tmp_path, manifest)
        again = later.add("founder", base)
        of_folder(manifest, later, await again.provide(Span(0, STAGES - 1)))
        assert not later.network.calls, "the adapter is found without a flag"

    asyncio.run(work())


def test_an_adapter_of_another_run_is_refused_before_a_stage_is_claimed(tmp_path: Path, whole: Path) -> None:
    base = make_base("llama", tmp_path / "base")
    adapter, other = (make_adapter(base, tmp_path / name, lora_alpha=n) for n, name in enumerate(("a", "b"), 5))
    tensors = load_file(other / ADAPTER_FILE)
    save_file({name: 2 * values for name, values in tensors.items()}, other / ADAPTER_FILE)

    async def work() -> None:
        swarm = Swarm(tmp_path, begun(base, adapter))
        with pytest.raises(BaseModelError, match="has the SHA-256 .* leave --adapter out: peers give it"):
            swarm.add("joiner", base, adapter=other).folder_to_check()
        with pytest.raises(BaseModelError, match=f"has no {ADAPTER_FILE}; name the folder of the run's adapter"):
            swarm.add("lost", base, adapter=tmp_path).folder_to_check()
        for manifest in (run_of(whole), preset("tiny")):
            with pytest.raises(BaseModelError, match="this run begins with no adapter; leave it out"):
                Swarm(tmp_path, manifest).add("joiner", whole, adapter=adapter).folder_to_check()

    asyncio.run(work())


# --- what is wrong


def test_runs_without_a_tensor_list_fetch_and_give_nothing(tmp_path: Path, whole: Path) -> None:
    async def work() -> None:
        for manifest in (run_of(whole, tensors_hash=""), preset("tiny")):
            swarm = Swarm(tmp_path, manifest)
            for name, folder in (("without", None), ("with", whole)):
                supply = swarm.add(name, folder)
                assert supply.folder_to_check() == folder
                assert await supply.provide(Span(0, 0)) == folder
                with pytest.raises(Refused, match="no list of a base model's tensors"):
                    await supply.answer(IncomingCall(PeerId("x"), GetBase(), [], loop_time() + 5))
                await supply.close()

    asyncio.run(work())


def test_a_list_without_what_the_config_needs_is_the_founders_mistake(tmp_path: Path, whole: Path) -> None:
    other = save(make_model("llama"), tmp_path / "other")  # without biases, which Qwen2 has
    hash_ = tensor_list_hash([other / "model.safetensors"])

    async def work() -> None:
        swarm = Swarm(tmp_path, run_of(whole, tensors_hash=hash_, weights=[["model.safetensors", "0" * 64]]))
        swarm.add("giver", other)
        with pytest.raises(
            BaseModelError, match=r"has no model.layers.0.* of the shape .*; whoever wrote the manifest has to"
        ):
            await swarm.add("joiner").provide(Span(0, 0))

    asyncio.run(work())


def test_a_full_disk_is_said_before_anything_is_fetched(tmp_path: Path, whole: Path, monkeypatch: Any) -> None:
    async def work() -> None:
        swarm = Swarm(tmp_path, run_of(whole))
        swarm.add("giver", whole)
        usage = SimpleNamespace(free=10**6)
        monkeypatch.setattr("agora.tuning.base.store.shutil.disk_usage", lambda path: usage)
        with pytest.raises(DiskError, match=r"The base model for stages 0 needs .* are free; free some space"):
            await swarm.add("joiner").provide(Span(0, 0))

    asyncio.run(work())


def test_a_damaged_tensor_of_the_store_is_fetched_anew(tmp_path: Path, whole: Path) -> None:
    async def work() -> None:
        swarm = Swarm(tmp_path, run_of(whole))
        swarm.add("giver", whole)
        folder = await swarm.add("joiner").provide(Span(0, 0))
        assert folder is not None
        damaged = sorted((folder / "tensors").iterdir())[0]
        content = np.fromfile(damaged, np.uint8)
        content[-1] ^= 1
        content.tofile(damaged)
        again = swarm.add("joiner")
        swarm.assert_stage(0, await again.provide(Span(0, 0)), whole)
        assert swarm.notes[1].startswith("fetched 1 of ")
        assert "were here already" in swarm.notes[1]

    asyncio.run(work())


def test_the_note_of_the_step_says_what_came_from_where() -> None:
    missing = {number: [0] for number in range(34)}
    assert describe_fetch(291, MissingTensors(missing, 1_234_567_890, 0), 3) == (
        "fetched 34 of 291 tensors, 1.2 GB from 3 peers"
    )
    assert describe_fetch(291, MissingTensors({1: [0]}, 12_345_678, 33), 1) == (
        "fetched 1 of 291 tensors, 12.3 MB from 1 peer; 33 were here already"
    )
    assert describe_fetch(291, MissingTensors({}, 0, 34), 0) == "34 of 291 tensors are here from earlier"
