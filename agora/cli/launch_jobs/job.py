"""What a job is: the flags that it follows from, and the files and commands that start and end it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from agora import __version__

Tool = Literal["ssh", "slurm", "kubernetes", "skypilot"]
TOOLS: Final[tuple[Tool, ...]] = ("ssh", "slurm", "kubernetes", "skypilot")
LEAVE_TIMEOUT_S: Final = 30  # for a daemon to leave, which takes about 10 s, before a tool kills it
PACKAGE: Final = f"agora-swarm=={__version__}"


@dataclass(frozen=True, slots=True)
class LaunchRequest:
    """The flags of `swarm launch`.

    gpus: a kind as the tool knows it, such as H100 or H100:4; "" for none. hosts: of ssh. package: what pip installs.
    program: agora-node where it is installed already, "" to install it. image: the container of Kubernetes.
    """

    tool: Tool
    count: int = 1
    gpus: str = ""
    hosts: tuple[str, ...] = ()
    package: str = PACKAGE
    program: str = ""
    image: str = "agora-node"


@dataclass(frozen=True, slots=True)
class Command:
    """A command of this machine. input: for its standard input. environment: further variables."""

    arguments: tuple[str, ...]
    input: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Job:
    """What a tool gets: files by name, to be written beside each other, and the commands that start and end it."""

    files: Mapping[str, str]
    up: tuple[Command, ...]
    down: tuple[Command, ...]
    logs: str  # how to see what the daemons say


def hide(invite: str, text: str) -> str:
    """Returns `text` without the invite."""
    return text.replace(invite, "(the invite)") if invite else text
