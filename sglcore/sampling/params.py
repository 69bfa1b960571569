"""The sampling parameters of a request: one frozen, checked record.

Host data only. It knows no devices, batches or tensors.
"""

import math
import operator
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

from sglcore.sampling.grammar_spec import Grammar, Repetition, Thinking, TokenRules
from sglcore.sampling.pattern_syntax import PatternError
from sglcore.sampling.stop_pattern import MAX_PLACES, stop_pattern

MIN_TEMPERATURE = 1e-4
"""Below this a request is greedy: at 1e-4 a logit gap of 0.01 is already 100 nats."""
MAX_SEED = 2**64 - 1
MAX_INT32 = 2**31 - 1
MAX_STOP_TEXT = 4096
"""Maximum number of characters of a request's stop strings in total: the text is searched for them
after each token.
"""

MAX_STOP_PATTERNS, MAX_PATTERN_TEXT = 16, 1024
"""Maximum number of regular expressions that end a request's text, and of their characters in
total.
"""


HIDDEN_STATES = ("last", "all")
"""Values of `return_hidden_states`, in addition to None."""
MAX_BREAKERS, MAX_BREAKER_TEXT = 64, 40
"""Maximum number of texts over which no repetition extends, and of the characters of each."""


class SamplingError(ValueError):
    """A sampling parameter that cannot be honoured. One line: what was found, what was wanted, the
    remedy.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request, validated when made. Raises SamplingError.

    Cut-offs apply in the order top_k, top_p (on what is left, renormalised), min_p (relative to the
    best token), XTC (on what is left, renormalised).
    """

    max_tokens: int | None = 128
    """Maximum number of tokens to generate. None: up to the end of the context."""
    temperature: float = 1.0
    """The temperature of the draw. Anything below MIN_TEMPERATURE is greedy."""
    top_k: int = 0
    """Keep exactly this many tokens, ties to the lowest id. 0 and -1: off."""
    top_p: float = 1.0
    """Keep the most likely tokens that together have this probability. 1: off."""
    min_p: float = 0.0
    """Keep tokens with at least this share of the best token's probability. 0: off."""
    xtc_probability: float = 0.0
    """Probability of applying XTC to a draw: drop all tokens with a probability of at least
    `xtc_threshold`, except the least likely of them. Ignored when the draw is greedy."""
    xtc_threshold: float = 0.1
    """The smallest probability of a token that XTC may drop."""
    presence_penalty: float = 0.0
    """Subtracted once from the logits of tokens that are in the output."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each time that it is in the output."""
    repetition_penalty: float = 1.0
    """Over prompt and output: positive logits are divided by it, others multiplied."""
    dry_multiplier: float = 0.0
    """DRY's factor, 0: off. See `Repetition` for this field and the next four."""
    dry_base: float = 1.75
    """The base of DRY's penalty."""
    dry_allowed_length: int = 2
    """The shortest repetition, in tokens, that DRY makes less likely."""
    dry_penalty_last_n: int = -1
    """Tokens over which DRY looks back. -1: all, 0: off."""
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    """Texts that no repetition extends over."""
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    """Value to add to the logit of each of these token ids, after penalties and before
    temperature."""
    stop: tuple[str, ...] = ()
    """Strings that end the text."""
    stop_regex: tuple[str, ...] = ()
    """Regular expressions in the syntax of `stop_pattern`; the text ends where one has matched."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the output."""
    ignore_eos: bool = False
    """End-of-sequence tokens do not end the output."""
    min_tokens: int = 0
    """Stop ids cannot be drawn before this many output tokens; stop strings and patterns that these
    tokens complete are ordinary text."""
    logprobs: int | None = None
    """Top alternatives to report for each output token. 0: only the chosen token, None: nothing."""
    prompt_logprobs: int | None = None
    """The same for each prompt token. 0: only the token, None: nothing."""
    return_hidden_states: str | None = None
    """Which of the model's hidden states to return: "last", the one from which the last output
    token was drawn, or "all", also those of the prompt and of earlier tokens. True: "all". None and
    False: none."""
    return_hidden_states_before_norm: bool = False
    """The returned hidden states are the input of the model's last norm, not its output."""
    n: int = 1
    """Number of samples."""
    seed: int | None = None
    """0..2**64-1. None: the engine draws one with fresh_seed()."""
    priority: int = 0
    """Waiting requests with the lowest priority value start first; running requests with the
    highest value are preempted first."""
    skip_special_tokens: bool = True
    """The text is decoded without special tokens."""
    include_stop_str_in_output: bool = False
    """The text includes the stop string that ended it."""
    grammar: Grammar | None = None
    """The grammar of the output. The output ends with an end-of-sequence token, so that token may
    be neither ignored nor banned. None: no grammar."""
    token_rules: TokenRules | None = None
    """Allowed tokens and banned words. None: no rules."""
    thinking: Thinking | None = None
    """Reasoning before the output that the grammar constrains. None: no reasoning."""

    def __post_init__(self) -> None:
        for name, check in _CHECKS.items():
            object.__setattr__(self, name, check(name, getattr(self, name)))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            wanted = f"at most max_tokens ({self.max_tokens})"
            raise _refusal("min_tokens", self.min_tokens, wanted, "lower min_tokens or raise max_tokens")
        if self.grammar is not None and self.min_tokens:
            raise _refusal("min_tokens", self.min_tokens, "0 with a grammar", "set the length in the grammar")
        if self.grammar is not None and self.ignore_eos:
            raise _refusal("ignore_eos", True, "False with a grammar", "leave it out: a grammar ends with that token")
        if self.return_hidden_states_before_norm and self.return_hidden_states is None:
            raise _refusal("return_hidden_states_before_norm", True, 'return_hidden_states "last" or "all"')

    def __reduce__(self) -> tuple[Any, ...]:
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return _restore, ({**values, "logit_bias": dict(self.logit_bias)},)

    @property
    def is_greedy(self) -> bool:
        """Whether the token is the argmax of the processed logits for every seed: a temperature
        below MIN_TEMPERATURE, or top_k 1.
        """
        return self.temperature < MIN_TEMPERATURE or self.top_k == 1

    @property
    def excludes_top(self) -> bool:
        """Whether XTC may drop a token: its probability is above 0, the draw is not greedy, and the
        threshold is at most 0.5. Above that at most one token qualifies, and XTC keeps it.
        """
        return self.xtc_probability > 0.0 and self.xtc_threshold <= 0.5 and not self.is_greedy

    @property
    def is_bound(self) -> bool:
        """Whether the host must follow the output: for a grammar, reasoning, token rules or DRY."""
        return any(each is not None for each in (self.grammar, self.thinking, self.token_rules, self.repetition))

    @property
    def repetition(self) -> Repetition | None:
        """The DRY parameters; None if its multiplier or its look-back is 0, so that DRY changes no
        logit.
        """
        if self.dry_multiplier == 0.0 or self.dry_penalty_last_n == 0:
            return None
        kept = (self.dry_allowed_length, self.dry_penalty_last_n, self.dry_sequence_breakers)
        return Repetition(self.dry_multiplier, self.dry_base, *kept)

    @property
    def needs_history(self) -> bool:
        """Whether the repetition, presence or frequency penalty is active (not DRY), so that the
        sampler must know the tokens so far.
        """
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


def fresh_seed() -> int:
    """Return a seed below 2**53 from the system's entropy. JSON readers with 64-bit float numbers
    keep it exactly, so a client can send it again.
    """
    return secrets.randbits(53)


def _restore(values: dict[str, Any]) -> SamplingParams:
    return SamplingParams(**values)


def _refusal(name: str, found: Any, wanted: str, remedy: str | None = None) -> SamplingError:
    text = repr(found)
    shown = text if len(text) <= 80 else text[:77] + "..."
    return SamplingError(
        f"{name}: found {shown}, wanted {wanted}; {remedy or f'set {name} accordingly or leave it out'}"
    )


def _as_integer(value: Any) -> int | None:
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def _integer(low: int, high: int = MAX_INT32):
    def check(name: str, value: Any) -> int:
        number = _as_integer(value)
        if number is None or not low <= number <= high:
            raise _refusal(name, value, f"an integer in [{low}, {high}]")
        return number

    return check


def _optional(check):
    return lambda name, value: None if value is None else check(name, value)


def _number(wanted: str, allowed):
    def check(name: str, value: Any) -> float:
        if isinstance(value, (bool, str)):
            raise _refusal(name, value, wanted)
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            raise _refusal(name, value, wanted) from None
        if not (math.isfinite(number) and allowed(number)):
            raise _refusal(name, value, wanted)
        return number

    return check


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _refusal(name, value, "True or False")
    return value


def _hidden_states(name: str, value: Any) -> str | None:
    if value is None or isinstance(value, bool):
        return "all" if value else None
    if value not in HIDDEN_STATES:
        raise _refusal(name, value, 'True, False, "last" or "all"')
    return value


def _stop(name: str, value: Any) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else value
    if texts is None:
        return ()
    if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) and text for text in texts):
        raise _refusal(name, value, "a non-empty string or a list of them")
    if sum(map(len, texts)) > MAX_STOP_TEXT:
        raise _refusal(name, value, f"at most {MAX_STOP_TEXT} characters in all")
    return tuple(texts)


def _stop_regex(name: str, value: Any) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else value
    if texts is None:
        return ()
    if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) and text for text in texts):
        raise _refusal(name, value, "a regular expression or a list of them")
    if len(texts) > MAX_STOP_PATTERNS or sum(map(len, texts)) > MAX_PATTERN_TEXT:
        raise _refusal(name, value, f"at most {MAX_STOP_PATTERNS}, of {MAX_PATTERN_TEXT} characters in all")
    try:
        size = sum(len(stop_pattern(text)) for text in texts)
    except PatternError as error:
        raise SamplingError(f"{name}: {error}; write it without, or name texts in stop") from None
    if size > MAX_PLACES:
        raise _refusal(name, value, f"at most {MAX_PLACES} characters in all with repetitions written out")
    return tuple(texts)


def _breakers(name: str, value: Any) -> tuple[str, ...]:
    wanted = f"a list of at most {MAX_BREAKERS} texts of 1 to {MAX_BREAKER_TEXT} characters"
    if not isinstance(value, (list, tuple)) or len(value) > MAX_BREAKERS:
        raise _refusal(name, value, wanted)
    if not all(isinstance(text, str) and 0 < len(text) <= MAX_BREAKER_TEXT for text in value):
        raise _refusal(name, value, wanted)
    return tuple(value)


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, (list, tuple, set, frozenset)):
        raise _refusal(name, value, "a list of token ids")
    check = _integer(0)
    ids = (check(name, item) for item in value)
    return tuple(sorted(ids)) if isinstance(value, (set, frozenset)) else tuple(ids)


def _bias(name: str, value: Any) -> Mapping[int, float]:
    if value is None:
        return MappingProxyType({})
    if not isinstance(value, Mapping):
        raise _refusal(name, value, "a mapping from token id to a finite number")
    number = _number("a finite number for every token id", lambda x: abs(x) <= 1e30)
    checked = {_integer(0)(f"{name} key", key): number(f"{name}[{key}]", bias) for key, bias in value.items()}
    return MappingProxyType(dict(sorted(checked.items())))


def _grammar(name: str, value: Any) -> Grammar:
    if not isinstance(value, Grammar):
        raise _refusal(name, value, "a Grammar(kind, text)")
    return value


def _token_rules(name: str, value: Any) -> TokenRules:
    if not isinstance(value, TokenRules):
        raise _refusal(name, value, "a TokenRules(allowed, bad_words)")
    return value


def _thinking(name: str, value: Any) -> Thinking:
    if not isinstance(value, Thinking):
        raise _refusal(name, value, "a Thinking(end, closing)")
    return value


_SHARE = _number("a number in [0, 1]", lambda x: 0.0 <= x <= 1.0)
_PENALTY = _number("a number in [-2, 2]", lambda x: -2.0 <= x <= 2.0)
_CHECKS = MappingProxyType(
    {
        "max_tokens": _optional(_integer(1)),
        "temperature": _number("a finite number of at least 0", lambda x: x >= 0.0),
        "top_k": _integer(-1),
        "top_p": _number("a number in (0, 1]", lambda x: 0.0 < x <= 1.0),
        "min_p": _SHARE,
        "xtc_probability": _SHARE,
        "xtc_threshold": _SHARE,
        "presence_penalty": _PENALTY,
        "frequency_penalty": _PENALTY,
        "repetition_penalty": _number("a finite number above 0", lambda x: 1e-30 <= x <= 1e30),
        "dry_multiplier": _number("a number in [0, 1000]", lambda x: 0.0 <= x <= 1000.0),
        "dry_base": _number("a number in [1, 1000]", lambda x: 1.0 <= x <= 1000.0),
        "dry_allowed_length": _integer(1),
        "dry_penalty_last_n": _integer(-1),
        "dry_sequence_breakers": _breakers,
        "logit_bias": _bias,
        "stop": _stop,
        "stop_regex": _stop_regex,
        "stop_token_ids": _token_ids,
        "ignore_eos": _flag,
        "min_tokens": _integer(0),
        "logprobs": _optional(_integer(0)),
        "prompt_logprobs": _optional(_integer(0)),
        "return_hidden_states": _hidden_states,
        "return_hidden_states_before_norm": _flag,
        "n": _integer(1),
        "seed": _optional(_integer(0, MAX_SEED)),
        "priority": _integer(-MAX_INT32, MAX_INT32),
        "skip_special_tokens": _flag,
        "include_stop_str_in_output": _flag,
        "grammar": _optional(_grammar),
        "token_rules": _optional(_token_rules),
        "thinking": _optional(_thinking),
    }
)
