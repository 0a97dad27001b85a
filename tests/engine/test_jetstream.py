"""JetStream's interface: our engine is one of its engines, and its Driver gives the same rows as our loop."""

import importlib.util
import logging
import queue
import subprocess
import sys

import jax
import numpy as np
import pytest

from marlaas_jax.engine import jetstream
from marlaas_jax.engine.engine import EngineSettings, MarlaasEngine
from marlaas_jax.engine.sampler import BASE_MODEL, Sampler
from marlaas_jax.engine.state import RowSettings
from marlaas_jax.messages import Generate, Sampling

needs_jetstream = pytest.mark.skipif(importlib.util.find_spec("jetstream") is None, reason="google-jetstream is not installed")
SETTINGS = EngineSettings(
    num_decode_slots=4, max_context=64, num_adapter_slots=6, max_rank=4, prefill_batch=1, prefill_buckets=(16,)
)
BOS, END = 1, 0


@pytest.fixture(scope="module")
def engine(unrolled):
    return MarlaasEngine(unrolled.config, SETTINGS, "the tokenizer", (END,))


def run_alone(engine, params, prefix, slots: list[int], num_steps: int) -> list[list[int]]:
    """Returns the tokens of each slot under a plain loop over the interface."""
    state = engine.bulk_insert(prefix, engine.init_decode_state(), slots)
    tokens = [[] for _ in slots]
    for _ in range(num_steps):
        state, result = engine.generate(params, state)
        result = result.convert_to_numpy()
        for row, slot in zip(tokens, slots, strict=True):
            data = result.get_result_at_slot(slot)
            row += data.tokens[0][data.valid[0].astype(bool)].tolist()
    return tokens


@needs_jetstream
def test_our_engine_is_an_engine_of_jetstream():
    api = sys.modules["jetstream.engine.engine_api"]
    assert issubclass(MarlaasEngine, api.Engine)
    assert jetstream.BASE == "jetstream.engine.engine_api.Engine"
    assert jetstream.ResultTokens is api.ResultTokens


@needs_jetstream
def test_importing_leaves_seqio_and_the_root_logger_alone():
    code = (
        "import logging, sys; root = logging.getLogger(); before = (root.level, list(root.handlers))\n"
        "from marlaas_jax.engine.jetstream import import_quietly\n"
        "import_quietly('jetstream.core.orchestrator')\n"
        "assert (root.level, list(root.handlers)) == before, root.handlers\n"
        "assert 'tensorflow' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


def test_without_jetstream_the_same_engine_stands_on_our_own_base():
    """A module that hides the package: same class, same methods, and its results read alike."""
    code = (
        "import importlib.util as u; real = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'jetstream' else real(name, *a)\n"
        "from marlaas_jax.engine import jetstream\n"
        "from marlaas_jax.engine.engine import MarlaasEngine, as_result\n"
        "assert issubclass(MarlaasEngine, jetstream.PlainEngine) and not MarlaasEngine.__abstractmethods__\n"
        "import numpy as np\n"
        "result = as_result(np.arange(20).reshape(2, 10)); result.copy_to_host_async()\n"
        "slot = result.convert_to_numpy().get_result_at_slot(1)\n"
        "assert slot.tokens.tolist() == [[10, 11]] and slot.valid.tolist() == [[12, 13]] and slot.lengths.tolist() == [18]\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


def test_prefill_insert_generate(engine, unrolled):
    """Greedy rows of the plain interface equal the argmax of whole forward passes."""
    params = engine.load_params(unrolled.params, unrolled.bank)
    prompt = [3, 9, 20]
    for adapter_slot in (0, 2):
        padded = np.zeros(16, np.int32)
        padded[:3] = prompt
        prefix = engine.prefill(params=params, padded_tokens=padded, true_length=3, adapter_slot=adapter_slot)
        tokens = run_alone(engine, params, prefix, [2], 6)[0]
        table = unrolled.logprobs(adapter_slot, prompt + tokens)[2:-1]
        assert tokens == table.argmax(-1).tolist()


def test_a_group_from_one_prefill(engine, unrolled):
    """prefill_multisampling and bulk_insert: one prompt, several seeds."""
    params = engine.load_params(unrolled.params, unrolled.bank)
    padded = np.zeros(16, np.int32)
    padded[:3] = [3, 9, 20]
    settings = RowSettings(20, seed=5)
    group = engine.prefill_multisampling(
        params=params, padded_tokens=padded, true_length=3, num_samples=3, settings=settings, adapter_slot=1
    )
    rows = run_alone(engine, params, group, [0, 3, 1], 8)
    assert len({tuple(row) for row in rows}) == 3
    second = engine.prefill(
        params=params, padded_tokens=padded, true_length=3, settings=RowSettings(20, seed=6), adapter_slot=1
    )
    assert run_alone(engine, params, second, [2], 8)[0] == rows[1]
    by_key = engine.prefill_multisampling(
        params=params, padded_tokens=padded, true_length=3, num_samples=2, rng=jax.random.key(5)
    )
    assert by_key.num_samples == 2
    with pytest.raises(ValueError, match="made for 3 samples"):
        engine.bulk_insert(group, engine.init_decode_state(), [0, 1, 2, 3])


def test_what_the_interface_asks_for(engine):
    assert engine.max_concurrent_decodes == 4 and engine.samples_per_slot == 1 and engine.max_prefill_length == 64
    assert engine.build_tokenizer(engine.get_tokenizer()) == "the tokenizer"
    assert engine.mesh.size == 1 and engine.colocated_cpus is None and engine.free_resource(0) is None


@needs_jetstream
def test_jetstreams_driver_gives_the_rows_of_our_loop(unrolled, monkeypatch):
    """The real Driver of google-jetstream 0.2.2, with `jax.tree_map` put back for it, over ten requests on four slots."""
    orchestrator = jetstream.import_quietly("jetstream.core.orchestrator")
    api = jetstream.import_quietly("jetstream.engine.tokenizer_api")
    monkeypatch.setattr(jax, "tree_map", jax.tree.map, raising=False)

    class Tokens(api.Tokenizer):
        """Ids in, ids out."""

        bos_id, pad_id, eos_id, stop_tokens, end_ids = BOS, 0, END, {END}, (END,)

        def encode(self, s, **kwargs):
            raise NotImplementedError

        def decode(self, token_ids, **kwargs):
            return " ".join(map(str, token_ids))

    engine = MarlaasEngine(unrolled.config, SETTINGS, Tokens(), (END,))
    params = engine.load_params(unrolled.params, unrolled.bank)
    rng = np.random.default_rng(4)
    prompts = [rng.integers(2, 61, n).tolist() for n in rng.integers(1, 14, 10)]

    sampler = Sampler(unrolled.config, unrolled.params, SETTINGS, Tokens(), lambda: 0.0, run_ahead=False)
    for i, prompt in enumerate(prompts):
        sampling = Sampling(temperature=0.0, max_tokens=12)
        sampler.submit(Generate(str(i), "", 0, (BOS, *prompt), (i,), sampling, BASE_MODEL))
    answers = {}
    while sampler.has_work():
        answers |= {int(done.request_id): list(done.token_ids) for done in sampler.step()}
    ours = [answers[i][: answers[i].index(END)] if END in answers[i] else answers[i] for i in range(len(prompts))]

    level = logging.getLogger().level
    driver = orchestrator.Driver(
        prefill_engines=[engine], generate_engines=[engine], prefill_params=[params], generate_params=[params]
    )
    try:
        channels = []
        for prompt in prompts:
            channel: queue.Queue = queue.Queue()
            request = orchestrator.ActiveRequest(
                max_tokens=12,
                prefill_content=np.asarray(prompt),
                is_client_side_tokenization=True,
                return_channel=_Channel(channel),
            )
            driver.place_request_on_prefill_queue(request)
            channels.append(channel)
        theirs = []
        for channel in channels:
            row: list[int] = []
            while (samples := channel.get(timeout=60)) is not None:
                row += samples[0].token_ids
            theirs.append(row)
    finally:
        driver.stop()
        logging.getLogger().setLevel(level)
    assert theirs == ours


class _Channel:
    """What the Driver writes results to."""

    def __init__(self, target: queue.Queue):
        self._target = target

    def add_result(self, samples) -> None:
        self._target.put(samples)

    def close(self) -> None:
        self._target.put(None)
