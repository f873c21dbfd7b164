"""A local stand-in for the part of the Hugging Face Hub that takes uploads, which are kept in memory."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from support import hub


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
    found = UploadHub()
    with hub.serving(partial(Handler, found)) as found.address, hub.reached(found.address, cache):
        yield found


class Handler(hub.Handler):
    """Answers as the Hub does, as far as huggingface_hub asks for it to upload."""

    def answer(self) -> None:
        self.send_json({"error": self.path}, 404)

    def do_POST(self) -> None:
        content = self.body()
        path = self.path.partition("?")[0]
        if self.hub.refusal:
            self.send_json({"error": "refused"}, self.hub.refusal)
        elif path == "/api/repos/create":
            self.hub.created.append(json.loads(content))
            self.send_json({"url": f"{self.hub.address}/org/model", "name": "org/model"})
        elif path == "/api/validate-yaml":
            self.send_json({"errors": [], "warnings": []})
        elif "/preupload/" in path:
            found = [{"path": file["path"], "uploadMode": mode(file["path"]), "shouldIgnore": False}
                     for file in json.loads(content)["files"]]  # fmt: skip
            self.send_json({"files": found})
        elif path.endswith("/info/lfs/objects/batch"):
            self.send_json(
                {"transfer": "basic", "objects": [self.upload(each) for each in json.loads(content)["objects"]]}
            )
        elif "/commit/" in path:
            self.commit([json.loads(line) for line in content.splitlines()])
        else:
            self.send_json({"error": path}, 404)

    def do_PUT(self) -> None:
        self.hub.objects[self.path.rpartition("/")[2]] = self.body()
        self.send_json({})

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
        self.send_json({"commitUrl": f"{self.hub.address}/org/model/commit/{hub.COMMIT}", "commitOid": hub.COMMIT})


def mode(path: str) -> str:
    return "lfs" if path.endswith((".safetensors", ".png")) else "regular"
