"""A small OpenAI server in a thread, with scripted streams, for the tests of the commands that talk to one."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODEL = "fake-1"


@dataclass
class Script:
    """What the server answers to a generation, and what it was sent."""

    pieces: tuple[str, ...] = ("Hel", "lo", " there")
    gap_s: float = 0.0
    completion_tokens: int = 7
    spec: dict[str, Any] | None = field(
        default_factory=lambda: {
            "num_spec_steps": 4,
            "num_draft_tokens": 12,
            "num_accepted_draft_tokens": 3,
            "acceptance_histogram": [2, 1, 1, 0],
        }
    )
    finish_reason: str | None = "stop"
    send_done: bool = True
    error_event: str | None = None
    status: int = 200
    bodies: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    in_progress: int = 0
    most_in_progress: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


@contextmanager
def running(script: Script) -> Iterator[str]:
    """Serve `script`; yields the server's root."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.0"  # the end of the connection ends a stream

        def do_GET(self) -> None:
            answers = {"/v1/models": {"data": [{"id": MODEL}]}, "/version": {"version": "9.9"}}
            known = self.path in answers
            self._json(200 if known else 404, answers.get(self.path, {"error": {"message": "no such path"}}))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with script.lock:
                script.bodies.append(body)
                script.paths.append(self.path)
                script.in_progress += 1
                script.most_in_progress = max(script.most_in_progress, script.in_progress)
            self.is_in_progress = True
            try:
                self._generate()
            finally:
                self._leave()

        def _leave(self) -> None:
            """The request counts as over before its last bytes: the client may send its next one at once."""
            with script.lock:
                script.in_progress -= self.is_in_progress
                self.is_in_progress = False

        def _generate(self) -> None:
            if script.status != 200:
                self._json(script.status, {"error": {"message": "the queue is full", "type": "x"}})
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            chat = self.path.endswith("chat/completions")
            if chat:
                self._event({"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
            for piece in script.pieces:
                new = {"delta": {"content": piece}} if chat else {"text": piece}
                self._event({"choices": [new | {"finish_reason": None}], "usage": None})
                time.sleep(script.gap_s)
            if script.error_event is not None:
                self._event({"error": {"message": script.error_event}})
            else:
                end = {"delta": {}} if chat else {"text": ""}
                self._event({"choices": [end | {"finish_reason": script.finish_reason}]})
                usage = {"prompt_tokens": 5, "completion_tokens": script.completion_tokens}
                metrics = {} if script.spec is None else {"metrics": {"speculative_decoding": script.spec}}
                self._event({"choices": [], "usage": usage} | metrics)
            self._leave()
            if script.send_done:
                self.wfile.write(b"data: [DONE]\n\n")

        def _event(self, data: dict[str, Any]) -> None:
            self.wfile.write(b"data: " + json.dumps(data).encode() + b"\n\n")
            self.wfile.flush()

        def _json(self, status: int, data: object) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(data).encode())

        def log_message(self, format: str, *args: object) -> None:
            """Tests read their own output."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
