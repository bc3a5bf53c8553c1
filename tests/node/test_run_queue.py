"""Claims about a queue of runs: what makes a daemon join the next one, and what is known of each before it begins."""

from __future__ import annotations

from pathlib import Path

import pytest
from agora_protocol.errors import (
    AgoraError,
    DataError,
    DeviceError,
    DiskError,
    IdentityError,
    InputError,
    LocalError,
    ManifestError,
    NotAdmitted,
    OutOfMemory,
    ProtocolError,
)
from agora_protocol.manifest import preset

from agora.core.optional_packages import PackageMissing
from agora.data.local_files import DataMissing
from agora.node.paths import Home
from agora.node.process.joining import RunUnreachable
from agora.node.process.run_queue import another_run_may_succeed, check_queue, runs_left_before
from agora.node.settings import DONE_VARIABLE, Settings, SettingsError, load
from agora.node.span.load_span import RunFull
from agora.node.span.training_data import FilesNotAllowed
from agora.swarm.key_use import KeyInUse
from agora.tuning.base.store import BaseModelError


@pytest.mark.parametrize(
    ("error", "refuses"),
    [
        (NotAdmitted("not listed"), True),
        (RunUnreachable("nobody answers"), True),
        (RunFull("needed nowhere"), True),
        (OutOfMemory("no stage fits"), True),
        (ProtocolError("wrong-version", "older"), True),
        (ManifestError("false"), True),
        (InputError("beyond the last stage"), True),
        (DataError("no such column"), True),
        (BaseModelError("not found"), True),
        (PackageMissing("peft"), True),
        (DataMissing("poems.txt"), True),
        (FilesNotAllowed("poems.txt"), True),
        (LocalError("p2pd ended"), False),
        (DiskError("full"), False),
        (DeviceError("no such card"), False),
        (IdentityError("damaged"), False),
        (KeyInUse("copied"), False),
        (SettingsError("unknown key", "agora.toml"), False),
    ],
)
def test_the_next_run_is_joined_when_the_run_refuses_the_machine_and_not_when_the_machine_fails(
    error: AgoraError, refuses: bool
) -> None:
    assert another_run_may_succeed(error) is refuses


def test_every_queued_run_is_looked_up_before_the_first_begins(tmp_path: Path) -> None:
    file = tmp_path / "poems.toml"
    file.write_text(preset("tiny").model_copy(update={"name": "poems"}).to_toml())
    home = Home(tmp_path / "home")
    assert check_queue((str(file),), home) == ("poems",)
    with pytest.raises(InputError):
        check_queue((str(file), "prooofs"), home)
    with pytest.raises(InputError, match="into files"):
        check_queue(("-",), home)


def test_a_run_that_goes_on_at_its_end_has_no_queue(tmp_path: Path) -> None:
    assert Settings(queue=("proofs",)).at_end_in_force == "leave"
    assert Settings(at_end="go-on").at_end_in_force == "go-on"
    with pytest.raises(SettingsError, match="no run of the queue begins"):
        load(tmp_path / "agora.toml", {"queue": ("proofs",), "at_end": "go-on"}, {})


def test_runs_cross_an_environment_with_their_spaces_and_commas(tmp_path: Path) -> None:
    queue = ("/data/my runs/a,b.toml", "agora://host?x=1")
    assert load(tmp_path / "agora.toml", {}, Settings(queue=queue).to_environment()).queue == queue


@pytest.mark.parametrize("text", ["", "[", "7", '[["a"]]', "null"])
def test_a_damaged_note_of_former_runs_is_none(text: str) -> None:
    assert runs_left_before({DONE_VARIABLE: text}) == ()
    assert runs_left_before({DONE_VARIABLE: '[["poems", "over"]]'}) == (("poems", "over"),)
