"""A run that begins with a Hugging Face model, in real processes: from a folder through training to a folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from agora_protocol.manifest_model import ADAPTER_FILE
from safetensors.torch import load_file

from agora.cli import export_command
from agora.tuning.base.store import list_tensors
from agora.tuning.hf_family import needed_tensors
from tests.model.tiny_models import make_model, manifest_of, save
from tests.process.harness import drained, last_step, swarm
from tests.tuning.test_going_on_from_adapter import begun, make_adapter, make_base

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]

SECTIONS = {
    "data": {"corpus": ["stdlib"], "tokenizer": "bytes"},
    "optimizer": {"learning_rate": 1e-9, "average_decay": 0.0},
    "checkpoint": {"every": 1000},
}


def test_a_base_models_weights_go_through_a_swarm_and_back_into_a_folder(tmp_path: Path) -> None:
    """The learning rate is so small that what is exported must be what the run began with, a joiner's stage too."""
    model = make_model("qwen2", tie_word_embeddings=False)
    folder = save(model, tmp_path / "base", shard="40KB")
    manifest = manifest_of(folder, stages=2, **SECTIONS)
    with swarm(tmp_path, manifest) as made:
        flags = ["--base-model", str(folder)]
        first, second = made.start("first", "0", flags=flags), made.start("second", "1", flags=flags)
        made.until(lambda: min(last_step(first), last_step(second)) >= 3, "steps of both stages")
        late = made.start("late", "1", flags=flags)
        made.until(lambda: late.events("MicrobatchCounted"), "the joiner to train")
        assert late.events("StateFetched") and not first.events("MicrobatchDropped")
        drained(made, first)
        second.kill()
        made.stop()
        out = tmp_path / "out"
        assert export_command.run(str(made.directory / "run.toml"), out, [first.root, late.root], average=False) == 0
    written = {name: values for file in out.glob("*.safetensors") for name, values in load_file(file).items()}
    began = dict(model.named_parameters())
    assert written.keys() == began.keys()
    for name, values in written.items():
        torch.testing.assert_close(values, began[name].detach(), rtol=0, atol=1e-6)


def test_a_daemon_without_the_folder_says_what_to_do(tmp_path: Path) -> None:
    folder = save(make_model("llama"), tmp_path / "base")
    with swarm(tmp_path, manifest_of(folder, stages=1, **SECTIONS)) as made:
        with pytest.raises(AssertionError, match="(?s)ended by itself with exit code 1: .*--base-model DIR"):
            made.start("alone", "0")  # it may give its invite before it finds out
            made.until(lambda: False, "its end")


def test_a_peer_without_any_files_fetches_its_own_spans_tensors_and_trains(tmp_path: Path) -> None:
    folder = save(make_model("qwen2", tie_word_embeddings=False), tmp_path / "base", shard="40KB")
    tensors = list_tensors(sorted(folder.glob("*.safetensors")))
    manifest = manifest_of(folder, stages=2, **SECTIONS, model={"tensors_hash": tensors.digest})
    with swarm(tmp_path, manifest) as made:
        first = made.start("first", "0", flags=["--base-model", str(folder)])
        second = made.start("second", "1")
        made.until(lambda: min(last_step(first), last_step(second)) >= 2, "steps of both stages")
        (start,) = second.events("StartStep", name="base")
        needed = [tensor.names[0] for tensor in needed_tensors(manifest.model, manifest.layers_of(1))]
        assert start["note"].startswith(f"fetched {len(needed)} of {len(tensors.tensors)} tensors, ")
        assert start["note"].endswith("from 1 peer") and not first.events("StartStep", name="base")
        store = second.root / "base" / tensors.digest / "tensors"
        written = {name: values for file in store.iterdir() for name, values in load_file(file).items()}
        assert sorted(written) == sorted(needed) and len(written) < len(tensors.tensors)
        whole = {name: values for file in folder.glob("*.safetensors") for name, values in load_file(file).items()}
        assert all(torch.equal(values, whole[name]) for name, values in written.items())
        assert second.events("MicrobatchCounted") and not first.events("MicrobatchDropped")
        made.stop()


def test_a_run_goes_on_from_an_adapter_that_a_peer_without_files_fetches(tmp_path: Path) -> None:
    """The learning rate is so small that what is exported must be the adapter, of the joiner's stage too."""
    base = make_base("qwen2", tmp_path / "base")
    adapter = make_adapter(base, tmp_path / "adapter")
    sections = {**SECTIONS, "stages": {"count": 2}, "optimizer": {**SECTIONS["optimizer"], "target_tokens": 128}}
    manifest = begun(base, adapter).with_values(**sections, boundary={"codec": "float32"})
    with swarm(tmp_path, manifest) as made:
        first = made.start("first", "0", flags=["--base-model", str(base), "--adapter", str(adapter)])
        second = made.start("second", "1")
        made.until(lambda: min(last_step(first), last_step(second)) >= 2, "steps of both stages")
        drained(made, first)
        made.stop()
        out = tmp_path / "out"
        assert export_command.run(str(made.directory / "run.toml"), out, [first.root, second.root], average=False) == 0
    began, written = load_file(adapter / ADAPTER_FILE), load_file(out / ADAPTER_FILE)
    assert written.keys() == began.keys() and any(values.any() for name, values in began.items() if "lora_B" in name)
    for name, values in written.items():
        torch.testing.assert_close(values, began[name], rtol=0, atol=1e-6)
