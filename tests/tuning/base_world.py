"""Peers that give tensors of a base model over the network in memory, with faults that count their firings."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from agora_protocol.errors import AgoraError, Refused
from agora_protocol.ids import PeerId
from agora_protocol.limits import STATE_CHUNK_BYTES
from agora_protocol.messages import GetBase, GetPiece
from agora_protocol.tensor_list import TensorList
from safetensors.numpy import load_file, save_file

from agora.core.calls import Reply
from agora.swarm.peer_score import Violation
from agora.tuning.base.fetch import BaseFetch
from agora.tuning.base.server import BaseServer
from agora.tuning.base.store import TensorStore, list_tensors
from agora.tuning.base.tensors import BaseTensors
from tests.memory_network import MemoryCall, MemoryNetwork, NetworkFaults

CHUNK_VALUES = STATE_CHUNK_BYTES // 4
SIZES: Mapping[str, int] = {
    "model.embed_tokens.weight": 3 * CHUNK_VALUES - 5,
    "model.layers.0.weight": 2 * CHUNK_VALUES,
    "model.layers.1.weight": CHUNK_VALUES,
    "model.layers.2.weight": CHUNK_VALUES + 1,
    "model.norm.weight": 16,
}
"""Values of each tensor, float32: in pieces of all kinds, 9 in all."""
NAMES = ("model-1.safetensors", "model-2.safetensors")


def make_folder(folder: Path, sizes: Mapping[str, int] = SIZES) -> Path:
    """A model in two weights files, of random values."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(7)
    tensors = {name: random.standard_normal(count, np.float32) for name, count in sizes.items()}
    names = list(tensors)
    for file, part in zip(NAMES, (names[: len(names) // 2], names[len(names) // 2 :]), strict=True):
        save_file({name: tensors[name] for name in part}, folder / file)
    return folder


def named_by_owner(folder: Path | None) -> dict[str, Path | None]:
    """Where an owner who named this folder has the weights files."""
    return {name: folder / name if folder is not None else None for name in NAMES}


def values_in(folder: Path) -> dict[str, np.ndarray]:
    """All tensors in the safetensors files of a folder."""
    return {name: values for file in sorted(folder.glob("*.safetensors")) for name, values in load_file(file).items()}


class Holder:
    """A peer that gives what its folder has; its faults are plain fields.

    fault: changes an answer, given how many of its kind came before, or returns an error to raise.
    """

    def __init__(self, world: BaseWorld, name: str, folder: Path | None, uplink: float) -> None:
        self.world, self.peer, self.uplink = world, PeerId(name), uplink
        self.free_at = 0.0
        store = TensorStore(world.root / name / world.list.digest)
        self.base = BaseTensors(world.list.digest, named_by_owner(folder), store)
        self.server = BaseServer(self.base, world.events.append)
        self.calls: Counter[str] = Counter()
        self.given: Counter[tuple[int, int]] = Counter()
        self.die_after = self.hang_after = 10**9  # pieces asked for
        self.fault: Callable[[Reply, GetBase | GetPiece, int], Reply | AgoraError] | None = None
        world.network.join(self.peer, self.handle)

    async def handle(self, call: MemoryCall) -> Reply:
        request, loop = call.message, asyncio.get_running_loop()
        assert isinstance(request, GetBase | GetPiece)
        kind = type(request).__name__
        nth = self.calls[kind]
        self.calls[kind] += 1
        if isinstance(request, GetPiece) and nth >= self.die_after:
            self.world.network.kill(self.peer)
        if isinstance(request, GetPiece) and nth >= self.hang_after:
            await asyncio.Event().wait()
        answer = await self.server.answer(request)
        changed = self.fault(answer, request, nth) if self.fault is not None else answer
        if isinstance(changed, AgoraError):
            raise changed
        self.free_at = max(self.free_at, loop.time()) + sum(t.nbytes for t in answer.tensors) / self.uplink
        await asyncio.sleep(self.free_at - loop.time())
        if isinstance(request, GetPiece):
            self.given[request.tensor, request.piece] += 1
        return changed


class BaseWorld:
    """A peer that fetches into a store of its own, and those that it may ask."""

    def __init__(self, root: Path, whole: Path) -> None:
        self.root, self.whole = root, whole
        self.list: TensorList = list_tensors([whole / name for name in NAMES])
        self.network = MemoryNetwork(NetworkFaults(latency_s=(0.001, 0.001)))
        self.holders: dict[PeerId, Holder] = {}
        self.events: list[object] = []
        self.violations: list[tuple[PeerId, Violation, str]] = []
        self.done: list[int] = []
        self.open = self.peak_open = 0
        self.store = TensorStore(root / "joiner" / self.list.digest)
        self.joiner = self.network.join(PeerId("joiner"), self.refuse)

    async def refuse(self, call: MemoryCall) -> Reply:
        raise Refused("this peer is joining")

    def add(self, name: str, folder: Path | None = None, uplink: float = 50e6) -> Holder:
        """A peer that gives what `folder` has, by default the whole model; it knows the list."""
        holder = self.holders[PeerId(name)] = Holder(self, name, folder or self.whole, uplink)
        holder.base.adopt_list(self.list)
        return holder

    def fetch(self) -> BaseFetch:
        return BaseFetch(
            self,
            self.list.digest,
            self.store,
            lambda: list(self.holders),
            self.report_violation,
            on_tensor=self.done.append,
        )

    def begin(self, *numbers: int) -> dict[int, Sequence[int]]:
        """What is missing of these tensors, by default of all, after making room for it."""
        missing: dict[int, Sequence[int]] = {}
        for number in numbers or range(len(self.list.tensors)):
            listed = self.list.tensors[number]
            arrived = self.store.begin(number, listed)
            missing[number] = [piece for piece in range(listed.piece_count) if piece not in arrived]
        return missing

    async def run(self, *numbers: int, fetch: BaseFetch | None = None) -> tuple[BaseFetch, float]:
        """Fetches the list and these tensors. Returns the fetch and how long it took; nothing may be open then."""
        loop, fetch = asyncio.get_running_loop(), fetch or self.fetch()
        began = loop.time()
        try:
            assert await fetch.fetch_list(None) == self.list
            await fetch.fetch(self.begin(*numbers))
        finally:
            assert self.open == 0 and len(asyncio.all_tasks() - self.network.tasks) == 1
        return fetch, loop.time() - began

    def assert_fetched(self, *numbers: int) -> None:
        """The store has these tensors, by default all, bit for bit, and nothing else."""
        numbers = numbers or tuple(range(len(self.list.tensors)))
        expected, found = values_in(self.whole), values_in(self.store.folder / "tensors")
        assert sorted(found) == sorted(self.list.tensors[number].name for number in numbers)
        for name, values in found.items():
            np.testing.assert_array_equal(values, expected[name])
        assert sorted(self.done) == sorted(numbers)
        assert not list((self.store.folder / "tensors").glob("*.part"))

    def report_violation(self, peer: PeerId, violation: Violation, text: str, dedup_key: str = "") -> None:
        self.violations.append((peer, violation, text))

    async def call(self, peer, request, tensors=(), *, deadline, on_progress=None) -> Reply:
        self.open += 1
        self.peak_open = max(self.peak_open, self.open)
        try:
            return await self.joiner.call(peer, request, tensors, deadline=deadline)
        finally:
            self.open -= 1
