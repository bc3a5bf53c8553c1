"""A peer never allocates more of a base model than its span: shown under a limit that the whole model exceeds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from tests.model.tiny_models import manifest_of

LAYERS, WIDTH = 16, 512
LAYER_BYTES = 4 * (4 * WIDTH * WIDTH + 3 * WIDTH * 4 * WIDTH)
SPARE_BYTES = 5 * LAYER_BYTES
"""What a process may allocate beside what it has after its imports: two layers, and room to read and to compute."""

BUILD = """
import json, resource, sys
from pathlib import Path
import torch
from agora_protocol.manifest import Manifest
from agora.model import family_of
from agora.core.optional_packages import import_tuning
folder, manifest, first, stop, spare = sys.argv[1:]
manifest = Manifest.from_toml(Path(manifest).read_text())
torch.set_num_threads(1)
import_tuning("transformers.models.llama.modeling_llama")
import_tuning("peft")
family = family_of(manifest.model)
family.parameter_shapes(range(1))
taken = int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmData:"))) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (taken + int(spare),) * 2)
stage = family.build_stage(range(int(first), int(stop)), 0, Path(folder))
print(sum(parameter.numel() for parameter in stage.parameters()))
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in a shard for every layer, of zeros, made without the whole in memory."""
    folder = tmp_path_factory.mktemp("large")
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=64,
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shards: dict[str, dict[str, torch.Tensor]] = {}
    for name, parameter in model.named_parameters():
        shards.setdefault(name.split(".")[2] if ".layers." in name else "rest", {})[name] = parameter
    for shard, tensors in shards.items():
        save_file({name: torch.zeros(t.shape) for name, t in tensors.items()}, folder / f"model-{shard}.safetensors")
    return folder


def build(folder: Path, layers: range, frozen_as: str) -> subprocess.CompletedProcess[str]:
    """Builds a stage in a process of its own that may allocate SPARE_BYTES for it."""
    model = {"trained": "lora", "frozen_as": frozen_as}
    file = folder / "run.toml"
    file.write_text(manifest_of(folder, model=model).to_toml())
    arguments = [str(folder), str(file), str(layers.start), str(layers.stop), str(SPARE_BYTES)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", BUILD, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)


@pytest.mark.parametrize("frozen_as", ["float32", "nf4"])
def test_a_span_is_built_where_the_whole_model_does_not_fit(large: Path, frozen_as: str) -> None:
    span = build(large, range(7, 9), frozen_as)
    assert span.returncode == 0, span.stderr[-2000:]
    assert json.loads(span.stdout) > 0


def test_the_limit_is_one(large: Path) -> None:
    whole = build(large, range(LAYERS), "float32")
    assert whole.returncode != 0 and "allocate" in whole.stderr, whole.stderr[-2000:]
