"""Mean and median distance: against a linear model's closed form, RayS's own ADBD, and attacks that lie."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from steelman.attacks import ATTACKS
from steelman.attacks.engine import Problem, Search
from steelman.attacks.rays import RayS, adbd
from steelman.data.source import ArraySource, first
from steelman.errors import UserError
from steelman.evaluation.distance import Distances, able, bootstrap, distance
from steelman.rng import Key
from steelman.settings import settings
from steelman.threat import Norm, ThreatModel
from tests.oracles import linear_problem

CASES = [("rays", "linf"), ("deepfool", "linf"), ("deepfool", "l2"), ("fab", "linf"), ("fab", "l2"), ("cw", "l2")]


def images() -> tuple[nn.Module, Tensor, Tensor, dict[str, Tensor]]:
    """A linear model, its images in [0, 1], labels of which one is wrong, and the least distance in each norm."""
    problem = linear_problem(3, seed=1, n=8, corners=False)
    y = problem.y.clone()
    y[2] = (y[2] + 1) % 3
    exact = {norm: torch.as_tensor(problem.distances_in_box(norm, 0.0, 1.0)).clone() for norm in ("linf", "l2")}
    for known in exact.values():
        known[2] = 0
    return problem.model, problem.x, y, exact


@pytest.mark.parametrize(("name", "norm"), CASES)
def test_distances_of_a_linear_model(name: str, norm: Norm) -> None:
    model, x, y, exact = images()
    found = distance(model, x, y, ThreatModel(norm=norm, eps=0.1), ATTACKS[name]())
    reached = torch.tensor([value < found.widest for value in found.values])
    assert reached.double().mean() >= 0.8
    values, least = torch.tensor(found.values)[reached], exact[norm][reached]
    assert (values >= least * (1 - 1e-4) - 1e-6).all(), "nothing is nearer than the boundary"
    if name not in ("rays", "deepfool"):  # these two only come near: along rays, or with an overshoot
        assert (values <= 1.1 * least + 1e-4).all()
    assert found.values[2] == 0
    assert found.wrong == 1
    assert found.mean == pytest.approx(sum(found.values) / 8)
    assert found.median == pytest.approx(float(np.median(found.values)))
    assert found.above(0.05) == sum(value > 0.05 for value in found.values)
    assert found.above() == found.above(0.1)
    assert found.forwards > 0


def test_the_mean_of_rays_is_adbd() -> None:
    model, x, y, _ = images()
    threat, attack = ThreatModel(eps=0.1), RayS(queries=300)
    found = distance(model, x, y, threat, attack)
    straight = attack.run(model, x, y, threat, key=Key(5), distances=True)
    assert found.mean == pytest.approx(adbd(straight), rel=1e-6)
    said = printed(found)
    assert "mean (ADBD)" in said
    assert "wrong without an attack, distance 0" in said


def test_batches_and_samples() -> None:
    model, x, y, _ = images()
    threat, attack = ThreatModel(eps=0.1), ATTACKS["fab"](steps=10, restarts=2)
    whole = distance(model, x, y, threat, attack, seed=3)
    small = distance(model, ArraySource(x, y), None, threat, attack, seed=3, batch_size=3)
    assert small.values == pytest.approx(whole.values, rel=1e-5)
    assert (small.wrong, small.unreached) == (whole.wrong, whole.unreached)
    few = distance(model, first(ArraySource(x, y), 5), None, threat, attack, seed=3)
    assert few.values == pytest.approx(whole.values[:5], rel=1e-5)
    assert (
        distance(model, x, (y + 1) % 3 if (model(x).argmax(1) != (y + 1) % 3).all() else y, threat, attack).total == 8
    )


def test_a_model_that_is_always_wrong_has_distance_zero() -> None:
    model, x, _, _ = images()
    y = (model(x).argmax(dim=1) + 1) % 3
    found = distance(model, x, y, ThreatModel(eps=0.1), ATTACKS["rays"](queries=20))
    assert found.values == (0.0,) * 8
    assert (found.wrong, found.mean, found.above(0.0), found.forwards) == (8, 0.0, 0, 0)


@settings
class Liar(Search):
    """Says of any point that it is the nearest."""

    norms: ClassVar[tuple[Norm, ...]] = ("linf", "l2")
    minimum_norm: ClassVar[bool] = True
    kind: str = "nearer"

    def search(self, problem: Problem) -> None:
        rows = problem.remaining()
        assert problem.nearest is not None
        problem.nearest[rows] = {
            "nearer": problem.x[rows],  # what the model gets right
            "outside": problem.x[rows] + 5,
            "nothing": torch.full_like(problem.x[rows], math.nan),
        }[self.kind]
        problem.distance[rows] = 1e-6


@pytest.mark.parametrize("kind", ["nearer", "outside", "nothing"])
@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_an_attack_is_not_believed(kind: str, norm: Norm) -> None:
    model, x, y, _ = images()
    found = distance(model, x, y, ThreatModel(norm=norm, eps=0.1), Liar(kind=kind))
    widest = ThreatModel(norm=norm, eps=0.1).widest(x.shape[1:])
    assert found.unreached == 7
    assert sorted(found.values) == pytest.approx([0.0, *[widest] * 7])
    assert f"counted as {widest:.4g}" in printed(found)


def test_what_cannot_be_measured() -> None:
    model, x, y, _ = images()
    threat = ThreatModel(eps=0.1)
    with pytest.raises(UserError, match=r"nearest point, got PGD; choices: deepfool, fab, fab-t, cw, rays"):
        distance(model, x, y, threat, ATTACKS["pgd"]())
    with pytest.raises(UserError, match="RayS knows the norms linf, and the norm is l2"):
        distance(model, x, y, ThreatModel(norm="l2", eps=0.1), ATTACKS["rays"]())
    with pytest.raises(UserError, match="batch_size: expected at least 1, got 0"):
        distance(model, x, y, threat, ATTACKS["fab"](), batch_size=0)
    with pytest.raises(UserError, match="expected labels y"):
        distance(model, x, None, threat, ATTACKS["fab"]())
    with pytest.raises(UserError, match="expected y None"):
        distance(model, ArraySource(x, y), y, threat, ATTACKS["fab"]())
    assert set(able()) >= {"rays", "deepfool", "fab", "fab-t", "cw"}


def test_the_interval_is_that_of_resamples() -> None:
    """Of many values, the interval of a mean is that of the normal distribution; and it can be had again."""
    values = tuple(np.random.default_rng(1).exponential(size=1500).tolist())
    low, high = bootstrap(values, np.mean)
    half = 1.96 * np.std(values) / math.sqrt(len(values))
    assert (high - low) / 2 == pytest.approx(half, rel=0.1)
    assert (low + high) / 2 == pytest.approx(np.mean(values), abs=half / 5)
    assert bootstrap(values, np.mean) == (low, high)
    wide = bootstrap(values, np.mean, 0.5)
    assert low < wide[0] < wide[1] < high
    assert bootstrap((0.3,), np.median) == (0.3, 0.3)


def test_what_is_written_down(tmp_path: Path) -> None:
    model, x, y, _ = images()
    source = ArraySource(x, y, name="mine")
    found = distance(model, source, None, ThreatModel(eps=0.1), RayS(queries=100), name="[red]")
    found.save(tmp_path / "new")
    record = json.loads((tmp_path / "new" / "distances.json").read_text())
    assert record["values"] == list(found.values)
    assert record["mean"] == found.mean
    assert record["data"] == "mine"
    assert record["median_interval"] == list(found.median_interval)
    assert record["attack"] == {"attack": "RayS", "queries": 100, "tolerance": 0.001}
    assert (record["norm"], record["eps"], record["total"], record["wrong"]) == ("linf", 0.1, 8, 1)
    assert "[red]" in printed(found)


def printed(found: Distances) -> str:
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(found.table())
    return console.export_text()
