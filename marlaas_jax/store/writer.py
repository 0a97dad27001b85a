"""The one thread that writes. What waits when it is free goes into one transaction, so a commit to disk serves many writes.

Each write of such a group runs in a savepoint: one that raises takes back only itself. Where the database itself ends the
transaction (a full disk, a lost connection), nothing of the group was kept, and its writes run again one by one. Only when a
server is lost during the commit itself may a write that failed with StorageError be there all the same.
"""

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import sqlalchemy as sa
from sqlalchemy import exc

from marlaas_jax.errors import InternalError
from marlaas_jax.store.failures import translated

MAX_GROUP = 256  # writes of one transaction


class _TransactionLost(Exception):
    """The database ended a transaction that held more than one write."""


class _Write:
    """A function to run and who waits for what it returns."""

    def __init__(self, function: Callable[[sa.Connection], Any]):
        self.future: Future[Any] = Future()
        self._function = function
        self._result: Any = None
        self._error: Exception | None = None

    def run_alone(self, connection: sa.Connection) -> None:
        self._error = None  # of a group that was lost
        self._result = self._function(connection)

    def run_in_group(self, connection: sa.Connection, place: str) -> None:
        try:
            with translated(place), _keeping_transaction(), connection.begin_nested():
                self._result = self._function(connection)
        except _TransactionLost:
            raise
        except Exception as error:
            self._error = error

    def resolve(self, error: Exception | None) -> None:
        """Tells the waiting side; `error` is why the transaction was not committed."""
        error = self._error or error
        if error is None:
            self.future.set_result(self._result)
        else:
            self.future.set_exception(error)


@contextlib.contextmanager
def _keeping_transaction() -> Iterator[None]:
    try:
        yield
    except (exc.IntegrityError, exc.DataError):  # a value's fault; the savepoint takes it back
        raise
    except exc.SQLAlchemyError:
        raise _TransactionLost from None


class Writer:
    """Runs writes in the order in which they were submitted."""

    def __init__(self, engine: sa.Engine, place: str):
        self._engine = engine
        self._place = place
        self._queue: queue.SimpleQueue[_Write | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # nothing is queued behind the None that ends the thread
        self.is_closed = False
        self._thread = threading.Thread(target=self._run, name="store-writer", daemon=True)
        self._thread.start()

    @property
    def num_waiting(self) -> int:
        """Writes that no transaction has taken up yet."""
        return self._queue.qsize()

    def submit(self, function: Callable[[sa.Connection], Any]) -> Future[Any]:
        """Queues a write; its future is done when the write is on disk or has failed."""
        write = _Write(function)
        with self._lock:
            if self.is_closed:
                raise InternalError(f"{self._place}: the store is closed")
            self._queue.put(write)
        return write.future

    def close(self) -> None:
        """Finishes what was submitted and ends the thread."""
        with self._lock:
            if not self.is_closed:
                self.is_closed = True
                self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (group := self._take()) is not None:
            group = [write for write in group if write.future.set_running_or_notify_cancel()]
            try:
                if group:
                    self._commit(group)
            except _TransactionLost:
                for write in group:
                    self._commit([write])

    def _take(self) -> list[_Write] | None:
        """Waits for a write and returns it with those behind it; None: closed and all done."""
        if (first := self._queue.get()) is None:
            return None
        group = [first]
        with contextlib.suppress(queue.Empty):
            while len(group) < MAX_GROUP:
                if (write := self._queue.get_nowait()) is None:
                    self._queue.put(None)
                    break
                group.append(write)
        return group

    def _commit(self, group: list[_Write]) -> None:
        failure = None
        try:
            with translated(self._place), self._engine.begin() as connection:
                if len(group) == 1:
                    group[0].run_alone(connection)
                else:
                    for write in group:
                        write.run_in_group(connection, self._place)
        except _TransactionLost:
            raise
        except Exception as error:
            failure = error
        for write in group:
            write.resolve(failure)
