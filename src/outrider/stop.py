"""Token ids to text, one token at a time, and the strings that end it.

Text comes out only when it is final: a character whose bytes are not all there yet, or the beginning of a stop string, is
held back. The pieces of a sequence join to exactly its text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class Decoder(Protocol):
    """What is needed of a tokenizer."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool = ...) -> str:
        """Text of token ids."""
        ...


class TextStream:
    """Text of a growing list of new tokens.

    Args:
        tokenizer: None yields no text (and refuses stop strings).
        context: the last tokens of the prompt: some tokenizers write a token differently at the start of a text.
        stop: strings that end the text.
    """

    def __init__(
        self, tokenizer: Decoder | None, context: Sequence[int], stop: Sequence[str], skip_special_tokens: bool = True
    ) -> None:
        if stop and tokenizer is None:
            raise ValueError("stop strings need a tokenizer, and this model has none; stop on token ids instead")
        self.tokenizer, self.stop, self.skip = tokenizer, tuple(stop), skip_special_tokens
        self.ends = _special_ends(tokenizer, self.stop) if self.stop and self.skip else set()
        # `ids[start:read]` is text already given out, kept as context for what follows.
        self.ids, self.start, self.read = list(context), 0, len(context)
        self.text, self.given, self.stopped = "", 0, False

    def _decode(self, ids: list[int]) -> str:
        assert self.tokenizer is not None
        return self.tokenizer.decode(ids, skip_special_tokens=self.skip)

    def push(self, token: int) -> None:
        """Take one more token. Afterwards `stopped` tells whether a stop string is complete; `text` then ends before it."""
        self.ids.append(token)
        if self.tokenizer is not None:
            self._grow(final=token in self.ends)
            self.stopped = self.stopped or token in self.ends

    def _grow(self, final: bool) -> None:
        before = self._decode(self.ids[self.start : self.read])
        text = self._decode(self.ids[self.start :])
        if not final and text.endswith("\ufffd"):
            return
        self.start, self.read = self.read, len(self.ids)
        old = len(self.text)
        self.text += text[len(before) :]
        self._look_for_stop(old)

    def _look_for_stop(self, old: int) -> None:
        found = [at for string in self.stop if (at := self.text.find(string, max(0, old - len(string) + 1))) >= 0]
        if found:
            self.text, self.stopped = self.text[: min(found)], True

    def finish(self) -> None:
        """No more tokens: incomplete characters become final."""
        if self.tokenizer is not None and not self.stopped and self.read < len(self.ids):
            self._grow(final=True)

    def take(self, final: bool = False) -> str:
        """Text that is final and was not taken before."""
        end = len(self.text) if final or self.stopped else len(self.text) - self._held()
        piece, self.given = self.text[self.given : end], max(self.given, end)
        return piece

    def _held(self) -> int:
        """Length of the longest end of the text that may be the beginning of a stop string."""
        longest = max((len(s) for s in self.stop), default=1) - 1
        for length in range(min(longest, len(self.text) - self.given), 0, -1):
            if any(string.startswith(self.text[-length:]) for string in self.stop):
                return length
        return 0


def _special_ends(tokenizer: Any, stop: tuple[str, ...]) -> set[int]:
    """Special tokens that stop strings name. They are left out of the text, where nobody would find them.

    Raises:
        ValueError: for a stop string that is one only in part.
    """
    ends = set()
    for token, added in getattr(tokenizer, "added_tokens_decoder", {}).items():
        for string in stop if added.special else ():
            if string == added.content:
                ends.add(token)
            elif added.content in string:
                raise ValueError(
                    f"stop {string!r} holds the special token {added.content!r}, which is left out of the text; stop at "
                    f"{added.content!r} alone, or give skip_special_tokens=False"
                )
    return ends
