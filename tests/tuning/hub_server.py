"""Servers on loopback that answer as the Hugging Face Hub does: for one folder of files as a model or a data set, and
for a model repository that is published to."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

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

    with listening(Handler) as hub.url:
        yield hub


@dataclass
class WritableHub:
    """A Hub that takes commits to model repositories, by the protocol of huggingface_hub with LFS.

    token: whoever has another one may not write. fail: the kind of request that is answered with 500: "upload",
    "commit". stored: LFS objects by SHA-256. commits: (repository, message, parent) of each. requests: of each kind.
    """

    token: str
    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)
    heads: dict[str, str] = field(default_factory=dict)
    stored: dict[str, bytes] = field(default_factory=dict)
    commits: list[tuple[str, str, str]] = field(default_factory=list)
    requests: Counter[str] = field(default_factory=Counter)
    private: set[str] = field(default_factory=set)
    fail: str = ""
    on_upload: Callable[[], None] = lambda: None
    url: str = ""

    def make(self, repo: str, files: Mapping[str, bytes] | None = None) -> None:
        self.repos[repo] = {".gitattributes": b"", **(files or {})}
        self.move_head(repo)

    def move_head(self, repo: str) -> str:
        self.heads[repo] = hashlib.sha1(f"{repo} {len(self.commits)} {self.heads.get(repo)}".encode()).hexdigest()
        return self.heads[repo]

    def answer(self, method: str, path: str, body: bytes, authorization: str) -> tuple[int, bytes | dict[str, Any]]:
        kind, repo = self._kind_of(method, path)
        self.requests[kind] += 1
        if kind == self.fail:
            return 500, {"error": f"out of order; you sent {authorization}"}
        if kind not in ("object", "upload") and authorization != f"Bearer {self.token}":
            return 403, {"error": "forbidden"}
        match kind:
            case "create":
                asked = json.loads(body)
                repo = f"{asked['organization']}/{asked['name']}"
                if repo in self.repos:
                    return 409, {"error": "it exists", "url": f"{self.url}/{repo}"}
                self.make(repo)
                if asked.get("private") or asked.get("visibility") == "private":
                    self.private.add(repo)
                return 200, {"url": f"{self.url}/{repo}"}
            case "yaml":
                return 200, {"errors": [], "warnings": []}
            case "info":
                siblings = [{"rfilename": name} for name in sorted(self.repos[repo])]
                return 200, {"id": repo, "sha": self.heads[repo], "siblings": siblings}
            case "preupload":
                files = [file["path"] for file in json.loads(body)["files"]]
                return 200, {"files": [self._mode(name, self.repos[repo].get(name)) for name in files]}
            case "batch":
                objects = json.loads(body)["objects"]
                for each in objects:
                    if each["oid"] not in self.stored:
                        each["actions"] = {"upload": {"href": f"{self.url}/object/{each['oid']}"}}
                return 200, {"transfer": "basic", "objects": objects}
            case "upload":
                self.on_upload()
                assert hashlib.sha256(body).hexdigest() == path.rsplit("/", 1)[1]
                self.stored[path.rsplit("/", 1)[1]] = body
                return 200, {}
            case "commit":
                return self._commit(repo, [json.loads(line) for line in body.splitlines() if line.strip()])
        return 200, self.repos[repo][path.rsplit("/", 1)[1]]

    def _mode(self, name: str, present: bytes | None) -> dict[str, Any]:
        is_large = name.endswith((".safetensors", ".gguf"))
        oid = None
        if present is not None:
            blob = f"blob {len(present)}\0".encode() + present
            oid = hashlib.sha256(present).hexdigest() if is_large else hashlib.sha1(blob).hexdigest()
        return {"path": name, "uploadMode": "lfs" if is_large else "regular", "shouldIgnore": False, "oid": oid}

    def _kind_of(self, method: str, path: str) -> tuple[str, str]:
        if path == "/api/repos/create":
            return "create", ""
        if path == "/api/validate-yaml":
            return "yaml", ""
        if path.startswith("/object/"):
            return "upload", ""
        parts = path.removeprefix("/api/models").strip("/").split("/")
        repo = "/".join(parts[:2]).removesuffix(".git")
        for word, kind in {"preupload": "preupload", "commit": "commit", "info": "batch", "resolve": "object"}.items():
            if word in parts[2:]:
                return kind, repo
        return "info", repo

    def _commit(self, repo: str, lines: list[dict[str, Any]]) -> tuple[int, dict[str, Any]]:
        header = lines[0]["value"]
        if header["parentCommit"] != self.heads[repo]:
            return 412, {"error": "the branch has moved"}
        files = dict(self.repos[repo])
        for line in lines[1:]:
            value = line["value"]
            match line["key"]:
                case "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                case "lfsFile":
                    files[value["path"]] = self.stored[value["oid"]]
                case "deletedFile":
                    del files[value["path"]]
        self.repos[repo] = files
        self.commits.append((repo, header["summary"], header["parentCommit"]))
        oid = self.move_head(repo)
        return 200, {"success": True, "commitOid": oid, "commitUrl": f"{self.url}/{repo}/commit/{oid}"}


@contextmanager
def serve_writable(hub: WritableHub) -> Iterator[WritableHub]:
    """Serves `hub` on a port of loopback while the block runs."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            path = unquote(self.path.partition("?")[0])
            status, content = hub.answer(self.command, path, self._body(), self.headers.get("Authorization", ""))
            content = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
            if "/resolve/" in path:
                self.send_header("X-Repo-Commit", path.split("/resolve/")[1].split("/")[0])
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        do_GET = do_HEAD = do_POST = do_PUT = _answer

        def _body(self) -> bytes:
            if "chunked" not in self.headers.get("Transfer-Encoding", ""):
                return self.rfile.read(int(self.headers.get("Content-Length") or 0))
            pieces = []
            while size := int(self.rfile.readline().strip() or b"0", 16):
                pieces.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(pieces)

        def log_message(self, format: str, *args: Any) -> None:
            """Prints nothing."""

    with listening(Handler) as hub.url:
        yield hub


@contextmanager
def listening(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
