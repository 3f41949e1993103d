"""Panels are drawn with Grafana's legends and units, and the pictures in the documents show every panel."""

from __future__ import annotations

from html import escape
from xml.etree import ElementTree

import pytest

from tools.grafana import DASHBOARDS
from tools.panel_pictures import PICTURES, draw_dashboard, format_value, parse_lines


def answer(**labels: str) -> dict[str, object]:
    return {"metric": labels, "values": [[100, "1"], [101, "NaN"], [102, "3"]]}


def test_lines_have_grafanas_legends_and_no_missing_points() -> None:
    (line,) = parse_lines([answer(role="decode", engine="decode-0")], "{{role}} {{engine}}")
    assert line.legend == "decode decode-0"
    assert line.points == [(100.0, 1.0), (102.0, 3.0)]
    assert parse_lines([{"metric": {}, "values": [[100, "NaN"]]}], "all") == []


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.5, "percentunit", "50 %"),
        (0.0123, "s", "12.3 ms"),
        (2.5, "s", "2.5 s"),
        (2.5e6, "Bps", "2.5 MB/s"),
        (3.0, "reqps", "3 req/s"),
        (1500.0, "none", "1.5 k"),
    ],
)
def test_values_have_the_panels_unit(value: float, unit: str, text: str) -> None:
    assert format_value(value, unit) == text


def test_a_dashboard_is_drawn_with_and_without_data() -> None:
    title, panels = DASHBOARDS["overview"]
    lines = parse_lines([answer(a="<b>")], "{{a}}")
    drawn = draw_dashboard(title, [(panel, lines if number else []) for number, panel in enumerate(panels)], (99, 103))
    ElementTree.fromstring(drawn)
    assert drawn.count("No traffic") == 1
    assert "&lt;b&gt;: " in drawn


@pytest.mark.parametrize("name", sorted(DASHBOARDS))
def test_pictures_show_every_panel(name: str) -> None:
    drawn = (PICTURES / f"panels-{name}.svg").read_text()
    missing = [panel[0] for panel in DASHBOARDS[name][1] if f">{escape(panel[0])}<" not in drawn]
    assert missing == [], "python -m tools.panel_pictures"
    assert "No traffic" not in drawn
