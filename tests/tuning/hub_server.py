"""A server on loopback that answers as the Hugging Face Hub does, for one folder of files as a model or a data set."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

REPO = "tiny-lab/tiny-llama"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class FakeHub:
    """One model, REPO, whose branch main is COMMIT. gated: files are refused. fetched: the names of those given."""

    folder: Path
    gated: bool = False
    fetched: list[str] = field(default_factory=list)
    requests: int = 0
    url: str = ""

    def error(self, path: str) -> tuple[int, str] | None:
        """The status and the Hub's word for what is wrong with a request; None if nothing is."""
        if REPO not in path:
            return 404, "RepoNotFound"
        if "/revision/" in path and path.rsplit("/", 1)[1] not in ("main", COMMIT):
            return 404, "RevisionNotFound"
        if "/resolve/" in path and self.gated:
            return 403, "GatedRepo"
        return None

    def content(self, path: str) -> bytes | None:
        """The body of the answer to a request that is right; None for a file that there is not."""
        if path.startswith((f"/api/models/{REPO}/tree/", f"/api/datasets/{REPO}/tree/")):
            return json.dumps([self._entry(file) for file in self._files()]).encode()
        if path.startswith(("/api/models/", "/api/datasets/")):
            siblings = [{"rfilename": self._name(file)} for file in self._files()]
            return json.dumps({"id": REPO, "sha": COMMIT, "siblings": siblings}).encode()
        file = self.folder / path.split(f"/resolve/{COMMIT}/")[1]
        return file.read_bytes() if file.is_file() else None

    def _files(self) -> list[Path]:
        return sorted(file for file in self.folder.rglob("*") if file.is_file())

    def _name(self, file: Path) -> str:
        return file.relative_to(self.folder).as_posix()

    def _entry(self, file: Path) -> dict[str, Any]:
        content = file.read_bytes()
        oid = hashlib.sha1(content).hexdigest()
        return {"type": "file", "path": self._name(file), "size": len(content), "oid": oid}


@contextmanager
def serve(hub: FakeHub) -> Iterator[FakeHub]:
    """Serves `hub` on a port of loopback while the block runs."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def _answer(self, *, with_body: bool) -> None:
            hub.requests += 1
            path = self.path.partition("?")[0]
            error, content = hub.error(path), None
            if error is None:
                content = hub.content(path)
                error = (404, "EntryNotFound") if content is None else None
            if with_body and content is not None and "/resolve/" in path:
                hub.fetched.append(path.split(f"/resolve/{COMMIT}/")[1])
            content = content or b"{}"
            self.send_response(error[0] if error else 200)
            if error:
                self.send_header("X-Error-Code", error[1])
            self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if with_body:
                self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            """Prints nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
