"""Tests that a process exits with its own status however it ends: the device's thread never runs
during interpreter shutdown."""

from __future__ import annotations

import subprocess
import sys

import pytest

BEGIN = """
from sglcore import LLM, SamplingParams
llm = LLM(device="mlx")
"""
ENDINGS = {
    "a stream is left": """
for number, piece in enumerate(llm.stream("Once", SamplingParams(max_tokens=200, ignore_eos=True))):
    if number == 6:
        break
""",
    "a step is in flight": """
llm.engine.add("Once upon a time", SamplingParams(max_tokens=500, ignore_eos=True))
for _ in range(5):
    llm.engine.step()
""",
    "nothing is closed": 'llm.generate("Once", SamplingParams(max_tokens=3))',
    "it is dropped": 'llm.generate("Once", SamplingParams(max_tokens=3))\ndel llm',
}


@pytest.mark.parametrize("way", ENDINGS)
def test_a_process_that_closes_nothing_ends_without_a_word(way: str) -> None:
    for _ in range(2):
        ran = subprocess.run(
            [sys.executable, "-c", BEGIN + ENDINGS[way]], capture_output=True, text=True, timeout=120, check=False
        )
        assert (ran.returncode, ran.stderr) == (0, "")


def test_a_forked_child_is_told_to_start_its_own() -> None:
    text = """
import os
child = os.fork()
if child:
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print("child", status, flush=True)
    llm.close()
else:
    try:
        llm.generate("Once", SamplingParams(max_tokens=3))
    except RuntimeError as error:
        print(error, flush=True)
        os._exit(5)
"""
    ran = subprocess.run([sys.executable, "-c", BEGIN + text], capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "start in each process" in ran.stdout and "child 5" in ran.stdout


def test_a_load_that_is_interrupted_ends_at_the_next_weight() -> None:
    text = """
import os, signal, time
from sglcore_mlx.layers import weights
from sglcore import LLM
signal.signal(signal.SIGINT, signal.default_int_handler)
slow = weights.mx.eval
begun = []
def interrupted(*arrays):
    begun.append(None)
    if len(begun) == 3:
        os.kill(os.getpid(), signal.SIGINT)
    if len(begun) > 3:
        time.sleep(0.5)  # the main thread of a busy machine hears of the signal meanwhile
    return slow(*arrays)
weights.mx.eval = interrupted
try:
    LLM(device="mlx")
except KeyboardInterrupt:
    print("interrupted in weight", len(begun))
"""
    ran = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=120, check=False)
    assert "interrupted in weight" in ran.stdout, ran.stderr
    assert int(ran.stdout.split()[-1]) <= 4  # of about forty
