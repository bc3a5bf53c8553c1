"""Reads the daemon's settings from the command line, AGORA_* variables, DIR/agora.toml; the first that has one wins."""

from __future__ import annotations

import difflib
import ipaddress
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
from agora_protocol.errors import LocalError
from agora_protocol.ids import Span
from agora_protocol.limits import MAX_RELAYED_PEERS
from pydantic import AfterValidator

from agora.net.shaping.bandwidth import RateLimits, parse_rate
from agora.net.shaping.link import LinkSpec
from agora.node.limits.pausing import Hours

PREFIX = "AGORA_"
FLAGS = "the command line"
ENVIRONMENT = "the environment"
MAX_PORT = 65_535
OTHER_VARIABLES = frozenset({"AGORA_HOME", "AGORA_RUNTIME_DIR", "AGORA_FAULTS", "AGORA_FAULTS_LOG"})
_HOST_PORT = re.compile(r"(?:\[(?P<ip6>[^]]*)\]|(?P<ip4>[^:]*)):(?P<port>\d{1,5})", re.ASCII)


class SettingsError(LocalError):
    """Raised for an unknown or impossible setting; the text names its source and what would be right.

    source: FLAGS, ENVIRONMENT or the file's path; the command's exit code is 2 for FLAGS, otherwise 1.
    """

    code = "settings"

    def __init__(self, text: str, source: str) -> None:
        super().__init__(text)
        self.exit_code = 2 if source == FLAGS else 1


def _check_rate(text: str) -> str:
    parse_rate(text)
    return text


class Settings(pydantic.BaseModel):
    """What the owner of a machine decides about its daemon: device, stages, addresses, limits, hours."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    device: str = "auto"  # "auto", "cpu", "cuda", "cuda:1"
    stages: Annotated[str, AfterValidator(lambda text: text if text == "auto" else str(Span.parse(text)))] = "auto"
    # Multiaddrs, HOST:PORT or [HOST]:PORT; port 0 lets the system choose.
    listen: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0", "/ip6/::/tcp/0")
    announce: tuple[str, ...] = ()  # further multiaddrs under which others can reach this peer
    allow_private: bool = False  # whether addresses of a LAN, a VPN or loopback are announced to peers and dialled
    upnp: bool = False  # whether the router is asked to forward the ports
    relay_peers: int = pydantic.Field(16, ge=0, le=MAX_RELAYED_PEERS)  # how many it relays for, if it can be dialled
    relay_mbit: float = pydantic.Field(0.0, ge=0.0)  # Mbit/s of all that it relays; 0: no limit
    # RATE,RTT[,JITTER[,LOSS]] that this peer's streams emulate; "" is the network as it is.
    link: Annotated[str, AfterValidator(lambda text: text and LinkSpec.parse(text).text)] = ""
    threads: int = pydantic.Field(0, ge=0, le=1024)  # compute threads; 0: all cores
    slowdown: float = pydantic.Field(1.0, ge=1.0, le=1000.0)  # computes this many times slower, by sleeping
    memory_gib: float = pydantic.Field(0.0, ge=0.0)  # what the daemon may use; 0: what the machine has free
    most_stages: int = pydantic.Field(0, ge=0)  # the longest span that placement may choose; 0: what fits into memory
    rebalance: bool = True  # whether it moves by itself where the swarm is slowest; never with chosen `stages`
    allow_files: bool = False  # whether a manifest that came over the network may name files of this machine
    # Files, and folders of files, that a manifest names and that lie elsewhere here; in one text, ":" is between them.
    data: tuple[str, ...] = ()
    corpus_cache: str = ""  # "" is DIR/corpus; may be shared by several daemons
    base_model: str = ""  # the model that the run begins with: its folder, or its Hugging Face Hub id; "" is none
    disk_gib: float = pydantic.Field(0.0, ge=0.0)  # what the data directory may hold; 0: what the disk has free
    upload_limit: Annotated[str, AfterValidator(_check_rate)] = ""  # over all traffic, such as 1MB/s; "" is none
    download_limit: Annotated[str, AfterValidator(_check_rate)] = ""  # likewise
    # FROM-TO[,FROM-TO] in local time, such as 22-07: outside it is paused; "" is all day.
    hours: Annotated[str, AfterValidator(lambda text: str(Hours.parse(text)))] = ""
    # What follows when the run has taken its total_steps: it serves the state and trains no more, leaves, or trains on.
    at_end: Literal["serve", "leave", "go-on"] = "serve"
    # Whether it writes the result into the data directory then: if it is the one to do so, whoever it is, or never.
    export_at_end: Literal["auto", "always", "never"] = "auto"
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @pydantic.field_validator("listen", "announce", mode="before")
    @classmethod
    def _split_addresses(cls, value: object) -> object:
        if isinstance(value, str):
            value = [part.strip() for part in value.split(",") if part.strip()]
        return tuple(_as_multiaddr(str(part)) for part in value) if isinstance(value, list | tuple) else value

    @pydantic.field_validator("data", mode="before")
    @classmethod
    def _split_paths(cls, value: object) -> object:
        return tuple(filter(None, value.split(os.pathsep))) if isinstance(value, str) else value

    @property
    def link_spec(self) -> LinkSpec | None:
        return LinkSpec.parse(self.link) if self.link else None

    @property
    def memory_bytes(self) -> int:
        return int(self.memory_gib * 2**30)

    @property
    def disk_bytes(self) -> int:
        return int(self.disk_gib * 2**30)

    @property
    def rate_limits(self) -> RateLimits:
        return RateLimits(parse_rate(self.upload_limit), parse_rate(self.download_limit))

    @property
    def work_hours(self) -> Hours:
        return Hours.parse(self.hours)

    @property
    def named_base_model(self) -> Path | None:
        return Path(self.base_model).expanduser() if self.base_model else None

    @property
    def data_places(self) -> tuple[Path, ...]:
        return tuple(Path(place).expanduser() for place in self.data)

    @property
    def names_hub_model(self) -> bool:
        from agora.tuning.base.hub import hub_id_of

        return self.named_base_model is not None and hub_id_of(self.named_base_model) is not None

    def with_fetched_base_model(self, show_line: Callable[[str], None]) -> Settings:
        """Returns settings whose base_model is a folder, see find_or_fetch_base_model; unchanged if none is named.

        May fetch gigabytes, and blocks meanwhile. Raises BaseModelError if the model cannot be fetched.
        """
        from agora.tuning.base.hub import find_or_fetch_base_model

        if self.named_base_model is None:
            return self
        return self.model_copy(update={"base_model": str(find_or_fetch_base_model(self.named_base_model, show_line))})

    @property
    def span(self) -> Span | None:
        return None if self.stages == "auto" else Span.parse(self.stages)


def _as_multiaddr(address: str) -> str:
    if address.startswith("/"):
        return address
    match = _HOST_PORT.fullmatch(address)
    if match is not None and int(match["port"]) <= MAX_PORT:
        with suppress(ValueError):
            if match["ip6"] is not None:
                # A zone ("%eth0") has no place in the multiaddr of a TCP port.
                host = ipaddress.IPv6Address(match["ip6"])
                if host.scope_id is None:
                    return f"/ip6/{host}/tcp/{int(match['port'])}"
            else:
                return f"/ip4/{ipaddress.IPv4Address(match['ip4'])}/tcp/{int(match['port'])}"
    raise ValueError(
        f"{address!r} is not an address; write /ip4/0.0.0.0/tcp/31330, 0.0.0.0:31330, or for IPv6 [::]:31330"
    )


def load(file: Path, flags: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> Settings:
    """Returns the settings in force: `flags` win over AGORA_* variables, these over `file`, the file over defaults.

    flags: values from the command line by setting, None for a flag that was not given. A missing file has no settings.
    Raises SettingsError, which names the source, for an unknown setting, an invalid value, and a file that cannot be
    read.
    """
    # Not pydantic-settings: it cannot say which source a wrong value came from, ignores AGORA_ variables that it does
    # not know, and reads only this process's environment. It would save the lines that merge three dicts.
    variables = {key: value for key, value in environment.items() if key not in OTHER_VARIABLES}
    layers: list[tuple[str, dict[str, Any]]] = [
        (str(file), _read_toml(file)),
        (ENVIRONMENT, {k.removeprefix(PREFIX).lower(): v for k, v in variables.items() if k.startswith(PREFIX)}),
        (FLAGS, {key: value for key, value in flags.items() if value is not None}),
    ]
    merged: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for source, values in layers:
        for key in values:
            if key not in Settings.model_fields:
                shown = PREFIX + key.upper() if source == ENVIRONMENT else key
                raise SettingsError(f"{source} sets the unknown {shown}{_nearest(key, source)}", source)
        merged |= values
        origin |= dict.fromkeys(values, source)
    try:
        return Settings.model_validate(merged)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        key = str(first["loc"][0]) if first["loc"] else ""
        reason = first["msg"].removeprefix("Value error, ").rstrip(".")
        source = origin.get(key, FLAGS)
        raise SettingsError(f"{source} sets {key} wrongly: {reason}.", source) from None


def _nearest(key: str, source: str) -> str:
    close = difflib.get_close_matches(key, Settings.model_fields, n=1, cutoff=0.5)
    if not close:
        return f"; known are {', '.join(sorted(Settings.model_fields))}"
    return f"; did you mean {PREFIX + close[0].upper() if source == ENVIRONMENT else close[0]}?"


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{file} is not TOML: {error}; repair or remove it", str(file)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"cannot read {file}: {error}; repair or remove it", str(file)) from None
