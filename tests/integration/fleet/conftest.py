"""The three serving hosts that the fleet's parts share: a deploy takes minutes."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from serving_fleet import ServingFleet


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--keep-fleet", action="store_true", help="leave the hosts for the next part when all passed")


@pytest.fixture(scope="session")
def three(request: pytest.FixtureRequest) -> Iterator[ServingFleet]:
    """Three hosts that serve and are proved; those of an earlier part when they are as needed.

    KVFLEET_KEEP_HOST leaves them whatever happens, for work on a case.
    """
    made = ServingFleet()
    try:
        made.prepare()
        if not made.is_ready():
            made.deploy()
        yield made
    finally:
        good = request.config.getoption("--keep-fleet") and request.session.testsfailed == 0
        if not (good or os.environ.get("KVFLEET_KEEP_HOST")):
            made.down()
