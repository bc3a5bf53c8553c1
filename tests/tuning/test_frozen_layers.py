"""Frozen weights in bf16 and NF4: what they compute, how they are read, and how much memory they take."""

from __future__ import annotations

import importlib
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from agora_protocol.manifest_model import HfSection
from bitsandbytes.nn import Params4bit
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

from agora.core.optional_packages import PackageMissing
from agora.cost.manifest_cost import run_cost
from agora.model import StageModule, family_of
from agora.train.objectives import stage_loss
from agora.tuning import hf_family
from agora.tuning.adapters import nf4_linear
from agora.tuning.adapters.frozen_linear import Bf16Linear
from agora.tuning.adapters.nf4_linear import Nf4Linear, quantise
from agora.tuning.base.model_files import WantedTensor, read_tensors
from agora.tuning.base.store import BaseModelError
from tests.model.tiny_models import CONFIGS, logits_of, make_model, manifest_of, save, some_tokens, stages_of
from tests.tuning.test_base_model import RecordingReader
from tests.tuning.test_lora_layers import LORA, relative_error, set_matrices, with_peft

NF4 = {**LORA, "frozen_as": "nf4"}
BF16 = {**LORA, "frozen_as": "bf16"}
NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}


@torch.no_grad()
def rounded_model(name: str, *, inside_layers: bool, **more: Any) -> Any:
    """A random model in float32 whose values are those of bf16; the matrices in layers only if `inside_layers`."""
    whole = make_model(name, **(NO_DROPOUT if name == "gpt2" else {}), **more)
    for tensor, parameter in whole.named_parameters():
        if inside_layers or parameter.ndim != 2 or not (".layers." in tensor or ".h." in tensor):
            parameter.copy_(parameter.to(torch.bfloat16))
    return whole


# --- how matrices are quantised


@pytest.mark.parametrize("shape", [(128, 192), (257, 640), (5, 13), (3, 64), (1, 1)])
@pytest.mark.parametrize("threads", [1, 3])
def test_pieces_that_several_threads_quantise_have_the_bits_of_bitsandbytes(
    shape: tuple[int, int], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nf4_linear, "PIECE", 4096)
    values = torch.randn(shape, generator=torch.Generator().manual_seed(3)) * 0.02
    packed, state = quantise(values, threads)
    whole = Params4bit(values, blocksize=64, compress_statistics=True, quant_type="nf4").to("cpu")
    assert torch.equal(packed, whole.data) and whole.quant_state is not None
    expected = whole.quant_state.as_dict(packed=False)
    found = state.as_dict(packed=False)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value) if isinstance(value, Tensor) else found[name] == value, name


def test_all_threads_quantise_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nf4_linear, "PIECE", 64)
    together, names = threading.Barrier(3, timeout=20), set()
    real = torch.ops.bitsandbytes.quantize_4bit.default

    def wait_for_the_others(*args: Any) -> Any:
        names.add(threading.current_thread().name)
        together.wait()
        return real(*args)

    monkeypatch.setattr(torch.ops.bitsandbytes.quantize_4bit, "default", wait_for_the_others)
    quantise(torch.randn(3, 64), 3)
    assert len(names) == 3 and all(name.startswith("nf4") for name in names)


# --- what is computed


@pytest.mark.parametrize("name", CONFIGS)
def test_nf4_computes_what_transformers_bitsandbytes_and_peft_do_in_one_process(name: str, tmp_path: Path) -> None:
    whole, tokens = rounded_model(name, inside_layers=False), some_tokens()
    folder, targets = save(whole, tmp_path / "base"), tokens.roll(-1, dims=1)
    quantised = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    attention = "eager" if name == "gemma2" else "sdpa"
    single = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=quantised, dtype=torch.float32, device_map="cpu", attn_implementation=attention
    )
    single.train()  # or bitsandbytes would compute in bf16; there is no dropout
    for count in (1, 3):
        manifest = manifest_of(folder, count, model=NF4)
        stages = stages_of(manifest, folder)
        matrices = set_matrices(stages)
        logits = logits_of(stages, tokens)
        if count == 1:
            single = with_peft(single, manifest.model, matrices)
            expected = single(tokens).logits
            assert relative_error(whole(tokens).logits, expected) > 0.01, "the quantisation changes nothing"
            stage_loss(expected, targets).backward()
        stage_loss(logits, targets).backward()
        assert relative_error(logits, expected) < 1e-4
        gradients = {f"base_model.model.{n}": p.grad for stage in stages for n, p in stage.trained_parameters()}
        for tensor, parameter in single.named_parameters():
            if parameter.requires_grad:
                assert relative_error(gradients.pop(tensor), parameter.grad) < 1e-4, tensor
        assert not gradients


@pytest.mark.parametrize("name", CONFIGS)
def test_bf16_weights_compute_in_float32_where_autocast_is_off(name: str, tmp_path: Path) -> None:
    whole, tokens = rounded_model(name, inside_layers=True), some_tokens()
    targets = tokens.roll(-1, dims=1)
    folder = save(make_model(name), tmp_path / "base")  # whose values are those before rounding
    manifest = manifest_of(folder, 2, model=BF16)
    stages = stages_of(manifest, folder)
    adapted = with_peft(whole, manifest.model, set_matrices(stages))
    logits, expected = logits_of(stages, tokens), adapted(tokens).logits
    assert logits.dtype == torch.float32
    assert relative_error(logits, expected) < 1e-5
    stage_loss(logits, targets).backward()
    stage_loss(expected, targets).backward()
    theirs = dict(adapted.named_parameters())
    for stage in stages:
        for tensor, parameter in stage.trained_parameters():
            assert relative_error(parameter.grad, theirs[f"base_model.model.{tensor}"].grad) < 1e-5, tensor


@pytest.mark.parametrize("frozen_as", ["bf16", "nf4"])
@pytest.mark.parametrize("name", ["llama-biased", "gemma2", "gpt2"])
def test_autocast_decides_the_products_and_leaves_the_residual_stream_float32(
    name: str, frozen_as: str, tmp_path: Path
) -> None:
    folder, tokens = save(make_model(name), tmp_path / "base"), some_tokens()
    stages = stages_of(manifest_of(folder, 2, model={**LORA, "frozen_as": frozen_as}), folder)
    set_matrices(stages)
    expected = logits_of(stages, tokens)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        boundary = stages[0](tokens, tokens)
        logits = stages[1](boundary, tokens)
    assert boundary.dtype == torch.float32
    assert logits.dtype == torch.bfloat16
    assert 1e-5 < relative_error(logits.float(), expected) < 0.05
    logits.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for s in stages for _, p in s.trained_parameters())
    assert torch.equal(logits_of(stages, tokens), expected), "nothing of it stays"
    frozen = next(module for module in stages[0].modules() if isinstance(module, Bf16Linear | Nf4Linear))
    entry = torch.randn(1, 2, frozen.in_features)
    assert frozen(entry).dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert frozen(entry).dtype == torch.bfloat16, "or activations would take twice the memory"


@pytest.mark.parametrize("frozen_as", ["bf16", "nf4"])
def test_a_repeated_forward_gives_the_same_values_also_without_gradients_and_of_one_token(
    frozen_as: str, tmp_path: Path
) -> None:
    folder, tokens = save(make_model("llama-biased"), tmp_path / "base"), some_tokens()
    (stage,) = stages_of(manifest_of(folder, 1, model={**LORA, "frozen_as": frozen_as}), folder)
    set_matrices([stage])
    expected = stage(tokens)
    with torch.no_grad():
        assert torch.equal(stage(tokens), expected)
        assert torch.equal(stage.eval()(tokens), expected)
        one = stage(tokens[:1, :1])
    torch.testing.assert_close(one, expected[:1, :1], rtol=0, atol=1e-5)
    assert torch.equal(stage.train()(tokens), expected)


def test_no_graph_keeps_a_float32_copy_of_a_frozen_matrix(tmp_path: Path) -> None:
    folder = save(make_model("llama"), tmp_path / "base")
    tokens = some_tokens()[:, :23]  # so that no activation has the shape of a matrix
    for options, kinds in ((BF16, Bf16Linear), (NF4, (Bf16Linear, Nf4Linear))):
        (stage,) = stages_of(manifest_of(folder, 1, model=options), folder)
        frozen = [module for module in stage.modules() if isinstance(module, kinds)]
        shapes = {(module.out_features, module.in_features) for module in frozen}
        assert len(frozen) == 7 * 3 + 1
        saved: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda t: t):
            stage(tokens)
        assert saved
        assert not [t for t in saved if tuple(t.shape) in shapes or tuple(t.shape[::-1]) in shapes]


# --- how they are read


@pytest.mark.parametrize("frozen_as", ["bf16", "nf4"])
@pytest.mark.parametrize("name", ["llama-biased", "gpt2"])
def test_layers_become_what_the_table_says(name: str, frozen_as: str, tmp_path: Path) -> None:
    folder = save(make_model(name, tie_word_embeddings=True), tmp_path / "base")
    (stage,) = stages_of(manifest_of(folder, 1, model={**LORA, "frozen_as": frozen_as}), folder)
    wanted = Nf4Linear if frozen_as == "nf4" else Bf16Linear
    for tensor, parameter in stage.named_parameters():
        module = stage.get_submodule(tensor.rpartition(".")[0])
        if parameter.requires_grad:
            assert parameter.dtype == torch.float32
            assert type(module) is nn.Linear
        elif tensor.endswith(".base_layer.weight"):
            assert type(module) is wanted
        elif parameter.ndim == 2:
            assert parameter.dtype == torch.bfloat16
            assert type(module) in (nn.Embedding, Bf16Linear)
        else:
            assert parameter.dtype == torch.float32
            assert torch.equal(parameter, parameter.to(torch.bfloat16).float())
        assert parameter.device.type == "cpu"


@pytest.mark.parametrize("frozen_as", ["bf16", "nf4"])
@pytest.mark.parametrize("name", ["qwen2", "gpt2"])
def test_one_tensor_at_a_time_is_alive_in_full_precision(
    name: str, frozen_as: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(make_model(name), tmp_path / "base")
    alive: list[weakref.ref[Tensor]] = []

    def watched(*arguments: Any) -> Iterator[tuple[str, Tensor]]:
        for tensor, values in read_tensors(*arguments):
            assert all(reference() is None for reference in alive), "a tensor that was read before is still alive"
            alive.append(weakref.ref(values))
            handed_on = [values]
            del values
            yield tensor, handed_on.pop()

    monkeypatch.setattr(hf_family, "read_tensors", watched)
    (stage,) = stages_of(manifest_of(folder, 1, model={**LORA, "frozen_as": frozen_as}), folder)
    assert len(alive) == sum(not p.requires_grad for p in stage.parameters())
    full = [t for t in stage.parameters() if t.dtype == torch.float32 and t.ndim == 2 and not t.requires_grad]
    assert not full


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_only_the_tensors_of_the_stage_are_read(stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = make_model("qwen3")
    folder = save(whole, tmp_path / "base")
    manifest, recorder = manifest_of(folder, 3, model=NF4), RecordingReader()
    monkeypatch.setattr("agora.tuning.base.model_files.safe_open", recorder)
    family_of(manifest.model).build_stage(manifest.layers_of(stage), manifest.seed, folder)
    outside = {0: {"model.embed_tokens.weight"}, 2: {"model.norm.weight", "lm_head.weight"}}.get(stage, set())
    expected = {name for name, _ in whole.named_parameters() if f".layers.{stage}." in name} | outside
    assert sorted(recorder.read) == sorted(expected)


def test_a_wrong_file_is_refused_before_any_value_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save(make_model("gpt2"), tmp_path / "base")
    manifest, recorder = manifest_of(folder, 1, model=NF4), RecordingReader()
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    monkeypatch.setattr("agora.tuning.base.model_files.safe_open", recorder)
    with pytest.raises(BaseModelError, match="has the SHA-256"):
        stages_of(manifest, folder)
    assert not recorder.read


def test_a_transposed_matrix_of_another_shape_is_refused(tmp_path: Path) -> None:
    folder = save(make_model("gpt2"), tmp_path / "base")
    wanted = {"x": WantedTensor(("transformer.h.0.mlp.c_fc.weight",), (128, 32))}
    model = manifest_of(folder).model
    assert isinstance(model, HfSection)
    with pytest.raises(BaseModelError, match=r"has the shape \[32, 128\]"):
        list(read_tensors(folder, model.weights, wanted))


# --- how much memory they take


def tensor_bytes(stage: StageModule) -> int:
    """Bytes of all frozen tensors of a stage: parameters, and what bitsandbytes keeps beside them; shared ones once."""
    tensors = [parameter for parameter in stage.parameters() if not parameter.requires_grad]
    for parameter in list(tensors):
        state = getattr(parameter, "quant_state", None)
        if state is not None:
            tensors += [state.absmax, state.code, state.offset, state.state2.absmax, state.state2.code]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


@pytest.mark.parametrize("frozen_as", ["float32", "bf16", "nf4"])
@pytest.mark.parametrize("width", [32, 256])
def test_the_estimate_of_memory_is_what_the_tensors_of_a_stage_take(frozen_as: str, width: int, tmp_path: Path) -> None:
    sizes = {"vocab_size": 300, "hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": 3}
    whole = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, attention_bias=True))
    folder = save(whole, tmp_path / "base")
    manifest = manifest_of(folder, 3, model={**LORA, "frozen_as": frozen_as})
    estimates = [stage.frozen_bytes for stage in run_cost(manifest).stages]
    for stage, estimate in zip(stages_of(manifest, folder), estimates, strict=True):
        assert estimate == pytest.approx(tensor_bytes(stage), rel=0.01)
    if width == 256:
        numel = sum(p.numel() for name, p in whole.named_parameters() if ".layers.1." in name)
        bytes_of_one = estimates[1] / numel
        assert bytes_of_one == pytest.approx({"float32": 4, "bf16": 2, "nf4": 0.53}[frozen_as], rel=0.05)


# --- without the packages


@pytest.mark.parametrize(("package", "purpose"), [("peft", "trains LoRA"), ("bitsandbytes", "keeps frozen .* NF4")])
def test_who_lacks_a_package_is_told_the_command(
    package: str, purpose: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, real = save(make_model("llama"), tmp_path / "base"), importlib.import_module

    def refuse(name: str) -> Any:
        if name.split(".")[0] == package:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)
        return real(name)

    monkeypatch.setattr(importlib, "import_module", refuse)
    family = family_of(manifest_of(folder, model=NF4).model)
    with pytest.raises(
        PackageMissing,
        match=rf"This run {purpose}.* needs the package {package}, .* pip install 'agora-swarm\[tuning\]'",
    ):
        family.check_machine(folder)
    family_of(manifest_of(folder).model).check_machine(folder)
    if package == "bitsandbytes":
        family_of(manifest_of(folder, model=BF16).model).check_machine(folder)


def test_an_old_package_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peft, "__version__", "0.9.0")
    family = family_of(manifest_of(save(make_model("llama"), tmp_path / "base"), model=LORA).model)
    with pytest.raises(PackageMissing, match=r"peft, 0\.18 or newer \(version 0\.9\.0 is installed\)"):
        family.parameter_shapes(range(1))
