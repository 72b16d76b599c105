"""The releases' tests share one host: a deploy takes minutes."""

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
# the stub wheels of the unit tests
sys.path.insert(0, str(HERE.parents[1] / "unit"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--keep-host", action="store_true", help="leave the host for the next part when all passed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in Path(item.path).parents:
            item.add_marker(pytest.mark.root)


@pytest.fixture(scope="session")
def fleet(request: pytest.FixtureRequest):
    """A host on which the older release serves and requests flow; the one of an earlier part when it is as needed."""
    from fleet import Fleet

    made = Fleet()
    made.prepare()
    try:
        if not made.is_ready():
            made.deploy()
        yield made
    finally:
        if not (request.config.getoption("--keep-host") and request.session.testsfailed == 0):
            made.down()
