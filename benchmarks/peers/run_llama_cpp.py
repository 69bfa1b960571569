"""The llama.cpp runner. It uses the C interface as llama.cpp's batched benchmark does, with one
context per case."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import llama_cpp as lib  # pyright: ignore[reportMissingImports]
import numpy as np
from runner import Job, Prompt, Reading, serve


@dataclass(frozen=True, slots=True)
class Row:
    """One token of a batch: its position in a sequence, and whether its logits are needed."""

    token: int
    place: int
    sequence: int
    is_last: bool


class LlamaCpp:
    """A model, and contexts over it."""

    def __init__(self, job: Job) -> None:
        self.threads, self.vocabulary = job.threads, job.vocabulary
        # With one thread use its CPU time, so that other processes on its core do not count.
        self.clock = time.process_time if job.threads == 1 else time.perf_counter
        lib.llama_backend_init()
        self.model = lib.llama_model_load_from_file(job.model.encode(), lib.llama_model_default_params())
        if not self.model:
            raise RuntimeError(f"llama.cpp can not load {job.model}")

    def complete(self, prompt: Prompt, new: int) -> list[int]:
        with self._context([prompt], new) as context:
            tokens = context.run(prompt_rows([prompt]), 1)
            found = [tokens[0]]
            while len(found) < new:
                tokens = context.run(next_rows(tokens, len(prompt) + len(found) - 1), 1)
                found.append(tokens[0])
        return found

    def decode(self, prompts: list[Prompt], new: int) -> Reading:
        with self._context(prompts, new) as context:
            tokens = context.run(prompt_rows(prompts), len(prompts))
            begin = self.clock()
            for step in range(new - 1):
                tokens = context.run(next_rows(tokens, len(prompts[0]) + step), len(prompts))
            return Reading((new - 1) * len(prompts), self.clock() - begin)

    def prefill(self, prompt: Prompt) -> Reading:
        with self._context([prompt], 1) as context:
            begin = self.clock()
            context.run(prompt_rows([prompt]), 1)
            return Reading(len(prompt), self.clock() - begin)

    def shared(self, prompts: list[Prompt], prefix: int, new: int) -> Reading:
        """Prefill the common prefix once and copy it to every sequence; llama.cpp leaves this to
        its caller."""
        with self._context(prompts, new, prefix) as context:
            begin = self.clock()
            context.run(prompt_rows([prompts[0][:prefix]]), 1)
            for sequence in range(1, len(prompts)):
                lib.llama_memory_seq_cp(context.memory, 0, sequence, -1, -1)
            tokens = context.run(prompt_rows([prompt[prefix:] for prompt in prompts], prefix), len(prompts))
            for step in range(new - 1):
                tokens = context.run(next_rows(tokens, len(prompts[0]) + step), len(prompts))
            return Reading(new * len(prompts), self.clock() - begin)

    @contextmanager
    def _context(self, prompts: list[Prompt], new: int, prefix: int = 0) -> Iterator[Context]:
        """Make a context with room for the prompts. Each sequence has its own KV stream, unless
        they share a prefix (`kv_unified`)."""
        chosen = lib.llama_context_default_params()
        chosen.n_ctx = prefix + len(prompts) * (-(-(len(prompts[0]) - prefix + new) // 256) * 256)
        chosen.n_seq_max = len(prompts)
        chosen.kv_unified = prefix > 0
        chosen.n_threads = chosen.n_threads_batch = self.threads
        handle = lib.llama_init_from_model(self.model, chosen)
        if not handle:
            raise RuntimeError(f"llama.cpp can not make a context of {chosen.n_ctx} tokens")
        try:
            yield Context(handle, self.vocabulary)
        finally:
            lib.llama_free(handle)


class Context:
    """One context: takes rows, returns the greedy token of each sequence."""

    def __init__(self, handle: lib.llama_context_p, vocabulary: int) -> None:
        self.handle, self.vocabulary = handle, vocabulary
        self.memory = lib.llama_get_memory(handle)
        self.limit = lib.llama_n_batch(handle)

    def run(self, rows: Sequence[Row], sequences: int) -> list[int]:
        """Run the rows in batches of at most `limit`; returns each sequence's greedy token."""
        found = [0] * sequences
        for first in range(0, len(rows), self.limit):
            part = rows[first : first + self.limit]
            self._decode(part)
            for place, row in enumerate(part):
                if row.is_last:
                    found[row.sequence] = self._greedy(place)
        return found

    def _decode(self, rows: Sequence[Row]) -> None:
        batch = lib.llama_batch_init(len(rows), 0, 1)
        try:
            batch.n_tokens = len(rows)
            for place, row in enumerate(rows):
                batch.token[place], batch.pos[place] = row.token, row.place
                batch.n_seq_id[place], batch.seq_id[place][0] = 1, row.sequence
                batch.logits[place] = row.is_last
            status = lib.llama_decode(self.handle, batch)
        finally:
            lib.llama_batch_free(batch)
        if status != 0:
            raise RuntimeError(f"llama_decode of {len(rows)} tokens returned {status}")

    def _greedy(self, place: int) -> int:
        logits = lib.llama_get_logits_ith(self.handle, place)
        return int(np.ctypeslib.as_array(logits, (self.vocabulary,)).argmax())


def prompt_rows(prompts: Sequence[Prompt], start: int = 0) -> list[Row]:
    """Return a row for every token of every prompt; positions begin at `start`."""
    return [
        Row(token, start + place, sequence, place == len(prompt) - 1)
        for sequence, prompt in enumerate(prompts)
        for place, token in enumerate(prompt)
    ]


def next_rows(tokens: Sequence[int], place: int) -> list[Row]:
    """Return a row with one token for each sequence."""
    return [Row(token, place, sequence, True) for sequence, token in enumerate(tokens)]


if __name__ == "__main__":
    serve(LlamaCpp)
