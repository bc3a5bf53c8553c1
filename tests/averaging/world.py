"""Members of rounds in one process: calls that arrive at once, or not at all, as a test wants it."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from agora_protocol.errors import AgoraError, PeerFailed, ProtocolError
from agora_protocol.identity import Identity
from agora_protocol.ids import PeerId, RunId
from agora_protocol.messages import Contribute, Message, Recall
from agora_protocol.tensors import WireTensor

from agora.averaging.kinds import Part, RoundConfig
from agora.averaging.owner import Owner
from agora.averaging.partition import cut_into_parts
from agora.averaging.rounds import Rounds
from agora.net.errors import ConnectionBroken, DeadlinePassed
from agora.observe.events import Event

RUN = RunId("ab" * 32)


def identities(count: int) -> list[PeerId]:
    return [Identity(bytes([n + 1]) * 32).peer for n in range(count)]


@dataclass
class Reply:
    message: Message
    tensors: Sequence[WireTensor]


@dataclass
class World:
    """`dead` peers break every call to them, `hung` ones never answer; `strikes` are the protocol errors raised."""

    size: int
    wire: str = "float32"
    rule: str = "mean"
    round_s: float = 20.0
    exact: bool = False
    members: dict[PeerId, Member] = field(default_factory=dict)
    dead: set[PeerId] = field(default_factory=set)
    hung: set[PeerId] = field(default_factory=set)
    strikes: list[tuple[PeerId, ProtocolError]] = field(default_factory=list)

    def add(self, *peers: PeerId) -> list[Member]:
        made = [Member(self, peer) for peer in peers]
        self.members |= {member.peer: member for member in made}
        return made

    async def close(self) -> None:
        for member in self.members.values():
            await member.owner.close()


class Member:
    """One peer; `sees` is its view of the replicas, `suspects` those that it could not reach lately."""

    def __init__(self, world: World, peer: PeerId) -> None:
        self.world, self.peer = world, peer
        self.events: list[Event] = []
        self.sees: dict[PeerId, float] | None = None
        self.suspects: set[PeerId] = set()
        self.at: dict[str, int] = {}
        self.dies_at: tuple[str, int] | None = None
        config = RoundConfig(peer, RUN, world.rule, world.wire, world.round_s, max_weight=1e9, exact=world.exact)  # type: ignore[arg-type]
        self.owner = Owner(config, self, self, self._fault)
        self.rounds = Rounds(config, self, self.owner, self.events.append, self._fault)

    @property
    def view(self) -> dict[PeerId, float]:
        return self.sees if self.sees is not None else dict.fromkeys(self.world.members, 0.0)

    def members(self, stage: int, what: str) -> dict[PeerId, float]:
        return self.view

    def unreachable(self, stage: int, peers: Collection[PeerId]) -> set[PeerId]:
        return self.suspects & set(peers)

    def numel_of(self, part: Part) -> int:
        cuts = cut_into_parts(self.world.size)
        if part.part >= len(cuts):
            raise ProtocolError("bad-message", "no such part")
        return cuts[part.part].stop - cuts[part.part].start

    async def _fault(self, point: str) -> None:
        self.at[point] = self.at.get(point, 0) + 1
        if self.dies_at is not None and self.dies_at[0] == point and self.at[point] >= self.dies_at[1]:
            self.world.dead.add(self.peer)
        if self.peer in self.world.dead:
            raise PeerFailed("dead")

    async def call(self, peer, request, tensors=(), *, deadline, on_progress=None) -> Reply:
        world = self.world
        await asyncio.sleep(0.01)
        if {peer, self.peer} & world.dead:
            raise ConnectionBroken("the stream broke")
        if peer in world.hung:
            await asyncio.sleep(max(0.0, deadline - asyncio.get_running_loop().time()))
            raise DeadlinePassed("no answer before its deadline")
        other = world.members[peer].owner
        try:
            async with asyncio.timeout_at(deadline):
                if isinstance(request, Recall):
                    message, back = other.recall(request)
                else:
                    assert isinstance(request, Contribute)
                    message, back = await other.contribute(self.peer, request, tensors, deadline)
        except ProtocolError as error:
            world.strikes.append((self.peer, error))
            raise
        except TimeoutError:
            raise DeadlinePassed("no answer before its deadline") from None
        await asyncio.sleep(0.01)
        if {peer, self.peer} & world.dead:
            raise ConnectionBroken("the stream broke")
        return Reply(message, back)


__all__ = ["RUN", "AgoraError", "Member", "Reply", "World", "identities"]
