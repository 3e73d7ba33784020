"""The loop itself, against loops written out by hand; and what it leaves behind, which is nothing."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from steelman import data
from steelman.attacks import ATTACKS, PGD, pgd, untouched
from steelman.errors import UserError
from steelman.heads import build_head, with_margin
from steelman.losses import LOSSES, adversarial_loss
from steelman.models.classifier import build_classifier
from steelman.rng import Key
from steelman.settings import SettingsError, make
from steelman.threat import Norm, ThreatModel
from tests.oracles import rand
from tests.settings import ATTACK_SETTINGS
from tests.test_attacks import Smooth, samples
from tests.test_objectives import CLASSES, HEAD_OPTIONS, Naive, a_small
from tests.training_helpers import SHAPE

LINF = ThreatModel(norm="linf", eps=0.08)


def gradient_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    x = x.detach().clone().requires_grad_()
    (gradient,) = torch.autograd.grad(F.cross_entropy(model(x), y, reduction="sum"), x)
    return gradient


def by_hand(model: nn.Module, x: Tensor, y: Tensor, start: Tensor, steps: int, eta: float, mu: float = 0.0) -> Tensor:
    """Sign steps, clipped to the cube and to [0, 1]; with mu, on the momentum of mean-normalised gradients."""
    x_adv, g = start, torch.zeros_like(x)
    for _ in range(steps):
        gradient = gradient_of(model, x_adv, y)
        g = mu * g + gradient / gradient.abs().mean(dim=(1, 2, 3), keepdim=True) if mu else gradient
        x_adv = x_adv + eta * g.sign()
        x_adv = torch.max(torch.min(x_adv, x + LINF.eps), x - LINF.eps).clamp(0, 1)
    return x_adv


class TestByHand:
    @pytest.mark.parametrize("mu", [0.0, 1.0, 0.5])
    def test_last_point_from_the_clean_image(self, mu: float) -> None:
        model, x, y = samples()
        got = PGD(steps=7, step_size=0.02, start="zero", keep="last", momentum=mu)(model, x, y, LINF)
        assert torch.equal(got, by_hand(model, x, y, x, 7, 0.02, mu))

    def test_momentum_matters(self) -> None:
        model, x, y = samples()
        one, other = (PGD(steps=7, step_size=0.03, start="zero", keep="last", momentum=mu) for mu in (0.0, 1.0))
        assert not torch.equal(one(model, x, y, LINF), other(model, x, y, LINF))

    @pytest.mark.parametrize("start", ["uniform", "ball", "gaussian"])
    def test_last_point_from_noise(self, start: Any) -> None:
        model, x, y = samples()
        index, stream = torch.arange(8) + 50, Key(3).fold("restart", 0)
        if start != "gaussian":
            noisy = x + LINF.eps * (2 * stream.uniform(index, (1, 3, 4), torch.float64) - 1)
        else:
            noisy = x + 1e-3 * stream.normal(index, (1, 3, 4), torch.float64)
        if start == "ball":
            assert ((noisy < 0) | (noisy > 1)).any(), "the first gradient is meant to be taken outside the box"
        else:
            noisy = torch.max(torch.min(noisy, x + LINF.eps), x - LINF.eps).clamp(0, 1)
        got = PGD(steps=5, step_size=0.02, start=start, keep="last")(model, x, y, LINF, index=index, key=Key(3))
        assert torch.equal(got, by_hand(model, x, y, noisy, 5, 0.02))

    def test_l2_step(self) -> None:
        model, x, y = samples()
        threat = ThreatModel(norm="l2", eps=10.0, low=-50, high=50)
        g = gradient_of(model, x, y)
        got = PGD(steps=1, step_size=0.3, start="zero", keep="last")(model, x, y, threat)
        torch.testing.assert_close(got, x + 0.3 * g / g.flatten(1).norm(dim=1).view(-1, 1, 1, 1))

    def test_best_point_is_the_first_success_or_the_highest_loss(self) -> None:
        model, x, y = samples(24)
        got = PGD(steps=6, step_size=0.05, start="zero")(model, x, y, LINF)
        fates = set()
        for row in range(24):
            one, label = x[row : row + 1], y[row : row + 1]
            path = [by_hand(model, one, label, one, steps, 0.05) for steps in range(7)]
            fallen = [point for point in path if int(model(point).argmax()) != int(label)]
            losses = [float(F.cross_entropy(model(point), label).detach()) for point in path]
            expected = fallen[0] if fallen else path[losses.index(max(losses))]
            assert torch.equal(got[row : row + 1], expected)
            fates.add(bool(fallen))
        assert fates == {True, False}, "both fates are meant to occur"

    def test_forwards_are_one_a_step(self) -> None:
        model, x, y = samples()
        calls: list[int] = []
        model.register_forward_hook(lambda *_: calls.append(1))
        PGD(steps=5, keep="last")(model, x, y, LINF)
        assert len(calls) == 5
        calls.clear()
        PGD(steps=5)(model, x, y, LINF.at(1e-6))
        assert len(calls) == 6


@pytest.mark.parametrize("keep", ["best", "last"])
@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
def test_restarts_only_ever_help(keep: Any, norm: Norm) -> None:
    model, x, y = samples(40)
    threat = ThreatModel(norm=norm, eps={"linf": 0.06, "l2": 0.22, "l1": 0.6}[norm])
    fooled, losses = [], []
    for restarts in (1, 2, 4, 8):
        x_adv = PGD(steps=3, restarts=restarts, keep=keep)(model, x, y, threat, key=Key(1))
        z = model(x_adv).detach()
        fooled.append(z.argmax(dim=1) != y)
        losses.append(F.cross_entropy(z, y, reduction="none"))
        assert threat.contains(x_adv, x).all()
    for i in range(3):
        assert (fooled[i + 1] | ~fooled[i]).all()
        surviving = ~fooled[i + 1]
        assert (losses[i + 1] >= losses[i])[surviving].all()
    assert (losses[3] > losses[0])[~fooled[3]].any(), "restarts are meant to differ"


@pytest.mark.parametrize("options", [{}, {"momentum": 1.0}, {"start": "diversified"}, {"loss": "kl"}, {"keep": "last"}])
@pytest.mark.parametrize("targeted", [False, True])
def test_restarts_together_find_what_they_find_in_turn(options: dict[str, Any], targeted: bool) -> None:
    model, x, y = samples(40)
    target = (y + 1) % 3 if targeted and options.get("loss") != "kl" else None
    turn, together = (
        PGD(steps=3, restarts=4, together=on, **options).run(model, x, y, LINF.at(0.06), key=Key(1), target=target)
        for on in (False, True)
    )
    assert torch.equal(turn.success, together.success)
    assert 0 < int(turn.success.sum()) < 40
    stood = ~turn.success
    torch.testing.assert_close(turn.x_adv[stood], together.x_adv[stood])
    assert torch.equal(turn.forwards[stood], together.forwards[stood])
    assert torch.equal(turn.backwards[stood], together.backwards[stood])
    assert (together.forwards >= turn.forwards).all()
    got = model(together.x_adv).argmax(dim=1)
    assert torch.equal(got != y if target is None else got == target, together.success)


@pytest.mark.parametrize("momentum", [0.0, 1.0])
def test_a_sample_meets_the_same_restarts_in_any_batch(momentum: float) -> None:
    model, x, y = samples(12)
    attack, index = PGD(steps=2, restarts=5, momentum=momentum), torch.arange(12) * 7 + 3
    whole = attack(model, x, y, LINF, index=index, key=Key(1))
    for row in range(12):
        one = slice(row, row + 1)
        assert torch.equal(attack(model, x[one], y[one], LINF, index=index[one], key=Key(1)), whole[one])


def net() -> nn.Sequential:
    """Batch norm, dropout, power iteration, mixed modes, a frozen layer and gradients under way."""
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Conv2d(4, 4, 1),
        nn.InstanceNorm2d(4, track_running_stats=True),
        nn.Flatten(),
        nn.utils.parametrizations.spectral_norm(nn.Linear(48, 6)),
        nn.BatchNorm1d(6, momentum=None),
        nn.Linear(6, 3),
    )
    torch.autograd.backward(model(torch.rand(8, 1, 3, 4)).sum())
    model[1].eval()
    for parameter in model[4].parameters():
        parameter.requires_grad_(False)
    return model


def everything(model: nn.Module) -> tuple[Any, ...]:
    return (
        [
            (name, module.training, getattr(module, "track_running_stats", None))
            for name, module in model.named_modules()
        ],
        [(name, p.requires_grad, p.data_ptr()) for name, p in model.named_parameters()],
        [None if p.grad is None else (p.grad.data_ptr(), p.grad.tolist()) for p in model.parameters()],
        [(name, b.data_ptr(), b.tolist()) for name, b in model.named_buffers()],
        [(name, value.tolist()) for name, value in model.state_dict().items()],
        torch.get_rng_state().tolist(),
    )


class TestUntouched:
    @pytest.mark.parametrize("name", ["pgd", "cw", "square", "eot"])  # all are in test_contract.py
    def test_an_attack_leaves_no_trace(self, name: str) -> None:
        model, x = net(), torch.rand(8, 1, 3, 4)
        before = everything(model)
        attack = ATTACKS[name](**ATTACK_SETTINGS[name])
        attack(model, x, torch.arange(8) % 3, ThreatModel(norm=attack.norms[0], eps=LINF.eps))
        assert everything(model) == before

    @pytest.mark.parametrize("mode", ["eval", "train"])
    @pytest.mark.parametrize("fails_at", [1, 2, None])
    def test_in_either_mode_and_after_an_exception(self, mode: Any, fails_at: int | None) -> None:
        model, x, calls = net(), torch.rand(8, 1, 3, 4), []

        def hook(*_: object) -> None:
            calls.append(1)
            if len(calls) == fails_at:
                raise RuntimeError("the model broke")

        model.register_forward_hook(hook)
        before = everything(model)
        attack = PGD(steps=3, mode=mode, keep="last")
        if fails_at is None:
            attack(model, x, torch.arange(8) % 3, LINF)
        else:
            with pytest.raises(RuntimeError, match="the model broke"):
                attack(model, x, torch.arange(8) % 3, LINF)
        assert everything(model) == before

    def test_a_graph_made_before_the_attack_still_goes_backward(self) -> None:
        model, x, y = net().train(), torch.rand(8, 1, 3, 4), torch.arange(8) % 3
        loss = F.cross_entropy(model(x), y)
        x_adv = PGD(steps=2, mode="train", keep="last")(model, x, y, LINF)
        torch.autograd.backward(loss + F.cross_entropy(model(x_adv), y))
        assert all(p.grad is not None for p in model.parameters() if p.requires_grad)

    def test_train_mode_uses_the_statistics_of_the_batch(self) -> None:
        model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(12), nn.Linear(12, 3)).double()
        with torch.no_grad():
            model(50 * torch.rand(8, 1, 3, 4).double())  # running statistics far from the batch's
        x, y = rand(8, 1, 3, 4), torch.arange(8) % 3
        attack = {
            mode: PGD(steps=3, step_size=0.03, start="zero", keep="last", mode=mode) for mode in ("train", "eval")
        }
        for mode in ("train", "eval"):
            twin = copy.deepcopy(model).train(mode == "train")
            expected = by_hand(twin, x, y, x, 3, 0.03)
            assert torch.equal(attack[mode](model, x, y, LINF), expected)
            assert model.training

    def test_the_bracket_freezes_weights_and_sets_the_mode(self) -> None:
        model = net()
        with untouched(model):
            assert not any(module.training for module in model.modules())
            assert not any(parameter.requires_grad for parameter in model.parameters())
        with untouched(model, "train"):
            assert all(module.training for module in model.modules())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"loss": "cw"}, "loss: unknown loss 'cw'; choices: cross-entropy, dlr"),
        ({"start": "zero", "restarts": 2}, "restarts from the same point"),
        ({"start": "zero", "loss": "kl"}, "flat at the clean image"),
        ({"head_margin": True, "loss": "kl"}, "loss 'kl' has no true class for a head's margin to lower"),
        ({"head_margin": "perhaps"}, "head_margin: "),
        ({"head_scale": "perhaps"}, "head_scale: "),
        ({"start": "ball"}, "for training attacks"),
        ({"mode": "train"}, "expected keep 'last' and 1 restart, got keep 'best'"),
        ({"mode": "train", "keep": "last", "restarts": 2}, "got keep 'last' and 2"),
        ({"steps": 0}, "steps: "),
        ({"restarts": 0}, "restarts: "),
        ({"step_size": 0}, "step_size: "),
        ({"step_size": -0.1}, "step_size: "),
        ({"momentum": -1}, "momentum: "),
        ({"keep": "worst"}, "keep: "),
        ({"mode": "test"}, "mode: "),
    ],
)
def test_settings_that_make_no_sense(options: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        make("attack", ATTACKS, "pgd", options)


def test_kl_cannot_be_targeted() -> None:
    model, x, y = Smooth(), rand(2, 1, 3, 4), torch.tensor([0, 1])
    with pytest.raises(UserError, match="target"):
        PGD(loss="kl")(model, x, y, LINF, target=y)


# The head's scale and margin


WIDE = ThreatModel(norm="l2", eps=10.0, low=-50, high=50)
SCALED = ["fn", "he", "m-he", "wn"]
scaled_heads = pytest.mark.parametrize("head", SCALED)


def unit(gradient: Tensor) -> Tensor:
    return F.normalize(gradient.flatten(1), dim=1).view_as(gradient)


def naive_rows(naive: Naive, x: Tensor) -> Tensor:
    return torch.stack([torch.stack([naive.logit(one, k) for k in range(CLASSES)]) for one in x])


def naive_step(naive: Naive, x: Tensor, y: Tensor, margin: bool, step: float) -> Tensor:
    """One l2 step from x up the naive cross-entropy."""
    point = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(naive.loss(point, y, margin=margin), point)
    return x + step * unit(gradient)


def test_the_table_of_heads_has_scales_and_margins_to_tell_apart() -> None:
    for head in SCALED:
        assert HEAD_OPTIONS[head]["scale"] > 1
        assert HEAD_OPTIONS[head]["margin"] > 0


class TestHeadOptions:
    x, y = rand(6, *SHAPE, seed=11), torch.arange(6) % CLASSES
    step = PGD(steps=1, step_size=0.3, start="zero", keep="last")

    @scaled_heads
    @pytest.mark.parametrize("head_margin", [False, True])
    @pytest.mark.parametrize("head_scale", [False, True])
    def test_an_l2_step_climbs_the_naive_loss(self, head: str, head_scale: bool, head_margin: bool) -> None:
        """CE(s (cos - m 1_y)), with s or m left out, or cos replaced by what the head has."""
        net = a_small(head)
        attack = dataclasses.replace(self.step, head_scale=head_scale, head_margin=head_margin)
        got = attack(net, self.x, self.y, WIDE)
        expected = naive_step(Naive(net, head, scaled=head_scale), self.x, self.y, head_margin, 0.3)
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-9)
        other = naive_step(Naive(net, head, scaled=not head_scale), self.x, self.y, head_margin, 0.3)
        assert float((got - other).abs().max()) > 1e-4, "the scale is meant to matter"

    @scaled_heads
    def test_a_margin_does_not_turn_the_gradient_of_cross_entropy(self, head: str) -> None:
        """It scales the weights of all wrong classes alike. A longer gradient, in the same direction."""
        net = a_small(head)
        plain, adaptive = self.step, dataclasses.replace(self.step, head_margin=True)
        torch.testing.assert_close(
            plain(net, self.x, self.y, WIDE), adaptive(net, self.x, self.y, WIDE), rtol=0, atol=1e-9
        )

    @scaled_heads
    def test_a_margin_turns_the_gradient_of_dlr(self, head: str) -> None:
        net = a_small(head)
        naive, margin = Naive(net, head), HEAD_OPTIONS[head]["scale"] * HEAD_OPTIONS[head]["margin"]
        x = self.x.clone().requires_grad_()
        total = torch.zeros((), dtype=torch.float64)
        for row, label in zip(naive_rows(naive, x), self.y.tolist()):
            z = [value - (margin if k == label else 0) for k, value in enumerate(row)]
            ordered = sorted(z, key=lambda value: float(value.detach()), reverse=True)
            best = next(value for value in ordered if value is not z[label])
            total = total - (z[label] - best) / (ordered[0] - ordered[2])
        (gradient,) = torch.autograd.grad(total, x)
        attack = dataclasses.replace(self.step, loss="dlr", head_margin=True)
        got = attack(net, self.x, self.y, WIDE)
        # With three classes, one that is last of them makes the ratio 1 and its gradient 0: compare the others.
        moving = gradient.flatten(1).norm(dim=1) > 1e-9
        assert moving.any()
        torch.testing.assert_close(got[moving], (self.x + 0.3 * unit(gradient))[moving], rtol=0, atol=1e-8)
        without = dataclasses.replace(attack, head_margin=False)(net, self.x, self.y, WIDE)
        assert float((got - without)[moving].abs().max()) > 1e-3

    @scaled_heads
    @pytest.mark.parametrize("loss", sorted(LOSSES))
    def test_every_loss_sees_the_logits_it_is_asked_to(
        self, head: str, loss: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        net, seen = a_small(head), []
        scale, margin = HEAD_OPTIONS[head]["scale"], HEAD_OPTIONS[head]["margin"]

        def watching(name: str, logits: Tensor, y: Tensor, **more: Any) -> Tensor:
            seen.append((logits.detach(), more["reference"]))
            return adversarial_loss(name, logits, y, **more)

        monkeypatch.setattr(pgd, "adversarial_loss", watching)
        logits, lowered = net(self.x).detach(), scale * margin * F.one_hot(self.y, CLASSES).double()
        options: dict[str, Any] = {"steps": 1, "keep": "last", "loss": loss, "step_size": 0.3}
        start = "gaussian" if loss == "kl" else "zero"
        for head_scale in (True, False):
            for head_margin in (False,) if loss == "kl" else (False, True):
                seen.clear()
                PGD(**options, start=start, head_scale=head_scale, head_margin=head_margin)(net, self.x, self.y, WIDE)  # type: ignore[arg-type]
                expected = (logits - head_margin * lowered) / (1 if head_scale else scale)
                ((got, reference),) = seen
                torch.testing.assert_close(got, expected, rtol=0, atol=0.1 if loss == "kl" else 1e-12)
                if loss == "kl":
                    torch.testing.assert_close(reference, expected, rtol=0, atol=1e-12)

    @scaled_heads
    def test_kl_without_the_scale(self, head: str) -> None:
        net = a_small(head)
        naive = Naive(net, head, scaled=False)
        start = self.x + 1e-3 * Key(3).fold("restart", 0).normal(torch.arange(6), SHAPE, torch.float64)
        point = start.clone().requires_grad_()
        p, q = naive_rows(naive, self.x).softmax(dim=1), naive_rows(naive, point).softmax(dim=1)
        (gradient,) = torch.autograd.grad((p * (p.log() - q.log())).sum(), point)
        attack = dataclasses.replace(self.step, loss="kl", start="gaussian", head_scale=False)
        got = attack(net, self.x, self.y, WIDE, key=Key(3))
        torch.testing.assert_close(got, start + 0.3 * unit(gradient), rtol=0, atol=1e-7)

    @pytest.mark.parametrize("head", sorted(HEAD_OPTIONS))
    def test_by_default_the_loss_is_that_of_the_logits_to_the_bit(self, head: str) -> None:
        net = a_small(head)
        got = PGD(steps=5, step_size=0.02, start="zero", keep="last")(net, self.x, self.y, LINF)
        assert torch.equal(got, by_hand(net, self.x, self.y, self.x, 5, 0.02))
        assert PGD() == PGD(head_scale=True, head_margin=False)

    @pytest.mark.parametrize("keep", ["best", "last"])
    def test_on_a_model_without_a_head_the_options_change_nothing(self, keep: Any) -> None:
        linear = a_small("linear")
        for model, x, y in (samples(), (linear, self.x, self.y)):
            plain = PGD(steps=4, keep=keep)(model, x, y, LINF)
            for options in ({"head_scale": False}, {"head_margin": True}, {"head_scale": False, "head_margin": True}):
                assert torch.equal(PGD(steps=4, keep=keep, **options)(model, x, y, LINF), plain)  # type: ignore[arg-type]

    def test_adaptive_is_pgd_with_the_margin(self) -> None:
        assert ATTACKS["adaptive"]() == PGD(head_margin=True)
        assert ATTACKS["adaptive"](steps=7, restarts=3) == PGD(head_margin=True, steps=7, restarts=3)
        net = a_small("he")
        got = ATTACKS["adaptive"](steps=3)(net, self.x, self.y, LINF, key=Key(2))
        assert torch.equal(got, PGD(steps=3, head_margin=True)(net, self.x, self.y, LINF, key=Key(2)))

    def test_success_is_read_from_the_logits_a_user_meets(self) -> None:
        """A sample within the margin is still classified as it should be: the attack goes on with it."""
        net = a_small("he")
        net.head.margin = 10.0
        y, calls = net(self.x).argmax(dim=1), []
        assert (with_margin(net, net(self.x), y).argmax(dim=1) != y).all()
        net.register_forward_hook(lambda *_: calls.append(1))
        attack = PGD(steps=4, start="zero", head_margin=True)
        x_adv = attack(net, self.x, y, LINF.at(1e-6))
        assert len(calls) == 5, "none of them leaves early"
        assert (net(x_adv).argmax(dim=1) == y).all()
        assert not torch.equal(x_adv, self.x)

    def test_a_margin_wakes_a_saturated_loss(self) -> None:
        """Where softmax is 1 in single precision the gradient is 0; lowered by s m, the true class is less sure."""
        head = build_head("he", 2, 2, scale=150.0, margin=0.5)
        net = nn.Sequential(nn.Flatten(), head)
        nn.init.eye_(head.weight)
        x, y = torch.tensor([[[[1.0, 0.05]]]]), torch.tensor([0])
        attack = PGD(steps=1, start="zero", keep="last")
        assert torch.equal(attack(net, x, y, LINF), x)
        assert not torch.equal(dataclasses.replace(attack, head_margin=True)(net, x, y, LINF), x)
        assert not torch.equal(dataclasses.replace(attack, head_scale=False)(net, x, y, LINF), x)

    def test_with_two_classes_the_scale_does_not_matter(self) -> None:
        """There is one wrong class, so every loss of the difference climbs the same way."""
        net = nn.Sequential(nn.Flatten(), nn.Linear(16, 5), nn.Tanh(), build_head("he", 5, 2)).double()
        attack, y = PGD(steps=5, step_size=0.3, start="zero", keep="last"), self.y % 2
        one, other = (
            dataclasses.replace(attack, head_scale=scale)(net, self.x, y, WIDE.at(2.0)) for scale in (True, False)
        )
        torch.testing.assert_close(one, other, rtol=0, atol=1e-8)

    def test_on_digits_the_unscaled_attack_finds_no_more(self) -> None:
        """Its softmax is nearly flat, so that its gradient is spread over all classes. Measured with this very
        network, at linf 0.1: 46% stay right under the scaled attack, 52% under the unscaled one."""
        digits = data.load("digits")
        x, y = digits.train.images(torch.arange(len(digits.train))), digits.train.labels
        net = build_classifier("mlp", input_shape=digits.shape, num_classes=10, head="he", width=64)
        optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
        for _ in range(6):
            for rows in torch.tensor_split(torch.randperm(len(x)), 12):
                loss = F.cross_entropy(with_margin(net, net(x[rows]), y[rows]), y[rows])
                optimizer.zero_grad()
                torch.autograd.backward(loss)
                optimizer.step()
        x, y = digits.test.images(torch.arange(len(digits.test))), digits.test.labels
        threat = ThreatModel(norm="linf", eps=0.1)
        right = {
            scale: int((net(PGD(steps=10, head_scale=scale)(net, x, y, threat)).argmax(dim=1) == y).sum())
            for scale in (True, False)
        }
        assert int((net(x).argmax(dim=1) == y).sum()) > 0.9 * len(y)
        assert right[False] >= right[True]
