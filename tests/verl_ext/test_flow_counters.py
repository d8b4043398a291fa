"""The flow counters, with veRL's own replay buffers over a real TransferQueue."""

import json
import threading
import time

import pytest
import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from tensordict import TensorDict
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

from drzero.ops.flow.snapshot import Samples
from drzero.ops.flow.sources import counters_source
from verl_ext.trainer.flow import ObservedBuffer
from verl_ext.trainer.flow_counters import FlowCounters, GroupClock

EACH = 2
"""Rollouts a prompt."""


def group(status, step=1):
    return {"is_prompt": True, "status": status, "global_steps": step}


def test_groups_are_working_until_they_can_be_sampled():
    tags = {"a": group("pending"), "b": group("running"), "c": group("finished", 3), "d": group("failure", 2)}
    tags |= {key: {"status": "success"} for key in ("b_0_0", "c_0_0")}
    seen = GroupClock().update(tags, 10.0)
    assert (seen.working, seen.waiting, seen.rows_of_working) == (2, 2, 1)
    assert sorted(seen.steps_of_waiting) == [2, 3]


def test_a_groups_age_restarts_when_it_is_finished():
    clock = GroupClock()
    clock.update({"a": group("pending"), "b": group("pending")}, 10.0)
    clock.update({"a": group("running"), "b": group("finished")}, 15.0)
    seen = clock.update({"a": group("running"), "b": group("finished")}, 30.0)
    assert seen.oldest_s == {"working": 20.0, "waiting": 15.0}


def test_a_group_that_fails_is_counted_once():
    clock = GroupClock()
    for _ in range(3):
        clock.update({"a": group("failure"), "b": group("running")}, 10.0)
    clock.update({"b": group("failure")}, 20.0)
    assert clock.failures == 2


def counters(tmp_path, mode="sync", **settings):
    listing = settings.pop("listing", lambda: tq.kv_list())
    path = tmp_path / "flow_counters.json"
    return FlowCounters(path=path, mode=mode, rollouts_per_prompt=EACH, listing=listing, **settings)


def test_the_file_is_what_the_monitor_reads(tmp_path):
    counted = counters(tmp_path, listing=lambda: {"train": {"a": group("running"), "b": group("finished")}})
    counted.submitted(5)
    with counted.sampling("train", 2, 3):
        counted.write()
    taken = read(tmp_path)
    assert taken.points["prompts"].depth == taken.points["buffer"].depth == 1
    assert (taken.waiting.point, taken.waiting.have, taken.waiting.want) == ("buffer", 1, 2)
    assert taken.warmup
    assert taken.about.items() >= {"step": 3, "mode": "sync"}.items() and taken.about["listed_s"] >= 0
    assert taken.samples.lost == 3 * EACH  # five were asked for, two are there


def read(tmp_path):
    return counters_source(tmp_path / "flow_counters.json", 0.0)(time.time())


def test_a_shorter_record_leaves_nothing_of_a_longer_one(tmp_path):
    tags = {f"prompt{number}": group("finished", number) for number in range(50)}
    counted = counters(tmp_path, mode="colocate_async", listing=lambda: {"train": dict(tags)})
    counted.write()
    tags.clear()
    counted.write()
    assert json.loads((tmp_path / "flow_counters.json").read_text())["points"]["buffer"]["depth"] == 0
    assert [path.name for path in tmp_path.iterdir()] == ["flow_counters.json"]


def test_a_queue_that_cannot_be_listed_does_not_end_the_run(tmp_path):
    def broken():
        raise ConnectionError("closed")

    with counters(tmp_path, listing=broken).writing(every_s=0.01):
        time.sleep(0.05)
    assert not (tmp_path / "flow_counters.json").exists()


def test_judged_rows_are_accepted_invalid_or_missing(tmp_path):
    counted = counters(tmp_path, listing=lambda: {})
    counted.submitted(4)
    counted.sampled("train", 4, {}, None)
    counted.judged(expected=8, rows=6, accepted=5)
    samples = Samples(**counted.record(time.time())["samples"])
    assert (samples.accepted, samples.invalid, samples.failed, samples.in_flight) == (5, 1, 2, 0)
    assert samples.lost == 0


@pytest.mark.parametrize("taken", [0, 4])
def test_groups_in_the_queue_were_asked_for_before_the_call_for_them_returns(tmp_path, taken):
    counted = counters(tmp_path, listing=lambda: {"train": {"a": group("pending"), "b": group("pending")}})
    counted.submitted(taken)
    counted.sampled("train", taken, {}, None)
    counted.judged(expected=taken * EACH, rows=taken * EACH, accepted=taken * EACH)
    samples = Samples(**counted.record(time.time())["samples"])
    assert (samples.asked, samples.produced) == ((taken + 2) * EACH, taken * EACH)
    assert (samples.in_flight, samples.lost) == (2 * EACH, 0)


def test_validation_is_counted_separately(tmp_path):
    counted = counters(tmp_path, listing=lambda: {"val": {"a": group("running"), "b": group("finished")}})
    with counted.sampling("val", 2, 0):
        record = counted.record(time.time())
    assert (record["waiting"]["point"], record["waiting"]["have"]) == ("validation", 1)
    assert record["points"]["validation"]["depth"] == 1
    assert record["samples"]["asked"] == 0 and record["warmup"]


@pytest.fixture(autouse=True)
def emptied(request):
    yield
    if "queue" in request.fixturenames:
        for partition, keys in (tq.kv_list() or {}).items():
            tq.kv_clear(keys=list(keys), partition_id=partition)


def submit(prefix, count, step):
    """Ask for groups as the trainer does."""
    uids = [f"{prefix}{number}" for number in range(count)]
    tq.kv_batch_put(keys=uids, partition_id="train", tags=[group("pending", step) for _ in uids])
    return uids


def finish(uids, step, status="finished"):
    """Write groups as the rollout does, rows first."""
    for uid in uids:
        keys = [f"{uid}_{session}_0" for session in range(EACH)]
        rows = TensorDict({"input_ids": torch.ones(EACH, 3, dtype=torch.long)}, batch_size=EACH)
        tags = [{"status": "success", "global_steps": step}] * EACH
        tq.kv_batch_put(keys=keys, partition_id="train", fields=rows, tags=tags)
        tq.kv_put(key=uid, partition_id="train", tag={"status": status})


def sync_buffer():
    return ReplayBuffer("sync", OmegaConf.create({}), 8, "drop", OmegaConf.create({}), poll_interval=0.05)


def async_buffer(refill, threshold):
    settings = OmegaConf.create({})
    return ReplayBufferAsync(
        "colocate_async", settings, threshold, "drop", settings, poll_interval=0.05, refill_fn=refill
    )


def test_a_synchronous_steps_counts_add_up(queue, tmp_path):
    counted = counters(tmp_path)
    buffer = ObservedBuffer(sync_buffer(), counted)
    uids = submit("s", 4, step=1)
    counted.submitted(4)
    finish(uids[:3], step=1)
    waited = []

    def rollout():
        while not waited or waited[-1]["waiting"] is None:
            waited.append(counted.record(time.time()))
        finish(uids[3:], step=1)

    thread = threading.Thread(target=rollout)
    thread.start()
    batch, _ = buffer.sample(global_steps=1, partition_id="train", batch_size=4)
    thread.join()
    assert waited[-1]["waiting"]["have"] == 3 and waited[-1]["warmup"]
    assert waited[-1]["samples"]["in_flight"] == 4 * EACH
    assert len(batch.keys) == 4 * EACH
    record = counted.record(time.time())
    assert record["waiting"] is None and not record["warmup"]
    assert record["samples"]["in_flight"] == 4 * EACH  # in the trainer's hands
    counted.judged(expected=4 * EACH, rows=4 * EACH, accepted=4 * EACH)
    samples = Samples(**counted.record(time.time())["samples"])
    assert (samples.accepted, samples.in_flight, samples.lost) == (4 * EACH, 0, 0)
    assert "staleness" not in record["about"]


def test_stale_groups_are_evicted_replaced_and_reported(queue, tmp_path):
    counted = counters(tmp_path, mode="colocate_async", behind_limit=1)
    records = []

    def refill(count):
        """As the trainer does, whose buffer asks for replacements in the middle of its call."""
        uids = submit("fresh", count, step=4)
        counted.submitted(count)
        counted.replaced(count)
        records.append(counted.record(time.time()))
        finish(uids, step=4)

    buffer = ObservedBuffer(async_buffer(refill, threshold=2), counted)
    finish(submit("old", 2, step=1), step=1)
    finish(submit("new", 2, step=3), step=3)
    counted.submitted(4)
    before = counted.record(time.time())
    batch, metrics = buffer.sample(global_steps=4, partition_id="train", batch_size=4)
    record = counted.record(time.time())
    assert metrics["training/off_policy/evicted_samples"] == record["points"]["buffer"]["dropped"] == 2
    assert (record["samples"]["stale"], record["samples"]["filtered"]) == (2 * EACH, 0)
    staleness = {"limit": 1, "waiting": {}, "waiting_max": 0, "trained_mean": 0.5, "trained_max": 1}
    assert record["about"]["staleness"] == staleness | {"evicted": 2}
    assert before["about"]["staleness"]["waiting"] == {"-3": 2, "-1": 2}  # no step has begun yet
    assert {key.split("_")[0] for key in batch.keys} == {"new0", "new1", "fresh0", "fresh1"}
    # The sum is right during the call too, because the replacements show the evictions.
    assert [Samples(**taken["samples"]).lost for taken in [*records, record]] == [0, 0]


def test_failed_groups_of_an_asynchronous_run_are_not_stale(queue, tmp_path):
    counted = counters(tmp_path, mode="separate_async")

    def refill(count):
        finish(submit("again", count, step=1), step=1)
        counted.submitted(count)
        counted.replaced(count)

    buffer = ObservedBuffer(async_buffer(refill, threshold=8), counted)
    finish(submit("good", 1, step=1), step=1)
    finish(submit("bad", 1, step=1), step=1, status="failure")
    counted.submitted(2)
    counted.write()
    buffer.sample(global_steps=1, partition_id="train", batch_size=2)
    record = counted.record(time.time())
    assert (record["samples"]["failed"], record["samples"]["stale"]) == (EACH, 0)
    assert record["points"]["prompts"]["errors"] == 1
    assert Samples(**record["samples"]).lost == 0


@pytest.mark.parametrize(
    ("mode", "filters", "gone", "dropped"),
    [
        ("sync", True, {"filtered": 3}, {"filtered": 3, "lost": 0}),
        ("sync", False, {}, {"filtered": 0, "lost": 3}),
        ("sync", True, {"failed": 2, "filtered": 1}, {"filtered": 1, "failed": 2, "lost": 0}),
        ("colocate_async", True, {"replaced": 3}, {"filtered": 3, "stale": 0, "lost": 0}),
        ("colocate_async", False, {"replaced": 3}, {"filtered": 0, "stale": 3, "lost": 0}),
    ],
    ids=["filtered", "vanished", "failed too", "asynchronous", "stale"],
)
def test_groups_that_score_alike_are_filtered_while_the_call_lasts_and_after_its_crash(
    tmp_path, mode, filters, gone, dropped
):
    listed = {f"g{number}": group("running") for number in range(5)}
    counted = counters(tmp_path, mode=mode, filters=filters, listing=lambda: {"train": dict(listed)})
    counted.submitted(5)
    with pytest.raises(KeyboardInterrupt), counted.sampling("train", 4, 1):
        for number in range(gone.get("failed", 0)):
            listed[f"g{number}"] = group("failure")
        counted.record(time.time())
        for number in range(3):
            del listed[f"g{number}"]
        if count := gone.get("replaced"):
            listed |= {f"new{number}": group("running") for number in range(count)}
            counted.submitted(count)
            counted.replaced(count)
        during = counted.record(time.time())
        assert during["waiting"]["filtered"] == dropped["filtered"]
        raise KeyboardInterrupt
    for record in (during, counted.record(time.time())):
        samples = Samples(**record["samples"])
        assert {name: getattr(samples, name) for name in dropped} == {k: n * EACH for k, n in dropped.items()}
        assert record["points"]["buffer"]["out"] == dropped["filtered"]


def test_restored_groups_count_as_submitted(queue, tmp_path):
    finish(submit("r", 3, step=1), step=1)
    counted = counters(tmp_path, mode="colocate_async")
    with counted.writing(every_s=60):
        pass
    taken = read(tmp_path)
    assert (taken.samples.asked, taken.samples.in_flight) == (3 * EACH, 3 * EACH)
    assert taken.ended


def test_the_observed_buffer_passes_everything_else_on(queue, tmp_path):
    counted = counters(tmp_path, mode="separate_async")
    buffer = ObservedBuffer(async_buffer(lambda count: None, threshold=8), counted)
    finish(submit("w", 2, step=1), step=1)
    assert buffer.get_sampleable_count(1, "train") == 2
    assert buffer.poll_interval == 0.05
    found, metrics = buffer.wait_for_sampleable(1, "train", 2)
    assert (found, metrics) == ({"w0", "w1"}, {})
    assert counted.record(time.time())["points"]["buffer"]["out"] == 0
