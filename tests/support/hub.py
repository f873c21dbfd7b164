"""A local stand-in for the Hugging Face Hub: each folder ORG/NAME is a model repository with one revision.

Each folder datasets/ORG/NAME is a dataset, of which the stand-in tells only that it has it.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import transformers

COMMIT = "c" * 40


@dataclass
class Hub:
    """A running stand-in.

    Attributes:
        root: the folder with the repositories.
        cache: the cache of what is downloaded from it.
        revision: the one that every repository has.
        fetched: the names of the files that were fetched whole.
    """

    root: Path
    cache: Path
    revision: str = "main"
    address: str = ""
    fetched: list[str] = field(default_factory=list)


@contextmanager
def serve(root: Path, cache: Path, revision: str = "main") -> Iterator[Hub]:
    """Serve the repositories below ``root`` until the block ends, to this process, which then knows no other Hub."""
    hub = Hub(root, cache, revision)
    with serving(partial(Handler, hub)) as hub.address, reached(hub.address, cache):
        yield hub


@contextmanager
def reached(address: str, cache: Path) -> Iterator[None]:
    """Let this process take what answers at an address for the Hub, as HF_ENDPOINT and HF_HOME do in a new process."""
    own = {
        "ENDPOINT": address,
        "HUGGINGFACE_CO_URL_TEMPLATE": address + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_OFFLINE": False,
        "HF_HUB_CACHE": str(cache),
        "HF_HUB_DISABLE_XET": True,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in own.items():
            patch.setattr(huggingface_hub.constants, name, value)
        # The functions of huggingface_hub are methods of one object, and transformers keeps another.
        patch.setattr(huggingface_hub.hf_api.api, "endpoint", address)
        patch.setattr(transformers.utils.hub, "_hf_api", None, raising=False)
        yield


@contextmanager
def serving(handler: Callable[..., BaseHTTPRequestHandler]) -> Iterator[str]:
    """Answer requests by ``handler`` until the block ends; yields the address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=[0.01])
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class Handler(BaseHTTPRequestHandler):
    """Answers as the Hub does, as far as huggingface_hub asks."""

    protocol_version = "HTTP/1.1"

    def __init__(self, hub: Any, *arguments: Any) -> None:
        self.hub = hub
        super().__init__(*arguments)

    def log_message(self, *arguments: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        """Paths are /api/models/ORG/NAME[/revision/REVISION], the same with /tree/REVISION[/FOLDER], and
        /ORG/NAME/resolve/REVISION/FILE; also /api/datasets/ORG/NAME."""
        parts = self.path.partition("?")[0].strip("/").split("/")
        if parts[:2] == ["api", "datasets"]:
            if self.hub.root.joinpath(*parts[1:]).is_dir():
                self.send_json({"id": "/".join(parts[2:]), "sha": COMMIT})
            else:
                self.send(404, error="RepoNotFound")
            return
        if listing := parts[:2] == ["api", "models"]:
            parts = parts[2:]
        repository, file = self.hub.root / parts[0] / parts[1], "/".join(parts[4:])
        if parts[0] == "gated":
            self.send(403, error="GatedRepo")
        elif not repository.is_dir():
            self.send(404, error="RepoNotFound")
        elif listing:
            self.list_files(repository, parts[2:])
        elif parts[3] not in (self.hub.revision, COMMIT):
            self.send(404, error="RevisionNotFound")
        elif not (repository / file).is_file():
            self.send(404, error="EntryNotFound")
        else:
            self.send_file(repository / file)

    def list_files(self, repository: Path, what: list[str]) -> None:
        if len(what) > 2:  # a folder, and the repositories have none
            self.send(404, error="EntryNotFound")
            return
        if len(what) == 2 and what[1] not in (self.hub.revision, COMMIT):  # revision/NAME or tree/NAME
            self.send(404, error="RevisionNotFound")
            return
        names = [file.name for file in repository.iterdir()]
        siblings = [{"rfilename": name} for name in names]
        answer: Any = {"id": repository.name, "tags": [], "siblings": siblings, "sha": COMMIT}
        if (card := repository / "README.md").is_file():
            answer["cardData"] = huggingface_hub.ModelCard.load(card).data.to_dict()
        if what[:1] == ["tree"]:
            answer = [{"type": "file", "path": name, "size": 1, "oid": "0"} for name in names]
        self.send_json(answer)

    def send_file(self, file: Path) -> None:
        content, status = file.read_bytes(), 200
        if wanted := self.headers.get("Range"):
            begin, end = wanted.removeprefix("bytes=").split("-")
            content, status = content[int(begin) : int(end) + 1], 206
        elif self.command == "GET":
            self.hub.fetched.append(file.name)
        self.send(status, content, {"ETag": f'"{file.parent.name}-{file.name}"', "X-Repo-Commit": COMMIT})

    def send_json(self, content: Any, status: int = 200) -> None:
        self.send(status, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def send(self, status: int, content: bytes = b"", headers: dict[str, str] | None = None, error: str = "") -> None:
        self.send_response(status)
        told = {"X-Error-Code": error} if error else {}
        for name, value in {**(headers or {}), **told, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)
