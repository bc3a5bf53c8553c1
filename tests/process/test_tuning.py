"""Fine-tuning in real processes: every sample once an epoch, though origins are killed, and over a restart."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from agora_protocol.manifest import Manifest
from agora_protocol.tensors import BEGINS, SUPERVISED
from peft import PeftModel

from agora.cli import export_command
from agora.cli.local_swarm import LocalDaemon as Daemon
from agora.tuning.chat.sample_file import hash_samples
from agora.tuning.chat.sample_rows import SampleRows, open_sample_rows
from tests.model.tiny_models import make_model, manifest_of, save
from tests.process.harness import Swarm, counted_twice, drained, last_step, nothing_lost, settled, swarm

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]

MICROBATCH = 2
SAMPLES = 1200
MAX_IN_A_ROW = 6
"""Samples that fit into a row: they have 11 tokens at least, end of turn included, and a row 64."""
MAX_IN_FLIGHT = 16
"""Microbatches that an origin may have open, at most, when it is killed."""


def samples(path: Path, count: int) -> Path:
    lines = [json.dumps({"prompt": f"{n} is ", "completion": f"no {n * 7 % 1000}."}) for n in range(1000, 1000 + count)]
    path.write_text("\n".join(lines))
    return path


def tuning(tmp_path: Path, kind: str = "sft", **sections: Any) -> tuple[Manifest, list[str]]:
    """A run with LoRA on a tiny model, and what its daemons are started with."""
    folder = save(make_model("qwen2"), tmp_path / "base")
    values: dict[str, Any] = {
        "model": {"trained": "lora", "frozen_as": "float32", "lora_rank": 4, "context": 63},
        "schedule": {"microbatch": MICROBATCH, "max_in_flight": 4},
        "optimizer": {"target_tokens": 400, "learning_rate": 1e-3, "average_decay": 0.0},
        "averaging": {"gradient_wire": "float32"},
        "checkpoint": {"every": 4},
        "objective": {"kind": kind},
        "data": {"samples": str(samples(tmp_path / "samples.jsonl", SAMPLES)), "heldout": 0.05, "tokenizer": "bytes"},
    }
    for name, section in sections.items():
        values[name] = values.get(name, {}) | section
    return manifest_of(folder, stages=2, **values), ["--base-model", str(folder), "--allow-files"]


def counted(daemon: Daemon) -> dict[str, Any]:
    """What this origin knew of the samples at its last step."""
    told = daemon.events("SamplesCounted")
    return told[-1] if told else {"epoch": 0, "seen": 0, "repeated": 0, "missed": 0}


def trained_samples(daemon: Daemon) -> int:
    """How many samples an epoch has, as the daemon found them."""
    (step,) = [event for event in daemon.events("StartStep") if event["name"] == "samples"][:1]
    return int(step["note"].split(" ")[0].replace(",", ""))


def epochs_done(made: Swarm, epochs: int, *origins: Daemon) -> dict[str, Any]:
    """Waits until some origin knows that so many epochs are complete, and returns what it counted then."""
    done = made.until(
        lambda: next((e for o in origins for e in o.events("SamplesCounted") if e["epoch"] >= epochs), None),
        f"{epochs} complete epochs",
    )
    return dict(done)


def test_an_epoch_covers_every_sample_though_origins_are_killed(tmp_path: Path) -> None:
    manifest, flags = tuning(tmp_path)
    with swarm(tmp_path, manifest) as made:
        origins = [made.start(f"origin-{n}", "0", flags=flags) for n in range(3)]
        last = [made.start(f"last-{n}", "1", flags=flags) for n in range(2)]
        made.serving()
        first = origins[0]
        made.until(lambda: counted(first)["seen"] > SAMPLES / 10, "samples to be seen")
        origins.pop().kill()
        made.until(lambda: counted(first)["seen"] > SAMPLES / 4, "others to go on")
        last.pop().kill()
        joiner = made.start("joiner", "0", flags=flags)
        done = epochs_done(made, 1, *origins, joiner)
        assert first.ask("status")["samples"]["seen"] > SAMPLES / 4 and last[0].ask("status")["samples"] is None
        each = trained_samples(first)
        assert SAMPLES * 0.9 < each < SAMPLES
        assert done["seen"] >= each, "the first epoch is complete, while later ones have begun"
        epochs = done["seen"] / each + 1
        in_progress = (MAX_IN_FLIGHT + epochs) * MICROBATCH * MAX_IN_A_ROW
        assert done["repeated"] <= in_progress, (
            "what the killed one had in hand, and the end of each epoch that is filled up"
        )
        made.until(lambda: made.completed(joiner), "the joiner to take its share")
        drained(made, *origins, joiner)
        made.stop()
        nothing_lost(made, *origins, joiner)
        # What a killed peer had counted is counted again if its answer had not left.
        assert not counted_twice([*origins, *last, joiner])


def test_a_run_goes_on_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    manifest, flags = tuning(tmp_path)
    with swarm(tmp_path, manifest) as made:
        before = [made.start("a", "0", flags=flags), made.start("b", "1", flags=flags)]
        made.until(lambda: counted(before[0])["seen"] > SAMPLES / 4, "a quarter of the epoch")
        assert made.stop() == {"a": 0, "b": 0}
        seen, told = counted(before[0]), len(before[0].events("SamplesCounted"))
        each = trained_samples(before[0])
        assert seen["seen"] % each, "it was stopped in the middle of an epoch"
        made.invite = ""
        after = [made.start("a", "0", flags=flags), made.start("b", "1", flags=flags)]
        made.serving()
        made.until(lambda: len(after[0].events("SamplesCounted")) > told, "a step after the restart")
        first = after[0].events("SamplesCounted")[told]
        assert first["seen"] >= seen["seen"], "what was trained on before is not trained on again"
        done = epochs_done(made, seen["epoch"] + 1, after[0])
        assert done["repeated"] <= 2 * (done["epoch"] + 1) * MICROBATCH * MAX_IN_A_ROW
        assert made.completed(after[0]) * MICROBATCH * MAX_IN_A_ROW >= (seen["epoch"] + 1) * each
        made.stop()


def test_a_machine_with_other_samples_than_the_manifest_says_does_not_train(tmp_path: Path) -> None:
    manifest, flags = tuning(tmp_path)
    path = Path(manifest.data.samples)
    manifest = manifest.with_values(data={"samples_hash": hash_samples([path])})
    with swarm(tmp_path, manifest) as made:
        path.write_text(path.read_text().replace("1000 is", "1001 is"))
        with pytest.raises(AssertionError, match="(?s)ended by itself with exit code 1: .*samples"):
            made.start("origin", "0", flags=flags)
            made.serving()


def heldout_loss(model: torch.nn.Module, rows: SampleRows, batches: int) -> float:
    """The mean loss per supervised token of held-out rows, sample by sample, as transformers computes it."""
    loss_sum, tokens = 0.0, 0
    held = (batch[:, row] for batch in rows.heldout_batches(MICROBATCH, batches) for row in range(MICROBATCH))
    for ids, marks in held:
        begins = [*np.flatnonzero(marks & BEGINS), len(ids)]
        for start, end in pairwise(begins):
            supervised = np.flatnonzero(marks[start:end] & SUPERVISED)
            if not len(supervised):
                continue
            sample = torch.from_numpy(ids[start:end].copy()).long()
            with torch.no_grad():
                chances = model(sample[None]).logits[0].log_softmax(dim=-1)
            loss_sum -= float(sum(chances[place - 1, sample[place]] for place in supervised))
            tokens += len(supervised)
    return loss_sum / tokens


@pytest.mark.parametrize("frozen_as", ["float32", "bf16"])
def test_the_exported_adapter_gives_the_swarms_held_out_loss(frozen_as: str, tmp_path: Path) -> None:
    manifest, flags = tuning(tmp_path, model={"frozen_as": frozen_as}, optimizer={"learning_rate": 1e-2})
    with swarm(tmp_path, manifest) as made:
        origin, last = made.start("origin", "0", flags=flags), made.start("last", "1", flags=flags)
        made.until(lambda: min(last_step(origin), last_step(last)) >= 20, "some steps")
        drained(made, origin)
        settled(made, origin, last)
        evaluated = origin.ask("evaluate", batches=4)
        assert 0 <= evaluated["tuning"]["token_accuracy"] <= 1
        made.stop()
        out = tmp_path / "adapter"
        assert export_command.run(str(made.directory / "run.toml"), out, [origin.root, last.root]) == 0
    rows = open_sample_rows(manifest, tmp_path / "corpus")
    base = make_model("qwen2")
    before = heldout_loss(base, rows, 4)
    tuned = heldout_loss(PeftModel.from_pretrained(base, str(out)).eval(), rows, 4)
    assert tuned == pytest.approx(evaluated["loss"], abs=1e-3 if frozen_as == "float32" else 2e-2)
    assert tuned < before - 0.1, "it has learnt"
