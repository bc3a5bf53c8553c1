"""Starts background work of averaging whose errors are reported as events, because nothing waits for its result."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from agora_protocol.errors import AgoraError

from agora.observe import events


def start_reported(work: Coroutine[Any, Any, None], report: events.Report, name: str = "") -> asyncio.Task[None]:
    """Starts `work` as a task and returns the task; if the task ends with an error, reports TaskFailed of "averaging".

    The event's text is NAME: CODE: MESSAGE, with the type's name as the code of an error that is not an AgoraError;
    without a `name`, the code comes first. A cancelled task is not reported.
    """

    def report_failure(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            code = error.code if isinstance(error, AgoraError) else type(error).__name__
            report(events.TaskFailed("averaging", ": ".join(filter(None, (name, code, str(error))))))

    task = asyncio.create_task(work)
    task.add_done_callback(report_failure)
    return task
