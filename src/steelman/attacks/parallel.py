"""A search in parts on several threads. Samples do not depend on each other, so parts can run side by side.

On a CPU, it is quicker if each thread has its own few dozen samples. If all threads work on each operation of a whole
batch, they wait between operations, and the data leave the caches.
"""

from __future__ import annotations

import copy
import itertools
import threading
import types
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from steelman.attacks.base import logits_of
from steelman.threat import ThreatModel

if TYPE_CHECKING:
    from steelman.attacks.problem import Problem

MOST, LEAST = 64, 32  # points in a part: more leave the caches, fewer are not worth a thread


def search_in_parts(search: Callable[[Problem], None], problem: Problem, copies: int = 1) -> None:
    """Search the problem in parts on all of torch's threads, if the model and the machine allow it.

    `copies` is how many points of one sample the search puts into one batch.
    """
    threads, n = torch.get_num_threads(), len(problem.x)
    workers = min(threads, n, n * copies // LEAST)
    models = _copies(problem.model, workers) if workers > 1 and _repeatable(problem) else []
    if not models:
        search(problem)
        return
    count = min(workers * -(-n * copies // (workers * MOST)), n)  # the same number for each worker, so none waits
    parts = torch.arange(n, device=problem.x.device).tensor_split(count)
    own, handed_out, stop = threading.local(), itertools.count(), threading.Event()

    def begin() -> None:
        torch.set_num_threads(max(threads // workers, 1))  # with OpenMP, this counts for the calling thread alone
        own.model = models[next(handed_out)]

    def work(rows: Tensor) -> None:
        part = problem.part(rows, own.model, stop)
        with torch.enable_grad():
            search(part)
        problem.take(part, rows)

    try:
        with ThreadPoolExecutor(workers, initializer=begin) as pool:
            futures = [pool.submit(work, rows) for rows in parts]
            try:
                done, _ = wait(futures, return_when=FIRST_EXCEPTION)
                for future in done:
                    future.result()
            except BaseException:
                stop.set()  # the other threads stop at their next forward pass
                for future in futures:
                    future.cancel()
                raise
    finally:
        torch.set_num_threads(threads)


class StoppedError(Exception):
    """Raised in a thread to end its search, after an error in another thread."""


def _tied(module: nn.Module) -> bool:
    """Whether a module holds a hook or a function. A copy of the module would hold the same one.

    Functions of torch are allowed, because they keep no state.
    """
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    if any(getattr(module, name, None) for name in hooks):
        return True
    functions = [value for value in vars(module).values() if isinstance(value, types.FunctionType)]
    return any(not function.__module__.startswith("torch.") for function in functions)


def _repeatable(problem: Problem) -> bool:
    """Whether a model on the CPU draws no random numbers. With threads, their order would be left to chance."""
    if problem.x.device.type != "cpu":
        return False
    before = torch.get_rng_state()
    with torch.no_grad():
        logits_of(problem.model, _grey(problem.x, problem.threat))
    return torch.equal(before, torch.get_rng_state())


def _grey(x: Tensor, threat: ThreatModel) -> Tensor:
    return torch.full_like(x[:1], (threat.low + threat.high) / 2)


def _copies(model: nn.Module, count: int) -> list[nn.Module]:
    """Copies of a model that share its weights and nothing else, or none if that is impossible.

    A model may keep state during a forward pass, so threads cannot share it. Some models cannot be copied. A copy of a
    model with hooks could still change the original.
    """
    if any(_tied(module) for module in model.modules()):
        return []
    shared = {id(parameter): parameter for parameter in model.parameters()}
    try:
        return [copy.deepcopy(model, dict(shared)) for _ in range(count)]
    except Exception:  # copying may raise any error; the model is then used as it is
        return []
