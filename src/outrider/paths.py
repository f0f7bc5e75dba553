"""Where things are: Outrider's cache, with locks for processes that share it, and pip's settings.

`OUTRIDER_CACHE` names the cache folder; without it, the platform's own place for caches is used. Everything below it
can be deleted at any time: it is fetched or computed again when it is needed. `OUTRIDER_STATISTICS` names another folder for
what controllers learn, or is "off". pip's settings are only read.
"""

import configparser
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout
from rich.console import Console

PYPI = "https://pypi.org/simple"


def cache_dir() -> Path:
    """The cache folder, created if it is not there; `ValueError` if that is impossible."""
    folder = _configured() or _platform_default()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"The cache folder {folder} cannot be created ({error.strerror}): set OUTRIDER_CACHE to a folder that you "
            f"can write to."
        ) from error
    return folder


def statistics_dir() -> Path | None:
    """Where controllers keep what they learn about a pair, not created yet; None if nothing is to be kept."""
    value = os.environ.get("OUTRIDER_STATISTICS")
    if value == "off":
        return None
    return Path(value).expanduser().absolute() if value else cache_dir() / "statistics"


def _configured() -> Path | None:
    value = os.environ.get("OUTRIDER_CACHE")
    try:
        return Path(value).expanduser().absolute() if value else None
    except (RuntimeError, OSError) as error:
        raise ValueError(
            f"OUTRIDER_CACHE is {value!r}, which is no usable path: {error}; set it to a folder."
        ) from error


def _platform_default() -> Path:
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "outrider" / "cache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "outrider"
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says that a relative path there is to be ignored.
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "outrider"


@contextmanager
def exclusive(lock_file: Path, what: str) -> Iterator[None]:
    """Hold `lock_file` for the block, waiting while another process holds it and saying so on stderr.

    The operating system releases the lock of a process that dies, so a killed one never blocks the next.
    """
    lock = FileLock(lock_file)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        Console(stderr=True).print(f"Waiting for another process that is {what} ...", highlight=False, soft_wrap=True)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def index_url() -> str:
    """The simple-API address that pip would use: `PIP_INDEX_URL`, else pip's configuration files, else PyPI."""
    return os.environ.get("PIP_INDEX_URL") or pip_setting("index-url") or PYPI


def pip_setting(key: str) -> str | None:
    """The value that pip's configuration files give to an option such as `index-url`, or None."""
    for path in _pip_config_files():
        parser = configparser.RawConfigParser()
        try:
            parser.read(path, encoding="utf-8")
        except (configparser.Error, UnicodeDecodeError, OSError):
            continue  # pip itself complains about such a file; the next one may still hold the answer
        for section in ("install", "global"):
            for spelling in (key, key.replace("-", "_")):
                if value := parser.get(section, spelling, fallback="").strip():
                    return value
    return None


def _pip_config_files() -> list[Path]:
    """pip's configuration files, strongest first."""
    configured = os.environ.get("PIP_CONFIG_FILE")
    if configured == os.devnull:  # pip's way to say: no configuration files at all
        return []
    home, name = Path.home(), "pip.ini" if sys.platform == "win32" else "pip.conf"
    files = [Path(configured)] if configured else []
    files.append(Path(sys.prefix) / name)
    if sys.platform == "win32":
        return [*files, Path(os.environ.get("APPDATA") or home) / "pip" / name, home / "pip" / name]
    if sys.platform == "darwin":
        files.append(home / "Library" / "Application Support" / "pip" / name)
    xdg = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config")
    return [*files, xdg / "pip" / name, home / ".pip" / name, Path("/etc/xdg/pip") / name, Path("/etc") / name]
