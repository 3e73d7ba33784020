"""Losses against naive loops, their invariances, the signs of their gradients, and Lemma 2."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from steelman.errors import UserError
from steelman.losses import (
    LOSSES,
    adversarial_loss,
    cross_entropy,
    dlr,
    kl,
    margin,
    scale_invariant_cross_entropy,
    targeted_dlr,
)
from tests.oracles import naive_losses, rand, randn


def evaluate(name: str, z: Tensor, y: Tensor, target: Tensor, reference: Tensor) -> Tensor:
    """The loss of that name, given just what it needs."""
    needs = LOSSES[name].needs
    return adversarial_loss(
        name, z, y, target=target if needs == "target" else None, reference=reference if needs == "reference" else None
    )


def labels(n: int, classes: int) -> tuple[Tensor, Tensor]:
    """True and target classes, all different from one another."""
    y = torch.arange(n) % classes
    return y, (y + 1 + torch.arange(n) % (classes - 1)) % classes


@pytest.mark.parametrize("classes", [2, 3, 4, 10])
@pytest.mark.parametrize("size", [1.0, 30.0])
@pytest.mark.parametrize(("dtype", "slack"), [(torch.float64, 1e-9), (torch.float32, 2e-4)])
def test_every_loss_matches_the_naive_one(classes: int, size: float, dtype: torch.dtype, slack: float) -> None:
    z, reference = size * randn(24, classes, seed=1, dtype=dtype), randn(24, classes, seed=2, dtype=dtype)
    y, target = labels(24, classes)
    expected = [
        naive_losses(z[i].double().numpy(), int(y[i]), int(target[i]), reference[i].double().numpy()) for i in range(24)
    ]
    assert expected[0].keys() == LOSSES.keys()
    for name in LOSSES:
        got = evaluate(name, z, y, target, reference)
        assert got.shape == (24,)
        assert got.dtype == dtype
        assert got.tolist() == pytest.approx([row[name] for row in expected], rel=slack, abs=slack)


@pytest.mark.filterwarnings("ignore:std")  # torch says so of an empty batch
@pytest.mark.parametrize("name", sorted(LOSSES))
def test_one_value_per_sample_and_no_sample_meets_another(name: str) -> None:
    z, reference, (y, target) = randn(6, 5), randn(6, 5, seed=3), labels(6, 5)
    whole = evaluate(name, z, y, target, reference)
    for i in range(6):
        one = slice(i, i + 1)
        torch.testing.assert_close(evaluate(name, z[one], y[one], target[one], reference[one]), whole[one])
    assert evaluate(name, z[:0], y[:0], target[:0], reference[:0]).shape == (0,)


@pytest.mark.parametrize("name", sorted(LOSSES))
@pytest.mark.parametrize("size", [0.0, 1e-6, 1e4, 1e6])
def test_values_and_gradients_stay_finite(name: str, size: float) -> None:
    for base in (randn(6, 5, dtype=torch.float32), torch.ones(6, 5)):
        z = (size * base + 5).requires_grad_()
        y, target = labels(6, 5)
        losses = evaluate(name, z, y, target, randn(6, 5, seed=3, dtype=torch.float32))
        assert torch.isfinite(losses).all()
        (gradient,) = torch.autograd.grad(losses.sum(), z)
        assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("name", sorted(LOSSES.keys() - {"scale-invariant-cross-entropy", "probability-margin"}))
@pytest.mark.parametrize("classes", [2, 3, 4, 10])
def test_gradients_are_those_of_the_values(name: str, classes: int) -> None:
    y, target = labels(4, classes)
    reference = randn(4, classes, seed=2)
    z = (3 * randn(4, classes, seed=1)).requires_grad_()
    assert torch.autograd.gradcheck(lambda at: evaluate(name, at, y, target, reference), (z,))


def test_margin_is_positive_exactly_when_misclassified() -> None:
    z, y = randn(200, 4), torch.arange(200) % 4
    assert torch.equal(margin(z, y) > 0, z.argmax(dim=1) != y)


@pytest.mark.parametrize("classes", [3, 4, 10])
def test_dlr_ignores_scale_and_shift(classes: int) -> None:
    z, (y, target) = randn(12, classes), labels(12, classes)
    for other in (1000 * z, z / 1000, z + 100, 7 * z - 3):
        torch.testing.assert_close(dlr(other, y), dlr(z, y))
        if classes >= 4:
            torch.testing.assert_close(targeted_dlr(other, y, target), targeted_dlr(z, y, target))
    assert float(dlr(z, z.argmax(dim=1)).min()) >= -1  # the bound for a sample that is right


@pytest.mark.parametrize("classes", [2, 3, 10])
def test_scale_invariant_cross_entropy_ignores_scale_and_shift(classes: int) -> None:
    z, (y, _) = randn(12, classes), labels(12, classes)
    for other in (1000 * z, z / 1000, z + 100):
        torch.testing.assert_close(scale_invariant_cross_entropy(other, y), scale_invariant_cross_entropy(z, y))


def test_large_logits_flatten_cross_entropy_but_not_the_scale_invariant_one() -> None:
    weight, x = randn(5, 8, dtype=torch.float32), rand(6, 8, dtype=torch.float32).requires_grad_()
    z = 1000 * x @ weight.T
    y = z.argmax(dim=1)
    (plain,) = torch.autograd.grad(cross_entropy(z, y).sum(), x, retain_graph=True)
    assert (plain.abs().amax(dim=1) == 0).any(), "the case this loss is for"
    (free,) = torch.autograd.grad(scale_invariant_cross_entropy(z, y).sum(), x)
    assert (free.abs().amax(dim=1) > 1e-3).all()
    grown = margin(1000 * (x + 1e-3 * free / free.norm(dim=1, keepdim=True)) @ weight.T, y) - margin(z, y)
    assert (grown > 0).all()


@pytest.mark.parametrize("name", sorted(LOSSES.keys() - {"kl"}))
@pytest.mark.parametrize("classes", [2, 3, 4, 10])
def test_one_step_up_lowers_the_lead_of_the_true_class(name: str, classes: int) -> None:
    weight, x = randn(classes, 12), rand(20, 12).requires_grad_()
    z = x @ weight.T
    y, second = z.topk(2, dim=1).indices.T
    losses = evaluate(name, z, y, second, z.detach())
    (gradient,) = torch.autograd.grad(losses.sum(), x)
    after = (x + 1e-4 * gradient / gradient.norm(dim=1, keepdim=True)) @ weight.T
    assert (margin(after, y) > margin(z, y)).all()


@pytest.mark.parametrize("name", sorted(name for name, loss in LOSSES.items() if loss.needs == "nothing"))
def test_towards_a_target_one_step_up_raises_it(name: str) -> None:
    weight, x = randn(4, 12), rand(20, 12).requires_grad_()
    z = x @ weight.T
    y, target = z.topk(3, dim=1).indices.T[[0, 2]]
    losses = adversarial_loss(name, z, y, target=target)
    torch.testing.assert_close(losses, -LOSSES[name].function(z, target))
    (gradient,) = torch.autograd.grad(losses.sum(), x)
    after = (x + 1e-4 * gradient / gradient.norm(dim=1, keepdim=True)) @ weight.T
    assert (margin(after, target) < margin(z, target)).all()


def test_kl_is_zero_and_flat_at_its_reference_and_grows_away_from_it() -> None:
    reference = randn(6, 4)
    z = reference.clone().requires_grad_()
    value = kl(z, reference)
    (gradient,) = torch.autograd.grad(value.sum(), z)
    assert value.tolist() == pytest.approx([0.0] * 6, abs=1e-12)
    assert float(gradient.abs().max()) < 1e-12
    assert (kl(reference + 0.1 * randn(6, 4, seed=9), reference) > 0).all()
    # Not symmetric: the clean prediction is the one the logarithms are averaged under.
    a, b = torch.tensor([[2.0, 0.0]]), torch.tensor([[0.0, 0.0]])
    p = 1 / (1 + math.exp(-2))
    assert float(kl(a, b)) == pytest.approx(-0.5 * math.log(2 * p) - 0.5 * math.log(2 * (1 - p)))
    assert float(kl(b, a)) == pytest.approx(p * math.log(2 * p) + (1 - p) * math.log(2 * (1 - p)))


class TestLemma2:
    """grad CE(f(x'), f(x)) = - sum over i != j of f(x)_i f(x')_j grad (W_i - W_j).z' (Pang et al., 2020, Lemma 2)."""

    def setup_method(self) -> None:
        torch.manual_seed(3)
        self.features = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5), nn.Softplus()).double()
        self.weight = torch.randn(4, 5, dtype=torch.float64)
        self.x, self.x_adv = torch.rand(1, 6).double(), torch.rand(1, 6).double().requires_grad_()

    def lemma(self, reference: Tensor) -> Tensor:
        z = self.features(self.x_adv)[0]
        f = torch.softmax(self.weight @ z, dim=0).detach()
        total = torch.zeros(6, dtype=torch.float64)
        for i in range(4):
            for j in range(4):
                if i != j:
                    lead = (self.weight[i] - self.weight[j]) @ z
                    (gradient,) = torch.autograd.grad(lead, self.x_adv, retain_graph=True)
                    total -= reference[i] * f[j] * gradient[0]
        return total

    def test_soft_labels(self) -> None:
        clean = self.features(self.x) @ self.weight.T
        value = kl(self.features(self.x_adv) @ self.weight.T, clean.detach())
        (gradient,) = torch.autograd.grad(value.sum(), self.x_adv)
        expected = self.lemma(torch.softmax(clean[0], dim=0).detach())
        torch.testing.assert_close(gradient[0], expected, rtol=1e-10, atol=1e-12)

    @pytest.mark.parametrize("y", range(4))
    def test_one_hot_labels(self, y: int) -> None:
        value = cross_entropy(self.features(self.x_adv) @ self.weight.T, torch.tensor([y]))
        (gradient,) = torch.autograd.grad(value.sum(), self.x_adv)
        one_hot = torch.zeros(4, dtype=torch.float64)
        one_hot[y] = 1
        torch.testing.assert_close(gradient[0], self.lemma(one_hot), rtol=1e-10, atol=1e-12)


def test_mistakes_are_answered() -> None:
    z, y = randn(2, 3), torch.tensor([0, 1])
    with pytest.raises(UserError, match=r"unknown loss 'cros-entropy' \(did you mean 'cross-entropy'\?\); choices: "):
        adversarial_loss("cros-entropy", z, y)
    with pytest.raises(UserError, match="clean logits"):
        adversarial_loss("kl", z, y)
    with pytest.raises(UserError, match="expected no target class"):
        adversarial_loss("kl", z, y, reference=z, target=y)
    for name in ("targeted-margin", "targeted-dlr"):
        with pytest.raises(UserError, match="needs a target"):
            adversarial_loss(name, z, y)
