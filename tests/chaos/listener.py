"""A client with an open stream, in a process of its own: python -m tests.chaos.listener URL KEY. It prints a line per event."""

import sys

from marlaas_jax import Client

if __name__ == "__main__":
    with Client(sys.argv[1], sys.argv[2], patience_s=600) as client:
        print("listening", flush=True)
        for event in client.events():
            print(event.seq, event.kind, flush=True)
