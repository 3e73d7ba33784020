"""What is measured on corrupted images: which corruptions, how severe, with which constants and noise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator, model_validator

from steelman.corruptions import CORRUPTIONS, SEVERITIES, STANDARD
from steelman.corruptions.base import Corruption, Family
from steelman.corruptions.weather import Frost
from steelman.errors import UserError, shown, unknown
from steelman.settings import Count, SettingsError, make, settings


def _names(names: object) -> object:
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise UserError(f"expected a list of names, such as [fog, snow], got {shown(names)}")
    for name in names:
        if not isinstance(name, str) or name not in CORRUPTIONS:
            raise unknown("corruption", name, CORRUPTIONS)
    if not names:
        raise UserError("expected at least one, got none")
    return tuple(name for name in CORRUPTIONS if name in names)


def _severities(severities: object) -> object:
    if isinstance(severities, str) or not isinstance(severities, Sequence):
        raise UserError(f"expected a list such as [1, 3, 5], got {shown(severities)}")
    for one in severities:
        if isinstance(one, bool) or not isinstance(one, int) or one not in SEVERITIES:
            raise UserError(f"expected numbers from 1 to 5, got {shown(one)}")
    if not severities:
        raise UserError("expected at least one, got none")
    return tuple(sorted(set(severities)))


@settings
class Plan:
    """The corruptions, their severities, and whose constants they have.

    `exact` cuts the images to 8 bits, as the published sets are. `frost` is a folder with pictures of frost, or
    "generated". `seed` is that of the noise.
    """

    corruptions: Annotated[tuple[str, ...], BeforeValidator(_names)] = STANDARD
    severities: Annotated[tuple[int, ...], BeforeValidator(_severities)] = SEVERITIES
    family: Family = "auto"
    exact: bool = True
    frost: str | None = None
    seed: int = 0

    @model_validator(mode="after")
    def _pictures(self) -> Plan:
        if "frost" in self.corruptions:  # a folder without pictures is refused now, not after hours
            try:
                Frost(pictures=self.frost).check()
            except UserError as error:
                raise SettingsError([(("frost",), str(error).removeprefix("pictures: "))]) from None
        return self

    def build(self, name: str, severity: int) -> Corruption:
        """The corruption of a cell."""
        more = {"pictures": self.frost} if CORRUPTIONS[name] is Frost else {}
        options = {"severity": severity, "family": self.family, "exact": self.exact, **more}
        return make("corruption", CORRUPTIONS, name, options)

    def described(self, shape: tuple[int, int, int]) -> dict[str, Any]:
        """The settings of the corruptions, with the constants of each cell for images of this shape."""
        built = {cell: self.build(*cell) for cell in self.cells()}
        return {
            "family": next(iter(built.values())).family_for(*shape[1:]),
            "exact": self.exact,
            "constants": {
                name: [list(map(float, built[name, severity].constants(*shape[1:]))) for severity in self.severities]
                for name in self.corruptions
            },
        }

    def cells(self) -> list[tuple[str, int]]:
        return [(name, severity) for name in self.corruptions for severity in self.severities]


@settings
class CorruptionsSpec(Plan):
    """What a recipe asks for: a plan, and the number of test images."""

    samples: Count | None = None
