"""The parts of hivemind that the network stands on: its p2pd, its DHT, their messages.

`import hivemind` also runs its averaging, optimizers and experts, and scipy with them: a quarter of what a daemon's
imports cost and 45 MB of its memory, for nothing that is used. So its package is entered here without that.
Knows where hivemind keeps its parts. Must not know what is done with them.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def _package_alone(name: str) -> Iterator[None]:
    """Modules of the package can be imported meanwhile although its `__init__` has not run; afterwards it still can."""
    spec = importlib.util.find_spec(name)
    if name in sys.modules or spec is None:
        yield
        return
    sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        yield
    finally:
        del sys.modules[name]


with _package_alone("hivemind"):
    from hivemind.dht.crypto import DHTRecord, RecordValidatorBase
    from hivemind.dht.node import DHTNode
    from hivemind.dht.routing import DHTID
    from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue
    from hivemind.p2p import P2P, PeerID
    from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError
    from hivemind.proto import p2pd_pb2
    from hivemind.utils.multiaddr import Multiaddr
    from hivemind.utils.multiaddr.exceptions import Error as MultiaddrError

__all__ = [
    "P2P",
    "DHTID",
    "DHTLocalStorage",
    "DHTNode",
    "DHTRecord",
    "DictionaryDHTValue",
    "Multiaddr",
    "MultiaddrError",
    "P2PDaemonError",
    "PeerID",
    "RecordValidatorBase",
    "p2pd_pb2",
]
