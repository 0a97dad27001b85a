"""`marlaas serve` with a fake device: python -m tests.service.serve_fake SERVICE.YAML"""

import sys
from pathlib import Path

from marlaas_jax.cli import serve
from marlaas_jax.cli.options import one_sentence

if __name__ == "__main__":
    with one_sentence():
        serve.run(Path(sys.argv[1]), sys.argv[3::2], json=True, device_module="tests.workers.fakes")
