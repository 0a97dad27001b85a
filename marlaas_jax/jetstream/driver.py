"""JetStream's Driver and gRPC servicer (google-jetstream 0.2.2), with our prompts in and our manners at their edges.

Both are JetStream's classes; what is overridden are the methods where a request enters and leaves and where a thread starts:

* A fault in one of the Driver's threads makes JetStream kill its process with SIGKILL. Here it is told, once, to `on_death`.
* The Driver runs a row to its end though its client is gone. Here the row is ended with the next step and its slot is free.
* Its queue of waiting requests has no bound. Here one beyond `MAX_WAITING` is refused with RESOURCE_EXHAUSTED, which the
  servicer already knows how to say.
* It puts a BOS before token ids, cuts long prompts at the left and pads to lengths of its own. Here a prompt is what was sent.
* `stop` forgets requests without a word to whoever awaits them. Here each ends with UNAVAILABLE.
* It calls `jax.tree_map`, which JAX has removed.
* It detokenizes token by token, which breaks characters that span tokens. Here text is made of ids by `IncrementalText`.
"""

import asyncio
import concurrent.futures
import contextlib
import logging
import queue
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import jax

from marlaas_jax.engine.jetstream import import_quietly
from marlaas_jax.engine.requests import NOT_FINITE
from marlaas_jax.errors import InvalidRequest, NotFound
from marlaas_jax.jetstream.engine import NOT_FINITE_ID, PaddedPrompt, ServedEngine
from marlaas_jax.jetstream.prompts import Prompt, Reader
from marlaas_jax.text.incremental import IncrementalText

orchestrator: Any = import_quietly("jetstream.core.orchestrator")
pb2: Any = import_quietly("jetstream.core.proto.jetstream_pb2")

MAX_WAITING = 4096
_ABANDONED = -1  # as a request's max_tokens: any number of tokens is more

log = logging.getLogger(__name__)


class Stopping(Exception):
    """The server ends before the request has."""


def _delete_arrays(tree: Any) -> None:
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array):
            leaf.delete()


class AdapterDriver(orchestrator.Driver):
    """JetStream's Driver over one ServedEngine that prefills and generates."""

    def __init__(self, *args: Any, on_death: Callable[[str], None], **kwargs: Any):
        """on_death: called with one sentence, from the thread that dies."""
        orchestrator.delete_pytree = _delete_arrays
        self._on_death = on_death
        self._placed: dict[Prompt, Any] = {}  # the Driver's request of each prompt under way
        super().__init__(*args, **kwargs)

    def place_request_on_prefill_queue(self, request: Any) -> None:
        """Queues a request. Raises queue.Full beyond MAX_WAITING."""
        if self._prefill_backlog.qsize() >= MAX_WAITING:
            raise queue.Full
        self._placed[request.prefill_content] = request
        if not self.live:  # after the entry above: whichever comes first, this or `fail_all`, one sees the other
            request.return_channel.set_exception(Stopping())
            return
        super().place_request_on_prefill_queue(request)

    def release(self, prompt: Prompt) -> None:
        """Ends a prompt's row with the next step, if it is not over."""
        if (request := self._placed.pop(prompt, None)) is not None:
            request.max_tokens = _ABANDONED

    def fail_all(self) -> None:
        """Lets every request under way end with Stopping."""
        for request in list(self._placed.values()):
            request.return_channel.set_exception(Stopping())

    def stop(self) -> None:
        """Ends the threads; what is under way ends with Stopping."""
        self.live = False
        self.fail_all()
        super().stop()

    def _process_prefill_content(
        self, request: Any, tokenizer: Any, is_bos: bool, max_prefill_length: int
    ) -> tuple[PaddedPrompt, int]:
        prompt: Prompt = request.prefill_content
        ids = prompt.token_ids if request.max_tokens != _ABANDONED else prompt.token_ids[:1]
        engine: ServedEngine = self._prefill_engines[0]
        return PaddedPrompt(engine.pad(ids), prompt.adapter_slot, prompt.max_tokens), len(ids)

    def _prefill_thread(self, idx: int) -> None:
        self._watched("prefill", super()._prefill_thread, idx)

    def _transfer_thread(self, idx: int) -> None:
        self._watched("transfer", super()._transfer_thread, idx)

    def _generate_thread(self, idx: int) -> None:
        self._watched("generate", super()._generate_thread, idx)

    def _detokenize_thread(self, idx: int) -> None:
        self._watched("detokenize", super()._detokenize_thread, idx)

    def _watched(self, name: str, run: Callable[[int], None], idx: int) -> None:
        """Runs a thread's work and reports its end, unless that was asked for."""
        try:
            run(idx)
            reason = "it returned"
        except BaseException as error:
            if not self.live:
                return  # `stop` took away what it worked on
            log.error("thread died name=%s", name, exc_info=True)
            reason = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        if self.live:
            self.live = False  # HealthCheck says so from here on
            self._on_death(f"JetStream's {name} thread died: {reason}")
            self.fail_all()


class AdapterOrchestrator(orchestrator.LLMOrchestrator):
    """JetStream's servicer, whose requests are checked first and may name an adapter."""

    def __init__(self, driver: AdapterDriver, reader: Reader):
        super().__init__(driver=driver)
        self._reader = reader

    async def Decode(self, request: Any, context: Any = None) -> AsyncIterator[Any]:
        """Yields a DecodeResponse per step: the ids, and the text they complete where the client sent text.

        Ends with INVALID_ARGUMENT, NOT_FOUND (an adapter that is not served), RESOURCE_EXHAUSTED (too many wait), INTERNAL
        (the model overflowed) or UNAVAILABLE (the server stops), each with one sentence.
        """
        prompt = await self._prompt(request, context)
        text = IncrementalText(self._reader.tokenizer) if prompt.wants_text else None
        try:
            async with contextlib.aclosing(super().Decode(prompt, context)) as responses:
                async for response in responses:
                    (sample,) = response.stream_content.samples
                    if NOT_FINITE_ID in sample.token_ids:
                        await context.abort(grpc.StatusCode.INTERNAL, NOT_FINITE)
                    if text is not None:
                        sample.text = "".join(map(text.push, sample.token_ids))
                    yield response
            if text is not None and (rest := text.finish()):
                stream = pb2.DecodeResponse.StreamContent
                yield pb2.DecodeResponse(stream_content=stream(samples=[stream.Sample(text=rest)]))
        except Stopping:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the server is stopping; try again later")
        except concurrent.futures.CancelledError:
            pass  # the client is gone
        finally:
            self._driver.release(prompt)

    async def _prompt(self, request: Any, context: Any) -> Prompt:
        metadata = dict(context.invocation_metadata() or ())
        try:  # in a thread: a long text takes a while to tokenize
            return await asyncio.get_running_loop().run_in_executor(None, self._reader.read, request, metadata)
        except NotFound as error:
            code, details = grpc.StatusCode.NOT_FOUND, str(error)
        except InvalidRequest as error:
            code, details = grpc.StatusCode.INVALID_ARGUMENT, str(error)
        return await context.abort(code, details)

    def _get_prefill_content(self, request: Prompt) -> tuple[Prompt, bool]:
        return request, True  # True: answer with ids
