"""The client for scripts and notebooks: the same methods, blocking. It works inside a running event loop too."""

import asyncio
import functools
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, cast

from marlaas_jax.client.asynchronous import AsyncClient
from marlaas_jax.client.records import Event, Job

P = ParamSpec("P")
T = TypeVar("T")


class _Loop:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="marlaas-client", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Returns what the work does; an interrupt cancels it."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Ends the thread; a second call does nothing."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


def _blocking(
    method: Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate["Client", P], T]:
    @functools.wraps(method)
    def call(self: "Client", *args: P.args, **kwargs: P.kwargs) -> T:
        return self._loop.run(method(self._client, *args, **kwargs))

    return call


def _iterating(
    method: Callable[Concatenate[AsyncClient, P], AsyncIterator[T]],
) -> Callable[Concatenate["Client", P], Iterator[T]]:
    @functools.wraps(method)
    def call(self: "Client", *args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        source = cast(AsyncGenerator[T, None], method(self._client, *args, **kwargs))

        async def following() -> tuple[T, ...]:
            async for item in source:
                return (item,)
            return ()

        try:
            while found := self._loop.run(following()):
                yield found[0]
        finally:
            self._loop.run(source.aclose())

    return call


class Client:
    """Talks to a service; URL and key come from the arguments, else from MARLAAS_URL and MARLAAS_API_KEY.

    Requests that were not answered are sent again for at most `patience_s`. Exceptions are those of marlaas_jax.errors.
    """

    def __init__(self, url: str | None = None, api_key: str | None = None, *, patience_s: float = 30.0):
        self._client = AsyncClient(url, api_key, patience_s=patience_s)
        self._loop = _Loop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def url(self) -> str:
        """Where the service is."""
        return self._client.url

    def close(self) -> None:
        """Closes all connections."""
        self._loop.run(self._client.close())
        self._loop.close()

    submit = _blocking(AsyncClient.submit)
    quote = _blocking(AsyncClient.quote)
    jobs = _iterating(AsyncClient.jobs)
    job = _blocking(AsyncClient.job)
    why = _blocking(AsyncClient.why)
    env_workers = _blocking(AsyncClient.env_workers)
    pause = _blocking(AsyncClient.pause)
    resume = _blocking(AsyncClient.resume)
    cancel = _blocking(AsyncClient.cancel)
    rollback = _blocking(AsyncClient.rollback)
    clone = _blocking(AsyncClient.clone)
    delete = _blocking(AsyncClient.delete)
    submit_sweep = _blocking(AsyncClient.submit_sweep)
    sweeps = _blocking(AsyncClient.sweeps)
    sweep = _blocking(AsyncClient.sweep)
    cancel_sweep = _blocking(AsyncClient.cancel_sweep)
    events = _iterating(AsyncClient.events)
    metrics = _blocking(AsyncClient.metrics)
    episodes = _iterating(AsyncClient.episodes)
    evaluations = _blocking(AsyncClient.evaluations)
    checkpoints = _blocking(AsyncClient.checkpoints)
    download_adapter = _blocking(AsyncClient.download_adapter)
    usage = _blocking(AsyncClient.usage)
    fairness = _blocking(AsyncClient.fairness)
    models = _blocking(AsyncClient.models)
    complete = _blocking(AsyncClient.complete)
    chat = _blocking(AsyncClient.chat)
    stream_complete = _iterating(AsyncClient.stream_complete)
    stream_chat = _iterating(AsyncClient.stream_chat)
    tenants = _blocking(AsyncClient.tenants)
    create_tenant = _blocking(AsyncClient.create_tenant)
    change_tenant = _blocking(AsyncClient.change_tenant)
    create_key = _blocking(AsyncClient.create_key)
    revoke_key = _blocking(AsyncClient.revoke_key)

    def wait(self, job_id: str, on_event: Callable[[Event], object] | None = None) -> Job:
        """Returns the job once it is over; calls `on_event` with each of its events, in this thread."""
        for event in self.events(job_id):
            if on_event is not None:
                on_event(event)
        return self.job(job_id)
