"""Names the places of a daemon's files on this machine.

Layout of a data directory (mode 0700):

    agora.toml                  settings, optional
    identity.key                this machine's Ed25519 key, mode 0600
    daemon.lock                 the pid of the process that uses the directory
    incarnation                 the number of the last start, which the next one exceeds
    ports                       the TCP ports that the daemon listened on last
    paused                      there while the owner has paused the daemon
    banned.txt                  the peers that the owner has banned from this machine, mode 0600
    events.jsonl                the journal; older parts of it in events.jsonl.1 and so on
    metrics.jsonl               the values of all metrics over time; older ones in metrics.jsonl.1 and so on
    profile-<key>.json          how fast this machine computes the run's model, as an earlier start has measured
    corpus/                     tokenised texts and rows of samples, by content
    compiled/                   compiled layers, for the next start
    base/<list hash>/           fetched tensors of a base model, by its tensor list
    runs/<run id>/run.toml      the signed manifest of each run that this machine has joined
    runs/<run id>/files.json    where this machine has the run's tokenizer and base model
    runs/<run id>/ticket        the tickets that admit this machine, mode 0600
    runs/<run id>/amendments    amendments of the run's manifest, mode 0600
    runs/<run id>/revocations   which peers are banned from the run, and by which key, mode 0600
    runs/<run id>/evaluations   what members have measured of tasks, signed, mode 0600
    runs/<run id>/peers.txt     addresses that answered last time
    runs/<run id>/drawn.txt     how many microbatches the origin has drawn, in blocks
    runs/<run id>/epochs.json   which samples the origins have seen, by step of stage 0
    runs/<run id>/tracked.json  up to which time `swarm track` has sent rows to each tracker
    runs/<run id>/checkpoints/  this machine's checkpoints, by stage and step
    runs/<run id>/weights/      the weights of the stages held here, written when they were last asked for
    runs/<run id>/result/       what the run has learnt, exported when it had ended
    runs/<run id>/collected/    the weights of every stage, written when an export last asked for them
    launched/<run>-<tool>/      jobs of `swarm launch`, mode 0600: one may hold an invite
    devices/                    lock and journal of all devices' daemons; each further one's data directory in <device>/
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from agora_protocol.errors import LocalError

from agora.core.user_paths import expand_home, home_directory

MAX_SOCKET_PATH_BYTES = 107  # the longest path of a Unix socket on Linux
HOME_VARIABLE = "AGORA_HOME"
RUNTIME_VARIABLE = "AGORA_RUNTIME_DIR"


@dataclass(frozen=True, slots=True)
class Home:
    """The data directory `root` of one daemon, with the paths of files in it; the files need not exist."""

    root: Path

    @property
    def identity(self) -> Path:
        return self.root / "identity.key"

    @property
    def incarnation(self) -> Path:
        return self.root / "incarnation"

    @property
    def ports(self) -> Path:
        return self.root / "ports"

    @property
    def paused(self) -> Path:
        return self.root / "paused"

    @property
    def devices(self) -> Path:
        return self.root / "devices"

    def of_device(self, name: str) -> Home:
        return Home(self.devices / name)

    @property
    def runs(self) -> Path:
        return self.root / "runs"

    def base_model(self, list_hash: str) -> Path:
        return self.root / "base" / list_hash

    def manifest(self, run: str) -> Path:
        return self.runs / run / "run.toml"

    def peers(self, run: str) -> Path:
        return self.runs / run / "peers.txt"

    @property
    def banned(self) -> Path:
        return self.root / "banned.txt"

    def ticket(self, run: str) -> Path:
        return self.runs / run / "ticket"

    def revocations(self, run: str) -> Path:
        return self.runs / run / "revocations"

    def evaluations(self, run: str) -> Path:
        return self.runs / run / "evaluations"

    def amendments(self, run: str) -> Path:
        return self.runs / run / "amendments"

    def checkpoints(self, run: str) -> Path:
        return self.runs / run / "checkpoints"

    def tracked(self, run: str) -> Path:
        return self.runs / run / "tracked.json"

    def result(self, run: str) -> Path:
        return self.runs / run / "result"

    @property
    def socket_stem(self) -> str:
        return hashlib.sha256(str(self.root.resolve()).encode()).hexdigest()[:16]


def home_at(directory: Path | None = None) -> Home:
    """Returns the given data directory; by default AGORA_HOME, or XDG_DATA_HOME/agora, or ~/.local/share/agora.

    Creates nothing.
    """
    if directory is not None:
        chosen = expand_home(directory)
    elif named := os.environ.get(HOME_VARIABLE):
        chosen = expand_home(named)
    else:
        chosen = Path(os.environ.get("XDG_DATA_HOME") or home_directory() / ".local" / "share") / "agora"
    # Commands are run in other folders than the daemon, and ask it by this path.
    return Home(chosen.absolute())


def runtime_directory() -> Path:
    """Returns the directory of the sockets of this user's daemons; does not create it.

    It is the first one set of AGORA_RUNTIME_DIR, systemd's RUNTIME_DIRECTORY and XDG_RUNTIME_DIR/agora; otherwise
    /tmp/agora-UID. A directory whose path is too long for a socket's is skipped.
    """
    for named, suffix in ((RUNTIME_VARIABLE, ""), ("RUNTIME_DIRECTORY", ""), ("XDG_RUNTIME_DIR", "agora")):
        value = os.environ.get(named, "").partition(":")[0]
        if value and len(os.fsencode(value)) + len(suffix) + 24 <= MAX_SOCKET_PATH_BYTES:
            return Path(value) / suffix if suffix else Path(value)
    return Path("/tmp") / f"agora-{os.getuid()}"


def make_private(directory: Path) -> None:
    """Creates the directory with mode 0700 if it is missing; leaves the mode of an existing one as it is.

    Raises PermissionError if others can put files into it (see distrust_reason), another OSError if it is a file or
    cannot be created.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if reason := distrust_reason(directory):
        raise PermissionError(errno.EACCES, reason, str(directory))


def distrust_reason(directory: Path, *, is_services: bool = False) -> str:
    """Returns why other users may have written the files in a directory, and what to do; "" if they cannot have.

    A user who can put files into the directory of the sockets chooses which process commands ask, and in /tmp any user
    can be the first to make it.
    is_services: whether root made it for a service: then it may be a link, or belong to another user. Raises OSError.
    """
    status = directory.stat() if is_services else directory.lstat()
    is_foreign = status.st_uid != os.getuid() and not is_services
    if not stat.S_ISDIR(status.st_mode):
        return f"{directory} is not a directory but a link or a file; remove it, or set {RUNTIME_VARIABLE} to another"
    if is_foreign:
        return f"{directory} belongs to another user (uid {status.st_uid}); set {RUNTIME_VARIABLE} to one of yours"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others may write in {directory}; run `chmod 700 {directory}`, or set {RUNTIME_VARIABLE} to another"
    return ""


def is_made_by_root(directory: Path) -> bool:
    status = directory.parent.stat()
    return status.st_uid == 0 and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


class UntrustedDirectory(LocalError):
    """Raised when the directory of the sockets is not this user's alone; the text says why, and what to do."""

    code = "untrusted-directory"


def replace_text(path: Path, text: str) -> None:
    """Writes a file in place of an old one, atomically: a reader sees the old text or all of the new. Raises OSError.

    Uses `path` with the suffix ".new" meanwhile. Does not wait until the text is on the disk.
    """
    temporary = path.with_suffix(".new")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
