"""Supplies the base model's tensors on this machine: fetches those that a span lacks, and gives them to other peers.

Lives as long as the local peer.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from agora_protocol.errors import Refused
from agora_protocol.ids import PeerId, Span
from agora_protocol.manifest import Manifest
from agora_protocol.manifest_model import ADAPTER_FILE, HfSection
from agora_protocol.tensor_list import TensorList

from agora.core.calls import PeerCaller, Reply
from agora.core.tasks import run_in_thread
from agora.net.rpc.connection import IncomingCall
from agora.node.daemon_context import DaemonContext
from agora.node.peer.requests import BASE_REQUESTS
from agora.swarm.peer_score import ReportViolation
from agora.swarm.view import View
from agora.tuning.adapters.peft_folder import not_from_an_adapter, require_hash
from agora.tuning.base.fetch import BaseFetch
from agora.tuning.base.model_files import WantedTensor
from agora.tuning.base.server import BaseServer
from agora.tuning.base.store import BaseModelError, TensorStore
from agora.tuning.base.tensors import MALFORMED, BaseTensors
from agora.tuning.hf_family import needed_tensors


@dataclass(frozen=True, slots=True)
class MissingTensors:
    """What to fetch of the base model: `nbytes` in all.

    pieces: for each tensor to fetch, by its number in the tensor list, the numbers of its missing pieces. here: how
    many of the needed tensors were fetched completely earlier.
    """

    pieces: Mapping[int, Sequence[int]]
    nbytes: int
    here: int


class BaseSupply:
    """Supplies the base model's tensors to the spans of this daemon, and to other peers.

    In runs without a tensor list it fetches and serves nothing: runs of families without a base model, and runs whose
    `tensors_hash` is empty, where each machine needs the files.
    """

    def __init__(
        self,
        context: DaemonContext,
        manifest: Manifest,
        peer_caller: PeerCaller,
        view: Callable[[], View],
        report_violation: ReportViolation,
    ) -> None:
        self._context = context
        self._manifest = manifest
        self._peer_caller = peer_caller
        self._view = view
        self._report_violation = report_violation
        self._owner_folder = context.settings.named_base_model
        self._random = random.Random()
        self._base: BaseTensors | None = None
        self._server: BaseServer | None = None
        model = manifest.model
        self._owner_adapter = context.settings.named_adapter
        self._adapter_hash = model.adapter_hash if isinstance(model, HfSection) else ""
        if isinstance(model, HfSection) and model.tensors_hash:
            store = TensorStore(context.home.base_model(model.tensors_hash))
            folder = self._owner_folder
            files = {name: folder / name if folder is not None else None for name, _ in model.weights}
            if self._adapter_hash:
                files[ADAPTER_FILE] = (self._owner_adapter or store.folder) / ADAPTER_FILE
            self._base = BaseTensors(model.tensors_hash, files, store)
            self._server = BaseServer(self._base, context.report_event)

    async def close(self) -> None:
        """Cancels the hashing of the owner's files for other peers, if it runs; call it after the last request."""
        if self._server is not None:
            await self._server.close()

    async def answer(self, call: IncomingCall) -> Reply:
        """Answers a request of BASE_REQUESTS.

        Raises Refused in a run without a tensor list and if this peer lacks what is asked for, Busy if it reads too
        many pieces or still makes the list, ProtocolError for a tensor or piece that does not exist.
        """
        assert isinstance(call.message, BASE_REQUESTS)
        if self._server is None:
            raise Refused("this run has no list of a base model's tensors; nobody can give them")
        return await self._server.answer(call.message)

    def folder_to_check(self) -> Path | None:
        """Returns the folder for Family.check_machine: the owner's, otherwise the store's, which it creates. Blocks.

        None when the owner named no folder and the run has no tensor list to fetch by. Keeps the adapter that the owner
        named, so that later starts need no name. Raises DiskError, BaseModelError for another adapter than the run's.
        """
        if self._owner_adapter is not None:
            if self._base is None or not self._adapter_hash:
                raise BaseModelError(not_from_an_adapter(self._owner_adapter))
            require_hash(self._owner_adapter, self._adapter_hash)
            self._base.store.keep_file(self._owner_adapter / ADAPTER_FILE)
        if self._owner_folder is not None or self._base is None:
            return self._owner_folder
        self._base.store.create()
        return self._base.store.folder

    async def provide(self, span: Span) -> Path | None:
        """Fetches the tensors that the span needs and that are not on this machine; returns the folder that has all.

        That is the owner's folder if it has all of them, or if the run has no tensor list (None if the owner named no
        folder); otherwise, and with an adapter, the store's. Fetching is the step "base" of the start. Raises
        BaseModelError, DiskError.
        """
        model, base = self._manifest.model, self._base
        if base is None or not isinstance(model, HfSection):
            return self._owner_folder

        def find_lacking() -> list[WantedTensor]:
            owned = base.locations_in_folder()
            wanted = needed_tensors(model, self._manifest.layers_in(span))
            return [tensor for tensor in wanted if not any(name in owned for name in tensor.names)]

        lacking = await run_in_thread(find_lacking)
        if lacking:
            with self._context.phases.enter("base") as note:
                note.text = await self._fetch(base, span, lacking)
        elif not self._adapter_hash:
            return self._owner_folder
        await run_in_thread(lambda: base.store.link_files(base.owner_files))
        return base.store.folder

    async def _fetch(self, base: BaseTensors, span: Span, lacking: Sequence[WantedTensor]) -> str:
        fetch = BaseFetch(
            self._peer_caller,
            base.list_hash,
            base.store,
            self._list_sources,
            self._report_violation,
            on_tensor=lambda number: add_fetched(base, number),
        )
        self._context.phases.report_progress("asking who has the base model's files")
        tensors = await fetch.fetch_list(await run_in_thread(base.open_list))
        missing = await run_in_thread(lambda: find_missing(base, tensors, lacking, f"The base model for stages {span}"))

        def report_progress() -> None:
            fetched = sum(fetch.bytes_from.values())
            self._context.phases.report_progress(f"fetched {fetched / 1e6:,.1f} of {missing.nbytes / 1e6:,.1f} MB")

        await fetch.fetch(missing.pieces, report_progress)
        return describe_fetch(len(tensors.tensors), missing, len(fetch.bytes_from))

    def _list_sources(self) -> list[PeerId]:
        seen = [peer for peer in self._view().peers.values() if peer.peer != self._context.me]
        self._random.shuffle(seen)
        return [peer.peer for peer in sorted(seen, key=lambda peer: peer.state != "serving")]


def add_fetched(base: BaseTensors, number: int) -> None:
    """Records that tensor `number`, just completed in the store, can be served to other peers.

    Does nothing if it is not in the store, or while no tensor list is known.
    """
    listed = base.find_listed(number)
    stored = base.store.find(number, listed) if listed is not None else None
    if stored is not None:
        base.add_location(number, stored)


def find_missing(base: BaseTensors, tensors: TensorList, lacking: Sequence[WantedTensor], what: str) -> MissingTensors:
    """Returns which pieces of the `lacking` tensors to fetch, after creating files for them in the store. Blocks.

    Writes the list `tensors` to the store and sets it in `base`. Tensors that are damaged in the store are no longer
    served to peers. what: names in an error what needs room. Raises BaseModelError for a tensor that the list does not
    have, or has in another shape, DiskError if the disk has no room for the pieces.
    """
    base.store.keep_list(tensors)
    base.adopt_list(tensors)
    numbers = {listed.name: number for number, listed in enumerate(tensors.tensors)}
    pieces: dict[int, list[int]] = {}
    nbytes = here = 0
    for wanted in lacking:
        number = next((numbers[name] for name in wanted.names if name in numbers), None)
        if number is None or tensors.tensors[number].shape != wanted.shape:
            raise BaseModelError(
                f"The manifest's tensor list has no {wanted.names[0]} of the shape {list(wanted.shape)}, which its "
                f"config needs; {MALFORMED}."
            )
        listed = tensors.tensors[number]
        if base.store.find_intact(number, listed) is not None:
            here += 1
            continue
        base.drop(number)
        arrived = base.store.begin(number, listed)
        pieces[number] = [piece for piece in range(listed.piece_count) if piece not in arrived]
        nbytes += sum(listed.piece_bytes(piece) for piece in pieces[number])
    base.store.require_room(nbytes, what)
    return MissingTensors(pieces, nbytes, here)


def describe_fetch(listed: int, missing: MissingTensors, sources: int) -> str:
    """Returns a text about what was fetched, such as "fetched 34 of 291 tensors, 1.2 GB from 3 peers".

    If nothing was missing, it says how many of all tensors were here already. listed: the number of tensors in the
    list. sources: the number of peers that served pieces.
    """
    if not missing.pieces:
        return f"{missing.here} of {listed} tensors {'is' if missing.here == 1 else 'are'} here from earlier"
    size = f"{missing.nbytes / 1e9:,.1f} GB" if missing.nbytes >= 1e9 else f"{missing.nbytes / 1e6:,.1f} MB"
    peers = f"{sources} peer" + "s" * (sources != 1)
    fetched = f"fetched {len(missing.pieces)} of {listed} tensors, {size} from {peers}"
    return fetched + f"; {missing.here} were here already" * bool(missing.here)
