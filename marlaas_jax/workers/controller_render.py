"""Text to ids and back for the controller: rendering in a small thread pool, prompts decoded once for the episode log."""

import asyncio
import concurrent.futures
import logging
from collections.abc import Callable

from marlaas_jax.errors import MarlaasError
from marlaas_jax.rollout.commands import Render, TurnKey
from marlaas_jax.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

NUM_THREADS = 2
MAX_PROMPTS = 512  # whose text is kept

OnRendered = Callable[[TurnKey, tuple[int, ...], str], None]


class Renderer:
    """Renders observations off the event loop; `on_rendered` is called in it."""

    def __init__(self, tokenizer: Tokenizer, on_rendered: OnRendered):
        self.tokenizer = tokenizer
        self._on_rendered = on_rendered
        self._executor = concurrent.futures.ThreadPoolExecutor(NUM_THREADS, "marlaas-render")
        self._prompts: dict[tuple[int, ...], str] = {}

    def submit(self, command: Render) -> None:
        """Starts one rendering."""
        future = asyncio.get_running_loop().run_in_executor(self._executor, self._to_ids, command)
        future.add_done_callback(lambda done: self._finished(command, done))

    def decode(self, ids: tuple[int, ...]) -> str:
        """Returns a prompt's text, special tokens included."""
        if ids not in self._prompts:
            if len(self._prompts) >= MAX_PROMPTS:
                self._prompts.clear()
            self._prompts[ids] = self.tokenizer.decode(ids, skip_special=False)
        return self._prompts[ids]

    def close(self) -> None:
        """Drops what has not started."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _to_ids(self, command: Render) -> tuple[int, ...]:
        seen, tokenizer = command.observation, self.tokenizer
        if seen.text is not None:
            return tuple(tokenizer.encode_prompt(seen.text) if command.first else tokenizer.encode(seen.text))
        assert seen.messages is not None
        if command.first:
            return tuple(tokenizer.render(seen.messages, seen.tools))
        return tuple(tokenizer.render_followup(seen.messages, seen.tools, last_id=command.last_id))

    def _finished(self, command: Render, done: asyncio.Future[tuple[int, ...]]) -> None:
        if done.cancelled():
            return
        error = done.exception()
        if error is None:
            self._on_rendered(command.key, done.result(), "")
            return
        if not isinstance(error, MarlaasError):
            log.error("rendering failed job=%s", command.job, exc_info=error)
        self._on_rendered(command.key, (), f"{type(error).__name__}: {error}")
