"""Every attack, objective and head of the registries keeps the promises that a third party's has to keep."""

from __future__ import annotations

from functools import partial

import pytest

from steelman.attacks import ATTACKS
from steelman.heads import HEADS, Head
from steelman.objectives import OBJECTIVES
from steelman.testing import check_attack, check_head, check_objective
from steelman.threat import Norm
from tests.settings import ATTACK_SETTINGS, HEAD_SETTINGS, ORACLE_ATTACKS


def test_every_entry_has_small_settings() -> None:
    assert ATTACK_SETTINGS.keys() == ATTACKS.keys() == ORACLE_ATTACKS.keys()
    assert HEAD_SETTINGS.keys() == HEADS.keys()


def norms(name: str) -> tuple[Norm, ...]:
    """A class in all its norms; a name that only sets some of its options in one."""
    known: tuple[Norm, ...] = ATTACKS[name](**ATTACK_SETTINGS.get(name, {})).norms
    return known[:1] if isinstance(ATTACKS[name], partial) else known


@pytest.mark.parametrize(("name", "norm"), [(name, norm) for name in sorted(ATTACKS) for norm in norms(name)])
def test_attack(name: str, norm: Norm) -> None:
    check_attack(ATTACKS[name](**ATTACK_SETTINGS[name]), norms=[norm])


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_objective(name: str) -> None:
    check_objective(OBJECTIVES[name])


@pytest.mark.parametrize("name", sorted(HEADS))
def test_head(name: str) -> None:
    check_head(HEADS[name])
    check_head(partial(HEADS[name], **HEAD_SETTINGS[name]))


@pytest.mark.parametrize("name", ["wn", "he", "m-he"])
def test_head_with_weights_that_are_projected(name: str) -> None:
    check_head(partial(HEADS[name], wn_mode="project"))


def test_every_way_to_make_a_head() -> None:
    check_head(Head)
    check_head(partial(HEADS["fn"], bias=True))
    check_head(partial(Head, normalise_features=True, angular=True, normalise_weights=True, bias=False))
