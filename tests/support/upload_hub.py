"""A local stand-in for the part of the Hugging Face Hub that takes uploads, which are kept in memory."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from support.hub import COMMIT, reached, serving


@dataclass
class UploadHub:
    """A running stand-in.

    Attributes:
        address: where it is.
        created: what it was asked to create.
        objects: the large files' contents by their SHA-256.
        committed: the files of the last commit by name.
        refusal: the status that it answers with, instead of taking anything.
    """

    address: str = ""
    created: list[dict[str, Any]] = field(default_factory=list)
    objects: dict[str, bytes] = field(default_factory=dict)
    committed: dict[str, bytes] = field(default_factory=dict)
    refusal: int = 0


@contextmanager
def serve_uploads(cache: Path) -> Iterator[UploadHub]:
    """Serve until the block ends, to this process, which then knows no other Hub; ``cache`` is its cache folder."""
    hub = UploadHub()
    with serving(partial(Handler, hub)) as hub.address, reached(hub.address, cache):
        yield hub


class Handler(BaseHTTPRequestHandler):
    """Answers as the Hub does, as far as huggingface_hub asks for it to upload."""

    protocol_version = "HTTP/1.1"

    def __init__(self, hub: UploadHub, *arguments: Any) -> None:
        self.hub = hub
        super().__init__(*arguments)

    def log_message(self, *arguments: Any) -> None:
        pass

    def do_POST(self) -> None:
        content = self.body()
        path = self.path.partition("?")[0]
        if self.hub.refusal:
            self.answer({"error": "refused"}, self.hub.refusal)
        elif path == "/api/repos/create":
            self.hub.created.append(json.loads(content))
            self.answer({"url": f"{self.hub.address}/org/model", "name": "org/model"})
        elif path == "/api/validate-yaml":
            self.answer({"errors": [], "warnings": []})
        elif "/preupload/" in path:
            found = [{"path": file["path"], "uploadMode": mode(file["path"]), "shouldIgnore": False}
                     for file in json.loads(content)["files"]]  # fmt: skip
            self.answer({"files": found})
        elif path.endswith("/info/lfs/objects/batch"):
            self.answer(
                {"transfer": "basic", "objects": [self.upload(each) for each in json.loads(content)["objects"]]}
            )
        elif "/commit/" in path:
            self.commit([json.loads(line) for line in content.splitlines()])
        else:
            self.answer({"error": path}, 404)

    def do_PUT(self) -> None:
        self.hub.objects[self.path.rpartition("/")[2]] = self.body()
        self.answer({})

    def do_GET(self) -> None:
        self.answer({"error": self.path}, 404)

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        content = b""
        while size := int(self.rfile.readline(), 16):
            content += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return content

    def upload(self, asked: dict[str, Any]) -> dict[str, Any]:
        return {**asked, "actions": {"upload": {"href": f"{self.hub.address}/objects/{asked['oid']}", "header": {}}}}

    def commit(self, lines: list[dict[str, Any]]) -> None:
        self.hub.committed.clear()
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                self.hub.committed[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.hub.committed[value["path"]] = self.hub.objects[value["oid"]]
        self.answer({"commitUrl": f"{self.hub.address}/org/model/commit/{COMMIT}", "commitOid": COMMIT})

    def answer(self, content: Any, status: int = 200) -> None:
        text = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


def mode(path: str) -> str:
    return "lfs" if path.endswith((".safetensors", ".png")) else "regular"
