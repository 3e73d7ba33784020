"""Published accuracies on corrupted images: all cells of a paper's tables, and what is wrong in its print."""

from __future__ import annotations

import importlib.resources
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from steelman.bounded import read_json
from steelman.corruptions import STANDARD
from steelman.errors import unknown


@dataclass(frozen=True)
class PublishedTable:
    """The accuracies of one published model, in percent.

    Arguments:
        name: the model, as the paper calls it.
        set_name: the set of images: "CIFAR-10-C" or "ImageNet-C".
        source: the paper and its tables.
        cells: five accuracies for each corruption, from severity 1 to 5.
        printed_mca: the mean accuracy that the paper prints.
        implied: the cells that the paper leaves out, as (corruption, severity). Their values follow from its means.
        errata: a sentence for each mistake of the paper in this row. Differences that rounding explains are none.
    """

    name: str
    set_name: str
    source: str
    cells: Mapping[str, tuple[float, ...]]
    printed_mca: float
    implied: tuple[tuple[str, int], ...] = ()
    errata: tuple[str, ...] = ()

    @property
    def mca(self) -> float:
        """The mean accuracy of all cells. It can differ from the printed one."""
        values = [value for row in self.cells.values() for value in row]
        return math.fsum(values) / len(values)


def _row(name: str, source: str, stored: dict[str, Any]) -> PublishedTable:
    cells = {corruption: list(stored["cells"][corruption]) for corruption in STANDARD}
    implied = []
    for corruption, severity, value in stored["implied"]:
        cells[corruption][severity - 1] = value
        implied.append((str(corruption), int(severity)))
    return PublishedTable(
        name=name,
        set_name=str(stored["set"]),
        source=source,
        cells={key: tuple(float(cell) for cell in row) for key, row in cells.items()},
        printed_mca=float(stored["mca"]),
        implied=tuple(implied),
        errata=tuple(stored["errata"]),
    )


def _read() -> dict[str, PublishedTable]:
    file = importlib.resources.files("steelman.corruptions") / "published.json"
    stored = read_json(file.read_bytes(), what="published.json")
    return {name: _row(name, str(stored["source"]), row) for name, row in stored["rows"].items()}


PUBLISHED: dict[str, PublishedTable] = _read()


def published_row(name: str) -> PublishedTable:
    """The published accuracies of the model that the paper calls `name`.

    >>> row = published_row("TRADES+HE")
    >>> row.set_name, row.cells["snow"], round(row.mca, 2)
    ('CIFAR-10-C', (83.69, 82.23, 80.13, 76.34, 73.74), 75.78)
    """
    if not isinstance(name, str) or name not in PUBLISHED:
        raise unknown("published row", name, PUBLISHED)
    return PUBLISHED[name]
