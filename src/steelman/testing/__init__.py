"""The promises of an attack, an objective or a head, checked on your own one. No pytest is needed.

    from steelman.testing import check_attack, check_head, check_objective

    def test_my_attack() -> None:
        check_attack(MyAttack(steps=10))

Each check takes a second or two. It returns nothing, or raises `ContractBrokenError` with one sentence that says which
promise is broken. Steelman's own attacks, objectives and heads pass the same checks.
"""

from __future__ import annotations

from steelman.testing.attack import check_attack
from steelman.testing.head import check_head
from steelman.testing.objective import check_objective
from steelman.testing.promises import ContractBrokenError

__all__ = ["ContractBrokenError", "check_attack", "check_head", "check_objective"]
