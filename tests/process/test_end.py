"""A run has an end: after its total_steps nothing is drawn, the state is kept, and daemons serve it, leave or go on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from agora.node import paths
from agora.node.control.control_client import DaemonRefused, DaemonUnreachable
from agora.state.checkpoint import end_checkpoint
from agora.state.files import EXPORT_INDEX
from tests.process.harness import WAIT_S, Swarm, swarm, swarm_command, tiny

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]

STEPS = 6
OPTIMIZER = {"target_tokens": 1024, "warmup_steps": 2, "total_steps": STEPS}
MANIFEST = tiny(2, checkpoint={"every": 1, "keep": 1}, optimizer=OPTIMIZER)


def started(made: Swarm, at_end: str) -> None:
    for stage in ("0", "1"):
        made.start(f"peer-{stage}", stage, flags=["--at-end", at_end, "--export-at-end", "auto"])


def exported(made: Swarm) -> Path:
    """Waits until the founder, alone, has the result; returns its folder."""
    founder, other = made.daemons["peer-0"], made.daemons["peer-1"]
    made.until(lambda: bool(founder.events("ResultExported")), "the export")
    (folder,) = {Path(event["folder"]) for event in founder.events("ResultExported")}
    assert folder.is_relative_to(founder.root) and (folder / "config.json").is_file()
    steps = [stage["step"] for stage in json.loads((folder / EXPORT_INDEX).read_text())["stages"]]
    assert min(steps) >= STEPS
    assert not other.events("ResultExported") and not list(other.root.rglob("result"))
    return folder


def state_of(made: Swarm) -> str:
    try:
        return str(made.daemons["peer-0"].ask("status")["health"]["state"])
    except (DaemonUnreachable, DaemonRefused):
        return ""


def test_daemons_that_serve_draw_no_more_and_keep_and_export_the_state_of_the_end(tmp_path: Path) -> None:
    with swarm(tmp_path, MANIFEST) as made:
        started(made, "serve")
        made.until(lambda: state_of(made) == "COMPLETED", "the run to be completed")
        origin = made.daemons["peer-0"]
        made.until(lambda: origin.ask("report")["in_progress"] == 0, "the last microbatch")
        drawn = made.completed(origin)
        made.until(lambda: bool(origin.events("StateChanged", state="completed")), "the log to say so")
        made.until(lambda: bool(made.daemons["peer-1"].events("StateChanged", state="completed")), "the other's too")
        assert made.completed(origin) == drawn, "nothing was drawn meanwhile"
        assert origin.ask("evaluate", batches=1)["loss"] > 0, "it still answers"
        run = origin.ask("status")["run_id"]
        for stage, daemon in enumerate(made.daemons.values()):
            folder = paths.Home(daemon.root).checkpoints(run)

            def kept(folder: Path = folder, stage: int = stage) -> bool:
                return end_checkpoint(folder, run, stage, STEPS) is not None

            made.until(kept, f"stage {stage} to be kept")
            found = end_checkpoint(folder, run, stage, STEPS)
            assert found is not None and found.step == STEPS
            assert len(list(made.daemons.values())[stage].events("StepTaken")) == STEPS
        folder = exported(made)
        assert origin.ask("status")["result"] == {"state": "exported", "folder": str(folder), "why": ""}
        AutoModelForCausalLM.from_pretrained(folder)
        code, remote = swarm_command(tmp_path / "elsewhere", "status", made.invite)
        assert code == 0 and remote["health"]["state"] == "COMPLETED"
        assert str(tmp_path) not in json.dumps(remote), "other machines are told no path of this one"


def test_who_joins_an_ended_run_or_resumes_in_it_gets_its_state_and_trains_no_more(tmp_path: Path) -> None:
    with swarm(tmp_path, MANIFEST) as made:
        started(made, "serve")
        first, second = made.daemons["peer-0"], made.daemons["peer-1"]
        exported(made)
        taken = [len(daemon.events("StepTaken")) for daemon in (first, second)]
        joiner = made.start("late", "0", flags=["--at-end", "serve"])
        made.until(lambda: bool(joiner.events("StateChanged", state="completed")), "the joiner to see the end")
        second.ask("pause")
        made.until(lambda: bool(second.events("StateChanged", state="paused")), "the pause")
        assert joiner.ask("status")["health"]["state"] != "PAUSED", "only the one that its owner has paused"
        second.ask("resume")
        made.until(lambda: len(second.events("StateChanged", state="completed")) == 2, "it to see the end again")

        def collects() -> bool:
            try:
                steps = joiner.ask("collect", average=True)["steps"]
            except DaemonRefused:  # it does not yet see the one that has resumed
                return False
            return set(steps) == {"0", "1"} and min(steps.values()) >= STEPS

        made.until(collects, "the joiner to collect what it would export")
        assert [len(daemon.events("StepTaken")) for daemon in (first, second, joiner)] == [*taken, 0]


def test_daemons_that_leave_do_so_in_order_and_say_why(tmp_path: Path) -> None:
    with swarm(tmp_path, MANIFEST) as made:
        started(made, "leave")
        for daemon in made.daemons.values():
            daemon.end_is_intended = True
        for daemon in made.daemons.values():
            assert daemon.process.wait(2 * WAIT_S) == 0
            (left,) = daemon.events("StateChanged", state="left")
            assert f"has taken its {STEPS} steps" in left["reason"]
        folder = exported(made)
        written = (folder / EXPORT_INDEX).stat().st_mtime_ns
        taken = [len(daemon.events("StepTaken")) for daemon in made.daemons.values()]
        made.invite = ""
        started(made, "leave")  # as a service manager would that starts again whatever ended
        for daemon in made.daemons.values():
            daemon.end_is_intended = True
            assert daemon.process.wait(2 * WAIT_S) == 0
        assert [len(daemon.events("StepTaken")) for daemon in made.daemons.values()] == taken, "it trains no more"
        assert (exported(made) / EXPORT_INDEX).stat().st_mtime_ns == written, "and exports no more"


def test_daemons_that_go_on_keep_the_state_of_the_end(tmp_path: Path) -> None:
    """The newest checkpoint is rotated; the one of the end stays."""
    with swarm(tmp_path, MANIFEST) as made:
        started(made, "go-on")
        origin = made.daemons["peer-0"]
        made.until(lambda: int(origin.ask("status")["step"]) > 3 * STEPS, "it to go on")
        run = origin.ask("status")["run_id"]
        found = end_checkpoint(paths.Home(origin.root).checkpoints(run), run, 0, STEPS)
        assert found is not None and found.step < 2 * STEPS
        assert state_of(made) != "COMPLETED"
        exported(made)
