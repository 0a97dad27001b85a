"""`python -m marlaas_jax.tiny`: makes the small model that ships with the package, or checks that it can be made again."""

import argparse
import hashlib
import importlib.metadata
import json
import sys
import tempfile
import time
from pathlib import Path

from marlaas_jax.tiny import folder, train

SHIPPED = Path(__file__).parent.parent / "assets" / "tiny"
TOLERANCE = 0.05


def make(out: Path, seed: int) -> dict:
    """Trains and writes the whole model folder; returns the content of its scores.json."""
    started = time.process_time()
    params = train.train(seed, _report)
    scores = train.score(params)
    _report(train.summary(scores))
    folder.write(out, params)
    return record(out, scores, seed, round(time.process_time() - started))


def record(out: Path, scores: dict[str, train.Score], seed: int, cpu_s: int) -> dict:
    """Writes and returns scores.json: what the weights are and what they can do."""
    weights = out / "model.safetensors"
    document = {
        "sha256": hashlib.sha256(weights.read_bytes()).hexdigest(),
        "seed": seed,
        "cpu_s": cpu_s,
        "versions": {name: importlib.metadata.version(name) for name in ("jax", "optax", "numpy")},
        "num_items": train.NUM_SCORED,
        "sampled": {task: score.sampled for task, score in scores.items()},
        "greedy": {task: score.greedy for task, score in scores.items()},
    }
    (out / "scores.json").write_text(json.dumps(document, indent=2) + "\n")
    _report(f"wrote {out}: {weights.stat().st_size / 1e6:.2f} MB, sha256 {document['sha256']}, {cpu_s} CPU s")
    return document


def differences(new: dict, shipped: dict) -> list[str]:
    """Returns what differs by more than the tolerance: each task's sampled score and the mean of both kinds.

    A task's greedy score may jump where two answers are about equally likely, so only its mean is compared.
    """
    pairs = [(f"{task} sampled", new["sampled"].get(task), score) for task, score in shipped["sampled"].items()]
    for kind in ("sampled", "greedy"):
        pairs.append((f"mean {kind}", _mean(new[kind]), _mean(shipped[kind])))
    return [f"{name}: {one} against {other}" for name, one, other in pairs if one is None or abs(one - other) > TOLERANCE]


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m marlaas_jax.tiny", description=__doc__)
    parser.add_argument("--out", type=Path, help="folder to write (default: ./tiny; with --check a temporary one)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--check", action="store_true", help="compare the new scores with the shipped ones; exit 1 if they differ"
    )
    options = parser.parse_args(arguments)
    if not options.check:
        make(options.out or Path("tiny"), options.seed)
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        new = make(options.out or Path(temporary), options.seed)
    shipped = json.loads((SHIPPED / "scores.json").read_text())
    wrong = differences(new, shipped)
    for line in wrong:
        _report(f"differs by more than {TOLERANCE}: {line}")
    if not wrong:
        _report(f"all scores within {TOLERANCE} of the shipped model's; same file: {new['sha256'] == shipped['sha256']}")
    return 1 if wrong else 0


def _mean(scores: dict[str, float]) -> float:
    return sum(scores.values()) / len(scores)


def _report(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
