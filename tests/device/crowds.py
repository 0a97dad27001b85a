"""One job that samples and trains beside random others on one sampler and one learner: what it gets, bit for bit.

Everything that a service varies is drawn: who else is there and when they come and go, how many rows and tokens they ask for,
how they are sampled, their groups and blocks, which stage runs next, and so which slots, adapters and places in a micro-batch
are left. Learner and bank have fewer slots than there are jobs, so jobs and snapshots are paged.
"""

import dataclasses
import itertools
from typing import Any

import jax
import numpy as np

from marlaas_jax.config import JobConfig
from marlaas_jax.engine.engine import EngineSettings
from marlaas_jax.engine.sampler import Sampler
from marlaas_jax.learner.buckets import LearnerSizes, update_buckets
from marlaas_jax.learner.learner import Learner
from marlaas_jax.lora.adapter import AdapterSpec
from marlaas_jax.messages import Generate, Generated, Sampling, StepDone, TrainBatch, TrainGroup, TrainRow
from marlaas_jax.model import transformer
from marlaas_jax.model.config import ModelConfig
from marlaas_jax.rl.packing import BlockShape

MAX_RANK = 4
TARGETS = ("q", "k", "v", "o", "gate", "up", "down")
ME = "me"


class _Letters:
    """Token 0 ends a text; others are letters."""

    end_ids = (0,)

    def decode(self, ids: Any) -> str:
        return "".join(chr(97 + i % 26) for i in ids)


@dataclasses.dataclass
class _Member:
    """A job of the crowd, or the one that is watched."""

    config: JobConfig
    prompts: list[tuple[int, ...]]
    steps: int
    starts_at: int  # in turns of the two stages
    leaves_at: int = 1 << 30
    step: int = 0
    answers: dict[tuple[str, int], Generated] = dataclasses.field(default_factory=dict)
    is_open: bool = False


class Machine:
    """A sampler and a learner on one base model."""

    def __init__(
        self, model: ModelConfig, num_slots: int, max_context: int, params: Any = None, few: bool = False, **engine: Any
    ):
        """`params` None: random. `few` programs: one length for each purpose, because each takes time to compile."""
        if params is None:
            params = transformer.init_params(model)
        if few:
            engine = {"context_buckets": (max_context,), "prefill_buckets": (max_context,)}
        self.model, self.max_context = model, max_context
        ticks = itertools.count()
        clock = lambda: next(ticks) * 1e-3
        settings = EngineSettings(num_slots, max_context, 5, MAX_RANK, decode_steps=4, prefill_batch=3, **engine)
        letters: Any = _Letters()
        self.sampler = Sampler(model, params, settings, letters, clock)
        quarter = max_context // 4
        shapes = (BlockShape(quarter, 8, 4, 3), BlockShape(3 * quarter, quarter, 4, 2))
        shapes, updates = (shapes[1:], (1, 2)) if few else (shapes, update_buckets(model, MAX_RANK))
        sizes = LearnerSizes(shapes, BlockShape(16, 1, 1, 1), 16, 2, updates, 0.05)
        self.learner = Learner(model, params, sizes, num_slots=4, max_rank=MAX_RANK, clock=clock)

    def run(self, crowd_seed: int | None, isolation: str = "exact", **sampling: Any) -> dict[str, bytes]:
        """Returns what the watched job got: ids, log-probs and weights of all its steps. None: it is alone."""
        rng = np.random.default_rng(crowd_seed)
        me = self._me(isolation, sampling)
        members = [me] if crowd_seed is None else [me, *(self._other(rng, i) for i in range(rng.integers(1, 6)))]
        if crowd_seed is not None:
            rng.shuffle(members)
        got: dict[str, bytes] = {}
        for turn in itertools.count():
            assert turn < 20_000, "the watched job does not end"
            for member in members:
                if turn >= member.leaves_at and member.is_open:
                    self._close(member)
                elif turn == member.starts_at:
                    self._open(member)
            self._turn(rng, members, got)
            if me.step == me.steps:
                break
        for member in members:
            if member.is_open:
                self._close(member)
        while self.sampler.has_work():
            self.sampler.step()
        return got

    # ---- inside

    def _me(self, isolation: str, sampling: dict[str, Any]) -> _Member:
        rng = np.random.default_rng(7)
        lengths = (3, self.max_context // 3)
        return _Member(self._config(ME, 1, isolation, 4, sampling), [self._prompt(rng, n) for n in lengths], 2, starts_at=0)

    def _other(self, rng: np.random.Generator, i: int) -> _Member:
        sampling = {
            "max_tokens": int(rng.integers(1, self.max_context // 4)),
            "temperature": float(rng.choice([0.0, 0.6, 1.0])),
            "top_p": float(rng.choice([0.8, 1.0])),
            "top_k": int(rng.choice([0, 0, 5])),
        }
        config = self._config(
            f"other{i}", 100 + i, str(rng.choice(["shared", "shared", "exact"])), int(rng.integers(1, 9)), sampling
        )
        prompts = [self._prompt(rng, int(rng.integers(1, 3 * self.max_context // 4))) for _ in range(rng.integers(1, 3))]
        starts_at = int(rng.integers(0, 12))
        leaves_at = starts_at + int(rng.integers(2, 30)) if rng.random() < 0.3 else 1 << 30
        return _Member(config, prompts, 1000, starts_at, leaves_at)

    def _config(self, name: str, seed: int, isolation: str, group_size: int, sampling: dict[str, Any]) -> JobConfig:
        document = {
            "name": name, "env": "none", "seed": seed, "isolation": isolation, "sampling": {"max_tokens": 8} | sampling,
            "optimizer": {"learning_rate": 0.02}, "rollout": {"group_size": group_size, "max_staleness": 0},
        }  # fmt: skip
        return JobConfig.model_validate(document)

    def _prompt(self, rng: np.random.Generator, length: int) -> tuple[int, ...]:
        return tuple(int(t) for t in rng.integers(1, self.model.vocab_size, max(length, 1)))

    def _open(self, member: _Member) -> None:
        config = member.config
        self.learner.add_job(config.name, 0, config, AdapterSpec(MAX_RANK, 8.0, TARGETS, config.seed))
        self.sampler.publish(self.learner.snapshot(config.name))
        member.is_open = True
        self._ask(member)

    def _close(self, member: _Member) -> None:
        self.learner.remove_job(member.config.name)
        self.sampler.forget(member.config.name)
        member.is_open = False

    def _ask(self, member: _Member) -> None:
        config = member.config
        member.answers.clear()
        for i, prompt in enumerate(member.prompts):
            seeds = tuple(1000 * member.step + 10 * i + sample for sample in range(config.rollout.group_size))
            sampling = Sampling(**config.sampling.model_dump())
            exact = config.isolation == "exact"
            name = f"{config.name}/{i}/{member.step}"
            self.sampler.submit(Generate(name, config.name, 0, prompt, seeds, sampling, exact=exact))

    def _turn(self, rng: np.random.Generator, members: list[_Member], got: dict[str, bytes]) -> None:
        stages = [stage for stage in (self.sampler, self.learner) if stage.has_work()]
        for message in stages[int(rng.integers(len(stages)))].step() if stages else []:
            member = next((m for m in members if m.config.name == message.job and m.is_open), None)
            if member is None:
                continue
            if isinstance(message, Generated):
                assert not message.error, message.error
                member.answers[message.request_id, message.sample] = message
                if len(member.answers) == len(member.prompts) * member.config.rollout.group_size:
                    self.learner.submit(self._batch(member, got))
            else:
                assert isinstance(message, StepDone), message
                self._stepped(member, message, got)

    def _batch(self, member: _Member, got: dict[str, bytes]) -> TrainBatch:
        """Returns the batch of a step that has been sampled; what stands in it decides the advantages."""
        groups = []
        for i, prompt in enumerate(member.prompts):
            rows = []
            for sample in range(member.config.rollout.group_size):
                answer = member.answers[f"{member.config.name}/{i}/{member.step}", sample]
                if member.config.name == ME:
                    got[f"ids {member.step}/{i}/{sample}"] = np.asarray(answer.token_ids, np.int32).tobytes()
                    got[f"logprobs {member.step}/{i}/{sample}"] = answer.logprobs + answer.sampled_logprobs
                count = len(answer.token_ids)
                versions = np.full(count, answer.version, "<i4").tobytes()
                advantage = (sum(answer.token_ids) % 7 - 3) / 2
                rows.append(TrainRow(answer.token_ids, b"\1" * count, answer.logprobs, versions, advantage))
            groups.append(TrainGroup(i, 0, prompt, tuple(rows)))
        return TrainBatch(member.config.name, 0, member.step, tuple(groups), b"", 0.0)

    def _stepped(self, member: _Member, done: StepDone, got: dict[str, bytes]) -> None:
        name = member.config.name
        snapshot = self.learner.snapshot(name)
        if name == ME:
            arrays = jax.tree.leaves(self.learner.state(name)["arrays"])
            got[f"update {member.step}"] = b"".join(np.asarray(x).tobytes() for x in arrays)
            got[f"published {member.step}"] = snapshot.fingerprint.encode()
            figures = {key: value for key, value in done.metrics.items() if not key.endswith("_s")}
            got[f"metrics {member.step}"] = repr(sorted(figures.items())).encode()
        self.sampler.publish(snapshot)
        member.step += 1
        if member.step < member.steps:
            self._ask(member)


def differing(alone: dict[str, bytes], crowded: dict[str, bytes]) -> set[str]:
    """Returns the kinds of what differs: "ids", "logprobs", "update", "published", "metrics"."""
    assert alone.keys() == crowded.keys()
    return {key.split()[0] for key in alone if alone[key] != crowded[key]}
