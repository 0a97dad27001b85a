"""Paged-out jobs in files: an exact round trip within a bound on memory; damage ends the job that it hit and no other."""

import gc

import jax
import numpy as np
import psutil
import pytest

from marlaas_jax.device.pages import Pages
from marlaas_jax.errors import CorruptFile, StorageError
from tests.device.crowd import NAMES, SMALL, assert_equal, crowd, train_all
from tests.device.harness import failures, run_config, steps_done


def state_of(seed):
    rng = np.random.default_rng(seed)
    tree = lambda: {t: {n: rng.standard_normal((2, 3, 5)).astype(np.float32) for n in ("down", "up")} for t in ("q", "down")}
    return tree(), tree(), tree()


SIZE = sum(array.nbytes for array in jax.tree.leaves(state_of(0)))


def test_what_goes_to_disk_comes_back_bit_for_bit_and_memory_stays_within_the_bound(tmp_path):
    pages = Pages(tmp_path / "pages", 2 * SIZE)
    for seed in range(6):
        pages.put(f"job{seed}", state_of(seed))
        assert pages.gauges()["learner/host_bytes"] <= 2 * SIZE
    assert (pages.gauges()["learner/host_jobs"], pages.gauges()["learner/disk_jobs"]) == (2, 4)
    assert {path.name for path in (tmp_path / "pages").iterdir()} == {f"job{seed}.page" for seed in range(4)}
    special = state_of(7)
    special[1]["q"]["up"][0, 0, :4] = np.array([0x7FC00001, 0x80000000, 0x7F800000, 1], np.uint32).view(np.float32)
    pages.put("job0", special)
    for seed in range(1, 6):
        pages.put(f"other{seed}", state_of(seed))
    for name, wanted in {"job0": special, **{f"job{seed}": state_of(seed) for seed in range(1, 6)}}.items():
        found, wanted = pages.get(name), wanted
        assert jax.tree.structure(found) == jax.tree.structure(wanted)
        for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_array_equal(ours.view(np.uint32), theirs.view(np.uint32))  # NaN payloads and -0 too
        pages.drop(name)
        assert name not in pages and not (tmp_path / "pages" / f"{name}.page").exists()


def test_damaged_missing_and_unwritable_pages(tmp_path, caplog):
    pages = Pages(tmp_path / "pages", 0)
    for name in ("flipped", "short", "gone"):
        pages.put(name, state_of(1))
    flipped, short, gone = (tmp_path / "pages" / f"{name}.page" for name in ("flipped", "short", "gone"))
    content = bytearray(flipped.read_bytes())
    content[-3] ^= 1
    flipped.write_bytes(content)
    short.write_bytes(short.read_bytes()[:50])
    gone.unlink()
    for name in ("flipped", "short"):
        with pytest.raises(CorruptFile, match=rf"{name}\.page: its checksum is wrong"):
            pages.get(name)
    with pytest.raises(StorageError, match=r"gone\.page: cannot be read"):
        pages.get("gone")
    blocked = tmp_path / "blocked"
    pages = Pages(blocked, 0)
    blocked.write_text("a file where the folder should be")
    pages.put("kept", state_of(2))
    assert "stays in memory" in caplog.text and pages.gauges()["learner/host_jobs"] == 1
    assert_equal(jax.tree.leaves(pages.get("kept")), jax.tree.leaves(state_of(2)))


@pytest.mark.slow
def test_twelve_jobs_through_one_slot_and_the_disk_end_as_with_room_for_all(make, roomy):
    config = crowd(**SMALL)
    runtime = config.runtime.model_copy(update={"learner": config.runtime.learner.model_copy(update={"max_host_bytes": 0})})
    harness = make(config.model_copy(update={"runtime": runtime}))
    answers = train_all(harness)
    assert not failures(answers) and len(steps_done(answers)) == 24
    assert harness.device.gauges()["learner/disk_jobs"] == 11 and harness.device.gauges()["learner/host_bytes"] == 0
    for name in NAMES:
        assert_equal(harness.weights(name), roomy[name])


@pytest.mark.slow
def test_a_job_whose_page_is_damaged_fails_alone_with_the_reason(make, tmp_path):
    config = crowd(3, **SMALL)
    runtime = config.runtime.model_copy(update={"learner": config.runtime.learner.model_copy(update={"max_host_bytes": 0})})
    harness = make(config.model_copy(update={"runtime": runtime}))
    for name in NAMES[:3]:
        harness.add(name)
    batches = [harness.batch(name, 0) for name in NAMES[:3]]
    page = tmp_path / "pages" / "job1.page"
    page.write_bytes(page.read_bytes()[:-1])
    answers = [answer for batch in batches for answer in harness.device.handle(batch)] + harness.drain()
    ((job, kind, reason),) = failures(answers)
    assert (job, kind) == ("job1", "CorruptFile") and f"{page}: its checksum is wrong" in reason and "roll it back" in reason
    assert sorted(done.job for done in steps_done(answers)) == ["job0", "job2"]


@pytest.mark.long
@pytest.mark.timeout(400)
def test_memory_is_flat_over_a_thousand_publishes_h02(make):
    """Arrays on the device to the last one, and the process within a few megabytes, with paging through the disk."""
    config = run_config(3, checkpoint={"every_steps": 10**6, "every_s": 10**6}, sampling={"max_tokens": 2})
    runtime = config.runtime.model_copy(
        update={
            "bank": config.runtime.bank.model_copy(update=SMALL),
            "learner": config.runtime.learner.model_copy(update={"max_host_bytes": 0}),
        }
    )
    harness = make(config.model_copy(update={"runtime": runtime}))
    for name in "abc":
        harness.add(name)

    def publish(count, start):
        for step in range(start, start + count):
            for name in "abc":
                assert not failures(harness.train(name, step))
        gc.collect()
        return len(jax.live_arrays()), psutil.Process().memory_info().rss

    arrays, rss = publish(30, 0)
    then_arrays, then_rss = publish(304, 30)
    print(f"live arrays {arrays} -> {then_arrays}, resident bytes {rss} -> {then_rss} over 912 publishes")
    assert then_arrays == arrays and then_rss - rss < 16 << 20
