"""`swarm export` through a daemon, in real processes: the whole model from a peer that holds a part of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from agora_protocol.manifest import Manifest
from transformers import AutoModelForCausalLM

from agora.data.corpus import open_corpus
from agora.data.sampling import Sampler
from agora.data.tokenizer import open_tokenizer
from agora.node.control import control_client
from tests.process.harness import Daemon, drained, settled, swarm, tiny

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]

BATCHES = 4


def steps(daemon: Daemon) -> int:
    return len(daemon.events("StepTaken"))


def export(daemon: Daemon, out: Path) -> subprocess.CompletedProcess[str]:
    """What `swarm export` says where one daemon's data directory is known."""
    line = [sys.executable, "-m", "agora.cli.main_swarm", "export", str(daemon.events("PeerStarted")[0]["run"])]
    line += ["--out", str(out), "--dir", str(daemon.root), "--json"]
    return subprocess.run(line, capture_output=True, text=True, timeout=300, check=False)


@torch.no_grad()
def heldout_loss(folder: Path, manifest: Manifest, cache: Path) -> tuple[float, int]:
    """What transformers computes from an exported folder, on the windows that `evaluate` takes."""
    tokenizer = open_tokenizer(manifest.data.tokenizer, manifest.model.vocabulary, base=cache)
    corpus = open_corpus(manifest.data.corpus, tokenizer, cache, base=cache)
    sampler = Sampler(corpus, manifest.model.context, manifest.data.heldout, manifest.seed)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    batches = torch.cat([torch.from_numpy(b) for b in sampler.heldout_batches(manifest.schedule.microbatch, BATCHES)])
    logits = model(batches[:, :-1].long()).logits
    targets = batches[:, 1:].long()
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())), targets.numel()


def collected(daemon: Daemon) -> dict[str, Any]:
    return daemon.ask("collect")


def test_a_daemon_exports_the_model_whose_loss_the_swarm_says(tmp_path: Path) -> None:
    """The first peer holds stage 0 alone; the export asks it, or the other one, as the registry has them."""
    with swarm(tmp_path, tiny(2, optimizer={"learning_rate": 0.01})) as made:
        first, last = made.start("first", "0"), made.start("last", "1")
        made.serving()
        made.until(lambda: min(steps(first), steps(last)) >= 10, "some steps of both stages")
        drained(made, first)
        settled(made, first, last)
        said = first.ask("evaluate", batches=BATCHES)
        done = export(first, tmp_path / "out")
        assert done.returncode == 0, done.stderr
        result = json.loads(done.stdout)
        assert result["from"] == "daemon"
        taken = [max(e["step"] for e in daemon.events("StepTaken")) for daemon in (first, last)]
        assert [stage["step"] for stage in result["stages"]] == taken
        loss, tokens = heldout_loss(tmp_path / "out", made.manifest, made.corpus)
        assert tokens == said["tokens"] and loss == pytest.approx(said["loss"], abs=1e-3)
        assert said["loss"] < 5.4, "a model that learnt nothing (5.55) would show little"
        for daemon in (first, last):
            files = collected(daemon)["files"]
            assert all(Path(files[k]).is_relative_to(daemon.root) for k in ("0", "1"))
        made.stop()


@pytest.mark.slow
def test_training_goes_on_meanwhile_and_a_stage_that_nobody_holds_any_more_is_named(tmp_path: Path) -> None:
    with swarm(tmp_path, tiny(2, checkpoint={"every": 1000})) as made:
        first, last = made.start("first", "0"), made.start("last", "1")
        made.serving()
        made.until(lambda: min(steps(first), steps(last)) >= 3, "some steps of both stages")
        before = made.completed(first)
        assert min(collected(first)["steps"].values()) >= 3
        made.until(lambda: made.completed(first) > before + 10, "microbatches after it")
        assert not first.events("MicrobatchDropped")
        last.kill()
        with pytest.raises(control_client.DaemonRefused, match=r"stage 1 is unavailable: .*--stages 1`") as refused:
            collected(first)  # while the dead peer may still be believed in
        assert refused.value.code == "unavailable"
        made.until(lambda: len(first.ask("status")["peers"]) == 1, "the other peer to be forgotten")
        with pytest.raises(
            control_client.DaemonRefused, match="stage 1 is unavailable: no peer of the swarm serves it; start"
        ):
            collected(first)
        done = export(first, tmp_path / "out")
        assert done.returncode == 4 and "no peer of the swarm serves it" in done.stderr, done.stderr
        assert "is missing" in done.stderr and not (tmp_path / "out").exists()
        assert [path.name for path in first.root.glob("runs/*/collected/*")] == ["1"], "the one that was complete"
        made.stop()
