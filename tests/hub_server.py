"""A small Hugging Face Hub on loopback: real HTTP for the real huggingface_hub client, nothing patched.

    with HubServer(folder) as hub:                          # stores file contents in `folder`
        subprocess.run(command, env=hub.env(home))
        hub.commits("ada/model")                            # the commits, oldest first

It serves models and datasets; tests/xet_store.py answers Xet uploads, the default of installed clients. A
`Fault` makes requests fail, hang or lose their connection. The server checks what the real Hub checks:
tokens, write permission, and that each LFS object of a commit has arrived completely with the right hash.
"""

import base64
import hashlib
import json
import math
import os
import re
import socket
import struct
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

from tests.xet_store import XetStore

TOKEN = "hf_" + "loopbackAdaWritesThisTokenOnly42"     # tests search files for this token
ADA = {"name": "ada", "orgs": {"analytical-engines": "write", "royal-society": "read"}, "role": "write"}
INITIAL = {".gitattributes": b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"}
LFS_SUFFIXES = (".safetensors", ".bin", ".pt", ".npy", ".png", ".parquet", ".arrow", ".tar", ".gz", ".zst")


@dataclass
class Fault:
    """A fault of `times` requests whose "METHOD /path" matches `match`, after the first `skip` of them.

    kind "status": the answer has `status` and `headers`. "drop": the connection is reset after `after` bytes
    of the body. "hang": the answer comes after `seconds`; inf: never. "lost": the request is carried out, but
    the connection is reset instead of an answer.
    """

    match: str
    kind: str = "status"
    status: int = 500
    headers: dict = field(default_factory=dict)
    times: float = 1
    skip: int = 0
    after: int = 0
    seconds: float = float("inf")


class Refused(Exception):
    """Raised to answer with a status other than 200."""

    def __init__(self, status, message, code=None):
        super().__init__(message)
        self.status, self.message, self.code = status, message, code


class HubServer:
    def __init__(self, root, port=0, xet=False, home=None):
        self.root, self.uses_xet, self.home = Path(root), xet, home
        (self.root / "blobs").mkdir(parents=True)
        self.repos: dict[tuple[str, str], dict] = {}  # by kind and id
        self.tokens = {TOKEN: ADA}  # {token: user}; remove one to revoke it
        self.faults: list[Fault] = []
        self.log: list[dict] = []  # one entry per request, oldest first
        self.lock = threading.RLock()
        self.stopping = threading.Event()
        self.connections: set[socket.socket] = set()
        self.http = ThreadingHTTPServer(("127.0.0.1", port), type("Handler", (Handler,), {"hub": self}))
        self.http.daemon_threads = True
        self.port = self.http.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.xet = XetStore(self.root / "xet")

    def __enter__(self):
        threading.Thread(target=self.http.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *exc):
        self.stop()

    def stop(self):
        """Stop serving and close all connections, also those kept alive."""
        if self.stopping.is_set():
            return
        self.stopping.set()
        self.http.shutdown()
        self.http.server_close()
        with self.lock:
            for connection in list(self.connections):
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def env(self, home=None, token=TOKEN):
        """The environment of a client process: this server's address, HF_HOME, a token or None."""
        env = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        env.update(HF_ENDPOINT=self.url, HF_HOME=str(home or self.home), HF_HUB_DISABLE_TELEMETRY="1",
                   NO_PROXY="127.0.0.1",
                   HF_HUB_DISABLE_XET="0" if self.uses_xet else "1", HF_XET_XORB_COMPRESSION_POLICY="none")
        return env if token is None else {**env, "HF_TOKEN": token}

    # ---- repositories, also used by tests directly ----

    def repo(self, repo_id, kind="models"):
        if (kind, repo_id) not in self.repos:
            raise Refused(404, "Repository not found", "RepoNotFound")
        return self.repos[kind, repo_id]

    def create(self, repo_id, kind="models", private=False):
        with self.lock:
            if (kind, repo_id) in self.repos:
                raise Refused(409, "You already created this repo")
            self.repos[kind, repo_id] = {"private": private, "refs": {}, "commits": {}}
            self.commit(repo_id, kind, "main", "initial commit", INITIAL.items())

    def commit(self, repo_id, kind, branch, title, changes):
        """Add a commit. changes: (path, bytes | sha256 of a stored blob | None to delete); a path that ends
        in a slash is a folder."""
        with self.lock:
            repo = self.repo(repo_id, kind)
            parent = repo["refs"].get(branch)
            if parent is None and repo["refs"]:
                raise Refused(404, f"Invalid rev id: {branch}", "RevisionNotFound")
            files = dict(repo["commits"][parent]["files"]) if parent else {}
            for path, content in changes:
                if content is None:
                    deleted = [p for p in files if p == path or path.endswith("/") and p.startswith(path)]
                    if not deleted:
                        raise Refused(404, f"A file with this name doesn't exist: {path}", "EntryNotFound")
                    for p in deleted:
                        del files[p]
                else:
                    files[path] = self.store(content)
            oid = hashlib.sha1(json.dumps([parent, title, files, time.time()]).encode()).hexdigest()
            repo["commits"][oid] = {"parent": parent, "title": title, "files": files, "date": time.time()}
            repo["refs"][branch] = oid
            return oid

    def store(self, content):
        """Store bytes, or find an LFS object by its sha256. Returns the file's entry for a commit."""
        if isinstance(content, str):
            if not (self.root / "blobs" / content).exists():
                raise Refused(400, f"LFS pointer pointed to a file that does not exist: {content}")
            size = (self.root / "blobs" / content).stat().st_size
            return {"sha256": content, "size": size, "oid": content[:40], "lfs": True}
        sha256 = hashlib.sha256(content).hexdigest()
        (self.root / "blobs" / sha256).write_bytes(content)
        git = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        return {"sha256": sha256, "size": len(content), "oid": git, "lfs": False}

    def put(self, repo_id, files, kind="models"):
        """Publish files ({path: bytes}) without HTTP, creating the repository when needed."""
        with suppress(Refused):
            self.create(repo_id, kind)
        return self.commit(repo_id, kind, "main", "upload", list(files.items()))

    def commits(self, repo_id, branch="main", kind="models"):
        """[{"oid", "title", "files": {path: {"sha256", "size", ...}}}], oldest first, without the initial
        commit."""
        if (kind, repo_id) not in self.repos:
            return []
        repo, commits = self.repo(repo_id, kind), []
        oid = repo["refs"].get(branch)
        while oid:
            commits.append({"oid": oid, **repo["commits"][oid]})
            oid = repo["commits"][oid]["parent"]
        return commits[::-1][1:]

    def read(self, entry):
        return (self.root / "blobs" / entry["sha256"]).read_bytes()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    hub: HubServer

    def setup(self):
        super().setup()
        with self.hub.lock:
            self.hub.connections.add(self.connection)

    def finish(self):
        with suppress(OSError):
            super().finish()
        with self.hub.lock:
            self.hub.connections.discard(self.connection)

    def log_message(self, *args):
        pass

    def do(self):
        hub = self.hub
        url = urlsplit(self.path)
        self.query, self.drop_answer = parse_qs(url.query), False
        line = f"{self.command} {url.path}"
        self.entry = {"time": time.monotonic(), "line": line, "status": None}  # None: no answer
        hub.log.append(self.entry)
        with hub.lock:
            fault = next((f for f in hub.faults if f.times > 0 and re.search(f.match, line)), None)
            if fault and fault.skip:
                fault.skip, fault = fault.skip - 1, None
            elif fault:
                fault.times -= 1
        try:
            if fault and fault.kind == "drop":
                self.body(limit=fault.after)
                return self.reset()
            self.data = self.body()
            if fault and fault.kind == "hang" and hub.stopping.wait(min(fault.seconds, 3600)):
                return self.reset()
            self.drop_answer = bool(fault) and fault.kind == "lost"
            if fault and fault.kind == "status":
                return self.answer({"error": "injected fault"}, fault.status, fault.headers)
            self.user = self.authenticate(line)
            for method, pattern, route in ROUTES:
                match = re.fullmatch(pattern, url.path)
                if match and self.command in method.split("|"):
                    return route(self, **{k: v and unquote(v) for k, v in match.groupdict().items()})
            raise Refused(404, f"this small Hub does not know {line}")
        except Refused as refused:
            headers = {"X-Error-Message": refused.message}
            self.answer({"error": refused.message}, refused.status,
                        {**headers, "X-Error-Code": refused.code} if refused.code else headers)
        except (ConnectionError, TimeoutError):
            self.close_connection = True

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = do

    def body(self, limit=math.inf):
        """The body of the request, or its first `limit` bytes."""
        size = min(int(self.headers.get("Content-Length", 0)), limit)
        body = self.rfile.read(size)
        if len(body) < size:
            raise ConnectionError("the client closed the connection in the middle of the body")
        return body

    def reset(self):
        """Close the connection with RST, as a broken network does."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        with suppress(OSError):
            self.connection.close()

    def answer(self, content=b"", status=200, headers=()):
        if self.drop_answer:
            return self.reset()
        self.entry["status"] = status
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        headers = {"Content-Type": "application/json", "Content-Length": str(len(body)), **dict(headers)}
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    # ---- permissions ----

    def authenticate(self, line):
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if not token or re.search(r" /(lfs|xet)/", line):  # signed addresses on the real Hub
            return None
        if token not in self.hub.tokens:
            raise Refused(401, "Invalid credentials in Authorization header")
        return self.hub.tokens[token]

    def role(self, namespace):
        if self.user is None:
            return None
        role = "write" if namespace == self.user["name"] else self.user["orgs"].get(namespace)
        return "read" if role and self.user["role"] == "read" else role

    def open_repo(self, kind, repo_id, write=False):
        repo = self.hub.repo(repo_id, kind)
        role = self.role(repo_id.split("/")[0])
        if repo["private"] and role is None:
            raise Refused(404 if self.user else 401, "Repository not found", "RepoNotFound")
        if write and self.user is None:
            raise Refused(401, "Invalid username or password.")
        if write and role != "write":
            raise Refused(403, "You don't have the rights to write to this repository")
        return repo

    def resolve_revision(self, repo, rev):
        oid = repo["refs"].get(rev or "main", rev)
        if oid not in repo["commits"]:
            raise Refused(404, f"Invalid rev id: {rev}", "RevisionNotFound")
        return oid, repo["commits"][oid]["files"]

    # ---- routes ----

    def create(self):
        request = json.loads(self.data)
        if self.user is None:
            raise Refused(401, "Invalid username or password.")
        owner = request.get("organization") or self.user["name"]
        if self.role(owner) != "write":
            raise Refused(403, f'You don\'t have the rights to create a model under the namespace "{owner}"')
        kind, repo_id = request.get("type", "model") + "s", f"{owner}/{request['name']}"
        private = request.get("visibility") == "private" or bool(request.get("private"))
        url = f"{self.hub.url}/{'' if kind == 'models' else kind + '/'}{repo_id}"
        try:
            self.hub.create(repo_id, kind, private)
        except Refused as refused:
            return self.answer({"error": refused.message, "url": url}, refused.status)
        self.answer({"url": url, "name": repo_id, "id": repo_id})

    def validate_yaml(self):
        text = json.loads(self.data)["content"]
        good = re.match(r"\s*---\r?\n[\S\s]*?\n---\s*(\n|$)", text)
        errors = [] if good else [{"message": "no metadata block"}]
        self.answer({"errors": errors, "warnings": []}, 200 if good else 400)

    def info(self, kind, repo_id, rev=None):
        repo = self.open_repo(kind, repo_id)
        oid, files = self.resolve_revision(repo, rev)
        self.answer({"id": repo_id, "sha": oid, "private": repo["private"], "gated": False, "tags": [],
                     "siblings": [{"rfilename": path} for path in sorted(files)]})

    def described(self, path, file):
        entry = {"type": "file", "path": path, "size": file["size"], "oid": file["oid"]}
        if file["lfs"]:
            entry["lfs"] = {"oid": file["sha256"], "size": file["size"], "pointerSize": 134}
        return entry

    def folder(self, path):
        return {"type": "directory", "path": path, "size": 0, "oid": hashlib.sha1(path.encode()).hexdigest()}

    def tree(self, kind, repo_id, rev, path=None):
        _, files = self.resolve_revision(self.open_repo(kind, repo_id), rev)
        prefix = f"{path}/" if path else ""
        recursive = self.query.get("recursive", ["false"])[0].lower() in ("true", "1")
        inside = [p for p in sorted(files) if p.startswith(prefix)]
        if path and not inside:
            raise Refused(404, f"{path} does not exist", "EntryNotFound")
        entries = {}
        for p in inside:
            parts = p[len(prefix):].split("/")
            for depth in range(1, len(parts)):
                if depth == 1 or recursive:
                    folder = prefix + "/".join(parts[:depth])
                    entries[folder] = self.folder(folder)
            if len(parts) == 1 or recursive:
                entries[p] = self.described(p, files[p])
        self.answer(list(entries.values()))

    def preupload(self, kind, repo_id, rev):
        _, files = self.resolve_revision(self.open_repo(kind, repo_id, write=True), rev)
        files_to_send = []
        for file in json.loads(self.data)["files"]:
            path, old = file["path"], files.get(file["path"])
            binary = b"\0" in base64.b64decode(file["sample"]) or file["size"] > 1_000_000
            mode = "lfs" if path.endswith(LFS_SUFFIXES) or binary else "regular"
            files_to_send.append({"path": path, "uploadMode": mode, "shouldIgnore": False,
                          "oid": old and (old["sha256"] if mode == "lfs" else old["oid"])})
        self.answer({"files": files_to_send})

    def lfs_batch(self, kind, repo_id):
        self.open_repo(kind or "models", repo_id, write=True)
        objects = []
        for lfs_object in json.loads(self.data)["objects"]:
            entry = {"oid": lfs_object["oid"], "size": lfs_object["size"], "authenticated": True}
            if not (self.hub.root / "blobs" / lfs_object["oid"]).exists():
                entry["actions"] = {"upload": {"href": f"{self.hub.url}/lfs/{lfs_object['oid']}"}}
            objects.append(entry)
        self.answer({"transfer": "basic", "objects": objects})

    def lfs_put(self, oid):
        if hashlib.sha256(self.data).hexdigest() != oid:
            raise Refused(400, "the content does not have this hash")
        self.hub.store(self.data)
        self.answer(b"")

    def commit(self, kind, repo_id, rev):
        self.open_repo(kind, repo_id, write=True)
        title, changes = "", []
        for line in self.data.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "header":
                title = value["summary"]
            elif item["key"] == "file":
                changes.append((value["path"], base64.b64decode(value["content"])))
            elif item["key"] == "lfsFile":
                blob = self.hub.root / "blobs" / value["oid"]
                if not blob.exists() and self.hub.xet.has(value["oid"]):
                    blob.write_bytes(self.hub.xet.read(value["oid"]))
                changes.append((value["path"], value["oid"]))
            else:
                changes.append((value["path"].rstrip("/") + "/" * (item["key"] == "deletedFolder"), None))
        changes.sort(key=lambda change: change[1] is not None)  # deletions first
        oid = self.hub.commit(repo_id, kind, rev, title, changes)
        self.answer({"commitUrl": f"{self.hub.url}/{repo_id}/commit/{oid}", "commitOid": oid})

    def download(self, kind, repo_id, rev, path):
        oid, files = self.resolve_revision(self.open_repo(kind or "models", repo_id), rev)
        if path not in files:
            error = {"X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found"}
            return self.answer(b"", 404, {"X-Repo-Commit": oid, **error})
        file, status = files[path], 200
        content = self.hub.read(file)
        headers = {"X-Repo-Commit": oid, "ETag": f'"{file["sha256"] if file["lfs"] else file["oid"]}"',
                   "Accept-Ranges": "bytes", "Content-Type": "application/octet-stream"}
        range_ = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        if range_ and any(range_.groups()):
            first, last = range_.groups()
            start = int(first) if first else max(0, len(content) - int(last))
            stop = int(last) + 1 if first and last else len(content)
            if start >= len(content):
                return self.answer(b"", 416, {"Content-Range": f"bytes */{len(content)}"})
            headers["Content-Range"] = f"bytes {start}-{min(stop, len(content)) - 1}/{len(content)}"
            content, status = content[start:stop], 206
        self.answer(content, status, headers)

    def xet_token(self, kind, repo_id, mode, rev=None):
        self.open_repo(kind, repo_id, write=mode == "write")
        expires = int(time.time()) + 3600
        self.answer({"accessToken": "xet", "exp": expires, "casUrl": f"{self.hub.url}/xet"}, 200,
                    {"X-Xet-Cas-Url": f"{self.hub.url}/xet", "X-Xet-Access-Token": "xet",
                     "X-Xet-Token-Expiration": str(expires)})

    def xet_call(self, path):
        status, content = self.hub.xet.call(self.command, path, self.data)
        self.answer(content, status)


REPO = r"(?P<repo_id>[^/]+/[^/]+)"
API = rf"/api/(?P<kind>models|datasets)/{REPO}"
ROUTES = [
    ("POST", "/api/repos/create", Handler.create),
    ("POST", "/api/validate-yaml", Handler.validate_yaml),
    ("GET", rf"{API}(/revision/(?P<rev>[^/]+))?", Handler.info),
    ("GET", rf"{API}/tree/(?P<rev>[^/]+)(/(?P<path>.+))?", Handler.tree),
    ("POST", rf"{API}/preupload/(?P<rev>[^/]+)", Handler.preupload),
    ("POST", rf"{API}/commit/(?P<rev>[^/]+)", Handler.commit),
    ("GET", rf"{API}/xet-(?P<mode>read|write)-token(/(?P<rev>[^/]+))?", Handler.xet_token),
    ("POST", rf"(/(?P<kind>datasets))?/{REPO}\.git/info/lfs/objects/batch", Handler.lfs_batch),
    ("PUT", r"/lfs/(?P<oid>[0-9a-f]{64})", Handler.lfs_put),
    ("GET|POST|PUT|HEAD", r"/xet(?P<path>/.*)", Handler.xet_call),
    ("GET|HEAD", rf"(/(?P<kind>datasets))?/{REPO}/resolve/(?P<rev>[^/]+)/(?P<path>.+)", Handler.download),
]
