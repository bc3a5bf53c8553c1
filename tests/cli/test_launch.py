"""Claims about `swarm launch`: the jobs are what their tools accept, invites stay secret, flags are checked first."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import yaml

from agora.cli.console import EXIT_USAGE, Failure
from agora.cli.launch_command import check_request, follow_joins, job_of, label_of, launch, peers_of_job, tool_of
from agora.cli.launch_jobs.job import LEAVE_TIMEOUT_S, TOOLS, LaunchRequest, Tool

SECRET = "c2VjcmV0LXRpY2tldA"
PEER = "12D3KooWEGnZKU9xVt61ZDjis31pPWAbv6zoEZfLpEvzmhJXSRxr"
INVITE = f"agora://{'ab' * 32}/poems/{SECRET}@/ip4/203.0.113.7/tcp/31330/p2p/{PEER}"
DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
REQUESTS: dict[Tool, LaunchRequest] = {
    "ssh": LaunchRequest("ssh", hosts=("ada@lab1", "lab2")),
    "slurm": LaunchRequest("slurm", 8, "a100:2"),
    "kubernetes": LaunchRequest("kubernetes", 3, "NVIDIA-H100-80GB-HBM3:2"),
    "skypilot": LaunchRequest("skypilot", 4, "RTX4090"),
}

JOBS: list[tuple[Tool, str]] = [("slurm", "job.sbatch"), ("kubernetes", "job.yaml"), ("skypilot", "job.yaml")]


@pytest.mark.parametrize("tool", TOOLS)
def test_an_invite_is_in_no_argument_of_any_command(tool: Tool) -> None:
    job = job_of(REQUESTS[tool], "poems", INVITE, Path("/shared/job"))
    for command in (*job.up, *job.down):
        assert SECRET not in " ".join(command.arguments)
    assert any(
        SECRET in text
        for command in job.up
        for text in (command.input, *command.environment.values(), *job.files.values())
    ), "and the machines get it"


def test_a_pod_leaves_in_order_is_not_root_and_reads_its_invite_from_a_secret() -> None:
    text = job_of(REQUESTS["kubernetes"], "Poems & more", INVITE, Path("/job")).files["job.yaml"]
    secret, group = yaml.safe_load_all(text)
    assert secret["stringData"]["invite"] == INVITE
    pod = group["spec"]["template"]["spec"]
    assert group["spec"]["replicas"] == 3 and pod["terminationGracePeriodSeconds"] >= LEAVE_TIMEOUT_S >= 15
    assert pod["securityContext"]["runAsNonRoot"] and pod["enableServiceLinks"] is False
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 2}
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert container["args"][1] == f"{mounts['invite']}/invite" and container["args"][3] == mounts["data"]
    named = [volume["name"] for volume in pod["volumes"]] + [
        claim["metadata"]["name"] for claim in group["spec"]["volumeClaimTemplates"]
    ]
    assert sorted(mounts) == sorted(named)


def test_a_sky_task_opens_the_port_on_which_its_daemon_listens() -> None:
    job = job_of(REQUESTS["skypilot"], "poems", INVITE, Path("/job"))
    task = yaml.safe_load(job.files["job.yaml"])
    assert (task["num_nodes"], task["resources"]["accelerators"]) == (4, "RTX4090")
    assert f"--listen 0.0.0.0:{task['resources']['ports']} " in task["run"]
    (name,) = task["secrets"]
    (launch,) = job.up
    assert launch.environment == {name: INVITE} and f"${name}" in task["run"] and not name.startswith("AGORA_")
    assert [command.arguments[1] for command in job.down] == ["cancel", "down"]


def test_a_slurm_task_is_the_daemon_itself_with_a_directory_of_its_own(tmp_path: Path) -> None:
    folder = tmp_path / "shared folder"
    program = tmp_path / "agora-node"
    program.write_text('#!/bin/sh\nprintf "%s\\n" $$ "$@"\n')
    program.chmod(0o755)
    job = job_of(LaunchRequest("slurm", 2, program=str(program)), "poems", INVITE, folder)
    script = tmp_path / "job.sbatch"
    script.write_text(job.files["job.sbatch"])
    started = subprocess.Popen(
        ["sh", str(script)], env=os.environ | {"SLURM_ARRAY_TASK_ID": "2"}, stdout=subprocess.PIPE, text=True
    )
    said, _ = started.communicate(timeout=30)
    pid, *arguments = said.splitlines()
    assert int(pid) == started.pid, "a signal for the batch script reaches the daemon"
    assert arguments == ["join", f"{folder}/invite", "--dir", f"{folder}/node-2", "--device", "all"]
    assert "#SBATCH --array=1-2\n" in job.files["job.sbatch"] and "--gres" not in job.files["job.sbatch"]
    assert re.search(rf"--signal=B:TERM@{LEAVE_TIMEOUT_S}$", job.files["job.sbatch"], re.MULTILINE)


@pytest.mark.parametrize(
    ("name", "label"),
    [("poems", "agora-poems"), ("Meine Gedichte!", "agora-meine-gedichte"), ("", "agora-run"), ("ü/../x", "agora-x")],
)
def test_a_run_of_any_name_has_a_label_that_every_tool_accepts(name: str, label: str) -> None:
    assert label_of(name) == label
    assert re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?", label_of(name * 20))


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (LaunchRequest("ssh"), "--host"),
        (LaunchRequest("ssh", hosts=("-oProxyCommand=x",)), "no host"),
        (LaunchRequest("ssh", hosts=("a b",)), "no host"),
        (LaunchRequest("slurm", hosts=("lab1",)), "--count"),
        (LaunchRequest("slurm", 0), "1 to"),
        (LaunchRequest("slurm", gpus="a100;rm"), "no kind of GPU"),
        (LaunchRequest("slurm", gpus="a100:0"), "no kind of GPU"),
    ],
)
def test_flags_that_no_job_can_have_are_bad_arguments(request_: LaunchRequest, says: str) -> None:
    with pytest.raises(Failure, match=re.escape(says)) as failed:
        check_request(request_)
    assert failed.value.code == EXIT_USAGE


def test_a_tool_that_is_not_known_is_a_bad_argument_that_names_those_that_are() -> None:
    with pytest.raises(Failure, match="ssh, slurm, kubernetes, skypilot") as failed:
        tool_of("docker")
    assert failed.value.code == EXIT_USAGE and [tool_of(name) for name in TOOLS] == [*TOOLS]


@pytest.mark.parametrize(
    ("request_", "peers"),
    [
        (LaunchRequest("ssh", hosts=("ada@lab1", "lab2")), 2),
        (LaunchRequest("ssh", 1, "H100:4", hosts=("ada@lab1", "lab2")), 8),
        (LaunchRequest("slurm", 8, "a100:2"), 16),
        (LaunchRequest("kubernetes", 3, "NVIDIA-H100-80GB-HBM3"), 3),
        (LaunchRequest("skypilot", 4), 4),
    ],
)
def test_each_card_of_each_machine_is_a_peer_that_is_waited_for(request_: LaunchRequest, peers: int) -> None:
    assert peers_of_job(request_) == peers


def test_joins_are_followed_until_all_are_there_or_the_time_is_over() -> None:
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    def seen(*steps: Mapping[str, str]) -> Iterator[Mapping[str, str]]:
        yield from steps
        while True:
            yield steps[-1]

    def follow(*steps: Mapping[str, str]) -> list[str]:
        found = seen(*steps)
        return follow_joins(lambda: next(found), {"old": "a"}, 2, 60.0, lambda: now[0], sleep)

    old = {"old": "a"}
    assert follow(old, {}, old | {"x": "b"}, old | {"x": "b"}, old | {"y": "c"}) == ["x", "y"]
    assert now[0] < 60
    now[0] = 0.0
    assert follow(old, old | {"x": "b"}) == ["x"] and 60 <= now[0] < 70


@pytest.mark.parametrize(
    ("tool", "file"), [("slurm", "job.sbatch"), ("kubernetes", "job.yaml"), ("skypilot", "job.yaml")]
)
def test_the_jobs_in_deploy_are_what_the_command_writes(tool: Tool, file: str) -> None:
    written = job_of(REQUESTS[tool], "poems", "agora://...", Path("/shared/agora")).files[file]
    kept = DEPLOY / "launch" / f"{tool}{Path(file).suffix}"
    assert kept.read_text(encoding="utf-8") == written, f"write it: {kept}"


def test_a_host_that_cannot_be_reached_keeps_no_other_from_being_started_or_told_to_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = tmp_path / "told"
    fake = tmp_path / "ssh"
    fake.write_text(f'#!/bin/sh\necho "$*" >> {told}\ncase "$*" in *lab1*) exit 255;; esac\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    home = tmp_path / "home"
    with pytest.raises(Failure, match="exit code 255"):
        launch(INVITE, REQUESTS["ssh"], home, is_dry=False, is_down=True, wait_s=0.0, as_json=False)
    assert ["lab1" in line for line in told.read_text().splitlines()] == [True, False]


def test_a_job_without_an_invite_as_one_that_only_ends_daemons_is_as_readable() -> None:
    with_invite, without = (job_of(REQUESTS["ssh"], "poems", invite, Path()) for invite in (INVITE, ""))
    assert "(the invite)" in with_invite.files["start.sh"] and "(the invite)" not in without.files["start.sh"]
    assert len(without.files["start.sh"]) < len(with_invite.files["start.sh"])


def test_a_dry_run_prints_the_job_without_the_invite_and_writes_nothing(tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("AGORA_")}
    arguments = shlex.split("--on slurm --count 3 --dry-run --json")
    done = subprocess.run(
        [sys.executable, "-m", "agora.cli.main_swarm", "launch", INVITE, *arguments, "--dir", str(tmp_path / "home")],
        capture_output=True,
        text=True,
        env=environment,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert shown["dry_run"] and sorted(shown["files"]) == ["invite", "job.sbatch"]
    assert shown["commands"][0][0] == "sbatch" and SECRET not in done.stdout
    assert not (tmp_path / "home").exists()
