"""Whether the model hub can be asked: without a network its own client tries again and again before it says so."""

from __future__ import annotations

import os
import socket
from urllib.parse import urlsplit
from urllib.request import getproxies

from huggingface_hub import constants, try_to_load_from_cache

PATIENCE = 4.0  # seconds


def only_cached(name: str) -> bool:
    """Whether a model must come from the local cache, since the hub cannot be reached.

    Raises:
        ValueError: when it is not there either.
    """
    if constants.HF_HUB_OFFLINE or _reachable():
        return bool(constants.HF_HUB_OFFLINE)
    if isinstance(try_to_load_from_cache(name, "config.json"), str):
        return True
    raise ValueError(
        f"{name} is no folder here, and the model hub ({urlsplit(constants.ENDPOINT).hostname}) cannot be reached: check the "
        f"name and the network, or use a folder or a GGUF file (`outrider models` lists what needs no hub)."
    )


def _reachable() -> bool:
    """Whether the hub's host takes connections; behind a proxy that is for the proxy to find out."""
    parts = urlsplit(constants.ENDPOINT)
    if parts.scheme in getproxies() or os.environ.get("ALL_PROXY"):
        return True
    try:
        socket.create_connection((parts.hostname or "", parts.port or 443), PATIENCE).close()
    except OSError:
        return False
    return True
