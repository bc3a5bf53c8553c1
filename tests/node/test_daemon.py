"""Claims about a daemon's life: what it answers to whoever asked it to move, and the order of pauses and work."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from agora_protocol.errors import LocalError
from agora_protocol.identity import Identity
from agora_protocol.ids import PeerId, Span
from agora_protocol.manifest import preset

from agora.core.tasks import BackgroundTasks
from agora.node import runs
from agora.node.daemon_context import DaemonContext, StartPhases, SystemdNotifier
from agora.node.paths import RUNTIME_VARIABLE, Home, make_private
from agora.node.process import daemon as daemon_module
from agora.node.process import joining
from agora.node.process import main as main_module
from agora.node.process.daemon import Daemon
from agora.node.process.main import END_TIMEOUT_S
from agora.node.process.metrics import DaemonMetrics
from agora.node.process.watchdog import Watchdog
from agora.node.settings import Settings
from agora.observe import events
from agora.observe.metrics import EventMetrics
from agora.observe.reporter import Reporter
from agora.swarm.swarm_clock import SwarmClock
from tests.virtual_time import run


class LoadsNothing(Daemon):
    """Holds the first of two stages, gives it up when it is to move, and cannot load any stage."""

    def __init__(self, home: Path) -> None:
        context = SimpleNamespace(
            me=PeerId("12D3KooW"),
            reference=SimpleNamespace(run="", name="poems"),
            home=Home(home),
            settings=Settings(),
            incarnation=1,
            clock=SwarmClock(0.0, lambda: 0.0),
            reporter=Reporter(),
            report_event=lambda _event: None,
            notifier=SystemdNotifier({}),
            phases=SimpleNamespace(current=""),
            age_s=lambda: 0.0,
        )
        super().__init__(cast(Any, context))
        self.signed = cast(Any, SimpleNamespace(manifest=SimpleNamespace(stage_count=2)))
        self.loaded = cast(Any, SimpleNamespace(span=Span(0, 0)))

    async def _give_up_span(self, local_peer: Any, loaded: Any) -> None:
        self.loaded = None

    async def _serve_span(self, local_peer: Any, wanted: Span | None) -> Any:
        raise LocalError(f"no memory for stages {wanted}")


def test_a_failed_move_says_why_also_when_the_former_stages_cannot_be_loaded_again(tmp_path: Path) -> None:
    async def main() -> None:
        daemon = LoadsNothing(tmp_path)
        move = asyncio.create_task(daemon.move(Span(1, 1)))
        await asyncio.sleep(0)
        with pytest.raises(LocalError, match="no memory for stages 0"):
            await daemon._carry_out_move(cast(Any, None))
        with pytest.raises(LocalError, match="no memory for stages 1"):
            await move

    asyncio.run(main())


def test_a_move_that_a_pause_ends_leaves_no_move_behind(tmp_path: Path) -> None:
    class NeverGivesUp(LoadsNothing):
        async def _give_up_span(self, local_peer: Any, loaded: Any) -> None:
            await asyncio.Event().wait()

    async def main() -> None:
        daemon = NeverGivesUp(tmp_path)
        move = asyncio.create_task(daemon.move(Span(1, 1)))
        await asyncio.sleep(0)
        carrying_out = asyncio.create_task(daemon._carry_out_move(cast(Any, None)))
        await asyncio.sleep(0)
        assert daemon.describe_state() == "moving to stages 1"
        carrying_out.cancel()
        with pytest.raises(LocalError, match="has not moved"):
            await move
        assert daemon.describe_state() == "still starting"
        assert daemon._movable_span() is daemon.loaded, "after the pause the daemon can move again"

    asyncio.run(main())


def test_a_paused_or_leaving_daemon_does_not_promise_to_move(tmp_path: Path) -> None:
    async def main() -> None:
        daemon = LoadsNothing(tmp_path)
        daemon.pausing.pause()
        with pytest.raises(LocalError, match="paused by its owner"):
            await asyncio.wait_for(daemon.move(Span(1, 1)), 5)
        daemon.pausing.resume()
        daemon.leave("asked to")
        with pytest.raises(LocalError, match="is leaving"):
            await asyncio.wait_for(daemon.move(Span(1, 1)), 5)

    asyncio.run(main())


def test_a_pause_that_ends_while_the_work_is_being_cancelled_still_closes_what_was_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class ResumedWhileItEnds(LoadsNothing):
        def __init__(self, home: Path) -> None:
            super().__init__(home)
            self.signed = self.loaded = None
            self.happened: list[str] = []

        async def _start_and_serve(self) -> None:
            self.happened.append("opened")
            if self.happened.count("opened") == 2:
                self.leave("asked to")
            else:
                self.pausing.pause()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.pausing.resume()
                raise

        async def _stay_paused(self) -> None:
            assert not self.pausing.reason
            self.happened.append("closed")

    async def main() -> None:
        monkeypatch.setenv(RUNTIME_VARIABLE, str(tmp_path))
        daemon = ResumedWhileItEnds(tmp_path)
        await asyncio.wait_for(daemon.run(), 20)
        assert daemon.happened == ["opened", "closed", "opened"]

    asyncio.run(main())


class StandsBy(LoadsNothing):
    """Has no span yet, and waits for one for ever. reported: the events."""

    def __init__(self, home: Path | DaemonContext, on_leave: Callable[[], None] = lambda: None) -> None:
        super().__init__(home if isinstance(home, Path) else home.home.root)
        self.signed = self.loaded = None
        self.reported: list[events.Event] = []
        self._report_event = self.reported.append
        self.stands_by = asyncio.Event()

    async def _start_and_serve(self) -> None:
        self.stands_by.set()
        await asyncio.Event().wait()


async def fail() -> None:
    raise ZeroDivisionError("a bug")


def test_a_task_that_ends_while_no_span_is_held_ends_the_daemon_which_says_which(tmp_path: Path) -> None:
    async def main() -> None:
        daemon = StandsBy(tmp_path)
        running = asyncio.create_task(daemon.run())
        await daemon.stands_by.wait()
        BackgroundTasks(daemon.fail_since_task_ended).start("membership", fail())
        with pytest.raises(LocalError, match="task membership failed .ZeroDivisionError: a bug.; please report"):
            await asyncio.wait_for(running, 20)
        assert events.TaskFailed("membership", "ZeroDivisionError: a bug") in daemon.reported
        assert [event.state for event in daemon.reported if isinstance(event, events.StateChanged)] == ["leaving"]

    asyncio.run(main())


class Hangs(StandsBy):
    """Serves a span of which every part hangs for as long as it is let, and more: what is cancelled ends 1 s later."""

    def __init__(self, home: Path) -> None:
        super().__init__(home)
        self.reached: list[str] = []
        hang = self.hang
        self.loaded = cast(
            Any,
            SimpleNamespace(
                span=Span(0, 0),
                collector=SimpleNamespace(close=lambda: None),
                tasks=BackgroundTasks(self.fail_since_task_ended),
                origin=SimpleNamespace(leave=lambda within_s: hang("origin")),
                end_steps_and_write_checkpoints=lambda within_s: hang("checkpoints", within_s),
            ),
        )
        self.local_peer = cast(
            Any,
            SimpleNamespace(
                host=SimpleNamespace(died=asyncio.Event()),
                membership=SimpleNamespace(set_state=lambda state: hang("directory")),
                ledger=SimpleNamespace(drain=lambda within_s, reason, ending_s: hang("work", within_s + ending_s)),
            ),
        )
        self._span_closing.push_async_callback(asyncio.sleep, 1.0)  # the device's thread, once closing was cancelled
        self._span_closing.push_async_callback(hang, "span")
        self._peer_closing.push_async_callback(hang, "peer")

    async def hang(self, part: str, seconds: float = 1e6) -> None:
        self.reached.append(part)
        await asyncio.sleep(seconds)

    def sample_node_report(self) -> Any:
        return None

    def _total_traffic(self) -> Any:
        return None


@pytest.mark.parametrize("is_starting", [False, True], ids=["serving", "in a start that does not end when cancelled"])
def test_a_daemon_of_which_everything_hangs_has_left_within_ten_seconds_and_has_tried_every_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_starting: bool
) -> None:
    monkeypatch.setattr(Watchdog, "report_traffic", lambda self, report: None)
    monkeypatch.setattr(Watchdog, "run", lambda self: asyncio.Event().wait())

    class EndsLate(Hangs):
        async def _start_and_serve(self) -> None:
            try:
                await super()._start_and_serve()
            except asyncio.CancelledError:
                await asyncio.sleep(1e6 if is_starting else 0.0)

    async def main() -> float:
        begun: list[float] = []
        daemon = EndsLate(tmp_path)
        daemon.loaded = None if is_starting else daemon.loaded
        daemon_of_main = asyncio.create_task(daemon.run())
        await daemon.stands_by.wait()
        begun.append(asyncio.get_running_loop().time())
        daemon.leave("asked to")
        daemon.leave("asked to, again")
        await daemon_of_main
        served = [] if is_starting else ["origin", "work", "checkpoints"]
        assert daemon.reached == ["directory", *served, "span", "peer"]
        assert daemon.leave_reason == "asked to"
        return asyncio.get_running_loop().time() - begun[0]

    assert run(main()) <= END_TIMEOUT_S


def test_a_task_that_ends_in_a_pause_ends_the_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        monkeypatch.setattr(joining, "register_paused", lambda *_: None)
        daemon = StandsBy(tmp_path)
        daemon.pausing.pause()
        running = asyncio.create_task(daemon.run())
        await asyncio.sleep(0)
        BackgroundTasks(daemon.fail_since_task_ended).start("metrics server", fail())
        with pytest.raises(LocalError, match="The daemon.s task metrics server failed"):
            await asyncio.wait_for(running, 20)

    asyncio.run(main())


def test_an_end_of_the_metrics_task_ends_the_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RUNTIME_VARIABLE, str(tmp_path))
    monkeypatch.setattr(daemon_module, "Daemon", StandsBy)
    context = cast(Any, SimpleNamespace(home=Home(tmp_path / "home"), report_event=lambda _event: None))
    context.home.root.mkdir()

    monkeypatch.setattr(DaemonMetrics, "run", lambda self: fail())
    with pytest.raises(LocalError, match="The daemon.s task metrics failed"):
        asyncio.run(asyncio.wait_for(main_module._run_until_left(context, EventMetrics(), lambda: None), 20))


def test_a_disk_that_takes_no_row_of_metrics_ends_the_rows_and_not_the_task(tmp_path: Path) -> None:
    told: list[events.Event] = []

    async def main() -> None:
        missing = tmp_path / "no such folder"
        metrics = DaemonMetrics(EventMetrics(), missing, cast(Any, None), told.append)
        running = asyncio.create_task(metrics.run())
        while not told:
            await asyncio.sleep(0)
        assert not running.done()
        running.cancel()

    asyncio.run(asyncio.wait_for(main(), 20))
    assert [type(event) for event in told] == [events.DiskTrouble]


class OpensItsPeer(Daemon):
    """Opens a real local peer on a real p2pd, and stands by from then on."""

    def __init__(self, context: DaemonContext) -> None:
        super().__init__(context)
        self.has_opened = asyncio.Event()

    async def _start_and_serve(self) -> None:
        await self._open_local_peer()
        self.has_opened.set()
        await asyncio.Event().wait()


class Told:
    """A reporter's sink that keeps the events."""

    def __init__(self) -> None:
        self.events: list[events.Event] = []

    def take(self, event: events.Event, at_unix: float) -> None:
        self.events.append(event)


def real_context(root: Path, told: Told) -> DaemonContext:
    reporter, home = Reporter([told]), Home(root)
    home.root.mkdir()
    file = root / "run.toml"
    file.write_text(preset("tiny").to_toml())
    notifier = SystemdNotifier({})
    return DaemonContext(
        reference=runs.resolve(str(file), home),
        home=home,
        settings=Settings(upload_limit="1MB/s", allow_private=True),
        identity=Identity.load_or_create(home.identity),
        incarnation=1,
        clock=SwarmClock(1e9, lambda: 0.0),
        reporter=reporter,
        notifier=notifier,
        phases=StartPhases(reporter.report, notifier),
    )


@pytest.mark.parametrize("task", ["p2pd", "rate limiter", "network"])
def test_whatever_carries_the_bytes_is_watched_from_the_moment_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str
) -> None:
    monkeypatch.setenv(RUNTIME_VARIABLE, str(tmp_path / "run"))
    make_private(tmp_path / "run")
    context = real_context(tmp_path / "home", told := Told())

    async def main() -> None:
        daemon = OpensItsPeer(context)
        running = asyncio.create_task(daemon.run())
        waits = asyncio.create_task(daemon.has_opened.wait())
        await asyncio.wait([running, waits], return_when=asyncio.FIRST_COMPLETED)
        assert daemon.local_peer is not None
        match task:
            case "p2pd":
                daemon.local_peer.host.p2p._child.kill()
            case "rate limiter":
                assert daemon.local_peer.host.rate_limiter is not None
                daemon.local_peer.host.rate_limiter._task.cancel()
            case "network":
                monkeypatch.setattr(daemon.local_peer.network, "limits", None)
        with pytest.raises(LocalError, match="p2pd ended by itself" if task == "p2pd" else f"task {task} failed"):
            await asyncio.wait_for(running, 60)

    asyncio.run(main())
    assert [event.task for event in told.events if isinstance(event, events.TaskFailed)][:1] == [task]
