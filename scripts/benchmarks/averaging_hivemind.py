"""A member of hivemind's all-reduce, as a child process: its DHT node and its DecentralizedAverager, as they come.

hivemind's defaults are kept; only the group's size is set, as its users set it, and the compression where a spec names
one.
"""

from __future__ import annotations

import time
from typing import Any, Final

import hivemind.compression
import torch
from hivemind.averaging import DecentralizedAverager
from hivemind.averaging.allreduce import AllreduceException
from hivemind.averaging.matchmaking import MatchmakingException
from hivemind.dht import DHT

from benchmarks.averaging_values import Holding
from benchmarks.worker import Channel

LOOPBACK: Final = ["/ip4/127.0.0.1/tcp/0"]
ROUND_S: Final = 30.0


def serve(spec: dict[str, Any], channel: Channel) -> None:
    """Sends its addresses; {"round": r} takes part in a round. spec: numel, offset, true_mean, size, wire, peers."""
    torch.set_num_threads(1)
    numel, size = int(spec["numel"]), int(spec["size"])
    holding = Holding(numel, spec["offset"], spec["true_mean"])
    values = torch.empty(numel)
    holding.put(values)
    compression = getattr(hivemind.compression, spec["wire"] or "NoCompression")()
    dht = DHT(initial_peers=spec["peers"], start=True, host_maddrs=LOOPBACK)
    averager = DecentralizedAverager(
        [values], dht, start=True, prefix="bench", target_group_size=size, min_group_size=size, compression=compression
    )
    channel.say({"addresses": [str(address) for address in dht.get_visible_maddrs()]})
    for _ in channel.orders():
        begin = time.monotonic()
        returned = _step(averager)
        end = time.monotonic()
        found = holding.found(values)  # shared with the averager; its lock stays taken in a round that never ends
        holding.put(values)
        channel.say({"begin": begin, "end": end, "returned": returned, **found})
    averager.shutdown()
    dht.shutdown()


def _step(averager: DecentralizedAverager) -> bool:
    # Runs one round with its matchmaking, and returns whether it ended; when a peer dies it may never end.
    step = averager.step(timeout=ROUND_S, wait=False)
    try:
        return step.result(ROUND_S) is not None
    except TimeoutError:
        step.cancel()
        return False
    except (AllreduceException, MatchmakingException):
        return False
