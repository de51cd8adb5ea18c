"""Storages: the same promises on a local disk, on pyarrow's file systems, and on HDFS over a REST server of our own."""

import contextlib
import errno
import http.server
import io
import json
import threading
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from pyarrow import fs

import quire
from quire.checkpoint import Checkpoint, Manager, container, delta, io_service, storage
from quire.checkpoint.container import FileHeader, FileKind, Frame, FrameKind
from quire.checkpoint.storage import ArrowStorage, Entry, LocalStorage, Storage, WebHdfsStorage, storage_for


class FakeWebHdfs(http.server.ThreadingHTTPServer):
    """The REST interface of a NameNode and a DataNode over a dict of files.

    faults: what to answer instead of the next requests of an operation: a status, or "drop" (do it, then hang up), or
    "short" (half of the bytes), or "dead" (send to a DataNode that does not answer), or "unknown" (no DataNode has
    reported the block yet).
    replaces: whether it knows how to rename onto a file.
    """

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files, self.folders, self.faults, self.requests = {}, {"/"}, {}, []
        self.replaces = True
        self.guard = threading.Lock()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request, client_address):
        """Connections that break are meant to."""


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments):
        pass

    def do_GET(self):
        self.serve()

    do_PUT = do_DELETE = do_GET

    def serve(self):
        parts = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        path = unquote(parts.path).removeprefix("/webhdfs/v1").rstrip("/") or "/"
        body = self.body()
        server, operation = self.server, query["op"] + ("2" if "datanode" in query else "")
        with server.guard:
            server.requests.append((operation, path, query))
            fault = server.faults.get(operation, []).pop(0) if server.faults.get(operation) else None
            if isinstance(fault, int):
                return self.answer(fault, b"<html>not now</html>")
            if fault == "dead":
                return self.answer(307, b"", f"http://127.0.0.1:1{self.path}&datanode=1")
            if fault == "unknown":
                return self.answer(*self.refuse("IOException", "No active and not excluded nodes contain this block"))
            answer = getattr(self, operation.lower())(path, query, body)
        if fault == "drop":
            self.connection.close()
            self.close_connection = True
            return None
        return self.answer(*answer, short=fault == "short")

    def body(self):
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while count := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(count))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def answer(self, status, data=b"", location=None, short=False):
        data = data if isinstance(data, bytes) else json.dumps(data).encode()
        self.send_response(status)
        if location:
            self.send_header("Location", location)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[: len(data) // 2] if short else data)
        if short:
            self.close_connection = True

    def refuse(self, kind, message, status=403):
        return status, {"RemoteException": {"exception": kind, "message": message}}

    def absent(self, path):
        return self.refuse("FileNotFoundException", f"File does not exist: {path}", 404)

    def describe(self, path, name=""):
        size = len(self.server.files.get(path, b""))
        kind = "FILE" if path in self.server.files else "DIRECTORY"
        return {"pathSuffix": name, "length": size, "type": kind, "modificationTime": 1_700_000_000_000}

    def redirect(self):
        return 307, b"", f"{self.server.url}{self.path}&datanode=1"

    def make_folders(self, path):
        while path not in self.server.folders:
            self.server.folders.add(path)
            path = path.rsplit("/", 1)[0] or "/"

    def getfilestatus(self, path, query, body):
        if path not in self.server.files and path not in self.server.folders:
            return self.absent(path)
        return 200, {"FileStatus": self.describe(path)}

    def liststatus(self, path, query, body):
        if path in self.server.files:
            return 200, {"FileStatuses": {"FileStatus": [self.describe(path)]}}
        if path not in self.server.folders:
            return self.absent(path)
        start = path.rstrip("/") + "/"
        inside = [each for each in {*self.server.files, *self.server.folders} - {"/"} if each.startswith(start)]
        found = [self.describe(each, each[len(start) :]) for each in inside if "/" not in each[len(start) :]]
        return 200, {"FileStatuses": {"FileStatus": found}}

    def open(self, path, query, body):
        return self.redirect() if path in self.server.files else self.absent(path)

    def open2(self, path, query, body):
        if path not in self.server.files:
            return self.absent(path)
        data, offset = self.server.files[path], int(query.get("offset", 0))
        return 200, data[offset : offset + int(query.get("length", len(data)))]

    def create(self, path, query, body):
        if path in self.server.files and query.get("overwrite", "false").lower() != "true":
            return self.refuse("FileAlreadyExistsException", f"{path} already exists")
        return self.redirect()

    def create2(self, path, query, body):
        self.make_folders(path.rsplit("/", 1)[0] or "/")
        self.server.files[path] = body
        return (201,)

    def rename(self, path, query, body):
        to = query["destination"]
        if path not in self.server.files:
            return self.absent(path)
        if self.server.replaces and query.get("renameoptions") == "OVERWRITE":
            self.server.files[to] = self.server.files.pop(path)
            return (200,)
        if to in self.server.files:
            return 200, {"boolean": False}
        self.server.files[to] = self.server.files.pop(path)
        return 200, {"boolean": True}

    def delete(self, path, query, body):
        return 200, {"boolean": self.server.files.pop(path, None) is not None}

    def mkdirs(self, path, query, body):
        self.make_folders(path)
        return 200, {"boolean": True}


@pytest.fixture
def hdfs(monkeypatch):
    pytest.importorskip("hdfs")
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    server = FakeWebHdfs()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(params=["local", "pyarrow", "webhdfs"])
def place(request, tmp_path):
    """A storage and a folder in it."""
    if request.param == "local":
        return storage_for(tmp_path)
    if request.param == "pyarrow":
        return storage_for("/base", fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem()))
    server = request.getfixturevalue("hdfs")
    return storage_for(f"webhdfs://127.0.0.1:{server.server_port}/data/check point/")


# ------------------------------------------------------------------------------------------------ promises of all


def test_what_is_written_is_listed_and_read(place):
    store, path = place
    content = bytes(range(256)) * 50
    store.write_atomic(path + "/folder/a file", content)
    store.write_atomic(path + "/folder/häufig 100%", [b"one", b"", b"two"])
    store.write_atomic(path + "/folder/deeper/empty", b"")
    assert store.list(path + "/folder") == [
        Entry("a file", len(content), False),
        Entry("deeper", 0, True),
        Entry("häufig 100%", 6, False),
    ]
    with store.open(path + "/folder/häufig 100%") as file:
        assert file.read() == b"onetwo"
    with store.open(path + "/folder/a file") as file:
        assert file.read(10) == content[:10]
        assert file.seek(-5, 2) == len(content) - 5
        assert file.read() == content[-5:]
        file.seek(300)
        assert file.tell() == 300 and file.read(7) == content[300:307]
    with store.open(path + "/folder/deeper/empty") as file:
        assert file.read() == b""


def test_a_name_that_is_taken(place):
    store, path = place
    store.write_atomic(path + "/file", b"old")
    with pytest.raises(quire.ExistsError, match="file is there already"):
        store.write_atomic(path + "/file", b"new")
    with store.open(path + "/file") as file:
        assert file.read() == b"old"
    store.write_atomic(path + "/file", b"newer", replace=True)
    with store.open(path + "/file") as file:
        assert file.read() == b"newer"
    assert [entry.name for entry in store.list(path)] == ["file"]


def test_what_is_not_there(place):
    store, path = place
    assert not store.exists(path + "/nothing")
    for call in (store.list, store.open):
        with pytest.raises(quire.NotFoundError, match="nothing is not there"):
            call(path + "/nothing")
    store.delete(path + "/nothing")
    store.write_atomic(path + "/file", b"")
    assert store.exists(path + "/file") and store.exists(path)
    store.delete(path + "/file")
    assert not store.exists(path + "/file")


def test_a_file_is_no_folder_and_a_folder_no_file(place):
    store, path = place
    store.write_atomic(path + "/file", b"")
    with pytest.raises(quire.QuireError, match="file"):
        store.list(path + "/file")
    with pytest.raises(quire.IOFailedError):
        store.open(path).read()


def test_a_write_that_fails_leaves_nothing(place):
    store, path = place

    def chunks():
        yield b"half"
        raise RuntimeError("the writer died")

    store.write_atomic(path + "/other", b"")
    with pytest.raises(RuntimeError, match="the writer died"):
        store.write_atomic(path + "/file", chunks())
    assert [entry.name for entry in store.list(path)] == ["other"]


# ------------------------------------------------------------------------------------------------ choosing


@pytest.mark.parametrize(
    ("url", "address", "path"),
    [
        ("webhdfs://name:14000/a b/c%20d", "webhdfs://name:14000", "/a b/c%20d"),
        ("swebhdfs://name:9871/x/", "swebhdfs://name:9871", "/x"),
        ("hdfs://name:8020/x?y", "webhdfs://name:9870", "/x?y"),
        ("hdfs://name/x", "webhdfs://name:9870", "/x"),
        ("hdfs://name:50070", "webhdfs://name:50070", "/"),
        ("webhdfs://[::1]:9870/x", "webhdfs://[::1]:9870", "/x"),
    ],
)
def test_addresses_of_hdfs(url, address, path):
    pytest.importorskip("hdfs")
    store, found = storage_for(url)
    assert isinstance(store, WebHdfsStorage)
    assert (store.display(found), found) == (address + path, path)


def test_local_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for location in ("check", "./check/", Path("check"), f"file://{tmp_path}/check", f"file:{tmp_path}/check/"):
        store, path = storage_for(location)
        assert isinstance(store, LocalStorage) and path == str(tmp_path / "check")
    assert storage_for("file:///a%20b")[1] == "/a b"
    assert storage_for("/")[1] == "/"


def test_file_systems_of_pyarrow(tmp_path):
    store, path = storage_for("mock:///check/point/")
    assert isinstance(store, ArrowStorage) and path == "check/point"
    same, path = storage_for("any/path/", store)
    assert same is store and path == "any/path"
    store, path = storage_for(tmp_path, fs.LocalFileSystem())
    assert isinstance(store, ArrowStorage) and path == str(tmp_path)


def test_places_that_make_no_sense():
    for wrong in ("", None, 7, "a\0b"):
        with pytest.raises(quire.InvalidError, match="is no place of a checkpoint"):
            storage_for(wrong)
    with pytest.raises(quire.InvalidError, match="nosuch://x: no file system for it can be had from pyarrow"):
        storage_for("nosuch://x")
    with pytest.raises(quire.InvalidError, match=r"names no host: write it as webhdfs://host:9870/path"):
        storage_for("hdfs:///x")
    with pytest.raises(quire.InvalidError, match="Port could not be cast"):
        storage_for("hdfs://name:port/x")
    with pytest.raises(quire.InvalidError, match=r"give a Storage, a pyarrow\.fs.FileSystem"):
        storage_for("x", "s3")
    with pytest.raises(TypeError):
        Storage()


def test_without_the_package_hdfs(monkeypatch):
    real = storage.importlib.import_module

    def without(name):
        if name == "hdfs":
            raise ImportError("No module named 'hdfs'")
        return real(name)

    monkeypatch.setattr(storage.importlib, "import_module", without)
    with pytest.raises(quire.InvalidError, match="pip install hdfs"):
        storage_for("webhdfs://name/x")


# ------------------------------------------------------------------------------------------------ faults


def failing(errors, result="done"):
    errors = iter(errors)

    def call():
        error = next(errors, None)
        if error is not None:
            raise error
        return result

    return call


def test_faults_that_pass_are_tried_again():
    passing = [ConnectionResetError(), TimeoutError(), OSError(errno.ESTALE, "Stale file handle")]
    assert storage.retrying(failing(passing), "x") == "done"
    with pytest.raises(quire.IOFailedError, match="x: Stale file handle"):
        storage.retrying(failing([*passing[:2], *passing[2:] * 2]), "x")
    with pytest.raises(quire.IOFailedError, match="x: Permission denied"):
        storage.retrying(failing([PermissionError(errno.EACCES, "Permission denied")]), "x")
    with pytest.raises(quire.NoSpaceError, match="x: No space"):
        storage.retrying(failing([OSError(errno.ENOSPC, "No space left on device")]), "x")
    with pytest.raises(quire.CorruptError, match="as it is"):
        storage.retrying(failing([quire.CorruptError("as it is")]), "x")
    with pytest.raises(quire.IOFailedError, match="x: KeyError"):
        storage.retrying(failing([KeyError()]), "x")


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK])
def test_a_disk_without_hard_links(tmp_path, monkeypatch, code):
    """As those of other systems are, and object stores that are mounted as folders."""

    def refuse(path, target):
        raise OSError(code, "no links here")

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    path = str(tmp_path / "1.qdelta")
    LocalStorage().write_atomic(path, b"bytes")
    with pytest.raises(quire.ExistsError):
        LocalStorage().write_atomic(path, b"others")
    assert Path(path).read_bytes() == b"bytes" and [each.name for each in tmp_path.iterdir()] == ["1.qdelta"]
    folder = tmp_path / "checkpoint"
    with Manager(folder) as one, Manager(folder) as other, one.load() as pm, other.load() as later:
        later.map("users")[b"other"] = b"1"
        one.commit(pm)
        with pytest.raises(quire.ExistsError):
            other.commit(later)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_no_room_is_told_apart(code):
    with pytest.raises(quire.NoSpaceError, match="no room"):
        storage.retrying(failing([OSError(code, "no room")]), "x")


def test_a_full_disk(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(storage.os, "fsync", full)
    with pytest.raises(quire.NoSpaceError, match="file: No space left on device"):
        LocalStorage().write_atomic(str(tmp_path / "file"), b"x")
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------------------ WebHDFS


@pytest.fixture
def web(hdfs):
    hdfs.files["/data/file"] = bytes(range(256)) * 100
    hdfs.folders |= {"/data"}
    return WebHdfsStorage(hdfs.url, "someone")


@pytest.mark.parametrize("fault", [503, 502, 429, "drop"])
def test_a_server_that_fails_now_and_then(hdfs, web, fault):
    # Three more attempts are made; some of these requests come in pairs.
    hdfs.faults = {"LISTSTATUS": [fault] * 2, "GETFILESTATUS": [fault], "OPEN": [fault] * 2, "OPEN2": [fault]}
    assert web.list("/data") == [Entry("file", 25600, False)]
    with web.open("/data/file") as file:
        assert file.read() == hdfs.files["/data/file"]
    hdfs.faults = {operation: [fault] for operation in ("CREATE", "CREATE2", "RENAME", "GETFILESTATUS", "DELETE")}
    web.write_atomic("/data/new", b"content")
    assert hdfs.files["/data/new"] == b"content"
    web.write_atomic("/data/new", b"other content", replace=True)
    assert hdfs.files["/data/new"] == b"other content"
    assert sorted(hdfs.files) == ["/data/file", "/data/new"]
    hdfs.faults = {"DELETE": [fault]}
    web.delete("/data/new")
    assert sorted(hdfs.files) == ["/data/file"]


def test_a_body_that_breaks_off(hdfs, web):
    hdfs.faults = {"OPEN2": ["short", "short"]}
    with web.open("/data/file") as file:
        assert file.read() == hdfs.files["/data/file"]
    assert [operation for operation, _, _ in hdfs.requests].count("OPEN2") == 3


def test_data_nodes_that_died_lately(hdfs, web):
    """The NameNode sends there for minutes; it is asked for another one without a wait, more often than in vain."""
    hdfs.faults = {"OPEN": ["dead"] * 6, "CREATE": ["dead"] * 6}
    with web.open("/data/file") as file:
        assert file.read() == hdfs.files["/data/file"]
    web.write_atomic("/data/new", b"content")
    assert hdfs.files["/data/new"] == b"content"
    assert hdfs.faults == {"OPEN": [], "CREATE": []}
    hdfs.faults = {"OPEN": ["dead"] * 99}
    with web.open("/data/file") as file, pytest.raises(quire.IOFailedError, match=r"/data/file: no answer from"):
        file.read()


def test_a_name_node_that_has_not_heard_of_all_blocks_yet(hdfs, web):
    hdfs.faults = {"OPEN": ["unknown"] * 2}
    with web.open("/data/file") as file:
        assert file.read() == hdfs.files["/data/file"]
    assert hdfs.faults == {"OPEN": []}


def test_a_file_that_is_replaced_by_a_shorter_one_while_it_is_read(hdfs, web):
    with web.open("/data/file") as file:
        hdfs.files["/data/file"] = b"short"
        with pytest.raises(quire.CorruptError, match="/data/file was replaced while it was read"):
            file.read()


@pytest.mark.parametrize("replaces", [True, False])
def test_a_file_is_replaced_in_one_step_by_servers_that_can(hdfs, web, replaces):
    hdfs.replaces = replaces
    web.write_atomic("/data/file", b"new", replace=True)
    assert hdfs.files == {"/data/file": b"new"}
    assert ("DELETE" in [operation for operation, _, _ in hdfs.requests]) is not replaces


def test_a_server_that_is_down(hdfs, web):
    hdfs.faults = {"LISTSTATUS": [503] * 9}
    with pytest.raises(quire.IOFailedError, match=r"/data: HTTP status 503"):
        web.list("/data")
    assert len(hdfs.requests) == 4
    nobody = WebHdfsStorage("http://127.0.0.1:1", "someone")
    with pytest.raises(quire.IOFailedError, match=r"127\.0\.0\.1:1/data: no answer from the REST interface"):
        nobody.list("/data")


def test_answers_that_mean_no(hdfs, web):
    """They are not asked for again."""
    hdfs.faults = {"LISTSTATUS": [404]}
    with pytest.raises(
        quire.IOFailedError, match=r"/data: not the REST interface of HDFS, whose port is 9870 .*: <html>not now"
    ):
        web.list("/data")
    assert len(hdfs.requests) == 1
    with pytest.raises(quire.IOFailedError, match="is not a directory"):
        web.list("/data/file")


def test_only_what_is_wanted_is_fetched(hdfs, web, monkeypatch):
    monkeypatch.setattr(storage, "WEBHDFS_READ_BYTES", 1000)
    with web.open("/data/file") as file:
        file.seek(-56, 2)
        assert file.read() == hdfs.files["/data/file"][-56:]
    pieces = [query for operation, _, query in hdfs.requests if operation == "OPEN"]
    assert [(query["offset"], query["length"]) for query in pieces] == [(str(25600 - 56), "56")]
    assert all(query["user.name"] == "someone" for query in pieces)


def test_who_reads(hdfs, monkeypatch):
    monkeypatch.setenv("HADOOP_USER_NAME", "from-environment")
    for url, name in ((f"webhdfs://alice@127.0.0.1:{hdfs.server_port}/", "alice"), (None, "from-environment")):
        store, path = storage_for(url or f"webhdfs://127.0.0.1:{hdfs.server_port}/")
        store.list(path)
        assert hdfs.requests[-1][2]["user.name"] == name


def test_a_rename_that_another_writer_was_faster_at(hdfs, web, monkeypatch):
    monkeypatch.setattr(web, "exists", lambda path, real=web.exists: path != "/data/file" and real(path))
    with contextlib.suppress(quire.QuireError):
        web.write_atomic("/data/file", b"late")
    assert hdfs.files["/data/file"] != b"late"
    assert sorted(hdfs.files) == ["/data/file"]


def test_a_checkpoint_on_hdfs(hdfs):
    """End to end, with a fault at every operation."""
    store, path = storage_for(f"webhdfs://127.0.0.1:{hdfs.server_port}/check point")
    with quire.PageManager() as pm:
        pm.map("default")[b"alice"] = b"1"
        frames = [Frame(FrameKind.RECORDS, payload) for payload in delta.write(pm)]
    file = io.BytesIO()
    container.write(file, FileHeader(FileKind.DELTA, 1, 0, operator_id=0, partition_id=3), frames, keys=1)
    store.write_atomic(f"{path}/state/0/3/1.qdelta", file.getvalue())
    hdfs.faults = {operation: [503] for operation in ("LISTSTATUS", "OPEN", "OPEN2", "GETFILESTATUS")}
    checkpoint = Checkpoint(f"webhdfs://127.0.0.1:{hdfs.server_port}/check point")
    with checkpoint.store(0, 3).load() as state:
        assert state.map("default")[b"alice"] == b"1"
    assert checkpoint.location == f"webhdfs://127.0.0.1:{hdfs.server_port}/check point"


# ------------------------------------------------------------------------------------------------ writing


def test_a_write_is_tried_again(tmp_path, monkeypatch):
    """Where the bytes are there to be written again; each attempt begins anew, and nothing is left of those before."""
    faults, synced = [], storage.os.fsync

    def fsync(descriptor):
        if faults:
            raise faults.pop(0)
        synced(descriptor)

    monkeypatch.setattr(storage.os, "fsync", fsync)
    passing = OSError(errno.EIO, "Input/output error")
    for data in (b"content", [b"con", b"tent"]):
        faults[:] = [passing] * 3
        LocalStorage().write_atomic(str(tmp_path / "file"), data, replace=True)
        assert (tmp_path / "file").read_bytes() == b"content" and not faults
    faults[:] = [passing] * 4
    with pytest.raises(quire.IOFailedError, match="other: Input/output error"):
        LocalStorage().write_atomic(str(tmp_path / "other"), b"content")
    faults[:] = [passing]
    with pytest.raises(quire.IOFailedError, match="other: Input/output error"):
        LocalStorage().write_atomic(str(tmp_path / "other"), iter([b"content"]))
    faults[:] = [PermissionError(errno.EACCES, "Permission denied"), passing]
    with pytest.raises(quire.IOFailedError, match="other: Permission denied"):
        LocalStorage().write_atomic(str(tmp_path / "other"), b"content")
    assert len(faults) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_write_by_pyarrow_is_tried_again(tmp_path):
    class Shaky:
        """Fails the first moves."""

        def __init__(self, failures):
            self.real, self.failures = fs.LocalFileSystem(), failures

        def __getattr__(self, name):
            return getattr(self.real, name)

        def move(self, source, to):
            if self.failures:
                raise self.failures.pop(0)
            self.real.move(source, to)

    store = ArrowStorage(Shaky([ConnectionResetError("reset")] * 2))
    store.write_atomic(str(tmp_path / "file"), [b"con", b"tent"])
    assert (tmp_path / "file").read_bytes() == b"content"
    store = ArrowStorage(Shaky([ConnectionResetError("reset")]))
    with pytest.raises(quire.IOFailedError, match="other: reset"):
        store.write_atomic(str(tmp_path / "other"), iter([b"content"]))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_what_comes_once_is_sent_once(hdfs, web):
    """To HDFS, bit by bit; a fault ends it."""
    web.write_atomic("/data/new", (b"%d" % number for number in range(5)))
    assert hdfs.files["/data/new"] == b"01234"
    hdfs.faults = {"CREATE": [503]}
    with pytest.raises(quire.IOFailedError, match="data/other: HTTP status 503"):
        web.write_atomic("/data/other", iter([b"content"]))
    assert sorted(hdfs.files) == ["/data/file", "/data/new"]


def test_a_manager_on_every_storage(place, monkeypatch):
    """Commits, bases with parts, cleaning, and a second program."""
    monkeypatch.setattr(io_service, "INLINE_BYTES", 40 << 10)
    monkeypatch.setattr(io_service, "FRAME_BYTES", 8 << 10)
    store, path = place
    with Manager(path, storage=store, codec="zstd", bases_every=2, retain=2) as checkpoint, checkpoint.load() as pm:
        for number in range(7):
            pm.map("default").update({b"%d %d" % (number, key): bytes(50) for key in range(300)})
            assert checkpoint.commit(pm) == number + 1
            checkpoint.maintain()
        assert [version.number for version in checkpoint.store.versions()] == [4, 5, 6, 7]
        assert {part.version.number for part in checkpoint.store.listing().parts} == {4, 6}
        with Manager(path, storage=store) as other, other.load() as same:
            assert dict(same.map("default")) == dict(pm.map("default"))
            same.map("default")[b"other"] = b""
            assert other.commit(same) == 8
        with pytest.raises(quire.ExistsError, match=r"8\.qdelta is there already: another program"):
            checkpoint.commit(pm)


def test_a_manager_on_a_server_that_fails_now_and_then(hdfs):
    url = f"webhdfs://127.0.0.1:{hdfs.server_port}/check point"
    with Manager(url) as checkpoint, checkpoint.load() as pm:
        for number, fault in enumerate([503, "drop", 429, "drop"]):
            operations = ("LISTSTATUS", "GETFILESTATUS", "CREATE", "CREATE2", "RENAME", "DELETE")
            hdfs.faults = {operation: [fault] for operation in operations}
            pm.map("default")[b"%d" % number] = b""
            assert checkpoint.commit(pm) == number + 1
            checkpoint.maintain()
    with Manager(url) as checkpoint, checkpoint.load() as pm:
        assert checkpoint.version == 4 and sorted(pm.map("default")) == [b"0", b"1", b"2", b"3"]
