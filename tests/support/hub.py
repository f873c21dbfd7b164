"""A local stand-in for the Hugging Face Hub: each folder ORG/NAME is a model repository with one revision.

Each folder datasets/ORG/NAME is a dataset, of which the stand-in tells only that it has it. Uploads are kept in memory.
"""

import base64
import json
import threading
from collections.abc import Iterator
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
    root: Path  # with the repositories
    cache: Path  # of what is downloaded
    revision: str = "main"  # the one that every repository has
    address: str = ""
    fetched: list[str] = field(default_factory=list)  # the names of the files that were fetched whole
    created: list[dict[str, Any]] = field(default_factory=list)  # what it was asked to create
    objects: dict[str, bytes] = field(default_factory=dict)  # the large files that were uploaded, by their SHA-256
    committed: dict[str, bytes] = field(default_factory=dict)  # the files of the last commit by name
    refusal: int = 0  # the status that it answers uploads with, instead of taking anything


@contextmanager
def serve(root: Path, cache: Path, revision: str = "main") -> Iterator[Hub]:
    """Serve the repositories below ``root`` until the block ends, to this process, which then knows no other Hub."""
    hub = Hub(root, cache, revision)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, hub))
    hub.address = f"http://127.0.0.1:{server.server_address[1]}"
    constants = {  # what HF_ENDPOINT and HF_HOME set in a new process
        "ENDPOINT": hub.address,
        "HUGGINGFACE_CO_URL_TEMPLATE": hub.address + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_OFFLINE": False,
        "HF_HUB_CACHE": str(cache),
        "HF_HUB_DISABLE_XET": True,
    }
    thread = threading.Thread(target=server.serve_forever, args=[0.01])
    thread.start()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in constants.items():
            patch.setattr(huggingface_hub.constants, name, value)
        # The functions of huggingface_hub are methods of one object, and transformers keeps another.
        patch.setattr(huggingface_hub.hf_api.api, "endpoint", hub.address)
        patch.setattr(transformers.utils.hub, "_hf_api", None, raising=False)
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()
            server.server_close()


@contextmanager
def downloaded_dataset(cache: Path, name: str) -> Iterator[Path]:
    """A folder where ``hf download --repo-type dataset NAME`` puts its files, to be read without a network."""
    import datasets  # slow to import

    repository = cache / f"datasets--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    (repository / "snapshots" / COMMIT).mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch:
        for module in (huggingface_hub.constants, datasets.config):
            patch.setattr(module, "HF_HUB_OFFLINE", True)
        patch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
        yield repository / "snapshots" / COMMIT


class Handler(BaseHTTPRequestHandler):
    """Answers as the Hub does, as far as huggingface_hub asks."""

    protocol_version = "HTTP/1.1"

    def __init__(self, hub: Any, *arguments: Any) -> None:
        self.hub = hub
        super().__init__(*arguments)

    def log_message(self, *arguments: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        """Paths are /api/models/ORG/NAME[/revision/REVISION], the same with /tree/REVISION[/FOLDER], and
        /ORG/NAME/resolve/REVISION/FILE; also /api/datasets/ORG/NAME."""
        parts = self.path.partition("?")[0].strip("/").split("/")
        asked = parts.pop(1) if parts[0] == "api" else "file"
        parts = parts[1:] if asked != "file" else parts
        organization, name, *rest = parts
        repository = self.hub.root / ("datasets" if asked == "datasets" else "") / organization / name
        revision = rest[1] if len(rest) > 1 else COMMIT
        file = repository / "/".join(rest[2:])
        if organization == "gated":
            self.send(403, error="GatedRepo")
        elif not repository.is_dir():
            self.send(404, error="RepoNotFound")
        elif revision not in (self.hub.revision, COMMIT):
            self.send(404, error="RevisionNotFound")
        elif asked != "file" and len(rest) < 3:
            self.send_json(self.described(repository, rest[:1] == ["tree"]))
        elif asked == "file" and file.is_file():
            self.send_file(file)
        else:  # a folder too, and the repositories have none
            self.send(404, error="EntryNotFound")

    def described(self, repository: Path, tree: bool) -> Any:
        names = [file.name for file in repository.iterdir()]
        if tree:
            return [{"type": "file", "path": name, "size": 1, "oid": "0"} for name in names]
        siblings = [{"rfilename": name} for name in names]
        answer: dict[str, Any] = {"id": repository.name, "tags": [], "siblings": siblings, "sha": COMMIT}
        if (card := repository / "README.md").is_file():
            answer["cardData"] = huggingface_hub.ModelCard.load(card).data.to_dict()
        return answer

    def send_file(self, file: Path) -> None:
        content, status = file.read_bytes(), 200
        if wanted := self.headers.get("Range"):
            begin, end = wanted.removeprefix("bytes=").split("-")
            content, status = content[int(begin) : int(end) + 1], 206
        elif self.command == "GET":
            self.hub.fetched.append(file.name)
        self.send(status, content, {"ETag": f'"{file.parent.name}-{file.name}"', "X-Repo-Commit": COMMIT})

    def do_POST(self) -> None:
        content, path = self.body(), self.path.partition("?")[0]
        if self.hub.refusal:
            self.send_json({"error": "refused"}, self.hub.refusal)
        elif path == "/api/repos/create":
            self.hub.created.append(json.loads(content))
            (self.hub.root / "org/model").mkdir(parents=True, exist_ok=True)
            self.send_json({"url": f"{self.hub.address}/org/model", "name": "org/model"})
        elif path == "/api/validate-yaml":
            self.send_json({"errors": [], "warnings": []})
        elif "/preupload/" in path:
            files = [{**file, "uploadMode": mode(file["path"])} for file in json.loads(content)["files"]]
            self.send_json({"files": [file | {"shouldIgnore": False} for file in files]})
        elif path.endswith("/info/lfs/objects/batch"):
            objects = json.loads(content)["objects"]
            for each in objects:
                each["actions"] = {"upload": {"href": f"{self.hub.address}/objects/{each['oid']}", "header": {}}}
            self.send_json({"transfer": "basic", "objects": objects})
        else:
            self.commit([json.loads(line) for line in content.splitlines()])

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

    def commit(self, lines: list[dict[str, Any]]) -> None:
        values = {kind: [line["value"] for line in lines if line["key"] == kind] for kind in ("file", "lfsFile")}
        self.hub.committed = {value["path"]: base64.b64decode(value["content"]) for value in values["file"]}
        self.hub.committed |= {value["path"]: self.hub.objects[value["oid"]] for value in values["lfsFile"]}
        self.send_json({"commitUrl": f"{self.hub.address}/org/model/commit/{COMMIT}", "commitOid": COMMIT})

    def send_json(self, content: Any, status: int = 200) -> None:
        self.send(status, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def send(self, status: int, content: bytes = b"", headers: dict[str, str] | None = None, error: str = "") -> None:
        self.send_response(status)
        said = {"X-Error-Code": error} if error else {}
        for name, value in {**(headers or {}), **said, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def mode(path: str) -> str:
    return "lfs" if path.endswith((".safetensors", ".png")) else "regular"
