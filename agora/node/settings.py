"""Reads the daemon's settings: the command line comes before AGORA_* variables, and these before DIR/agora.toml."""

from __future__ import annotations

import difflib
import ipaddress
import os
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
from agora_protocol.errors import LocalError
from agora_protocol.ids import Span
from agora_protocol.limits import MAX_RELAYED_PEERS
from pydantic import AfterValidator

from agora.core.machine_limits import OwnersMemory
from agora.core.user_paths import expand_home
from agora.net.shaping.bandwidth import RateLimits, parse_rate
from agora.net.shaping.link import LinkSpec
from agora.node.daemon_registry import SUPERVISOR_VARIABLE
from agora.node.limits.pausing import Hours
from agora.node.paths import HOME_VARIABLE, RUNTIME_VARIABLE

PREFIX = "AGORA_"
FLAGS = "the command line"
ENVIRONMENT = "the environment"
MAX_PORT = 65_535
DONE_VARIABLE = "AGORA_QUEUE_DONE"  # the runs of a queue that are over, for the daemon of the next one
OTHER_VARIABLES = frozenset(
    {HOME_VARIABLE, RUNTIME_VARIABLE, SUPERVISOR_VARIABLE, DONE_VARIABLE, "AGORA_FAULTS", "AGORA_FAULTS_LOG"}
)
SEPARATORS = {"data": os.pathsep, "queue": "\n"}  # between several values in one variable; "," else
_HOST_PORT = re.compile(r"(?:\[(?P<ip6>[^]]*)\]|(?P<ip4>[^:]*)):(?P<port>\d{1,5})", re.ASCII)


IdleObserver = Literal["gpu", "person", "processors", "command"]


class SettingsError(LocalError):
    """Raised for an unknown or impossible setting, or two that contradict each other; the text names their sources.

    source: FLAGS, ENVIRONMENT or the file's path. The command's exit code is 2 for FLAGS, otherwise 1.
    """

    code = "settings"

    def __init__(self, text: str, source: str) -> None:
        super().__init__(text)
        self.exit_code = 2 if source == FLAGS else 1


def _check_rate(text: str) -> str:
    parse_rate(text)
    return text


def _check_endpoint(text: str) -> str:
    if text and _split_endpoint(text) is None:
        raise ValueError(f"{text!r} is not HOST:PORT; write 127.0.0.1:9464, or for IPv6 [::1]:9464")
    return text


def _split_endpoint(text: str) -> tuple[str, int] | None:
    match = _HOST_PORT.fullmatch(text)
    if match is None or int(match["port"]) > MAX_PORT:
        return None
    host = match["ip6"] or match["ip4"] or "127.0.0.1"
    try:
        return str(ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)), int(match["port"])
    except ValueError:
        return None


class Settings(pydantic.BaseModel):
    """What the owner of a machine decides about its daemon: device, stages, addresses, limits, hours."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    device: str = "auto"  # "auto", "cpu", "cuda", "cuda:1"; "all", or several with commas: a daemon for each
    compile: Literal["auto", "never"] = "auto"  # whether layers are compiled where that pays: on GPUs
    precision: Literal["auto", "float32"] = "auto"  # of products; auto: 16 bits where the device is faster with them
    stages: Annotated[str, AfterValidator(lambda text: text if text == "auto" else str(Span.parse(text)))] = "auto"
    # Multiaddrs, HOST:PORT or [HOST]:PORT; port 0 lets the system choose.
    listen: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0", "/ip6/::/tcp/0")
    announce: tuple[str, ...] = ()  # further multiaddrs under which others can reach this peer
    allow_private: bool = False  # whether addresses of a LAN, a VPN or loopback are announced to peers and dialled
    upnp: bool = False  # whether the router is asked to forward the ports
    relay_peers: int = pydantic.Field(default=16, ge=0, le=MAX_RELAYED_PEERS)  # relayed for, if it can be dialled
    relay_mbit: float = pydantic.Field(default=0.0, ge=0.0)  # Mbit/s of all that it relays; 0: no limit
    # RATE,RTT[,JITTER[,LOSS]] that this peer's streams emulate; "" is the network as it is.
    link: Annotated[str, AfterValidator(lambda text: text and LinkSpec.parse(text).text)] = ""
    threads: int = pydantic.Field(default=0, ge=0, le=1024)  # compute threads; 0: as many as this process may use
    slowdown: float = pydantic.Field(default=1.0, ge=1.0, le=1e6)  # computes this many times slower, by sleeping
    # For experiments: what a stage's forward pass takes on an emulated accelerator, other jobs in proportion; 0: none.
    emulated_ms: float = pydantic.Field(default=0.0, ge=0.0, le=60_000.0)
    memory_gib: float = pydantic.Field(default=0.0, ge=0.0)  # what the daemon may use; 0: what the machine has free
    host_memory_gib: float = pydantic.Field(default=0.0, ge=0.0)  # of the machine's memory beside a GPU; 0: memory_gib
    # The longest span that placement may choose; 0: what fits into memory.
    most_stages: int = pydantic.Field(default=0, ge=0)
    rebalance: bool = True  # whether it moves by itself where the swarm is slowest; never with chosen `stages`
    allow_files: bool = False  # whether a manifest that this owner did not write may name files of this machine
    # Files, and folders of files, that a manifest names and that lie elsewhere here; in one text, ":" is between them.
    data: tuple[str, ...] = ()
    corpus_cache: str = ""  # "" is DIR/corpus; may be shared by several daemons
    base_model: str = ""  # the model that the run begins with: its folder, or its Hugging Face Hub id; "" is none
    # The adapter that the run begins with: its folder or its Hub id; "" if there is none, or if peers supply it.
    adapter: str = ""
    disk_gib: float = pydantic.Field(default=0.0, ge=0.0)  # what the data directory may hold; 0: what the disk has free
    upload_limit: Annotated[str, AfterValidator(_check_rate)] = ""  # over all traffic, such as 1MB/s; "" is none
    download_limit: Annotated[str, AfterValidator(_check_rate)] = ""  # likewise
    # FROM-TO[,FROM-TO] in local time, such as 22-07: outside it is paused; "" is all day.
    hours: Annotated[str, AfterValidator(lambda text: str(Hours.parse(text)))] = ""
    when_idle: bool = False  # whether it is paused while a person or another program uses the machine
    # For how long nobody must have used the machine before the daemon goes on, and which kinds of use count.
    idle_minutes: float = pydantic.Field(default=10.0, ge=0.0, le=1440.0)
    idle_observers: tuple[IdleObserver, ...] = ("gpu", "person", "processors", "command")
    # A shell command that says whether the machine is in use, by exit code 0; "" is none. Asked with when_idle.
    in_use_command: str = ""
    watts: float = pydantic.Field(default=0.0, ge=0.0, le=1e6)  # of work, for estimates; 0: what the GPU reports
    price_per_kwh: float = pydantic.Field(default=0.0, ge=0.0, le=1e6)  # of electricity, in any currency, for estimates
    # What follows when the run has taken its total_steps: it serves the state and trains no more, leaves, or trains on.
    at_end: Literal["serve", "leave", "go-on"] = "serve"
    # Whether it writes the result into the data directory then. auto: only if this peer is the chosen exporter.
    export_at_end: Literal["auto", "always", "never"] = "auto"
    queue: tuple[str, ...] = ()  # the runs that are joined one after another when this one is over; one a line
    notify: bool = False  # whether the desktop shows how a run ends
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    metrics: Annotated[str, AfterValidator(_check_endpoint)] = ""  # HOST:PORT where Prometheus gets them; "" is nowhere
    page: bool = False  # whether browsers are shown the run
    page_address: Annotated[str, AfterValidator(_check_endpoint)] = "127.0.0.1:8800"

    @pydantic.field_validator("listen", "announce", mode="before")
    @classmethod
    def _split_addresses(cls, value: object) -> object:
        if isinstance(value, str):
            value = [part.strip() for part in value.split(",") if part.strip()]
        return tuple(_as_multiaddr(str(part)) for part in value) if isinstance(value, list | tuple) else value

    @pydantic.field_validator("idle_observers", mode="before")
    @classmethod
    def _split_names(cls, value: object) -> object:
        return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value

    @pydantic.field_validator("data", mode="before")
    @classmethod
    def _split_paths(cls, value: object) -> object:
        return tuple(filter(None, value.split(os.pathsep))) if isinstance(value, str) else value

    @pydantic.field_validator("queue", mode="before")
    @classmethod
    def _split_runs(cls, value: object) -> object:
        return tuple(filter(None, map(str.strip, value.splitlines()))) if isinstance(value, str) else value

    @pydantic.model_validator(mode="after")
    def _check_queue_goes_on(self) -> Settings:
        if self.queue and self.at_end == "go-on":
            raise ValueError(
                "with at_end = go-on this run goes on after its end, and no run of the queue begins; leave one out"
            )
        return self

    @property
    def at_end_in_force(self) -> Literal["serve", "leave", "go-on"]:
        return "leave" if self.queue else self.at_end

    @property
    def link_spec(self) -> LinkSpec | None:
        return LinkSpec.parse(self.link) if self.link else None

    @property
    def names_several_devices(self) -> bool:
        return self.device == "all" or "," in self.device

    @property
    def owners_memory(self) -> OwnersMemory:
        return OwnersMemory(int(self.memory_gib * 2**30), int((self.host_memory_gib or self.memory_gib) * 2**30))

    @property
    def metrics_address(self) -> tuple[str, int] | None:
        return _split_endpoint(self.metrics) if self.metrics else None

    @property
    def page_endpoint(self) -> tuple[str, int] | None:
        return _split_endpoint(self.page_address) if self.page else None

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
        return expand_home(self.base_model) if self.base_model else None

    @property
    def named_adapter(self) -> Path | None:
        return expand_home(self.adapter) if self.adapter else None

    @property
    def data_places(self) -> tuple[Path, ...]:
        return tuple(expand_home(place) for place in self.data)

    @property
    def names_hub_files(self) -> bool:
        from agora.tuning.base.hub import hub_id_of

        return any(named is not None and hub_id_of(named) for named in (self.named_base_model, self.named_adapter))

    def with_fetched_base_model(self, show_line: Callable[[str], None]) -> Settings:
        """Returns settings whose base_model is a folder, see find_or_fetch_folder; unchanged if none is named.

        May fetch gigabytes, and blocks meanwhile. Raises BaseModelError if the model cannot be fetched.
        """
        from agora.tuning.base.hub import find_or_fetch_folder

        if self.named_base_model is None:
            return self
        return self.model_copy(update={"base_model": str(find_or_fetch_folder(self.named_base_model, show_line))})

    def with_fetched_adapter(self, show_line: Callable[[str], None]) -> Settings:
        """As with_fetched_base_model, for the adapter."""
        from agora.tuning.base.hub import find_or_fetch_folder

        if self.named_adapter is None:
            return self
        return self.model_copy(update={"adapter": str(find_or_fetch_folder(self.named_adapter, show_line, "adapter"))})

    def to_environment(self) -> dict[str, str]:
        """Returns the AGORA_* variables from which `load` makes these settings again, with any settings file."""
        values = self.model_dump()
        texts = {
            key: SEPARATORS.get(key, ",").join(value) if isinstance(value, tuple) else str(value)
            for key, value in values.items()
        }
        return {PREFIX + key.upper(): text for key, text in texts.items()}

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


def without_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment without the variables that are settings."""
    return {key: value for key, value in environment.items() if key in OTHER_VARIABLES or not key.startswith(PREFIX)}


def mapped_addresses(environment: Mapping[str, str], listen: Sequence[str]) -> tuple[str, ...]:
    """Returns the multiaddrs at which a rented machine's provider maps the ports of `listen`; () without any.

    Providers say it in variables: VAST_TCP_PORT_<port> with PUBLIC_IPADDR, and RUNPOD_TCP_PORT_<port> with
    RUNPOD_PUBLIC_IP (docs.vast.ai, docs.runpod.io).
    """
    found = []
    for prefix, host_variable in (("VAST_TCP_PORT_", "PUBLIC_IPADDR"), ("RUNPOD_TCP_PORT_", "RUNPOD_PUBLIC_IP")):
        for address in listen:
            inner = address.partition("/tcp/")[2].partition("/")[0]
            outer, host = environment.get(f"{prefix}{inner}", ""), environment.get(host_variable, "").strip()
            with suppress(ValueError):
                if address.startswith("/ip4/") and outer.isdecimal() and 0 < int(outer) <= MAX_PORT:
                    found.append(f"/ip4/{ipaddress.IPv4Address(host)}/tcp/{int(outer)}")
    return tuple(dict.fromkeys(found))


def load(file: Path, flags: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> Settings:
    """Returns the settings in force: `flags` win over AGORA_* variables, these over `file`, the file over defaults.

    flags: values from the command line by setting, None for a flag that was not given. A missing file has no settings.
    Raises SettingsError, which names the source, for an unknown setting, an invalid value, and a file that cannot be
    read. Without `announce`, takes what mapped_addresses finds.
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
        chosen = Settings.model_validate(merged)
        return chosen.model_copy(update={"announce": chosen.announce or mapped_addresses(environment, chosen.listen)})
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        key = str(first["loc"][0]) if first["loc"] else ""
        reason = first["msg"].removeprefix("Value error, ").rstrip(".")
        if not key:
            # A validator of the whole model: its text names the settings that contradict each other.
            named = {key: source for key, source in origin.items() if re.search(rf"\b{key}\b", reason)}
            sources = " and ".join(f"{key} from {source}" for key, source in named.items())
            blamed = FLAGS if FLAGS in named.values() else next(iter(named.values()), FLAGS)
            raise SettingsError(f"Two settings contradict each other, {sources}: {reason}.", blamed) from None
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
        raise SettingsError(f"{file} is not TOML: {error}; repair or remove it.", str(file)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"Cannot read {file}: {error}; repair or remove it.", str(file)) from None
