"""What the rollout core needs to know about one job: a frozen copy of the parts of its configuration that it acts on."""

import dataclasses

from marlaas_jax.config import JobConfig
from marlaas_jax.messages import Sampling
from marlaas_jax.rollout.stopping import NEVER, StopSettings

ITEM_TIMEOUT_S = 60.0  # the data worker's answer to GetItem
RENDER_TIMEOUT_S = 60.0  # tokenizing one observation
GENERATE_TIMEOUT_S = 600.0  # no completion at all for the job, while it waits for some
TRAIN_TIMEOUT_S = 3600.0  # one batch, from the time the one before was done
EXACT_PRICE = (
    "isolation: exact costs decoding speed: beside seven jobs 1.1 times the time for all of them, with few rows alone 2 times; "
    "training 1.0 to 1.1 times (`tiny`, 32 decode slots, 2 CPU cores); `marlaas bench exact` measures it here"
)
CALL_GRACE_S = 5.0  # beyond an environment call's own limit: then the worker itself counts as hung


@dataclasses.dataclass(frozen=True)
class RolloutSettings:
    """One job's side of the rollouts."""

    name: str
    incarnation: int
    seed: int
    steps: int
    weight: float
    sampling: Sampling
    group_size: int
    groups_per_batch: int
    max_staleness: int
    max_turns: int
    max_attempts: int
    fail_when_exhausted: bool
    step_timeout_s: float
    episode_timeout_s: float
    normalize_std: bool
    max_context: int  # tokens of prompt and answer together
    eval_items: int
    eval_temperature: float
    eval_every_steps: int = 0  # 0: no evaluation in between
    stop: StopSettings = NEVER
    exact: bool = False  # what is sampled depends on nothing but the job
    retry_lost: bool = True  # a lost worker's episodes start again; False where the environment says "retry: never"

    @property
    def eval_sampling(self) -> Sampling:
        """Greedy (or at the evaluation's own temperature), from the whole distribution."""
        return Sampling(
            temperature=self.eval_temperature,
            max_tokens=self.sampling.max_tokens,
            stop=self.sampling.stop,
            stop_token_ids=self.sampling.stop_token_ids,
        )

    @classmethod
    def from_config(
        cls,
        job: JobConfig,
        *,
        incarnation: int,
        max_context: int,
        normalize_std: bool,
        eval_items: int,
        retry_lost: bool = True,
    ) -> "RolloutSettings":
        """Returns the settings of a job; `eval_items`: how many held-out items are evaluated."""
        return cls(
            name=job.name,
            incarnation=incarnation,
            seed=job.seed,
            steps=job.steps,
            weight=job.weight,
            sampling=Sampling(**job.sampling.model_dump()),
            group_size=job.rollout.group_size,
            groups_per_batch=job.rollout.groups_per_batch,
            max_staleness=job.rollout.max_staleness,
            max_turns=job.rollout.max_turns,
            max_attempts=job.rollout.max_attempts,
            fail_when_exhausted=job.rollout.on_exhausted == "fail",
            step_timeout_s=job.rollout.step_timeout_s,
            episode_timeout_s=job.rollout.episode_timeout_s,
            normalize_std=normalize_std,
            max_context=max_context,
            eval_items=eval_items,
            eval_temperature=job.eval.temperature,
            exact=job.isolation == "exact",
            eval_every_steps=job.eval.every_steps,
            stop=StopSettings(**job.stop.model_dump()),
            retry_lost=retry_lost,
        )
