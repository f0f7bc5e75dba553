"""Another library's process, which answers prompts on request and stands still in between.

The process is stopped (SIGSTOP) as a group whenever it owes no answer, so that its threads cannot take the cores from
whatever is measured meanwhile. What goes over its stdin and stdout is told in `peer_workers/worker_protocol.py`. Whatever
goes wrong ends it and is one `MethodFailed`.
"""

from __future__ import annotations

import json
import math
import os
import selectors
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, TypeGuard

from outrider.bench.report import Run
from outrider.bench.runner import MethodFailed

LONGEST_ANSWER = 1 << 24  # bytes; what writes more than this without a line's end is no worker

# A worker finds its own environment's packages, not ours.
HIDDEN = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")


class PeerProcess:
    """A loaded peer.

    Args:
        name: what error messages call it.
        command: starts its worker.
        settings: the first line that the worker is sent; "threads" and "vocabulary" (its size) are read here too.
        load_seconds, answer_seconds: how long it may take to load and to answer.

    Raises:
        MethodFailed: when it does not load.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        settings: dict[str, Any],
        *,
        load_seconds: float = 1200.0,
        answer_seconds: float = 300.0,
    ) -> None:
        self.name, self.vocabulary, self.answer_seconds = name, settings["vocabulary"], answer_seconds
        self._log, self._unread = tempfile.TemporaryFile(), b""  # noqa: SIM115, closed with the process
        environment = {key: value for key, value in os.environ.items() if key not in HIDDEN}
        environment["OMP_NUM_THREADS"] = str(settings["threads"])
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            self._log.close()
            raise MethodFailed(f"{name} does not start ({error}): make its environment again.") from error
        assert self._process.stdin and self._process.stdout  # asked for above
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        try:
            self.versions: dict[str, str] = dict(self._ask(settings, load_seconds).get("versions", {}))
        except BaseException:  # also a keyboard interrupt
            self.close()
            raise

    def run(self, prompt_ids: list[int], max_new_tokens: int) -> Run:
        """Continue a prompt greedily; the seconds are the worker's own."""
        start = time.monotonic()
        answer = self._ask({"prompt": prompt_ids, "max_new_tokens": max_new_tokens}, self.answer_seconds)
        tokens, seconds = answer.get("tokens"), answer.get("seconds")
        if self._are_tokens(tokens, max_new_tokens) and _is_duration(seconds, time.monotonic() - start):
            return Run(tokens, seconds)
        raise self._failed(f"answered with what cannot be: {json.dumps(answer)[:200]}")

    def close(self) -> None:
        """End the process and all that it started; nothing the second time."""
        if self._process.returncode is not None:  # waited for below, so its number may be another's by now
            return
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._stdin, self._stdout, self._log):
            with suppress(OSError):  # what was not taken in before the end
                stream.close()

    def _are_tokens(self, tokens: Any, limit: int) -> TypeGuard[list[int]]:
        if not isinstance(tokens, list) or not 1 <= len(tokens) <= limit:
            return False
        return all(type(token) is int and 0 <= token < self.vocabulary for token in tokens)

    def _ask(self, message: dict[str, Any], seconds: float) -> dict[str, Any]:
        try:
            os.killpg(self._process.pid, signal.SIGCONT)
            self._stdin.write(json.dumps(message).encode() + b"\n")
            self._stdin.flush()
            line = self._read_line(seconds)
            os.killpg(self._process.pid, signal.SIGSTOP)
        except OSError:
            line = b""
        if not line:
            raise self._failed("ended unasked")
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise self._failed(f"answered with what is not its protocol: {line[:100].decode(errors='replace')!r}")
        if "error" in answer:
            raise self._failed(f"gave up: {str(answer['error'])[:300]}")
        return answer

    def _read_line(self, seconds: float) -> bytes:
        """The next line of its stdout; empty when it ended."""
        deadline = time.monotonic() + seconds
        with selectors.DefaultSelector() as ready:
            ready.register(self._stdout, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                if not ready.select(max(deadline - time.monotonic(), 0.0)):
                    raise self._failed(f"did not answer within {seconds:.0f} seconds")
                piece = os.read(self._stdout.fileno(), 1 << 16)
                if not piece or len(self._unread) > LONGEST_ANSWER:
                    return b""
                self._unread += piece
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _failed(self, what: str) -> MethodFailed:
        self._log.seek(0, os.SEEK_END)
        self._log.seek(max(self._log.tell() - 2000, 0))
        said = [line.strip() for line in self._log.read().decode(errors="replace").splitlines() if line.strip()]
        self.close()
        last_words = f" (last words: {said[-1][:200]})" if said else ""
        return MethodFailed(f"{self.name} {what}{last_words}")


def _is_duration(seconds: Any, at_most: float) -> TypeGuard[float]:
    """Whether a worker's seconds are possible, given what passed here meanwhile."""
    return type(seconds) in (int, float) and math.isfinite(seconds) and 0 < seconds <= at_most
