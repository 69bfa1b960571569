"""The dashboard in docs/ queries only metrics that /metrics has."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from sglcore.serving.replicas.metrics.server_metrics import Metrics
from tests.serving.replicas.test_metrics import STATS

DASHBOARD = Path(__file__).parents[3] / "docs" / "grafana.json"
SELECTED = re.compile(r"(sglcore_\w+)(?:\{([^}]*)\})?")
GROUPED = re.compile(r"sum by \((\w+)\) \(rate\((sglcore_\w+)")


def questions(document: Any) -> Iterator[str]:
    """Every expression of a panel or a variable."""
    for panel in document["panels"]:
        yield from (target["expr"] for target in panel.get("targets", ()))
    yield from (variable["query"] for variable in document["templating"]["list"] if variable["type"] == "query")


def known() -> dict[str, set[str]]:
    """{metric name: its labels} of the /metrics page."""
    metrics = Metrics("tiny", "1", lambda: [("0", "ready", STATS)])
    metrics.responded("GET", "/", 200)
    metrics.refused("overloaded")
    clock = metrics.clock()
    clock.on_first_tokens(1)
    clock.on_end("stop")
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(metrics.page().decode()):
        for each in family.samples:
            found.setdefault(each.name, set()).update(each.labels)
    return found


def test_every_name_and_label_of_the_dashboard_is_on_the_page() -> None:
    document, names = json.loads(DASHBOARD.read_text()), known()
    asked = list(questions(document))
    selected = [found for text in asked for found in SELECTED.findall(text)]
    assert len(selected) > 30
    for name, labels in selected:
        assert name in names, name
        assert set(re.findall(r"(\w+)=~?", labels)) <= names[name], (name, labels)
    grouped = [found for text in asked for found in GROUPED.findall(text)]
    assert grouped and all(label in names[name] for label, name in grouped)


def test_panels_have_places_of_their_own_and_ids_of_their_own() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    places = [(each["gridPos"]["x"], each["gridPos"]["y"]) for each in panels]
    assert len(set(places)) == len(places) and len({each["id"] for each in panels}) == len(panels)
