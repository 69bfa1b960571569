"""Builds each step as a lazy graph while the one before it runs, and starts it when that one has
ended.

A graph is started only when nothing reads the cells any more: MLX writes into an array's own memory
only if no queued work holds it, and would copy a whole pool otherwise. Until then the next step,
which takes the token of the step before as a lazy array, is built and waits.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeAlias

import mlx.core as mx

from sglcore.device.batch import ForwardMode, ScheduleBatch
from sglcore.sampling.state import Logprobs, SampledTokens
from sglcore.step.output import StepOutput
from sglcore.step.rows import RowPlan, plan_rows
from sglcore.step.sampling import score_prompts
from sglcore.step.sizing import MemorySizes
from sglcore_mlx.attention.contract import DecodeAttention
from sglcore_mlx.forward import DecodeForward, begin_extend, embed_forward, extend_forward
from sglcore_mlx.forward_batch import ForwardBatch, States
from sglcore_mlx.inputs import bucket, decode_inputs, row_bucket
from sglcore_mlx.models.contract import Model
from sglcore_mlx.pool import DeviceState, PageTable
from sglcore_mlx.pooling import pool
from sglcore_mlx.sample_step import SampleStep
from sglcore_mlx.sampling.logprobs import logprobs_of
from sglcore_mlx.slices import OpenPrompt

Launched: TypeAlias = tuple[StepOutput[mx.array], Future[None]]
"""A step's output, and the future of its end."""


class Health:
    """Whether every step so far did what it should: after one that failed on the device, what the
    cells hold is unknown."""

    def __init__(self) -> None:
        self._failure = ""

    def fail(self, error: BaseException) -> None:
        """A step failed on the device; the first one is remembered, as text, because an error holds
        whatever it passed."""
        self._failure = self._failure or repr(error)

    def check(self) -> None:
        """Raises RuntimeError once a step has failed."""
        if self._failure:
            raise RuntimeError(f"an earlier step failed on the device: {self._failure}; start another worker")


class Stepper:
    """One model with its cells and tokens. Belongs to one thread, on which all its work is
    queued."""

    def __init__(
        self,
        model: Model,
        attention: DecodeAttention,
        state: DeviceState,
        sizes: MemorySizes,
        *,
        compiles: bool,
        compiles_draw: bool = False,
        row_buckets: tuple[int, ...] = (),
        batch_type: type[ForwardBatch] = ForwardBatch,
    ) -> None:
        """`compiles` the decode step, once for each number of rows (of `row_buckets` first) and of
        pages, and `compiles_draw` the draw, once for each kind of sampling. Models are given
        batches of `batch_type`."""
        self._model = model
        self._attention = attention
        self._state = state
        self._table = PageTable(sizes)
        self._sampling = SampleStep(self._vocab_size, sizes, compiles_draw)
        self._max_requests = sizes.max_requests
        self._row_buckets = row_buckets
        self._batch_type = batch_type
        self._forward = decode = DecodeForward(model, attention, batch_type)
        self._decode: Callable[..., tuple[mx.array, list[mx.array], list[States]]] = (
            mx.compile(decode) if compiles else decode
        )
        self._compiles = compiles
        self._open: OpenPrompt | None = None
        self._running: Future[None] = Future()
        self._running.set_result(None)
        self.health = Health()

    def launch(self, batch: ScheduleBatch) -> Launched:
        """Build a step, `finish` the one before and start it; with its output, the future of its
        end.

        Raises what building raises; other steps go on. Raises RuntimeError once a step has failed
        on the device: what the cells hold is unknown then.
        """
        self.health.check()
        if batch.layers is not None:
            output = self._slice(batch, *batch.layers.tolist())
        else:
            output = self._embed(batch) if batch.forward_mode is ForwardMode.EMBED else self._generate(batch)
        self.finish(self._running)
        self.health.check()
        try:
            carried = [] if self._open is None else self._open.arrays()
            mx.async_eval(output.arrays(), self._state.arrays(), carried)
        except BaseException as error:
            self.health.fail(error)
            raise
        self._running = Future()
        return output, self._running

    def finish(self, step: Future[None]) -> None:
        """Wait for the end of this step, unless that was done, and settle its future.

        An error that comes before MLX waits for it stays with the stream, and only synchronising
        raises it: the arrays can be read then, and are wrong.
        """
        if step.done():
            return
        try:
            mx.synchronize()
        except BaseException as error:
            self.health.fail(error)
            step.set_exception(error)
        else:
            step.set_result(None)

    def _generate(self, batch: ScheduleBatch) -> StepOutput[mx.array]:
        rows = plan_rows(batch)
        self._table.append(batch)
        self._sampling.admit(batch, self._state)
        inputs = self._sampling.inputs(batch, rows)
        arrived = {name: mx.array(values) for name, values in inputs.arrays.items()}
        prompt: dict[int, Logprobs[mx.array]] = {}
        if batch.forward_mode.is_decode:
            logits, path = self._decode_logits(batch)
        else:
            hidden = extend_forward(self._model, self._attention, batch, self._table, self._state, self._batch_type)
            prompt = score_prompts(inputs, arrived, hidden, self._vocab_size, self._score, mx.concatenate)
            logits, path = self._logits(hidden[arrived["last"]]), "eager"
        return StepOutput(rows, path, self._sampling.run(batch, rows, logits, inputs, arrived, self._state), prompt)

    def _slice(self, batch: ScheduleBatch, first: int, last: int) -> StepOutput[mx.array]:
        """Some layers of the open prompt; with the last one, tokens. The batch that runs the first
        layers opens it."""
        if first == 0:
            self._open = self._begin(batch)
        if (prompt := self._open) is None:
            raise ValueError(f"a slice wants the layers from {first} to {last} of a prompt; none is open")
        hidden, path = prompt.run(self._model.sliced, self._state, first, last), f"layers {first} to {last}"
        if hidden is None:
            nothing = SampledTokens(mx.zeros((0,), mx.int32), mx.zeros((0,), mx.bool_))
            return StepOutput(RowPlan.silent(), path, nothing)
        self._open, inputs, arrived = None, prompt.inputs, prompt.arrived
        scores = score_prompts(inputs, arrived, hidden, self._vocab_size, self._score, mx.concatenate)
        logits, host = self._logits(hidden[arrived["last"]]), prompt.extend.host
        tokens = self._sampling.run(host, prompt.rows, logits, inputs, arrived, self._state)
        return StepOutput(prompt.rows, path, tokens, scores)

    def _begin(self, batch: ScheduleBatch) -> OpenPrompt:
        """A prompt of which no layer has run."""
        rows = plan_rows(batch)
        self._table.append(batch)
        self._sampling.admit(batch, self._state)
        inputs = self._sampling.inputs(batch, rows)
        arrived = {name: mx.array(values) for name, values in inputs.arrays.items()}
        given = self._attention, self._model.layers, batch, self._table, self._state, self._batch_type
        extend = begin_extend(*given)
        return OpenPrompt(extend, rows, inputs, arrived, self._model.sliced.embed(extend.forward))

    def _logits(self, hidden: mx.array) -> mx.array:
        return self._model.logits(hidden) if hidden.shape[0] else mx.zeros((0, self._vocab_size))

    def _score(self, hidden: mx.array, targets: mx.array, top_n: int) -> Logprobs[mx.array]:
        return logprobs_of(self._logits(hidden), targets, top_n)

    def _decode_logits(self, batch: ScheduleBatch) -> tuple[mx.array, str]:
        """float32 [B, V], and what ran."""
        count, state = batch.batch_size, self._state
        most = self._table.rows.shape[1]
        pages = -(-int(batch.seq_lens.max()) // self._table.page_size)
        size = row_bucket(count, self._row_buckets, self._max_requests) if self._compiles else count
        given = decode_inputs(self._batch_type, batch, self._table, size, bucket(pages, most))
        fields = {name: mx.array(values) for name, values in given.fields.items()}
        states = state.states.take(batch, size)
        made = self._decode(fields, mx.array(given.page_table), state.last, state.cells, states)
        logits, state.cells, states = made
        state.states.leave(batch, states)
        return logits[:count], f"compiled:{size}" if self._compiles else "eager"

    def _embed(self, batch: ScheduleBatch) -> StepOutput[mx.array]:
        """Whole sequences, and what the pooling makes of each row's hidden states."""
        pooling = self._model.config.pooling
        assert pooling is not None
        hidden = embed_forward(self._model, batch, self._batch_type)
        return StepOutput(plan_rows(batch), "eager", embeddings=pool(pooling, self._model.classify, hidden, batch))

    @property
    def _vocab_size(self) -> int:
        return self._model.config.vocab_size

    def close(self) -> None:
        """Wait for what was started, and drop what was compiled: MLX keeps it by thread, and the
        thread ends next."""
        self.finish(self._running)
        del self._decode, self._sampling
