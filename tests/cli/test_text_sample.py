"""What a demo shows of its model: lines from its checkpoints, nothing when there are none, a command that exports."""

from __future__ import annotations

import os
import shlex
import socket
import sys
from pathlib import Path

import numpy as np
import pytest
from agora_protocol.identity import Identity
from agora_protocol.manifest import Manifest, SignedManifest

from agora.cli import console, export_command
from agora.cli.sample_command import LINE_CHARACTERS, LINES, lines_of_model, printable_lines, try_sample
from agora.model import family_of
from agora.node import daemon_registry, paths, run_files
from agora.node.daemon_registry import DaemonEntry
from agora.state.checkpoint import write_checkpoint
from agora.state.layout import StageState
from agora.train.stage import stage_layout

MODEL = {"width": 32, "layers": 2, "heads": 4, "key_value_heads": 2, "feed_forward": 48, "context": 32}
MANIFEST = Manifest.from_values({"name": "poems", "model": MODEL, "stages": {"count": 2}}, "test")


@pytest.fixture
def demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that a demo leaves: run.toml, and data directories with a checkpoint of one stage each.

    The averaged weights are initial ones; the weights themselves are zeros.
    """
    monkeypatch.setenv(paths.HOME_VARIABLE, str(tmp_path / "home"))
    monkeypatch.setenv(paths.RUNTIME_VARIABLE, str(tmp_path / "sockets"))
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "demo"
    signed = SignedManifest.sign(MANIFEST, Identity.generate())
    family = family_of(MANIFEST.model)
    for stage in range(2):
        home = paths.Home(folder / f"peer-{stage}")
        run_files.remember_manifest(home, signed)
        layout = stage_layout(MANIFEST, stage)
        module = family.build_stage(MANIFEST.layers_of(stage), 5)
        named = {name: p.detach().numpy().copy() for name, p in module.named_parameters()}
        average = layout.flatten(named)
        moments = {moment.name: average if moment.name == "average" else 0 * average for moment in layout.moments}
        state = StageState(stage, 9, 9, 0, layout, 0 * average, moments)
        write_checkpoint(home.checkpoints(signed.run_id), signed.run_id, state, keep=1)
    (folder / "run.toml").write_text(signed.to_toml())
    return folder


def test_the_lines_are_few_printable_and_the_seeds_own(demo: Path) -> None:
    lines = [try_sample(demo / "run.toml", seed) for seed in (1, 1, 2)]
    assert lines[0] == lines[1] != lines[2]
    for line in lines[0]:
        assert line.strip()
        assert line.isprintable()
        assert len(line) <= LINE_CHARACTERS
    assert 1 <= len(lines[0]) <= LINES


def test_no_daemon_is_asked_for_what_lies_in_the_folder(demo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = SignedManifest.from_toml((demo / "run.toml").read_text(), "run.toml").run_id
    with socket.socket(socket.AF_UNIX) as silent:
        place = daemon_registry.socket_of(paths.Home(demo / "peer-0"))
        place.parent.mkdir(parents=True, exist_ok=True)
        silent.bind(str(place))
        silent.listen()
        daemon_registry.register(DaemonEntry(run, "poems", "", "", os.getpid(), str(demo / "peer-0"), str(place)))
        assert any(entry.run == run for entry in daemon_registry.find_running_daemons())
        assert try_sample(demo / "run.toml", 0)
    assert not capsys.readouterr().err


def test_what_is_shown_is_what_a_terminal_may_be_given() -> None:
    text = "\n\x00\x00\n  def f\x1b[31m(x):\t# \u00e4\ufffd\n\n" + 100 * "long " + "\nlast"
    assert list(printable_lines(text)) == [
        "  def f?[31m(x):    # \u00e4\ufffd",
        (20 * "long ")[:LINE_CHARACTERS].rstrip(),
        "last",
    ]


@pytest.mark.parametrize("hidden", [" ", "\x00", "\t"])
def test_a_line_of_which_the_cut_leaves_nothing_to_read_is_skipped(hidden: str) -> None:
    assert list(printable_lines(LINE_CHARACTERS * hidden + "x")) == []


@pytest.mark.parametrize("harm", ["missing", "damaged", "not finite", "no manifest"])
def test_a_model_that_cannot_be_sampled_costs_one_line_and_no_failure(
    demo: Path, harm: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkpoint,) = (demo / "peer-1" / "runs").glob("*/checkpoints/stage-1/step-*")
    if harm == "missing":
        checkpoint.rename(demo / "elsewhere")
    elif harm == "damaged":
        moments = checkpoint / "moments.safetensors"
        moments.write_bytes(moments.read_bytes()[:-1])
    elif harm == "no manifest":
        (demo / "run.toml").unlink()
    else:
        layout = stage_layout(MANIFEST, 1)
        arrays = {moment.name: np.full(moment.numel, np.nan, np.float32) for moment in layout.moments}
        run = checkpoint.parents[2].name
        state = StageState(1, 10, 10, 0, layout, np.zeros(layout.numel, np.float32), arrays)
        write_checkpoint(paths.Home(demo / "peer-1").checkpoints(run), run, state, keep=1)
    assert try_sample(demo / "run.toml", 0) == []
    said = capsys.readouterr()
    assert "the model's text cannot be shown: " in said.err
    assert not said.out


@pytest.mark.parametrize("program", ["/opt/agora/bin/swarm", "/opt/agora/agora/cli/main_swarm.py"])
def test_the_command_names_this_program_and_the_kept_run(
    demo: Path, program: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [program])
    heading, first, second, kept = lines_of_model(["one", "two"], 40, Path("demo"))
    assert "after 40 steps" in heading
    assert [first.split(" | ")[1], second.split(" | ")[1]] == ["one", "two"]
    words = shlex.split(kept.removeprefix("export"))
    begins = [program] if program.endswith("swarm") else [sys.executable, "-m", "agora.cli.main_swarm"]
    assert words == [*begins, "export", str(demo / "run.toml"), "--out", "model"]
    assert export_command.run(words[-3], Path(words[-1])) == console.EXIT_DONE
    assert Path("model/config.json").is_file()
    assert "model" in capsys.readouterr().out
    (gone,) = lines_of_model([], 40, None)
    assert shlex.split(gone.removeprefix("export"), comments=True)[-3:] == ["demo/run.toml", "--out", "model"]
    assert gone.endswith("# after a demo with --dir demo; this one is not kept")
