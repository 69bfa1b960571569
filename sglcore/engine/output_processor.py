"""The text side of an engine: turns the token outputs of one prompt's samples into their growing
text."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sglcore.engine.outputs import Completion, RequestOutput, TextDelta
from sglcore.engine.tokenizers.detokenizer import IncrementalDetokenizer
from sglcore.engine.tokenizers.text_codec import TextCodec
from sglcore.sampling.params import SamplingParams
from sglcore.schedule.request_output import EngineOutput, TokenLogprob


class EarlyEnd(NamedTuple):
    """The end of sample number `index` before its tokens end: at the stop string or pattern
    `cause`, or (None) because its text cannot be made."""

    index: int
    cause: str | None


class HiddenParts:
    """The hidden states of one sample, as they arrive."""

    def __init__(self, wanted: str | None) -> None:
        """`wanted`: `SamplingParams.return_hidden_states`."""
        self._keeps_last = wanted == "last"
        self._parts: list[NDArray[np.float32]] = []

    def take(self, output: EngineOutput, kept: int, has_ended: bool) -> NDArray[np.float32] | None:
        """Add the states of an output, without those of its tokens after the first `kept`. Returns
        what is new for the caller (None: nothing): the added ones, or, of one who wants the last
        one, that at the end.
        """
        if output.hidden_states:
            found = np.frombuffer(output.hidden_states, dtype="<f4").reshape(-1, output.hidden_size)
            found = found[: len(found) - len(output.token_ids) + kept]
            if self._keeps_last and len(found):
                self._parts = [found[-1:]]
            elif len(found):
                self._parts.append(found)
                return found
        return self._parts[0] if self._keeps_last and self._parts and has_ended else None

    def whole(self) -> NDArray[np.float32] | None:
        """Return all states float32 [n, hidden]; None if there are none."""
        return np.concatenate(self._parts) if self._parts else None


class OutputProcessor:
    """The text of one prompt's samples. `take` fills `output`; it never raises: a sample whose text
    cannot be made ends with an error."""

    def __init__(
        self,
        codec: TextCodec,
        request_id: str,
        prompt: str | None,
        prompt_ids: list[int],
        params: SamplingParams,
        seed: int,
    ) -> None:
        self.output = RequestOutput(request_id, prompt, prompt_ids, [])
        self._codec, self._params, self._seed = codec, params, seed
        self.restart()

    def restart(self) -> None:
        """Reset every sample, because its tokens will arrive again from the first."""
        output, params = self.output, self._params
        output.cached_tokens = 0
        output.prompt_logprobs = [None] if params.prompt_logprobs is not None else None
        output.outputs[:] = [
            Completion(i, self._seed, logprobs=None if params.logprobs is None else []) for i in range(params.n)
        ]
        self._states = [HiddenParts(params.return_hidden_states) for _ in range(params.n)]
        self._texts = [
            self._codec.detokenizer(
                params.stop,
                skip_special=params.skip_special_tokens,
                include_stop=params.include_stop_str_in_output,
                prompt=output.prompt_token_ids,
                min_tokens=params.min_tokens,
                patterns=params.stop_regex,
            )
            for _ in range(params.n)
        ]

    def take(self, output: EngineOutput) -> TextDelta | None:
        """Add a sample's new tokens to `self.output` and return the text that became final. None:
        the sample has ended before."""
        completion = self.output.outputs[output.index]
        if completion.finish_reason is not None:
            return None
        try:
            delta = self._grow(completion, self._texts[output.index], output)
            return self._take_states(completion, output, delta) if self._params.return_hidden_states else delta
        except Exception as error:
            reason = f"its tokens cannot be decoded to text: {type(error).__name__}: {error}"
            return self.fail(output.index, reason)

    def early_end(self, output: EngineOutput) -> EarlyEnd | None:
        """Return the end of the sample if its text ended in `take(output)` while its tokens
        continue, so that the token side must end it; else None. Call it after `take(output)`."""
        completion = self.output.outputs[output.index]
        if completion.finish_reason is None or output.finish_reason is not None:
            return None
        return EarlyEnd(output.index, completion.stop_cause if isinstance(completion.stop_cause, str) else None)

    def fail(self, index: int, reason: str) -> TextDelta:
        """End sample number `index` with finish_reason "error", and return the delta that says
        so."""
        completion = self.output.outputs[index]
        completion.finish_reason, completion.error = "error", reason
        return TextDelta(self.output.request_id, index, "", (), "error", error=reason)

    def _grow(self, completion: Completion, text: IncrementalDetokenizer, output: EngineOutput) -> TextDelta:
        self._take_prompt(output)
        ids = output.token_ids
        has_stop_token = output.finish_reason == "stop" and isinstance(output.stop_cause, int)
        shown = text.push(ids[:-1] if has_stop_token else ids)
        if text.stopped_by is not None:
            ids = ids[: text.taken]
        logprobs = self._take_tokens(completion, ids, output.logprobs)
        if ids and output.proposed >= 0:
            completion.verified_steps += 1
            completion.proposed_tokens += output.proposed
            completion.accepted_tokens += len(ids) - 1
        if output.finish_reason is not None or text.stopped_by is not None:
            shown += text.finish()
            self._end(completion, text, output)
        completion.text = text.text if completion.finish_reason else completion.text + shown
        return TextDelta(
            self.output.request_id,
            completion.index,
            shown,
            tuple(ids),
            completion.finish_reason,
            logprobs,
            completion.error,
        )

    def _take_states(self, completion: Completion, output: EngineOutput, delta: TextDelta) -> TextDelta:
        """Add the hidden states of an output; the delta has the tokens of it that are kept."""
        parts, has_ended = self._states[completion.index], completion.finish_reason is not None
        new = parts.take(output, len(delta.token_ids), has_ended)
        if has_ended:
            completion.hidden_states = parts.whole()
        return replace(delta, hidden_states=new)

    def _take_prompt(self, output: EngineOutput) -> None:
        known = self.output
        known.cached_tokens = max(known.cached_tokens, output.cached_tokens)
        if known.prompt_logprobs is not None and len(known.prompt_logprobs) == 1 and output.prompt_logprobs:
            known.prompt_logprobs += output.prompt_logprobs

    def _take_tokens(
        self, completion: Completion, ids: list[int], logprobs: list[TokenLogprob] | None
    ) -> tuple[TokenLogprob, ...] | None:
        completion.token_ids.extend(ids)
        if completion.logprobs is None or logprobs is None:
            return None
        completion.logprobs.extend(logprobs[: len(ids)])
        return tuple(logprobs[: len(ids)])

    def _end(self, completion: Completion, text: IncrementalDetokenizer, output: EngineOutput) -> None:
        stopped = text.stopped_by is not None
        completion.finish_reason = "stop" if stopped else output.finish_reason
        completion.stop_cause = text.stopped_by if stopped else output.stop_cause
        completion.error = "" if stopped else output.error
        completion.refused = output.refused and not stopped
