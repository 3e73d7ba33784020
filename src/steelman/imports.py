"""The one place where steelman imports code that a user names. Nothing else may import by a name from outside.

A folder, a recipe or a download is another person's text. A name in it is imported only if the user has allowed its
module: on the command line, or in Python.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from steelman.errors import UserError

FLAG = "--allow-import"


def module_of(name: str) -> str:
    """The module of ``package.module:factory``.

    >>> module_of("mynets.small:make")
    'mynets.small'
    """
    return name.partition(":")[0]


def check_allowed(name: str, allow_import: Collection[str], what: str = "the model") -> None:
    """Refuse the import path `name` unless `allow_import` has it, or its module. Nothing is imported here.

    >>> check_allowed("mynets.small:make", ["mynets"])
    Traceback (most recent call last):
    ...
    steelman.errors.UserError: the model is made by 'mynets.small:make', and to build it would import and call that code. If you trust it, allow its module: --allow-import mynets.small on the command line, allow_import=['mynets.small'] in Python
    """  # noqa: E501
    module = module_of(name)
    if isinstance(allow_import, str):
        raise UserError(f"allow_import: expected a list of modules, such as [{allow_import!r}], got {allow_import!r}")
    if module in allow_import or name in allow_import:
        return
    for one in allow_import:
        if not isinstance(one, str) or not all(part.isidentifier() for part in one.replace(":", ".", 1).split(".")):
            raise UserError(f"{FLAG}: expected package.module, got {one!r}")
    raise UserError(
        f"{what} is made by {name!r}, and to build it would import and call that code. If you trust it, allow its "
        f"module: {FLAG} {module} on the command line, allow_import=[{module!r}] in Python"
    )


def imported(
    name: str, options: Mapping[str, Any], allow_import: Collection[str], what: str = "the model"
) -> nn.Module:
    """The model that ``package.module:factory`` makes, with `options`.

    `allow_import` must have this very name, or its module. A module also holds what it has imported itself, such as
    ``os.system``. So if only the module is allowed, the factory must be defined in that module's package, or in another
    module that is allowed.
    """
    check_allowed(name, allow_import, what)
    module, _, attribute = name.partition(":")
    if str(Path.cwd()) not in sys.path:  # a console command does not import from the current folder by itself
        sys.path.append(str(Path.cwd()))
    try:
        factory = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"cannot import {name!r} (expected package.module:factory): {error}") from None
    home = str(getattr(factory, "__module__", None) or module)
    own = home.partition(".")[0] == module.partition(".")[0]
    if not own and home not in allow_import and name not in allow_import:
        raise UserError(
            f"{name} is defined in {home}, and only {module} is allowed; if you trust it, allow it too: {FLAG} {home}"
        )
    if not callable(factory):
        raise UserError(f"{name} should be a function or a class that makes a model, got {type(factory).__name__}")
    try:
        model = factory(**{str(key): value for key, value in options.items()})
    except TypeError as error:
        raise UserError(f"{name} could not be called with {dict(options)}: {error}") from None
    if not isinstance(model, nn.Module):
        raise UserError(f"{name} should give a torch.nn.Module, got {type(model).__name__}")
    return model
