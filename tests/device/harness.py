"""A colocated device on a small random model, without processes: messages in, messages out."""

import itertools

import jax
import numpy as np
import pytest

from marlaas_jax.config import RunConfig, validate
from marlaas_jax.device.build import engine_settings
from marlaas_jax.device.colocated import ColocatedDevice
from marlaas_jax.device.pages import Pages
from marlaas_jax.engine.sampler import Sampler
from marlaas_jax.learner.learner import Learner
from marlaas_jax.lora.readme import Base
from marlaas_jax.messages import AddJob, Generate, Generated, JobFailed, Sampling, StepDone, TrainBatch, TrainGroup, TrainRow
from marlaas_jax.model import source, transformer
from marlaas_jax.model.config import ModelConfig
from marlaas_jax.text.tokenizer import Tokenizer

MODEL = ModelConfig(
    architecture="llama",
    num_layers=2,
    model_dim=32,
    num_query_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_dim=48,
    vocab_size=128,
    rope_theta=10000.0,
    norm_eps=1e-5,
    max_position=64,
    tied_embeddings=True,
)
IDENTITY = {part: part for part in ("name", "weights", "config", "tokenizer", "template")}
BASE = Base("tiny", source.TINY)
CANARY = list(range(20, 32))


def run_config(num_jobs: int, **job) -> RunConfig:
    """Returns a run of equal jobs named a, b, c ..."""
    shared = {"env": "none", "lora": {"rank": 4}, "optimizer": {"learning_rate": 0.05}, "sampling": {"max_tokens": 6}} | job
    runtime = {
        "model": "tiny",
        "engine": {"num_decode_slots": 8, "max_context": 32, "context_buckets": [32], "prefill_buckets": [16]},
        "bank": {"max_rank": 4},
        "learner": {"prompt_buckets": [16], "suffix_buckets": [16], "block_rows": 4},
    }
    return validate(RunConfig, {"runtime": runtime, "jobs": [{"name": name} | shared for name in "abcdef"[:num_jobs]]})


class Harness:
    """A device and a deterministic stand-in for the controller."""

    def __init__(self, tmp_path, config: RunConfig, **options):
        params = transformer.init_params(MODEL)
        ticks = itertools.count()
        clock = lambda: next(ticks) * 1e-3
        tokenizer = Tokenizer.load(source.resolve("tiny"))
        self.config, self.tmp_path = config, tmp_path
        runtime = config.runtime.sized_for(config.jobs)
        self.sampler = Sampler(MODEL, params, engine_settings(runtime, "float32"), tokenizer, clock)
        shelf = Pages(tmp_path / "pages", runtime.learner.max_host_bytes)
        self.learner = Learner.from_runtime(MODEL, params, runtime, clock=clock, sampler_dtype="float32", shelf=shelf)
        self.device = ColocatedDevice(
            MODEL, self.sampler, self.learner, IDENTITY, BASE, CANARY, "float32", config.runtime.bank.max_rank, clock, **options
        )

    def add(self, name: str, incarnation: int = 0, resume: bool = False):
        """Opens a job; returns the answers."""
        job = next(job for job in self.config.jobs if job.name == name)
        return self.device.handle(
            AddJob(name, incarnation, job.model_dump_json().encode(), str(self.tmp_path / name), resume=resume)
        )

    def drain(self):
        """Runs dispatches until nothing is left; returns all answers."""
        out = []
        while self.device.has_work():
            out += self.device.step()
        return out

    def batch(self, name: str, step: int, incarnation: int = 0, seed: int = 0) -> TrainBatch:
        """Samples one group of four and makes a batch of it; rewards are random."""
        prompt = (5, 9, 13)
        request = f"{name}/{incarnation}/{step}"
        seeds = tuple(1000 * seed + 10 * step + i for i in range(4))
        self.device.handle(Generate(request, name, incarnation, prompt, seeds, Sampling(max_tokens=6)))
        answers = sorted((a for a in self.drain() if isinstance(a, Generated)), key=lambda a: a.sample)
        assert len(answers) == 4 and all(a.token_ids for a in answers), [a.error for a in answers]
        rng = np.random.default_rng(seed + step)
        rows = tuple(
            TrainRow(
                token_ids=a.token_ids,
                loss_mask=np.ones(len(a.token_ids), np.uint8).tobytes(),
                logprobs=a.logprobs,
                versions=np.full(len(a.token_ids), a.version, np.int32).tobytes(),
                advantage=float(rng.standard_normal()),
            )
            for a in answers
        )
        return TrainBatch(name, incarnation, step, (TrainGroup(step, 0, prompt, rows),), b"ledger %d" % (step + 1), 0.5)

    def train(self, name: str, step: int, incarnation: int = 0, seed: int = 0):
        """Trains one batch; returns the answers."""
        return self.device.handle(self.batch(name, step, incarnation, seed)) + self.drain()

    def weights(self, name: str) -> list[np.ndarray]:
        """Returns the job's masters as flat arrays."""
        return [np.asarray(x) for x in jax.tree.leaves(self.learner.weights(name))]


@pytest.fixture
def make(tmp_path):
    """Returns Harness bound to the test's folder."""
    return lambda config, **options: Harness(tmp_path, config, **options)


def failures(answers):
    """Returns (job, kind, reason) of the jobs that failed."""
    return [(a.job, a.kind, a.reason) for a in answers if isinstance(a, JobFailed)]


def steps_done(answers):
    """Returns the batches that were trained."""
    return [a for a in answers if isinstance(a, StepDone)]
