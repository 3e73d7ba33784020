"""Accuracy on corrupted images: means, errors, tests between models, evidence, resume, the command and the recipe."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from typer.testing import CliRunner

import steelman
from steelman import UserError, evaluate_corruptions
from steelman.cli import app
from steelman.corruptions import CORRUPTIONS, KINDS, SEVERITIES, STANDARD
from steelman.corruptions.accuracy import CorruptionAccuracy, Mean
from steelman.corruptions.check import verify_corruptions
from steelman.corruptions.measure import measure
from steelman.corruptions.official import open_official
from steelman.corruptions.plan import CorruptionsSpec, Plan
from steelman.corruptions.published import PUBLISHED
from steelman.corruptions.record import ANSWERS, NAME, read_record
from steelman.data.source import ArraySource
from steelman.evaluation.result import interval
from steelman.evidence.bundle import DamagedError, seal_of
from steelman.recipe import parse
from steelman.recipe import read as read_recipe
from steelman.report import corruptions as page

NAMES = ("gaussian-noise", "fog", "contrast")


def a_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, 3)).eval()


def the_data(n: int = 12) -> ArraySource:
    x = (torch.rand(n, 1, 28, 28, generator=torch.Generator().manual_seed(1)) * 255).round() / 255
    with torch.no_grad():
        y = a_model()(x).argmax(dim=1)
    y[:2] = (y[:2] + 1) % 3  # two clean images are wrong
    return ArraySource(x, y, ["a", "b", "c"])


def invented(right: Tensor, clean: Tensor | None = None, model: str = "m") -> CorruptionAccuracy:
    """An accuracy whose answers are given: one row for each of the 75 cells."""
    return CorruptionAccuracy(
        model=model,
        data="d",
        source="generated",
        corruptions=STANDARD,
        severities=SEVERITIES,
        settings={},
        seed=0,
        clean=torch.ones(right.shape[1], dtype=torch.bool) if clean is None else clean,
        right=right,
        images=("0",) * 75,
        digest="0",
        frost="generated",
        versions={},
    )


# The numbers.


def test_means_are_plain_means() -> None:
    right = torch.rand(75, 40, generator=torch.Generator().manual_seed(0)) < 0.7
    found = invented(right)
    assert found.mca.value == pytest.approx(float(right.double().mean()))
    assert found.accuracy("shot-noise", 2) == pytest.approx(float(right[6].double().mean()))
    assert found.correct("jpeg-compression", 5) == int(right[74].sum())
    kinds = found.kinds()
    assert list(kinds) == list(KINDS)
    assert kinds["noise"].value == pytest.approx(float(right[:15].double().mean()))
    assert found.over(("fog",), (1, 3)).value == pytest.approx(float(right[[45, 47]].double().mean()))


def test_the_interval_is_over_samples_not_over_answers() -> None:
    """75 equal answers to each of 40 images are 40 observations. As 3,000 they would have a far smaller interval."""
    once = torch.rand(1, 40, generator=torch.Generator().manual_seed(0)) < 0.5
    found = invented(once.expand(75, -1)).mca
    assert (found.low, found.high) == pytest.approx(interval(int(once.sum()), 40))


@pytest.mark.parametrize(
    ("draw", "mean"),
    [
        (lambda one: torch.rand(60, generator=one), 0.5),
        (lambda one: (torch.rand(100, generator=one) < 0.99).double(), 0.99),
        (lambda one: (torch.rand(100, generator=one) < 0.05).double(), 0.05),
        (lambda one: (torch.rand(10, 200, generator=one) < 0.9).double().mean(dim=0), 0.9),
    ],
)
def test_an_interval_covers_the_mean_in_95_of_100_draws(draw: Callable[[torch.Generator], Tensor], mean: float) -> None:
    generator = torch.Generator().manual_seed(3)
    found = [Mean.of(draw(generator)) for _ in range(600)]
    held = sum(one.low <= mean <= one.high for one in found)
    assert held >= 0.93 * 600
    assert all(0 <= one.low <= one.value <= one.high <= 1 for one in found)


def test_a_mean_without_a_spread_is_not_certain() -> None:
    assert (Mean.of(torch.ones(12)).low, Mean.of(torch.ones(12)).high) == pytest.approx(interval(12, 12))
    assert Mean.of(torch.full((12,), 0.5)).low < 0.3
    few = invented(torch.ones(75, 2, dtype=torch.bool)).against(invented(torch.zeros(75, 2, dtype=torch.bool)))
    assert few.text.startswith("these samples do not settle")


def test_errors_against_a_baseline() -> None:
    """Errors of 0.2 and 0.4 everywhere, and clean errors of 0.1 and 0.2: mCE 50%, relative mCE also 50%."""
    ours, base = torch.ones(75, 10, dtype=torch.bool), torch.ones(75, 10, dtype=torch.bool)
    ours[:, :2], base[:, :4] = False, False
    one = invented(ours, torch.arange(10) >= 1)
    other = invented(base, torch.arange(10) >= 2)
    assert one.mce(other) == pytest.approx(50)
    assert one.mce(other, relative=True) == pytest.approx(50)
    base[5:10] = True  # one corruption without an error of the baseline
    base[5:10, 0] = False
    assert one.mce(other) == pytest.approx((14 * 50 + 200) / 15)
    assert invented(ours).mce(invented(torch.ones(75, 10, dtype=torch.bool))) == math.inf
    # Errors of one more and of one fewer than the clean ones add up to nothing, not to a rounding.
    odd = torch.ones(75, 10, dtype=torch.bool)
    odd[:, :2] = False
    odd[0::5, 2], odd[1::5, 1] = False, True
    assert invented(ours).mce(invented(odd, torch.arange(10) >= 2), relative=True) == math.inf


def test_two_models_are_compared_on_the_same_images() -> None:
    generator = torch.Generator().manual_seed(0)
    base = torch.rand(75, 300, generator=generator) < 0.5
    better = base.clone()
    better[3] |= torch.rand(300, generator=generator) < 0.5
    found = invented(better, model="one").against(invented(base, model="other"))
    assert found.better == (("gaussian-noise", 4),)
    assert found.worse == ()
    assert found.mean.low > 0
    assert found.text.startswith("one is more accurate on corrupted images than other: one minus other is +0.")
    assert invented(base).against(invented(base)).text.startswith("these samples do not settle whether")
    chance = torch.rand(75, 300, generator=generator) < 0.5
    assert not invented(chance).against(invented(base)).better  # Holm's correction over 75 tests


@pytest.mark.parametrize(
    ("field", "value"),
    [("source", "CIFAR-10-C"), ("images", ("1",) * 75), ("severities", (1, 2, 3, 4)), ("digest", "1")],
)
def test_other_images_are_not_compared(field: str, value: object) -> None:
    one = invented(torch.ones(75, 4, dtype=torch.bool))
    with pytest.raises(UserError, match="expected accuracies on the same images"):
        one.against(dataclasses.replace(one, **{field: value}))  # type: ignore[arg-type]


def test_a_part_has_a_mean_and_no_mca() -> None:
    found = evaluate_corruptions(a_model(), the_data(), corruptions=NAMES, severities=[2])
    assert not found.standard
    assert str(found).startswith("mean over 3 corruptions and 1 severities")
    with pytest.raises(UserError, match="expected the 15 corruptions and 5 severities of the benchmark, got 3"):
        _ = found.mca


# The measurement.


def test_the_answers_are_those_of_the_model() -> None:
    """The same as corrupting by hand and asking. Noise belongs to the sample, so batches change nothing."""
    data, model = the_data(), a_model()
    found = evaluate_corruptions(model, data, corruptions=NAMES, severities=[1, 5], seed=3, batch_size=5)
    x = data.images(torch.arange(12))
    key = steelman.Key(3).fold("corruptions")
    for name in NAMES:
        for severity in (1, 5):
            corrupted = CORRUPTIONS[name](severity=severity, exact=True)(x, index=torch.arange(12), key=key)
            with torch.no_grad():
                right = model(corrupted).argmax(dim=1) == data.labels
            assert torch.equal(found.row(name, severity), right)
    assert int(found.clean.sum()) == 10
    other = evaluate_corruptions(model, data, corruptions=NAMES, severities=[1, 5], seed=4)
    assert [one == two for one, two in zip(found.images, other.images, strict=True)] == [False] * 4 + [True] * 2


def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    whole = evaluate_corruptions(a_model(), the_data(), corruptions=NAMES, out=tmp_path / "a")
    monkeypatch.setattr("steelman.corruptions.measure.BLOCK", 28 * 28 * 5)
    parts = evaluate_corruptions(a_model(), the_data(), corruptions=NAMES, out=tmp_path / "b")
    assert torch.equal(whole.right, parts.right)


def test_the_same_call_gives_the_same_bytes_and_another_call_is_refused(tmp_path: Path) -> None:
    data = the_data()
    for name in "ab":
        evaluate_corruptions(a_model(), data, corruptions=NAMES, out=tmp_path / name)
    assert _bytes(tmp_path / "a") == _bytes(tmp_path / "b")
    again = evaluate_corruptions(a_model(), data, corruptions=NAMES, out=tmp_path / "a")
    assert torch.equal(again.right, read_record(tmp_path / "b").accuracy.right)
    with pytest.raises(UserError, match=r"holds another measurement \(seed was 0, is 1"):
        evaluate_corruptions(a_model(), data, corruptions=NAMES, seed=1, out=tmp_path / "a")


def test_answers_to_other_data_are_not_taken(tmp_path: Path) -> None:
    data = the_data()
    x, y = data.images(torch.arange(12)), data.labels
    evaluate_corruptions(a_model(), (x, y), corruptions=NAMES, out=tmp_path / "a")
    for other in ((1 - x, y), (x, (y + 1) % 3)):
        with pytest.raises(UserError, match="holds another measurement"):
            evaluate_corruptions(a_model(), other, corruptions=NAMES, out=tmp_path / "a")


def test_a_kill_after_the_evidence_was_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("steelman.evidence.ledger.Work.close", killed)
        with pytest.raises(KeyboardInterrupt):
            evaluate_corruptions(a_model(), the_data(), corruptions=NAMES, out=tmp_path / "a")
    assert (tmp_path / "a" / "work").exists()
    evaluate_corruptions(a_model(), the_data(), corruptions=NAMES, out=tmp_path / "a")
    assert {path.name for path in (tmp_path / "a").iterdir()} == {NAME, ANSWERS}


def test_an_interrupted_measurement_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluate_corruptions(a_model(), the_data(), corruptions=NAMES, out=tmp_path / "whole")
    asked = 0

    class Stops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = a_model()

        def forward(self, x: Tensor) -> Tensor:
            nonlocal asked
            asked += len(x) == 12
            if asked == 9:
                raise KeyboardInterrupt
            logits: Tensor = self.net(x)
            return logits

    with pytest.raises(KeyboardInterrupt):
        evaluate_corruptions(Stops(), the_data(), corruptions=NAMES, out=tmp_path / "cut")
    kept = sorted((tmp_path / "cut" / "work").glob("*.batch"))
    assert len(kept) >= 5
    asked = 100
    evaluate_corruptions(Stops(), the_data(), corruptions=NAMES, out=tmp_path / "cut")
    assert asked < 100 + 16  # the finished cells were read
    assert not (tmp_path / "cut" / "work").exists()
    changed = json.loads((tmp_path / "whole" / NAME).read_text())
    found = json.loads((tmp_path / "cut" / NAME).read_text())
    for record in (changed, found):
        del record["weights"], record["seal"]  # the wrapped network has other names
    assert changed == found


def test_a_killed_command_goes_on_and_leaves_the_same_bytes(tmp_path: Path) -> None:
    script = tmp_path / "go.py"
    script.write_text(
        "import sys, torch\nsys.path.insert(0, sys.argv[2])\n"
        "from tests.test_corruptions_measure import a_model, the_data\n"
        "from steelman import evaluate_corruptions\n"
        "print('ready', flush=True)\nevaluate_corruptions(a_model(), the_data(40), out=sys.argv[1])\n"
    )
    home = str(Path(__file__).parent.parent)
    whole = tmp_path / "whole"
    subprocess.run([sys.executable, script, whole, home], check=True, capture_output=True)
    cut = tmp_path / "cut"
    process = subprocess.Popen([sys.executable, script, cut, home], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    while len(list(cut.glob("work/*.batch"))) < 20:
        assert process.poll() is None
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not (cut / NAME).exists()
    subprocess.run([sys.executable, script, cut, home], check=True, capture_output=True)
    assert _bytes(whole) == _bytes(cut)


def _bytes(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# Evidence.


@pytest.fixture(scope="module")
def evidence(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evidence") / "e"
    found = evaluate_corruptions(a_model(), the_data(), corruptions=NAMES, out=folder)
    page.write(folder / "report.html", [found])
    return folder


def test_honest_evidence_is_accepted(evidence: Path) -> None:
    alone = verify_corruptions(evidence)
    assert "The model was not asked" in alone.text
    found = verify_corruptions(evidence, model=a_model(), source=the_data(), seal=alone.seal)
    assert (found.cells, found.samples, found.others, found.skipped) == (15, 12, (), ())


def _cell(record: dict[str, Any], _: dict[str, Tensor]) -> None:
    record["cells"]["fog"][4] += 1


def _answer(_: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    tensors["guess"][7, 3] = (tensors["guess"][7, 3] + 1) % 3


def _right(record: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """All answers of the worst cell declared right, and all counts made to fit."""
    tensors["guess"][4] = tensors["label"]
    record["cells"]["gaussian-noise"][4] = 12


def _images(record: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """The same, and the checksum of its images is another one: they are said to come out otherwise elsewhere."""
    tensors["guess"][4] = tensors["label"]
    record["cells"]["gaussian-noise"][4] = 12
    record["images"]["gaussian-noise"][4] = "0" * 64


def _constants(record: dict[str, Any], _: dict[str, Tensor]) -> None:
    record["settings"]["constants"]["fog"][0][0] = 0.01


def _labels(record: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    tensors["clean_label"][0] = tensors["clean"][0]
    record["clean_correct"] += 1


def _seed(record: dict[str, Any], _: dict[str, Tensor]) -> None:
    record["seed"] = 5


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (_cell, "do not follow from the answers"),
        (_answer, "do not follow from the answers|answers are not those of the model"),
        (_right, "gaussian-noise 5: .* answers are not those of the model, the first for sample"),
        (_images, "gaussian-noise 5: the claimed accuracy is 100.0%, and here it is"),
        (_constants, "the constants of the corruptions are not those of their severities"),
        (_labels, "expected the labels of the clean images for images that are made from them"),
        (_seed, "the claimed accuracy|answers are not those|come out otherwise"),
    ],
)
def test_a_changed_claim_is_refused(
    edit: Callable[[dict[str, Any], dict[str, Tensor]], None], expected: str, evidence: Path, tmp_path: Path
) -> None:
    record = json.loads((evidence / NAME).read_text())
    tensors = {name: value.clone() for name, value in load_file(evidence / ANSWERS).items()}
    edit(record, tensors)
    save_file(tensors, tmp_path / ANSWERS)
    (tmp_path / NAME).write_text(json.dumps(record, indent=1))
    with pytest.raises(DamagedError, match=r"its seal does not fit|was changed"):  # not resealed
        verify_corruptions(tmp_path)
    record["files"][ANSWERS] = hashlib.sha256((tmp_path / ANSWERS).read_bytes()).hexdigest()
    record["seal"] = seal_of(record)
    (tmp_path / NAME).write_text(json.dumps(record, indent=1))
    with pytest.raises(DamagedError, match=expected):
        verify_corruptions(tmp_path, model=a_model(), source=the_data())


def test_a_model_whose_classes_nearly_tie_does_not_pass_any_answer(tmp_path: Path) -> None:
    class Ties(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = a_model()

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat((1e-4 * self.net(x) + 1, torch.full((len(x), 1), -5.0)), dim=1)

    source = ArraySource(the_data().images(torch.arange(12)), the_data().labels, ["a", "b", "c", "d"])
    model = Ties().eval()
    evaluate_corruptions(model, source, corruptions=["contrast"], out=tmp_path / "e")
    record = json.loads((tmp_path / "e" / NAME).read_text())
    tensors = {name: value.clone() for name, value in load_file(tmp_path / "e" / ANSWERS).items()}
    tensors["guess"][:] = tensors["label"]
    record["cells"]["contrast"] = [12] * 5
    save_file(tensors, tmp_path / "e" / ANSWERS)
    record["files"][ANSWERS] = hashlib.sha256((tmp_path / "e" / ANSWERS).read_bytes()).hexdigest()
    record["seal"] = seal_of(record)
    (tmp_path / "e" / NAME).write_text(json.dumps(record, indent=1))
    with pytest.raises(DamagedError, match="answers are not those of the model"):
        verify_corruptions(tmp_path / "e", model=model, source=source)


def test_other_weights_data_page_and_seal_are_refused(evidence: Path, tmp_path: Path) -> None:
    with pytest.raises(DamagedError, match="the model's weights are not those that were measured"):
        verify_corruptions(evidence, model=a_model(1), source=the_data())
    with pytest.raises(DamagedError, match="expected 12 images, got 11"):
        verify_corruptions(evidence, model=a_model(), source=the_data(11))
    with pytest.raises(DamagedError, match="the evidence has the seal"):
        verify_corruptions(evidence, seal="0" * 64)
    for name in (NAME, ANSWERS):
        (tmp_path / name).write_bytes((evidence / name).read_bytes())
    (tmp_path / "report.html").write_text((evidence / "report.html").read_text().replace("fog", "frog"))
    with pytest.raises(DamagedError, match=r"report\.html does not show what corruptions\.json holds"):
        verify_corruptions(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("total", -1),
        ("total", 13),
        ("corruptions", ["fog", "fog", "contrast"]),
        ("corruptions", ["x", "fog", "contrast"]),
        ("severities", [1, 2, 3, 4, 9]),
        ("severities", [1, 2, 3, 4]),
        ("cells", {}),
        ("images", {"fog": []}),
        ("model", "\x1b[2J"),
        ("files", {"../x": "0" * 64}),
        ("settings", {}),
        ("classes", []),
        ("more", 1),
        ("seed", "x"),
        ("total", 6),
        ("total", 1),
        ("source", "My-Great-Set"),
        ("source", "CIFAR-10-C"),
        ("versions", {"steelman": "\x1b[2J"}),
        ("versions", {"a\nb": "1"}),
        ("settings", {"family": "zz", "exact": True, "constants": {}}),
    ],
)
def test_damaged_evidence_is_one_sentence(key: str, value: object, evidence: Path, tmp_path: Path) -> None:
    record = json.loads((evidence / NAME).read_text())
    record[key] = value
    record["seal"] = seal_of(record)
    (tmp_path / ANSWERS).write_bytes((evidence / ANSWERS).read_bytes())
    (tmp_path / NAME).write_text(json.dumps(record, indent=1))
    with pytest.raises(UserError) as caught:
        read_record(tmp_path)
    assert len(str(caught.value).splitlines()) == 1


# The page, the command, the recipe.


def test_the_page_shows_every_cell_and_loads_nothing(evidence: Path) -> None:
    text = (evidence / "report.html").read_text()
    found = read_record(evidence).accuracy
    assert text.count('class="s') >= 15
    assert f"{100 * found.accuracy('fog', 5):.1f}" in text
    assert "<script" not in text
    assert "http" not in text.replace("http-equiv", "")
    assert "none of a published benchmark" in text
    shade = [page.shade(error) for error in (0.0, 0.1, 0.2, 0.4, 0.5, 0.7, 0.9)]
    assert shade == [0, 1, 2, 3, 4, 5, 6]


def test_a_page_of_several_models_compares_them() -> None:
    data = the_data()
    found = measure({"one": a_model(), "two": a_model(1)}, data, Plan(corruptions=NAMES))
    text = page.render(list(found.values()), baseline=found["two"], beside=[(0, page.beside_official(found["two"]))])
    for part in ("one minus two is", "relative error ratio", "Errors against two", "one beside generated"):
        assert part in text


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained run on images of 28 pixels, which measures corruptions."""
    place = tmp_path_factory.mktemp("run")
    root = place / "data"
    root.mkdir()
    import numpy as np

    x = (the_data(60).images(torch.arange(60)) * 255).round().to(torch.uint8).numpy()[:, 0]
    labels = (x.mean(axis=(1, 2)) > 127.5).astype(np.int64)
    for part in ("train", "test"):
        np.save(root / f"{part}_images.npy", x)
        np.save(root / f"{part}_labels.npy", labels)
    recipe = place / "recipe.yaml"
    recipe.write_text(
        f"name: small\ndata: {{name: arrays, root: {root}}}\nmodel: linear\nthreat: {{norm: linf, eps: 0.1}}\n"
        "objective: standard\ntraining: {epochs: 1, batch_size: 16, lr: 0.01}\nvalidation: {size: 10}\n"
        "evaluation: {samples: 20, corruptions: {corruptions: [fog, contrast], samples: 10}}\n"
        "published: [{paper: Pang et al. (2020), table: Table 5, row: TRADES+HE, numbers: {mCA: 75.78}}]\n"
    )
    done = CliRunner().invoke(app, ["train", str(recipe), "--out", str(place / "run")])
    assert done.exit_code == 0, done.output
    assert "mean over 2 corruptions and 5 severities" in done.output
    return place / "run"


def test_a_recipe_asks_for_corruptions(run: Path) -> None:
    found = steelman.load(run).corrupted
    assert found is not None
    assert (found.total, found.corruptions) == (10, ("fog", "contrast"))
    assert (run / "corruptions" / "report.html").is_file()
    beside = (run / "corruptions" / "comparison.html").read_text()
    assert "The paper prints a mean of 75.78%" in beside
    assert "Table 5 leaves out Snow: the cells give 79.23" in beside
    (fog,) = re.findall(r'<tr><th scope="row">fog</th>(.*?)</tr>', beside)[1:2]
    for value in PUBLISHED["TRADES+HE"].cells["fog"]:
        assert f'<span class="count">{value:.1f}</span>' in fog

    done = CliRunner().invoke(app, ["verify", str(run / "corruptions"), "--model", str(run)])
    assert done.exit_code == 0, done.output
    assert "answered the images of 10 cells again" in done.output


def test_the_recipes_of_table_5_ask_for_corruptions() -> None:
    for name, row in (("he-cifar10-pgd-at", "PGD-AT"), ("he-cifar10-trades-he", "TRADES+HE")):
        recipe = parse(*read_recipe(name))
        assert recipe.evaluation.corruptions is not None
        assert row in [one.row for one in recipe.published or () if "mCA" in one.numbers]


def test_the_command_measures_and_goes_on(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["corruptions", f"one={run}", "--samples", "6", "--corruption", "fog", "--corruption", "snow"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    (folder,) = (tmp_path / "runs" / "corruptions").iterdir()
    assert {path.name for path in folder.iterdir()} == {NAME, ANSWERS, "report.html"}
    assert CliRunner().invoke(app, command).exit_code == 0  # again: the finished evidence is read
    assert len(list((tmp_path / "runs" / "corruptions").iterdir())) == 1
    more = [*command, f"two={run}", "--baseline", "one", "--out", "both", "--published", "PGD-AT+HE"]
    done = CliRunner().invoke(app, more)
    assert done.exit_code == 0, done.output
    assert "relative error ratio" in done.output
    assert "mCE" not in done.output
    assert (tmp_path / "both" / "two" / NAME).is_file()
    assert "another model on other images" in (tmp_path / "both" / "report.html").read_text()


def test_a_published_set_stands_beside_the_generated_images(tmp_path: Path) -> None:
    """A set in the layout of CIFAR-10-C, whose fog has all pixels black."""
    import numpy as np

    x = (torch.rand(8, 3, 32, 32, generator=torch.Generator().manual_seed(0)) * 255).round() / 255
    source = ArraySource(x, torch.arange(8), [str(one) for one in range(10)])
    black = np.zeros((40, 32, 32, 3), np.uint8)
    np.save(tmp_path / "fog.npy", black)
    np.save(tmp_path / "labels.npy", np.tile(np.arange(8), 5).astype(np.uint8))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 10)).eval()
    stored = open_official(tmp_path, source)
    plan = Plan(corruptions=("fog",))
    found = measure({"m": model}, source, plan, official=stored, places={"m": tmp_path / "out"})["m"]
    assert found.source == "CIFAR-10-C"
    with torch.no_grad():
        guess = model(torch.zeros(1, 3, 32, 32)).argmax()
    assert torch.equal(found.row("fog", 3), torch.arange(8) == guess)
    checked = verify_corruptions(tmp_path / "out", model=model, source=source, official=stored)
    assert not checked.skipped
    alone = verify_corruptions(tmp_path / "out", model=model, source=source)
    assert len(alone.skipped) == 5


def test_the_command_prints_generated_against_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy as np

    x = (torch.rand(8, 3, 32, 32, generator=torch.Generator().manual_seed(0)) * 255).round()
    pixels, labels = x.byte().numpy(), np.arange(8) % 10
    for part in ("train", "test"):
        np.save(tmp_path / f"{part}_images.npy", pixels)
        np.save(tmp_path / f"{part}_labels.npy", np.concatenate((labels[:-1], [9])))
    np.save(tmp_path / "contrast.npy", np.tile(pixels.transpose(0, 2, 3, 1), (5, 1, 1, 1)))
    np.save(tmp_path / "labels.npy", np.tile(np.concatenate((labels[:-1], [9])), 5).astype(np.uint8))
    (tmp_path / "net_of_tests.py").write_text(
        "import torch\n\ndef make():\n    torch.manual_seed(0)\n"
        "    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3072, 10)).eval()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    words = ["corruptions", "m=net_of_tests:make", "--data", "arrays", "--root", str(tmp_path), "--corruption"]
    done = CliRunner().invoke(app, [*words, "contrast", "--official", str(tmp_path), "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert "generated images, CIFAR-10-C, and the difference in points" in done.output
    assert (tmp_path / "out" / "official" / NAME).is_file()
    assert "m beside CIFAR-10-C" in (tmp_path / "out" / "comparison.html").read_text()


# Bad input.


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"corruptions": ["frog"]}, r"unknown corruption 'frog' \(did you mean 'fog'\?\)"),
        ({"corruptions": "fog"}, r"expected a list of names, such as \[fog, snow\], got 'fog'"),
        ({"corruptions": []}, "expected at least one, got none"),
        ({"severities": [0]}, "expected numbers from 1 to 5, got 0"),
        ({"severities": [True]}, "expected numbers from 1 to 5, got True"),
        ({"severities": 3}, r"expected a list such as \[1, 3, 5\], got 3"),
        ({"family": "mnist"}, "family"),
        ({"frost": "nowhere"}, "expected frost1.png to frost5.jpg in nowhere"),
        ({"seed": 0.5}, "seed"),
        ({"batch_size": 0}, "batch_size"),
        ({"name": 3}, "name"),
        ({"name": "a\nb"}, "expected a name of at most .* printable characters"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        evaluate_corruptions(a_model(), the_data(), **options)


def test_wrong_data_and_models() -> None:
    small = ArraySource(torch.rand(3, 1, 8, 8), torch.zeros(3, dtype=torch.int64), ["a", "b"])
    with pytest.raises(UserError, match="data: expected images of at least 28 x 28 pixels, got 8 x 8"):
        evaluate_corruptions(nn.Sequential(nn.Flatten(), nn.Linear(64, 2)), small)
    with pytest.raises(UserError, match="data: expected"):
        evaluate_corruptions(a_model(), "mnist")  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"expected a torch\.nn\.Module"):
        evaluate_corruptions(3, the_data())  # type: ignore[arg-type]
    with pytest.raises(UserError, match="the model is random"):
        evaluate_corruptions(nn.Sequential(Noise(), a_model()), the_data())


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_no_mode_of_torch_changes_a_corruption(name: str) -> None:
    x = torch.rand(3, 3, 32, 32)
    corrupt = CORRUPTIONS[name](severity=4)
    plain = corrupt(x)
    with torch.inference_mode():
        assert torch.equal(corrupt(x.clone()), plain)
    asked = corrupt(x.clone().requires_grad_())
    assert torch.equal(asked, plain)
    assert not asked.requires_grad


def test_wrong_keys_and_indices() -> None:
    corrupt, x = CORRUPTIONS["fog"](), torch.rand(2, 1, 28, 28)
    wrong: list[dict[str, Any]] = [
        {"key": 3},
        {"index": [0, 1]},
        {"index": torch.ones(2) > 0},
        {"index": torch.ones(3)},
    ]
    for options in wrong:
        with pytest.raises(UserError, match=f"{next(iter(options))}: expected"):
            corrupt(x, **options)
    with pytest.raises(UserError, match="severity"):
        CORRUPTIONS["fog"](severity=True)


def test_models_whose_folders_would_be_the_same(run: Path, tmp_path: Path) -> None:
    words = ["corruptions", f"a/b={run}", f"a-b={run}", "--samples", "4", "--out", str(tmp_path / "o")]
    done = CliRunner().invoke(app, words)
    assert isinstance(done.exception, UserError)
    assert "would have the same folder, a-b; rename one" in str(done.exception)


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand_like(x)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"severities": [9]}, "evaluation.corruptions.severities: expected numbers from 1 to 5, got 9"),
        ({"what": 1}, "unknown key 'what'"),
        (3, "evaluation.corruptions: expected true, false or a block of settings, got 3"),
    ],
)
def test_a_wrong_block_in_a_recipe(value: object, expected: str) -> None:
    recipe = {
        "name": "x",
        "model": "linear",
        "threat": {"norm": "linf", "eps": 0.1},
        "objective": "standard",
        "evaluation": {"corruptions": value},
    }
    with pytest.raises(UserError, match=expected):
        parse(recipe)
    recipe["evaluation"] = {"corruptions": True}
    assert parse(recipe).evaluation.corruptions == CorruptionsSpec()
