"""Charts that are files of their own."""

import re
from xml.etree import ElementTree

from kvfleet import plots


def test_a_chart_as_a_file_is_whole_and_brings_every_colour_it_uses():
    points = [(8.0, 8.1), (32.0, 11.7)]
    chart = plots.by_concurrency("x", "Requests per second", "requests/s", {"gpu": points, "disk": points})
    text = plots.as_file(chart)
    root = ElementTree.fromstring(text)  # noqa: S314 - our own text
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    style = root.find("{http://www.w3.org/2000/svg}style").text
    # light and dark
    for name in set(re.findall(r"var\((--\w+)\)", text)):
        assert style.count(f"{name}:") == 2, name
    assert "var(--disk)" in text
    labels = {node.text for node in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {"gpu", "disk", "requests/s", "8", "32"} <= labels
