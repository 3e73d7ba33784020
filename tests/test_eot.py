"""EOT: the attack itself on a model that is not random, and far stronger than it on one that is."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from steelman.attacks import PGD
from steelman.attacks import eot as eot_module
from steelman.attacks.engine import Problem, Search
from steelman.attacks.eot import EOT, Averaged
from steelman.attacks.estimated import Estimated
from steelman.errors import UserError
from steelman.heads import linear
from steelman.losses import margin
from steelman.rng import Key
from steelman.settings import make
from steelman.threat import Norm, ThreatModel
from tests.oracles import LinearClassifier, check_budget, rand, randn, random_problem

NORMS: tuple[Norm, ...] = ("linf", "l2", "l1")


class Shaken(LinearClassifier):
    """(W + spread R) x + b with one R drawn for every forward, in eval mode too: on average, W x + b."""

    spread = 3.0

    def forward(self, x: Tensor) -> Tensor:
        shaken = self.weight + self.spread * torch.randn_like(self.weight)
        return (x.flatten(1)[:, None, :] * shaken).sum(dim=-1) + self.bias


class Nearest(Search):
    """A minimum-norm attack of one guess: half-way to grey."""

    norms = ("l2",)
    minimum_norm = True
    black_box = True

    def search(self, problem: Problem) -> None:
        rows = problem.remaining()
        points = (problem.x + 0.5) / 2
        with torch.no_grad():
            problem.keep_nearest(points, problem.logits(points, rows), rows)


def shaken(n: int = 20, spread: float = 8.0) -> tuple[Shaken, LinearClassifier, Tensor, Tensor]:
    """A random model, its mean, and samples that the mean gets right."""
    weight, bias = randn(2, 60, seed=4), torch.zeros(2, dtype=torch.float64)
    x, steady, model = rand(n, 1, 6, 10, seed=5), LinearClassifier(weight, bias), Shaken(weight, bias)
    model.spread = spread
    return model, steady, x, steady(x).argmax(dim=1)


class TestRandomModel:
    @pytest.mark.parametrize("norm", NORMS)
    @pytest.mark.parametrize("average", ["logits", "probabilities"])
    def test_stronger_than_the_attack_alone(self, norm: Norm, average: Any) -> None:
        """Judged by the mean model, whose margin the plain attack, led by noise, moves by a fraction of the most.

        Probabilities average well where the noise does not turn every answer into a certain one.
        """
        model, steady, x, y = shaken(spread=8.0 if average == "logits" else 3.0)
        threat = ThreatModel(norm=norm, eps=0.5, low=-10, high=10)
        inner = PGD(steps=5, loss="margin", start="zero", keep="last")

        def gained(x_adv: Tensor) -> float:
            return float((margin(steady(x_adv), y) - margin(steady(x), y)).detach().mean())

        best = gained(inner(steady, x, y, threat))
        averaged = EOT(attack=inner, draws=200, average=average)(model, x, y, threat)
        plain = gained(inner(model, x, y, threat))
        assert plain < (0.5 if average == "logits" else 0.7) * best
        assert gained(averaged) > 0.75 * best

    def test_success_is_that_of_the_mean(self) -> None:
        model, steady, x, y = shaken(spread=0.5)
        found = EOT(attack=PGD(steps=5), draws=100).run(model, x, y, ThreatModel(eps=0.3, low=-10, high=10))
        assert found.success.all()
        assert (steady(found.x_adv).argmax(dim=1) != y).double().mean() >= 0.9

    def test_the_key_decides_and_the_global_generator_does_not(self) -> None:
        model, _, x, y = shaken(6)
        attack, threat = EOT(attack=PGD(), draws=3), ThreatModel(eps=0.05)
        torch.manual_seed(1)
        state = torch.random.get_rng_state()
        one = attack(model, x, y, threat, key=Key(1))
        assert torch.equal(torch.random.get_rng_state(), state)
        torch.manual_seed(2)
        assert torch.equal(attack(model, x, y, threat, key=Key(1)), one)
        assert not torch.equal(attack(model, x, y, threat, key=Key(3)), one)

    def test_batches_draw_apart(self) -> None:
        seen: list[Tensor] = []

        class Watch(Shaken):
            def forward(self, x: Tensor) -> Tensor:
                seen.append(torch.rand(1))
                return super().forward(x)

        model, _, x, y = shaken(2)
        watch = Watch(model.weight.detach(), model.bias.detach())
        starts = []
        for first in (0, 2, 0):
            starts.append(len(seen))
            EOT(draws=2)(watch, x, y, ThreatModel(eps=1e-9), index=torch.arange(first, first + 2))
        one, other, again = (seen[at] for at in starts)
        assert not torch.equal(one, other)
        assert torch.equal(one, again)

    def test_dropout_stays_off_and_the_model_as_it_was(self) -> None:
        net = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(12), nn.Dropout(0.5), nn.Linear(12, 3)).double().train()
        before = {name: value.clone() for name, value in net.state_dict().items()}
        x, y = rand(4, 1, 3, 4), torch.tensor([0, 1, 2, 0])
        plain, averaged = PGD(steps=5), EOT(attack=PGD(steps=5), draws=3)
        threat = ThreatModel(eps=0.1)
        assert torch.equal(averaged(net, x, y, threat), plain(net, x, y, threat))
        assert all(module.training for module in net.modules())
        assert all(parameter.requires_grad and parameter.grad is None for parameter in net.parameters())
        assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())

    def test_convolutions(self) -> None:
        class Noisy(nn.Conv2d):
            def forward(self, x: Tensor) -> Tensor:
                return super().forward(x + 0.1 * torch.randn_like(x))

        net = nn.Sequential(Noisy(1, 3, 3), nn.ReLU(), nn.Flatten(), linear(12, 3))
        x, y = rand(4, 1, 4, 4, dtype=torch.float32), torch.tensor([0, 1, 2, 0])
        attack, threat = EOT(attack=PGD(steps=3, head_margin=True), draws=2), ThreatModel(eps=0.1)
        one = attack(net, x, y, threat)
        torch.manual_seed(7)
        assert torch.equal(attack(net, x, y, threat), one)


class TestSteadyModel:
    """Equal answers average to themselves, so that the attack is the plain one."""

    @pytest.mark.parametrize("norm", NORMS)
    @pytest.mark.parametrize("draws", [1, 3, 7])
    @pytest.mark.parametrize("average", ["logits", "probabilities"])
    def test_same_as_the_attack_alone(self, norm: Norm, draws: int, average: Any) -> None:
        problem, inner = random_problem(3, seed=2), PGD(steps=8)
        # No box: whether a pixel is at its bound is a matter of one rounding, and decides a step in l2.
        threat = ThreatModel(norm=norm, eps={"linf": 0.05, "l2": 0.2, "l1": 0.5}[norm], low=-9, high=9)
        plain = inner.run(problem.model, problem.x, problem.y, threat)
        found = EOT(attack=inner, draws=draws, average=average).run(problem.model, problem.x, problem.y, threat)
        torch.testing.assert_close(found.x_adv, plain.x_adv, rtol=0, atol=1e-12)
        assert torch.equal(found.success, plain.success)
        assert torch.equal(found.forwards, draws * plain.forwards)
        assert torch.equal(found.backwards, draws * plain.backwards)

    def test_answers_are_exact(self) -> None:
        problem = random_problem(10)
        for draws in range(1, 12):
            assert torch.equal(Averaged(problem.model, draws, "logits")(problem.x), problem.model(problem.x))

    @pytest.mark.parametrize("norm", NORMS)
    @pytest.mark.parametrize("classes", [2, 3])
    def test_closed_form(self, norm: Norm, classes: int) -> None:
        check_budget(EOT(attack=PGD(steps=8, step_size=0.5, loss="margin"), draws=2), norm, classes)

    def test_passes_are_counted_as_made(self) -> None:
        made: list[int] = []

        class Counted(LinearClassifier):
            def forward(self, x: Tensor) -> Tensor:
                made.append(len(x))
                return super().forward(x)

        problem = random_problem(3)
        model = Counted(problem.model.weight.detach(), problem.model.bias.detach())
        for inner in (PGD(steps=4), Estimated(steps=2, pairs=3)):
            made.clear()
            found = EOT(attack=inner, draws=5).run(model, problem.x, problem.y, ThreatModel(eps=0.02))
            assert sum(made) == int(found.forwards.sum())


class TestAverages:
    def test_of_logits_and_of_probabilities(self) -> None:
        model, _, x, _ = shaken(4)
        torch.manual_seed(3)
        each = torch.stack([model(x) for _ in range(6)])
        torch.manual_seed(3)
        torch.testing.assert_close(Averaged(model, 6, "logits")(x), each.mean(dim=0))
        torch.manual_seed(3)
        expected = F.softmax(each, dim=2).mean(dim=0)
        torch.testing.assert_close(Averaged(model, 6, "probabilities")(x).exp(), expected)

    def test_the_mean_of_the_gradients_where_the_loss_is_linear(self) -> None:
        model, _, x, y = shaken(4)
        target, total = 1 - y, torch.zeros_like(x)

        def gradient(net: nn.Module) -> Tensor:
            point = x.clone().requires_grad_()
            z = net(point)
            loss = (z.gather(1, target[:, None]) - z.gather(1, y[:, None])).sum()
            return torch.autograd.grad(loss, point)[0]

        torch.manual_seed(3)
        for _ in range(6):
            total += gradient(model) / 6
        torch.manual_seed(3)
        torch.testing.assert_close(gradient(Averaged(model, 6, "logits")), total)


class TestSettings:
    def test_an_object_a_name_or_a_mapping(self) -> None:
        assert EOT(attack="pgd").attack == PGD()  # type: ignore[arg-type]
        assert EOT(attack={"name": "pgd", "steps": 7}).attack == PGD(steps=7)  # type: ignore[arg-type]
        assert EOT() == EOT(attack=PGD(), draws=20, average="logits")
        assert make("attack", {"eot": EOT}, "eot", {"attack": {"name": "bim", "steps": 3}}).attack == PGD(
            steps=3, start="zero"
        )

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"attack": "pdg"}, "unknown attack 'pdg' (did you mean 'pgd'?); choices: "),
            ({"attack": "fn"}, "FNAttack reads the features of one forward"),
            ({"attack": "feature"}, "FeatureAttack reads the features of one forward"),
            ({"attack": 3}, "expected an attack, its name or a mapping with a name and options, got int; choices: "),
            ({"attack": None}, "got NoneType; choices: "),
            ({"attack": {"steps": 3}}, "which attack? choices: "),
            ({"attack": {"name": "pgd", "stepz": 3}}, "'stepz'"),
            ({"attack": {"name": "pgd", "steps": 0}}, "attack.steps"),
            ({"attack": EOT(draws=4), "draws": 5}, "eot inside eot averages twice"),
            ({"draws": 0}, "draws"),
            ({"average": "votes"}, "average"),
        ],
    )
    def test_mistakes(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(UserError) as caught:
            make("attack", {"eot": EOT}, "eot", options)
        assert message in str(caught.value)

    def test_it_is_what_its_attack_is(self) -> None:
        problem, attack = random_problem(3), EOT(attack=Nearest(), draws=2)
        assert (attack.norms, attack.minimum_norm, attack.black_box) == (("l2",), True, True)
        assert (EOT().norms, EOT().minimum_norm, EOT().black_box) == (NORMS, False, False)
        assert EOT(attack=PGD(mode="train", keep="last")).mode == "train"
        with pytest.raises(UserError, match="EOT: expected one of the norms l2, got linf"):
            attack(problem.model, problem.x, problem.y, ThreatModel(eps=0.1))
        with pytest.raises(UserError, match="knows no distances"):
            EOT().run(problem.model, problem.x, problem.y, ThreatModel(eps=0.1), distances=True)
        target = problem.model((problem.x + 0.5) / 2).argmax(dim=1)
        threat = ThreatModel(norm="l2", eps=0.01)
        found = attack.run(problem.model, problem.x, problem.y, threat, target=target, distances=True)
        assert found.nearest is not None
        assert found.distance is not None
        assert torch.isfinite(found.distance).all()
        assert found.forwards.tolist() == [2] * 6

    def test_none_one_and_no_radius(self) -> None:
        problem, attack = random_problem(2), EOT(draws=2)
        for n in (0, 1):
            x, y = problem.x[:n], problem.y[:n]
            assert attack(problem.model, x, y, ThreatModel(eps=0.1), index=torch.arange(n)).shape == x.shape
        assert torch.equal(attack(problem.model, problem.x, problem.y, ThreatModel(eps=0.0)), problem.x)
        assert dataclasses.replace(attack, draws=3).draws == 3


class TestMutations:
    def test_one_draw_for_many(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Averaged, "forward", lambda self, x: self.model(x))
        with pytest.raises(AssertionError):
            TestRandomModel().test_stronger_than_the_attack_alone("linf", "logits")

    def test_generator_not_seeded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(eot_module.EOT, "run", Search.run)
        with pytest.raises(AssertionError):
            TestRandomModel().test_the_key_decides_and_the_global_generator_does_not()
