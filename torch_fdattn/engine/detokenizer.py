"""Text of tokens as they come, held back as long as it may become a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from torch_fdattn.models import Tokenizer


class TextStream:
    """The text of one completion.

    Attributes:
        text: what can no longer be part of a stop string.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stop: Sequence[str]) -> None:
        self._decoder, self._stop = tokenizer.stream(prompt), stop
        self.text, self._held, self._stopped = "", "", False

    def push(self, token: int, stops: bool = True) -> bool:
        """Whether the text has come to a stop string, before which it ends.

        stops: False: this token's text is no part of one.
        """
        return self._append(self._decoder.push(token), stops)

    def flush(self) -> bool:
        """The completion has ended: nothing is held back any more. As `push`, for an incomplete character."""
        if not self._stopped:
            self._append(self._decoder.flush(), True)
            self.text, self._held = self.text + self._held, ""
        return self._stopped

    def _append(self, text: str, stops: bool) -> bool:
        if not stops:
            self.text += text
            return False
        text = self._held + text
        places = [at for stop in self._stop if (at := text.find(stop)) >= 0]
        if places:
            self.text, self._held, self._stopped = self.text + text[: min(places)], "", True
            return True
        shown = len(text) - held_back(text, self._stop)
        self.text, self._held = self.text + text[:shown], text[shown:]
        return False


def held_back(text: str, stop: Sequence[str]) -> int:
    """How many of the last characters are the beginning of a stop string."""
    longest = min(len(text), max(map(len, stop), default=1) - 1)
    for count in range(longest, 0, -1):
        if any(x.startswith(text[-count:]) for x in stop):
            return count
    return 0
