"""How Outrider and a peer talk: JSON over the worker's stdin and stdout, one object a line.

First the settings go in, once:
`{"model": FOLDER, "gguf": FILE, "dtype": "bfloat16", "threads": 2, "context": 512, "end_ids": [2], "configuration": "ngram"}`.
When the peer is loaded, `{"versions": {"vllm": "0.32.0"}}` comes back. Then, as often as wanted, a request
`{"prompt": [1, 2, 3], "max_new_tokens": 96}` is answered by `{"tokens": [...], "seconds": 1.25}`: greedy tokens up to and
with an end token, and the wall clock from token ids in to the last token out, taken here for every peer alike.
`{"error": "why"}` may be the answer to anything. The worker ends when its stdin does.

Workers run in the environment of their peer, so they import nothing of Outrider.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from importlib import metadata
from typing import Any

Generate = Callable[[list[int], int], list[int]]
Load = Callable[[dict[str, Any]], Generate]


def serve(load: Load, *packages: str) -> None:
    """Load the peer as the first line asks, then answer requests. `packages` are those whose versions matter."""
    _die_with_parent()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a peer prints, from Python or C, is no answer

    def answer(value: dict[str, Any]) -> None:
        answers.write(json.dumps(value) + "\n")

    try:
        generate = load(json.loads(sys.stdin.readline()))
        answer({"versions": {package: metadata.version(package) for package in packages}})
        for line in sys.stdin:
            request = json.loads(line)
            start = time.perf_counter()
            tokens = generate(request["prompt"], request["max_new_tokens"])
            answer({"tokens": tokens, "seconds": time.perf_counter() - start})
    except Exception as error:
        answer({"error": f"{type(error).__name__}: {error}"})
        raise


def _die_with_parent() -> None:
    """A worker that is stopped while others run cannot see that its stdin ended; Linux kills it with its parent."""
    if sys.platform == "linux":
        set_death_signal = 1
        ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)
