"""Makes `sglcore/sampling/golden.json`. Run this module after a change of the race; every device
must then give the new draws."""

import hashlib
import json
from typing import Any

from sglcore.sampling import reference_sampler
from sglcore.sampling.noise import LIMIT, NoiseTables, noise_tables
from sglcore.sampling.params import SamplingParams


def checksum(tables: NoiseTables) -> str:
    """SHA-256 of both tables as little-endian int32."""
    data = (tables.gumbel.astype("<i4").tobytes(), tables.weight.astype("<i4").tobytes())
    return hashlib.sha256(b"".join(data)).hexdigest()


def make_golden() -> dict[str, Any]:
    """The content of golden.json, recomputed by the reference."""
    keys = [(0, 0, 0), (1, 0, 17), (2**64 - 1, 3, 4095), (1234567890123456789, 1, 2**20)]
    hashes = []
    for seed, index, position in keys:
        words = [
            reference_sampler.token_hash(reference_sampler.row_key(seed, index, position), token)
            for token in (0, 1, 2, 151935)
        ]
        hashes.append(
            {
                "key": [seed, index, position],
                "hash": words,
                "gumbel": [reference_sampler.gumbel(word) for word in words],
            }
        )
    edges = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 12345, 2**24 + 1, 2**32 - 2**25 - 3]
    return {
        "tables": checksum(noise_tables()),
        "hashes": hashes,
        "gumbel": [[word, reference_sampler.gumbel(word)] for word in edges],
        "weight": [[gap, reference_sampler.weight(gap)] for gap in (0, 1, 255, 256, 45426, 1000000, 1409000, LIMIT)],
        "draws": [_drawn(case) for case in _golden_cases()],
    }


def _drawn(case: dict[str, Any]) -> dict[str, Any]:
    params = SamplingParams(**case["params"])
    where = case["seed"], case["sample_index"], case["position"]
    return {
        **case,
        "token": reference_sampler.reference_draw(reference_sampler._golden_logits(case["logits"]), params, *where)[0],
    }


def _golden_cases() -> list[dict[str, Any]]:
    steep = [640 - 40 * v for v in range(16)]
    level = [0] * 32
    holes = [None if v % 3 else v for v in range(48)]
    ties = [5, 90, 90, 90, 1, 90, 90, 60, 60, 60]
    options: list[tuple[str, Any, dict[str, Any]]] = [
        ("plain", steep, {}),
        ("hot", steep, {"temperature": 1.7}),
        ("cold", steep, {"temperature": 0.3}),
        ("level", level, {}),
        ("masked", holes, {"temperature": 0.8}),
        ("top_k with ties", ties, {"top_k": 3}),
        ("top_p", steep, {"top_p": 0.9}),
        ("top_p with ties", level, {"top_p": 0.25}),
        ("min_p", steep, {"min_p": 0.05, "temperature": 2.0}),
        ("all cut-offs", {"scramble": 4000}, {"top_k": 300, "top_p": 0.95, "min_p": 0.02}),
        ("large", {"scramble": 5000}, {}),
        ("greedy with ties", ties, {"temperature": 0.0}),
    ]
    places = ((0, 0, 0), (7, 0, 1), (7, 1, 1), (2**63 + 5, 0, 2047))
    return [
        {"name": name, "logits": logits, "params": params, "seed": seed, "sample_index": index, "position": position}
        for name, logits, params in options
        for seed, index, position in places
    ]


if __name__ == "__main__":
    reference_sampler.GOLDEN_FILE.write_text(
        json.dumps(make_golden(), separators=(",", ":")).replace('{"name"', '\n{"name"') + "\n"
    )
