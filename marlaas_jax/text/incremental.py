"""Text of a completion, token by token: characters split across tokens wait until they are whole, and what might be the
beginning of a stop string is held back until it is known not to be (stop strings match on text, never on tokens)."""

from collections.abc import Sequence

from marlaas_jax.text.tokenizer import Tokenizer

_INCOMPLETE = "�"  # what decoding puts for bytes that are not, or not yet, UTF-8
_MAX_CHARACTER_TOKENS = 4  # a character has at most four bytes


class IncrementalText:
    """The text of one growing completion.

    `text` is final once `stopped` or after `finish`: what precedes the first stop string, equal to decoding all ids at once.
    (Byte tokens of SentencePiece vocabularies are the exception: there, one broken byte spoils the bytes before it when all are
    decoded at once; here, what was whole stays.) The ids themselves are not trimmed: the token that completed a stop string
    belongs to what was sampled.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()):
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._longest_stop = max(map(len, self._stop), default=0)
        self._ids: list[int] = []
        # ids[context:read] are decoded again with each new token, because some decoders treat the first token of a text
        # differently; `taken` characters of what ids[context:] give are in the text.
        self._context = self._read = self._taken = 0
        self._text = ""
        self._shown = 0
        self.stopped = False

    @property
    def text(self) -> str:
        """All text so far that is certain to stay."""
        return self._text if self.stopped else self._text[: len(self._text) - self._held()]

    def push(self, token_id: int) -> str:
        """Takes one more token and returns the text that is certain to stay and was not returned before."""
        if self.stopped:
            return ""
        self._ids.append(token_id)
        window = self._decode(self._context, len(self._ids))
        if window.endswith(_INCOMPLETE):
            self._append(window.rstrip(_INCOMPLETE))
            self._commit_broken(window)
        else:
            self._append(window)
            self._commit(len(self._ids))
        return self._show()

    def finish(self) -> str:
        """Ends the completion and returns what was held back."""
        if not self.stopped:
            self._append(self._decode(self._context, len(self._ids)))
            self.stopped = True
        return self._show()

    def _decode(self, start: int, end: int) -> str:
        return self._tokenizer.decode(self._ids[start:end])

    def _append(self, window: str) -> None:
        """Takes over what is new in the text of ids[context:], up to a stop string."""
        searched = max(0, len(self._text) - self._longest_stop)
        self._text += window[self._taken :]
        self._taken = max(self._taken, len(window))
        found = [at for at in (self._text.find(stop, searched) for stop in self._stop) if at >= 0]
        if found:
            self._text = self._text[: min(found)]
            self.stopped = True

    def _commit(self, read: int, num_left: int = 0) -> None:
        """Moves on to `read`; of the text of all ids, the last `num_left` characters are not taken."""
        self._context, self._read = self._read, read
        self._taken = len(self._decode(self._context, len(self._ids))) - num_left

    def _commit_broken(self, window: str) -> None:
        """Takes over all but the last tokens of a long run of bytes that are no text: they cannot become whole any more."""
        end = len(self._ids) - _MAX_CHARACTER_TOKENS
        if self.stopped or end - self._read < _MAX_CHARACTER_TOKENS:
            return
        for cut in range(end, self._read, -1):
            left = self._decode(self._context, cut)
            if left + self._decode(cut, len(self._ids)) == window:
                self._append(left)
                self._commit(cut, len(window) - self._taken)
                return

    def _held(self) -> int:
        """Returns how many characters at the end may be the beginning of a stop string."""
        for length in range(min(self._longest_stop - 1, len(self._text)), 0, -1):
            tail = self._text[-length:]
            if any(stop.startswith(tail) for stop in self._stop):
                return length
        return 0

    def _show(self) -> str:
        text = self.text
        new = text[self._shown :]
        self._shown = max(self._shown, len(text))
        return new
