"""``docs/cache-disk.md`` shows the states that are tested, and every code that the library can give has a finding."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STATES = ROOT / "tests" / "integration" / "disks"
PAGE = ROOT / "docs" / "cache-disk.md"

sys.path.insert(0, str(STATES))

from states import STATES as TESTED  # noqa: E402


def table() -> str:
    """The table as the page must have it."""
    lines = ["| state | allowed | answer |", "|---|---|---|"]
    for state in TESTED:
        answer = f"refused, {state.answer}" if state.answer.startswith("KVF-") else state.answer
        lines.append(f"| {state.title} | {state.allowed} | {answer} |")
    return "\n".join(lines)


def test_page_shows_the_tested_states() -> None:
    shown = PAGE.read_text().split("<!-- states -->\n")[1].split("\n<!-- /states -->")[0]
    assert shown == table(), "run: python tests/unit/test_disks_docs.py"


def test_there_are_enough_states_and_none_twice() -> None:
    keys = [(state.title, state.allowed) for state in TESTED]
    assert len(set(keys)) == len(keys)
    assert len(keys) >= 40


def test_named_tests_exist() -> None:
    defined: set[str] = set()
    for path in STATES.glob("test_*.py"):
        defined |= {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}
    named = set(re.findall(r"`(test_\w+)`", PAGE.read_text()))
    assert len(named) >= 10
    assert named <= defined


if __name__ == "__main__":
    before, rest = PAGE.read_text().split("<!-- states -->\n")
    PAGE.write_text(f"{before}<!-- states -->\n{table()}\n<!-- /states -->{rest.split('<!-- /states -->')[1]}")
