"""What `swarm export` writes is the run's own model to whoever loads it with transformers."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from agora_protocol.amendments import Amendment, open_amendment, seal_amendment
from agora_protocol.errors import InputError, Unavailable
from agora_protocol.identity import Identity
from agora_protocol.manifest import Manifest, SignedManifest
from agora_protocol.packing import pack_canonical
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from agora.cli import console, export_command
from agora.cli.console import Failure
from agora.model import StageModule, family_of
from agora.node import daemon_registry, paths, run_files, runs
from agora.node.control.control_socket import ControlSocket, Question
from agora.state.checkpoint import write_checkpoint
from agora.state.export_tensors import ExportError
from agora.state.files import replace_tensors
from agora.state.hub_publish import PublishError
from agora.state.layout import StageState
from agora.train.objectives import stage_loss
from agora.train.optimizer import with_moments
from agora.train.weight_versions import StageWeights
from tests.tuning.hub_server import WritableHub, serve_writable

MODEL = {"width": 32, "layers": 3, "heads": 4, "key_value_heads": 2, "feed_forward": 48, "context": 64}
VALUES = {"name": "poems", "model": MODEL | {"rope_theta": 777.0, "norm_epsilon": 1e-3}, "stages": {"count": 3}}
MANIFEST = Manifest.from_values(VALUES, "test")
STEPS = {0: 41, 1: 40, 2: 42}
Answer = dict[str, Any]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> paths.Home:
    monkeypatch.setenv(paths.HOME_VARIABLE, str(tmp_path / "home"))
    monkeypatch.setenv(paths.RUNTIME_VARIABLE, str(tmp_path / "sockets"))
    monkeypatch.chdir(tmp_path)
    return paths.home_at()


@pytest.fixture(scope="module")
def signed() -> SignedManifest:
    return SignedManifest.sign(MANIFEST, Identity.generate())


@pytest.fixture(scope="module")
def stages() -> list[StageModule]:
    """Far from their initial values, gains included, so that no tensor could stand for another."""
    return disturbed([family_of(MANIFEST.model).build_stage(MANIFEST.layers_of(k), 5) for k in range(3)])


@torch.no_grad()
def disturbed(built: list[StageModule]) -> list[StageModule]:
    for number, parameter in enumerate(p for stage in built for p in stage.parameters()):
        noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
        parameter.mul_(2).add_(noise, alpha=0.1)
    return built


@pytest.fixture
def checkpoints(home: paths.Home, signed: SignedManifest, stages: list[StageModule]) -> paths.Home:
    """A data directory that holds a checkpoint of every stage."""
    run_files.remember_manifest(home, signed)
    for stage in range(3):
        checkpoint(home, signed, stages, stage, STEPS[stage])
    return home


def named(stage: StageModule) -> dict[str, np.ndarray]:
    return {name: p.detach().numpy() for name, p in stage.named_parameters()}


def checkpoint(home: paths.Home, signed: SignedManifest, stages: list[StageModule], stage: int, step: int) -> Path:
    """Writes a checkpoint whose averaged weights are those of `stages`, and whose weights are twice as large."""
    layout = with_moments(signed.manifest.optimizer, StageWeights(stages[stage], torch.device("cpu")).layout)
    average = layout.flatten(named(stages[stage]))
    moments = {moment.name: average if moment.name == "average" else 0 * average for moment in layout.moments}
    state = StageState(stage, step, step, 0, layout, 2 * average, moments)
    return write_checkpoint(home.checkpoints(signed.run_id), signed.run_id, state, keep=3).path


def run(wanted: str, out: Path, *directories: Path, dtype: str = "float32", size: str = "5GB", **flags: bool):
    return export_command.run(wanted, out, directories, dtype=dtype, shard_size=size, as_json=True, **flags)


def logits_of(stages: list[StageModule], tokens: torch.Tensor) -> torch.Tensor:
    hidden = tokens
    for stage in stages:
        hidden = stage(hidden, tokens)
    return hidden


def some_tokens(b: int = 2) -> torch.Tensor:
    return torch.randint(256, (b, 65), generator=torch.Generator().manual_seed(1))


# --- what is written


@torch.no_grad()
def test_transformers_computes_the_runs_logits_and_loss(
    checkpoints: paths.Home, stages: list[StageModule], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("poems", tmp_path / "out", size="20KB") == console.EXIT_DONE
    output = json.loads(capsys.readouterr().out)
    assert output["from"] == "checkpoints" and len([n for n in output["files"] if n.endswith(".safetensors")]) > 3
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert sum(p.numel() for p in model.parameters()) == output["parameters"]
    ids = some_tokens()
    tokens, targets = ids[:, :-1], ids[:, 1:]
    ours, theirs = logits_of(stages, tokens), model(tokens).logits
    assert ours.std() > 1, "logits that hardly differ would show nothing"
    assert float((theirs - ours).abs().max() / ours.abs().max()) < 1e-5
    loss = float(stage_loss(ours, targets)) / targets.numel()
    assert float(model(ids, labels=ids).loss) == pytest.approx(loss, abs=1e-3)


def exported(folder: Path) -> dict[str, np.ndarray]:
    """The tensors of an export with one shard."""
    (shard,) = folder.glob("*.safetensors")
    return load_file(shard)


@pytest.mark.parametrize("from_daemon", [False, True])
def test_without_the_average_the_weights_of_the_last_step_are_exported_and_the_card_says_so(
    checkpoints: paths.Home,
    signed: SignedManifest,
    stages: list[StageModule],
    tmp_path: Path,
    from_daemon: bool,
    capsys: Any,
) -> None:
    async def collect(average: bool) -> Answer:
        times = 1 if average else 2
        return collected(tmp_path / f"collected-{average}", signed, stages, 60, times)

    found, cards = {}, {}
    with daemon(checkpoints, signed, collect) if from_daemon else contextlib.nullcontext():
        for average in (True, False):
            run("poems", out := tmp_path / f"out-{average}", average=average)
            output, listed = json.loads(capsys.readouterr().out), json.loads((out / "export.json").read_text())
            assert output["average"] == listed["average"] == average
            assert output["from"] == ("daemon" if from_daemon else "checkpoints")
            found[average], cards[average] = exported(out), (out / "README.md").read_text()
    assert found[True].keys() == found[False].keys() and len(found[True]) > 10
    assert all(np.array_equal(2 * values, found[False][name]) for name, values in found[True].items())
    assert "| weights | float32, exponential moving average over the steps, decay up to 0.99 |" in cards[True]
    assert "| weights | float32, those of the last step |" in cards[False]


def test_a_run_that_keeps_no_average_exports_its_weights_unasked(
    home: paths.Home, stages: list[StageModule], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    signed = SignedManifest.sign(MANIFEST.with_values(optimizer={"average_decay": 0.0}), Identity.generate())
    run_files.remember_manifest(home, signed)
    for stage in range(3):
        checkpoint(home, signed, stages, stage, 7)
    run("poems", tmp_path / "out")
    assert json.loads(capsys.readouterr().out)["average"] is False
    embedding = exported(tmp_path / "out")["model.embed_tokens.weight"]
    assert np.array_equal(embedding, 2 * named(stages[0])["embedding.weight"])
    assert "those of the last step" in (tmp_path / "out" / "README.md").read_text()


@torch.no_grad()
@pytest.mark.parametrize(("subspace", "embedding"), [(6, "auto"), (32, "fixed")])
def test_a_narrow_subspace_becomes_a_plain_llama_with_the_same_logits(
    home: paths.Home, tmp_path: Path, subspace: int, embedding: str
) -> None:
    narrow = MANIFEST.with_values(name="narrow", model={"subspace": subspace, "embedding": embedding})
    founded = SignedManifest.sign(narrow, Identity.generate())
    run_files.remember_manifest(home, founded)
    built = disturbed([family_of(narrow.model).build_stage(narrow.layers_of(k), narrow.seed) for k in range(3)])
    for stage in range(3):
        checkpoint(home, founded, built, stage, STEPS[stage])
    assert run("narrow", tmp_path / "out") == console.EXIT_DONE
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    tokens = some_tokens()[:, :-1]
    ours, theirs = logits_of(built, tokens), model(tokens).logits
    assert ours.std() > 1, "logits that hardly differ would show nothing"
    assert float((theirs - ours).abs().max() / ours.abs().max()) < 1e-5


def test_generate_runs_and_text_survives_the_tokenizer(checkpoints: paths.Home, tmp_path: Path) -> None:
    run("poems", tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "def f(x):\n    return '\u00e4\u20ac\U0001f600 \u0100 <s>'"
    ids = tokenizer(text, return_tensors="pt")
    assert ids["input_ids"][0].tolist() == list(text.encode())
    assert tokenizer.decode(ids["input_ids"][0]) == text
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.manual_seed(0)
    made = model.generate(**ids, max_new_tokens=12)
    assert made.shape[1] > len(text.encode()) and isinstance(tokenizer.decode(made[0]), str)
    assert model.generation_config.eos_token_id == 0


@torch.no_grad()
def test_bf16_is_the_same_model_rounded(checkpoints: paths.Home, stages: list[StageModule], tmp_path: Path) -> None:
    run("poems", tmp_path / "out", dtype="bf16")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert model.dtype == torch.bfloat16
    expected = stages[0].get_parameter("embedding.weight").bfloat16()
    assert torch.equal(model.model.embed_tokens.weight, expected)


def test_the_card_and_the_list_say_where_it_comes_from(
    checkpoints: paths.Home, signed: SignedManifest, tmp_path: Path
) -> None:
    run("poems", tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n")
    for text in (
        signed.run_id,
        "stage 0: 41, stage 1: 40, stage 2: 42",
        "checkpoints",
        'corpus = ["stdlib"]',
        "target of a step | 16,384 tokens",
    ):
        assert text in card, text
    assert runs.from_file(tmp_path / "out" / "run.toml", paths.home_at()).signed == signed
    listed = json.loads((tmp_path / "out" / "export.json").read_text())
    assert listed["stages"] == [{"stage": k, "step": STEPS[k]} for k in range(3)]
    for name, file in listed["files"].items():
        content = (tmp_path / "out" / name).read_bytes()
        assert (len(content), hashlib.sha256(content).hexdigest()) == (file["size"], file["sha256"])
    assert {path.name for path in (tmp_path / "out").iterdir()} == {*listed["files"], "export.json"}


def test_the_card_of_a_run_with_sparse_boundaries_says_what_the_export_has_that_it_never_used(
    home: paths.Home, stages: list[StageModule], tmp_path: Path
) -> None:
    founded = SignedManifest.sign(
        MANIFEST.with_values(name="sparse", boundary={"codec": "top12:int8"}), Identity.generate()
    )
    run_files.remember_manifest(home, founded)
    for stage in range(3):
        checkpoint(home, founded, stages, stage, STEPS[stage])
    assert run("sparse", tmp_path / "out") == console.EXIT_DONE
    card = (tmp_path / "out" / "README.md").read_text()
    assert "trained with 12 of its 32 columns between stages, and here has all of them" in card


# --- from which checkpoints


def test_the_newest_whole_checkpoint_in_any_data_directory_is_taken(
    checkpoints: paths.Home,
    signed: SignedManifest,
    stages: list[StageModule],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Data directories side by side in one folder, as `swarm demo --dir` leaves them."""
    shutil.move(checkpoints.root, tmp_path / "demo" / "peer-0")
    checkpoint(paths.Home(tmp_path / "demo" / "peer-1"), signed, stages, 1, 44)
    newer = checkpoint(paths.Home(tmp_path / "demo" / "peer-1"), signed, stages, 2, 50) / "weights.safetensors"
    content = bytearray(newer.read_bytes())
    content[-1] ^= 1
    newer.write_bytes(content)
    run("poems", tmp_path / "out", tmp_path / "demo")
    output = capsys.readouterr()
    assert [stage["step"] for stage in json.loads(output.out)["stages"]] == [41, 44, 42]
    assert str(newer) in output.err and "expected SHA-256" in output.err


def test_of_a_run_that_has_ended_the_state_at_its_end_is_taken_however_far_others_went_on(
    home: paths.Home,
    signed: SignedManifest,
    stages: list[StageModule],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Neither a later checkpoint nor what a daemon that goes on would collect; not before every stage has ended."""
    run_files.remember_manifest(home, signed)
    end = signed.manifest.optimizer.total_steps
    asked = []

    async def collect(average: bool) -> Answer:
        asked.append("collect")
        return collected(tmp_path / "collected", signed, stages, end + 60)

    for stage in range(3):
        for step in (end - 1, end, end + 50):
            if (stage, step) != (2, end):
                checkpoint(home, signed, stages, stage, step + (stage == 1))
    with daemon(home, signed, collect):
        run("poems", tmp_path / "out")
    output = capsys.readouterr()
    steps = [stage["step"] for stage in json.loads(output.out)["stages"]]
    assert steps == [end, end, end + 50] and not asked and "the run has ended" in output.err
    shutil.rmtree(home.checkpoints(signed.run_id) / "stage-2")
    with daemon(home, signed, collect):
        run("poems", tmp_path / "again")
    assert asked == ["collect"]


def test_a_missing_stage_is_named_with_exit_code_4(
    checkpoints: paths.Home, signed: SignedManifest, tmp_path: Path
) -> None:
    shutil.rmtree(checkpoints.checkpoints(signed.run_id) / "stage-1")
    with pytest.raises(Failure, match=r"stage 1 is missing: no daemon .* in .*home; run this command while") as failed:
        run("poems", tmp_path / "out")
    assert failed.value.code == console.EXIT_STALLED and not (tmp_path / "out").exists()


def test_a_run_this_machine_knows_nothing_of_is_4(tmp_path: Path) -> None:
    with pytest.raises(Failure, match="has not joined run cdcdcd") as failed:
        run("cd" * 32, tmp_path / "out")
    assert failed.value.code == console.EXIT_STALLED


def test_a_manifest_that_nobody_signed_was_never_trained(tmp_path: Path) -> None:
    (tmp_path / "draft.toml").write_text(MANIFEST.to_toml())
    with pytest.raises(Failure, match="not signed"):
        run("draft.toml", tmp_path / "out")


# --- from a daemon


@contextlib.contextmanager
def daemon(
    home: paths.Home,
    signed: SignedManifest,
    collect: Callable[[bool], Awaitable[Answer]],
    others: Mapping[str, Callable[[], Awaitable[Answer]]] | None = None,
) -> Iterator[None]:
    """A control socket of a daemon that does `collect` and answers `others` alone, in a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    questions = {name: Question(answer, {}) for name, answer in (others or {}).items()}
    questions["collect"] = Question(collect, {"average": bool}, 30.0)
    socket = ControlSocket(daemon_registry.socket_of(home), questions)
    try:
        asyncio.run_coroutine_threadsafe(socket.start(), loop).result(10)
        entry = daemon_registry.DaemonEntry(
            signed.run_id, "poems", signed.founder, "", os.getpid(), str(home.root), str(socket.path)
        )
        daemon_registry.register(entry)
        yield
        asyncio.run_coroutine_threadsafe(socket.close(), loop).result(10)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


def collected(folder: Path, signed: SignedManifest, stages: list[StageModule], step: int, times: int = 1) -> Answer:
    """Writes files with the weights of `stages`, multiplied by `times`, and returns the answer that names them."""
    files = {}
    for stage, module in enumerate(stages):
        about = {"run": signed.run_id, "stage": str(stage), "step": str(step)}
        tensors = {name: times * values for name, values in named(module).items()}
        replace_tensors(folder / f"stage-{stage}.safetensors", tensors, about)
        files[str(stage)] = str(folder / f"stage-{stage}.safetensors")
    return {"files": files, "steps": dict.fromkeys(files, step)}


def test_a_daemon_collects_what_is_newer_than_any_checkpoint(
    checkpoints: paths.Home,
    signed: SignedManifest,
    stages: list[StageModule],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = []

    async def collect(average: bool) -> Answer:
        asked.append("collect")
        return collected(tmp_path / "collected", signed, stages, 60)

    with daemon(checkpoints, signed, collect):
        run("poems", tmp_path / "out")
    output = json.loads(capsys.readouterr().out)
    assert asked == ["collect"] and output["from"] == "daemon" and {stage["step"] for stage in output["stages"]} == {60}


@pytest.mark.parametrize("answer", [Unavailable(1, ["nobody answers"]), {"files": {}, "steps": {}}], ids=["no", "odd"])
def test_a_daemon_that_cannot_leaves_it_to_the_checkpoints(
    checkpoints: paths.Home,
    signed: SignedManifest,
    answer: Answer | Exception,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def collect(average: bool) -> Answer:
        if isinstance(answer, Exception):
            raise answer
        return answer

    with daemon(checkpoints, signed, collect):
        run("poems", tmp_path / "out")
        output = capsys.readouterr()
        assert json.loads(output.out)["from"] == "checkpoints" and "could not collect" in output.err
        shutil.rmtree(checkpoints.checkpoints(signed.run_id))
        with pytest.raises(Failure, match=r"stage 0, 1, 2 is missing: the daemon in .* could not collect") as failed:
            run("poems", tmp_path / "more")
    assert failed.value.code == console.EXIT_STALLED


def test_what_a_daemon_collected_is_checked_before_anything_is_written(
    checkpoints: paths.Home, signed: SignedManifest, stages: list[StageModule], tmp_path: Path
) -> None:
    async def collect(average: bool) -> Answer:
        answer = collected(tmp_path / "collected", signed, stages, 60)
        bad = named(stages[1]) | {"layers.1.attention_norm.weight": np.full(32, np.nan, np.float32)}
        about = {"run": signed.run_id, "stage": "1", "step": "60"}
        replace_tensors(tmp_path / "collected" / "stage-1.safetensors", bad, about)
        return answer

    with (
        daemon(checkpoints, signed, collect),
        pytest.raises(ExportError, match=r"layers\.1\.attention_norm\.weight has values that are not finite"),
    ):
        run("poems", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["collected", "home", "sockets"]


# --- how it ends


def test_mistakes_end_before_anything_is_asked(checkpoints: paths.Home, tmp_path: Path) -> None:
    for size in ("", "5", "5 apples", "0GB", "-1GB"):
        with pytest.raises(Failure, match="--shard-size"):
            run("poems", tmp_path / "out", size=size)
    with pytest.raises(Failure, match="float32 or bf16"):
        run("poems", tmp_path / "out", dtype="int4")
    with pytest.raises(InputError, match="not an earlier export"):
        run("poems", checkpoints.root)
    with pytest.raises(InputError, match="'poms' is not a file.*'poems'"):
        run("poms", tmp_path / "out")
    assert (export_command.parse_size("5GB"), export_command.parse_size("1.5 mb")) == (5 * 10**9, 1_500_000)


def test_sigterm_ends_the_wait_for_a_daemon(checkpoints: paths.Home, signed: SignedManifest, tmp_path: Path) -> None:
    asked = threading.Event()

    async def collect(average: bool) -> Answer:
        asked.set()
        await asyncio.sleep(30)
        return {}

    line = [sys.executable, "-m", "agora.cli.main_swarm", "export", "poems", "--out", "out", "--json"]
    with (
        daemon(checkpoints, signed, collect),
        subprocess.Popen(line, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process,
    ):
        assert asked.wait(60)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=10)
    assert (process.returncode, out) == (130, "") and "Traceback" not in err
    assert not (tmp_path / "out").exists()


def test_people_get_four_lines(checkpoints: paths.Home, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    export_command.run("poems", tmp_path / "out", dtype="bf16")
    output = capsys.readouterr()
    assert [line.split()[0] for line in output.out.splitlines()] == ["exported", "weights", "stages", "load"]
    assert "0 at step 41, 1 at step 40, 2 at step 42, from checkpoints of its peers" in output.out
    assert "checking" in output.err and "writing" in output.err


# --- publishing

TOKEN = "hf_" + "t" * 34
REPO = "poets/poems"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[WritableHub]:
    import huggingface_hub.constants

    # Its files go another way where this is on, to servers that only the Hub has.
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    with serve_writable(WritableHub(TOKEN)) as served:
        monkeypatch.setenv("HF_ENDPOINT", served.url)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield served


def push(out: Path | None = None, **flags: Any) -> int:
    return export_command.run("poems", out, (), push=REPO, as_json=True, **flags)


@torch.no_grad()
def test_what_is_published_is_the_run_in_one_commit_and_nothing_of_it_stays_here(
    checkpoints: paths.Home,
    stages: list[StageModule],
    signed: SignedManifest,
    hub: WritableHub,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert push(private=True) == console.EXIT_DONE
    said = json.loads(capsys.readouterr().out)
    assert said["out"] is None and said["pushed"]["repo"] == REPO
    assert said["pushed"]["commit"].endswith(hub.heads[REPO])
    (commit,) = hub.commits
    assert commit[:2] == (REPO, "poems at step 40 to 42") and hub.private == {REPO}
    files = hub.repos[REPO]
    assert files.keys() == {".gitattributes", "export.json", *said["files"]}
    assert SignedManifest.from_toml(files["run.toml"].decode()).run_id == signed.run_id
    for name, content in files.items():
        place = tmp_path / "fetched" / name
        place.parent.mkdir(exist_ok=True)
        place.write_bytes(content)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "fetched").eval()
    tokens = some_tokens()[:, :-1]
    assert torch.allclose(model(tokens).logits, logits_of(stages, tokens), rtol=1e-4, atol=1e-4)
    assert not list(checkpoints.root.glob(".push-*"))


def test_an_earlier_export_of_the_run_is_replaced_and_leaves_no_file_behind(
    checkpoints: paths.Home, hub: WritableHub, tmp_path: Path
) -> None:
    push(shard_size="20KB")
    first = set(hub.repos[REPO])
    hub.repos[REPO]["notes.md"] = b"mine"
    push(tmp_path / "out")
    left = set(hub.repos[REPO])
    shards = {name for name in first if name.endswith(".safetensors")}
    assert len(shards) > 1 and not shards & left and "notes.md" in left
    assert left - {".gitattributes", "notes.md"} == {path.name for path in (tmp_path / "out").iterdir()}
    assert len(hub.commits) == 2 and hub.commits[0][2] != hub.commits[1][2]


@pytest.mark.parametrize("fail", ["upload", "commit"])
def test_half_an_upload_publishes_nothing_and_no_message_has_the_token(
    fail: str,
    checkpoints: paths.Home,
    hub: WritableHub,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
    hub.fail = fail
    with caplog.at_level("DEBUG"), pytest.raises(PublishError) as failed:
        push()
    assert hub.requests[fail] >= 1 and not hub.commits and hub.repos[REPO].keys() == {".gitattributes"}
    assert "nothing is published" in str(failed.value)
    seen = str(failed.value) + "".join(capfd.readouterr()) + caplog.text
    assert TOKEN not in seen


def test_again_what_arrived_is_not_sent_again_and_what_is_published_makes_no_commit(
    checkpoints: paths.Home, hub: WritableHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
    hub.fail = "commit"
    with pytest.raises(PublishError):
        push()
    hub.fail, sent = "", hub.requests["upload"]
    push()
    push()
    assert hub.requests["upload"] == sent == 1 and len(hub.commits) == 1


def test_what_others_publish_meanwhile_is_not_undone(checkpoints: paths.Home, hub: WritableHub) -> None:
    hub.on_upload = lambda: hub.move_head(REPO) and None
    with pytest.raises(PublishError, match="changed meanwhile"):
        push()
    assert hub.requests["upload"] >= 1 and not hub.commits


def test_a_repository_of_something_else_is_left_alone(checkpoints: paths.Home, hub: WritableHub) -> None:
    hub.make(REPO, {"config.json": b"{}"})
    with pytest.raises(PublishError, match="no export of a run"):
        push()
    hub.make(REPO, {"export.json": json.dumps({"run_id": "ab" * 32, "files": {}}).encode()})
    with pytest.raises(PublishError, match="an export of run abababababab"):
        push()
    hub.make(REPO, {"export.json": b"[]"})
    with pytest.raises(PublishError, match="no export wrote"):
        push()
    assert not hub.commits and not hub.requests["upload"]


def test_who_may_not_publish_is_told_before_anything_is_collected(
    checkpoints: paths.Home, hub: WritableHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(Failure, match="give --out DIR, --push"):
        export_command.run("poems", None)
    with pytest.raises(Failure, match="--private is for"):
        export_command.run("poems", tmp_path / "out", private=True)
    with pytest.raises(PublishError, match="write it as ORG/NAME"):
        export_command.run("poems", None, push="poems")
    monkeypatch.setenv("HF_TOKEN", "hf_of_somebody_else")
    with pytest.raises(PublishError, match="hf auth login"):
        push()
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(PublishError, match="Nobody is logged in"):
        push()
    assert not hub.commits and not hub.requests["preupload"]


def test_the_signed_history_goes_with_the_model(home: paths.Home, stages: list[StageModule], tmp_path: Path) -> None:
    founder = Identity.generate()
    signed = SignedManifest.sign(MANIFEST, founder)
    run_files.remember_manifest(home, signed)
    for stage in range(3):
        checkpoint(home, signed, stages, stage, STEPS[stage])
    changes = pack_canonical({"optimizer.total_steps": 900})
    run_id = bytes.fromhex(signed.run_id)
    amendment = Amendment(founder.peer, 1, run_id, 10, 30, int(time.time()), changes, b"")
    sealed = seal_amendment(amendment, signed.run_id, founder)
    run_files.write_amendments(home, signed.run_id, [sealed])
    run("poems", tmp_path / "out")
    (line,) = (tmp_path / "out" / "amendments").read_text().split()
    assert open_amendment(bytes.fromhex(line), signed.run_id).amendment == amendment
    assert "- from step 30: optimizer.total_steps = 900" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize(("from_step", "says"), [(30, True), (max(STEPS.values()) + 1, False)])
def test_the_card_tells_by_which_codec_the_last_step_was_taken(
    home: paths.Home, stages: list[StageModule], tmp_path: Path, from_step: int, says: bool
) -> None:
    founder = Identity.generate()
    signed = SignedManifest.sign(MANIFEST, founder)
    run_files.remember_manifest(home, signed)
    for stage in range(3):
        checkpoint(home, signed, stages, stage, STEPS[stage])
    changes = pack_canonical({"boundary.codec": "top3:int8"})
    amendment = Amendment(founder.peer, 1, bytes.fromhex(signed.run_id), 10, from_step, int(time.time()), changes, b"")
    run_files.write_amendments(home, signed.run_id, [seal_amendment(amendment, signed.run_id, founder)])
    run("poems", tmp_path / "out")
    assert ("It was trained with 3 of its" in (tmp_path / "out" / "README.md").read_text()) == says


# --- for llama.cpp


@torch.no_grad()
def test_a_file_for_llama_cpp_is_the_runs_model(
    checkpoints: paths.Home, stages: list[StageModule], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("poems", tmp_path / "out", gguf=True) == console.EXIT_DONE
    said = json.loads(capsys.readouterr().out)
    assert said["gguf"] and said["files"].keys() == {"model.gguf", "Modelfile", "README.md", "run.toml"}
    assert (tmp_path / "out" / "Modelfile").read_text() == "FROM ./model.gguf\n"
    card = (tmp_path / "out" / "README.md").read_text()
    assert "library_name: gguf" in card and "llama-cli -m model.gguf" in card and "from_pretrained" not in card
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", gguf_file="model.gguf").eval()
    ids = some_tokens()
    ours, theirs = logits_of(stages, ids[:, :-1]), model(ids[:, :-1]).logits
    assert float((theirs - ours).abs().max() / ours.abs().max()) < 1e-5
    loss = float(stage_loss(ours, ids[:, 1:])) / ids[:, 1:].numel()
    assert float(model(ids, labels=ids).loss) == pytest.approx(loss, abs=1e-3)
