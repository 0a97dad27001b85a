"""python -m tests.chaos [--seed N] [--small] [--out DIR]: the disturbed day in full, about half an hour on two quiet cores."""

import argparse
import json
import random
import sys
import tempfile
from pathlib import Path

from tests.chaos import day


def main() -> int:
    """Returns 0 where everything held, else 1; prints the report."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos")
    parser.add_argument("--seed", type=int, default=random.randrange(1_000_000))
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    folder = options.out or Path(tempfile.mkdtemp(prefix="marlaas-chaos-"))
    chaos = day.SMALL if options.small else day.FULL
    report = day.run(chaos, options.seed, folder, lambda text: print(text, file=sys.stderr, flush=True))
    (folder / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))
    return 1 if report["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
