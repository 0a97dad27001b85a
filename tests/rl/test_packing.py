"""Packing: every loss position of every row appears exactly once, under its own prompt, with little padding."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from marlaas_jax.errors import InvalidRequest
from marlaas_jax.messages import TrainGroup, TrainRow
from marlaas_jax.rl.packing import BlockShape, blocks_of_group, lay_out, lay_out_sequence, read_groups

SHAPES = (BlockShape(6, 4, 3, 2), BlockShape(6, 12, 2, 1), BlockShape(20, 12, 2, 1))


def train_row(tokens, mask=None, advantage=1.0, truncated=False) -> TrainRow:
    n = len(tokens)
    mask = bytes([1] * n) if mask is None else bytes(mask)
    return TrainRow(
        tuple(tokens), mask, np.arange(n, dtype="<f4").tobytes(), np.arange(n, dtype="<i4").tobytes(), advantage, truncated
    )


def read(rows, prompt=(1, 2, 3), mask_truncated=False):
    [(prompt, rows)] = read_groups([TrainGroup(0, 0, tuple(prompt), tuple(rows))], mask_truncated=mask_truncated)
    return prompt, rows


@settings(max_examples=60, deadline=None)
@given(
    prompt=st.lists(st.integers(1, 99), min_size=1, max_size=21),
    rows=st.lists(st.lists(st.tuples(st.integers(1, 99), st.booleans()), max_size=12), max_size=9),
)
def test_every_loss_position_is_laid_out_once_with_its_own_history(prompt, rows):
    sent = [train_row([t for t, _ in row], [m for _, m in row]) for row in rows]
    prompt_ids, read_rows = read(sent, prompt)
    blocks = blocks_of_group(prompt_ids, read_rows, SHAPES)
    seen = []
    for block in blocks:
        shape = block.shape
        layout = lay_out(shape, [block], capacity=64, num_rows=6, num_suffix=12)
        targets = dict(zip(layout.position.tolist(), layout.target.tolist(), strict=True))
        assert len(targets) == len(layout.position)
        length = int(layout.prompt_length_M[0])
        assert layout.token_N[:length].tolist() == prompt[:-1]
        for b, _, row in layout.rows:
            times = row.mask.nonzero()[0]
            for t in times:
                place = int(layout.index_BT[b, t])
                first = place - int(t)
                history = [*layout.token_N[:length].tolist(), *layout.token_N[first : place + 1].tolist()]
                assert history == [*prompt, *row.token_ids[:t].tolist()]
                assert targets[place] == row.token_ids[t]
            assert (layout.index_BT[b] < 64).sum() == len(times)
            seen.append(row)
    wanted = [row for row in read_rows if row.num_tokens]
    assert sorted(map(id, seen)) == sorted(map(id, wanted))


def test_rows_end_at_their_last_loss_token_and_truncated_ones_can_be_masked_h25():
    _, [row, cut] = read([train_row([5, 6, 7, 8], [1, 1, 0, 0]), train_row([5, 6], truncated=True)], mask_truncated=True)
    assert row.token_ids.tolist() == [5, 6] and row.num_tokens == 2
    assert row.behaviour.tolist() == [0, 1] and row.versions.tolist() == [0, 1]
    assert cut.num_tokens == 0 and len(cut.token_ids) == 0
    assert blocks_of_group(np.array([1]), [cut], SHAPES) == []


def test_large_groups_are_split_and_short_rows_are_not_padded_to_long_ones():
    prompt, rows = read([train_row([9] * n) for n in (2, 3, 12, 4, 1, 2, 3)])
    blocks = blocks_of_group(prompt, rows, SHAPES)
    assert [(b.shape.suffix, [len(r.token_ids) for r in b.rows]) for b in blocks] == [
        (12, [12]),
        (4, [4, 3, 3]),
        (4, [2, 2, 1]),
    ]
    # One short row beside a long one shares the long one's prompt: 18 + 18 padded tokens would become 30 with it.
    prompt, rows = read([train_row([9] * n) for n in (12, 2)])
    assert [len(b.rows) for b in blocks_of_group(prompt, rows, SHAPES)] == [2]


def test_the_order_depends_on_the_batch_alone():
    prompt, rows = read([train_row([9] * n, advantage=float(i)) for i, n in enumerate((3, 1, 3, 2, 3))])
    first = blocks_of_group(prompt, rows, SHAPES)
    again = blocks_of_group(prompt, rows, tuple(reversed(SHAPES)))
    order = lambda blocks: [(b.shape, [r.advantage for r in b.rows]) for b in blocks]
    assert order(first) == order(again)


def test_what_fits_no_bucket_is_refused_with_what_is_allowed():
    prompt, rows = read([train_row([9] * 13)])
    with pytest.raises(InvalidRequest, match=r"13 answer tokens.*\(21, 12\)"):
        blocks_of_group(prompt, rows, SHAPES)


def test_wrong_lengths_are_named():
    broken = TrainRow((1, 2), b"\1\1", np.zeros(1, "<f4").tobytes(), np.zeros(2, "<i4").tobytes(), 0.0)
    with pytest.raises(InvalidRequest, match=r"groups\.0\.rows\.0\.logprobs: 1 entries for 2 token_ids"):
        read([broken])
    with pytest.raises(InvalidRequest, match=r"advantage=nan"):
        read([train_row([1], advantage=float("nan"))])
    with pytest.raises(InvalidRequest, match=r"prompt_ids: empty"):
        read([train_row([1])], prompt=())


def test_a_sequence_runs_over_from_the_prompt_part_into_one_row():
    ids = np.arange(10, 20)
    layout = lay_out_sequence(SHAPES[0], ids, capacity=64)
    assert layout.token_N[:9].tolist() == ids[:-1].tolist()
    assert layout.prompt_length_M.tolist() == [6, 0]
    assert layout.target.tolist() == ids[1:].tolist()
