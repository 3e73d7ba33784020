"""The drop-in for the AutoAttack package: its arguments, its returns, its attributes, and the right answer."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from steelman.attacks.eot import EOT
from steelman.compat import LABELS, NORMS, AutoAttack
from steelman.errors import UserError
from steelman.evaluation.protocols import autoattack
from steelman.evidence.bundle import device_of
from steelman.threat import ThreatModel
from tests.oracles import LinearProblem, linear_problem


def a_problem(classes: int, norm: str = "Linf", n: int = 6) -> tuple[LinearProblem, Tensor, float]:
    """A linear problem, which of its samples fall, and the radius at which half of them do."""
    problem = linear_problem(classes, seed=1, n=n)
    assert 0 <= float(problem.x.min()) <= float(problem.x.max()) <= 1
    distances = torch.tensor(problem.distances_in_box(NORMS[norm], 0.0, 1.0))
    eps = float(distances.sort().values[n // 2 - 1 : n // 2 + 1].mean())
    return problem, distances < eps, eps


def quick(adversary: AutoAttack) -> AutoAttack:
    for knobs in (adversary.apgd, adversary.apgd_targeted, adversary.fab):
        knobs.n_iter = 12
    adversary.apgd.n_restarts, adversary.fab.n_restarts, adversary.square.n_queries = 1, 1, 150
    adversary.apgd_targeted.n_target_classes = adversary.fab.n_target_classes = 2
    return adversary


def custom(model: Any, eps: float, *names: str, **more: Any) -> AutoAttack:
    return quick(AutoAttack(model, eps=eps, version="custom", attacks_to_run=list(names), **more))


def printed(text: str, what: str) -> float:
    found = re.search(rf"^{re.escape(what)}: ([0-9.]+)%", text, re.MULTILINE)
    assert found, text
    return float(found[1]) / 100


@pytest.mark.filterwarnings("ignore:steelman has no Square in L1")
@pytest.mark.parametrize(("classes", "norm"), [(2, "L2"), (3, "L1"), (10, "Linf")])
def test_standard_finds_what_the_closed_form_says(
    classes: int, norm: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    problem, falls, eps = a_problem(classes, norm)
    model, x, y = problem.model, problem.x.contiguous(memory_format=torch.channels_last), problem.y.clone()
    y[-1] = 1  # one that is wrong already
    falls[-1] = True
    adversary = quick(AutoAttack(model, norm=norm, eps=eps, log_path=tmp_path / "log"))
    x_adv, labels = adversary.run_standard_evaluation(x, y, bs=4, return_labels=True)
    said = model(x_adv).argmax(dim=1)
    assert (x_adv.shape, x_adv.dtype, labels.dtype) == (x.shape, x.dtype, y.dtype)
    assert x_adv.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(said != y, falls)
    assert torch.equal(labels, said)
    assert ThreatModel(norm=NORMS[norm], eps=eps).contains(x_adv, problem.x).all()
    changed = (x_adv != x).flatten(1).any(dim=1)
    assert torch.equal(changed[:-1], falls[:-1])
    assert not changed[-1]
    text = capsys.readouterr().out
    assert printed(text, "robust accuracy") == pytest.approx(float((said == y).double().mean()), abs=1e-4)
    assert printed(text, "initial accuracy") == pytest.approx(5 / 6, abs=1e-4)
    assert (tmp_path / "log").read_text() == text
    assert adversary.evaluation is not None
    assert adversary.evaluation.verdict is not None
    assert adversary.evaluation.verdict.correct == int((~falls).sum())
    assert ("SQUARE" in text) == (norm != "L1")


def test_individual_attacks_all_samples_with_each(capsys: pytest.CaptureFixture[str]) -> None:
    problem, falls, eps = a_problem(3)
    adversary = custom(problem.model, eps, "apgd-ce", "apgd-dlr", "fab", "apgd-t", "fab-t")
    answers = adversary.run_standard_evaluation_individual(problem.x, problem.y, bs=4)
    text = capsys.readouterr().out
    assert list(answers) == adversary.attacks_to_run
    for name, x_adv in answers.items():
        assert torch.equal(problem.model(x_adv).argmax(dim=1) != problem.y, falls), name
        assert printed(text, f"robust accuracy by {name.upper()}") == 0.5
    labelled = custom(problem.model, eps, "fab", verbose=False)
    x_adv, labels = labelled.run_standard_evaluation_individual(problem.x, problem.y, return_labels=True)["fab"]
    assert torch.equal(x_adv, answers["fab"])
    assert torch.equal(labels != problem.y, falls)
    assert capsys.readouterr().out == ""


def test_versions_have_the_packages_attacks_and_budgets() -> None:
    def options(version: str, norm: str = "Linf") -> dict[str, Any]:
        return AutoAttack(nn.Flatten(), norm=norm, version=version)._attacks()

    standard = options("standard")
    assert list(standard) == ["apgd-ce", "apgd-t", "fab-t", "square"]
    stages = autoattack(ThreatModel(eps=0.3))
    assert list(standard.values()) == [stage.attack for stage in stages]
    assert [LABELS[name] for name in standard] == [stage.name for stage in stages]  # and so the noise is the same
    plus: Any = options("plus")
    assert list(plus) == ["apgd-ce", "apgd-dlr", "fab", "square", "apgd-t", "fab-t"]
    assert [plus[name].restarts for name in plus] == [5, 5, 5, 1, 1, 1]
    assert (plus["apgd-dlr"].loss, plus["fab"].targets, plus["fab-t"].targets) == ("dlr", None, 9)
    rand: Any = options("rand")
    assert list(rand) == ["apgd-ce", "apgd-dlr"]
    assert all(isinstance(attack, EOT) and attack.draws == 20 for attack in rand.values())
    assert all(attack.attack.restarts == 1 for attack in rand.values())
    with pytest.warns(UserWarning, match="steelman has no Square in L1"):
        l1: Any = options("standard", "L1")
    assert list(l1) == ["apgd-ce", "apgd-t", "fab-t"]
    assert (l1["apgd-ce"].restarts, l1["apgd-t"].targets, l1["fab-t"].targets) == (5, 5, 9)


def test_attributes_that_scripts_set() -> None:
    adversary = AutoAttack(nn.Flatten(), eps=0.1, verbose=False)
    adversary.attacks_to_run = ["apgd-ce", "apgd-t", "fab", "square"]
    adversary.apgd.n_restarts, adversary.apgd.n_iter, adversary.apgd.rho = 3, 7, 0.5
    adversary.apgd_targeted.n_target_classes, adversary.apgd_targeted.eot_iter = 4, 6
    adversary.fab.n_restarts, adversary.fab.n_iter = 2, 11
    adversary.square.n_queries, adversary.square.p_init, adversary.square.resc_schedule = 99, 0.3, True
    ce, towards, fab, square = (attack for attack in adversary._attacks().values())
    expected: Any = {"restarts": 3, "steps": 7, "rho": 0.5, "loss": "cross-entropy"}
    assert {key: getattr(ce, key) for key in expected} == expected
    assert isinstance(towards, EOT)
    assert (towards.draws, getattr(towards.attack, "targets")) == (6, 4)  # noqa: B009
    assert (getattr(fab, "restarts"), getattr(fab, "steps")) == (2, 11)  # noqa: B009
    assert str(square).startswith("Square(queries=99, p=0.3, restarts=1, rescale=True")
    with pytest.raises(UserError, match=r"unknown setting 'n_restart' .*did you mean 'n_restarts'"):
        adversary.apgd.n_restart = 1
    adversary.square.n_queries = 0
    with pytest.raises(UserError, match="queries"):
        adversary._attacks()


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"is_tf_model": True}, "is_tf_model: expected False"),
    ({"norm": "linfty"}, "unknown norm 'linfty'.*choices: L1, L2, Linf"),
    ({"version": "standart"}, "unknown version 'standart' .did you mean 'standard'.*custom, plus, rand, standard"),
    ({"attacks_to_run": ["fab"]}, "attacks_to_run is for version 'custom'"),
    ({"version": "custom"}, "expected at least one attack, got none; choices: apgd-ce"),
    ({"version": "custom", "attacks_to_run": ["apgd"]}, "unknown attack 'apgd'.*choices: apgd-ce, apgd-dlr"),
    ({"version": "custom", "attacks_to_run": ["square"], "norm": "L1"}, "square does not know the norm L1"),
    ({"eps": -0.1}, "eps above 0, got 250 and -0.1"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED)
def test_bad_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    problem, _, _ = a_problem(3)
    with pytest.raises(UserError, match=message):
        AutoAttack(problem.model, **arguments).run_standard_evaluation(problem.x, problem.y)


def test_bad_images_are_refused(tmp_path: Path) -> None:
    problem, _, eps = a_problem(3)
    adversary = custom(problem.model, eps, "apgd-ce", verbose=False)
    with pytest.raises(UserError, match=r"x_orig: expected float images .*, got torch.uint8"):
        adversary.run_standard_evaluation((255 * problem.x).byte(), problem.y)
    with pytest.raises(UserError, match=r"values in \[0, 1\]"):
        adversary.run_standard_evaluation(2 * problem.x, problem.y)
    with pytest.raises(UserError, match="label 7"):
        adversary.run_standard_evaluation(problem.x, problem.y + 7)
    (tmp_path / "state").write_text("{}")
    with pytest.raises(UserError, match="state_path: expected a folder"):
        adversary.run_standard_evaluation(problem.x, problem.y, state_path=tmp_path / "state")


class Counted(nn.Module):
    """A model that counts its forwards, and may give up."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.calls, self.patience = model, 0, 10**9

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > self.patience:
            raise KeyboardInterrupt
        out: Tensor = self.model(x)
        return out


def test_state_path_goes_on_where_it_stopped(tmp_path: Path) -> None:
    problem, _, eps = a_problem(3)
    model, names = Counted(problem.model), ("apgd-ce", "fab-t")
    whole = custom(model, eps, *names, verbose=False).run_standard_evaluation(problem.x, problem.y, bs=2)
    needed, model.calls = model.calls, 0
    model.patience = needed - 10
    state = tmp_path / "deep" / "state.json"
    adversary = custom(model, eps, *names, verbose=False)
    with pytest.raises(KeyboardInterrupt):
        adversary.run_standard_evaluation(problem.x, problem.y, bs=2, state_path=state)
    model.calls, model.patience = 0, 10**9
    x_adv, labels = adversary.run_standard_evaluation(problem.x, problem.y, bs=2, return_labels=True, state_path=state)
    assert torch.equal(x_adv, whole)
    assert model.calls < needed
    # Done, it is checked and read; and no other run takes its answer for its own.
    model.calls = 0
    again = adversary.run_standard_evaluation(problem.x, problem.y, bs=2, return_labels=True, state_path=str(state))
    assert 0 < model.calls <= 8
    assert torch.equal(again[0], whole)
    assert torch.equal(again[1], labels)
    adversary.epsilon *= 2
    adversary.fab.n_iter = 99
    with pytest.raises(UserError, match="holds a run with other attacks, threat model"):
        adversary.run_standard_evaluation(problem.x, problem.y, bs=2, state_path=state)


def test_a_finished_state_is_no_answer_for_another_function(tmp_path: Path) -> None:
    """A function has no weights to tell it by: it is asked."""
    problem, _, eps = a_problem(3)
    net = problem.model
    first, second = (custom(one, eps, "apgd-ce", verbose=False) for one in (lambda x: 2 * net(x), lambda x: -net(x)))
    first.run_standard_evaluation(problem.x, problem.y, bs=2, state_path=tmp_path / "state")
    again = first.run_standard_evaluation(problem.x, problem.y, bs=2, state_path=tmp_path / "state")
    assert again.shape == problem.x.shape
    with pytest.raises(UserError, match="the model does not say what is claimed"):
        second.run_standard_evaluation(problem.x, problem.y, bs=2, state_path=tmp_path / "state")


class Noisy(nn.Module):
    """Logits with noise that no gradient sees the end of."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.model(x)
        return logits + 0.01 * torch.randn_like(logits)


def test_a_random_model_needs_the_version_for_it() -> None:
    problem, falls, eps = a_problem(3)
    model = Noisy(problem.model)
    with pytest.raises(UserError, match=r"the model is random.*version='rand'"):
        custom(model, eps, "apgd-ce", verbose=False).run_standard_evaluation(problem.x, problem.y)
    adversary = AutoAttack(model, eps=1.05 * eps, version="rand", verbose=False)
    adversary.apgd.n_iter, adversary.apgd.eot_iter = 10, 4
    x_adv = adversary.run_standard_evaluation(problem.x, problem.y)
    assert (problem.model(x_adv).argmax(dim=1) != problem.y)[falls].all()
    assert adversary.evaluation is not None
    assert adversary.evaluation.verdict is not None
    assert adversary.evaluation.verdict.trust == "suspect"


def test_functions_are_models_too() -> None:
    problem, falls, eps = a_problem(2)
    net, x = problem.model.float(), problem.x.float()
    net.train()  # it has nothing that would mind
    for function in (lambda images: 3 * net(images), net.forward):
        adversary = custom(function, eps, "apgd-dlr", verbose=False)
        x_adv = adversary.run_standard_evaluation(x, problem.y, bs=4)
        assert torch.equal(net(x_adv).argmax(dim=1) != problem.y, falls)
        assert adversary.clean_accuracy(x, problem.y, bs=4) == 1
        assert adversary.clean_accuracy(x_adv, problem.y, bs=4) == 0.5
    assert net.training
    assert all(parameter.requires_grad and parameter.grad is None for parameter in net.parameters())
    with pytest.raises(UserError, match="expected a module or a function"):
        custom("resnet", eps, "apgd-ce").clean_accuracy(x, problem.y)


def test_a_model_without_tensors_is_attacked_where_it_is_told_and_left_alone() -> None:
    places = set[str]()

    class Bare(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            places.add(x.device.type)
            return x.flatten(1)[:, :3]

    x = torch.rand(4, 1, 2, 2)
    for model in (Bare().eval(), Bare().eval().forward):
        adversary = AutoAttack(
            model, eps=0.1, device="cpu", version="custom", attacks_to_run=["apgd-ce"], verbose=False
        )
        adversary.run_standard_evaluation(x, x.flatten(1)[:, :3].argmax(dim=1))
        assert not isinstance(model, nn.Module) or not list(model.buffers())
        held, place = AutoAttack(model, device="meta")._model(x)
        assert place.type == "meta" == device_of(held).type
        assert held.state_dict() == {}
    assert places == {"cpu"}


def test_with_nothing_right_the_images_come_back() -> None:
    problem, _, eps = a_problem(2)
    adversary = custom(problem.model, eps, "apgd-ce", verbose=False)
    x_adv, labels = adversary.run_standard_evaluation(problem.x, 1 - problem.y, return_labels=True)
    assert torch.equal(x_adv, problem.x)
    assert torch.equal(labels, problem.y)


def test_what_else_scripts_ask_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    net, x = nn.Sequential(nn.Flatten(), nn.Linear(4, 3)).eval(), torch.rand(2, 1, 2, 2)
    adversary = AutoAttack(net, eps=0.1, seed=7, log_path=tmp_path / "log.txt")
    assert (adversary.get_seed(), AutoAttack(net).get_seed()) == (7, 0)
    assert torch.equal(adversary.get_logits(x), net(x))
    adversary.logger.log("a line of the script's own")
    assert capsys.readouterr().out == (tmp_path / "log.txt").read_text() == "a line of the script's own\n"
