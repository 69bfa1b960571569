"""The text side of an engine: news of tokens become the growing text of one prompt's samples."""

from __future__ import annotations

from sglcore.engine.outputs import Completion, Piece, RequestOutput
from sglcore.engine.text import GrowingText, TextCodec
from sglcore.sampling.params import SamplingParams
from sglcore.schedule.output import EngineOutput, TokenLogprob


class Assembly:
    """One prompt's samples. `take` fills `output`; it never raises: text that can not be made ends its sample."""

    def __init__(
        self,
        codec: TextCodec,
        request_id: str,
        prompt: str | None,
        prompt_ids: list[int],
        params: SamplingParams,
        seed: int,
    ) -> None:
        scored: list[TokenLogprob | None] | None = [None] if params.prompt_logprobs is not None else None
        outputs = [Completion(i, seed, logprobs=None if params.logprobs is None else []) for i in range(params.n)]
        self.output = RequestOutput(request_id, prompt, prompt_ids, outputs, scored)
        self._texts = [
            GrowingText(
                codec,
                params.stop,
                skip_special=params.skip_special_tokens,
                include_stop=params.include_stop_str_in_output,
                prompt=prompt_ids,
            )
            for _ in range(params.n)
        ]

    def take(self, news: EngineOutput) -> Piece | None:
        """The piece of text that became final; None for news of a sample that has ended.

        A piece that ends by "stop" or "error" while `news` goes on: the token side must be told to end the sample.
        """
        completion = self.output.outputs[news.index]
        if completion.finish_reason is not None:
            return None
        try:
            return self._grow(completion, self._texts[news.index], news)
        except Exception as error:
            reason = f"its text can not be made: {type(error).__name__}: {error}"
            return self.fail(news.index, reason)

    def fail(self, index: int, reason: str) -> Piece:
        """End a sample with an error."""
        completion = self.output.outputs[index]
        completion.finish_reason, completion.error = "error", reason
        return Piece(self.output.request_id, index, "", (), "error", error=reason)

    def _grow(self, completion: Completion, text: GrowingText, news: EngineOutput) -> Piece:
        self._take_prompt(news)
        logprobs = self._take_tokens(completion, news)
        visible = news.token_ids
        if news.finish_reason == "stop" and visible and isinstance(news.stop_cause, int):
            visible = visible[:-1]
        shown = text.push(visible)
        if news.finish_reason is not None or text.stopped_by is not None:
            shown += text.finish()
            self._end(completion, text, news)
        completion.text = text.text if completion.finish_reason else completion.text + shown
        return Piece(
            self.output.request_id,
            completion.index,
            shown,
            tuple(news.token_ids),
            completion.finish_reason,
            logprobs,
            completion.error,
        )

    def _take_prompt(self, news: EngineOutput) -> None:
        output = self.output
        output.cached_tokens = max(output.cached_tokens, news.cached_tokens)
        if output.prompt_logprobs is not None and len(output.prompt_logprobs) == 1 and news.prompt_logprobs:
            output.prompt_logprobs += news.prompt_logprobs

    def _take_tokens(self, completion: Completion, news: EngineOutput) -> tuple[TokenLogprob, ...] | None:
        completion.token_ids.extend(news.token_ids)
        if completion.logprobs is None or news.logprobs is None:
            return None
        completion.logprobs.extend(news.logprobs)
        return tuple(news.logprobs)

    def _end(self, completion: Completion, text: GrowingText, news: EngineOutput) -> None:
        stopped = text.stopped_by is not None
        completion.finish_reason = "stop" if stopped else news.finish_reason
        completion.stop_cause = text.stopped_by if stopped else news.stop_cause
        completion.error = news.error
