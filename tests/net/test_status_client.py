"""The light client, a process of its own on py-libp2p, asks a real network."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from agora_protocol.errors import NotMyStage
from agora_protocol.identity import Identity
from agora_protocol.messages import GetStatus, StatusAnswer

from agora.core.calls import Reply
from agora.net.rpc.connection import IncomingCall
from tests.net.helpers import peers, run

ROOT = Path(__file__).parents[2]
PROGRAM = """
import json, sys
from agora.net.dht import status_client
from agora_protocol.errors import AgoraError
for addresses, run, timeout_s in json.loads(sys.argv[1]):
    try:
        answer = status_client.fetch_status(addresses, run, timeout_s)
    except AgoraError as error:
        answer = [error.code, str(error)]
    heavy = [name for name in ("torch", "hivemind") if name in sys.modules]
    print(json.dumps({"answer": answer, "heavy": heavy}), flush=True)
"""


async def ask(*questions: tuple[list[str], str, float]) -> list[dict[str, Any]]:
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'protocol'}"}
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROGRAM, json.dumps(questions), env=environment, stdout=asyncio.subprocess.PIPE
    )
    try:
        output, _ = await child.communicate()
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    assert child.returncode == 0
    return [json.loads(line) for line in output.splitlines()]


def test_a_status_comes_without_torch_or_hivemind_and_failures_say_what_to_do() -> None:
    founder = Identity.generate()
    run_id = "ab" * 32
    status = {"schema": 1, "run_id": run_id, "peers": ["x" * 1000] * 500}

    async def handler(call: IncomingCall) -> Reply:
        if isinstance(call.message, GetStatus):
            return Reply(StatusAnswer(json.dumps(status).encode()))
        raise NotMyStage("never asked")

    async def main() -> None:
        async with peers(handler, run_id=run_id) as (a,):
            nowhere = f"/ip4/127.0.0.1/tcp/1/p2p/{founder.peer}"
            answers = await ask(
                ([nowhere, *a.addresses], run_id, 60.0),
                (list(a.addresses), "cd" * 32, 60.0),
                ([nowhere], run_id, 1.0),
                (["localhost"], run_id, 1.0),
            )
            said = [answer["answer"] for answer in answers]
            assert said[0] == status
            assert said[1][0] == "wrong-run"
            assert said[2][0] == "unreachable" and "Check the invite" in said[2][1]
            assert said[3][0] == "bad-input" and "should look like" in said[3][1]
            assert not any(answer["heavy"] for answer in answers)
            assert not a.violations and not a.failures

    run(main, timeout_s=150)
