"""The database's errors as this package's own: one sentence each, naming the file or the server."""

import contextlib
import json
import sqlite3
from collections.abc import Iterator

from sqlalchemy import exc

from marlaas_jax.errors import CorruptFile, InternalError, InvalidRequest, MarlaasError, StorageError
from marlaas_jax.store import backup

CORRUPT_SQLITE = ("SQLITE_CORRUPT", "SQLITE_NOTADB")
CORRUPT_POSTGRES = ("XX001", "XX002")  # data_corrupted, index_corrupted


@contextlib.contextmanager
def translated(place: str) -> Iterator[None]:
    """Lets no exception of SQLAlchemy or of a driver out; `place` is the file or the server's URL without its password."""
    try:
        yield
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise CorruptFile(f"{place}: is damaged (a value is not JSON in UTF-8); {backup.remedy(place)}") from None
    except (OverflowError, UnicodeEncodeError) as error:
        raise InvalidRequest(f"a value cannot be stored ({error})") from None
    except (exc.SQLAlchemyError, sqlite3.Error) as error:
        found = _translate(error, place)
        raise found from (error if isinstance(found, InternalError) else None)


def _translate(error: exc.SQLAlchemyError | sqlite3.Error, place: str) -> MarlaasError:
    original = error.orig if isinstance(error, exc.StatementError) and error.orig is not None else error
    reason = (str(original).splitlines() or [type(original).__name__])[0]
    code = getattr(original, "sqlite_errorname", None) or getattr(original, "sqlstate", None) or ""
    if "Could not decode to UTF-8" in reason:  # of sqlite3 itself, without a code; the rest of it is the damaged text
        return CorruptFile(f"{place}: is damaged (a value is not UTF-8); {backup.remedy(place)}")
    if code.startswith((*CORRUPT_SQLITE, *CORRUPT_POSTGRES)):
        return CorruptFile(f"{place}: is damaged ({reason}); {backup.remedy(place)}")
    if isinstance(error, exc.DataError):
        return InvalidRequest(f"a value cannot be stored ({reason})")
    if isinstance(error, exc.OperationalError | exc.TimeoutError | sqlite3.OperationalError) and code != "SQLITE_ERROR":
        return StorageError(f"{place}: cannot be used ({reason})")
    return InternalError(f"{place}: {type(original).__name__}: {reason}")
