"""The store: what the service must still know after any crash, in SQLite or Postgres.

A write or a read is a plain function of a Connection and its arguments, run in one transaction; the modules beside this one
hold them by subject. One thread writes. Reads go through a few connections of their own and see what is committed.
"""

import asyncio
import contextlib
import functools
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Concatenate, ParamSpec, Self, TypeVar

import sqlalchemy as sa

from marlaas_jax.errors import InternalError, StorageError
from marlaas_jax.store.connections import NUM_READERS, Database, connect
from marlaas_jax.store.failures import translated
from marlaas_jax.store.writer import Writer

ANSWER_S = 60.0  # of a disk that stands still
P = ParamSpec("P")
T = TypeVar("T")


class Store:
    """An open database. All methods may be called from any thread; exceptions are those of marlaas_jax.errors."""

    def __init__(self, database: Database):
        self._database = database
        self._writer = Writer(database.writing, database.place)
        self._readers = ThreadPoolExecutor(NUM_READERS, thread_name_prefix="store-reader")

    @classmethod
    def open(cls, url: str) -> Self:
        """Opens `sqlite:///PATH` or `postgresql://...`. Raises InvalidConfig, CorruptFile or StorageError."""
        return cls(connect(url))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def place(self) -> str:
        """The file, or the server's URL without its password."""
        return self._database.place

    @property
    def num_waiting_writes(self) -> int:
        """Writes that no transaction has taken up yet."""
        return self._writer.num_waiting

    def write(self, function: Callable[Concatenate[sa.Connection, P], T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Queues `function(connection, ...)`; the future is done when its writes are durable, or with what it raised.

        The function may run twice, the first time without effect: it must do nothing but work on the connection.
        """
        return self._writer.submit(lambda connection: function(connection, *args, **kwargs))

    def read(self, function: Callable[Concatenate[sa.Connection, P], T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Returns `function(connection, ...)`, which sees one committed state and may not write."""
        if self._writer.is_closed:
            raise InternalError(f"{self.place}: the store is closed")
        with translated(self.place), self._database.reading.begin() as connection:
            return function(connection, *args, **kwargs)

    async def awrite(self, function: Callable[Concatenate[sa.Connection, P], T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Does as `write` and waits; a cancelled caller takes back only what no transaction has taken up.

        Raises StorageError after ANSWER_S: then the write may or may not happen.
        """
        with self._answering():
            async with asyncio.timeout(ANSWER_S):
                return await asyncio.wrap_future(self.write(function, *args, **kwargs))

    async def aread(self, function: Callable[Concatenate[sa.Connection, P], T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Does as `read`, in a thread; raises StorageError after ANSWER_S."""
        call = functools.partial(self.read, function, *args, **kwargs)
        with self._answering():
            async with asyncio.timeout(ANSWER_S):
                return await asyncio.get_running_loop().run_in_executor(self._readers, call)

    @contextlib.contextmanager
    def _answering(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError:
            raise StorageError(f"{self.place}: did not answer within {ANSWER_S:.0f} s") from None

    def close(self) -> None:
        """Finishes the writes and reads under way and closes the database; a second call does nothing."""
        self._writer.close()
        self._readers.shutdown()
        self._database.close()
