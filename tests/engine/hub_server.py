"""A small Hugging Face hub on loopback: one repository, revisions, tokens, byte ranges, and connections that break."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMITS = {"main": "a" * 40, "v2": "b" * 40}
REPO = "owner/tiny"


class Hub:
    """files: revision -> path -> content. The next `cuts` downloads of a weight file stop after half of what is due."""

    def __init__(self, files: dict[str, dict[str, bytes]]) -> None:
        self.files = files
        self.cuts = 0
        self.token: str | None = None  # required when set
        self.gated = False
        self.status: int | None = None  # answer everything with this
        self.requests: list[tuple[str, str, str | None]] = []  # method, path, Range
        self.lock = threading.Lock()
        self.url = ""

    def downloads(self, name: str) -> list[str | None]:
        """The Range header of every GET of a file."""
        return [span for method, path, span in self.requests if method == "GET" and path.endswith(f"/{name}")]


@contextmanager
def serve_hub(hub: Hub) -> Iterator[Hub]:
    class Handler(_Handler):
        state = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    state: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        return None

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        path = self.path.split("?")[0]
        with self.state.lock:
            self.state.requests.append((self.command, path, self.headers.get("Range")))
        if self.state.status is not None:
            return self._send(self.state.status, b"{}", body)
        if self.state.gated:
            return self._send(403, b"{}", body, {"X-Error-Code": "GatedRepo"})
        if self.state.token is not None and self.headers.get("Authorization") != f"Bearer {self.state.token}":
            return self._send(401, b"{}", body)
        if match := re.fullmatch(rf"/api/models/{REPO}(?:/(?:revision|tree)/([^/]+))?(/.*)?", path):
            return self._api(match[1] or "main", "/tree/" in path, body)
        if match := re.fullmatch(rf"/{REPO}/resolve/([^/]+)/(.+)", path):
            return self._file(match[1], match[2], body)
        return self._send(404, b"{}", body, {"X-Error-Code": "RepoNotFound"})

    def _revision(self, name: str) -> str | None:
        names = {**{commit: branch for branch, commit in COMMITS.items()}, **{branch: branch for branch in COMMITS}}
        return names.get(name)

    def _api(self, revision: str, tree: bool, body: bool) -> None:
        branch = self._revision(revision)
        if branch is None:
            return self._send(404, b"{}", body, {"X-Error-Code": "RevisionNotFound"})
        files = self.state.files[branch]
        if tree:
            listing = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in files.items()
            ]
            return self._send(200, json.dumps(listing).encode(), body)
        info = {"id": REPO, "sha": COMMITS[branch], "siblings": [{"rfilename": name} for name in files]}
        return self._send(200, json.dumps(info).encode(), body)

    def _file(self, revision: str, name: str, body: bool) -> None:
        branch = self._revision(revision)
        data = self.state.files.get(branch or "", {}).get(name)
        if branch is None or data is None:
            return self._send(404, b"{}", body, {"X-Error-Code": "EntryNotFound"})
        headers = {
            "X-Repo-Commit": COMMITS[branch],
            "ETag": f'"{hashlib.sha1(data).hexdigest()}"',
            "Accept-Ranges": "bytes",
        }
        status = 200
        if match := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")):
            headers["Content-Range"] = f"bytes {match[1]}-{len(data) - 1}/{len(data)}"
            data, status = data[int(match[1]) :], 206
        with self.state.lock:
            cut = body and name.endswith(".safetensors") and self.state.cuts > 0
            self.state.cuts -= cut
        return self._send(status, data, body, headers, cut=cut)

    def _send(
        self, status: int, data: bytes, body: bool, headers: dict[str, str] | None = None, *, cut: bool = False
    ) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(data[: len(data) // 2] if cut else data)
        if cut:
            self.close_connection = True
