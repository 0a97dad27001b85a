"""What the commands share: options, and errors as one sentence."""

import contextlib
from collections.abc import Iterator
from typing import Annotated

import typer

from marlaas_jax.errors import InternalError, UserError

Json = Annotated[bool, typer.Option("--json", help="Print machine-readable JSON, one object per line.")]
Set = Annotated[
    list[str] | None, typer.Option("--set", help="Override a key: runtime.engine.num_decode_slots=64, jobs.NAME.steps=5.")
]


@contextlib.contextmanager
def one_sentence() -> Iterator[None]:
    """Turns what the caller can mend into one sentence and exit code 2."""
    try:
        yield
    except UserError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    except OSError as error:
        if error.filename is None:
            raise
        typer.echo(f"error: {error.filename}: {error.strerror}", err=True)
        raise typer.Exit(2) from None


@contextlib.contextmanager
def remote() -> Iterator[None]:
    """Does so too; what a service answers as its own fault is one sentence and exit code 1."""
    try:
        with one_sentence():
            yield
    except InternalError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
