"""Transfer: linear models whose answers are known by hand, cheating attacks, bad input, JSON and the command line."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save
from torch import Tensor, nn

from steelman import cli
from steelman import recipe as recipes
from steelman.attacks import PGD, Attack
from steelman.attacks import pgd as pgd_module
from steelman.data import load
from steelman.data.source import ArraySource, first
from steelman.errors import UserError
from steelman.evaluation.result import interval
from steelman.evaluation.transfer import TRANSFER_ATTACKS, Cell, Transfer, transfer
from steelman.rng import Key
from steelman.threat import Norm, ThreatModel
from steelman.training import run
from steelman.training.folder import load_model
from tests.oracles import rand, randn, red

EPS: dict[Norm, float] = {"linf": 0.05, "l2": 0.15, "l1": 0.2}
N = 24
DATA = (
    0.25 + 0.5 * rand(N, 1, 2, 3, seed=5, dtype=torch.float32),  # no pixel meets its bound
    (rand(N, seed=6) < 0.5).long(),
)


class Plane(nn.Module):
    """Two classes on the two sides of w . (x - 1/2) = b."""

    def __init__(self, w: Tensor, b: float = 0.0) -> None:
        super().__init__()
        self.w, self.b = nn.Parameter(w.to(torch.float32)), b

    def forward(self, x: Tensor) -> Tensor:
        side = ((x.flatten(1) - 0.5) * self.w).sum(dim=1) - self.b
        return torch.stack((-side, side), dim=1)


def planes() -> dict[str, nn.Module]:
    return {name: Plane(randn(6, seed=seed)) for seed, name in enumerate("abc")}


def labelled(model: nn.Module, flip: int = 7) -> tuple[Tensor, Tensor]:
    """Images with the labels `model` gives, every `flip`-th of them wrong."""
    y: Tensor = model(DATA[0]).argmax(dim=1)
    y[::flip] = 1 - y[::flip]
    return DATA[0], y


def unit(w: Tensor, norm: str) -> Tensor:
    """argmax of w . v over ||v||_p <= 1."""
    if norm == "linf":
        return w.sign()
    if norm == "l2":
        return w / w.square().sum().sqrt()
    return torch.zeros_like(w).scatter(0, w.abs().argmax()[None], 1.0) * w.sign()


def by_hand(source: Plane, target: Plane, x: Tensor, y: Tensor, norm: Norm) -> tuple[int, int]:
    """What the target gets right, clean and at x - s eps U_p(w), with s = +1 for class 1 and -1 for class 0."""
    sides = (2 * y - 1).double()
    v, w = target.w.detach().double(), source.w.detach().double()
    margin = sides * (((x.double().flatten(1) - 0.5) @ v) - target.b)
    moved = margin - EPS[norm] * float(v @ unit(w, norm))
    return int((margin > 0).sum()), int(((margin > 0) & (moved > 0)).sum())


def check_by_hand(norm: Norm, attack: Attack) -> None:
    models = planes()
    x, y = labelled(models["a"])
    found = transfer(models, None, (x, y), ThreatModel(norm=norm, eps=EPS[norm]), attack)
    for source, one in models.items():
        for target, other in models.items():
            assert isinstance(one, Plane)
            assert isinstance(other, Plane)
            cell = found.cell(source, target)
            assert (cell.clean, cell.correct) == by_hand(one, other, x, y, norm), (source, target)
            assert (cell.source, cell.target, cell.total) == (source, target, N)


class TestAnswers:
    # In l2 a random start ends near the pole, not at it; MIM starts from the clean image.
    @pytest.mark.parametrize(
        ("name", "norm"), [("PGD-20", "linf"), ("PGD-20", "l1"), ("MIM-20", "linf"), ("MIM-20", "l2"), ("MIM-20", "l1")]
    )
    def test_linear_models(self, norm: Norm, name: str) -> None:
        check_by_hand(norm, TRANSFER_ATTACKS[name])

    @pytest.mark.parametrize("norm", list(EPS))
    def test_the_hand_notices_a_broken_step(self, monkeypatch: pytest.MonkeyPatch, norm: Norm) -> None:
        right, attack = pgd_module.ascend, PGD(steps=4, start="zero", keep="last")
        check_by_hand(norm, attack)

        def down(x_adv: Tensor, gradient: Tensor, *rest: Any) -> Tensor:
            return right(x_adv, -gradient, *rest)

        for broken in (down, lambda x_adv, *rest: x_adv):
            monkeypatch.setattr(pgd_module, "ascend", broken)
            assert red(lambda: check_by_hand(norm, attack))

    def test_the_hand_notices_points_of_another_source(self) -> None:
        other = planes()["b"]

        def elsewhere(model: nn.Module, *rest: Any, **more: Any) -> Tensor:
            return TRANSFER_ATTACKS["PGD-20"](other, *rest, **more)

        assert red(lambda: check_by_hand("linf", elsewhere))

    def test_equal_weights_are_the_white_box(self) -> None:
        model = planes()["a"]
        twin = Plane(randn(6, seed=0))
        found = transfer({"model": model, "twin": twin}, None, labelled(model), ThreatModel(eps=0.05))
        white = found.cell("model", "model")
        assert 0 < white.correct < white.clean < N
        assert {cell.correct for cell in found.cells} == {white.correct}

    def test_opposite_weights_help_the_target(self) -> None:
        """The points that hurt -w lie further on w's right side: none falls, and none that was wrong counts as won."""
        w = randn(6, seed=0)
        model, other = Plane(w), Plane(-w)
        data = labelled(model)
        found = transfer({"other": other}, {"model": model}, data, ThreatModel(eps=0.2))
        cell = found.cell("other", "model")
        assert cell.correct == cell.clean == int((model(data[0]).argmax(dim=1) == data[1]).sum()) == N - 4
        assert cell.success == 0.0

    def test_naive_loop_on_curved_models(self) -> None:
        """Sample by sample, with nothing but the attack and argmax."""

        def net(seed: int) -> nn.Module:
            torch.manual_seed(seed)
            return nn.Sequential(nn.Flatten(), nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 4)).eval()

        models = {"a": net(0), "b": net(1)}
        for model in models.values():
            for parameter in model.parameters():
                parameter.data *= 4
        x, threat, attack = DATA[0][:6], ThreatModel(eps=0.1), PGD(steps=4, keep="last")
        y = models["a"](x).argmax(dim=1)
        found = transfer(models, None, (x, y), threat, attack, seed=3, batch_size=4)
        for source, one in models.items():
            for target, other in models.items():
                count = 0
                for i in range(6):
                    at, key = torch.tensor([i]), Key(3).fold("transfer")
                    x_adv = attack(one, x[at], y[at], threat, index=at, key=key)
                    count += int(other(x[at]).argmax() == y[i] and other(x_adv).argmax() == y[i])
                assert found.cell(source, target).correct == count
        assert found.cell("a", "a").correct < 6

    def test_stopping_at_the_first_success_transfers_less(self) -> None:
        """The target's boundary lies behind the source's: only a point that goes on crosses both."""
        w = torch.ones(6)
        source, target = Plane(w), Plane(w, b=-0.4)
        x = torch.full((1, 1, 2, 3), 0.51)
        data = (x, torch.tensor([1]))
        start: dict[str, Any] = {"steps": 20, "start": "zero"}
        last = transfer({"s": source}, {"t": target}, data, ThreatModel(eps=0.1), PGD(keep="last", **start))
        best = transfer({"s": source}, {"t": target}, data, ThreatModel(eps=0.1), PGD(keep="best", **start))
        assert (last.cells[0].correct, best.cells[0].correct) == (0, 1)
        assert last.notes == ()
        assert best.notes == (
            "this attack stops at its first success on the source, so its points transfer less than they could",
        )

    def test_the_published_attacks_go_on_to_the_last_step(self) -> None:
        for attack in TRANSFER_ATTACKS.values():
            assert isinstance(attack, PGD)
            assert (attack.keep, attack.steps, attack.step_size) == ("last", 20, None)
        mim = TRANSFER_ATTACKS["MIM-20"]
        assert isinstance(mim, PGD)
        assert (mim.momentum, mim.start) == (1.0, "zero")

    def test_batch_size_and_the_other_models_change_nothing(self) -> None:
        models, threat = planes(), ThreatModel(eps=0.05)
        data, attack = labelled(models["a"]), PGD(steps=2, step_size=0.01, keep="last")  # the noise still shows
        whole = transfer(models, None, data, threat, attack)
        assert transfer(models, None, data, threat, attack, batch_size=7).cells == whole.cells
        alone = transfer({"c": models["c"]}, {"b": models["b"]}, data, threat, attack)
        assert alone.cells == (whole.cell("c", "b"),)
        some = transfer(models, None, first(ArraySource(*data), 10), threat, attack)
        assert some.cells == transfer(models, None, (data[0][:10], data[1][:10]), threat, attack).cells
        assert some.total == 10
        assert transfer(models, None, first(ArraySource(*data), 1000), threat, attack).total == N

    def test_models_are_left_as_they_were(self) -> None:
        class Dropped(Plane):
            def __init__(self) -> None:
                super().__init__(randn(6))
                self.norm, self.drop = nn.BatchNorm1d(2), nn.Dropout()

            def forward(self, x: Tensor) -> Tensor:
                out: Tensor = self.drop(self.norm(super().forward(x)))
                return out

        model = Dropped().train()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        transfer({"m": model}, None, DATA, ThreatModel(eps=0.05), PGD(steps=1, keep="last"))
        assert model.training
        assert model.drop.training
        assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())

    def test_rates_and_intervals(self) -> None:
        cell = Cell(source="a", target="b", correct=30, clean=40, total=50)
        assert (cell.accuracy, cell.interval) == (0.6, interval(30, 50))
        assert (cell.success, cell.success_interval) == (0.25, interval(10, 40))
        never = Cell(source="a", target="b", correct=0, clean=0, total=50)
        assert (never.accuracy, never.success, never.success_interval) == (0.0, None, None)


@dataclasses.dataclass(frozen=True)
class Cheat:
    """An attack that breaks a rule on the samples it could not fool otherwise."""

    how: Callable[[Tensor], Tensor]

    def __call__(self, model: nn.Module, x: Tensor, *rest: Any, **more: Any) -> Tensor:
        return self.how(x)


def in_place(x: Tensor) -> Tensor:
    return x.copy_(1 - x)


class TestBelieveNothing:
    @pytest.mark.parametrize(
        "how",
        [
            lambda x: 1 - x,
            lambda x: x + 5,
            lambda x: x * float("nan"),
            lambda x: torch.where(x > 0, float("inf"), x),
            in_place,
        ],
        ids=["radius", "box", "nan", "infinite", "in place"],
    )
    def test_points_that_break_a_rule_do_not_count(self, how: Callable[[Tensor], Tensor]) -> None:
        models = planes()
        data = labelled(models["a"])
        kept = data[0].clone()
        found = transfer(models, None, data, ThreatModel(eps=0.01), Cheat(how))
        assert torch.equal(data[0], kept)
        assert all(cell.correct == cell.clean for cell in found.cells)
        assert found.notes[0] == f"a: {N} points outside the threat model were not counted"
        assert len(found.notes) == 3
        assert f"{N} points outside" in printed(found)

    def test_points_of_another_shape(self) -> None:
        with pytest.raises(UserError, match=r"a: expected points of shape \(24, 1, 2, 3\), got \(23, 1, 2, 3\)"):
            transfer(planes(), None, DATA, ThreatModel(eps=0.1), Cheat(lambda x: x[1:]))

    def test_logits_that_are_not_finite_at_a_crafted_point(self) -> None:
        class Fragile(Plane):
            def forward(self, x: Tensor) -> Tensor:
                return super().forward(x) / (x.amin() >= 0.25).float()

        sources, targets = {"a": Plane(randn(6))}, {"fragile": Fragile(randn(6))}
        with pytest.raises(UserError, match=r"fragile: the model gives NaN or infinite logits for .* adversarial"):
            transfer(sources, targets, DATA, ThreatModel(eps=0.1))


class TestBadInput:
    def test_no_models(self) -> None:
        with pytest.raises(UserError, match="at least one source, got none"):
            transfer({}, planes(), DATA, ThreatModel(eps=0.1))
        with pytest.raises(UserError, match="at least one target, got none"):
            transfer(planes(), {}, DATA, ThreatModel(eps=0.1))

    def test_two_models_of_one_name(self) -> None:
        with pytest.raises(UserError, match="source and the target called 'a' are two models"):
            transfer({"a": Plane(randn(6))}, {"a": Plane(randn(6))}, DATA, ThreatModel(eps=0.1))

    def test_another_number_of_classes(self) -> None:
        three = nn.Sequential(nn.Flatten(), nn.Linear(6, 3))
        with pytest.raises(UserError, match="same classes; a has 2, and three has 3"):
            transfer({"a": Plane(randn(6))}, {"three": three}, DATA, ThreatModel(eps=0.1))

    def test_another_shape_of_input(self) -> None:
        wide = nn.Sequential(nn.Flatten(), nn.Linear(8, 2))
        with pytest.raises(UserError, match=r"wide: the model cannot take images of shape \(1, 2, 3\)"):
            transfer({"a": Plane(randn(6))}, {"wide": wide}, DATA, ThreatModel(eps=0.1))

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"batch_size": 0}, "batch_size: expected at least 1, got 0"),
            ({"threat": ThreatModel(eps=0)}, "eps: expected a radius above 0"),
            ({"threat": ThreatModel(eps=0.1, high=0.5)}, r"pixels in \[0, 0.5\]"),
            ({"data": (DATA[0], DATA[1] + 1)}, r"label 2 at index \d+, expected 0 .. 1"),
        ],
        ids=["batch size", "eps", "range", "labels"],
    )
    def test_what_cannot_be_scored(self, changes: dict[str, Any], message: str) -> None:
        given: dict[str, Any] = {"data": DATA, "threat": ThreatModel(eps=0.1), **changes}
        with pytest.raises(UserError, match=message):
            transfer(planes(), None, **given)

    def test_an_unknown_cell(self) -> None:
        found = transfer({"a": Plane(randn(6))}, {"b": Plane(randn(6))}, DATA, ThreatModel(eps=0.1))
        with pytest.raises(UserError, match="unknown source 'b'; choices: a"):
            found.cell("b", "b")
        with pytest.raises(UserError, match="unknown target 'a'; choices: b"):
            found.cell("a", "a")


def printed(found: Transfer, width: int = 160) -> str:
    console = Console(width=width, file=io.StringIO())
    console.print(found.table())
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.fixture(scope="module")
def found() -> Transfer:
    models = planes()
    return transfer(
        {"a": models["a"], "[red]": models["b"]},
        {"b": models["c"], "a": models["a"]},
        ArraySource(*labelled(models["a"]), name="toys"),
        ThreatModel(eps=0.05),
        seed=4,
    )


class TestRecord:
    def test_round_trip(self, found: Transfer, tmp_path: Path) -> None:
        found.save(tmp_path / "new" / "folder")
        assert Transfer.load(tmp_path / "new" / "folder") == found
        assert Transfer.from_dict(json.loads(json.dumps(found.to_dict()))) == found
        assert [path.name for path in (tmp_path / "new" / "folder").iterdir()] == ["transfer.json"]

    def test_the_record_can_be_read_without_this_package(self, found: Transfer) -> None:
        record = found.to_dict()
        assert (record["sources"], record["targets"]) == (["a", "[red]"], ["b", "a"])
        assert [(cell["source"], cell["target"]) for cell in record["cells"]] == [
            ("a", "b"),
            ("a", "a"),
            ("[red]", "b"),
            ("[red]", "a"),
        ]
        for cell, one in zip(found.cells, record["cells"]):
            assert one["accuracy"] == cell.correct / N
            assert one["interval"] == list(interval(cell.correct, N))
            assert one["success"] == (cell.clean - cell.correct) / cell.clean
            assert one["success_interval"] == list(interval(cell.clean - cell.correct, cell.clean))
        assert record["attack"]["attack"] == "PGD"
        assert record["attack"]["keep"] == "last"
        assert (record["data"], record["seed"], record["total"], record["eps"]) == ("toys", 4, N, 0.05)
        assert record["versions"]["torch"] == torch.__version__

    @pytest.mark.parametrize(
        ("spoil", "message"),
        [
            (lambda record: record.pop("cells"), "'cells'"),
            (lambda record: record["cells"].pop(), "do not fit"),
            (lambda record: record["cells"][0].update(correct=N + 1), "do not fit"),
            (lambda record: record["clean"].reverse(), "do not fit"),
            (lambda record: record["cells"][0].pop("clean"), "'clean'"),
            (lambda record: record.update(more=1), "more"),
            (lambda record: record["cells"][0].update(correct="3"), "not supported"),
        ],
    )
    def test_damaged_records(self, found: Transfer, tmp_path: Path, spoil: Callable[[Any], Any], message: str) -> None:
        record = found.to_dict()
        spoil(record)
        (tmp_path / "transfer.json").write_text(json.dumps(record))
        with pytest.raises(UserError, match=rf"transfer.json is damaged: .*{message}"):
            Transfer.load(tmp_path)

    def test_files_that_are_not_records(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match=r"no transfer in .*transfer.json is missing"):
            Transfer.load(tmp_path)
        for text in ("{", "[1]", ""):
            (tmp_path / "transfer.json").write_text(text)
            with pytest.raises(UserError, match="is damaged"):
                Transfer.load(tmp_path)

    def test_the_table(self, found: Transfer) -> None:
        text = printed(found)
        for target in found.targets:
            for source in found.sources:
                cell = found.cell(source, target)
                low, high = cell.interval
                assert f"{100 * cell.accuracy:.1f}% [{100 * low:.1f}, {100 * high:.1f}]" in text
                assert cell.success is not None
                assert f"broken {100 * cell.success:.1f}% [" in text
        lines = text.splitlines()
        assert re.search(r"scored on +b +a", lines[1])
        assert [name for line in lines for name in ("(clean)", "[red]") if line.strip().startswith(name)] == [
            "(clean)",
            "[red]",
        ]
        assert len(re.findall(r"\* \d", text)) == 1, "one model is both source and target"
        for words in ("toys, n = 24, linf, eps = 0.05, seed 4", "steps = 20", "keep = last", "Clopper-Pearson"):
            assert words in text

    def test_a_target_that_is_never_right(self) -> None:
        model = Plane(randn(6))
        data = (DATA[0], 1 - model(DATA[0]).argmax(dim=1))
        assert "none to break" in printed(transfer({"m": model}, None, data, ThreatModel(eps=0.1)))


TINY = (
    "training.epochs=1",
    "validation.samples=20",
    "evaluation.samples=10",
    "evaluation.suite=null",
    "evaluation.attacks={FGSM: fgsm}",
    "compute.accelerator=cpu",
    "model={name: mlp, width: 16}",
    "objective=standard",
)
Command = Callable[..., tuple[int, str, str]]


def digits(hidden: int = 16) -> nn.Module:
    torch.manual_seed(hidden)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))


def three_classes() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 3))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A finished run; one of other weights; and one that was for another radius."""
    folder = tmp_path_factory.mktemp("runs")
    one, two, far = (folder / name for name in ("one", "two", "far"))
    source, origin = recipes.read("digits-pgd-at", TINY)
    run.train(source, one, console=Console(quiet=True), origin=origin, show=False)
    shutil.copytree(one, two)
    shutil.copytree(one, far)
    content = save({name: value.roll(1) for name, value in load_file(one / "model.safetensors").items()})
    (two / "model.safetensors").write_bytes(content)
    amend(two, sha256=hashlib.sha256(content).hexdigest())
    amend(far, threat={"norm": "linf", "eps": 0.3, "low": 0.0, "high": 1.0})
    return one, two, far


def amend(folder: Path, **changes: object) -> None:
    path = folder / "model.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Run ``steelman transfer ...`` in an empty folder: exit code, output, errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "140")

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["steelman", "transfer", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        code = ended.value.code
        return (code if isinstance(code, int) else 0 if code is None else 1), out, err

    return call


class TestCommand:
    def test_two_runs(self, command: Command, runs: tuple[Path, ...], tmp_path: Path) -> None:
        one, two, _ = runs
        code, out, err = command(str(one), str(two), "--samples", "30", "--out", "here", "--seed", "2")
        assert (code, err) == (0, "")
        found = Transfer.load(tmp_path / "here")
        assert (found.sources, found.targets) == (("one", "two"), ("one", "two"))
        assert (found.norm, found.eps, found.total, found.seed, found.data) == ("linf", 0.15, 30, 2, "digits test")
        assert (found.attack["steps"], found.attack["keep"]) == (20, "last")
        assert "transfer: here/transfer.json" in out
        assert "broken" in out
        models = {path.name: load_model(path)[0] for path in (one, two)}
        again = transfer(models, None, first(load("digits").test, 30), ThreatModel(eps=0.15), seed=2)
        assert again.cells == found.cells
        assert found.cell("one", "one").correct < found.cell("one", "one").clean

    def test_sources_targets_and_settings(self, command: Command, runs: tuple[Path, ...], tmp_path: Path) -> None:
        one = runs[0]
        words = ("--norm", "l2", "--eps", "1/2", "--attack", "mim:steps=3", "--samples", "10", "--data", "digits")
        code, _, err = command(
            f"first={one}", "--target", f"first={one}", "--target", "mine=tests.test_transfer:digits", *words
        )
        assert (code, err) == (0, "")
        found = Transfer.load(tmp_path / "runs" / "transfers" / "l2-0.5")
        assert (found.sources, found.targets) == (("first",), ("first", "mine"))
        assert (found.norm, found.eps) == ("l2", 0.5)
        assert (found.attack["momentum"], found.attack["steps"], found.attack["keep"]) == (1.0, 3, "last")
        # A second one goes beside it, and one that may stop early says so.
        assert command(str(one), "--attack", "pgd:keep=best", *words[:4], "--samples", "5")[0] == 0
        second = Transfer.load(tmp_path / "runs" / "transfers" / "l2-0.5-2")
        assert second.attack["keep"] == "best"
        assert "first success" in second.notes[0]

    def test_models_by_import_path_alone(self, command: Command, tmp_path: Path) -> None:
        code, _, err = command(
            "tests.test_transfer:digits", "--data", "digits", "--eps", "0.1", "--samples", "5", "--out", "o"
        )
        assert (code, err) == (0, "")
        assert Transfer.load(tmp_path / "o").sources == ("tests.test_transfer:digits",)

    def test_runs_that_differ_need_to_be_told(self, command: Command, runs: tuple[Path, ...]) -> None:
        one, _, far = runs
        code, _, err = command(str(one), str(far))
        assert code == 2
        assert "--eps: the runs' own differ (0.15, 0.3); name one" in err
        assert command(str(one), str(far), "--eps", "0.2", "--samples", "5")[0] == 0

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["nowhere"], "no run at nowhere; expected a run's folder or package.module:factory"),
            (["runs/nowhere"], "no run at runs/nowhere; expected"),
            (["."], "it is not a run"),
            (["=ONE"], "expected a model as NAME=MODEL"),
            (["ONE", "ONE"], "two models have the name 'one'; rename one"),
            (["a=ONE", "--target", "a=TWO"], "a source and a target have the name 'a'; rename one"),
            (["tests.test_transfer:nothing", "--data", "digits", "--eps", "0.1"], "cannot import"),
            (["tests.test_transfer:digits", "--eps", "0.1"], "--data: expected a dataset"),
            (["tests.test_transfer:digits", "--data", "digits"], "--eps: expected a radius"),
            (["ONE", "--norm", "l2"], "--eps: expected a radius for norm l2"),
            (["ONE", "--eps", "wide"], "eps"),
            (["ONE", "--attack", "pdg"], "unknown attack 'pdg' (did you mean 'pgd'?)"),
            (["ONE", "--attack", "pgd:stepz=3"], "stepz"),
            (["ONE", "--samples", "0"], "samples: expected at least 1"),
            (["ONE", "--data", "nothing"], "unknown dataset 'nothing'"),
            (["ONE", "three=tests.test_transfer:three_classes"], "three: label"),
            ([], "Missing argument"),
        ],
    )
    def test_mistakes(self, command: Command, runs: tuple[Path, ...], words: list[str], message: str) -> None:
        given = [word.replace("ONE", str(runs[0])).replace("TWO", str(runs[1])) for word in words]
        code, _, err = command(*given)
        assert code == 2
        assert message in err
        assert "Traceback" not in err
        assert not Path("runs").exists()

    def test_nothing_is_overwritten(self, command: Command, runs: tuple[Path, ...], tmp_path: Path) -> None:
        (tmp_path / "transfer.json").write_text("mine")
        code, _, err = command(str(runs[0]), "--out", ".")
        assert code == 2
        assert "--out: . already holds a transfer" in err
        assert (tmp_path / "transfer.json").read_text() == "mine"

    def test_help(self, command: Command) -> None:
        code, out, err = command("--help")
        assert (code, err) == (0, "")
        flat = " ".join(re.sub(r"[\u2500-\u257f]", " ", out).split())
        assert "steelman transfer [OPTIONS]" in flat
        assert "Example: steelman transfer runs/mine runs/theirs --eps 0.2 --attack mim:steps=20" in flat
        assert len(out.splitlines()) < 60
