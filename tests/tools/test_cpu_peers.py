"""The pure parts of the comparison with other engines: ratios, shares, tables, bounds, and the
report of a missing peer."""

from __future__ import annotations

import importlib
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from subprocess import CalledProcessError

import pytest

from benchmarks.peers import engines as places
from benchmarks.peers.cases import CASES, FORMATS, WEIGHT_BYTES, Bounds, Case, chosen_cases
from benchmarks.peers.child import HERE, Child, ChildError
from benchmarks.peers.engines import ENGINES, Engine, chosen_engines
from benchmarks.peers.figures import Results, beside_itself, beside_the_best, ratios, rows, spread, table
from benchmarks.peers.geometry import BODY_PARAMETERS, HEAD_PARAMETERS, tensors
from benchmarks.peers.install import reason
from benchmarks.peers.measure import ENGINE_BYTES, Measurement
from benchmarks.peers.picture import intensity, save_roofline, speed
from benchmarks.peers.vocabulary import vocabulary, write_tokenizer

BOUNDS = Bounds(30e9, {"fp32": 0.2e12, "bf16": 2e12, "int8": 4e12})
B1, PREFILL, SHARED = (next(case for case in CASES if case.name == name) for name in ("b1", "prefill", "shared"))
START = next(case for case in CASES if case.name == "start")
LONG, LONG_INT8 = (next(case for case in CASES if case.name == name) for name in ("b1-8k", "b1-8k-int8kv"))
B1_INT8 = next(case for case in CASES if case.name == "b1-int8")


@pytest.fixture
def results() -> Results:
    """Results of ours and of one peer over three rounds; the peer has none in the second."""
    made = Results()
    for number, value in enumerate((20.0, 24.0, 22.0)):
        made.add("b1", "sglcore", number, value)
    made.add("b1", "vllm", 0, 10.0)
    made.add("b1", "vllm", 2, 20.0)
    return made


def test_a_ratio_takes_only_rounds_that_both_have(results: Results) -> None:
    found = ratios(results.readings["b1", "sglcore"], results.readings["b1", "vllm"])
    assert found is not None
    assert (found.least, found.most) == (1.1, 2.0)
    assert found.median == pytest.approx(1.55)


def test_a_ratio_of_seconds_is_turned_round_so_that_more_is_better() -> None:
    found = ratios([1.0, 2.0], [4.0, 4.0], less_is_better=True)
    assert found is not None
    assert (found.least, found.median, found.most) == (2.0, 3.0, 4.0)


def test_no_common_round_is_no_ratio() -> None:
    assert ratios([1.0, None], [None, 2.0]) is None
    assert ratios([], [1.0]) is None
    assert spread([None]) is None


def test_a_row_has_its_share_of_the_bound_and_our_ratio(results: Results) -> None:
    ours, theirs = rows(results, [B1], ["sglcore", "vllm"], BOUNDS)
    bound = B1.bound(BOUNDS)
    assert bound is not None
    assert ours["percent_of_bound"] == pytest.approx(100 * 22 / bound, abs=0.1)
    assert "ours_to_it" not in ours
    assert theirs["ours_to_it"] == {"min": 1.1, "median": 1.55, "max": 2.0}
    assert theirs["values"] == [10.0, None, 20.0]


def test_seconds_have_a_share_too() -> None:
    made = Results()
    made.add("shared", "sglcore", 0, 8.0)
    bound = SHARED.bound(BOUNDS)
    assert bound is not None
    assert rows(made, [SHARED], ["sglcore"], BOUNDS)[0]["percent_of_bound"] == pytest.approx(bound / 0.08, abs=0.1)


def test_a_missing_peer_is_a_row_that_says_why(results: Results) -> None:
    results.fail("b1", "openvino", "is not installed: no matching distribution")
    results.fail("b1", "openvino", "a later reason")
    text = table(rows(results, [B1], ["sglcore", "vllm", "openvino", "llama_cpp"], BOUNDS))
    assert "openvino      none: is not installed: no matching distribution" in text
    assert "llama_cpp     none: was not run" in text
    assert "a later reason" not in text


def test_figures_survive_a_failure_that_came_later(results: Results) -> None:
    results.fail("b1", "vllm", "no answer within 240 s")
    theirs = rows(results, [B1], ["vllm"], None)[0]
    assert theirs["median"] == 15.0
    assert "later: no answer within 240 s" in table([theirs])


def test_a_case_of_one_engine_has_no_rows_for_others(results: Results) -> None:
    alone = replace(B1, only="sglcore")
    assert [row["engine"] for row in rows(results, [alone], ["sglcore", "vllm"], BOUNDS)] == ["sglcore"]


def test_our_cases_are_held_against_one_another(results: Results) -> None:
    for number, value in enumerate((10.0, 18.0, 11.0)):
        results.add("b1-busy", "sglcore", number, value)
    assert beside_itself(results) == [
        {"case": "b1-busy", "against": "b1", "ratio": {"min": 0.5, "median": 0.5, "max": 0.75}}
    ]


def test_the_best_peer_is_the_one_with_the_least_ratio(results: Results) -> None:
    for number, value in enumerate((19.0, 23.0, 21.0)):
        results.add("b1", "llama_cpp", number, value)
    (best,) = beside_the_best(rows(results, [B1, PREFILL], ["sglcore", "vllm", "llama_cpp", "openvino"], BOUNDS))
    assert (best["case"], best["peer"]) == ("b1", "llama_cpp")


def test_batch_one_is_bound_by_bytes_and_a_long_prompt_by_products() -> None:
    wide, fast = replace(BOUNDS, bandwidth=60e9), Bounds(30e9, {kind: 2 * rate for kind, rate in BOUNDS.peaks.items()})
    assert B1.bound(wide) == pytest.approx(2 * (B1.bound(BOUNDS) or 0))
    assert B1.bound(fast) == B1.bound(BOUNDS)
    assert PREFILL.bound(fast) == pytest.approx(2 * (PREFILL.bound(BOUNDS) or 0))
    assert PREFILL.bound(wide) == PREFILL.bound(BOUNDS)


def test_the_bound_at_batch_one_is_bandwidth_over_weights_and_cache() -> None:
    weights, cache = 2 * 595_984_384, (128 + 24) * 28 * 2 * 8 * 128 * 2
    assert B1.bound(BOUNDS) == pytest.approx(30e9 / (weights + cache))


def test_a_cache_of_8_bits_halves_what_a_long_context_reads_and_adds_a_scale_for_each_head() -> None:
    weights, cells = 2 * 595_984_384, (8192 + 24) * 28 * 2 * 8
    assert LONG.bound(BOUNDS) == pytest.approx(30e9 / (weights + cells * 256))
    assert LONG_INT8.bound(BOUNDS) == pytest.approx(30e9 / (weights + cells * (128 + 4)))
    assert replace(LONG_INT8, form="bf16", name=LONG.name) == LONG


def test_a_case_with_a_cache_of_8_bits_is_held_against_the_short_one(results: Results) -> None:
    for number, value in enumerate((10.0, 12.0, 11.0)):
        results.add(LONG_INT8.name, "sglcore", number, value)
    assert beside_itself(results)[0] == {
        "case": LONG_INT8.name,
        "against": "b1",
        "ratio": {"min": 0.5, "median": 0.5, "max": 0.5},
    }


def test_only_quantised_cases_may_count_on_8_bit_products() -> None:
    assert BOUNDS.peak("bf16") == 2e12
    assert BOUNDS.peak("int4") == 4e12
    assert BOUNDS.peak("kv8") == 2e12
    assert START.bound(BOUNDS) is None


def test_every_tensor_is_counted_once() -> None:
    sizes = {name: shape[0] * shape[1] for name, shape in tensors() if len(shape) == 2}
    assert sum(sizes.values()) == BODY_PARAMETERS + HEAD_PARAMETERS
    assert len(tensors()) == 2 + 28 * 11


def test_unknown_names_are_answered_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'b2'; the cases are b1, b8"):
        chosen_cases(["b1", "b2"], quick=False)
    with pytest.raises(ValueError, match="'vlm'; the engines are sglcore, vllm"):
        chosen_engines(["vlm"])


def test_quick_is_fewer_and_shorter() -> None:
    assert len(chosen_cases(None, quick=True)) < len(chosen_cases(None, quick=False)) == len(CASES)
    assert chosen_cases(["b1"], quick=True)[0].new < B1.new


def test_every_format_has_a_case_and_ours_serves_it() -> None:
    assert {case.form for case in CASES} == set(FORMATS)
    assert ENGINES[0].name == "sglcore" and set(ENGINES[0].models) == set(FORMATS)
    assert set(WEIGHT_BYTES) == set(ENGINE_BYTES) == set(FORMATS)
    assert not any("kv8" in engine.models for engine in ENGINES[1:])


def test_an_engine_says_what_it_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ROOT", "PEERS", "FILES"):
        monkeypatch.setattr(places, name, tmp_path)
    engine = Engine("acme", "Acme", {"bf16": "weights"}, "acme", ("acme==1",))
    assert engine.missing("int8") == "has no int8 weights here"
    assert engine.missing("bf16") == "is not installed: run make bench-cpu"
    engine.reason_file.write_text("no matching distribution\n")
    assert engine.missing("bf16") == "is not installed: no matching distribution"
    engine.home.mkdir()
    engine.installed_file.touch()
    assert engine.missing("bf16") == "lacks weights: no matching distribution"
    engine.reason_file.unlink()
    assert engine.missing("bf16") == "lacks weights: run make bench-cpu"
    (tmp_path / "weights").touch()
    assert engine.missing("bf16") is None


def test_the_reason_of_a_failed_install_is_its_last_error_line() -> None:
    said = "Collecting acme\nERROR: No matching distribution found for acme==1\n"
    assert reason(CalledProcessError(1, ["nice"], "", said)) == "ERROR: No matching distribution found for acme==1"
    assert reason(FileNotFoundError("no cc")) == "FileNotFoundError: no cc"


def test_the_vocabulary_has_its_size_and_no_token_twice(tmp_path: Path) -> None:
    tokens, merges = vocabulary(70_000)
    assert len(set(tokens)) == len(tokens) == 70_000
    assert [left + right for left, right in merges] == tokens[-len(merges) :]
    from tokenizers import Tokenizer

    write_tokenizer(tmp_path, 70_000)
    found = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert found.get_vocab_size() == 70_000
    assert found.decode(found.encode("Anna, größer\n").ids) == "Anna, größer\n"


def test_the_roofline_holds_every_reading_below_its_roof(results: Results, tmp_path: Path) -> None:
    bound = B1.bound(BOUNDS) or 0.0
    assert speed(B1, bound) == pytest.approx(BOUNDS.bandwidth * intensity(B1))
    assert speed(PREFILL, PREFILL.bound(BOUNDS) or 0.0) == pytest.approx(2e12)
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    file = tmp_path / "sub" / "roof.png"
    save_roofline(file, rows(results, CASES, ["sglcore", "vllm"], BOUNDS), CASES, BOUNDS)
    assert file.read_bytes()[:4] == b"\x89PNG"


SCRIPT = """
import json, os, sys, time
print(json.dumps({"ready": 1}), flush=True)
print(json.dumps({"tokens": [7]}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)["batch"]
    if asked == 2:
        os._exit(3)
    if asked == 3:
        time.sleep(60)
    wrong = {"error": "RuntimeError: no"}
    print(json.dumps(wrong if asked == 4 else {"tokens": 10, "seconds": 2.0}), flush=True)
"""


def scripted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str = SCRIPT) -> Engine:
    """An engine with this script as its runner, in this interpreter."""
    (tmp_path / "run_fake.py").write_text(script)
    for name in ("benchmarks.peers.child.HERE", "benchmarks.peers.engines.FILES", "benchmarks.peers.measure.FILES"):
        monkeypatch.setattr(name, tmp_path)
    monkeypatch.setattr(Engine, "python", Path(sys.executable))
    (tmp_path / "weights").touch()
    return Engine("fake", "Fake", {"bf16": "weights"}, "fake")


def becomes_stopped(process: int) -> bool:
    """Whether the process soon is in state T; a signal takes effect when the process next gets a
    core."""
    file = Path(f"/proc/{process}/stat")
    for _ in range(2000 if file.exists() else 0):
        if file.read_text().rpartition(")")[2].split()[0] == "T":
            return True
        time.sleep(0.05)
    return False


def test_a_child_answers_is_held_still_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(tmp_path, monkeypatch)
    child = Child(Path(sys.executable), "fake", {}, tmp_path / "log")
    try:
        assert child.wait_ready(30)[2] == [7]
        assert child.ask(B1.question(1), 30) == {"tokens": 10, "seconds": 2.0}
        assert becomes_stopped(child.pid) or not Path("/proc/self/stat").exists()
        with pytest.raises(ChildError, match="RuntimeError: no"):
            child.ask(replace(B1, batch=4).question(1), 30)
        assert child.is_alive
        with pytest.raises(ChildError, match="no answer within 1 s"):
            child.ask(replace(B1, batch=3).question(1), 1)
        assert not child.is_alive
    finally:
        child.close()


def test_one_case_that_kills_an_engine_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = scripted(tmp_path, monkeypatch)
    cases = [B1, Case("deadly", "decode", batch=2), Case("b4", "decode", batch=4), Case("b8", "decode", batch=8)]
    said: list[str] = []
    measured = Measurement([engine], [*cases, B1_INT8], 2, said.append)
    monkeypatch.setattr(measured, "measure_bounds", lambda: None)
    told: list[int] = []
    measured.run(lambda: told.append(len(measured.results.readings)))
    assert measured.results.readings == {("b1", "fake"): [5.0, 5.0], ("b8", "fake"): [5.0, 5.0]}
    assert "ended with status 3" in measured.results.failures["deadly", "fake"]
    assert measured.results.failures["b4", "fake"] == "RuntimeError: no"
    assert measured.results.failures["b1-int8", "fake"] == "has no int8 weights here"
    assert len(told) == 1 + 2 + 2 and measured.results.tokens == {("bf16", "fake"): [7]}


def answered(monkeypatch: pytest.MonkeyPatch, asked: str) -> dict[str, float]:
    """A runner's answer to one question, with an engine that makes `new` tokens of each prompt; its
    modules are unloaded afterwards."""
    monkeypatch.syspath_prepend(str(HERE))
    runner = importlib.import_module("runner")

    class Counting(runner.Generates):
        def generate(self, prompts: list[list[int]], new: int) -> list[list[int]]:
            time.sleep(0.01)
            return [[prompt[0]] * new for prompt in prompts]

    assert Counting().complete([7, 8], 2) == [7, 7]
    question = Case("any", asked, batch=3, prompt=5, new=4, prefix=2).question(1)
    found = runner.answer(Counting(), question)
    for name in ("geometry", "runner"):
        sys.modules.pop(name)
    return found


@pytest.mark.parametrize(("asked", "tokens"), [("prefill", 5), ("shared", 12)])
def test_what_makes_whole_completions_is_timed_around_them(
    asked: str, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = answered(monkeypatch, asked)
    assert found["tokens"] == tokens and 0.01 <= found["seconds"] < 10


def test_an_engine_that_can_not_load_fails_in_every_case_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = json.dumps({"error": "OSError: no weights"})
    engine = scripted(tmp_path, monkeypatch, f"print({line!r}, flush=True)")
    said: list[str] = []
    measured = Measurement([engine], [B1, Case("b8", "decode", batch=8), START], 3, said.append)
    monkeypatch.setattr(measured, "measure_bounds", lambda: None)
    measured.run(lambda: None)
    assert set(measured.results.failures.values()) == {"OSError: no weights"}
    assert len(measured.results.failures) == 3 and len(said) == 2
