"""What the formulas say of the memory of fine-tuning is what torch allocates, and what the process takes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from agora_protocol.ids import Span
from agora_protocol.manifest import Manifest
from benchmarks.training_memory import SETTINGS, measured_peak
from transformers import AutoModelForCausalLM

from agora.cost import activation_bytes
from agora.cost.manifest_cost import run_cost
from agora.cost.run_cost import ALL_ACTIVATIONS, Activations
from tests.model.tiny_models import CONFIGS, manifest_of, save

FORMATS = ("float32", "bf16", "nf4")
SIZES = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 6, "head_dim": 32, "vocab_size": 1024}
GPT2_SIZES = {"n_embd": 128, "n_layer": 6, "n_positions": 256, "vocab_size": 1024}
WINDOWS = {"max_position_embeddings": 256, "sliding_window": 20, "max_window_layers": 3}
RESIDENT = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 9, "vocab_size": 2048}
SECONDS = 300.0


def saved_model(name: str, folder: Path, sizes: dict[str, Any]) -> Path:
    """Writes a model of an architecture whose layers are large enough that their bytes outweigh all else."""
    config = CONFIGS[name]()
    known = config.to_dict()
    values = known | {key: value for key, value in sizes.items() if key in known}
    values.pop("layer_types", None)
    return save(AutoModelForCausalLM.from_config(type(config)(**values)), folder)


def tuning_manifest(folder: Path, frozen_as: str, context: int = 128, **sections: Any) -> Manifest:
    """A run of three stages that trains LoRA, four rows a microbatch, one microbatch a step."""
    model = {"context": context, "trained": "lora", "frozen_as": frozen_as, "lora_rank": 4}
    values: dict[str, Any] = {
        "model": model,
        "boundary": {"codec": "bf16"},  # a boundary and its gradient, as many bytes as the float32 entry that is kept
        "schedule": {"microbatch": 4},
        "optimizer": {"target_tokens": 4 * context},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    return manifest_of(folder, 3, **values)


def check_peak(manifest: Manifest, way: Activations, span: Span, in_flight: int, folder: Path) -> None:
    """Compares the peak of a span in training with the formula's, to 15 %."""
    manifest = manifest.with_values(schedule={"activations": SETTINGS[way]})
    expected = run_cost(manifest, in_flight=in_flight, activations=way).memory(span).device
    measured = measured_peak(manifest, span, in_flight, folder, way=way)
    assert measured == pytest.approx(expected, rel=0.15), span


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model("llama", tmp_path_factory.mktemp("llama"), SIZES | WINDOWS)


@pytest.mark.parametrize("way", [way for way in ALL_ACTIVATIONS if way != "inputs"])
def test_the_peak_of_several_stages_over_float32_weights_is_within_15_percent(llama: Path, way: Activations) -> None:
    manifest = tuning_manifest(llama, "float32", model={"lora_dropout": 0.1})
    check_peak(manifest, way, Span(0, 1), 2, llama)
    check_peak(manifest, way, Span(1, 2), 1, llama)


@pytest.mark.parametrize("trained", ["all", "lora"])
def test_head_and_loss_take_the_logits_of_one_chunk(
    trained: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In eight chunks; with the logits of all 256 tokens at once the peak is three and seven times as high."""
    folder = saved_model("llama", tmp_path, {"num_hidden_layers": 3, "vocab_size": 16_384})
    manifest = tuning_manifest(folder, "bf16", context=64)
    if trained == "all":
        manifest = manifest.with_values(model={"trained": "all"})
    monkeypatch.setattr(activation_bytes, "LOGITS_AT_ONCE", 32 * 16_384)
    check_peak(manifest, "keep", Span(2, 2), 1, folder)


def test_logits_are_not_in_memory_together_with_their_gradient(tmp_path: Path) -> None:
    """The logits, their log-probabilities and two gradients of these would be 4 copies; 3 are enough."""
    folder = saved_model("llama", tmp_path, {"num_hidden_layers": 3, "vocab_size": 16_384})
    check_peak(tuning_manifest(folder, "bf16", context=64), "keep", Span(2, 2), 1, folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_the_peak_of_every_architecture_is_within_15_percent(name: str, tmp_path: Path) -> None:
    folder = saved_model(name, tmp_path, GPT2_SIZES if name == "gpt2" else SIZES | WINDOWS)
    packed: dict[str, Any] = {"objective": {"kind": "sft"}, "data": {"samples": "samples.jsonl"}}
    others: list[dict[str, Any]] = [packed, {"model": {"lora_dropout": 0.1}}, {"optimizer": {"name": "adamw8bit"}}]
    for frozen_as, sections in zip(FORMATS, others, strict=True):
        manifest = tuning_manifest(folder, frozen_as, **sections)
        for way in run_cost(manifest).activation_choices:
            check_peak(manifest, way, Span(0, 1), 2, folder)
            check_peak(manifest, way, Span(2, 2), 1, folder)


@pytest.mark.slow
@pytest.mark.timeout(4 * SECONDS)
@pytest.mark.parametrize(("frozen_as", "way"), list(zip(FORMATS, ("keep", "recompute", "layers"), strict=True)))
def test_the_resident_memory_of_a_span_is_within_15_percent(frozen_as: str, way: Activations, tmp_path: Path) -> None:
    """Of a process whose malloc gives freed memory back at once; what a daemon's keeps is in docs/use/tuning.md."""
    in_flight, files = 3, list[str]()
    for label, sizes in (("warm-up", {}), ("run", RESIDENT)):
        folder = saved_model("llama", tmp_path / label, SIZES | WINDOWS | sizes)
        manifest = tuning_manifest(folder, frozen_as, context=256, schedule={"activations": SETTINGS[way]})
        file = folder / "run.toml"
        file.write_text(manifest.to_toml())
        files.append(str(file))
    keeps = "1" if way == "keep" else "0"
    command = [sys.executable, "-m", "tests.cost.resident_memory", *files, "1", str(in_flight), keeps]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=SECONDS)
    assert done.returncode == 0, done.stderr[-2000:]
    expected = run_cost(manifest, in_flight=in_flight, activations=way).memory(Span(1, 1)).device
    assert int(done.stdout) == pytest.approx(expected, rel=0.15)
