"""Unknown fields of a request: those that change something in another API are refused, others are
reported.

A field with which another server would give another text is never ignored silently.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from sglcore.serving.replicas.server_errors import InvalidRequest

LONGEST_NAME = 60
"""Maximum characters of an unknown name that are shown."""
MOST_NAMED = 32
"""Maximum number of unknown fields of a request that are recorded."""
ALIKE = 0.8
"""Least similarity of two names, 0 to 1, for which one is suggested in place of the other."""


@dataclass(slots=True)
class UnknownFields:
    """The context of a body's validation, which collects the fields that its models do not know, at
    most MOST_NAMED; more are dropped. Each name counts once for a model: `found` maps (model, name)
    to the first object that has it and the names that the model knows."""

    found: dict[tuple[type, str], tuple[Mapping[str, Any], frozenset[str]]] = field(default_factory=dict)

    def take(self, model: type, value: Mapping[str, Any], known: frozenset[str]) -> None:
        """Record the names in the object `value` that are not in `known`, the field names of the
        `model` as which it is parsed. Called during the validation."""
        for name in value:
            if name not in known and len(self.found) < MOST_NAMED:
                self.found.setdefault((model, str(name)), (value, known))

    def places(self, body: Any) -> list[str]:
        """Return the paths of the recorded fields in `body`, such as `messages[0].mood`, in the
        order of their discovery; empty if there are none. `body`: the raw object that was
        validated, not a copy: its parts are recognised by identity. A part that is not found has no
        path, and the bare name is returned."""
        owners = {id(value): where for where, value in _objects(body, "")} if self.found else {}
        shown = ((owners.get(id(value), ""), name[:LONGEST_NAME]) for (_, name), (value, _) in self.found.items())
        return [f"{where}.{name}".removeprefix(".") for where, name in shown]

    def refuse(self, body: Any) -> None:
        """Raise InvalidRequest about the first recorded field, if there is one, with a suggestion
        if the model knows a similar name. `body`: the raw object that was validated, not a copy;
        otherwise the error lacks the path before the name."""
        if not self.found:
            return
        (_, name), (_, known) = next(iter(self.found.items()))
        place = self.places(body)[0]
        near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=ALIKE)
        hint = f"did you mean {near[0]}?" if near else "leave it out, or start the server without --strict-fields"
        raise InvalidRequest(f"found the unknown field {place}", remedy=hint, param=place, code="unknown_field")


def refuse_foreign(body: Any, known: Collection[str], *, generates: bool) -> None:
    """Raise InvalidRequest about the first unknown field at the top of a raw `body` that this
    endpoint has under another name (SAME) or, if it `generates` text, that would change the text
    on another server (CHANGING). `known`: names of the endpoint's fields. Other unknown fields,
    values without effect (empty ones, NEUTRAL), and a body that is no object are accepted."""
    if not isinstance(body, Mapping):
        return
    for name, value in body.items():
        if name in known or value in (None, False, 0, "", [], {}) or value == NEUTRAL.get(name):
            continue
        ours = next((other for group in SAME if name in group for other in group if other in known), None)
        if ours is not None:
            raise InvalidRequest(
                f"{name}: this endpoint has it by the name {ours}",
                remedy=f"use {ours}",
                param=name,
                code="unknown_field",
            )
        if generates and name in CHANGING:
            reason = REASONS.get(name, "this endpoint does not have it, and it would change the text")
            raise InvalidRequest(f"{name}: {reason}", remedy="leave it out", param=name, code="unsupported_parameter")


def _objects(value: Any, where: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield all objects inside a JSON value, the value itself included if it is one, each after its
    path, such as `messages[0].content`. `where`: the path of the value, "" for the whole body."""
    if isinstance(value, Mapping):
        yield where, value
        for name, part in value.items():
            yield from _objects(part, f"{where}.{name}".removeprefix("."))
    elif isinstance(value, list):
        for place, part in enumerate(value):
            yield from _objects(part, f"{where}[{place}]")


SAME: tuple[tuple[str, ...], ...] = (
    ("max_tokens", "max_output_tokens", "max_completion_tokens", "max_new_tokens", "n_predict", "num_predict"),
    ("repetition_penalty", "repeat_penalty"),
    ("logprobs", "top_logprobs", "n_probs"),
    ("min_tokens", "min_new_tokens"),
    ("seed", "sampling_seed"),
    ("stop", "stop_sequences"),
    ("messages", "input", "prompt", "text", "content"),
    ("instructions", "system"),
    ("response_format", "text", "output_config", "output_format", "format", "json_schema"),
    ("structured_outputs", "guided_decoding", "grammar", "regex", "ebnf"),
    ("tools", "functions"),
    ("tool_choice", "function_call"),
    ("reasoning_effort", "reasoning", "thinking", "think"),
    ("chat_template_kwargs", "enable_thinking"),
)
"""Groups of names of one field in different APIs."""

_BEAMS = ("use_beam_search", "num_beams", "beam_width", "length_penalty", "early_stopping")

CHANGING = frozenset(
    {
        *(name for group in SAME for name in group),
        *_BEAMS,
        *("n", "best_of", "echo", "suffix", "seed", "min_tokens", "ignore_eos", "temperature"),
        *("top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "logit_bias", "stop_token_ids"),
        *("skip_special_tokens", "include_stop_str_in_output", "no_stop_trim", "prompt_logprobs"),
        *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structural_tag"),
        *("continue_final_message", "add_generation_prompt", "chat_template", "documents"),
        *("bad_words", "allowed_token_ids", "thinking_token_budget"),
        *("truncate_prompt_tokens", "logits_processors", "custom_logit_processor", "return_tokens_as_token_ids"),
        *("lora", "lora_path", "lora_request", "prompt_embeds", "input_embeds"),
        *("return_hidden_states", "return_hidden_states_before_norm"),
        *("typical_p", "typical", "tfs_z", "top_a", "top_n_sigma", "mirostat"),
        *("dynatemp_range", "samplers", "repeat_last_n", "penalty_last_n", "smoothing_factor", "adaptive_target"),
        *("audio", "images", "image_data", "video_data", "audio_data", "multi_modal_data"),
        *("web_search_options", "sampling_params", "options", "template", "context"),
    }
)
"""Fields with which some server generates another text, or another part of the answer."""

NEUTRAL: Mapping[str, Any] = MappingProxyType(
    {
        "num_beams": 1,
        "beam_width": 1,
        "length_penalty": 1,
        "typical_p": 1,
        "typical": 1,
        "tfs_z": 1,
        "top_n_sigma": -1,
        "repeat_last_n": -1,
        "penalty_last_n": -1,
        "adaptive_target": -1,
        "n": 1,
        "best_of": 1,
        "temperature": 1,
        "top_p": 1,
        "top_k": -1,
        "repetition_penalty": 1,
        "repeat_penalty": 1,
        "skip_special_tokens": True,
        "add_generation_prompt": True,
        "tool_choice": "auto",
    }
)
"""Values with which a field has no effect, in addition to null, false, 0 and empty values."""

REASONS: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(
            _BEAMS,
            "beam search compares all beams after every token, while here each sample has its own seed and does not"
            " depend on the others; n gives several samples",
        ),
        **dict.fromkeys(
            ("return_hidden_states", "return_hidden_states_before_norm"),
            "this endpoint's answers have no place for hidden states; /v1/completions, /v1/chat/completions and"
            " /generate return them",
        ),
    }
)
"""Why some of the fields in CHANGING are not supported."""
