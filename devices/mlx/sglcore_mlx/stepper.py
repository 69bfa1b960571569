"""Builds each step as a lazy graph while the previous step runs, and starts it when that one has
ended.

MLX writes an array in place only if no queued work holds its memory; otherwise it would copy the
whole KV cache. A step is therefore built, with the previous step's tokens as lazy arrays, and
started only when the previous step has ended.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Required, TypeAlias, TypedDict

import mlx.core as mx

from sglcore.sampling.state import Logprobs, SampledTokens
from sglcore.step.emitting_rows import RowPlan, plan_rows
from sglcore.step.hidden_rows import HiddenRows, hidden_rows, take_states
from sglcore.step.sampling_arrays import SamplingInputs, score_prompts
from sglcore.step.sizing import MemorySizes
from sglcore.step.step_output import StepOutput
from sglcore.worker.schedule_batch import ForwardMode, ScheduleBatch
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

Decode: TypeAlias = Callable[..., tuple[list[mx.array], list[mx.array], list[States]]]
"""A `DecodeForward`, perhaps compiled."""
Captured: TypeAlias = tuple[HiddenRows, mx.array]
"""Hidden states float32 [N, H] to return, and their rows."""
Launched: TypeAlias = tuple[StepOutput[mx.array], Future[None]]
"""A step's output, and a future that is done when the step has ended."""


class Health:
    """Remembers the first step that failed on the device; after it the content of the KV cache is
    unknown."""

    def __init__(self) -> None:
        self._failure = ""

    def fail(self, error: BaseException) -> None:
        """Record a failure. Keeps the first one, as text, because an exception holds the objects of
        its frames."""
        self._failure = self._failure or repr(error)

    def check(self) -> None:
        """Raise RuntimeError if a step has failed, with the first failure's text."""
        if self._failure:
            raise RuntimeError(f"an earlier step failed on the device: {self._failure}; start another worker")


class StepperOptions(TypedDict, total=False):
    """The keyword arguments of `Stepper`."""

    compiles: Required[bool]
    compiles_draw: bool
    row_buckets: tuple[int, ...]


class Stepper:
    """Runs the steps of one model with its KV cache. Belongs to one thread, which queues all its
    work; all methods are called there. `health` remembers failures."""

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
        """`compiles`: the decode step is compiled, once for each padded number of requests
        (preferably one of `row_buckets`) and of pages. `compiles_draw`: sampling is compiled, once
        for each kind. `batch_type`: the type of the model's batches."""
        self._model = model
        self._attention = attention
        self._state = state
        self._table = PageTable(sizes)
        self._sampling = SampleStep(self._vocab_size, sizes, compiles_draw)
        self._max_requests = sizes.max_requests
        self._row_buckets = row_buckets
        self._batch_type = batch_type
        self._forward = DecodeForward(model, attention, batch_type)
        self._compiles = compiles
        self._decodes: dict[int, Decode] = {}
        self._open: OpenPrompt | None = None
        self._running: Future[None] = Future()
        self._running.set_result(None)
        self.health = Health()

    def launch(self, batch: ScheduleBatch) -> Launched:
        """Build a step, wait for the previous one (`finish`), and start it. Returns its output and
        the future of its end.

        Exceptions while building are raised; other steps continue. Raises RuntimeError if a step
        has failed on the device: the content of the KV cache is unknown then.
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
        """Wait for the end of this step, if not done, and settle its future.

        An error on the device stays with the stream, and only synchronising raises it: the arrays
        can be read before, with wrong values.
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
        if not batch.forward_mode.is_decode:
            return self._prefill(batch)[0]
        rows, inputs, arrived = self._admit(batch)
        logits, captured, path = self._decode_logits(batch)
        tokens = self._sampling.run(batch, rows, logits, inputs, arrived, self._state)
        return StepOutput(rows, path, tokens, {}, hidden=captured)

    def _prefill(self, batch: ScheduleBatch) -> tuple[StepOutput[mx.array], mx.array]:
        """Return the output of a step with prompts, and the model's output [T, H] for its
        tokens."""
        rows, inputs, arrived = self._admit(batch)
        wanted, given = hidden_rows(batch), (self._attention, batch, self._table, self._state, self._batch_type)
        hidden, before = extend_forward(self._model, *given)
        prompt = score_prompts(inputs, arrived, hidden, self._vocab_size, self._score, mx.concatenate)
        logits = self._logits(hidden[arrived["last"]])
        tokens = self._sampling.run(batch, rows, logits, inputs, arrived, self._state)
        return StepOutput(rows, "eager", tokens, prompt, hidden=self._read_back(wanted, hidden, before)), hidden

    def _admit(self, batch: ScheduleBatch) -> tuple[RowPlan, SamplingInputs, dict[str, mx.array]]:
        """Take in the pages and the history of a batch. Return its emitting rows, and the inputs of
        sampling on the host and as arrays."""
        rows = plan_rows(batch)
        self._table.append(batch)
        self._sampling.admit(batch, self._state)
        inputs = self._sampling.inputs(batch, rows)
        return rows, inputs, {name: mx.array(values) for name, values in inputs.arrays.items()}

    def _slice(self, batch: ScheduleBatch, first: int, last: int) -> StepOutput[mx.array]:
        """Run the layers first <= i < last of the open prompt and return the step's output, without
        tokens until the model's last layer, after which they are sampled. The batch with layer 0
        opens the prompt. Raises ValueError if no prompt is open, or for other layers than the next
        ones."""
        if first == 0:
            self._open = self._begin(batch)
        if (prompt := self._open) is None:
            raise ValueError(f"a slice requests layers {first} to {last} of a prompt; no prompt is open")
        both, path = prompt.run(self._model.sliced, self._state, first, last), f"layers {first} to {last}"
        if both is None:
            nothing = SampledTokens(mx.zeros((0,), mx.int32), mx.zeros((0,), mx.bool_))
            return StepOutput(RowPlan.silent(), path, nothing)
        (hidden, before), inputs, arrived = both, prompt.inputs, prompt.arrived
        self._open = None
        scores = score_prompts(inputs, arrived, hidden, self._vocab_size, self._score, mx.concatenate)
        logits, host = self._logits(hidden[arrived["last"]]), prompt.extend.host
        tokens = self._sampling.run(host, prompt.rows, logits, inputs, arrived, self._state)
        return StepOutput(prompt.rows, path, tokens, scores, hidden=self._read_back(prompt.wanted, hidden, before))

    def _begin(self, batch: ScheduleBatch) -> OpenPrompt:
        """Open a prompt before its first layer: store its pages and known tokens, and return it
        with its embeddings."""
        rows, inputs, arrived = self._admit(batch)
        given = self._attention, self._model.layers, batch, self._table, self._state, self._batch_type
        wanted = hidden_rows(batch)
        extend = begin_extend(*given)
        return OpenPrompt(extend, rows, inputs, arrived, self._model.sliced.embed(extend.forward), wanted)

    def _logits(self, hidden: mx.array) -> mx.array:
        return self._model.logits(hidden) if hidden.shape[0] else mx.zeros((0, self._vocab_size))

    def _score(self, hidden: mx.array, targets: mx.array, top_n: int) -> Logprobs[mx.array]:
        return logprobs_of(self._logits(hidden), targets, top_n)

    def _decode_for(self, num_hidden: int) -> Decode:
        """Return the decode step that also returns `num_hidden` arrays of hidden states; each is
        made when a batch first requests it, so that others pay nothing for it."""
        if num_hidden not in self._decodes:
            decode = replace(self._forward, num_hidden=num_hidden)
            self._decodes[num_hidden] = mx.compile(decode) if self._compiles else decode
        return self._decodes[num_hidden]

    def _decode_logits(self, batch: ScheduleBatch) -> tuple[mx.array, Captured | None, str]:
        """Return logits float32 [B, V], the requested hidden states, and the name of the path that
        ran."""
        count, state, wanted = batch.batch_size, self._state, hidden_rows(batch)
        num_hidden = hidden_arrays(batch, wanted)
        most = self._table.rows.shape[1]
        pages = -(-int(batch.seq_lens.max()) // self._table.page_size)
        size = row_bucket(count, self._row_buckets, self._max_requests) if self._compiles else count
        given = decode_inputs(self._batch_type, batch, self._table, size, bucket(pages, most))
        fields = {name: mx.array(values) for name, values in given.fields.items()}
        states = state.states.take(batch, size)
        decode = self._decode_for(num_hidden)
        (logits, *hidden), state.cells, states = decode(
            fields, mx.array(given.page_table), state.last, state.cells, states
        )
        state.states.leave(batch, states)
        return logits[:count], self._read_back(wanted, *hidden), f"compiled:{size}" if self._compiles else "eager"

    def _read_back(
        self, wanted: HiddenRows | None, hidden: mx.array | None = None, before: mx.array | None = None
    ) -> Captured | None:
        """Return the requested hidden states of a step with their rows; None: the step requests
        none. `hidden` and `before` [T, H]: those of the whole step; features of a draft may follow
        the H elements of `hidden`. Queues only."""
        if wanted is None or hidden is None:
            return None
        arrived = {name: mx.array(tokens) for name, tokens in wanted.arrays.items()}
        after = hidden[:, : self._model.config.hidden_size]
        return wanted, take_states(arrived, after, before, _taken, mx.concatenate)

    def _embed(self, batch: ScheduleBatch) -> StepOutput[mx.array]:
        """Run whole sequences and return the step's output, with each request's pooled hidden
        states."""
        pooling = self._model.config.pooling
        assert pooling is not None
        hidden = embed_forward(self._model, batch, self._batch_type)
        return StepOutput(plan_rows(batch), "eager", embeddings=pool(pooling, self._model.classify, hidden, batch))

    @property
    def _vocab_size(self) -> int:
        return self._model.config.vocab_size

    def close(self) -> None:
        """Wait for the running step and release compiled functions: MLX keeps them per thread, and
        the thread ends next. The stepper can not be used afterwards."""
        self.finish(self._running)
        del self._decodes, self._sampling


def hidden_arrays(batch: ScheduleBatch, wanted: HiddenRows | None) -> int:
    """Return `DecodeForward.num_hidden` for a batch that is not staged yet; `wanted`: the hidden
    states that it requests."""
    if wanted is None:
        return 0
    return 2 if batch.return_hidden_states_before_norm.is_set else 1


def _taken(states: mx.array, tokens: mx.array) -> mx.array:
    return states[tokens].astype(mx.float32)
