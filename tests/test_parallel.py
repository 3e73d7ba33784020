"""A search in parts on several threads: the same answers, and nothing that a thread could disturb."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from steelman.attacks import ATTACKS, PGD, Problem
from steelman.attacks.parallel import LEAST, MOST, search_in_parts
from steelman.rng import Key
from steelman.threat import ThreatModel
from tests.oracles import rand
from tests.settings import ATTACK_SETTINGS

N = 2 * LEAST + 5


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


class Watched(nn.Module):
    """A small network in float64 that notes which threads ask it, and keeps its features in itself."""

    def __init__(self, random: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convolution, self.linear = nn.Conv2d(1, 4, 3, padding=1), nn.Linear(4 * 16, 3)
        self.random, self.kept = random, torch.empty(0)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        self.kept = torch.tanh(self.convolution(x)).flatten(1)
        SEEN.add(threading.get_ident())
        if self.random:
            torch.rand(1)
        logits: Tensor = self.linear(self.kept)
        return logits


SEEN: set[int] = set()


def a_batch() -> tuple[Watched, Tensor, Tensor]:
    SEEN.clear()
    model, x = Watched().eval(), rand(N, 1, 4, 4)
    with torch.no_grad():
        return model, x, model(x).argmax(dim=1)


@pytest.mark.parametrize("name", [name for name in ATTACKS if not isinstance(ATTACKS[name], partial)] + ["apgd-t"])
def test_the_answers_do_not_depend_on_the_threads(name: str) -> None:
    settings: dict[str, Any] = {
        key: (min(value, 60) if isinstance(value, int) else value) for key, value in ATTACK_SETTINGS[name].items()
    }
    attack = ATTACKS[name](**settings)
    model, x, y = a_batch()
    threat = ThreatModel(norm=attack.norms[0], eps=0.2)
    found = []
    for threads in (2, 1):
        SEEN.clear()
        torch.set_num_threads(threads)
        found.append(attack.run(model, x, y, threat))
        assert torch.get_num_threads() == threads
        assert bool(SEEN - {threading.get_ident()}) == (threads == 2)
    two, one = found
    torch.testing.assert_close(two.x_adv, one.x_adv)
    assert torch.equal(two.success, one.success)
    assert torch.equal(two.forwards, one.forwards)
    # A sample takes part in the backward of the step at which it falls if any other in its part has not.
    assert int((two.backwards - one.backwards).abs().max()) <= getattr(attack, "draws", 1)
    if one.distance is not None:
        torch.testing.assert_close(two.distance, one.distance)
        torch.testing.assert_close(two.nearest, one.nearest)


def test_each_thread_gets_as_many_parts() -> None:
    """Three parts on two threads would leave one of them waiting for a third of the time."""
    sizes: list[int] = []

    def note(problem: Problem) -> None:
        sizes.append(len(problem.x))

    model, x, y = a_batch()
    many = ((N, 1, 2), (2 * MOST, 1, 2), (2 * MOST + 1, 1, 4), (4 * MOST, 1, 4), (MOST, 4, 4), (8, MOST, 8))
    for n, copies, parts in many:
        sizes.clear()
        problem = Problem(model, x[:1].repeat(n, 1, 1, 1), y[:1].repeat(n), ThreatModel(eps=0.2), key=Key(0))
        search_in_parts(note, problem, copies)
        assert len(sizes) == parts
        assert sum(sizes) == n
        assert max(sizes) * copies <= MOST


def test_targets_and_indices_go_with_their_samples() -> None:
    model, x, y = a_batch()
    target, index = (y + 1) % 3, torch.arange(N) + 100
    two = PGD(steps=3).run(model, x, y, ThreatModel(eps=0.2), target=target, index=index)
    one = PGD(steps=3).run(model, x[-1:], y[-1:], ThreatModel(eps=0.2), target=target[-1:], index=index[-1:])
    torch.testing.assert_close(two.x_adv[-1:], one.x_adv)


def test_a_few_samples_are_not_shared_out() -> None:
    model, x, y = a_batch()
    SEEN.clear()
    PGD(steps=2).run(model, x[:LEAST], y[:LEAST], ThreatModel(eps=0.1))
    assert {threading.get_ident()} == SEEN


def test_a_few_samples_of_which_each_has_many_points_in_a_batch_are_shared_out() -> None:
    model, x, y = a_batch()
    attack, threat = ATTACKS["square"](queries=40, ahead=8), ThreatModel(eps=0.02)
    SEEN.clear()
    two = attack.run(model, x[:LEAST], y[:LEAST], threat)
    assert SEEN - {threading.get_ident()}
    torch.set_num_threads(1)
    one = attack.run(model, x[:LEAST], y[:LEAST], threat)
    torch.testing.assert_close(two.x_adv, one.x_adv)
    assert torch.equal(two.success, one.success)


def test_a_model_that_draws_random_numbers_stays_in_one_thread() -> None:
    _, x, y = a_batch()
    SEEN.clear()
    PGD(steps=2).run(Watched(random=True).eval(), x, y, ThreatModel(eps=0.1))
    assert {threading.get_ident()} == SEEN


def test_a_model_that_cannot_be_copied_stays_in_one_thread() -> None:
    model, x, y = a_batch()
    model.lock = threading.Lock()  # type: ignore[assignment]
    SEEN.clear()
    PGD(steps=2).run(model, x, y, ThreatModel(eps=0.1))
    assert {threading.get_ident()} == SEEN


class Failing(Watched):
    """A model that fails in a thread, at its call number `at`."""

    def __init__(self, error: type[BaseException], at: int) -> None:
        super().__init__()
        self.error, self.at = error, at

    def forward(self, x: Tensor) -> Tensor:
        if threading.current_thread() is not threading.main_thread():
            CALLS.append(len(x))
            if len(CALLS) == self.at:
                raise self.error("no more")
        return super().forward(x)


CALLS: list[int] = []


def test_an_error_in_a_thread_is_the_callers_and_leaves_no_trace() -> None:
    _, x, y = a_batch()
    CALLS.clear()
    model = Failing(KeyboardInterrupt, 1).train()
    weight, threads = model.convolution.weight, threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        PGD(steps=2).run(model, x, y, ThreatModel(eps=0.1))
    assert model.training
    assert weight.requires_grad
    assert model.convolution.weight is weight
    assert torch.get_num_threads() == 2
    assert threading.active_count() == threads


def test_an_error_in_one_part_ends_the_others_early() -> None:
    _, x, y = a_batch()
    CALLS.clear()
    with pytest.raises(RuntimeError, match="no more"):
        PGD(steps=100_000, step_size=1e-9).run(Failing(RuntimeError, 4).eval(), x, y, ThreatModel(eps=1e-6))
    assert len(CALLS) < 10_000


class Hooked(Watched):
    """A model that takes its features by a hook: in a copy, the hook would still write into the original."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: dict[str, Tensor] = {}
        self.convolution.register_forward_hook(lambda _, __, out: self.taken.update(features=out))

    def forward(self, x: Tensor) -> Tensor:
        super().forward(x)
        logits: Tensor = self.linear(torch.tanh(self.taken["features"]).flatten(1))
        return logits


def test_a_model_with_hooks_or_functions_of_its_own_stays_in_one_thread() -> None:
    plain, x, y = a_batch()
    plain.by = lambda values: values  # type: ignore[assignment]
    for model in (Hooked().eval(), plain):
        SEEN.clear()
        PGD(steps=2).run(model, x, y, ThreatModel(eps=0.1))
        assert {threading.get_ident()} == SEEN
    plain.by = torch.nn.functional.relu  # type: ignore[assignment]
    SEEN.clear()
    PGD(steps=2).run(plain, x, y, ThreatModel(eps=0.1))
    assert {threading.get_ident()} != SEEN


class Scratch(Watched):
    """A model that computes in a buffer."""

    scratch: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scratch", torch.empty(0, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.scratch.resize_(x.shape).copy_(x.detach().round(decimals=2))
        return super().forward(x + self.scratch - x.detach())


def test_threads_do_not_share_buffers() -> None:
    _, x, y = a_batch()
    attack, threat = ATTACKS["square"](queries=40), ThreatModel(eps=0.2)
    two = attack.run(Scratch().eval(), x, y, threat)
    torch.set_num_threads(1)
    torch.testing.assert_close(two.x_adv, attack.run(Scratch().eval(), x, y, threat).x_adv)
