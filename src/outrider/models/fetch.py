"""One file of a Python package, fetched once from the user's package index.

`fetch_package` finds the file on the index that pip is set up for, downloads it with resume, and gives it its name in
the cache only after it matched the checksum that the caller pins; from then on the network is never touched. A killed
or failed download leaves at most a `.part` that the next call continues. Whatever goes wrong is one `ValueError` that
says what to do. `members` and `open_member` read a wheel without unpacking it.
"""

import base64
import errno
import hashlib
import json
import os
import re
import ssl
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from html.parser import HTMLParser
from http.client import HTTPException
from pathlib import Path, PurePosixPath
from typing import IO, Any, TypeVar
from urllib.error import HTTPError
from urllib.parse import unquote, urljoin, urlsplit, urlunsplit
from urllib.request import Request, urlopen

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from ..paths import PYPI, cache_dir, exclusive, index_url, pip_setting

ACCEPT = "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.01"
TIMEOUT_S = 30.0
RETRY_PAUSES_S = (0.5, 1.0, 2.0)
T = TypeVar("T")


class _Unreachable(Exception):
    """The network or the server failed in a way that another try may cure."""


@dataclass(frozen=True)
class _Link:
    """A file that an index offers; `sha256` is empty where the index does not tell."""

    filename: str
    url: str
    sha256: str


def package_folder(name: str, version: str, sha256: str) -> Path:
    """The folder that holds, or will hold, this file; part of its name is the checksum."""
    return cache_dir() / "packages" / f"{_canonical(name)}-{version}-{sha256[:12]}"


def fetched_package(name: str, version: str, sha256: str) -> Path | None:
    """The file, if it has been fetched before; never touches the network."""
    return next((path for path in package_folder(name, version, sha256).glob("[!.]*")), None)


def fetch_package(name: str, version: str, sha256: str, *, filename: str | None = None) -> Path:
    """Path of the package file with this checksum, downloaded on the first call.

    `filename` picks the file on an index that publishes no checksums. Raises `ValueError` when the index cannot be
    reached or has no such file, when the checksum differs, and when the disk is full or not writable.
    """
    if (path := fetched_package(name, version, sha256)) is not None:
        return path
    label, index = f"{name} {version}", index_url()
    shown, folder = _without_credentials(index), package_folder(name, version, sha256)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with exclusive(folder / ".lock", f"fetching {label}"):
            # Another process may have finished it while this one waited for the lock.
            if (path := fetched_package(name, version, sha256)) is not None:
                return path
            return _download(_find_link(index, name, version, sha256, filename), folder, sha256, label)
    except _Unreachable as reason:
        raise ValueError(
            f"Cannot fetch {label} from {shown} ({reason}): if you are offline, connect once and run this again (later "
            f"runs need no network), or set PIP_INDEX_URL to an index that can be reached."
        ) from reason
    except HTTPError as error:
        raise ValueError(
            f"The package index {shown} refused {label} (HTTP {error.code} {error.reason}): set PIP_INDEX_URL to one "
            f"that has it, with user and password if it asks for them."
        ) from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            (folder / ".part").unlink(missing_ok=True)
            problem, remedy = f"No space is left in {folder}", "free some, or set OUTRIDER_CACHE to a larger disk"
        else:
            problem, remedy = f"Cannot write to {folder} ({error})", "set OUTRIDER_CACHE to a folder you can write to"
        raise ValueError(f"{problem} to fetch {label}: {remedy}.") from error


def members(path: Path) -> list[str]:
    """Names of the files in a wheel."""
    with zipfile.ZipFile(path) as archive:
        return archive.namelist()


@contextmanager
def open_member(path: Path, member: str) -> Iterator[IO[bytes]]:
    """Read one member of a wheel as a stream, without unpacking the rest; `ValueError` if it cannot be read."""
    try:
        with zipfile.ZipFile(path) as archive, archive.open(member) as stream:
            yield stream
    except (KeyError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} has no readable {member} ({error}): delete that file and run this again.") from error


# --- the index ------------------------------------------------------------------------------------------------------


def _find_link(index: str, name: str, version: str, sha256: str, filename: str | None) -> _Link:
    links = _persistently(lambda: _read_index(f"{index.rstrip('/')}/{_canonical(name)}/"))
    for link in links:
        if link.sha256 == sha256:
            return link
    # An index without checksums is asked by name, wheels first; the pinned checksum still decides after the download.
    prefix = re.compile(rf"{_canonical(name)}-{re.escape(version)}(-|\.tar|\.zip)")
    for link in sorted(links, key=lambda link: not link.filename.endswith(".whl")):
        by_version = prefix.match(link.filename.lower().replace("_", "-")) is not None
        if link.filename == filename or (filename is None and by_version):
            return link
    raise ValueError(
        f"The package index {_without_credentials(index)} has no {filename or 'file'} of {name} {version}: set "
        f"PIP_INDEX_URL to one that has it, such as {PYPI}."
    )


def _read_index(url: str) -> list[_Link]:
    with _open(url, Accept=ACCEPT) as response:
        base, is_json = response.geturl(), "json" in (response.headers.get("Content-Type") or "")
        text = _read(response).decode("utf-8", errors="replace")
    try:
        found = _links_of_json(text) if is_json else _links_of_html(text)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _Unreachable(f"its answer is not a list of files: {error}") from error
    # Only the last component of a name is used, so that no index can choose where the file lands.
    return [
        _Link(PurePosixPath(link.filename).name, _with_credentials_of(url, urljoin(base, link.url)), link.sha256)
        for link in found
    ]


def _links_of_json(text: str) -> list[_Link]:
    files = json.loads(text)["files"]
    return [_Link(file["filename"], file["url"], file["hashes"].get("sha256", "")) for file in files]


def _links_of_html(text: str) -> list[_Link]:
    parser = _Anchors()
    parser.feed(text)
    parts = [(href, urlsplit(href)) for href in parser.hrefs]
    return [_Link(unquote(part.path), href, part.fragment.removeprefix("sha256=")) for href, part in parts]


class _Anchors(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.hrefs: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a" and (href := dict(attrs).get("href")):
            self.hrefs.append(href)


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


# --- the network ----------------------------------------------------------------------------------------------------


def _download(link: _Link, folder: Path, sha256: str, label: str) -> Path:
    part = folder / ".part"
    with progress(f"Fetching {label}") as report:
        _persistently(lambda: _receive(link.url, part, report))
    with part.open("rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual != sha256:
        part.unlink()
        raise ValueError(
            f"{link.filename} from {urlsplit(link.url).hostname} has checksum {actual[:12]} where {sha256[:12]} is due "
            f"and was deleted: run this again, and if that repeats, set PIP_INDEX_URL to another index."
        )
    os.replace(part, folder / link.filename)
    return folder / link.filename


def _receive(url: str, part: Path, report: Callable[[int, int | None], None]) -> None:
    """Bring `part` to its full length, continuing from what is there when the server can do that."""
    start = part.stat().st_size if part.exists() else 0
    try:
        response = _open(url, **({"Range": f"bytes={start}-"} if start else {}))
    except HTTPError as error:
        if error.code == 416 and start:  # nothing after `start`: the file was complete already
            return
        raise
    with response:
        done = start if response.status == 206 else 0
        length = response.headers.get("Content-Length")
        total = done + int(length) if length else None
        with part.open("ab" if done else "wb") as file:
            while chunk := _read(response, 1 << 18):
                file.write(chunk)
                done += len(chunk)
                report(done, total)
            file.flush()
            os.fsync(file.fileno())
    if total is not None and done < total:  # http.client takes a broken connection for the end of the file
        raise _Unreachable(f"the connection broke off after {done} of {total} bytes")


def _persistently(action: Callable[[], T]) -> T:
    for pause in RETRY_PAUSES_S:
        try:
            return action()
        except _Unreachable:
            time.sleep(pause)
    return action()


def _open(url: str, **headers: str) -> Any:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https", "file"):
        raise ValueError(
            f"The address {_without_credentials(url)!r} is no http, https or file URL: correct PIP_INDEX_URL."
        )
    request = Request(_without_credentials(url), headers={"User-Agent": "outrider", **headers})
    if parts.username:
        secret = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
        # Unredirected: a redirect to another host must not carry the password along.
        request.add_unredirected_header("Authorization", "Basic " + base64.b64encode(secret).decode())
    try:
        return urlopen(request, timeout=TIMEOUT_S, context=_tls_context())
    except HTTPError as error:
        if error.code in (408, 425, 429) or error.code >= 500:
            raise _Unreachable(f"HTTP {error.code}") from error
        raise
    except (HTTPException, OSError) as error:
        raise _Unreachable(str(getattr(error, "reason", None) or error)) from error


def _read(response: Any, size: int | None = None) -> bytes:
    try:
        return response.read(size)
    except (HTTPException, OSError) as error:
        raise _Unreachable(f"the connection broke off: {error}") from error


def _tls_context() -> ssl.SSLContext:
    """Trust what pip trusts: certificates (a file or folder) named in the environment or in pip's settings."""
    variables = (os.environ.get(key) for key in ("PIP_CERT", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE"))
    named = next(filter(None, variables), None) or pip_setting("cert")
    if named is None:
        return ssl.create_default_context()
    is_folder = os.path.isdir(named)
    try:
        return ssl.create_default_context(cafile=None if is_folder else named, capath=named if is_folder else None)
    except OSError as error:
        raise ValueError(
            f"The certificates in {named} cannot be read ({error}): point PIP_CERT to a readable file of certificates."
        ) from error


def _without_credentials(url: str) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def _with_credentials_of(index: str, url: str) -> str:
    """Files on the index's own host are fetched with the index's user and password."""
    ours, theirs = urlsplit(index), urlsplit(url)
    same_host = ours.netloc.rpartition("@")[2] == theirs.netloc
    return urlunsplit(theirs._replace(netloc=ours.netloc)) if same_host else url


@contextmanager
def progress(label: str) -> Iterator[Callable[[int, int | None], None]]:
    """Report (bytes done, bytes in all) on stderr: a bar on a terminal, else one line if it takes over two seconds."""
    console = Console(stderr=True)
    if not console.is_terminal:
        patience_ends, unsaid = time.monotonic() + 2, [label]

        def say_once(done: int, total: int | None) -> None:
            if unsaid and time.monotonic() > patience_ends:
                console.print(unsaid.pop(), "...", highlight=False, soft_wrap=True)

        yield say_once
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
