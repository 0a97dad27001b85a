"""Text of a completion, token by token: characters split across tokens wait until they are whole, and what might be the
beginning of a stop string is held back until it is known not to be (stop strings match on text, never on tokens)."""

from collections.abc import Sequence

from marlaas_jax.text.tokenizer import Tokenizer

_INCOMPLETE = "�"  # what decoding puts for bytes that are not, or not yet, UTF-8
_MAX_CHARACTER_TOKENS = 4  # a character has at most four bytes


class IncrementalText:
    """The text of one growing completion.

    `text` is final once `stopped` or after `finish`: everything before the first stop string, equal to decoding all ids at once.
    The ids themselves are not trimmed: the token that completed a stop string belongs to what was sampled.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()):
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._ids: list[int] = []
        self._context = 0  # ids[context:read] are decoded along with the new ones, because some decoders treat a text's
        self._read = 0  # first token differently; ids[read:] are not in the text yet
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
            self._commit_broken()
        else:
            self._append(window[len(self._decode(self._context, self._read)) :], len(self._ids))
        return self._show()

    def finish(self) -> str:
        """Ends the completion and returns what was held back."""
        if not self.stopped:
            window = self._decode(self._context, len(self._ids))
            self._append(window[len(self._decode(self._context, self._read)) :], len(self._ids))
            self.stopped = True
        return self._show()

    def _decode(self, start: int, end: int) -> str:
        return self._tokenizer.decode(self._ids[start:end])

    def _append(self, text: str, read: int) -> None:
        searched = max(0, len(self._text) - max(map(len, self._stop), default=0))
        self._text += text
        self._context, self._read = self._read, read
        found = [at for at in (self._text.find(stop, searched) for stop in self._stop) if at >= 0]
        if found:
            self._text = self._text[: min(found)]
            self.stopped = True

    def _commit_broken(self) -> None:
        """Takes over all but the last tokens of a long run of bytes that are no text: they cannot become whole any more."""
        end = len(self._ids) - _MAX_CHARACTER_TOKENS
        if end - self._read < _MAX_CHARACTER_TOKENS:
            return
        known = self._decode(self._context, self._read)
        whole = self._decode(self._context, len(self._ids))
        for cut in range(end, self._read, -1):
            left = self._decode(self._context, cut)
            if left + self._decode(cut, len(self._ids)) == whole:
                self._append(left[len(known) :], cut)
                return

    def _held(self) -> int:
        """Returns how many characters at the end may be the beginning of a stop string."""
        longest = max(map(len, self._stop), default=0)
        for length in range(min(longest - 1, len(self._text)), 0, -1):
            tail = self._text[-length:]
            if any(stop.startswith(tail) for stop in self._stop):
                return length
        return 0

    def _show(self) -> str:
        text = self.text
        new = text[self._shown :]
        self._shown = max(self._shown, len(text))
        return new
