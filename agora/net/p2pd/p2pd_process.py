"""Starts hivemind's p2pd process, which ends with this one, in a folder of its own for its sockets."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final
from uuid import UUID

from agora_protocol.errors import LocalError

from agora.core.terminal_text import one_line
from agora.net.p2pd.hivemind_shim import P2P, P2PDaemonError

# Seconds for p2pd to start: 0.3 s on an idle machine, far longer when many start together.
STARTUP_TIMEOUT_S: Final = 60.0
SOCKET_PREFIX: Final = "agora-net-"  # the names of the folders that hold p2pd's Unix sockets begin with it
MAX_BASE_CHARACTERS: Final = 40  # of the path of such folders' parent: a Unix socket's path has at most 107
MAX_ERROR_CHARACTERS: Final = 300  # of p2pd's own message in an error
_GUARD: Final = (
    "import ctypes,os,sys\n"
    "ctypes.CDLL(None).prctl(1,9)\n"  # PR_SET_PDEATHSIG, SIGKILL; kept across execv
    "if os.getppid()!=int(sys.argv[1]): sys.exit('the parent is gone')\n"
    "os.execv(sys.argv[2],sys.argv[2:])\n"
)


# hivemind's P2P, with a p2pd that the kernel kills together with this process, however this process ends. Otherwise
# p2pd would notice only after 1 to 30 s that its parent was killed, and would answer for a dead daemon meanwhile.
class _GuardedP2P(P2P):  # type: ignore[misc]
    @staticmethod
    def _make_process_args(*args: Any, **kwargs: Any) -> list[str]:
        kwargs["relayService"] = 0  # p2pd's own relay; the daemon has one (relay.py)
        kwargs.pop("dhtServer", None)  # p2pd's own Kademlia: it tells every stranger p2pd's connected peers
        command: list[str] = P2P._make_process_args(*args, **kwargs)
        if sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "prctl"):
            return command
        return [sys.executable, "-I", "-S", "-c", _GUARD, str(os.getpid()), *command]


# hivemind's open calls to p2pd, by id. A cancelled or answered call is not `in` this dict, since hivemind sets the
# result of every call that is. After this process has stood still, a call's deadline and its answer come in one turn of
# the event loop: the call is then cancelled but not removed yet. Setting the result of a cancelled call raises an error
# that would end the task which reads all answers, and with it the daemon.
class _OpenCalls(dict[UUID, "asyncio.Future[Any]"]):
    def __contains__(self, call: object) -> bool:
        answer = self.get(call) if isinstance(call, UUID) else None
        return answer is not None and not answer.done()


class SocketDirectory:
    """A private, locked directory (`path`) for p2pd's Unix sockets. Making one first removes those of dead daemons.

    The lock in a directory shows whether its daemon lives. A process id would not: containers share /tmp but not ids.
    """

    def __init__(self) -> None:
        """Raises LocalError if no folder for it can be made."""
        try:
            self._make()
        except OSError as error:
            raise LocalError(
                f"Cannot make a folder for p2pd's sockets ({error.strerror or error}); set TMPDIR to a folder that can "
                f"be written, of at most {MAX_BASE_CHARACTERS} characters."
            ) from error

    def _make(self) -> None:
        base = Path(tempfile.gettempdir())
        if len(str(base)) > MAX_BASE_CHARACTERS:
            base = Path("/tmp")
        for folder in base.glob(SOCKET_PREFIX + "*"):
            # An OSError means that it is another user's, in use, or just removed by another daemon.
            with contextlib.suppress(OSError), (folder / "lock").open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        hidden = Path(tempfile.mkdtemp(prefix="." + SOCKET_PREFIX, dir=base))
        self._lock = (hidden / "lock").open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.path = hidden.rename(base / hidden.name[1:])  # only now may another daemon find it

    def remove(self) -> None:
        """Removes the directory with its sockets, and gives up its lock. May be called twice."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


async def start_p2pd(
    identity_path: Path, listen: Sequence[str], announce: Sequence[str], sockets: Path, upnp: bool
) -> Any:
    """Starts a p2pd that listens on `listen`, and returns hivemind's P2P. Raises LocalError if it does not start.

    announce: addresses that p2pd announces instead of `listen`; if empty, it announces those it listens on. sockets:
    the folder for its Unix sockets. upnp: whether it asks the router to forward its ports. p2pd neither looks for
    relays or peers nor judges whether it can be reached, because the daemon does all three.
    """
    p2p_class = type("_HostP2P", (_GuardedP2P,), {"_UNIX_SOCKET_PREFIX": f"/unix{sockets}/"})
    try:
        p2p = await p2p_class.create(  # type: ignore[attr-defined]
            host_maddrs=tuple(listen),
            announce_maddrs=tuple(announce) or None,
            identity_path=str(identity_path),
            startup_timeout=STARTUP_TIMEOUT_S,
            check_if_identity_free=False,
            auto_nat=False,
            force_reachability="public",
            nat_port_map=upnp,
        )
        control = p2p._client.control
        control._pending_calls = _OpenCalls(control._pending_calls)
        return p2p
    except P2PDaemonError as error:
        why = one_line(str(error), MAX_ERROR_CHARACTERS)
        raise LocalError(f"p2pd did not start ({why}); look whether {', '.join(listen)} can be listened on.") from error
