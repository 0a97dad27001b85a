"""What makes an environment or data worker one of a tenant's own, elsewhere: its key, and the one environment it runs.

A job's `env: remote:NAME` means the environment that the job's owner runs under that name. Such a worker loads what its own
command line names and nothing else, whatever the service asks for.
"""

import argparse
import os
import re
from dataclasses import dataclass

from marlaas_jax.transport.client import Client

REMOTE = "remote:"  # begins the `env` of a job
REMOTE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
KEY_VARIABLE = "MARLAAS_API_KEY"
CONNECT_TIMEOUT_S = 15.0


@dataclass(frozen=True)
class Remote:
    """A worker's own environment and how it joins."""

    name: str
    env: str  # as in a job file: path/to/file.py:function, or a family
    api_key: str
    server_key: str  # the service's public CURVE key, in Z85

    @classmethod
    def of(cls, options: argparse.Namespace) -> "Remote | None":
        """Returns it from the options of `add_options`; None for a worker of the controller's own."""
        if options.name is None:
            return None
        return cls(options.name, options.env, os.environ.pop(KEY_VARIABLE, ""), options.server_key)

    def env_for(self, asked: str) -> str:
        """Returns the environment to load for a job's `env`; one that cannot be found, where it is not this worker's."""
        return self.env if asked == f"{REMOTE}{self.name}" else _REFUSED


_REFUSED = "refused: this worker runs its own environment only"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options by which `marlaas env-worker` starts a worker; the API key is in the environment."""
    parser.add_argument("--name", default=None, help="of the environment, as in `env: remote:NAME`")
    parser.add_argument("--env", default="", help="what it is here, as in a job file")
    parser.add_argument("--server-key", default="", help="the service's public key")


def connect(address: str, role: str, worker_id: str | None, remote: Remote | None) -> Client:
    """Returns a connection. Raises ProtocolMismatch or WorkerLost."""
    if remote is None:
        return Client(address, role, worker_id)
    info = {"api_key": remote.api_key, "environment": remote.name}
    key = remote.server_key.encode()
    return Client(address, role, worker_id, info, server_key=key, connect_timeout_s=CONNECT_TIMEOUT_S)
