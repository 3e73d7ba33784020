"""The engine under all attacks: precision, memory layout, what is kept, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from steelman.attacks import PGD, Problem, Search
from steelman.errors import UserError
from steelman.models.classifier import build_classifier
from steelman.rng import Key
from steelman.settings import settings
from steelman.threat import ThreatModel
from tests.oracles import LinearClassifier, rand

THREAT = ThreatModel(eps=0.1)


def a_conv() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = build_classifier("smallcnn", input_shape=(1, 28, 28), num_classes=10).eval()
    x = rand(6, 1, 28, 28, dtype=torch.float32)
    with torch.no_grad():
        return model, x, model(x).argmax(dim=1)


def a_problem(n: int = 4) -> Problem:
    model = LinearClassifier(torch.tensor([[1.0], [-1.0]]), torch.tensor([0.0, 0.5]))  # the boundary is at 0.25
    x = torch.tensor([0.3, 0.6, 0.9, 0.4][:n]).reshape(n, 1, 1, 1)
    return Problem(model, x, torch.zeros(n, dtype=torch.int64), THREAT, key=Key(0))


class TestKeep:
    def test_the_first_success_stays_and_else_the_highest_value(self) -> None:
        problem, rows = a_problem(2), torch.tensor([0, 1])
        for points, values in (([0.22, 0.55], [1.0, 1.0]), ([0.20, 0.58], [9.0, 0.5]), ([0.28, 0.52], [9.0, 2.0])):
            at = torch.tensor(points).reshape(2, 1, 1, 1)
            problem.keep(at, problem.logits(at, rows), torch.tensor(values), rows)
        found = problem.found()
        assert found.x_adv.flatten().tolist() == pytest.approx([0.22, 0.52])
        assert found.success.tolist() == [True, False]
        assert problem.alive().tolist() == [1]
        assert found.forwards.tolist() == [3, 3]

    def test_the_nearest_adversarial_point_stays(self) -> None:
        problem, rows = a_problem(3), torch.tensor([0, 1, 2])
        for points in ([0.10, 0.20, 0.85], [0.24, 0.10, 0.80], [0.29, 0.24, 0.9]):
            at = torch.tensor(points).reshape(3, 1, 1, 1)
            problem.keep_nearest(at, problem.logits(at, rows), rows)
        found = problem.found()
        assert found.distance is not None
        assert found.nearest is not None
        assert found.distance.tolist() == pytest.approx([0.06, 0.36, float("inf")])
        assert found.nearest.flatten().tolist() == pytest.approx([0.24, 0.24, 0.9])
        assert found.success.tolist() == [True, False, False]
        assert found.x_adv.flatten().tolist() == pytest.approx([0.24, 0.5, 0.9])  # in the ball, always
        assert problem.alive().tolist() == [1, 2]

    def test_with_distances_none_leaves_but_those_at_distance_zero(self) -> None:
        problem, rows = a_problem(2), torch.tensor([0, 1])
        problem.distances, problem.y = True, torch.tensor([0, 1])
        at = torch.tensor([0.24, 0.6]).reshape(2, 1, 1, 1)
        assert problem.keep_nearest(at, problem.logits(at, rows), rows).all()
        assert problem.alive().tolist() == [0]
        assert problem.found().success.all()

    def test_a_row_may_come_several_times_in_a_forward(self) -> None:
        problem, rows = a_problem(2), torch.tensor([1, 1, 1, 0])
        points = torch.full((4, 1, 1, 1), 0.3, requires_grad=True)
        problem.gradient(problem.logits(points, rows)[:, 0], points, rows)
        assert problem.forwards.tolist() == [1, 3]
        assert problem.backwards.tolist() == [1, 3]


class TestPrecision:
    def test_a_success_in_half_precision_counts_only_if_full_precision_agrees(self) -> None:
        class Rounding(nn.Module):
            """Wrong in half precision everywhere; right in full precision."""

            def forward(self, x: Tensor) -> Tensor:
                seen = torch.mm(x.flatten(1), torch.eye(x[0].numel()))
                wrong = 0.0 if seen.dtype == torch.float32 else 2.0
                return torch.stack((seen[:, 0] + 1.0, seen[:, 0] + wrong), dim=1)

        x, y = torch.rand(3, 1, 2, 2), torch.zeros(3, dtype=torch.int64)
        found = PGD(steps=3).run(Rounding(), x, y, THREAT, precision="bfloat16")
        assert not found.success.any()
        assert found.forwards.tolist() == [8, 8, 8]  # each of four points is looked at twice
        assert not PGD(steps=3).run(Rounding(), x, y, THREAT).success.any()

    def test_search_in_half_precision_finds_real_successes(self) -> None:
        model, x, y = a_conv()
        found = PGD(steps=4).run(model, x, y, ThreatModel(eps=0.5), precision="bfloat16")
        with torch.no_grad():
            assert torch.equal(model(found.x_adv).argmax(dim=1) != y, found.success)
        assert found.success.any()
        assert found.x_adv.dtype == torch.float32


class TestLayout:
    def layouts(self, model: nn.Module, x: Tensor, y: Tensor) -> list[bool]:
        seen: list[bool] = []
        conv = next(m for m in model.modules() if isinstance(m, nn.Conv2d))
        hook = conv.register_forward_hook(
            lambda _, __, out: seen.append(out.is_contiguous(memory_format=torch.channels_last))
        )
        pointers = [p.data_ptr() for p in model.parameters()]
        PGD(steps=2).run(model, x, y, THREAT)
        hook.remove()
        assert pointers == [p.data_ptr() for p in model.parameters()]
        return seen

    def test_convolutions_run_channels_last(self) -> None:
        assert all(self.layouts(*a_conv())[2:])

    def test_a_model_that_cannot_take_it_runs_as_it_is(self) -> None:
        class Viewing(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.conv, self.out = nn.Conv2d(3, 4, 3), nn.Linear(4 * 36, 3)

            def forward(self, x: Tensor) -> Tensor:
                features: Tensor = self.conv(x)
                return self.out(features.view(len(x), -1))  # type: ignore[no-any-return]

        torch.manual_seed(0)
        model, x = Viewing(), torch.rand(4, 3, 8, 8)
        assert not any(self.layouts(model, x, model(x).argmax(dim=1))[2:])

    def test_the_answer_is_that_of_the_plain_layout(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model, x, y = a_conv()
        model, x = model.double(), x.double()
        found = PGD(steps=5, keep="last").run(model, x, y, THREAT)
        plain = PGD(steps=5, keep="last")(model, x, y, THREAT)
        torch.testing.assert_close(found.x_adv, plain, rtol=0, atol=1e-12)


class TestRefusals:
    @settings
    class Only(Search):
        norms = ("l2",)

    def test_a_norm_it_does_not_know(self) -> None:
        model, x, y = a_conv()
        with pytest.raises(UserError, match="Only: expected one of the norms l2, got linf"):
            self.Only()(model, x, y, THREAT)

    def test_distances_of_a_budget_attack(self) -> None:
        model, x, y = a_conv()
        with pytest.raises(UserError, match="PGD looks for any point within eps, and knows no distances"):
            PGD().run(model, x, y, THREAT, distances=True)


class TestDiversifiedStart:
    def test_points_move_along_a_direction_of_the_logits(self) -> None:
        """On a linear model the start is the corner that w . z points to, whatever the draw before it."""
        model = LinearClassifier(rand(3, 12, seed=1) - 0.5, torch.zeros(3, dtype=torch.float64))
        x = rand(5, 1, 3, 4, seed=2) * 0.2 + 0.4
        y = model(x).argmax(dim=1)
        problem = Problem(model, x, y, THREAT, key=Key(3))
        start = PGD(start="diversified")._begin(problem, torch.arange(5), Key(3).fold("restart", 0))
        w = 2 * Key(3).fold("restart", 0, "diversified").uniform(torch.arange(5), (3,), torch.float64) - 1
        expected = x + 0.1 * (w @ model.weight.detach()).sign().reshape(x.shape)
        torch.testing.assert_close(start, expected)
        assert len({tuple(row.sign().flatten().tolist()) for row in start - x}) > 1
