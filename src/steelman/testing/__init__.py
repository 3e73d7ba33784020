"""Checks for your own attack, objective or head: does it keep the promises that steelman needs? They need no pytest.

    from steelman.testing import check_attack, check_head, check_objective

    def test_my_attack() -> None:
        check_attack(MyAttack(steps=10))

Each check takes a second or two. If a promise is broken, it raises `ContractBrokenError`, and one sentence says which.
Steelman's own attacks, objectives and heads pass the same checks.
"""

from __future__ import annotations

from steelman.testing.attack import check_attack
from steelman.testing.head import check_head
from steelman.testing.objective import check_objective
from steelman.testing.promises import ContractBrokenError

__all__ = ["ContractBrokenError", "check_attack", "check_head", "check_objective"]
