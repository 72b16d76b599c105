"""Every code of the planner stands in docs/sizing.md, and nothing else does."""

import re

from kvfleet.checkout import ROOT

PARTS = (
    "models",
    "modelcheck",
    "gpus",
    "numa",
    "hostfacts",
    "hostcheck",
    "settings",
    "flags",
    "breakeven",
    "pools",
    "sizing",
    "planning",
)


def test_every_code_is_explained_once():
    used = set()
    for part in PARTS:
        used |= set(re.findall(r"KVF-[A-Z]+-\d{3}", (ROOT / f"plugins/module_utils/kvfleet/{part}.py").read_text()))
    rows = re.findall(r"^\| (KVF-[A-Z]+-\d{3})( W)? \|", (ROOT / "docs/sizing.md").read_text(), re.MULTILINE)
    explained = [code for code, _ in rows]
    assert sorted(explained) == sorted(set(explained))
    assert set(explained) == used


def test_every_warning_is_marked():
    text = (ROOT / "plugins/module_utils/kvfleet/sizing.py").read_text()
    elsewhere = {"KVF-SET-010", "KVF-SET-023", "KVF-SET-024", "KVF-MODEL-010"}
    warned = set(re.findall(r"_warn\(\s*\"(KVF-[A-Z]+-\d{3})\"", text)) | elsewhere
    marked = set(re.findall(r"^\| (KVF-[A-Z]+-\d{3}) W \|", (ROOT / "docs/sizing.md").read_text(), re.MULTILINE))
    assert marked == warned
