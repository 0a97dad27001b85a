"""What can be known of a job's environment and items without running a user's code; for `--check` and for a service."""

import ast
from collections.abc import Callable, Sequence
from pathlib import Path

from marlaas_envs import registry
from marlaas_jax.config import JobConfig
from marlaas_jax.data.splits import open_splits
from marlaas_jax.errors import InvalidConfig, NotFound, UserError


def check_environment(job: JobConfig, check_followups: Callable[[Sequence[str]], None] = lambda roles: None) -> None:
    """Raises a UserError or EnvLookupError for an environment that cannot be; a user's file is read, not run.

    `check_followups` raises a UserError for roles of messages that the model's template cannot append.
    """
    path, _, attribute = job.env.rpartition(":")
    if path.endswith(".py"):
        _check_file(job, Path(path), attribute)
    elif (family_name := job.env.partition(":")[0]) in registry.BUILT_IN:
        env = registry.make(registry.load(job.env), job.env, job.env_args)
        if roles := getattr(env, "reply_roles", ()):
            try:
                check_followups(roles)
            except UserError as error:
                raise InvalidConfig(f"env={job.env!r} answers in turns of the role {'/'.join(roles)}, but {error}") from None
    elif family_name not in registry.names():
        registry.load(job.env)  # raises, naming those that there are


def _check_file(job: JobConfig, path: Path, attribute: str) -> None:
    """A user's file, by its syntax tree: the name is defined, and there are items."""
    if not path.is_file():
        raise NotFound(f"env={job.env!r}: no such file")
    try:
        tree = ast.parse(path.read_bytes(), str(path))
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        raise InvalidConfig(f"env={job.env!r}: the file is not Python ({getattr(error, 'msg', error)}, line {line})") from None
    names = _defined(tree.body)
    if "*" in names:
        return
    if attribute not in names:
        public = ", ".join(name for name in names if not name.startswith("_")) or "none"
        raise InvalidConfig(f"env={job.env!r}: the file defines no {attribute!r}; it defines {public}")
    if job.data is None and "ITEMS" not in names and not isinstance(names[attribute], ast.ClassDef | ast.Assign | ast.alias):
        raise InvalidConfig(f"env={job.env!r}: it has no items; give `data.source`, or a list ITEMS in the file")


def _defined(body: list[ast.stmt]) -> dict[str, ast.AST]:
    """Returns the names that a module's statements bind, with what binds them; "*": a star import, so there may be others."""
    names: dict[str, ast.AST] = {}
    for statement in body:
        match statement:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names[statement.name] = statement
            case ast.Import() | ast.ImportFrom():
                names |= {(alias.asname or alias.name).partition(".")[0]: alias for alias in statement.names}
            case ast.Assign() | ast.AnnAssign() | ast.AugAssign():
                targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
                found = [node for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)]
                names |= {node.id: statement for node in found}
            case _:  # if, try, with, for: what is bound inside is bound outside
                for field in ("body", "orelse", "handlers", "finalbody"):
                    for inner in getattr(statement, field, []):
                        names |= _defined(inner.body if isinstance(inner, ast.ExceptHandler) else [inner])
    return names


def check_items(job: JobConfig) -> None:
    """Raises likewise where there are no items: tries the first of the job's files, or of a built-in environment."""
    if job.data is not None:
        open_splits(job.data)
    elif not job.env.rpartition(":")[0].endswith(".py") and job.env.partition(":")[0] in registry.BUILT_IN:
        family = registry.load(job.env)
        for split in ("train", "eval"):
            items = registry.dataset(family, job.env, split, job.seed, job.env_args)
            if not len(items):
                raise InvalidConfig(f"env={job.env!r}: there is no {split} item")
            items[0]
