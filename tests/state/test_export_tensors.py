"""Stages' files become the shards of one model, or nothing at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file
from safetensors.torch import load_file

from agora.core.hub_files import WEIGHTS_INDEX_FILE
from agora.state.export_tensors import (
    PIECE_VALUES,
    ExportedTensor,
    ExportError,
    StageFile,
    TensorBlocks,
    check_finite,
    cut_shards,
    open_stages,
    to_bf16,
    write_shards,
    write_weights_file,
)
from agora.state.files import replace_tensors

RUN = "ab" * 32
EXPORTED = {
    0: [ExportedTensor("a", "model.a", (4, 3)), ExportedTensor("b", "model.b", (5,))],
    1: [ExportedTensor("c", "model.c", (2, 2))],
}
ALL = [*EXPORTED[0], *EXPORTED[1]]


def values(part: ExportedTensor) -> np.ndarray:
    return np.linspace(-1, 1, part.numel, dtype=np.float32).reshape(part.shape)


def tensors(stage: int) -> dict[str, np.ndarray]:
    return {tensor.source: values(tensor) for tensor in EXPORTED[stage]}


def about(stage: int, step: int = 7) -> dict[str, str]:
    return {"run": RUN, "stage": str(stage), "step": str(step)}


@pytest.fixture
def files(tmp_path: Path) -> list[StageFile]:
    for stage in (0, 1):
        replace_tensors(tmp_path / f"stage-{stage}.safetensors", tensors(stage), about(stage))
    return [StageFile(stage, 7, tmp_path / f"stage-{stage}.safetensors") for stage in (0, 1)]


def check(files: list[StageFile]) -> list[int]:
    reported: list[int] = []
    with open_stages(RUN, files, EXPORTED) as model:
        model.check(reported.append)
    return reported


@pytest.mark.parametrize(("shard_bytes", "shards"), [(10**9, 1), (70, 2), (1, 3)])
def test_shards_hold_every_tensor_under_its_new_name(
    files: list[StageFile], tmp_path: Path, shard_bytes: int, shards: int
) -> None:
    assert check(files) == [48, 20, 16]
    out = tmp_path / "out"
    out.mkdir()
    with open_stages(RUN, files, EXPORTED) as model:
        written = write_shards(out, model.converted_tensors(), "float32", shard_bytes, lambda _: None)
    index = json.loads((out / WEIGHTS_INDEX_FILE).read_text())
    assert index["metadata"]["total_size"] == 84
    assert sorted(written) == sorted(path.name for path in out.iterdir()) and len(written) == shards + 1
    for part in ALL:
        found = load_file(out / index["weight_map"][part.name])[part.name]
        assert np.array_equal(found.numpy(), values(part))
    assert all((out / name).stat().st_size == file.size for name, file in written.items())


def test_bf16_halves_the_files_and_rounds_as_torch_does(files: list[StageFile], tmp_path: Path) -> None:
    with open_stages(RUN, files, EXPORTED) as model:
        write_shards(tmp_path, model.converted_tensors(), "bf16", 10**9, lambda _: None)
    found = load_file(tmp_path / "model-00001-of-00001.safetensors")
    for part in ALL:
        assert torch.equal(found[part.name], torch.from_numpy(values(part)).bfloat16())


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=30))
def test_bf16_is_torchs_for_every_finite_value(numbers: list[float]) -> None:
    array = np.array(numbers, np.float32)
    assert torch.equal(torch.from_numpy(to_bf16(array)).view(torch.bfloat16), torch.from_numpy(array).bfloat16())


@given(st.lists(st.integers(1, 40), min_size=1, max_size=20), st.integers(1, 100))
def test_shards_keep_the_order_and_the_limit(sizes: list[int], limit: int) -> None:
    parts = [in_blocks(str(i), np.zeros(size, np.float32), 1) for i, size in enumerate(sizes)]
    shards = cut_shards(parts, 2, limit)
    assert [part for shard in shards for part in shard] == parts
    for shard, following in zip(shards, [*shards[1:], None], strict=True):
        total = sum(2 * part.numel for part in shard)
        assert total <= limit or len(shard) == 1
        assert following is None or total + 2 * following[0].numel > limit


def in_blocks(name: str, array: np.ndarray, count: int) -> TensorBlocks:
    """A tensor that is read in up to `count` blocks of rows."""
    return TensorBlocks(name, array.shape, lambda: iter(np.array_split(array, count)), f"some.file: {name}")


@pytest.mark.parametrize("dtype", ["float32", "bf16"])
def test_one_file_holds_tensors_that_are_read_block_by_block(tmp_path: Path, dtype: Any) -> None:
    random = np.random.default_rng(0)
    arrays = {"m": random.normal(size=(7, 5)), "long": random.normal(size=PIECE_VALUES + 3), "transposed": None}
    arrays["transposed"] = arrays["m"].T
    tensors = [in_blocks(name, array.astype("f4"), 3) for name, array in arrays.items()]
    reported: list[int] = []
    check_finite(tensors, reported.append)
    digest = write_weights_file(tmp_path / "one.safetensors", tensors, dtype, reported.append)
    assert reported == 2 * [4 * array.size for array in arrays.values()]
    assert digest.size == (tmp_path / "one.safetensors").stat().st_size
    for name, values in load_file(tmp_path / "one.safetensors").items():
        expected = torch.from_numpy(arrays[name].astype("f4"))
        assert torch.equal(values, expected.bfloat16() if dtype == "bf16" else expected)


def test_a_block_that_is_not_finite_is_named_by_its_origin() -> None:
    tensors = [in_blocks("fine", np.ones((3, 2), np.float32), 3), in_blocks("bad", nan(np.eye(4, 2)), 4)]
    with pytest.raises(ExportError, match="^some.file: bad has values that are not finite"):
        check_finite(tensors, lambda _: None)


def test_one_tensor_is_read_by_its_name_in_the_run(files: list[StageFile]) -> None:
    with open_stages(RUN, files, EXPORTED) as model:
        assert np.array_equal(model.read_tensor("c"), values(EXPORTED[1][0]))
        with pytest.raises(KeyError):
            model.read_tensor("model.c")


def nan(array: np.ndarray) -> np.ndarray:
    return np.where(array == array.max(), np.nan, array).astype(np.float32)


DAMAGES = {
    "b is missing": {"a": tensors(0)["a"]},
    "x is not a tensor of this stage": tensors(0) | {"x": np.zeros(1, np.float32)},
    r"a is F32 \(3, 4\); the manifest says F32 \(4, 3\)": tensors(0) | {"a": np.zeros((3, 4), np.float32)},
    r"b is F16 \(5,\)": tensors(0) | {"b": np.zeros(5, np.float16)},
    "a has values that are not finite": tensors(0) | {"a": nan(tensors(0)["a"])},
    "b has values that are not finite": tensors(0) | {"b": np.full(5, np.inf, np.float32)},
}


@pytest.mark.parametrize("expected", DAMAGES)
def test_what_is_not_as_the_manifest_says_is_named(files: list[StageFile], expected: str) -> None:
    save_file(DAMAGES[expected], files[0].path, about(0))
    with pytest.raises(ExportError, match=f"stage-0.safetensors: {expected}"):
        check(files)


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        (about(0) | {"run": "cd" * 32}, "is of run cdcd"),
        (about(1), "is of stage 1, not 0"),
        (about(0, step=6), "is of step 6, not 7"),
        ({}, "is of run none"),
    ],
)
def test_a_file_of_another_run_stage_or_step_is_refused(
    files: list[StageFile], metadata: dict[str, str], expected: str
) -> None:
    save_file(tensors(0), files[0].path, metadata)
    with pytest.raises(ExportError, match=expected):
        check(files)


@pytest.mark.parametrize("keep", [0, 4, 60, -1])
def test_a_file_cut_short_is_refused(files: list[StageFile], keep: int) -> None:
    files[1].path.write_bytes(files[1].path.read_bytes()[:keep])
    with pytest.raises(ExportError, match="stage-1.safetensors cannot be read"):
        check(files)


def test_a_file_that_is_not_there_is_refused(files: list[StageFile]) -> None:
    files[1].path.unlink()
    with pytest.raises(ExportError, match="stage-1.safetensors"):
        check(files)
