"""Imports the parts of hivemind that the network uses: its p2pd, its DHT, their messages.

`import hivemind` also imports averaging, optimizers, experts and scipy. Agora uses none of them, and they would cost a
quarter of a daemon's import time and 45 MB of memory. So this module imports hivemind's submodules without running its
`__init__`.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable

_spec = importlib.util.find_spec("hivemind")
_is_bare = _spec is not None and "hivemind" not in sys.modules
if _spec is not None and _is_bare:
    sys.modules["hivemind"] = importlib.util.module_from_spec(_spec)  # its `__init__` does not run
try:
    from hivemind.dht import node as dht_node
    from hivemind.dht import protocol as dht_protocol
    from hivemind.dht import routing as dht_routing
    from hivemind.dht.crypto import DHTRecord as DHTRecord
    from hivemind.dht.crypto import RecordValidatorBase as RecordValidatorBase
    from hivemind.dht.node import DHTNode as DHTNode
    from hivemind.dht.routing import DHTID as DHTID
    from hivemind.dht.storage import DHTLocalStorage as DHTLocalStorage
    from hivemind.dht.storage import DictionaryDHTValue as DictionaryDHTValue
    from hivemind.p2p import P2P as P2P
    from hivemind.p2p import P2PContext as P2PContext
    from hivemind.p2p import PeerID as PeerID
    from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError as P2PDaemonError
    from hivemind.p2p.p2p_daemon_bindings.utils import P2PHandlerError as P2PHandlerError
    from hivemind.proto import dht_pb2 as dht_pb2
    from hivemind.proto import p2pd_pb2 as p2pd_pb2
    from hivemind.utils import timed_storage
    from hivemind.utils.multiaddr import Multiaddr as Multiaddr
    from hivemind.utils.multiaddr import exceptions
finally:
    if _is_bare:
        del sys.modules["hivemind"]  # a later `import hivemind` runs it

MultiaddrError = exceptions.Error


def set_dht_time(unix: Callable[[], float]) -> None:
    """Makes `unix`, in unix seconds, the clock by which hivemind judges expiry in all DHT nodes of this process."""
    for module in (timed_storage, dht_protocol, dht_routing, dht_node):
        module.get_dht_time = unix
