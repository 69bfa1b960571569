"""Checkpoints without weights: a byte-level tokenizer with each family's markers, and small
templates of our own."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from sglcore.engine.tokenizers.text_codec import TextCodec
from sglcore.serving.chat.format import ChatFormat
from sglcore.serving.chat.parsers.delta import Delta, calls_of, joined, text_of

PLAIN = """
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

HERMES = """
{%- if tools %}<|im_start|>system
Tools: {% for t in tools %}{{ t | tojson }} {% endfor %}
Answer with <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>
{% endif %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}<|im_start|>assistant
{{ m.content or '' }}
{%- for c in m.tool_calls or [] %}
{%- if m.content or not loop.first %}{{ '\\n' }}{% endif %}
{{- '<tool_call>\\n{"name": "' ~ c.function.name ~ '", "arguments": ' ~ (c.function.arguments | tojson) ~ '}\\n</tool_call>' }}
{%- endfor %}<|im_end|>
{% elif m.role == 'tool' %}<|im_start|>user
<tool_response>{{ m.content }}</tool_response><|im_end|>
{% else %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""

THINKING = HERMES.replace(
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}", "<think>\n"
).replace("{{ m.content or '' }}", "{{ '<think>' ~ (m.reasoning_content or '') ~ '</think>' ~ (m.content or '') }}")

CODER = """
{%- for t in tools or [] %}{% if loop.first %}<|im_start|>system
{% endif %}<function>{{ t.function.name }}</function>{% endfor %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content or '' }}
{%- for c in m.tool_calls or [] %}
{{- '\\n<tool_call>\\n<function=' ~ c.function.name ~ '>\\n' }}
{%- for key, value in c.function.arguments.items() %}
{{- '<parameter=' ~ key ~ '>\\n' }}
{{- value if value is string else (value | tojson if value is mapping or value is iterable else value | string) }}
{{- '\\n</parameter>\\n' }}
{%- endfor %}
{{- '</function>\\n</tool_call>' }}
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

GLM = """[gMASK]<sop>
{%- for t in tools or [] %}{% if loop.first %}<|system|>
{% endif %}{{ t | tojson }}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}<|assistant|>
{{- '\\n<think>' ~ (m.reasoning_content or '') ~ '</think>' }}
{%- if m.content %}{{ '\\n' ~ m.content }}{% endif %}
{%- for c in m.tool_calls or [] %}
{{- '\\n<tool_call>' ~ c.function.name ~ '\\n' }}
{%- for key, value in c.function.arguments.items() %}
{{- '<arg_key>' ~ key ~ '</arg_key>\\n<arg_value>' ~ (value if value is string else value | tojson) ~ '</arg_value>\\n' }}
{%- endfor %}{{- '</tool_call>' }}
{%- endfor %}
{%- else %}{{ '<|' ~ ('observation' if m.role == 'tool' else m.role) ~ '|>\\n' ~ m.content }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""

GLM_CLOSE = GLM.replace("\\n", "").replace("<|assistant|>{% endif %}", "<|assistant|><think>{% endif %}")
"""Without line ends, as in GLM-4.7, and with reasoning opened by the prompt."""

MINIMAX = """]~!b[]~b]system
{% for t in tools or [] %}<tool>{{ t.function | tojson }}</tool>
{% endfor %}[e~[
{% for m in messages %}
{%- if m.role == 'assistant' %}]~b]ai
{% if m.reasoning_content %}{{ '<think>\\n' ~ m.reasoning_content ~ '\\n</think>\\n\\n' }}{% endif %}{{ m.content or '' }}
{%- for c in m.tool_calls or [] %}
{{- '\\n<minimax:tool_call>\\n' if loop.first else '' }}{{ '<invoke name="' ~ c.function.name ~ '">\\n' }}
{%- for key, value in c.function.arguments.items() %}
{{- '<parameter name="' ~ key ~ '">' ~ (value if value is string else value | tojson) ~ '</parameter>\\n' }}
{%- endfor %}{{- '</invoke>\\n' }}{{ '</minimax:tool_call>' if loop.last else '' }}
{%- endfor %}
{%- elif m.role == 'tool' %}]~b]tool
<response>{{ m.content }}</response>
{%- else %}{{ ']~b]' ~ m.role ~ '\\n' ~ m.content }}{% endif %}[e~[
{% endfor %}
{%- if add_generation_prompt %}]~b]ai
<think>
{% endif %}"""

LLAMA = """{{ bos_token }}
{%- if tools %}<|start_header_id|>system<|end_header_id|>

Answer with {"name": ..., "parameters": ...}. {% for t in tools %}{{ t | tojson(indent=4) }}{% endfor %}<|eot_id|>{% endif %}
{%- for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>

{% if m.tool_calls %}
{%- if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}
{%- set f = m.tool_calls[0].function %}
{{- '{"name": "' + f.name + '", "parameters": ' + (f.arguments | tojson) + '}' }}
{%- else %}{{ m.content | trim }}{% endif %}<|eot_id|>
{%- endfor %}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""

MISTRAL_LIST = """{{ bos_token }}
{%- if tools %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{%- for m in messages %}
{%- if m.role == 'user' %}[INST] {{ m.content }}[/INST]
{%- elif m.tool_calls is defined %}[TOOL_CALLS] [
{%- for c in m.tool_calls %}
{%- if c.id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}
{{- '{"name": "' ~ c.function.name ~ '", "arguments": ' ~ (c.function.arguments | tojson) ~ ', "id": "' ~ c.id ~ '"}' }}
{%- if not loop.last %}, {% endif %}
{%- endfor %}]</s>
{%- elif m.role == 'assistant' %} {{ m.content }}</s>
{%- else %}[TOOL_RESULTS] {{ m.content }}[/TOOL_RESULTS]{% endif %}
{%- endfor %}"""

MISTRAL_NAMED = """{{ bos_token }}
{%- if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{%- for m in messages %}
{%- if m.role == 'user' %}[INST]{{ m.content }}[/INST]
{%- elif m.tool_calls is defined %}
{%- for c in m.tool_calls %}[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}{% endfor %}</s>
{%- else %}{{ m.content }}</s>{% endif %}
{%- endfor %}"""

DEEPSEEK_FENCED = """{{ bos_token }}{% for t in tools or [] %}{{ t | tojson }}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'user' %}<｜User｜>{{ m.content }}
{%- elif m.tool_calls and m.content is none %}<｜Assistant｜><｜tool▁calls▁begin｜>
{%- for c in m.tool_calls %}
{%- if not loop.first %}{{ '\\n' }}{% endif %}
{{- '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + c.function.name + '\\n```json\\n' + c.function.arguments + '\\n```' }}
{{- '<｜tool▁call▁end｜>' }}
{%- endfor %}<｜tool▁calls▁end｜><｜end▁of▁sentence｜>
{%- elif m.role == 'assistant' %}<｜Assistant｜>{{ m.content.split('</think>')[-1] }}<｜end▁of▁sentence｜>{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<｜Assistant｜><think>
{% endif %}"""

DEEPSEEK_BARE = DEEPSEEK_FENCED.replace(
    """'<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + c.function.name + '\\n```json\\n' + c.function.arguments + '\\n```'""",
    """'<｜tool▁call▁begin｜>' + c.function.name + '<｜tool▁sep｜>' + c.function.arguments""",
)

KIMI = """
{%- if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{% endif %}
{%- for m in messages %}<|im_{{ m.role }}|>{{ m.role }}<|im_middle|>
{%- if m.role == 'assistant' %}<think>{{ m.get('reasoning_content', '') }}</think>{% endif %}
{%- if m.role == 'tool' %}## Return of {{ m.tool_call_id }}
{% endif %}{{ m.content or '' }}
{%- for c in m.tool_calls or [] %}
{{- '<|tool_calls_section_begin|>' if loop.first else '' }}
{{- '<|tool_call_begin|>' ~ c.id ~ '<|tool_call_argument_begin|>' }}
{{- c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}<|tool_call_end|>
{{- '<|tool_calls_section_end|>' if loop.last else '' }}
{%- endfor %}<|im_end|>
{%- endfor %}
{%- if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"""

GRANITE = """<|start_of_role|>system<|end_of_role|>You are helpful
{%- if tools %}, respond only with <|tool_call|> followed by a JSON list of tools used: {{ tools | tojson }}{% endif %}
{%- for m in messages %}<|end_of_text|>
<|start_of_role|>{{ m.role }}<|end_of_role|>{{ m.content }}
{%- endfor %}<|end_of_text|>
{% if add_generation_prompt %}<|start_of_role|>assistant<|end_of_role|>{% endif %}"""
"""Describes how calls are written, but writes none itself, as in Granite 3.3."""
GRANITE_THINKING = GRANITE.replace(
    "{%- if tools %}", "{% if thinking %}: <think></think> and <response></response>{% endif %}{% if tools %}"
)

PHI = """
{%- for t in tools or [] %}{{ '<|tool|>' + (t['function'] | tojson) + '<|/tool|>' }}{% endfor %}
{%- for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}
{%- for c in m.tool_calls %}{{ '<|tool_call|>' + (c['function'] | tojson) + '<|/tool_call|>' }}{% endfor %}<|end|>
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""

NEMOTRON = """
{%- if tools %}<SPECIAL_10>System
<AVAILABLE_TOOLS>{{ tools | tojson }}</AVAILABLE_TOOLS>{% endif %}
{%- for m in messages %}<SPECIAL_11>{{ m.role }}
{{ m.content or '' }}
{%- for c in m.tool_calls or [] %}{{ '<TOOLCALL>[' if loop.first else ', ' }}
{{- '{"name": "' + c.function.name + '", "arguments": ' + (c.function.arguments | tojson) + '}' }}
{{- ']</TOOLCALL>' if loop.last else '' }}
{%- endfor %}
<SPECIAL_12>
{% endfor %}
{%- if add_generation_prompt %}<SPECIAL_11>assistant
<think>

{% endif %}"""

LFM = """{{ bos_token }}{% if tools %}<|im_start|>system
List of tools: {{ tools | tojson }}<|im_end|>
{% endif %}
{%- macro value(v) %}{% if v is string %}'{{ v }}'{% elif v is mapping %}{{ v | tojson }}{% else %}{{ v }}{% endif %}{% endmacro %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.thinking %}<think>{{ m.thinking }}</think>{% endif %}{{ m.content or '' }}
{%- for c in m.tool_calls or [] %}{{ '<|tool_call_start|>[' if loop.first else ', ' }}{{ c.function.name }}(
{%- for key, v in c.function.arguments.items() %}{{ ', ' if not loop.first }}{{ key }}={{ value(v) }}{% endfor %})
{{- ']<|tool_call_end|>' if loop.last else '' }}
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

LFM_JSON = LFM.replace(
    LFM[LFM.index("{{ c.function.name }}(") : LFM.index("{{- ']<|tool_call_end|>'")],
    """{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n""",
)
LFM_SILENT = """{{ tools | tojson if tools }}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""Writes no calls, as in LFM2."""
LFM_TOKENS = ("<|im_start|>", "<|im_end|>", "<|tool_call_start|>", "<|tool_call_end|>")

GEMMA = """
{%- macro value(v) %}
{%- if v is string %}{{ '<|"|>' + v + '<|"|>' }}
{%- elif v is boolean %}{{ 'true' if v else 'false' }}
{%- elif v is mapping %}{
{%- for key, each in v | dictsort %}{{ ',' if not loop.first }}{{ key }}:{{ value(each) }}{% endfor %}}
{%- elif v is iterable %}[
{%- for each in v %}{{ ',' if not loop.first }}{{ value(each) }}{% endfor %}]
{%- else %}{{ v }}{% endif %}
{%- endmacro %}{{ bos_token }}
{%- for t in tools or [] %}<|tool>{{ t | tojson }}<tool|>{% endfor %}
{%- for m in messages %}<|turn>{{ 'model' if m.role == 'assistant' else m.role }}
{% if m.reasoning_content %}<|channel>thought
{{ m.reasoning_content }}<channel|>{% endif %}
{%- for c in m.tool_calls or [] %}<|tool_call>call:{{ c.function.name }}{{ value(c.function.arguments) }}<tool_call|>
{%- endfor %}{{ m.content or '' }}<turn|>
{% endfor %}
{%- if add_generation_prompt %}<|turn>model
{% endif %}"""
FUNCTION_GEMMA = (
    GEMMA.replace("<|tool_call>", "<start_function_call>")
    .replace("<tool_call|>", "<end_function_call>")
    .replace('<|"|>', "<escape>")
    .replace("<|channel>thought\n{{ m.reasoning_content }}<channel|>", "")
)

HARMONY = """<|start|>system<|message|>Valid channels: analysis, commentary, final.<|end|>
{%- for t in tools or [] %}{% if loop.first %}<|start|>developer<|message|>{% endif %}
{{- '// ' + t.function.description + '\\ntype ' + t.function.name + ' = ' ~ (t.function.parameters or {}) | tojson }}
{%- if loop.last %}<|end|>{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' and 'tool_calls' in m %}
{%- if m.content and m.thinking %}{{ raise_exception('content or thinking, not both') }}{% endif %}
{%- if '<|channel|>final<|message|>' in m.content %}{{ raise_exception('channels') }}{% endif %}
{%- if m.content or m.thinking %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + (m.content or m.thinking) + '<|end|>' }}{% endif %}
{%- set f = m.tool_calls[0].function %}
{{- '<|start|>assistant to=functions.' + f.name + '<|channel|>commentary json<|message|>' }}
{{- (f.arguments | tojson) + '<|call|>' }}
{%- elif m.role == 'assistant' %}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content }}
{{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
{%- else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""
"""Writes only the first call of a message, and needs a description of every tool, as in gpt-oss."""

HARMONY_TOKENS = tuple(f"<|{name}|>" for name in ("start", "end", "message", "channel", "constrain", "call", "return"))

THINK = ("<think>", "</think>")
GLM_TOKENS = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", *THINK)
KIMI_TOKENS = (
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>", *THINK),
)
MINIMAX_TOKENS = ("<minimax:tool_call>", "</minimax:tool_call>", *THINK)
DEEPSEEK_TOKENS = tuple(f"<｜tool▁{name}｜>" for name in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep"))


@dataclass(frozen=True)
class Family:
    """A template, its tokens, and the parsers that must be detected."""

    template: str
    special: tuple[str, ...]
    added: tuple[str, ...]
    tools: str | None
    reasoning: str | None = None


FAMILIES = {
    "hermes": Family(HERMES, ("<|im_start|>", "<|im_end|>"), ("<tool_call>", "</tool_call>"), "hermes", "think"),
    "thinking": Family(
        THINKING,
        ("<|im_start|>", "<|im_end|>"),
        ("<tool_call>", "</tool_call>", "<think>", "</think>"),
        "hermes",
        "think",
    ),
    "coder": Family(CODER, ("<|im_start|>", "<|im_end|>"), ("<tool_call>", "</tool_call>"), "qwen3_coder"),
    "glm": Family(GLM, ("<|user|>", "<|assistant|>", "<|observation|>"), GLM_TOKENS, "glm", "think"),
    "glm close": Family(GLM_CLOSE, ("<|user|>", "<|assistant|>", "<|observation|>"), GLM_TOKENS, "glm", "think"),
    "minimax": Family(MINIMAX, ("]~b]", "[e~["), MINIMAX_TOKENS, "minimax", "think"),
    "llama": Family(LLAMA, ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"), (), "llama3"),
    "mistral list": Family(MISTRAL_LIST, ("[INST]", "[/INST]", "[TOOL_CALLS]", "</s>"), (), "mistral"),
    "mistral named": Family(MISTRAL_NAMED, ("[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]", "</s>"), (), "mistral"),
    "deepseek fenced": Family(
        DEEPSEEK_FENCED, ("<｜end▁of▁sentence｜>",), (*DEEPSEEK_TOKENS, "<think>", "</think>"), "deepseek", "think"
    ),
    "deepseek bare": Family(
        DEEPSEEK_BARE, ("<｜end▁of▁sentence｜>",), (*DEEPSEEK_TOKENS, "<think>", "</think>"), "deepseek", "think"
    ),
    "harmony": Family(HARMONY, HARMONY_TOKENS, (), "harmony", "harmony"),
    "kimi": Family(KIMI, ("<|im_end|>", "<|im_user|>", "<|im_assistant|>"), KIMI_TOKENS, "kimi", "think"),
    "granite": Family(GRANITE, ("<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>"), (), "granite"),
    "granite token": Family(GRANITE, ("<|end_of_text|>", "<|start_of_role|>", "<|tool_call|>"), (), "granite"),
    "granite thinking": Family(GRANITE_THINKING, ("<|end_of_text|>", "<|start_of_role|>"), (), "granite", "granite"),
    "phi": Family(PHI, ("<|end|>", "<|assistant|>"), ("<|tool_call|>", "<|/tool_call|>"), "granite"),
    "nemotron": Family(NEMOTRON, ("<SPECIAL_11>", "<SPECIAL_12>"), (*THINK, "<TOOLCALL>"), "nemotron", "think"),
    "lfm2": Family(LFM, LFM_TOKENS, (), "lfm2", "think"),
    "lfm2 json": Family(LFM_JSON, LFM_TOKENS, (), "lfm2_json", "think"),
    "lfm2 silent": Family(LFM_SILENT, LFM_TOKENS, (), "lfm2"),
    "gemma": Family(GEMMA, ("<turn|>", "<|tool_call>", "<tool_call|>", '<|"|>', "<channel|>"), (), "gemma", "gemma"),
    "functiongemma": Family(FUNCTION_GEMMA, ("<turn|>", "<escape>", "<end_function_call>"), (), "functiongemma"),
    "plain": Family(PLAIN, ("<|im_start|>", "<|im_end|>"), (), None),
}


def make_codec(
    folder: Path,
    template: str | None,
    special: tuple[str, ...] = (),
    added: tuple[str, ...] = (),
    settings: dict[str, Any] | None = None,
) -> TextCodec:
    """A codec over single bytes and the given tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={mark: number for number, mark in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", *special])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in added])
    tokenizer.save(str(folder / "tokenizer.json"))
    given = {"bos_token": "<s>", **({"chat_template": template} if template else {}), **(settings or {})}
    (folder / "tokenizer_config.json").write_text(json.dumps(given))
    return TextCodec(folder)


def codec_of(name: str, folder: Path) -> TextCodec:
    """The codec of a family."""
    family = FAMILIES[name]
    return make_codec(folder / name.replace(" ", "_"), family.template, family.special, family.added)


Read = tuple[str, str, list[tuple[str, str]]]
"""(reasoning, content, [(name, arguments) of each call])"""


def read(form: ChatFormat, text: str, tools: Any = None, *, is_open: bool = False) -> Read:
    """Parse an answer, and check that the result is the same however its text is split."""

    def split(*parts: str) -> list[Delta]:
        reader = form.stream(tools=tools, reasoning_open=is_open)
        found = joined([*(delta for part in parts for delta in reader.push(part)), *reader.finish()])
        return [replace(delta, call_id="") for delta in found]

    whole = split(text)
    assert split(*text) == whole
    for place in range(len(text)):
        assert split(text[:place], text[place:]) == whole
    calls = [(call.name, call.arguments) for call in calls_of(whole)]
    return text_of(whole, "reasoning"), text_of(whole, "content"), calls
