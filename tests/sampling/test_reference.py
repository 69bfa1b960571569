"""The stored draws equal those of the reference and those of torch."""

import json

import numpy as np
import torch

from sglcore.sampling import noise, reference_sampler
from sglcore.sampling.gumbel_race import RaceTables, draw_race
from sglcore.sampling.noise import noise_tables
from tests.sampling.golden import make_golden
from tests.sampling.rows import drawn


def test_the_stored_golden_file_is_what_the_reference_computes():
    assert json.loads(reference_sampler.GOLDEN_FILE.read_text()) == json.loads(json.dumps(make_golden()))


def test_torch_draws_every_golden_token_in_every_float_width():
    for golden in reference_sampler.golden_draws():
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            logits = torch.tensor([golden.logits], dtype=dtype)
            if logits.double().isfinite().any() and not torch.equal(
                logits.double(), torch.tensor([golden.logits]).double()
            ):
                continue
            result = drawn(logits, [(golden.params, golden.seed, golden.sample_index)], [golden.position])
            assert result.token_ids.tolist() == [golden.token], golden.name


def test_golden_draws_vary_with_position_and_sample_index():
    for name in ("level", "large"):
        assert len({golden.token for golden in reference_sampler.golden_draws() if golden.name == name}) >= 3


def test_float_parts_round_as_the_hardware_does():
    for magnitude in (1, 3, 2**24 - 1, 2**24 + 1, 2**24 + 3, 2**25 + 2, 2**25 + 6, 2**31 - 1, 2**31 - 65, 123456789):
        octave, mantissa = reference_sampler._float32_parts(magnitude)
        bits = int(np.float32(magnitude).view(np.int32))
        assert bits == ((octave + 127) << 23) + mantissa


def test_the_golden_draws_catch_an_unstable_tie():
    golden = next(golden for golden in reference_sampler.golden_draws() if golden.name == "greedy with ties")
    last = max(v for v, logit in enumerate(golden.logits) if logit == max(golden.logits))
    assert golden.token != last


def level_draws(table, shift=0):
    """The tokens of the golden draws on level rows with this Gumbel table; `shift` is added to the
    positions."""
    ids, hashed = torch.arange(32, dtype=torch.int32), torch.tensor(noise.hashed_ids(32))
    race = RaceTables(torch.tensor(table), torch.tensor(noise_tables().weight), ids, hashed)
    golden = [golden for golden in reference_sampler.golden_draws() if golden.name == "level"]
    keys = [reference_sampler.row_key(draw.seed, draw.sample_index, draw.position + shift) for draw in golden]
    words = torch.tensor(np.array(keys, np.uint32).view(np.int32))
    tokens = draw_race(torch.zeros(len(golden), 32, dtype=torch.int32), words, race)
    return tokens.tolist(), [draw.token for draw in golden]


def test_golden_draws_catch_a_wrong_table_and_a_shifted_position():
    found, golden = level_draws(noise_tables().gumbel)
    assert found == golden
    wrong = noise_tables().gumbel.copy()
    wrong[0, ::2] += noise.ONE
    assert level_draws(wrong)[0] != golden
    assert level_draws(noise_tables().gumbel, shift=1)[0] != golden
