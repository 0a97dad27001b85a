"""`marlaas jetstream-server` with the fake engine: a process of its own for tests."""

from marlaas_jax.cli import jetstream_server, main
from marlaas_jax.jetstream.prompts import Reader
from marlaas_jax.model import source
from marlaas_jax.text.tokenizer import Tokenizer
from tests.jetstream.fake_engine import FakeEngine


def load(model, sources, config):
    """Stands for the real one."""
    return FakeEngine(step_s=0.01), Reader(Tokenizer.load(source.resolve(model)), 128, 16, {})


if __name__ == "__main__":
    jetstream_server.load = load
    main.app(["jetstream-server", "--model", "tiny", "--port", "0", "--json"])
