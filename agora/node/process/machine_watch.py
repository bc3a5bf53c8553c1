"""What a daemon tells its owner of this machine alone: who else uses it, and what a day of work costs, estimated."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from agora_protocol.errors import DeviceError

from agora.core.clock import boot_time
from agora.core.tasks import run_in_thread
from agora.node.limits.machine_use import (
    LOOK_INTERVAL_S,
    MachineUse,
    Observation,
    Observer,
    command_observer,
    gpu_observer,
    gpu_power_w,
    judge_use,
    person_observer,
    processors_observer,
)
from agora.node.limits.pausing import Pausing
from agora.node.settings import Settings
from agora.observe import events

POWER_INTERVAL_S: Final = 30.0  # seconds between two readings of what the GPU draws
MIN_ESTIMATE_S: Final = 60.0  # seconds of which a day is estimated at least
DAY_S: Final = 86_400.0


@dataclass(frozen=True, slots=True)
class DayEstimate:
    """What a day costs if it goes on as since the daemon's start, pauses included.

    sent, received: bytes of all streams. kwh, cost: None if the power, or the price, is not known.
    """

    sent: int
    received: int
    kwh: float | None
    cost: float | None


def estimate_day(
    traffic: events.Traffic, age_s: float, worked_s: float, watts: float | None, price_per_kwh: float
) -> DayEstimate | None:
    """Returns what a day costs if it goes on as in the last `age_s` seconds; None below MIN_ESTIMATE_S.

    traffic: in these seconds. worked_s: for how many of them the daemon worked. watts: while it works. price_per_kwh: 0
    for an unknown one.
    """
    if age_s < MIN_ESTIMATE_S:
        return None
    kwh = watts * 24.0 / 1000.0 * min(1.0, worked_s / age_s) if watts is not None else None
    return DayEstimate(
        sent=round(traffic.sent_bytes * DAY_S / age_s),
        received=round(traffic.received_bytes * DAY_S / age_s),
        kwh=round(kwh, 3) if kwh is not None else None,
        cost=round(kwh * price_per_kwh, 2) if kwh is not None and price_per_kwh else None,
    )


class MachineWatch:
    """Looks at the machine every few seconds: pauses the daemon while others use it, and reads the GPU's power."""

    def __init__(
        self,
        settings: Settings,
        pausing: Pausing,
        report_event: events.Report,
        observers: Sequence[Observer],
        gpu: Callable[[], str],
        clock: Callable[[], float] = boot_time,
    ) -> None:
        """observers: see observers_of. gpu: the id of the daemon's GPU for NVML, "" for none; may block. clock: that of
        `pausing`.
        """
        self._settings = settings
        self._pausing = pausing
        self._report_event = report_event
        self._observers = observers
        self._gpu = gpu
        self._clock = clock
        self._use = MachineUse()
        self._observations: Sequence[Observation] = ()
        self._began = self._looked_at = clock()
        self._worked_s = 0.0
        self._measured_w: float | None = None

    async def run(self) -> None:
        """Looks until cancelled."""
        power_due = self._clock()
        is_measured = not self._settings.watts and shutil.which("nvidia-smi") is not None
        while True:
            if is_measured and self._clock() >= power_due:
                power_due = self._clock() + POWER_INTERVAL_S
                await self._read_power()
            await asyncio.sleep(LOOK_INTERVAL_S)
            await self.look()

    async def look(self) -> None:
        """Asks all observers, if the daemon is to work only when idle, and pauses it or lets it go on."""
        now, is_working = self._clock(), not self._pausing.reason
        self._worked_s += now - self._looked_at if is_working else 0.0
        self._looked_at = now
        if not self._observers:
            return
        is_first = not self._observations
        self._observations = await run_in_thread(lambda: [observe() for observe in self._observers])
        self._use = judge_use(self._use, self._observations, self._clock(), self._idle_s)
        self._pausing.note_use(self._use)
        if is_first and all(one.why_unknown for one in self._observations):
            missing = "; ".join(f"{one.observer}: {one.why_unknown}" for one in self._observations)
            self._report_event(
                events.OwnerTold(
                    f"nothing here can tell whether the machine is in use ({missing}), so that it works always; "
                    "set in_use_command in agora.toml"
                )
            )

    async def _read_power(self) -> None:
        def read() -> float | None:
            card = self._gpu()
            return gpu_power_w(card) if card else None

        watts = await run_in_thread(read)
        if watts is not None and not self._pausing.reason:
            self._measured_w = watts

    @property
    def _idle_s(self) -> float:
        return 60.0 * self._settings.idle_minutes

    def describe(self, traffic: events.Traffic) -> dict[str, Any]:
        """Returns what `swarm status --json` has in "machine". traffic: since the daemon's start."""
        return {"when_idle": self._describe_use(), "day": self._describe_day(traffic)}

    def _describe_use(self) -> dict[str, Any] | None:
        if not self._observers:
            return None
        left = self._use.seen_at + self._idle_s - self._clock()
        return {
            "in_use": self._use.present_use,
            "last_use": self._use.cause,
            "resumes_in_s": round(max(0.0, left), 1) if self._use.makes_way and not self._use.present_use else None,
            "idle_minutes": self._settings.idle_minutes,
            "observers": {one.observer: one.why_unknown or "watched" for one in self._observations},
        }

    def _describe_day(self, traffic: events.Traffic) -> dict[str, Any] | None:
        watts = self._settings.watts or self._measured_w
        age_s = self._clock() - self._began
        day = estimate_day(traffic, age_s, self._worked_s, watts, self._settings.price_per_kwh)
        if day is None:
            return None
        return {
            "estimated": True,
            "sent_bytes": day.sent,
            "received_bytes": day.received,
            "kwh": day.kwh,
            "cost": day.cost,
            "watts": watts,
            "watts_from": "settings" if self._settings.watts else "the GPU" if watts else None,
            "price_per_kwh": self._settings.price_per_kwh or None,
        }


def gpu_id_of(device: str) -> str:
    """Returns the id by which NVML knows the GPU that `device` names, such as GPU-1234...; "" if it names none."""
    import torch

    from agora.train.device import choose_device

    try:
        chosen = choose_device(device)
        uuid = getattr(torch.cuda.get_device_properties(chosen), "uuid", "") if chosen.type == "cuda" else ""
    except (DeviceError, RuntimeError):  # the start says what is wrong with the device
        return ""
    return f"GPU-{uuid}" if uuid else ""


def observers_of(settings: Settings, gpu: Callable[[], str], unix: Callable[[], float]) -> list[Observer]:
    """Returns the observers of the owner's settings; [] without `when_idle`: then no use pauses it."""
    if not settings.when_idle:
        return []
    makers: Mapping[str, Callable[[], Observer]] = {
        "gpu": lambda: gpu_observer(gpu),
        "person": lambda: person_observer(unix),
        "processors": lambda: processors_observer(boot_time, counts=lambda: not gpu()),
        "command": lambda: command_observer(settings.in_use_command),
    }
    chosen = [name for name in settings.idle_observers if name != "command" or settings.in_use_command]
    return [makers[name]() for name in chosen]
