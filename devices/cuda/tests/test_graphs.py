"""The package's stream capture: replays what was recorded, keeps the step's own error, and captures again after one."""

from __future__ import annotations

import pytest
import torch

from sglcore_cuda.graphs import make_capture

DEVICE = torch.device("cuda:0")


def test_a_segment_replays_on_what_its_buffers_hold() -> None:
    capture, stream = make_capture(), torch.Stream(DEVICE)
    given, made = torch.zeros(4, device=DEVICE), torch.zeros(4, device=DEVICE)
    torch.accelerator.synchronize()
    with capture.capture(stream, capture.make_pool()) as segment:
        made.copy_(given * 2)
    for value in (1.0, 5.0):
        with stream:
            given.fill_(value)
            segment.replay()
        stream.synchronize()
        assert made.tolist() == [2 * value] * 4
    segment.reset()


def test_two_segments_of_one_pool_run_in_order() -> None:
    capture, stream = make_capture(), torch.Stream(DEVICE)
    pool, total = capture.make_pool(), torch.zeros(3, device=DEVICE)
    torch.accelerator.synchronize()
    with capture.capture(stream, pool) as one:
        total.add_(1)
    with capture.capture(stream, pool) as two:
        total.mul_(10)
    with stream:
        one.replay()
        two.replay()
        one.replay()
    stream.synchronize()
    assert total.tolist() == [11.0] * 3


def test_an_error_of_the_step_is_the_one_that_is_raised_and_the_stream_can_capture_again() -> None:
    capture, stream = make_capture(), torch.Stream(DEVICE)
    total = torch.zeros(3, device=DEVICE)
    torch.accelerator.synchronize()
    with pytest.raises(LookupError, match="in the step"), capture.capture(stream, capture.make_pool()):
        total.add_(1)
        raise LookupError("in the step")
    with capture.capture(stream, capture.make_pool()) as segment:
        total.fill_(7)
    with stream:
        segment.replay()
    stream.synchronize()
    assert total.tolist() == [7.0] * 3
