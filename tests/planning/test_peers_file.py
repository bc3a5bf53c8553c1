"""A file of machines is read exactly, and what is wrong with it is one sentence that says what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
from agora_protocol.errors import InputError

from agora.planning.peers_file import ACCELERATORS, USABLE_MEMORY, read_peers

GOOD = """
[[machine]]
kind = "a100"
count = 2
upload_mbps = 1000
download_mbps = 2000
latency_ms = 20
[[machine]]
name = "attic"
flops_tflops = 12.5
memory_gb = 8
host_memory_gb = 32
upload_mbps = 40
"""


def test_machines_have_the_units_of_plans() -> None:
    peers = read_peers(GOOD, "peers.toml")
    first, second, attic = peers.machines
    assert [machine.name for machine in peers.machines] == ["a100-1", "a100-2", "attic"]
    assert first.flops == second.flops == 205e12 and first.memory == pytest.approx(USABLE_MEMORY * 80e9)
    assert (first.upload, first.download, first.latency_s) == (125e6, 250e6, 0.02)
    assert (attic.flops, attic.upload, attic.download) == (12.5e12, 5e6, 5e6)
    assert attic.memory == pytest.approx(7.2e9) and attic.host_memory == pytest.approx(28.8e9)
    assert peers.in_16_bits and [kind.name for kind in peers.kinds] == ["a100", "attic"]


def test_cpus_compute_in_float32_where_the_file_says_so() -> None:
    assert not read_peers('precision = "float32"\n' + GOOD, "peers.toml").in_16_bits


def test_one_more_machine_is_of_a_kind_of_the_file_or_an_accelerator_with_the_median_link() -> None:
    peers = read_peers(GOOD, "peers.toml")
    assert peers.find_kind("attic") == peers.kinds[1]
    added = peers.find_kind("t4")
    assert (added.flops, added.upload, added.host_memory) == (26e12, 125e6, 0.0)
    with pytest.raises(InputError, match=r"--add 'h10' is not a kind of machine; did you mean 'h100'\?"):
        peers.find_kind("h10")


def test_every_accelerator_of_the_table_can_be_named() -> None:
    text = "".join(f'[[machine]]\nkind = "{kind}"\nupload_mbps = 100\n' for kind in ACCELERATORS)
    assert len(read_peers(text, "peers.toml").machines) == len(ACCELERATORS)


def test_a_speed_that_nobody_has_measured_is_said_to_be_computed_unless_the_owner_gives_his_own() -> None:
    machine = '[[machine]]\nkind = "{}"\nname = "{}"\nupload_mbps = 100\n'
    text = machine.format("rtx4090", "den") + machine.format("t4", "shed") + machine.format("a100", "lab")
    remarks = read_peers(text, "peers.toml").remarks
    assert (
        len(remarks) == 2
        and remarks[0].startswith("89.2 TFLOP/s of rtx4090: computed")
        and "flops_tflops" in remarks[0]
    )
    assert "t4: measured by others; daemons compute in fp16 there" in remarks[1]
    assert read_peers(machine.format("t4", "shed") + "flops_tflops = 6\n", "peers.toml").remarks == ()


def test_the_page_has_the_table_of_accelerators() -> None:
    page = (Path(__file__).parents[2] / "docs" / "use" / "plan_command.md").read_text(encoding="utf-8")
    for kind, accelerator in ACCELERATORS.items():
        speed = accelerator.remark or "measured by others"
        assert f"| `{kind}` | {accelerator.tflops:g} | {accelerator.memory_gb:g} | {speed} |\n" in page


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", r"there is no machine in it; add a \[\[machine\]\] table"),
        ("machine = 3", "there is no machine in it"),
        ("[[machine]", "this is not valid TOML .* correct that line"),
        ("[[machines]]\nkind = 't4'", r"there is no key 'machines'; did you mean 'machine'\?"),
        ("precision = 'bf17'\n" + GOOD, 'precision is .*; use "bf16" or "float32"'),
        ("[[machine]]\nkind = 'h1000'\nupload_mbps = 1", r"machine 1 has the unknown kind 'h1000'; did you mean 'h100"),
        (
            "[[machine]]\nkind = 't4'\nuplaod_mbps = 1",
            r"machine 1 has no key 'uplaod_mbps'; did you mean 'upload_mbps'\?",
        ),
        ("[[machine]]\nkind = 't4'\nupload_mbps = 0", "machine 1 has upload_mbps 0; give its upload in Mbit/s"),
        ("[[machine]]\nkind = 't4'\nupload_mbps = 9\ndownload_mbps = 0", "machine 1 has download_mbps 0; give its"),
        ("[[machine]]\nkind = 't4'\nupload_mbps = nan", "has upload_mbps nan, which is not a number"),
        ("[[machine]]\nkind = 't4'\nupload_mbps = true", "which is not a number; give its upload in Mbit/s"),
        ("[[machine]]\nkind = 't4'\nupload_mbps = 'fast'", "which is not a number; give its upload in Mbit/s"),
        ("[[machine]]\nkind = 't4'", "machine 1 does not say upload_mbps"),
        ("[[machine]]\nname = 'x'\nmemory_gb = 8\nupload_mbps = 9", "says neither kind nor flops_tflops"),
        ("[[machine]]\nname = 'x'\nflops_tflops = 8\nupload_mbps = 9", "says neither kind nor memory_gb"),
        (
            "[[machine]]\nkind = 't4'\nupload_mbps = 9\ncount = 1.5",
            "has count 1.5, which is not an integer",
        ),
        ("[[machine]]\nkind = 't4'\nupload_mbps = 9\ncount = 0", "has count 0; give its number of such machines, 1 to"),
        (
            "[[machine]]\nkind = 't4'\nupload_mbps = 9\nname = \"a\\u001b\"",
            "has the name .*; give it 1 to 64 printable",
        ),
        ("[[machine]]\nkind = 't4'\nupload_mbps = 9\n" * 2, "two machines are called 't4'; give each its own name"),
        ("[[machine]]\nkind = 't4'\nname = 'a'\nupload_mbps = 9\ncount = 2048\n" + GOOD, "more than 2048 machines"),
    ],
)
def test_what_is_wrong_is_one_sentence(text: str, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence) as found:
        read_peers(text, "peers.toml")
    assert str(found.value).startswith("peers.toml") and "\n" not in str(found.value)
