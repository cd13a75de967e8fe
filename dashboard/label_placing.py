"""Places of labels on a figure, in pixels: none covers another, and each covers as few lines as it can."""

from collections.abc import Iterable, Mapping

import numpy as np

PLOT = np.array([800, 400])
"""Usual width and height of the part of a figure that holds its points."""
NARROW = 250
"""Its width on a phone."""
LEFT = 0.4
"""Share of an axis where a label is better to the right of its point."""
ROOM = np.array([34, 20])
"""Width and height that a trial's number takes."""
BESIDE = np.array(
    [(28, 0), (0, 20), (0, -20), (-28, 0), (44, 36), (44, -36), (-44, 36), (-44, -36), (70, 0), (0, 56), (0, -56)]
)
"""Places of a number from its point, to the right and up, the best first."""

Box = tuple[np.ndarray, np.ndarray]
"""A rectangle's centre and size."""


def named(share: float) -> tuple[int, int]:
    """Return the place of a point's name in two lines, to the right and up; `share` is how far right the point is."""
    return (34, -44) if share < LEFT else (-34, 12)  # left of a front there are no points


def box_of_name(point: np.ndarray) -> Box:
    """Return the rectangle of a point's name in two lines."""
    right, up = named(point[0] / PLOT[0])
    return point + np.array([right + 65 * np.sign(right), up]), np.array([130, 36])


def beside(
    points: Mapping[int, np.ndarray], lines: Iterable[np.ndarray], taken: Iterable[Box]
) -> dict[int, np.ndarray]:
    """Return the place of each point's number from it, to the right and up; one without room is left out.

    Args:
        points: By number, those placed first in front.
        lines: Each line's corners, one a row.
        taken: Rectangles of other labels.
    """
    drawn, boxes = np.concatenate([np.empty((0, 2)), *map(_along, lines)]), list(taken)
    places = {}
    for number, point in points.items():
        free = [
            shift
            for shift in BESIDE
            if abs(point[1] + shift[1] - PLOT[1] / 2) < PLOT[1] / 2
            and abs(point[0] / PLOT[0] * NARROW + shift[0] - NARROW / 2) < (NARROW - ROOM[0] / 2) / 2
            and all((abs(point + shift - other) >= (ROOM + size) / 2).any() for other, size in boxes)
        ]
        if free:
            places[number] = min(free, key=lambda shift: (abs(drawn - point - shift) < ROOM / 2).all(axis=1).sum())
            boxes.append((point + places[number], ROOM))
    return places


def _along(corners: np.ndarray) -> np.ndarray:
    """Return points along a line through `corners`, ten to each part."""
    parts = np.arange(0, len(corners) - 0.95, 0.1)
    return np.column_stack([np.interp(parts, range(len(corners)), corners[:, side]) for side in (0, 1)])
