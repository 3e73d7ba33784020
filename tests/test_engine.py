"""The engine under all attacks: precision, memory layout, what is kept, and what is refused."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from steelman.attacks import ATTACKS, PGD, Problem, Search
from steelman.attacks.pgd import begin
from steelman.errors import UserError
from steelman.models.classifier import build_classifier
from steelman.rng import Key
from steelman.settings import settings
from steelman.threat import Norm, ThreatModel
from tests.oracles import LinearClassifier, rand
from tests.settings import ATTACK_SETTINGS

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
        assert problem.remaining().tolist() == [1]
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
        assert problem.remaining().tolist() == [1, 2]

    @pytest.mark.parametrize("nearest", [False, True])
    def test_a_tie_is_no_success(self, nearest: bool) -> None:
        problem, rows = a_problem(2), torch.tensor([0, 1])
        problem.y = torch.tensor([1, 1])  # of equal logits argmax takes the first, which is the wrong one here
        for beyond, falls in ((0.0, False), (1e-3, True)):
            at = torch.tensor([0.25, 0.25 + 1e-7]).reshape(2, 1, 1, 1) + beyond
            logits = problem.logits(at, rows)
            assert logits.argmax(dim=1).tolist() == [0, 0]
            fallen = (
                problem.keep_nearest(at, logits, rows) if nearest else problem.keep(at, logits, torch.ones(2), rows)
            )
            assert fallen.tolist() == [falls, falls]

    def test_with_distances_none_leaves_but_those_at_distance_zero(self) -> None:
        problem, rows = a_problem(2), torch.tensor([0, 1])
        problem.distances, problem.y = True, torch.tensor([0, 1])
        at = torch.tensor([0.24, 0.6]).reshape(2, 1, 1, 1)
        assert problem.keep_nearest(at, problem.logits(at, rows), rows).all()
        assert problem.remaining().tolist() == [0]
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


class TestConvolutions:
    """What the linear models of the contract cannot show: a layout that changes, sums that depend on the batch."""

    @pytest.mark.parametrize("name", sorted(ATTACKS))
    def test_every_success_is_one_in_the_plain_layout_and_alone(self, name: str) -> None:
        torch.manual_seed(1)
        model = nn.Sequential(
            nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Conv2d(6, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(24, 3)
        )
        x = rand(24, 1, 6, 6, dtype=torch.float32)
        with torch.no_grad():
            model[-1].bias -= model(x).mean(dim=0)  # no class is ahead everywhere
            y = model(x).argmax(dim=1)
        attack = ATTACKS[name](**ATTACK_SETTINGS[name])
        pointers, state = [p.data_ptr() for p in model.parameters()], [p.clone() for p in model.parameters()]
        threat = ThreatModel(norm=attack.norms[0], eps={"linf": 0.1, "l2": 0.5}[attack.norms[0]])
        found = attack.run(model, x, y, threat, distances=attack.minimum_norm)
        points = found.x_adv if found.nearest is None else found.nearest
        claimed = found.success if found.distance is None else found.distance.isfinite()
        with torch.no_grad():
            together = model(points).argmax(dim=1) != y
            alone = torch.cat([model(points[i : i + 1]).argmax(dim=1) for i in range(len(x))]) != y
        assert claimed.any()
        assert together[claimed].all()
        assert alone[claimed].all()
        assert pointers == [p.data_ptr() for p in model.parameters()]
        assert all(torch.equal(a, b) for a, b in zip(state, model.parameters()))

    def test_a_model_that_fails_inside_gets_its_layout_back(self) -> None:
        model, x, y = a_conv()
        pointers, calls = [p.data_ptr() for p in model.parameters()], []

        def fail(*_: object) -> None:
            calls.append(1)
            if len(calls) == 4:
                raise KeyboardInterrupt

        model.register_forward_hook(fail)
        with pytest.raises(KeyboardInterrupt):
            PGD(steps=5).run(model, x, y, ThreatModel(eps=1e-4))
        assert pointers == [p.data_ptr() for p in model.parameters()]

    def test_a_layout_that_only_batches_notice(self) -> None:
        class Grouped(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.conv, self.out = nn.Conv2d(3, 4, 3), nn.Linear(4, 3)

            def forward(self, x: Tensor) -> Tensor:
                z: Tensor = self.conv(x)
                n, c, h, w = z.shape
                assert isinstance(n, int)
                return self.out(z.view(n * c, 1, h, w).mean(dim=(1, 2, 3)).view(n, c))  # type: ignore[no-any-return]

        model, x = Grouped(), torch.rand(4, 3, 8, 8)
        PGD(steps=2).run(model, x, model(x).argmax(dim=1), THREAT)


class TestNoNonsense:
    def test_not_a_number_is_no_success(self) -> None:
        class Nothing(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return x.flatten(1)[:, :3] * float("nan")

        for name in ("pgd", "square", "nes", "deepfool", "rays"):
            attack = ATTACKS[name](**ATTACK_SETTINGS[name])
            found = attack.run(Nothing(), rand(3, 1, 2, 2), torch.tensor([0, 1, 2]), THREAT)
            assert not found.success.any()
            assert found.x_adv.isfinite().all()

    @pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
    @pytest.mark.parametrize("name", ["bim", "mim", "pgd", "apgd", "deepfool", "fab"])
    def test_an_infinite_derivative_does_not_stop_it(self, name: str, norm: Norm) -> None:
        class Rooted(LinearClassifier):
            def forward(self, x: Tensor) -> Tensor:
                return super().forward(x) + torch.cat((x.flatten(1)[:, :1].sqrt(), torch.zeros(len(x), 2)), dim=1)

        model, x = Rooted(rand(3, 12, seed=1) - 0.5, torch.zeros(3, dtype=torch.float64)), rand(6, 1, 3, 4, seed=2)
        x[:, 0, 0, 0] = 0.0
        y = model(x).argmax(dim=1)
        threat = ThreatModel(norm=norm, eps={"linf": 0.4, "l2": 1.2, "l1": 4.0}[norm])
        assert ATTACKS[name](**ATTACK_SETTINGS[name]).run(model, x, y, threat).success.all()

    def test_a_callers_autocast_does_not_reach_the_search(self) -> None:
        model, x, y = a_conv()
        alone = PGD(steps=3).run(model, x, y, THREAT).x_adv
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(PGD(steps=3).run(model, x, y, THREAT).x_adv, alone)
        with torch.inference_mode():
            assert torch.equal(PGD(steps=3).run(model, x.clone(), y.clone(), THREAT).x_adv, alone)

    def test_without_a_radius_what_is_wrong_has_fallen(self) -> None:
        model, x, y = a_conv()
        y[2] = (y[2] + 1) % 10
        for name in ("pgd", "fab"):
            found = ATTACKS[name]().run(model, x, y, THREAT.at(0.0))
            assert found.success.nonzero().flatten().tolist() == [2]
            assert found.forwards.tolist() == [1] * 6
            assert torch.equal(found.x_adv, x)

    def test_both_sides_of_one_pixel(self) -> None:
        for side in (0.2, 0.8):
            model = LinearClassifier(torch.tensor([[0.0], [1.0 if side > 0.5 else -1.0]]), torch.tensor([0.0, -side]))
            if side < 0.5:
                model = LinearClassifier(torch.tensor([[0.0], [-1.0]]), torch.tensor([0.0, side]))
            x, y = torch.full((1, 1, 1, 1), 0.5), torch.tensor([0])
            found = ATTACKS["rays"](queries=60).run(model, x, y, ThreatModel(eps=0.35))
            assert found.success.all()


class TestRefusals:
    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ({"x": torch.full((6, 1, 28, 28), 3.0)}, r"expected pixels in \[0, 1\], got 3 .. 3"),
            ({"x": torch.full((6, 1, 28, 28), float("nan"))}, "expected finite pixels, got 4704"),
            ({"x": torch.zeros(6, 1, 28, 28, dtype=torch.uint8)}, "images as a tensor of floats, got torch.uint8"),
            ({"y": torch.zeros(6)}, "expected 6 labels as a tensor of integers, got torch.float32"),
            ({"y": torch.zeros(5, dtype=torch.int64)}, r"expected 6 labels .* of shape \(5,\)"),
            ({"y": [0] * 6}, r"expected 6 labels as a tensor of integers, got \[0, 0"),
            ({"y": torch.full((6,), 10)}, "expected a label in 0 .. 9, got 10"),
            ({"target": torch.full((6,), -1)}, "expected a target in 0 .. 9, got -1"),
            ({"target": 3}, "expected 6 targets as a tensor of integers, got 3"),
            ({"index": torch.arange(7)}, "expected 6 indices"),
            ({"precision": "bf16"}, "precision: expected one of full, bfloat16, got 'bf16'"),
            ({"threat": 0.3}, "expected a ThreatModel, got 0.3"),
        ],
    )
    def test_what_cannot_be_attacked(self, change: dict[str, Any], said: str) -> None:
        model, x, y = a_conv()
        given: dict[str, Any] = {"model": model, "x": x, "y": y, "threat": THREAT, **change}
        with pytest.raises(UserError, match=said):
            PGD(steps=1).run(**given)

    @pytest.mark.parametrize("name", ["deepfool", "fab", "nes", "zoo"])
    def test_reduced_precision_where_small_differences_count(self, name: str) -> None:
        model, x, y = a_conv()
        with pytest.raises(UserError, match="expected precision 'full', for it looks for small differences"):
            ATTACKS[name]().run(model, x, y, THREAT, precision="bfloat16")

    def test_one_class_and_no_gradient(self) -> None:
        _, x, y = a_conv()
        with pytest.raises(UserError, match="at least two classes, got 1"):
            PGD().run(nn.Sequential(nn.Flatten(), nn.Linear(784, 1)), x, torch.zeros_like(y), THREAT)

        class Detached(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return x.detach().flatten(1)[:, :10]

        with pytest.raises(UserError, match="gives no gradient with respect to its input; a black-box attack"):
            PGD().run(Detached(), x, Detached()(x).argmax(dim=1), THREAT)
        ATTACKS["square"](queries=3).run(Detached(), x, y, THREAT)

    @settings
    class Only(Search):
        norms = ("l2",)

        def search(self, problem: Problem) -> None:
            raise AssertionError("refused before it is asked")

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
        start = begin(problem, torch.arange(5), Key(3).fold("restart", 0), "diversified")
        w = 2 * Key(3).fold("restart", 0, "diversified").uniform(torch.arange(5), (3,), torch.float64) - 1
        expected = x + 0.1 * (w @ model.weight.detach()).sign().reshape(x.shape)
        torch.testing.assert_close(start, expected)
        assert len({tuple(row.sign().flatten().tolist()) for row in start - x}) > 1


def test_a_hand_made_loop_that_repeats_its_noise_is_warned() -> None:
    """Each call draws the same start. Without the warning, nobody would see it."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    x, y, threat = torch.rand(4, 1, 4, 4), torch.zeros(4, dtype=torch.int64), ThreatModel(eps=0.1)

    def said(attack: Any, model: nn.Module = net, **options: Any) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                attack(model, x, y, threat, **options)
        return [str(one.message) for one in caught]

    (text, *_) = said(PGD(steps=1))
    assert "draws the same noise at each call: give each step its own key=steelman.Key(seed).fold(step)" in text
    assert said(PGD(steps=1), key=Key(0).fold(1)) == []
    assert said(PGD(steps=1), index=torch.arange(4)) == []
    assert said(PGD(steps=1, start="zero")) == [], "it draws nothing"
    assert said(PGD(steps=1), copy.deepcopy(net).eval()) == [], "a measurement should be the same each time"
