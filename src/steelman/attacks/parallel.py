"""A search shared out over threads: no sample knows of another, so parts of a batch can be searched side by side.

On a CPU, threads that each work on a few dozen samples are quicker than threads that work together on each operation
of a whole batch: nothing waits between operations, and what is computed stays in the caches.
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

MOST, LEAST = 64, 32  # points of a batch in a part: more leave the caches, fewer are not worth a thread


def search_in_parts(search: Callable[[Problem], None], problem: Problem, copies: int = 1) -> None:
    """Search the problem, in parts on all of torch's threads where model and machine allow it; `copies` is how many
    points of one sample the search puts into a batch."""
    threads, n = torch.get_num_threads(), len(problem.x)
    workers = min(threads, n, n * copies // LEAST)
    models = _copies(problem.model, workers) if workers > 1 and _repeatable(problem) else []
    if not models:
        search(problem)
        return
    count = min(workers * -(-n * copies // (workers * MOST)), n)  # as many for each: nobody waits for the last
    parts = torch.arange(n, device=problem.x.device).tensor_split(count)
    own, handed_out, stop = threading.local(), itertools.count(), threading.Event()

    def begin() -> None:
        torch.set_num_threads(max(threads // workers, 1))  # of this thread, where OpenMP counts them
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
                stop.set()  # the others end at their next question
                for future in futures:
                    future.cancel()
                raise
    finally:
        torch.set_num_threads(threads)


class StoppedError(Exception):
    """Raised in a thread whose search is no longer wanted."""


def _tied(module: nn.Module) -> bool:
    """Whether a module holds a hook or a function, which stays the original's own in a copy. Functions of torch keep no
    notes."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    if any(getattr(module, name, None) for name in hooks):
        return True
    functions = [value for value in vars(module).values() if isinstance(value, types.FunctionType)]
    return any(not function.__module__.startswith("torch.") for function in functions)


def _repeatable(problem: Problem) -> bool:
    """Whether the model answers without drawing random numbers, whose order threads would decide."""
    if problem.x.device.type != "cpu":
        return False
    before = torch.get_rng_state()
    with torch.no_grad():
        logits_of(problem.model, _grey(problem.x, problem.threat))
    return torch.equal(before, torch.get_rng_state())


def _grey(x: Tensor, threat: ThreatModel) -> Tensor:
    return torch.full_like(x[:1], (threat.low + threat.high) / 2)


def _copies(model: nn.Module, count: int) -> list[nn.Module]:
    """Copies that share the weights and nothing else, for a model may keep notes while it computes; none, if it cannot
    be copied, or if a copy would still write into the original."""
    if any(_tied(module) for module in model.modules()):
        return []
    shared = {id(parameter): parameter for parameter in model.parameters()}
    try:
        return [copy.deepcopy(model, dict(shared)) for _ in range(count)]
    except Exception:  # whatever a model has against it, it is attacked as it is
        return []
