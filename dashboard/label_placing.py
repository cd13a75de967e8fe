"""Places of labels on a figure, in pixels: none covers another, and each covers as few lines as it can."""

from collections.abc import Iterable, Mapping

import numpy as np

PLOT = np.array([800, 400])
"""Usual width and height of the part of a figure that holds its points."""
NARROW = 250
"""Its width on a phone."""
ROOM = np.array([34, 20])
"""Width and height that a trial's number takes."""
BESIDE = np.array(
    [(28, 0), (0, 20), (0, -20), (-28, 0), (44, 36), (44, -36), (-44, 36), (-44, -36), (70, 0), (0, 56), (0, -56)]
)
"""Places of a number from its point, to the right and up, the best first."""


def beside(
    points: Mapping[int, np.ndarray], lines: Iterable[np.ndarray], taken: Iterable[np.ndarray]
) -> dict[int, np.ndarray]:
    """Return the place of each point's number from it, to the right and up; one without room is left out.

    Points in front are placed first. A line is its corners, one a row; `taken` are centres of marks as large as a
    number.
    """
    drawn, centres = np.concatenate([np.empty((0, 2)), *map(_along, lines)]), list(taken)
    places: dict[int, np.ndarray] = {}
    for number, point in points.items():
        free = [
            shift
            for shift in BESIDE
            if abs(point[1] + shift[1] - PLOT[1] / 2) < PLOT[1] / 2
            and abs(point[0] / PLOT[0] * NARROW + shift[0] - NARROW / 2) < (NARROW - ROOM[0] / 2) / 2
            and all((abs(point + shift - other) >= ROOM).any() for other in centres)
        ]
        if free:
            places[number] = min(free, key=lambda shift: (abs(drawn - point - shift) < ROOM / 2).all(axis=1).sum())
            centres.append(point + places[number])
    return places


def _along(corners: np.ndarray) -> np.ndarray:
    """Return points along a line through `corners`, ten to each part."""
    parts = np.arange(0, len(corners) - 0.95, 0.1)
    return np.column_stack([np.interp(parts, range(len(corners)), corners[:, side]) for side in (0, 1)])
