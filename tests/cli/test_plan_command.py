"""`swarm plan` prints a table, a picture, the bottleneck and what one more machine adds; mistakes are one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from agora_protocol.errors import InputError, OutOfMemory
from agora_protocol.ids import Span
from agora_protocol.manifest import preset
from agora_protocol.manifest_sections import ALL_STEPS

from agora.cli import console, plan_command
from agora.cli.plan_command import PlanOptions, plan_run
from agora.cost.manifest_cost import run_cost
from agora.node import paths
from agora.planning.peers_file import read_peers

PEERS = """
[[machine]]
name = "box"
flops_tflops = 10
memory_gb = 8
upload_mbps = 500
count = 2
[[machine]]
name = "attic"
flops_tflops = 1
memory_gb = 4
upload_mbps = 20
download_mbps = 100
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The manifest file of an unsigned run of four stages."""
    monkeypatch.setenv(paths.HOME_VARIABLE, str(tmp_path / "home"))
    monkeypatch.setenv(paths.RUNTIME_VARIABLE, str(tmp_path / "sockets"))
    path = tmp_path / "run.toml"
    path.write_text(preset("small").to_toml())
    return str(path)


def question(run: str, tmp_path: Path, text: str = PEERS, added: str | None = None) -> PlanOptions:
    """A question about the machines of `text`, with a picture."""
    peers = tmp_path / "peers.toml"
    peers.write_text(text)
    return PlanOptions(run, peers, tmp_path / "plan.svg", added)


def test_people_get_a_table_a_picture_the_bottleneck_and_what_one_more_adds(
    run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan_command.run(question(run, tmp_path), as_json=False) == console.EXIT_DONE
    printed = capsys.readouterr().out
    assert printed.startswith("small: ") and "tokens/s expected with 3 machines, 4 stages" in printed
    assert "MACHINES" in printed and "slowest" in printed and "bottleneck: stage" in printed
    assert "one more box: " in printed and "one more attic: " in printed
    assert (tmp_path / "plan.svg").read_text().startswith("<svg ")


def test_machines_get_one_json_object(run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan_command.run(question(run, tmp_path, added="t4"), as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert (found["schema"], found["run"], found["stages"]) == (1, "small", 4)
    assert [machine["name"] for machine in found["machines"]] == ["box-1", "box-2", "attic"]
    held = {stage for m in found["machines"] if m["span"] for stage in range(m["span"][0], m["span"][1] + 1)}
    assert held == {0, 1, 2, 3}
    assert min(found["stage_tokens_per_second"]) == pytest.approx(found["tokens_per_second"])
    assert found["bottleneck"]["limit"] in ("compute", "upload", "download") and found["bottleneck"]["why"]
    assert found["remarks"] == []
    assert [gain["kind"] for gain in found["one_more"]] == ["t4"] and found["one_more"][0]["factor"] >= 1


@pytest.mark.parametrize(
    ("upload", "exact_steps", "attic_sends", "sentence"),
    [
        (100_000, ALL_STEPS, "int8", "gradients of every step of {} s: 4 in int8."),
        (2_000, ALL_STEPS, "normal4", "2 in int8, 2 in normal4."),
        (20, ALL_STEPS, "normal2", "so that inner steps will be taken: stage 0 in "),
        (
            100_000,
            1000,
            "int8",
            "gradients of the first 1,000 steps of {} s: 4 in int8; later ones are inner steps, with",
        ),
        (20, 0, "normal2", "inner steps, and slices of the weights are averaged."),
        (100_000, 0, "int8", "every upload carries gradients: averaging.exact_steps = 1000000000 learns more."),
    ],
)
def test_a_plan_says_which_way_to_agree_the_uploads_carry(
    upload: int, exact_steps: int, attic_sends: str, sentence: str
) -> None:
    """The rule of the daemon decides for each machine, with the duration of a step that the plan expects."""
    manifest = preset("small")
    averaging = manifest.averaging.model_copy(update={"exact_steps": exact_steps})
    machine = '[[machine]]\nname = "{}"\ncount = 2\nflops_tflops = 10\nmemory_gb = 8\nupload_mbps = {}\n'
    peers = read_peers(machine.format("box", 100_000) + machine.format("attic", upload), "peers.toml")
    planned = plan_run(manifest.model_copy(update={"averaging": averaging}), peers)
    step_s = manifest.optimizer.target_tokens / (planned.plan.rate * planned.cost.tokens)
    assert planned.agreement.step_s == pytest.approx(step_s)
    assert sentence.format(f"{step_s:,.3g}") in planned.agreement.sentence
    assert [wire.name for wire in planned.agreement.wires.values()] == ["int8", "int8", attic_sends, attic_sends]
    fields = plan_command.plan_fields(planned)
    assert [machine["gradient_wire"] for machine in fields["machines"]] == ["int8", "int8", attic_sends, attic_sends]
    assert fields["agreement"] == {"step_seconds": planned.agreement.step_s, "why": planned.agreement.sentence}


def test_a_plan_says_that_steps_last_longer_where_the_manifest_allows_no_inner_steps() -> None:
    manifest = preset("small", averaging={"local_steps": "never"})
    machine = '[[machine]]\nname = "{}"\ncount = 2\nflops_tflops = 10\nmemory_gb = 8\nupload_mbps = {}\n'
    peers = read_peers(machine.format("box", 100_000) + machine.format("attic", 20), "peers.toml")
    assert "so that steps last longer: inner steps" in plan_run(manifest, peers).agreement.sentence


def test_a_machine_alone_with_its_stages_averages_nothing() -> None:
    peers = read_peers('[[machine]]\nname = "box"\nflops_tflops = 10\nmemory_gb = 8\nupload_mbps = 1\n', "peers.toml")
    found = plan_run(preset("small"), peers).agreement
    assert not found.wires and "nothing is averaged" in found.sentence


def test_the_same_file_gives_the_same_plan(run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan_command.run(question(run, tmp_path), as_json=True)
    first = capsys.readouterr().out
    plan_command.run(question(run, tmp_path), as_json=True)
    assert capsys.readouterr().out == first


def test_a_faster_uplink_or_machine_never_makes_the_plan_slower(run: str, tmp_path: Path) -> None:
    manifest = plan_command.find_manifest(run)
    slow = plan_command.plan_run(manifest, read_peers(PEERS, "slow")).plan.rate
    fast = plan_command.plan_run(manifest, read_peers(PEERS.replace("= 20", "= 200"), "fast")).plan.rate
    assert fast >= slow > 0


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (PEERS.replace("memory_gb = 4", "memory_gb = 0.05"), "Machine attic has 0.05 GB for stages and the smallest"),
        (PEERS.replace("upload_mbps = 20", "upload_mbps = 0"), "machine 2 has upload_mbps 0; give its upload"),
        (PEERS.replace("flops_tflops", "flop_tflops"), r"no key 'flop_tflops'; did you mean 'flops_tflops'\?"),
        ("", "there is no machine in it"),
    ],
)
def test_what_is_wrong_with_the_file_is_one_sentence(run: str, tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence) as found:
        plan_command.run(question(run, tmp_path, text), as_json=False)
    assert "\n" not in str(found.value)
    assert not (tmp_path / "plan.svg").exists()


def test_a_missing_file_is_named(run: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"There is no file .*none\.toml; write your machines into it"):
        plan_command.run(PlanOptions(run, tmp_path / "none.toml"), as_json=False)


def test_machines_that_cannot_hold_the_model_together_are_refused(run: str, tmp_path: Path) -> None:
    cost = run_cost(plan_command.find_manifest(run), in_16_bits=True)
    largest = max(cost.memory(Span(stage, stage)).device for stage in range(4))
    text = f'[[machine]]\nname = "one"\nflops_tflops = 1\nmemory_gb = {1.2 * largest / 1e9}\nupload_mbps = 100\n'
    with pytest.raises(OutOfMemory):
        plan_command.run(question(run, tmp_path, text), as_json=False)


def test_an_unknown_run_is_a_sentence(tmp_path: Path, run: str) -> None:
    with pytest.raises(InputError, match="or a run that this machine has joined"):
        plan_command.run(question("nobody-knows", tmp_path), as_json=False)


def test_host_memory_beside_a_gpu_lets_it_hold_more(
    run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two machines that cannot hold the model on their devices can with the optimizer's state in host memory."""
    text = '[[machine]]\nname = "gpu"\ncount = 2\nflops_tflops = 10\nmemory_gb = {}\nupload_mbps = 500\n{}'

    def in_host(gigabytes: float, more: str) -> list[bool]:
        """Returns whether each machine keeps its optimizer state in host memory."""
        assert (
            plan_command.run(question(run, tmp_path, text.format(gigabytes, more)), as_json=True) == console.EXIT_DONE
        )
        return [machine["optimizer_in_host"] for machine in json.loads(capsys.readouterr().out)["machines"]]

    cost = run_cost(preset("small"), in_16_bits=False)
    halves = (Span(0, 1), Span(2, 3))
    least = max(cost.memory(half, in_host=True).device for half in halves) / 0.9e9 + 1e-3
    with pytest.raises(OutOfMemory):
        in_host(least, "")
    assert in_host(least, "host_memory_gb = 32\n") == [True, True]
    assert in_host(64, "host_memory_gb = 32\n") == [False, False]
