"""Steps and results are encoded and decoded unchanged, with any subset of their optional fields."""

from __future__ import annotations

import dataclasses
import socket
import threading
from typing import Any

import msgspec
import numpy as np
import pytest

from sglcore.engine.ranks import codec
from sglcore.engine.ranks.codec import decode, encode
from sglcore.engine.ranks.wire import Channel, Gone, Kind
from sglcore.sampling.params import SamplingParams
from sglcore.sampling.params_batch import SamplingBatch
from sglcore.worker.model_worker import BatchResult, TokenLogprobs
from sglcore.worker.schedule_batch import CaptureHiddenMode, ForwardMode, OneShot, ScheduleBatch
from sglcore.worker.step_plan import StepPlan
from sglcore.worker.swap_counts import SwapCounts

DTYPES = (("float32", np.float32), ("bool_", np.bool_))


def array(rng: np.random.Generator, declared: str) -> np.ndarray:
    dtype = next((dtype for word, dtype in DTYPES if word in declared), np.int32)
    shape = tuple(rng.integers(0, 4, size=rng.integers(1, 3)))
    return rng.integers(-(2**20), 2**20, size=shape).astype(dtype)


def value(rng: np.random.Generator, name: str, declared: str) -> Any:
    """A random value of the declared type; None half of the time where None is allowed."""
    if "| None" in declared and rng.integers(2) and not declared.startswith("OneShot"):
        return None
    if declared.startswith("OneShot"):
        return OneShot(
            {"capture_hidden_mode": CaptureHiddenMode.NONE, "return_hidden_states_before_norm": False}.get(name)
        )
    if "SamplingBatch" in declared or "HostSampling" in declared:
        params = SamplingParams(temperature=0.7, top_k=3, logit_bias={5: 1.5}, min_tokens=2)
        return SamplingBatch.from_params([(params, 7, 0, 4, (2,)), (SamplingParams(temperature=0.0), 2**64 - 1)])
    if declared.startswith("Mapping[int, NDArray"):
        return {int(row): array(rng, declared) for row in rng.integers(0, 99, size=rng.integers(0, 3))}
    if declared.startswith("Mapping[int, TokenLogprobs]"):
        return {int(row): filled(rng, TokenLogprobs) for row in rng.integers(0, 99, size=rng.integers(0, 3))}
    for word, make in (
        ("ForwardMode", lambda: ForwardMode(int(rng.integers(0, 5)))),
        ("TokenLogprobs", lambda: filled(rng, TokenLogprobs)),
        ("SwapCounts", lambda: filled(rng, SwapCounts)),
        ("StepPlan", lambda: filled(rng, StepPlan)),
        ("tuple[int, ...]", lambda: tuple(rng.integers(0, 2**31, size=rng.integers(0, 4)).tolist())),
        ("bool", lambda: bool(rng.integers(2))),
        ("NDArray", lambda: array(rng, declared)),
        ("Ints", lambda: array(rng, declared)),
        ("int", lambda: int(rng.integers(-(2**31), 2**31))),
        ("str", lambda: "eager"),
    ):
        if declared.startswith(word):
            return make()
    raise AssertionError(f"{name} is declared as {declared}, of which this test makes none")


def filled(rng: np.random.Generator, kind: type) -> Any:
    return kind(*[value(rng, item.name, str(item.type)) for item in dataclasses.fields(kind)])


def check_same(found: Any, wanted: Any) -> None:
    assert type(found) is type(wanted)
    if isinstance(wanted, np.ndarray):
        assert found.dtype == wanted.dtype and found.shape == wanted.shape
        np.testing.assert_array_equal(found, wanted)
    elif dataclasses.is_dataclass(wanted):
        for item in dataclasses.fields(wanted):
            check_same(getattr(found, item.name), getattr(wanted, item.name))
    elif isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        for key in wanted:
            check_same(found[key], wanted[key])
    elif isinstance(wanted, OneShot):
        assert not found.is_set and found.take() == wanted.take()
    else:
        assert found == wanted


@pytest.mark.parametrize("kind", [ScheduleBatch, BatchResult])
def test_every_declared_field_crosses_there_or_not(kind: type) -> None:
    for seed in range(200):
        record = filled(np.random.default_rng(seed), kind)
        check_same(decode(bytearray(encode(record))), record)


def test_what_arrives_may_be_written_to_and_lies_as_torch_wants_it() -> None:
    found = decode(bytearray(encode(filled(np.random.default_rng(1), ScheduleBatch))))
    assert found.slots.flags.writeable and found.slots.flags.aligned


def test_one_shot_values_that_are_set_cross_in_their_own_type_and_others_arrive_unset() -> None:
    batch = filled(np.random.default_rng(2), ScheduleBatch)
    batch.capture_hidden_mode.put(CaptureHiddenMode.FULL)
    batch.seq_lens_cpu_cache.put(np.array([3, 4], np.int32))
    found = decode(bytearray(encode(batch)))
    assert found.capture_hidden_mode.take() is CaptureHiddenMode.FULL
    assert found.seq_lens_cpu_cache.take().tolist() == [3, 4]
    assert not found.return_hidden_states_before_norm.is_set
    assert found.slots.tolist() == batch.slots.tolist()


def test_a_value_of_a_kind_that_nobody_thought_of_is_refused() -> None:
    batch = filled(np.random.default_rng(3), ScheduleBatch)
    batch.slots = {1, 2}  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(TypeError, match="set"):
        encode(batch)


def pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair()


def test_frames_arrive_whole_and_in_order_however_large() -> None:
    left, right = pair()
    sender, receiver = Channel(left, 7), Channel(right, 7)
    bodies = [b"", b"x", bytes(5_000_000), b"last"]
    thread = threading.Thread(target=lambda: [sender.send(Kind.STEP, body) for body in bodies])
    thread.start()
    assert [bytes(receiver.receive().body) for _ in bodies] == bodies
    thread.join()


def test_a_frame_of_another_epoch_is_dropped_and_counted() -> None:
    left, right = pair()
    Channel(left, 1).send(Kind.STEP, b"old")
    Channel(left, 2).send(Kind.STEP, b"new")
    receiver = Channel(right, 2)
    assert bytes(receiver.receive().body) == b"new"
    assert receiver.dropped == 1


def test_the_end_of_a_peer_and_noise_are_told_at_once() -> None:
    left, right = pair()
    left.close()
    channel = Channel(right, 1)
    with pytest.raises(Gone, match="closed"):
        channel.receive()
    channel.close()
    assert channel.fileno() == -1
    left, right = pair()
    left.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n")
    with pytest.raises(Gone, match="not a frame"):
        Channel(right, 1).receive()


def test_who_waits_is_told_when_its_own_side_hangs_up() -> None:
    left, right = pair()
    channel = Channel(right, 1)
    left.sendall(b"\x47\x53")
    told: list[str] = []

    def wait() -> None:
        with pytest.raises(Gone) as caught:
            channel.receive()
        told.append(str(caught.value))

    thread = threading.Thread(target=wait)
    thread.start()
    channel.hang_up()
    thread.join(60)
    assert told and not thread.is_alive()


@pytest.mark.parametrize("change", [-1, 1])
def test_a_record_of_another_number_of_fields_is_refused(change: int) -> None:
    """Another version of sglcore may have sent it."""
    tag, values = len(codec.RECORDS) - 2, [1, 2, 3, 4, 5, 6][: 5 + change]
    assert codec.RECORDS[tag] is SwapCounts
    head = msgspec.msgpack.encode({tag: values})
    with pytest.raises(ValueError, match=f"found {5 + change} values of SwapCounts; wanted 5"):
        decode(bytearray(len(head).to_bytes(8, "little") + head))


@pytest.mark.parametrize("dtype", ["int32", "bool", "float32", "int64", "float64", "uint8"])
def test_arrays_of_every_type_and_layout_arrive_as_they_were(dtype: str) -> None:
    """Three arrays one after the other, none of a multiple of eight bytes, and two that do not lie
    in a row."""
    plain = np.arange(15).reshape(3, 5).astype(dtype)
    for given in (plain, plain.T, plain[:, ::2], plain[:0], np.array(1, dtype)):
        record = TokenLogprobs(*[given] * len(dataclasses.fields(TokenLogprobs)))
        check_same(decode(bytearray(encode(record))), record)
