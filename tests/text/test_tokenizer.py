"""Token ids against transformers' (frozen), special tokens, end ids and the routes to a prompt."""

import json
import shutil
from pathlib import Path

import pytest
import tokenizers

from marlaas_jax.errors import CorruptFile, InvalidRequest, NotFound
from marlaas_jax.text.tokenizer import Tokenizer

KINDS = ("gpt-2", "smollm", "llama-bpe", "qwen2", "tekken", "sentencepiece")


@pytest.mark.parametrize("kind", KINDS)
def test_ids_and_texts_equal_transformers(frozen, small, kind):
    tokenizer, case = small[kind], frozen["cases"][kind]
    for i, text in enumerate(frozen["strings"]):
        ids = case["ids"][i]
        # H19: transformers doubles a BOS that the text already has.
        assert tokenizer.encode_prompt(text) == (ids[1:] if ids[:2] == [tokenizer.bos_id] * 2 else ids), text
        assert tokenizer.encode(text) == case["plain_ids"][i], text
        assert tokenizer.decode(case["ids"][i]) == case["decoded"][i], text


def test_smollm2_ids_equal_transformers(frozen, smollm2):
    for text, ids in zip(frozen["strings"], frozen["smollm2"]["ids"], strict=True):
        assert smollm2.encode_prompt(text) == ids, text
        assert smollm2.decode(ids, skip_special=False) == text
    assert (smollm2.end_ids, smollm2.bos_id, smollm2.pad_id, smollm2.vocab_size) == ((2,), 1, 2, 49152)


@pytest.mark.parametrize("kind", KINDS)
def test_decoding_gives_the_text_back(frozen, small, kind):
    for text in frozen["strings"]:
        back = small[kind].decode(small[kind].encode(text), skip_special=False)
        if kind == "qwen2":  # normalizes to NFC, as the original does
            text = text.replace("e\u0301", "\u00e9")
        if kind == "sentencepiece" and text.startswith(" "):
            continue  # its first space is the one that it puts before every text
        assert back == text


def test_special_tokens_in_text_are_text_unless_allowed(small):
    tokenizer = small["smollm"]
    end = tokenizer.end_ids[0]
    assert end not in tokenizer.encode("a<|im_end|>b")
    assert tokenizer.encode("a<|im_end|>b", allow_special=True).count(end) == 1
    assert tokenizer.decode(tokenizer.encode("a<|im_end|>b")) == "a<|im_end|>b"
    # An added token that is not special is ordinary vocabulary and always counts.
    assert len(tokenizer.encode("<think>")) == 1


def test_h19_one_bos_on_every_route(small, tmp_path, frozen):
    """H19: exactly one BOS if the tokenizer wants one, whoever writes it."""
    conversation = [{"role": "user", "content": "Hello"}]
    wants, does_not = small["llama-bpe"], small["qwen2"]
    assert wants.encode_prompt("hi")[0] == wants.bos_id
    assert wants.encode_prompt("<|bos|>hi") == wants.encode_prompt("hi")
    assert does_not.bos_id not in does_not.encode_prompt("hi")
    for tokenizer in (wants, does_not):
        for source in ("{{ bos_token }}{{ messages[0].content }}", "{{ messages[0].content }}"):
            path = tmp_path / "template.jinja"
            path.write_text(source)
            shown = Tokenizer.load(_folder_of(tokenizer, tmp_path / str(id(tokenizer))), chat_template=path)
            ids = shown.render(conversation)
            assert ids == shown.encode_prompt(shown.render_text(conversation))
            assert ids.count(shown.bos_id) == (1 if tokenizer is wants or "bos_token" in source else 0)


def test_bos_setting_of_the_folder_wins_over_the_post_processor(small, tmp_path):
    folder = _folder_of(small["llama-bpe"], tmp_path)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"add_bos_token": False}))
    assert not Tokenizer.load(folder).adds_bos
    del config["add_bos_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert Tokenizer.load(folder).adds_bos
    backend = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(backend | {"post_processor": None}))
    assert not Tokenizer.load(folder).adds_bos


def test_h13_all_end_ids_count(small, tmp_path):
    """H13: end ids of the generation config, the config and the tokenizer together; the pad id may be one of them."""
    folder = _folder_of(small["smollm"], tmp_path)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 5]}))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 5}))
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.end_ids == (9, 5, tokenizer.pad_id)
    (folder / "config.json").write_text(json.dumps({"eos_token_id": None}))
    (folder / "generation_config.json").unlink()
    assert Tokenizer.load(folder).end_ids == (tokenizer.pad_id,)


def test_tokens_may_be_written_as_mappings_and_declared_beside(small, tmp_path):
    folder = _folder_of(small["smollm"], tmp_path)
    size = small["smollm"].vocab_size
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["eos_token"] = {"content": "<|end|>", "special": True, "__type": "AddedToken"}
    config["added_tokens_decoder"] = {
        str(size): {"content": "<|end|>", "special": True},
        str(size + 1): {"content": "<plain>", "special": False},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.end_ids == (size,)
    assert tokenizer.vocab_size == size + 2
    assert tokenizer.encode("<plain>") == [size + 1]
    assert size not in tokenizer.encode("<|end|>")


def test_unknown_ids_decode_to_nothing(small):
    tokenizer = small["smollm"]
    assert tokenizer.decode([*tokenizer.encode("ab"), tokenizer.vocab_size + 7]) == "ab"


def test_bad_folders_are_refused_in_one_sentence(small, tmp_path):
    with pytest.raises(NotFound, match=r"has no tokenizer\.json"):
        Tokenizer.load(tmp_path)
    folder = _folder_of(small["smollm"], tmp_path)
    with pytest.raises(NotFound, match=r"runtime\.chat_template=.*no such file"):
        Tokenizer.load(folder, chat_template=tmp_path / "absent.jinja")
    (folder / "config.json").write_text(json.dumps({"eos_token_id": "2"}))
    with pytest.raises(CorruptFile, match="eos_token_id='2'"):
        Tokenizer.load(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(CorruptFile, match="not JSON"):
        Tokenizer.load(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(CorruptFile, match="not a tokenizer file"):
        Tokenizer.load(folder)


def test_a_model_without_template_says_so(small):
    with pytest.raises(InvalidRequest, match="no chat template"):
        small["qwen2"].render([{"role": "user", "content": "hi"}])


def test_encoding_from_many_threads_is_the_same(small, frozen):
    from concurrent.futures import ThreadPoolExecutor

    tokenizer = small["smollm"]
    jobs = [(text, special) for text in frozen["strings"] for special in (False, True)] * 4
    expected = [tokenizer.encode(*job) for job in jobs]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda job: tokenizer.encode(*job), jobs)) == expected


def test_padding_and_truncation_of_the_file_are_ignored(small, tmp_path):
    folder = _folder_of(small["smollm"], tmp_path)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(2)
    backend.enable_padding(length=8)
    backend.save(str(folder / "tokenizer.json"))
    assert Tokenizer.load(folder).encode("Hello world") == small["smollm"].encode("Hello world")


def _folder_of(tokenizer: Tokenizer, folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    config = tokenizer.special_tokens | {"add_bos_token": tokenizer.adds_bos}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
