"""What one machine has and another has not, in real processes: a terminal, a key of its own, temporary folders."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from agora.cli.local_swarm import LocalSwarm
from tests.process.harness import WAIT_S, last_step, swarm, tiny

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]


def without_hangup(arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    """As `nohup agora-node ARGUMENTS &` starts it."""
    command = ["sh", "-c", 'trap "" HUP; exec "$@"', "sh", sys.executable, "-m", "agora.cli.main_node", *arguments]
    with log.open("wb") as output:
        return subprocess.Popen(command, stdout=output, stderr=output, env=dict(environment), start_new_session=True)


def test_a_daemon_that_was_started_with_nohup_goes_on_when_its_terminal_is_closed(tmp_path: Path) -> None:
    made = LocalSwarm(tmp_path, tiny(1).to_toml(), launch=without_hangup)
    try:
        daemon = made.start("one")
        daemon.kill(signal.SIGHUP)
        made.until(lambda: last_step(daemon) >= 1, "its first step", WAIT_S)
        daemon.kill(signal.SIGHUP)
        before = last_step(daemon)
        made.until(lambda: last_step(daemon) >= before + 2, "steps after the terminal was closed", WAIT_S)
        daemon.end_is_intended = True
        daemon.kill(signal.SIGTERM)
        assert daemon.process.wait(WAIT_S) == 0
    finally:
        made.kill_all()
    assert "SIGHUP" not in daemon.log() and "the daemon has ended: asked to leave by SIGTERM" in daemon.log()


def without_reader(arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    """As `agora-node ARGUMENTS <&- | head` starts it, once head has ended; its invite goes into that pipe."""
    command = ["sh", "-c", 'exec "$@" <&-', "sh", sys.executable, "-m", "agora.cli.main_node", *arguments]
    reading, writing = os.pipe()
    os.close(reading)
    with log.open("wb") as errors, open(writing, "wb") as output:
        return subprocess.Popen(
            command,
            stdout=output,
            stderr=errors,
            env=dict(environment),
            start_new_session=True,
            preexec_fn=_obey_signals,
        )


def _obey_signals() -> None:
    # What a shell starts in the background ignores SIGQUIT, and so do these tests then, and what they start.
    for number in (signal.SIGUSR1, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)


def in_an_ascii_locale(arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    """As a service or a batch system starts it whose locale has no UTF-8, which Python itself takes only C for."""
    ascii_only = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "agora.cli.main_node", *arguments],
            stdout=output,
            stderr=output,
            env=dict(environment) | ascii_only,
            start_new_session=True,
        )


def test_in_an_ascii_locale_files_and_folders_have_the_names_that_manifests_give_them(tmp_path: Path) -> None:
    text, folder = tmp_path / "gedichte-ü-詩.txt", tmp_path / "größe"
    folder.mkdir()
    text.write_text("Größe, größer, am größten – 詩 и стихи.\n" * 4000, encoding="utf-8")
    made = LocalSwarm(folder, tiny(1, data={"corpus": [str(text)]}).to_toml(), launch=in_an_ascii_locale)
    try:
        daemon = made.start("erster-ö")
        made.until(lambda: last_step(daemon) >= 1, "its first step", WAIT_S)
        daemon.end_is_intended = True
        daemon.kill(signal.SIGTERM)
        assert daemon.process.wait(WAIT_S) == 0
    finally:
        made.kill_all()


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGQUIT])
def test_a_daemon_without_input_and_reader_trains_and_leaves_at_a_batch_systems_signal(
    number: signal.Signals, tmp_path: Path
) -> None:
    made = LocalSwarm(tmp_path, tiny(1, checkpoint={"every": 1}).to_toml(), launch=without_reader)
    try:
        daemon = made.start("one")
        made.until(lambda: last_step(daemon) >= 2, "its steps", WAIT_S)
        (told,) = [event["text"] for event in daemon.events("OwnerTold")]
        assert told == "the invite could not be printed (Broken pipe); `swarm invite RUN` prints it"
        daemon.end_is_intended = True
        daemon.kill(number)
        assert daemon.process.wait(WAIT_S) == 0
    finally:
        made.kill_all()
    assert f"the daemon has ended: asked to leave by {number.name}" in daemon.log()
    assert daemon.events("CheckpointWritten")[-1]["step"] == last_step(daemon), "nothing is lost"


def test_a_data_directory_that_was_copied_to_another_machine_is_told_on_both_and_costs_nobody(tmp_path: Path) -> None:
    """Each daemon has a runtime directory of its own, so that none finds another one as on one machine."""
    with swarm(tmp_path, tiny(2)) as made:
        first = made.start("first", "0")
        elsewhere = {"AGORA_RUNTIME_DIR": str(tmp_path / "runtime 2")}
        second = LocalSwarm.start(made, "second", flags=["--stages", "1"], environment=elsewhere)
        made.until(lambda: min(last_step(first), last_step(second)) >= 1, "steps of both stages")
        shutil.copytree(tmp_path / "second", tmp_path / "copy")
        elsewhere = {"AGORA_RUNTIME_DIR": str(tmp_path / "runtime 3")}
        copy = LocalSwarm.start(made, "copy", flags=["--stages", "1"], environment=elsewhere)
        copy.end_is_intended = True
        made.until(lambda: copy.process.poll() is not None, "the end of the copy")
        assert copy.process.poll() == 1
        assert (
            "is used by another daemon, which" in copy.last_words() and "Remove identity.key here" in copy.last_words()
        )
        made.until(lambda: second.events("OwnerTold"), "the first one's owner to be told")
        (told,) = [event["text"] for event in second.events("OwnerTold")]
        assert "copy of this one's data directory and key" in told and "remove identity.key there" in told
        before = last_step(second)
        made.until(lambda: last_step(second) >= before + 2, "steps as before")
        assert not first.events("PeerSuspended") and second.is_alive
        made.stop()


def run(words: Sequence[str], tmp_path: Path, stdin: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """`python -m WORDS` where /tmp, too, cannot be written: only then is TMPDIR needed."""
    code = "import os, runpy, sys, tempfile; tempfile.tempdir = os.environ['TMPDIR']; sys.argv = sys.argv[1:]; "
    code += "runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
    command = [sys.executable, "-c", code, *words]
    values = {**os.environ, **environment}
    return subprocess.run(
        command, input=stdin, capture_output=True, text=True, cwd=tmp_path, env=values, timeout=WAIT_S
    )


def test_a_folder_for_temporary_files_that_is_not_there_is_one_sentence_and_leaves_nothing(tmp_path: Path) -> None:
    gone = {"TMPDIR": "/absent"}  # the path of a socket has to be short
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    assert run(["agora.cli.main_swarm", "data", "a.jsonl"], tmp_path, **gone).returncode == 0, "it needs none"
    for words, remedy in (
        (["agora.cli.main_swarm", "data", "-"], "set TMPDIR to one that can be written, or write the data to a file"),
        (["agora.cli.main_swarm", "demo", "--steps", "1"], "set TMPDIR, or name a folder with --dir"),
    ):
        ended = run(words, tmp_path, '{"text": "a"}\n', **gone)
        assert ended.returncode == 1 and ended.stderr.count("error: ") == 1 and remedy in ended.stderr, ended.stderr
    (tmp_path / "run.toml").write_text(tiny(1).to_toml())
    join = ["agora.cli.main_node", "join", "run.toml", "--dir", "one", "--listen", "127.0.0.1:0"]
    ended = run(join, tmp_path, **gone)
    assert ended.returncode == 1 and "for p2pd's sockets" in ended.stderr and "set TMPDIR to a folder" in ended.stderr
    assert not Path("/absent").exists()


def test_a_home_that_cannot_be_written_is_one_sentence_before_anything_is_signed(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "run.toml").write_text(draft := tiny(1).to_toml())
    for home in (tmp_path / "file", Path("/proc")):
        variables = {"HOME": str(home), "XDG_DATA_HOME": "", "AGORA_HOME": "", "TMPDIR": str(tmp_path)}
        ended = run(["agora.cli.main_node", "join", "run.toml"], tmp_path, **variables)
        assert ended.returncode == 1 and "choose another directory with --dir" in ended.stderr, ended.stderr
        assert (tmp_path / "run.toml").read_text() == draft, "not signed"
