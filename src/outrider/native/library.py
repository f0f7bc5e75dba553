"""The compiled kernels: built once for this machine with its C++ compiler, kept in the cache, absent where that fails.

`OUTRIDER_NATIVE=off` does without them.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from outrider.machine import cpuinfo
from outrider.paths import cache_dir

SOURCES = (
    "best.cpp",
    "decoder.cpp",
    "delta.cpp",
    "mixer.cpp",
    "products.cpp",
    "screen.cpp",
    "sums.cpp",
    "attention.h",
    "bounds.h",
    "coded.h",
    "highest.h",
    "rows.h",
    "products.h",
    "rounded.h",
    "steps.h",
    "lanes.h",
)
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", "-Wno-psabi")
PATIENCE = 120.0  # seconds that a compiler may take


class Unavailable(Exception):
    """There are no compiled kernels here; the text says why."""


def library() -> ctypes.CDLL:
    """The kernels, compiled if they are not yet.

    Raises:
        Unavailable: where they are switched off, no compiler is found or it fails.
    """
    found = _load()
    if isinstance(found, str):
        raise Unavailable(found)
    return found


@functools.cache
def _load() -> ctypes.CDLL | str:
    """The kernels, or why there are none."""
    if os.environ.get("OUTRIDER_NATIVE") == "off":
        return "compiled kernels are switched off (OUTRIDER_NATIVE)"
    if sys.platform != "linux":
        return f"kernels are compiled on Linux only, not on {sys.platform}"
    try:
        found = ctypes.CDLL(str(_built()))
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return f"kernels could not be compiled: {_first_line(error)}"
    number, at = ctypes.c_int64, ctypes.c_void_p
    for name in ("outrider_pass", "outrider_mixer", "outrider_delta"):
        found[name].argtypes = [at, at]
    found.outrider_product.argtypes = [number, at, number, number, at, number, at, number, number]
    found.outrider_norm.argtypes = [number, at, ctypes.c_float, number, at, number, at]
    found.outrider_lay_out.argtypes = [number, at, number, number, at, at, number]
    found.outrider_choose_codes.argtypes = [at, number, number, at, number]
    found.outrider_highest.argtypes = [number, at, number, number, ctypes.c_float, at, at, at, number]
    found.outrider_move.argtypes = [number, at, at, number, number, number, number, at, number, number]
    found.outrider_best.argtypes = [number, at, *[number] * 4, ctypes.c_float, ctypes.c_float, at, at, at, at]
    found.outrider_hashed.argtypes = [ctypes.c_uint64, number, at]
    found.outrider_in_bytes.argtypes = [number, at, number, number, at, at, at, at, number]
    found.outrider_screen_highest.argtypes = [at, at, number, at, at, number]
    found.outrider_screen_bounds.argtypes = [at, at, number, at, number]
    found.outrider_screen_drawn.argtypes = [at, at, at, ctypes.c_float, at, at, at, number]
    found.outrider_joined.argtypes = [at, at, number, at, number]
    found.outrider_highest.restype = found.outrider_move.restype = found.outrider_hashed.restype = None
    found.outrider_product.restype = found.outrider_norm.restype = None
    found.outrider_lay_out.restype = found.outrider_choose_codes.restype = found.outrider_in_bytes.restype = None
    return found


def _built() -> Path:
    compiler = _compiler()
    sources = [Path(__file__).with_name(name) for name in SOURCES]
    version = _run([*compiler, "--version"])
    parts = [*(source.read_text() for source in sources), *FLAGS, version, cpuinfo("model name"), cpuinfo("flags")]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    folder = cache_dir() / "native"
    built = folder / f"kernels-{digest}.so"
    if not built.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            out = Path(scratch) / built.name
            units = [str(source) for source in sources if source.suffix == ".cpp"]
            _run([*compiler, *FLAGS, *units, "-o", str(out)])
            os.replace(out, built)  # whole or not there, also when two processes build it
    return built


def _compiler() -> list[str]:
    given = os.environ.get("CXX")
    if given:
        return shlex.split(given)
    for name in ("g++", "c++", "clang++"):
        if shutil.which(name):
            return [name]
    raise ValueError("there is no C++ compiler (g++, c++ or clang++; or set CXX)")


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    if done.returncode:
        wrong = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[:200])
        raise ValueError(f"{command[0]} failed: {wrong.strip()}")
    return done.stdout


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
