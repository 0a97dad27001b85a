"""Incremental text equals decoding at once, and stop strings match on text (H12)."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marlaas_jax.text.incremental import IncrementalText

TEXT = "ABCDEFGHIJ naïve 👩‍👩‍👧‍👦🇯🇵 日本語\n\n</answer> done"


def _feed(tokenizer, ids, stop=()):
    """Returns (pieces, the object, how many ids it took)."""
    stream, pieces, taken = IncrementalText(tokenizer, stop), [], 0
    for token_id in ids:
        pieces.append(stream.push(token_id))
        taken += 1
        assert "".join(pieces) == stream.text
        if stream.stopped:
            break
    pieces.append(stream.finish())
    assert "".join(pieces) == stream.text
    return pieces, stream, taken


@pytest.mark.parametrize("kind", ["smollm", "sentencepiece"])
def test_characters_split_across_tokens_come_whole(small, kind):
    tokenizer = small[kind]
    ids = tokenizer.encode(TEXT)
    pieces, stream, _ = _feed(tokenizer, ids)
    assert stream.text == tokenizer.decode(ids) == TEXT
    assert not any("�" in piece for piece in pieces)


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_any_ids_give_the_text_of_decoding_at_once(small, data):
    tokenizer = small["smollm"]
    # Bytes in any order: broken characters, runs of broken bytes, special tokens, ids that stand for nothing.
    high = st.sampled_from([i for i in range(tokenizer.vocab_size) if tokenizer.decode([i]) == "�"])
    ids = data.draw(st.lists(st.one_of(st.integers(0, tokenizer.vocab_size + 3), high), max_size=30))
    assert _feed(tokenizer, ids)[1].text == tokenizer.decode(ids)


def test_what_stands_between_broken_bytes_is_shown_once(small):
    """Found by the test above: ids that show nothing, then a token with text between two broken bytes."""
    tokenizer = small["smollm"]
    ids = [97, 0, 0, 0, 0, 0, 0, 448]
    assert _feed(tokenizer, ids)[1].text == tokenizer.decode(ids)


def test_a_long_run_of_broken_bytes_does_not_wait_for_its_end(small):
    tokenizer = small["smollm"]
    [broken] = [i for i in range(tokenizer.vocab_size) if tokenizer.backend.id_to_token(i) == "\u0122"][:1]  # byte 0x80
    assert tokenizer.decode([broken]) == "�"
    stream = IncrementalText(tokenizer)
    shown = [stream.push(broken) for _ in range(40)]
    assert 30 <= len("".join(shown)) < 40
    assert "".join(shown) + stream.finish() == "�" * 40


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (["DEFGHIJ"], "ABC"),  # spans tokens
        (["EF"], "ABCD"),  # begins inside a token
        (["</answer>"], TEXT.split("</answer>")[0]),
        (["\n\n"], TEXT.split("\n\n")[0]),
        (["本"], TEXT.split("本")[0]),  # a character that is several tokens
        (["</answer>", "DEF"], "ABC"),  # the earliest counts
        (["CDX", "never"], TEXT),
        (["ABC"], ""),
    ],
)
def test_h12_stop_strings_match_on_text(small, stop, expected):
    """H12: text trimmed at the match, nothing of a stop string ever shown, the completing token taken."""
    tokenizer = small["smollm"]
    ids = tokenizer.encode(TEXT)
    pieces, stream, taken = _feed(tokenizer, ids, stop)
    assert stream.text == expected == "".join(pieces)
    if expected != TEXT:
        assert stream.stopped
        matched = tokenizer.decode(ids[:taken])
        assert any(s in matched for s in stop)
        assert not any(s in tokenizer.decode(ids[: taken - 1]) for s in stop)


def test_what_may_begin_a_stop_string_is_held_back_and_then_shown(small):
    tokenizer = small["smollm"]
    stream = IncrementalText(tokenizer, ["<end>"])
    shown = [stream.push(i) for i in tokenizer.encode("a<en")]
    assert "".join(shown) == "a"
    assert "".join(stream.push(i) for i in tokenizer.encode("d b")) == "<end b"


def test_after_the_stop_nothing_more_is_taken(small):
    tokenizer = small["smollm"]
    stream = IncrementalText(tokenizer, ["b"])
    for token_id in tokenizer.encode("a b"):
        stream.push(token_id)
    assert stream.stopped
    assert stream.push(tokenizer.encode("c")[0]) == ""
    assert stream.text == "a "


def test_end_tokens_give_no_text(small):
    tokenizer = small["smollm"]
    _, stream, _ = _feed(tokenizer, [*tokenizer.encode("ok"), tokenizer.end_ids[0]])
    assert stream.text == "ok"
