"""What the user did wrong, said in one sentence; and how an unknown name is answered."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A mistake the user can mend. The command line prints it without a traceback."""


def unknown(kind: str, got: object, choices: Iterable[str]) -> UserError:
    """The error for a name that no registry holds.

    >>> print(unknown("attack", "pdg", ["fgsm", "pgd"]))
    unknown attack 'pdg' (did you mean 'pgd'?); choices: fgsm, pgd
    """
    known = sorted(choices)
    close = difflib.get_close_matches(str(got), known, n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    return UserError(f"unknown {kind} {got!r}{hint}; choices: {', '.join(known)}")
