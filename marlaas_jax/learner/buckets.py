"""The learner's fixed sizes: which shapes its micro-batches may have, chosen once, so that after warm-up nothing compiles."""

import dataclasses
from collections.abc import Sequence

from marlaas_jax.config import LearnerSection
from marlaas_jax.errors import InvalidConfig
from marlaas_jax.model.config import ModelConfig
from marlaas_jax.rl.packing import BlockShape

MAX_PROGRAMS = 24
UPDATE_BUCKETS = (1, 2, 4, 8)
# embed, head, score_head, finish, place, published, extract, fingerprint, forward of the probe
FIXED_PROGRAMS = 9
MAX_SHAPES = (MAX_PROGRAMS - FIXED_PROGRAMS - len(UPDATE_BUCKETS)) // 2  # forward and backward of each
PROBE_TOKENS = 16
UPDATE_BYTES = 16 << 20  # weights, moments and gradients of one update should stay in the last-level cache on CPU


@dataclasses.dataclass(frozen=True)
class LearnerSizes:
    """Everything that a compiled program of the learner depends on, the model and the bank aside."""

    shapes: tuple[BlockShape, ...]
    probe: BlockShape  # forward only: short sequences that are scored, such as the canary
    head_chunk: int  # loss positions per vocabulary projection
    layers_per_program: int
    update_buckets: tuple[int, ...]
    max_dispatch_s: float

    @property
    def capacity(self) -> int:
        """N: tokens of a flat micro-batch."""
        return max(shape.num_tokens for shape in (*self.shapes, self.probe))

    @property
    def num_rows(self) -> int:
        """B: rows of a micro-batch."""
        return max(shape.rows * shape.blocks for shape in self.shapes)

    @property
    def num_suffix(self) -> int:
        """T: positions of the longest suffix."""
        return max(shape.suffix for shape in self.shapes)

    @property
    def num_programs(self) -> int:
        """Programs that `warmup` compiles."""
        return FIXED_PROGRAMS + len(self.update_buckets) + 2 * len(self.shapes)


def bucket_pairs(max_context: int, prompts: Sequence[int], suffixes: Sequence[int]) -> list[tuple[int, int]]:
    """Returns (prompt, suffix) lengths that together hold every row of at most `max_context` tokens.

    A prompt bucket holds a prompt without its last token. Without buckets given, five that suit short prompts and answers; to
    given ones a last pair is added where they leave a part of the context out.
    """
    if not prompts and not suffixes:
        quarter, short = max(max_context // 4, 8), max(max_context // 16, 8)
        # Every prompt and suffix that fit the context together fit one of these; measured on 45-token prompts in a context of
        # 128, padding them to 128 instead of 48 made a job's batches cost four times as much.
        usual, most = max(3 * max_context // 8, 8), max(3 * max_context // 4, 8)
        return [(usual, short), (usual, quarter), (quarter, max_context), (most, quarter), (max_context, most)]
    prompts = sorted(set(prompts)) or [max(max_context // 4, 8), max_context]
    suffixes = sorted(set(suffixes)) or [max(max_context // 8, 8), max_context]
    smaller = lambda values, value: max((v for v in values if v < value), default=0)
    pairs = [(p, s) for p in prompts for s in suffixes if smaller(prompts, p) + smaller(suffixes, s) < max_context]
    holds = lambda num_prompt: any(num_prompt - 1 <= p and max_context - num_prompt <= s for p, s in pairs)
    return pairs if all(map(holds, range(1, max_context))) else [*pairs, (max_context, max_context)]


def plan(
    section: LearnerSection,
    model: ModelConfig,
    *,
    max_context: int,
    max_rank: int,
    on_cpu: bool,
) -> LearnerSizes:
    """Returns the sizes for a machine. Raises InvalidConfig if the buckets need more programs than are allowed.

    Micro-batch width by measurement: on one CPU core time per token falls to its floor at about 256 tokens (16 tokens cost 1.9
    times as much each, 1,024 tokens 5-10% more), so a micro-batch there is 256 tokens; accelerators want thousands. A group of
    rows stays in one block as far as the tokens allow.
    """
    tokens = section.micro_batch_tokens or (256 if on_cpu else 4096)
    rows = section.block_rows
    shapes = []
    for prompt, suffix in bucket_pairs(max_context, section.prompt_buckets, section.suffix_buckets):
        fitting = max((2 * max(tokens, max_context) - prompt) // suffix, 1)
        together = -(-rows // -(-rows // fitting))  # a group that must be split is split evenly
        shapes.append(BlockShape(prompt, suffix, together, max(tokens // (prompt + together * suffix), 1)))
    if len(shapes) > MAX_SHAPES:
        raise InvalidConfig(
            f"runtime.learner.prompt_buckets={list(section.prompt_buckets)} with "
            f"suffix_buckets={list(section.suffix_buckets)}: {len(shapes)} shapes; at most {MAX_SHAPES} are allowed, so that "
            f"the learner has at most {MAX_PROGRAMS} programs"
        )
    return LearnerSizes(
        shapes=tuple(sorted(set(shapes))),
        probe=BlockShape(min(PROBE_TOKENS, max_context), 1, 1, 1),
        head_chunk=section.logits_chunk or (64 if on_cpu else 1024),
        layers_per_program=layers_per_program(model.num_layers),
        update_buckets=update_buckets(model, max_rank) if on_cpu else UPDATE_BUCKETS,
        max_dispatch_s=section.max_dispatch_s,
    )


def layers_per_program(num_layers: int) -> int:
    """Returns k, a divisor of the depth: all layers of a shallow model, one of a deep one."""
    return num_layers if num_layers <= 4 else 1


def update_buckets(model: ModelConfig, max_rank: int) -> tuple[int, ...]:
    """Returns how many adapters one update may hold so that they stay in cache; stacking large ones was 2.4x slower on CPU."""
    floats = sum(max_rank * (d + f) for d, f in model.projection_dims().values()) * model.num_layers
    widest = max(UPDATE_BYTES // (4 * 4 * floats), 1)
    return tuple(n for n in UPDATE_BUCKETS if n <= widest)
