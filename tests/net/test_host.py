"""The libp2p host: addresses it cannot listen on, keys it cannot use, and what it leaves behind."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from uuid import uuid4

import pytest
from agora_protocol.errors import IdentityError, InputError, LocalError
from agora_protocol.identity import Identity

from agora.core.calls import ConnectionBroken
from agora.net.p2pd.hivemind_shim import p2pd_pb2
from agora.net.p2pd.host import Host, SimultaneousOpen, _failure
from tests.net.helpers import make_host, run


def test_a_taken_port_and_an_odd_address_are_named_with_what_to_do(tmp_path: Path) -> None:
    async def main() -> None:
        Identity.create(tmp_path / "key")
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            other.listen()
            port = other.getsockname()[1]
            with pytest.raises(LocalError, match=f"port {port} is taken; choose another"):
                await Host.create(identity_path=tmp_path / "key", listen=[f"/ip4/127.0.0.1/tcp/{port}"])
        with pytest.raises(LocalError, match="not an address to listen on"):
            await Host.create(identity_path=tmp_path / "key", listen=["localhost:4001"])
        with pytest.raises(LocalError, match="address of this machine"):
            await Host.create(identity_path=tmp_path / "key", listen=["/ip4/192.0.2.1/tcp/4001"])
        with pytest.raises(IdentityError):
            await Host.create(identity_path=tmp_path / "missing")

    run(main)


def test_a_port_that_another_p2pd_holds_is_taken_too_and_free_again_once_that_is_closed(tmp_path: Path) -> None:
    async def main() -> None:
        first, identity = await make_host(tmp_path, "first")
        try:
            assert first.peer == identity.peer
            (address,) = await first.addresses()
            assert address.endswith(f"/p2p/{first.peer}")
            assert "/tcp/" in address
            listen = address.rpartition("/p2p/")[0]
            with pytest.raises(LocalError, match="is taken"):
                await make_host(tmp_path, "second", listen=[listen])
        finally:
            await first.close()
            await first.close()
        second, _ = await make_host(tmp_path, "second", listen=[listen])
        try:
            assert listen in (await second.addresses())[0]
            assert not first.died.is_set()  # it was closed, it did not die
        finally:
            await second.close()

    run(main)


def test_connecting_counts_who_answers_and_passes_over_who_does_not(tmp_path: Path) -> None:
    async def main() -> None:
        gone, _ = await make_host(tmp_path, "gone")
        dead = await gone.addresses()
        await gone.close()
        a, _ = await make_host(tmp_path, "a")
        try:
            b, _ = await make_host(tmp_path, "b")
            try:
                assert await b.connect([*dead, *await a.addresses()]) == 1
                own, others = await b.addresses(), await a.addresses()
                assert await b.connect([*own, *others, *dead]) == 1
                assert await b.connect(own) == 0
                with pytest.raises(ConnectionBroken, match="none of 1 peers"):
                    await b.connect(dead)
                with pytest.raises(InputError, match="should look like"):
                    await b.connect(["/ip4/127.0.0.1/tcp/1"])
            finally:
                sockets = b._sockets.path
                assert sockets.is_dir()
                assert sockets.stat().st_mode & 0o077 == 0
                await b.close()
                assert not sockets.exists()
        finally:
            await a.close()

    run(main)


def test_a_simultaneous_open_is_recognised_by_the_error_of_p2pd() -> None:
    said = "failed to dial X: all dials failed * [/ip4/127.0.0.1/tcp/1] "
    simultaneous = (
        said + "failed to negotiate security protocol: error reading handshake message: noise: message is too short"
    )
    assert isinstance(_failure(said + simultaneous), SimultaneousOpen)
    for other in ("failed to negotiate security protocol: peer id mismatch", "dial backoff", "connection refused"):
        assert type(_failure(said + other)) is ConnectionBroken


def test_an_answer_to_a_call_that_was_cancelled_in_the_same_moment_does_not_end_the_reading_of_answers(
    tmp_path: Path,
) -> None:
    """As after a process stood still: the call's deadline and its answer are there at once."""

    async def main() -> None:
        host, _ = await make_host(tmp_path, "host")
        try:
            control, reader, call = host.p2p._client.control, asyncio.StreamReader(), uuid4()
            control._pending_calls[call] = asyncio.Future()
            control._pending_calls[call].cancel()
            for answer in ({"callUnaryResponse": {"response": b"late"}}, {"daemonError": {"message": "late"}}, {}):
                message = p2pd_pb2.PersistentConnectionResponse(callId=call.bytes, **answer).SerializeToString()
                reader.feed_data(bytes([len(message)]) + message)
            reader.feed_eof()
            await control._read_from_persistent_conn(reader)
            assert reader.at_eof()
            assert not host.died.is_set()
        finally:
            await host.close()

    run(main)
