"""What a run's model writes now, by `swarm sample` in a process of its own: small models only."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from agora_protocol.errors import LocalError
from agora_protocol.manifest import Manifest

from agora.cost.decoder_sizes import decoder_sizes
from agora.cost.manifest_cost import trained_parameters

MAX_PARAMETERS: Final = 25_000_000  # 100 MB, which a daemon may have to fetch from its peers for each text
TOKENS: Final = 120
SAMPLE_TIMEOUT_S: Final = 300.0
LOWEST_PRIORITY: Final = 19


def text_problem(manifest: Manifest) -> str:
    """Returns why no text of the run's model is made for a page; "" if one is."""
    if manifest.model.has_reference:
        return "it needs the base model: `swarm sample RUN PROMPT --base-model DIR`"
    count = trained_parameters(decoder_sizes(manifest.model), range(manifest.model.layers))
    if count > MAX_PARAMETERS:
        return f"a model of {count / 1e6:,.0f} M parameters is not fetched for a page: `swarm sample RUN PROMPT`"
    return ""


async def write_run_text(manifest: Manifest, run: str, directories: Sequence[Path]) -> str:
    """Returns the beginning of a document that the model writes now.

    run: as `swarm sample` takes it. directories: data directories with checkpoints, where no daemon runs. Raises
    LocalError, which says why it cannot.
    """
    if problem := text_problem(manifest):
        raise LocalError(problem)
    try:
        return await _sample(run, directories)
    except (OSError, ValueError, LookupError) as error:
        raise LocalError(f"`swarm sample` could not be run ({error}); call it yourself to see why.") from error


async def _sample(run: str, directories: Sequence[Path]) -> str:
    places = [argument for directory in directories for argument in ("--dir", str(directory))]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "agora.cli.main_swarm", "sample", run, "", "--tokens", str(TOKENS), "--json"),
        *places,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        os.setpriority(os.PRIO_PROCESS, process.pid, LOWEST_PRIORITY)  # training comes first
        async with asyncio.timeout(SAMPLE_TIMEOUT_S):
            answer, errors = await process.communicate()
    except TimeoutError:
        raise LocalError(
            f"`swarm sample` did not end within {SAMPLE_TIMEOUT_S:.0f} s; call it yourself to see why."
        ) from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    if process.returncode:
        told = errors.decode(errors="replace").strip().splitlines() or ["error: no reason was given"]
        raise LocalError(told[-1].removeprefix("error: "))
    return str(json.loads(answer)["text"])
