"""What all tiers share: time limits by folder."""

from __future__ import annotations

import pytest

LONG_TIERS = {"e2e", "scenarios"}
LONG_TIMEOUT_S = 300


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        is_long = LONG_TIERS & set(item.path.parts)
        if is_long and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(LONG_TIMEOUT_S))
