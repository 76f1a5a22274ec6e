"""From token ids to text: whole, cut at a stop, or piece by piece without ever showing half a character."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

_REPLACEMENT = "\ufffd"
#: A character has at most four bytes, so at most three ids may be waiting for the rest of it.
_MAX_WAITING = 3
#: Undecodable output must not make the window grow for ever.
_LONG_WINDOW = 32


def decode(tokenizer: Any, ids: Sequence[int], skip_special_tokens: bool) -> str:
    """The text of `ids`, without the tokenizer's own clean-up of spaces (it would make text depend on what follows).

    Asks the Rust tokenizer behind a fast one directly: for the few ids of a stream's window, the checks around it take
    twice as long as the decoding.
    """
    if not ids:
        return ""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
    return tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)


def special_ids(tokenizer: Any) -> frozenset[int]:
    """Ids that `skip_special_tokens` leaves out."""
    added = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    return frozenset(added | set(tokenizer.all_special_ids))


def response_text(
    tokenizer: Any,
    ids: Sequence[int],
    matched_stop: str | int | None,
    *,
    skip_special_tokens: bool = True,
    stop: Sequence[str] = (),
    keep_stop: bool = False,
) -> str:
    """Text of a response. What ended it is left out (or, with keep_stop, is the last thing kept): a stop string is cut
    where it first appears, in the middle of a token if need be; a stop token is the last id."""
    if isinstance(matched_stop, int) and not keep_stop and ids and ids[-1] == matched_stop:
        ids = ids[:-1]
    return cut_at_stop(decode(tokenizer, ids, skip_special_tokens), stop, keep_stop)[0]


def cut_at_stop(text: str, stop: Sequence[str], keep_stop: bool) -> tuple[str, bool]:
    """`text` up to the stop string that appears first (the longer of two at one place), and whether one appeared."""
    found = [(text.find(s), -len(s)) for s in stop if s in text]
    if not found:
        return text, False
    start, negative_length = min(found)
    return text[: start - negative_length if keep_stop else start], True


def held_back(text: str, stop: Sequence[str]) -> int:
    """Length of the longest end of `text` that may be the beginning of a stop string."""
    longest = 0
    for candidate in stop:
        for length in range(min(len(candidate) - 1, len(text)), longest, -1):
            if text.endswith(candidate[:length]):
                longest = length
                break
    return longest


class IncrementalDecoder:
    """Text of a growing list of ids, in pieces that add up to the text of the whole and never hold half a character.

    Decodes a short window: the ids since the last clean boundary, after the piece before it as context (SentencePiece
    decoders drop a leading space, byte-fallback ones decide a run of bytes as a whole). Replacement characters at the
    end are kept back, since the next id may complete them. Output that is no text at all (a model with random weights
    emits it) is given up on after a few ids, and only there may the number of replacement characters differ from that
    of the whole.
    """

    def __init__(self, tokenizer: Any, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._hidden = special_ids(tokenizer) if skip_special_tokens else frozenset()
        self._window: list[int] = []
        self._boundary = 0  # ids of the window before the last clean boundary
        self._emitted = 0  # characters of the window's text that were given out
        self._stalled = 0  # ids since the last progress

    def push(self, ids: Sequence[int]) -> str:
        """Text that is certain now that `ids` have been added."""
        return "".join(self._push(token_id) for token_id in ids if token_id not in self._hidden)

    def flush(self) -> str:
        """What is left: an incomplete character at the end becomes the replacement character."""
        text = self._decode(self._window)
        piece = text[self._emitted :]
        self._emitted = len(text)
        return piece

    def _push(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        stable = text.rstrip(_REPLACEMENT)
        piece = stable[self._emitted :]
        if piece:
            self._emitted = len(stable)
        if len(stable) == len(text):
            self._stalled = 0
            self._move_window()
            return piece
        self._stalled = 0 if piece else self._stalled + 1
        return self._give_up(text) if self._stalled > 2 * _MAX_WAITING else piece

    def _move_window(self) -> None:
        context = self._decode(self._window[self._boundary :])
        if context:
            del self._window[: self._boundary]
            self._boundary = len(self._window)
            self._emitted = len(context)

    def _give_up(self, text: str) -> str:
        """Nothing new for more ids than any character has: show all but the last few, cut between two characters."""
        keep = next((keep for keep in range(_MAX_WAITING, 2 * _MAX_WAITING + 1) if self._splits(text, keep)), 0)
        if not keep:
            if len(self._window) < _LONG_WINDOW:
                return ""
            keep = _MAX_WAITING
        piece = self._decode(self._window[:-keep])[self._emitted :]
        del self._window[:-keep]
        self._boundary = self._emitted = self._stalled = 0
        return piece

    def _splits(self, text: str, keep: int) -> bool:
        head, tail = self._decode(self._window[:-keep]), self._decode(self._window[-keep:])
        return bool(tail) and head + tail == text and len(head) >= self._emitted

    def _decode(self, ids: Sequence[int]) -> str:
        return decode(self._tokenizer, ids, skip_special_tokens=False)


class TextStream:
    """Text of a response while it grows, cut at stop strings and stop tokens; its pieces add up to `response_text`.

    stop: text that may be the beginning of one of them is kept back until the next token decides.
    stop_token_ids: ids that may end the response; kept back likewise, since only `finish` tells whether one did.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        skip_special_tokens: bool = True,
        stop: Sequence[str] = (),
        stop_token_ids: Collection[int] = (),
        keep_stop: bool = False,
    ) -> None:
        self._decoder = IncrementalDecoder(tokenizer, skip_special_tokens)
        self._stop = tuple(stop)
        self._stop_token_ids = frozenset(() if keep_stop else stop_token_ids)
        self._keep_stop = keep_stop
        self._pending: list[int] = []
        self._tail = ""
        self._ended = False

    def push(self, ids: Sequence[int]) -> str:
        """The text that may be shown after `ids` were sampled."""
        ids = [*self._pending, *ids]
        self._pending = [ids.pop()] if ids and ids[-1] in self._stop_token_ids else []
        return self._show(self._decoder.push(ids) if ids else "", last=False)

    def finish(self, matched_stop: str | int | None) -> str:
        """The rest of the text, now that it is known what ended the response."""
        piece = ""
        if self._pending and self._pending[-1] != matched_stop:
            piece = self._decoder.push(self._pending)
        self._pending = []
        return self._show(piece + self._decoder.flush(), last=True)

    def _show(self, piece: str, *, last: bool) -> str:
        if self._ended:
            return ""
        text = self._tail + piece
        cut, self._ended = cut_at_stop(text, self._stop, self._keep_stop)
        if self._ended or last:
            self._ended = True
            return cut
        kept = held_back(text, self._stop)
        self._tail = text[len(text) - kept :]
        return text[: len(text) - kept]


class TokenText:
    """Text and bytes of single tokens for logprob tables, remembered per id."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}
        self._bytes: dict[int, list[int] | None] = {}

    def text(self, token_id: int) -> str:
        """The token alone, special tokens shown; bytes that are no character become the replacement character."""
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = decode(self._tokenizer, (token_id,), skip_special_tokens=False)
        return text

    def bytes(self, token_id: int) -> list[int] | None:
        """The token's UTF-8 bytes; None for part of a character whose bytes the tokenizer does not tell."""
        if token_id not in self._bytes:
            text = self.text(token_id)
            if _REPLACEMENT in text:
                self._bytes[token_id] = raw_bytes(self._tokenizer.convert_ids_to_tokens(token_id))
            else:
                self._bytes[token_id] = list(text.encode())
        return self._bytes[token_id]


def raw_bytes(piece: str | None) -> list[int] | None:
    """Bytes of a vocabulary entry that is part of a character: `<0xNN>` (byte fallback) or GPT-2's printable bytes."""
    if not piece:
        return None
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        try:
            return [int(piece[3:5], 16)]
        except ValueError:
            return None
    table = _byte_of_character()
    if all(character in table for character in piece):
        return [table[character] for character in piece]
    return None


def _byte_of_character() -> dict[str, int]:
    """GPT-2's reversible map of bytes to printable characters (Radford et al. 2019), inverted."""
    if not _BYTE_TABLE:
        printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        _BYTE_TABLE.update({chr(byte): byte for byte in printable})
        others = [byte for byte in range(256) if byte not in printable]
        _BYTE_TABLE.update({chr(256 + position): byte for position, byte in enumerate(others)})
    return _BYTE_TABLE


_BYTE_TABLE: dict[str, int] = {}
