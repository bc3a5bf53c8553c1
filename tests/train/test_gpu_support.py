"""Which GPUs a machine has, and the sentences that say why torch cannot use one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from agora_protocol.errors import DeviceError

from agora.train import device, gpu_support
from agora.train.device import choose_device
from agora.train.gpu_support import TorchBuild, unused_gpus_remark, vendors_of_gpus, why_unseen, why_unsupported

WHEEL = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]


@pytest.mark.parametrize(
    ("name", "capability", "is_supported"),
    [
        ("Tesla P100", (6, 0), False),
        ("Tesla V100", (7, 0), False),
        ("Jetson AGX Xavier", (7, 2), False),
        ("Tesla T4", (7, 5), True),
        ("A100", (8, 0), True),
        ("Jetson Orin", (8, 7), True),
        ("RTX 4090", (8, 9), True),
        ("H100", (9, 0), True),
        ("B200", (10, 0), True),
        ("Thor", (11, 0), False),
        ("RTX 5090", (12, 0), True),
        ("a later card, for which the driver compiles", (13, 0), True),
    ],
)
def test_a_card_is_supported_by_binary_code_of_its_generation_or_by_code_that_the_driver_compiles(
    name: str, capability: tuple[int, int], is_supported: bool
) -> None:
    reason = why_unsupported(name, capability, WHEEL, "2.13.0+cu130")
    assert (not reason) is is_supported
    if reason:
        assert name in reason and f"{capability[0]}.{capability[1]}" in reason and "install" in reason


def test_code_for_one_card_alone_serves_no_other_and_an_unknown_list_refuses_nothing() -> None:
    assert why_unsupported("H100", (9, 0), ["sm_90a"], "2.13") == ""
    assert "no kernels" in why_unsupported("H300", (9, 1), ["sm_90a"], "2.13")
    assert why_unsupported("B300", (10, 3), ["compute_100f"], "2.13") != ""
    assert why_unsupported("old", (3, 5), [], "2.13") == ""
    assert why_unsupported("MI300", (9, 4), ["gfx942"], "2.13") == ""


@pytest.mark.parametrize(
    ("vendors", "build", "has_driver", "said"),
    [
        (["NVIDIA"], TorchBuild("2.13+cpu", None, None, 0), True, "built for CPUs only; install PyTorch's CUDA build"),
        (["NVIDIA"], TorchBuild("2.13+rocm", None, "7.0", 0), True, "built for ROCm; install PyTorch's CUDA build"),
        (["NVIDIA", "NVIDIA"], TorchBuild("2.13+cu130", "13.0", None, 0), False, "2 NVIDIA GPUs"),
        (["NVIDIA"], TorchBuild("2.13+cu130", "13.0", None, 0), False, "driver is not loaded"),
        (["NVIDIA"], TorchBuild("2.13+cu130", "13.0", None, 0), True, "too old for CUDA 13.0"),
        (["AMD"], TorchBuild("2.13+cu130", "13.0", None, 0), False, "built for CUDA; install PyTorch's ROCm build"),
        (["AMD"], TorchBuild("2.13+cu130", "13.0", None, 0), False, "set TORCH_INDEX to the index of PyTorch's ROCm"),
        (["AMD"], TorchBuild("2.13+rocm", None, "7.0", 0), False, "/dev/kfd"),
        (["AMD", "NVIDIA"], TorchBuild("2.13+cu130", "13.0", None, 1), True, ""),
        ([], TorchBuild("2.13+cpu", None, None, 0), False, ""),
    ],
)
def test_a_gpu_that_torch_does_not_see_is_named_with_the_reason_and_what_to_do(
    vendors: list[str], build: TorchBuild, has_driver: bool, said: str
) -> None:
    sentence = why_unseen(vendors, build, has_driver=has_driver)
    assert said in sentence and bool(sentence) is bool(said)


def make_pci(root: Path, *devices: dict[str, str]) -> Path:
    for number, files in enumerate(devices):
        folder = root / f"0000:0{number}:00.0"
        folder.mkdir(parents=True)
        for name, text in files.items():
            (folder / name).write_text(text)
    return root


def test_only_cards_that_could_train_are_found_on_the_bus(tmp_path: Path) -> None:
    pci = make_pci(
        tmp_path / "pci",
        {"class": "0x030200\n", "vendor": "0x10de\n"},  # an NVIDIA card without outputs
        {"class": "0x040300\n", "vendor": "0x10de\n"},  # the sound device on such a card
        {"class": "0x030000\n", "vendor": "0x8086\n"},  # a processor's own graphics
        {"class": "0x030000\n", "vendor": "0x1002\n", "mem_info_vram_total": f"{2**29}\n"},  # the same, of AMD
        {"class": "0x030000\n", "vendor": "0x1002\n", "mem_info_vram_total": f"{24 * 2**30}\n"},
        {"class": "0x038000\n", "vendor": "0x1002\n"},  # without its driver, so that nothing is known of it
        {"class": "nonsense", "vendor": ""},
        {},
    )
    assert vendors_of_gpus(pci) == ["NVIDIA", "AMD"]
    assert vendors_of_gpus(tmp_path / "missing") == []


def pretend(monkeypatch: pytest.MonkeyPatch, *capabilities: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: WHEEL)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: f"card {number}")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda number: capabilities[number])


def test_auto_takes_the_first_card_with_kernels_and_a_card_without_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend(monkeypatch, (7, 0), (8, 6))
    assert choose_device("auto") == torch.device("cuda", 1) and choose_device("cuda:1") == torch.device("cuda", 1)
    assert unused_gpus_remark() == ""
    with pytest.raises(DeviceError, match=r"card 0, whose compute capability is 7\.0"):
        choose_device("cuda")


def test_auto_takes_the_cpu_where_no_card_has_kernels_and_the_owner_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, (7, 0))
    assert choose_device("auto") == torch.device("cpu") and "no kernels for card 0" in unused_gpus_remark()


def test_a_named_device_is_refused_with_the_reason_why_torch_sees_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    card = {"class": "0x030000", "vendor": "0x10de"}
    pci = make_pci(tmp_path, card)
    monkeypatch.setattr(gpu_support, "vendors_of_gpus", lambda: vendors_of_gpus(pci))
    with pytest.raises(DeviceError, match="1 NVIDIA GPU, and torch .* install PyTorch's CUDA build .* --device cpu"):
        device.choose_device("cuda:0")
