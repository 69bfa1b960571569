"""Translates structural tags to the grammar notation of each library."""

from __future__ import annotations

import json
import re
from typing import Any

from sglcore.engine.structured_output.guidance_schema import embedded
from sglcore.sampling.structural_tag import StructuralTag

ANY = "(?s:.*)"


def lark_of_tags(found: StructuralTag) -> str:
    """Return the tags in the Lark dialect of llguidance. Free text ends as soon as it contains a
    trigger; the free text at the end has no trigger. Raises GrammarError for a schema that cannot
    be enforced."""
    heads = [f"tagged_{number}" for number in range(len(found.triggers))]
    triggers = "|".join(map(_escaped, found.triggers))
    rules = [
        "start: tagged | rest" if found.is_last else "start: tagged* rest",
        f"tagged: {' | '.join(heads)}",
        "rest: REST",
        f"REST: /{ANY}/ & ~/{ANY[:-1]}({triggers}).*)/",
    ]
    for number, trigger in enumerate(found.triggers):
        tags = found.of(trigger)
        rules.append(f"tagged_{number}: head_{number} ({' | '.join(f'tag_{place}' for place, _ in tags)})")
        rules.append(f"head_{number}[lazy]: /{ANY}/ {_quoted(trigger)}")
        for place, tag in tags:
            rest, end = (_quoted(text) if text else "" for text in (tag.begin[len(trigger) :], tag.end))
            rules += [f"tag_{place}: {rest} value_{place} {end}".rstrip()]
            rules += [f"value_{place}: %json {embedded(json.loads(tag.schema))}"]
    return "\n".join(rules) + "\n"


def xgrammar_of_tags(found: StructuralTag) -> dict[str, Any]:
    """Return the tags as the JSON value that xgrammar reads."""
    tags = [
        {
            "type": "tag",
            "begin": tag.begin,
            "content": {"type": "json_schema", "json_schema": json.loads(tag.schema)},
            "end": tag.end,
        }
        for tag in found.tags
    ]
    form = {"type": "triggered_tags", "triggers": list(found.triggers), "tags": tags, "stop_after_first": found.is_last}
    return {"type": "structural_tag", "format": form}


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _escaped(text: str) -> str:
    return re.sub(r"([\\.+*?()|\[\]{}^$/])", r"\\\1", text).replace("\n", "\\n")
