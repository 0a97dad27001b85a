"""`marlaas env-worker`: a tenant's own environment, run here, for jobs that train elsewhere. It goes and comes as it likes."""

import ast
import asyncio
import re
import signal
from pathlib import Path

import typer

from marlaas_envs import registry
from marlaas_jax.client.blocking import Client
from marlaas_jax.errors import InvalidConfig, NotAllowed, NotFound, short
from marlaas_jax.workers.remote_worker import KEY_VARIABLE, REMOTE, REMOTE_NAME
from marlaas_jax.workers.supervisor import EXIT_BAD_CONFIG, Exited, GaveUp, Supervisor, WorkerSpec

ENDLESS = 1_000_000_000
_KEY_CHARACTERS = 40  # of a CURVE key in Z85


def run(connect: str | None, key: str | None, server_key: str | None, url: str | None, env: str, name: str | None) -> int:
    """Serves one environment until it is interrupted; returns the exit code. Raises a UserError for a bad start."""
    env = _resolved(env)
    name = name or re.sub(r"[^A-Za-z0-9._-]", "-", Path(env.rpartition(":")[0] or env).stem)
    if not REMOTE_NAME.fullmatch(name):
        raise InvalidConfig(f"--name={short(name)}: must be 1 to 64 letters, digits, dots, dashes and underscores")
    if not key:
        raise NotAllowed(f"no API key: give --key or set {KEY_VARIABLE}")
    if connect is None or server_key is None:
        with Client(url, key) as client:
            told = client.env_workers()
        connect, server_key = str(connect or told["address"]), str(server_key or told["server_key"])
    if not re.fullmatch(r"tcp://[^/]+:\d+", connect):
        raise InvalidConfig(f"--connect={short(connect)}: must read tcp://HOST:PORT")
    if len(server_key) != _KEY_CHARACTERS:
        raise InvalidConfig(f"--server-key: must be the service's public key, {_KEY_CHARACTERS} characters")
    return asyncio.run(_serve(connect, key, server_key, env, name))


async def _serve(connect: str, key: str, server_key: str, env: str, name: str) -> int:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    arguments = ("--address", connect, "--server-key", server_key, "--name", name, "--env", env)
    async with Supervisor() as supervisor:
        for role in ("env", "data"):
            spec = WorkerSpec(
                f"remote-{role}", f"marlaas_jax.workers.{role}_worker", arguments, {KEY_VARIABLE: key}, max_restarts=ENDLESS
            )
            supervisor.start(spec)
        typer.echo(f"runs {env} for jobs with `env: {REMOTE}{name}` at {connect}; Ctrl-C ends it")
        stopping = asyncio.create_task(stop.wait())
        while not stop.is_set():
            telling = asyncio.create_task(supervisor.next_event())
            await asyncio.wait([telling, stopping], return_when=asyncio.FIRST_COMPLETED)
            if not telling.done():
                telling.cancel()
                break
            match telling.result():
                case Exited() as ended:
                    last = (ended.log_tail.strip().splitlines() or [ended.reason])[-1]
                    reason = last.partition("cannot join: ")[2] or last
                    if ended.code == EXIT_BAD_CONFIG:
                        raise NotAllowed(reason)
                    typer.echo(f"{ended.reason}: {reason}; trying again", err=True)
                case GaveUp() as given_up:
                    raise NotFound(given_up.reason)
        stopping.cancel()
    return 0


def _resolved(env: str) -> str:
    """Returns the environment with its file's path absolute and its object named. Raises a UserError, one sentence."""
    path_text, _, attribute = env.rpartition(":")
    if env.endswith(".py"):
        path_text, attribute = env, ""
    if not path_text.endswith(".py"):
        if env.partition(":")[0] not in registry.names():
            names = ", ".join(registry.names())
            raise NotFound(f"{short(env)}: no such environment; there are {names}, and path/to/file.py:function")
        return env
    path = Path(path_text).resolve()
    if not path.is_file():
        raise NotFound(f"{path_text}: no such file")
    try:
        body = ast.parse(path.read_bytes(), str(path)).body
    except (SyntaxError, ValueError) as error:
        raise InvalidConfig(f"{path_text}: the file is not Python ({error})") from None
    if not attribute:
        defined = [node.name for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)]
        public = [found for found in defined if not found.startswith("_")]
        if len(public) != 1:
            having = ", ".join(public) or "none"
            raise InvalidConfig(f"{path_text}: name one of its objects, as in {path_text}:reward; it has {having}")
        attribute = public[0]
    return f"{path}:{attribute}"
