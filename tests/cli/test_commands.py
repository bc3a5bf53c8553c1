"""Claims about the commands: help, exit codes, one sentence per mistake, and nothing heavy at import."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from agora import __version__
from agora.cli import console, main_node, main_swarm, status_command
from agora.cli.console import Failure, explain
from agora.node import daemon_registry, paths
from agora.node.control import control_client

Completed = subprocess.CompletedProcess[str]
COMMANDS = [("node", name) for name in ("join", "leave", "pause", "resume", "move")]
COMMANDS += [
    ("swarm", name)
    for name in ("new", "status", "page", "track", "demo", "export", "sample", "data", "launch", "evaluate")
]


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Completed]:
    """Runs a command in an empty directory, with data and runtime directories of its own."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("AGORA_")}
    environment = kept | {"AGORA_HOME": str(tmp_path / "home"), "AGORA_RUNTIME_DIR": str(tmp_path / "run")}

    def command(script: str, *arguments: str, **more: str) -> Completed:
        line = [sys.executable, "-m", f"agora.cli.main_{script}", *arguments]
        return subprocess.run(
            line, cwd=tmp_path, env=environment | more, capture_output=True, text=True, timeout=60, check=False
        )

    return command


def one_sentence(done: Completed, code: int, *expected: str) -> None:
    """The command failed as it should: code, nothing on standard output, one line that says all of it, no traceback."""
    assert (done.returncode, done.stdout) == (code, ""), done.stdout + done.stderr
    lines = done.stderr.strip().splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    assert len(errors) == 1 and lines[-1] == errors[0] and "Traceback" not in done.stderr, done.stderr
    for text in expected:
        assert text in errors[0]


@pytest.mark.parametrize(("name", "module"), [("agora-node", "main_node"), ("swarm", "main_swarm")])
def test_each_command_says_its_name_and_version(name: str, module: str) -> None:
    shown = CliRunner().invoke(importlib.import_module(f"agora.cli.{module}").app, ["--version"])
    assert (shown.exit_code, shown.output) == (0, f"{name} {__version__}\n")


def test_importing_the_commands_imports_nothing_heavy() -> None:
    heavy = {
        "torch",
        "transformers",
        "tokenizers",
        "hivemind",
        "libp2p",
        "trio",
        "uvloop",
        "agora.node.process.daemon",
    }
    instant_help = {"safetensors", "numpy", "pydantic", "rich", "cryptography", "msgpack", "agora_protocol.manifest"}
    names = ("main_node", "main_swarm", "status_command", "local_swarm", "demo_command")
    instant = ", ".join(f"agora.cli.{name}" for name in names)
    for modules, forbidden in ((instant, heavy | instant_help), ("agora.cli.export_command", heavy)):
        code = f"import sys, {modules}; print(sorted({forbidden!r} & set(sys.modules)))"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
        assert done.stdout.strip() == "[]"


def test_importing_the_commands_imports_less_than_twice_the_modules_of_typer() -> None:
    def modules(name: str) -> int:
        code = f"import sys; before = len(sys.modules); import {name}; print(len(sys.modules) - before)"
        return int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)

    assert modules("agora.cli.main_swarm, agora.cli.main_node") < 2 * modules("typer")


@pytest.mark.parametrize(("script", "name"), COMMANDS, ids=[f"{s}-{n}" for s, n in COMMANDS])
def test_every_command_says_what_why_and_an_example(script: str, name: str) -> None:
    app = main_node.app if script == "node" else main_swarm.app
    shown = CliRunner().invoke(app, [name, "--help"])
    assert shown.exit_code == 0
    assert "Example" in shown.output and len(shown.output.splitlines()) > 8
    assert f"{'agora-node' if script == 'node' else 'swarm'} {name}" in shown.output


def test_bad_arguments_end_with_2(run: Callable[..., Completed]) -> None:
    for arguments in (["demo", "--peers", "none"], ["demo", "--nonsense"], ["nonsense"], ["bench"]):
        assert run("swarm", *arguments).returncode == 2, arguments
    one_sentence(run("swarm", "demo", "--link", "200,50"), 2, "write RATE,RTT")
    one_sentence(run("swarm", "demo", "--peers", "1"), 2, "give --peers 2")
    one_sentence(run("swarm", "demo", "--codec", "gzip"), 2, "gzip")
    one_sentence(run("swarm", "demo", "--preset", "tyni"), 2, "tiny")
    one_sentence(run("swarm", "demo", "--objective", "sft"), 2, "--base-model DIR")
    one_sentence(run("swarm", "new", "x.toml", "--preset", "tyni"), 2, "tiny")
    one_sentence(run("swarm", "new", "x.toml", "--data", "chats.jsonl"), 2, "--base-model DIR")


def test_new_writes_a_manifest_that_is_read_and_never_over_another(
    tmp_path: Path, run: Callable[..., Completed]
) -> None:
    from agora_protocol.manifest import Manifest
    from agora_protocol.manifest_model import SubspaceSection

    assert run("swarm", "new", "poems.toml", "--preset", "small").returncode == 0
    manifest = Manifest.from_toml((tmp_path / "poems.toml").read_text())
    assert isinstance(manifest.model, SubspaceSection)
    assert (manifest.name, manifest.model.width) == ("poems", 512)
    one_sentence(run("swarm", "new", "poems.toml"), 1, "poems.toml exists")
    one_sentence(run("swarm", "new", "nowhere/poems.toml"), 1, "cannot write nowhere/poems.toml")


def test_join_refuses_what_is_wrong_before_it_starts_anything(tmp_path: Path, run: Callable[..., Completed]) -> None:
    (tmp_path / "typo.toml").write_text("[optimizer]\nlearning_rat = 0.1\n")
    (tmp_path / "shape.toml").write_text("[model]\nwidth = 130\nheads = 4\n")
    (tmp_path / "good.toml").write_text("name = 'good'\n")
    one_sentence(run("node", "join", "typo.toml"), 1, "typo.toml", "learning_rate")
    one_sentence(run("node", "join", "shape.toml"), 1, "shape.toml", "heads")
    one_sentence(run("node", "join", "missing.toml"), 2, "missing.toml", "swarm new")
    one_sentence(run("node", "join", "agora://nonsense"), 2, "invite")
    one_sentence(run("node", "join", "good.toml", "--stages", "2-1"), 2, "stages")
    one_sentence(run("node", "join", "good.toml", "--listen", "here"), 2, "'here' is not an address")
    one_sentence(run("node", "join", "good.toml", AGORA_THREDS="2"), 1, "did you mean AGORA_THREADS?")
    one_sentence(run("node", "join", "good.toml", AGORA_FAULTS="hop.acepted:kill"), 1, "AGORA_FAULTS")
    (tmp_path / "file").write_text("")
    one_sentence(run("node", "join", "good.toml", "--dir", "file/x"), 1, "Cannot make", "--dir")


def test_join_refuses_an_identity_that_others_can_read(tmp_path: Path, run: Callable[..., Completed]) -> None:
    (tmp_path / "good.toml").write_text("name = 'good'\n")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "identity.key").write_bytes(b"x" * 68)
    (tmp_path / "home" / "identity.key").chmod(0o644)
    one_sentence(run("node", "join", "good.toml"), 1, "chmod 600")


def test_asking_a_daemon_that_is_not_there(run: Callable[..., Completed]) -> None:
    for arguments in (["leave"], ["pause"], ["resume"], ["move", "--stages", "1-2"]):
        one_sentence(run("node", *arguments), 1, "no such daemon", "agora-node join RUN")


def test_move_asks_the_daemon_for_the_stages_and_prints_its_answer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[str, str, dict[str, Any]]] = []

    def ask(path: Path, question: str, *, timeout_s: float, **arguments: Any) -> dict[str, Any]:
        asked.append((str(path), question, arguments))
        if arguments["stages"] == "9":
            raise control_client.DaemonRefused("local", "the run has stages 0 to 3")
        return {"text": "moved to stages 2-3"}

    entry = daemon_registry.DaemonEntry("ab" * 32, "poems", "", "", os.getpid(), str(tmp_path), "/nowhere.sock")
    monkeypatch.setattr(daemon_registry, "find_running_daemons", lambda: [entry])
    monkeypatch.setattr(control_client, "ask", ask)
    moved = CliRunner().invoke(main_node.app, ["move", "--stages", "2-3"])
    assert moved.exit_code == 0 and "moved to stages 2-3" in moved.stderr and not moved.stdout
    moved = CliRunner().invoke(main_node.app, ["move", "--stages", "2-3", "--json"])
    assert json.loads(moved.stdout) == {"schema": 1, "text": "moved to stages 2-3"} and not moved.stderr
    refused = CliRunner().invoke(main_node.app, ["move", "--stages", "9"])
    assert isinstance(refused.exception, Failure) and "stages 0 to 3" in str(refused.exception)
    assert asked == [("/nowhere.sock", "move", {"stages": stages}) for stages in ("2-3", "2-3", "9")]
    assert CliRunner().invoke(main_node.app, ["move"]).exit_code == 2


def test_status_of_a_run_that_nobody_answers_for_is_4_and_still_an_object(
    tmp_path: Path, run: Callable[..., Completed]
) -> None:
    (tmp_path / "good.toml").write_text("name = 'good'\n")
    done = run("swarm", "status", "good.toml", "--json")
    value = json.loads(done.stdout)
    assert done.returncode == 4 and len(done.stdout.splitlines()) == 1
    assert value["schema"] == 1 and value["health"]["state"] == "UNREACHABLE" and value["health"]["do"]
    plain = run("swarm", "status", "good.toml")
    assert plain.returncode == 4 and "health  UNREACHABLE  why: " in plain.stdout
    one_sentence(run("swarm", "status", "nonsense"), 2, "or a run that this machine has joined")


def test_an_export_that_cannot_be_says_so_in_one_sentence(run: Callable[..., Completed]) -> None:
    one_sentence(run("swarm", "export", "nonsense", "--out", "model"), 2, "or a run that this machine has joined")
    one_sentence(run("swarm", "export", "cd" * 32, "--out", "model"), 4, "has not joined run cdcdcdcdcdcd")
    one_sentence(run("swarm", "export", "cd" * 32, "--out", "model", "--shard-size", "some"), 2, "--shard-size")


def example(state: str) -> dict[str, Any]:
    peer = {"peer": "12D3KooWExample", "name": "olive-heron", "span": [0, 1], "state": "training", "step": 7}
    peer |= {"tokens_per_second": 3400.0, "path": "direct", "seen_seconds": 1.2, "note": "late"}
    stage = {"stage": 0, "replicas": 3, "step": 7, "tokens_per_second": 10400.0}
    health = {"state": state, "why": "because", "do": None if state == "OK" else "this"}
    run = {"schema": 1, "run_id": "ab" * 32, "name": "poems", "step": 7, "loss": 2.5, "tokens_per_second": 9870.0}
    return run | {"health": health, "stages": [stage], "peers": [peer]}


@pytest.mark.parametrize(
    ("state", "code"), [("OK", 0), ("PAUSED", 0), ("DEGRADED", 3), ("STALLED", 4), ("UNREACHABLE", 4)]
)
def test_the_exit_code_of_status_is_the_health(
    state: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(status_command, "fetch", lambda run, home: example(state))
    assert status_command.show("poems", None, watch=False, as_json=True) == code
    assert json.loads(capsys.readouterr().out) == example(state)
    assert status_command.show("poems", None, watch=False, as_json=False) == code
    shown = capsys.readouterr().out
    assert f"health  {state}  why: because" in shown and ("do: this" in shown) == (state != "OK")
    assert "olive-heron" in shown and "0-1" in shown


def test_a_person_reads_of_a_stage_its_tokens_what_it_waits_for_and_why_a_peer_is_behind() -> None:
    status = example("OK")
    account = {"tokens_per_step": 16350.2, "target_tokens": 16384, "share_counted": 0.9921, "staleness": 0.125}
    status["stages"][0] |= account | {"waits_for": "olive-heron: 96 tokens are missing"}
    status["stages"].append({"stage": 1, "replicas": 0, "step": 0, "tokens_per_second": 0.0})
    status["peers"][0]["note"] = "stage 0 is 3 steps behind\x1b[2J"
    status["stages"].append({"stage": 2, "replicas": 312, "replicas_known": 128, "step": 1, "tokens_per_second": 9.0})
    _, _, first, second, sampled, *_, note, _ = status_command.lines_of(status)
    assert sampled.split()[:2] == ["2", "~312"], "by estimate"
    assert first.split() == "0 3 7 16,350 of 16,384 99.2 % 0.12 10400 olive-heron: 96 tokens are missing".split()
    assert second.split() == "1 0 0 - - - 0 -".split()
    assert note == "note    olive-heron: stage 0 is 3 steps behind?[2J", "what a peer wrote moves no cursor"


def test_watch_shows_again_until_ctrl_c(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    states = iter(["OK", "DEGRADED"])

    def fetch(run: str, home: paths.Home) -> dict[str, Any]:
        try:
            return example(next(states))
        except StopIteration:
            raise KeyboardInterrupt from None

    monkeypatch.setattr(status_command, "fetch", fetch)
    monkeypatch.setattr(status_command, "REFRESH_INTERVAL_S", 0.0)
    assert status_command.show("poems", None, watch=True, as_json=False) == 3
    assert capsys.readouterr().out.count("health  ") == 2


def test_watch_and_one_json_object_exclude_each_other(run: Callable[..., Completed]) -> None:
    one_sentence(run("swarm", "status", "nonsense", "--watch", "--json"), 2, "--watch", "--json", "one object")


def test_a_daemon_of_the_run_is_asked_before_the_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    entry = daemon_registry.DaemonEntry("ab" * 32, "poems", "", "", os.getpid(), str(tmp_path), "/nowhere.sock")
    monkeypatch.setattr(daemon_registry, "find_running_daemons", lambda: [entry])
    monkeypatch.setattr(control_client, "ask", lambda path, question: example("OK") | {"asked": [str(path), question]})
    found = status_command.fetch("ab" * 32, paths.Home(tmp_path))
    assert found["asked"] == ["/nowhere.sock", "status"]


def test_unforeseen_errors_leave_a_file_and_no_traceback() -> None:
    try:
        raise ZeroDivisionError("division by zero")
    except ZeroDivisionError as error:
        text, code = explain(error)
    assert code == 1 and text.startswith("ZeroDivisionError: division by zero; the details are in ")
    path = Path(text.split("details are in ")[1].split(",")[0])
    assert "Traceback" in path.read_text()
    path.unlink()


def test_foreseen_errors_are_their_own_sentence() -> None:
    from agora_protocol.errors import InputError, ManifestError

    assert explain(Failure("no", 3)) == ("no", 3)
    assert explain(InputError("no")) == ("no", console.EXIT_USAGE)
    assert explain(ManifestError("no")) == ("no", console.EXIT_FAILED)


# A thread in the middle of torch's code: the interpreter's own end would abort this process, with 134.
BUSY = """
import atexit, threading
import torch
from agora.cli import console

begun = threading.Event()

def work():
    while True:
        values = torch.ones(300, 300, requires_grad=True)
        (values @ values).relu().sum().backward()
        begun.set()

threading.Thread(target=work, daemon=True).start()
begun.wait()
atexit.register(print, "and at the end", end="")
print("said before ", end="")
console.end_process(3)
"""


def test_a_process_whose_device_still_computes_ends_with_its_code_and_what_it_has_printed() -> None:
    done = subprocess.run([sys.executable, "-c", BUSY], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (3, "said before and at the end", "")


def test_a_command_that_was_started_with_closed_streams_gives_their_numbers_to_no_file(tmp_path: Path) -> None:
    code = "from agora.cli.console import open_closed_streams; import os, sys; open_closed_streams(); "
    code += "print('lost', file=sys.stderr); print('lost'); assert sys.stdin.read() == ''; "
    code += "file = open('opened', 'w'); file.write(f'{file.fileno()}\\n'); file.flush(); "
    code += "os.system('echo lost; echo lost >&2')"
    closed = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", code]
    assert subprocess.run(closed, cwd=tmp_path, timeout=60, check=False).returncode == 0
    (number,) = (tmp_path / "opened").read_text().split()
    assert int(number) > 2, "and what children print is in no file"


def test_output_for_which_the_disk_has_no_space_is_one_sentence_and_no_fault_to_report() -> None:
    command = [sys.executable, "-m", "agora.cli.main_node", "--version"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr == (
        "error: no space is left for what the command writes or prints (No space left on device); free some, or write "
        "it to another disk\n"
    )
