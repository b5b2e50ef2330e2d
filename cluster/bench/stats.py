"""Percentiles, spreads and ratios of small samples. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def percentile(values: Sequence[float], rank: float) -> float:
    """Return the value below which `rank` (0 to 100) per cent lie, linearly interpolated.

    Raises:
        ValueError: there are no values.
    """
    if not values:
        raise ValueError("a percentile of nothing")
    ordered = sorted(values)
    position = (len(ordered) - 1) * rank / 100
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


@dataclass(frozen=True, slots=True)
class Spread:
    """A sample in three numbers."""

    median: float
    lowest: float
    highest: float

    def text(self, digits: int) -> str:
        """For example "81.2 (79.9-84.0)"; a sample without spread is one number."""
        middle = f"{self.median:.{digits}f}"
        if self.lowest == self.highest:
            return middle
        return f"{middle} ({self.lowest:.{digits}f}-{self.highest:.{digits}f})"


def spread(values: Sequence[float]) -> Spread:
    """Median, lowest and highest.

    Raises:
        ValueError: there are no values.
    """
    if not values:
        raise ValueError("a spread of nothing")
    return Spread(median(values), min(values), max(values))


def pair_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Spread:
    """Median of the ratios of neighbours in time, with their quartiles as the spread."""
    ratios = [a / b for a, b in zip(numerators, denominators, strict=True)]
    return Spread(median(ratios), percentile(ratios, 25), percentile(ratios, 75))
