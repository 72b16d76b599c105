"""The virtual machine is asked for: it takes minutes."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--qemu", action="store_true", help="also run the virtual machine host")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--qemu", default=False):
        items[:] = [item for item in items if item.name != "test_virtual_machine"]
