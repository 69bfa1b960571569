"""The faces of the vendors' modules have the vendors' signatures."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from sglcore_sim import signatures

NAMES = {"npu": "torch_npu", "musa": "torch_musa"}
LIKE_CUDA = {
    "mem_get_info",
    "reset_peak_memory_stats",
    "graph_pool_handle",
    "is_current_stream_capturing",
    "manual_seed",
    "manual_seed_all",
}
"""Names of the musa face that are not in torch_musa's public sources; they have torch.cuda's
signatures."""


def face_of(sim) -> dict:
    if sim.kind.name not in NAMES:
        pytest.skip("needs a face: this kind runs torch's own module")
    return vars(torch.get_device_module(sim.kind.torch_name))


OWN = {"StreamContext.__init__", "device.__init__", "NPUGraph.run", "NPUGraph.begin"}
"""Constructors that users call through functions, and methods that only the simulator calls."""
ASKED_BY_TORCH = {"get_amp_supported_dtype", "get_rng_state", "set_rng_state"}


def test_every_name_of_a_face_has_the_signature_of_the_vendor(sim) -> None:
    face, wrong = face_of(sim), {}
    known = signatures.stored(NAMES[sim.kind.name])["signatures"]
    for name, found in signatures.of_face(face):
        if name in OWN | ASKED_BY_TORCH or (name.startswith(("MUSAGraph", "graph.")) and sim.kind.name == "musa"):
            continue
        wanted = known.get(name)
        if wanted is None and sim.kind.name == "musa" and name in LIKE_CUDA:
            wanted = signatures.of_callable(getattr(torch.cuda, name))
        if found != wanted:
            wrong[name] = (found, wanted)
    assert not wrong


def test_the_signatures_are_held_against_more_than_a_name() -> None:
    one = signatures.of_source("def record(self, stream=None): ...")["record"]
    other = signatures.of_source("def record(self, event=None): ...")["record"]
    assert one != other and one == signatures.of_callable(lambda self, stream=None: None)


def test_what_is_stored_is_what_the_wheel_says() -> None:
    wheel = os.environ.get("TORCH_NPU_WHEEL") or next(iter(sorted(Path("build/wheels").glob("torch_npu-*.whl"))), None)
    if wheel is None:
        pytest.skip("needs the wheel of torch_npu: set TORCH_NPU_WHEEL")
    found, kept = signatures.of_wheel(Path(wheel)), signatures.stored("torch_npu")
    assert found["version"] in kept["versions"] and found["signatures"] == kept["signatures"]


def test_a_vendor_s_stream_equals_itself_and_no_plain_one(sim) -> None:
    face = face_of(sim)
    own = face["current_stream"]()
    assert own == face["current_stream"]() and isinstance(own, face["Stream"])
    assert not own == torch.accelerator.current_stream()  # noqa: SIM201


def test_properties_tell_the_memory_that_was_installed(sim) -> None:
    face = face_of(sim)
    assert face["get_device_properties"](0).total_memory == sim.memory
    assert face["mem_get_info"]()[1] == sim.memory
    with pytest.raises(AssertionError, match="Invalid device id"):
        face["get_device_properties"](99)
