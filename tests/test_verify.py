"""Evidence is believed only as far as it can be checked: every edit is noticed, and sealing it anew does not help."""

from __future__ import annotations

import copy
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from steelman.attacks import ATTACKS, PGD
from steelman.data.source import ArraySource
from steelman.errors import UserError
from steelman.evaluation.stages import Stage, Suite
from steelman.evidence.bundle import GALLERY, SIGNS_FILE, DamagedError, read_bundle
from steelman.evidence.images import Asked
from steelman.evidence.ledger import COLUMNS, ROBUST, WRONG
from steelman.evidence.verify import verify
from steelman.threat import ThreatModel
from tests.evidence_helpers import EPS, FIRST, SUITE, Forged, N, Net, a_model, check, evaluate, the_data

# What is true is accepted.


def test_a_true_bundle_is_accepted_with_and_without_model_and_data(bundle: Path) -> None:
    forged = Forged(bundle)
    kinds = set(forged.samples["broken_by"].tolist())
    assert {WRONG, ROBUST} < kinds
    assert len(forged.shards) >= 2, "several files, or swapping them means nothing"
    alone, data, whole = verify(bundle), verify(bundle, source=the_data()), check(bundle)
    assert alone.robust == data.robust == whole.robust == int((forged.samples["broken_by"] == ROBUST).sum())
    assert whole.broken == int((forged.samples["broken_by"] >= 0).sum()) >= 6
    assert (alone.model, alone.rounded, whole.model, whole.data) == (False, None, True, True)
    assert whole.rounded is not None
    assert 0 <= whole.rounded <= whole.broken
    assert whole.seal == forged.record["seal"]


def test_what_is_not_evidence_may_lie_beside_it(bundle: Path) -> None:
    (bundle / "read me").write_text("no evidence")
    assert check(bundle).unknown == ("read me",)


def test_a_bundle_of_a_protocol_and_of_a_float64_model(tmp_path: Path) -> None:
    attacks = {"one": PGD(steps=1, start="zero"), "two": PGD(steps=3, loss="margin")}
    model = a_model(torch.float64).train()
    source = the_data()
    evaluate(model, source, None, ThreatModel(eps=EPS), attacks, out=tmp_path / "p", curve=False)
    rows, images = next(iter(read_bundle(tmp_path / "p").images()))
    assert images.dtype == torch.float64
    assert len(rows) > 3
    assert check(tmp_path / "p", model).broken >= 6
    assert model.training, "the model is left as it was"
    with pytest.raises(DamagedError, match="weights"):
        check(tmp_path / "p", a_model())


def test_images_go_where_the_weights_are() -> None:
    asked = Asked
    assert asked(nn.Linear(2, 2, device="meta"), None, 2).device.type == "meta"
    assert asked(nn.Linear(2, 2), None, 2).device.type == "cpu"
    assert asked(nn.Identity(), torch.device("meta"), 2).device.type == "meta"


def test_a_model_without_data_is_refused(bundle: Path) -> None:
    with pytest.raises(UserError, match="expected the data with the model"):
        verify(bundle, model=a_model())


# One change, by hand.


def resave(folder: Path, name: str, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = {key: value.clone() for key, value in load_file(folder / name).items()}
    change(tensors)
    save_file(tensors, folder / name)


def edit(folder: Path, change: Callable[[dict[str, Any]], Any], name: str = "evidence.json") -> None:
    record = json.loads((folder / name).read_text())
    change(record)
    (folder / name).write_text(json.dumps(record, indent=1, sort_keys=True))


def nudge(tensor: Tensor) -> None:
    if tensor.dtype == torch.bool:
        tensor.view(-1)[0] ^= True
    else:
        tensor.view(-1)[0] += 1 / 255 if tensor.is_floating_point() else 1


def swap(folder: Path) -> None:
    one, two = folder / FIRST, folder / "adversarial-0001.safetensors"
    held = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(held)


def nudged(column: str) -> Callable[[Path], Any]:
    return lambda f: resave(f, "samples.safetensors", lambda t: nudge(t[column]))


def shown(name: str) -> Callable[[Path], Any]:
    return lambda f: resave(f, GALLERY, lambda t: nudge(t[name]))


CHANGES: dict[str, Callable[[Path], Any]] = {
    "pixel": lambda f: resave(f, FIRST, lambda t: nudge(t["images"])),
    "row": lambda f: resave(f, FIRST, lambda t: nudge(t["rows"])),
    **{column: nudged(column) for column in COLUMNS},
    "verdict": lambda f: edit(f, lambda r: r["verdict"].update(complete=False)),
    "curve": lambda f: edit(f, lambda r: r.update(curve=[{"eps": 9, "correct": N, "total": N}])),
    "notes": lambda f: edit(f, lambda r: r.update(notes=["approved"])),
    "trust": lambda f: edit(f, lambda r: r["verdict"].update(trust="invalid")),
    "robust count": lambda f: edit(f, lambda r: r.update(robust_correct=r["robust_correct"] + 1)),
    "eps": lambda f: edit(f, lambda r: r["threat"].update(eps=0.06)),
    "seed": lambda f: edit(f, lambda r: r.update(seed=1)),
    "stage count": lambda f: edit(f, lambda r: r["stages"][0].update(broken=r["stages"][0]["broken"] + 1)),
    "stage setting": lambda f: edit(f, lambda r: r["suite"]["stages"][0]["attack"].update(steps=9)),
    "name": lambda f: edit(f, lambda r: r.update(model="better")),
    "seal": lambda f: edit(f, lambda r: r.update(seal="0" * 64)),
    "key removed": lambda f: edit(f, lambda r: r.pop("seed")),
    "key added": lambda f: edit(f, lambda r: r.update(approved=True)),
    "space": lambda f: (f / "evidence.json").write_text((f / "evidence.json").read_text() + "\n"),
    "images removed": lambda f: (f / FIRST).unlink(),
    "samples removed": lambda f: (f / "samples.safetensors").unlink(),
    "evidence removed": lambda f: (f / "evidence.json").unlink(),
    "images added": lambda f: shutil.copy(f / FIRST, f / "adversarial-0099.safetensors"),
    "files swapped": swap,
    **{f"gallery: {name}": shown(name) for name in ("rows", "tried", "clean", "adversarial")},
    "gallery removed": lambda f: (f / GALLERY).unlink(),
    "signs": lambda f: resave(f, SIGNS_FILE, lambda t: nudge(t["zero gradients"])),
    "signs removed": lambda f: (f / SIGNS_FILE).unlink(),
}


@pytest.mark.parametrize("name", CHANGES)
def test_one_change_is_noticed_without_the_model(bundle: Path, name: str) -> None:
    CHANGES[name](bundle)
    with pytest.raises(UserError, match=r"\.(json|safetensors)|is damaged"):
        verify(bundle)


@pytest.mark.parametrize("name", ["conv.weight", "conv.bias", "out.weight", "out.bias"])
def test_one_weight_of_the_model(bundle: Path, name: str) -> None:
    model = a_model()
    with torch.no_grad():
        value = model.get_parameter(name).view(-1)
        value[0] = torch.nextafter(value[0], torch.tensor(9.0))
    with pytest.raises(DamagedError, match="weights are not those that were evaluated"):
        check(bundle, model)


def test_the_same_weights_in_another_model(bundle: Path) -> None:
    class Turned(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).roll(1, dims=1)

    other = Turned().eval()
    other.load_state_dict(a_model().state_dict())
    with pytest.raises(DamagedError, match="does not say what is claimed of the clean images"):
        check(bundle, other)


def test_other_data(bundle: Path) -> None:
    source = the_data()
    x, y = source.images(torch.arange(N)), source.labels
    moved, relabelled = x.clone(), y.clone()
    moved[7, 0, 1, 1] = (moved[7, 0, 1, 1] + 0.5) % 1
    relabelled[9] = (relabelled[9] + 1) % 3
    for images, labels, row in ((moved, y, 7), (x, relabelled, 9)):
        with pytest.raises(DamagedError, match=f"samples {row} differ"):
            check(bundle, source=ArraySource(images, labels, ["a", "b", "c"]))
    with pytest.raises(DamagedError, match=f"expected at least {N} images, got 5"):
        check(bundle, source=ArraySource(x[:5], y[:5], ["a", "b", "c"]))
    longer = ArraySource(torch.cat((x, x)), torch.cat((y, y)), ["a", "b", "c"])
    assert check(bundle, source=longer).samples == N


# A forger who makes every hash and every count fit again.


def broken_image(f: Forged, image: Tensor) -> int:
    """Put `image` in the place of the first adversarial image; its row."""
    f.shards[FIRST]["images"][0] = image
    return int(f.shards[FIRST]["rows"][0])


def clean(f: Forged, row: int) -> Tensor:
    return the_data().images(torch.tensor([row]))[0]


def robust_as_broken(f: Forged) -> None:
    row = f.row(ROBUST)
    f.samples["broken_by"][row], f.samples["guess"][row] = 0, (f.samples["label"][row] + 1) % 3
    f.samples["margin"][row] = f.samples["lead"][row] = -1.0
    f.samples["passes"][row] = 1
    f.add(row, (clean(f, row) + EPS / 2).clamp(0, 1))
    f.recount()


def wrong_as_robust(f: Forged) -> None:
    row = f.row(WRONG)
    f.samples["broken_by"][row] = ROBUST
    f.samples["clean"][row] = f.samples["guess"][row] = f.samples["label"][row]
    f.samples["margin"][row] = f.samples["lead"][row] = 1.0
    f.recount()


def wrong_as_robust_at_a_tie(f: Forged) -> None:
    wrong_as_robust(f)
    row = int((f.samples["lead"] == 1).nonzero()[0])
    f.samples["margin"][row] = f.samples["lead"][row] = 0.0


def robust_as_wrong(f: Forged) -> None:
    row = f.row(ROBUST)
    f.samples["broken_by"][row] = WRONG
    f.samples["clean"][row] = f.samples["guess"][row] = (f.samples["label"][row] + 1) % 3
    f.idle(row)
    f.recount()


def other_label(f: Forged) -> None:
    row = f.row(ROBUST)
    f.samples["label"][row] = f.samples["clean"][row] = f.samples["guess"][row] = (f.samples["label"][row] + 1) % 3
    f.recount()


def other_guess(f: Forged) -> None:
    row = int(f.shards[FIRST]["rows"][0])
    f.samples["guess"][row] = 3 - f.samples["label"][row] - f.samples["guess"][row]
    f.recount()


def first(f: Forged, column: str, value: float, kind: int | None = None) -> None:
    row = int(f.shards[FIRST]["rows"][0]) if kind is None else f.row(kind)
    f.samples[column][row] = value


def rejected(bundle: Path, forge: Callable[[Forged], Any], expected: str, by: Callable[[Path], Any]) -> None:
    """Forged like this, with every hash made to fit, the bundle is rejected for this reason."""
    forged = Forged(bundle)
    forge(forged)
    forged.write()
    with pytest.raises(DamagedError, match=expected):
        by(bundle)


FORGERIES: dict[str, tuple[Callable[[Forged], Any], str]] = {
    "a robust sample broken": (robust_as_broken, "does not say what is claimed of the adversarial images"),
    "a wrong sample robust": (wrong_as_robust, "does not say what is claimed of the clean images"),
    "the same, and a tie": (wrong_as_robust_at_a_tie, "does not say what is claimed of the clean images"),
    "a robust sample wrong": (robust_as_wrong, "does not say what is claimed of the clean images"),
    "another label": (other_label, "the data are not those"),
    "another guess": (other_guess, "does not say what is claimed of the adversarial images"),
    "the clean image": (lambda f: broken_image(f, clean(f, int(f.shards[FIRST]["rows"][0]))), "does not say"),
    "far away": (lambda f: broken_image(f, clean(f, int(f.shards[FIRST]["rows"][0])).neg().add(1)), "outside the thr"),
    "a smaller radius": (lambda f: f.record["threat"].update(eps=EPS / 2), "outside the threat model"),
    "another norm": (lambda f: f.record["threat"].update(norm="l1"), "outside the threat model"),
    "margin of a broken one": (lambda f: first(f, "margin", -9.0), "the margin of samples"),
    "lead of a broken one": (lambda f: first(f, "lead", -9.0), "the lead of samples"),
    "margin of a robust one": (lambda f: first(f, "margin", 9.0, ROBUST), "the margin of samples"),
    "margin of a wrong one": (lambda f: first(f, "margin", -9.0, WRONG), "the margin of samples"),
    "other weights": (lambda f: f.record.update(weights="0" * 64), "weights are not those"),
    "fewer samples": (
        lambda f: (f.record.update(total=N - 1), f.samples.update({k: v[:-1] for k, v in f.samples.items()})),
        "evidence.json",
    ),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_what_is_false_is_noticed_with_model_and_data(bundle: Path, name: str) -> None:
    rejected(bundle, *FORGERIES[name], by=check)


def nobody_attacked(f: Forged) -> None:
    """All stages idle, every sample as it was: what a forger writes who ran nothing."""
    robust = f.samples["broken_by"] >= 0
    f.samples["broken_by"][robust] = ROBUST
    f.samples["guess"] = f.samples["label"].where(f.samples["broken_by"] == ROBUST, f.samples["clean"])
    f.samples["margin"][robust] = f.samples["lead"][robust] = 0.0
    f.shards.clear()
    f.recount()
    for done in f.record["stages"]:
        done.update(attacked=0, forwards=0, backwards=0, witnessed=0)
    f.samples["forwards"].fill_(1)
    f.samples["backwards"].fill_(0)
    f.samples["passes"].fill_(0)


def without_flag(f: Forged, name: str) -> None:
    verdict = f.record["verdict"]
    verdict["flags"] = [flag for flag in verdict["flags"] if flag["name"] != name]


def unheeded(f: Forged) -> None:
    """A raised flag of the kind that leaves a verdict sound, and asks for escalation all the same."""
    flag = {"name": "targeted ahead", "figure": 1.0, "limit": 0.0, "raised": True, "trust": "sound", "text": "x"}
    f.record["verdict"]["flags"].append(flag)


PLANS: dict[str, tuple[Callable[[Forged], Any], str]] = {
    "nobody attacked": (nobody_attacked, "attacked 0 samples, and its share was"),
    "one fewer attacked": (
        lambda f: f.record["stages"][2].update(attacked=1, witnessed=1),
        "attacked 1 samples, and its share was",
    ),
    "no flag": (lambda f: f.record["verdict"].update(flags=[]), "the flag 'zero gradients' does not follow"),
    "one flag fewer": (lambda f: without_flag(f, "random answers"), "'random answers' does"),
    "one sign not measured": (lambda f: f.signs.pop("random answers"), "'random answers' was not measured"),
    "escalated for nothing": (lambda f: f.record["verdict"].update(escalated=True), "escalated pgd did not run"),
    "a flag without consequence": (unheeded, "'targeted ahead' does not follow from what was measured"),
    "a silent sentinel": (
        lambda f: f.record["suite"]["stages"][2].update(role="sentinel"),
        "warm square broke a sample that the seed does not draw|its share was|'sentinel broken'",
    ),
    "sound, not complete": (lambda f: f.record["verdict"].update(complete=False, trust="sound"), "complete or not"),
}


@pytest.mark.parametrize("name", PLANS)
def test_what_contradicts_the_plan_is_noticed_without_the_model(bundle: Path, name: str) -> None:
    rejected(bundle, *PLANS[name], by=verify)


@pytest.mark.parametrize("name", ["targeted ahead", "accuracy levels off"])
def test_flags_that_follow_from_stages_and_curve_are_what_follows(tmp_path: Path, name: str) -> None:
    towards = Stage(name="towards", attack=ATTACKS["multi-targeted"](steps=3))
    suite = Suite(name="targets", stages=(SUITE.stages[0], towards))
    for forge in ("none", "deleted", "changed"):
        out = tmp_path / forge
        evaluate(a_model(), the_data(), None, ThreatModel(eps=EPS), suite, out=out, gallery=0)
        forged = Forged(out)
        (flag,) = (one for one in forged.record["verdict"]["flags"] if one["name"] == name)
        if forge == "deleted":
            without_flag(forged, name)
        elif forge == "changed":
            flag["figure"] = flag["figure"] + 0.001
        forged.write()
        if forge == "none":
            verify(out)
            continue
        with pytest.raises(DamagedError, match=f"'{name}' (says|does)|the flag '{name}'"):
            verify(out)


def repaint(f: Forged, name: str, by: float = 1 / 255) -> None:
    """Another pixel in the first picture."""
    picture = f.gallery[name][0]
    picture[0, 0, 0] += by if float(picture[0, 0, 0]) < 0.5 else -by


def show(f: Forged, row: int) -> None:
    f.gallery["rows"][:] = torch.tensor([row, row + 1])


PICTURES: dict[str, tuple[Callable[[Forged], Any], str]] = {
    "a clean pixel": (lambda f: repaint(f, "clean"), "shown by another clean image"),
    "far away": (lambda f: repaint(f, "adversarial", 0.4), "outside the threat model"),
    "beyond the range": (lambda f: f.gallery["adversarial"][0].fill_(1.5), "leave the range"),
    "NaN": (lambda f: f.gallery["clean"][0].fill_(float("nan")), "leave the range"),
    "another stage": (lambda f: f.gallery["tried"].fill_(3), "broken by another stage"),
    "a stage that is none": (lambda f: f.gallery["tried"].fill_(77), "a stage that the suite does not have"),
    "a sample that is wrong": (lambda f: show(f, f.row(WRONG)), "wrong without any attack"),
    "another sample": (lambda f: show(f, f.row(ROBUST)), "shown by another clean image"),
    "rows beyond": (lambda f: f.gallery["rows"].add_(N), "rising rows"),
    "rows twice": (lambda f: f.gallery["rows"].fill_(1), "rising rows"),
    "another shape": (lambda f: f.gallery.update(clean=f.gallery["clean"].reshape(-1, 1, 2, 8)), "type and shape"),
    "another type": (lambda f: f.gallery.update(clean=f.gallery["clean"].view(torch.int32)), "float32 or float64"),
    "no stages": (lambda f: f.gallery.pop("tried"), "expected rows, tried, clean and adversarial"),
}


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_are_those_of_the_samples(bundle: Path, name: str) -> None:
    rejected(bundle, *PICTURES[name], by=verify)


def test_a_picture_of_a_broken_sample_is_the_image_that_broke_it(tmp_path: Path) -> None:
    suite = Suite(name="one", stages=SUITE.stages[:1])
    evaluate(a_model(), the_data(), None, ThreatModel(eps=EPS), suite, out=tmp_path, curve=False, gallery=N)
    forged = Forged(tmp_path)
    broken_by = forged.samples["broken_by"][forged.gallery["rows"]]
    assert {ROBUST, 0} == set(broken_by.tolist())
    verify(tmp_path)
    check(tmp_path)
    at = int((broken_by == 0).nonzero()[0])
    forged.gallery["adversarial"][at] = forged.gallery["clean"][at]
    forged.write()
    with pytest.raises(DamagedError, match="shown by another adversarial image than its own"):
        verify(tmp_path)
    # Of a robust sample only the model can tell: the image is where it came nearest to being wrong.
    forged = Forged(tmp_path)
    forged.gallery["adversarial"][at] = forged.shards[FIRST]["images"][0]
    assert int(forged.shards[FIRST]["rows"][0]) == int(forged.gallery["rows"][at])
    at = int((broken_by == ROBUST).nonzero()[0])
    forged.gallery["adversarial"][at] = forged.gallery["clean"][at]
    forged.write()
    verify(tmp_path)
    with pytest.raises(DamagedError, match="of the gallery's samples"):
        check(tmp_path)


def test_a_random_model_is_not_called_a_liar(bundle: Path) -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = a_model()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.net(x) + torch.rand(1)
            return out

        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            return self.net.state_dict(*args, **kwargs)

    with pytest.raises(UserError, match="another answer each time"):
        check(bundle, Noisy())


def test_what_cannot_be_noticed_without_attacking(bundle: Path) -> None:
    """A broken sample claimed to be robust, with all counts made to fit: verify says so in its own docstring."""
    forged = Forged(bundle)
    row = int(forged.shards[FIRST]["rows"][0])
    with torch.no_grad():
        logits = a_model()(clean(forged, row)[None]).double()
    forged.samples["broken_by"][row] = ROBUST
    forged.samples["guess"][row] = forged.samples["label"][row]
    forged.samples["margin"][row] = forged.samples["lead"][row] = 0.0
    assert int(logits.argmax()) == int(forged.samples["label"][row])
    forged.samples["passes"][row] = 0
    forged.drop(row)
    forged.hide(row)
    forged.recount()
    forged.write()
    assert check(bundle).broken == int((forged.samples["broken_by"] >= 0).sum())
    said = sys.modules["steelman.evidence.verify"].__doc__ or ""
    assert "cannot be shown without attacking" in said


def stage(key: str, by: int) -> Callable[[Forged], Any]:
    return lambda f: f.record["stages"][0].update({key: f.record["stages"][0][key] + by})


def flagged(f: Forged, **changes: Any) -> None:
    flag = {"name": "x", "figure": 1.0, "limit": 0.0, "raised": True, "trust": "suspect", "text": "x"}
    f.record["verdict"].update(trust="sound", flags=[{**flag, **changes}])


def nudge_by(f: Forged, by: int) -> None:
    f.shards[FIRST]["rows"] += by


def swapped(f: Forged) -> None:
    other = "adversarial-0001.safetensors"
    f.shards[FIRST], f.shards[other] = f.shards[other], f.shards[FIRST]


def retype(f: Forged, name: str, dtype: torch.dtype) -> None:
    f.shards[FIRST][name] = f.shards[FIRST][name].to(dtype)


def reshape(f: Forged, name: str, shape: tuple[int, ...]) -> None:
    f.shards[FIRST][name] = f.shards[FIRST][name].reshape(shape)


INCONSISTENT: dict[str, tuple[Callable[[Forged], Any], str]] = {
    "robust count": (lambda f: f.record.update(robust_correct=N), "robust_correct is"),
    "clean count": (lambda f: f.record.update(clean_correct=N), "clean_correct is"),
    "broken by a stage": (stage("broken", 1), "do not add up"),
    "left by a stage": (stage("left", 1), "do not add up"),
    "attacked": (stage("attacked", N), "do not add up"),
    "forwards": (stage("forwards", -1), "forwards, and the samples"),
    "backwards": (stage("backwards", 1), "backwards, and the samples"),
    "passes of a sample": (lambda f: first(f, "passes", 10**6), "passes cannot be"),
    "name of a stage": (lambda f: f.record["stages"][0].update(name="strong"), "is not a stage of the suite"),
    "order of stages": (lambda f: f.record["stages"].reverse(), "not in its place|do not add up"),
    "a stage that did not run": (lambda f: f.record["stages"].pop(), "did not run|forwards"),
    "escalated": (lambda f: f.record["verdict"].update(escalated=True), "escalated pgd did not run"),
    "a flag of another name": (flagged, "'x' does not follow from what was measured"),
    "a claim that nobody knows": (lambda f: f.record["verdict"].update(correct=N), r"verdict\.correct is no key"),
    "a curve of more": (
        lambda f: f.record.update(curve=[{"eps": 1, "correct": 2, "total": 1}]),
        "the radii of the curve",
    ),
    "digest of the data": (lambda f: f.record.update(data_digest="0" * 64), "data_digest"),
    "an image too many": (lambda f: f.add(f.row(ROBUST), f.shards[FIRST]["images"][0]), "not claimed to be broken"),
    "an image too few": (lambda f: f.drop(int(f.shards[FIRST]["rows"][0])), "no adversarial image"),
    "no images": (lambda f: f.shards.clear(), "no adversarial image"),
    "a pixel out of range": (lambda f: f.shards[FIRST]["images"][0].fill_(1.5), "leave the range"),
    "NaN": (lambda f: f.shards[FIRST]["images"][0].fill_(float("nan")), "leave the range"),
    "a label that is none": (lambda f: first(f, "label", 3), "label is not always"),
    "a guess that is none": (lambda f: first(f, "guess", -1), "guess is not always"),
    "a stage that is none": (lambda f: first(f, "broken_by", 77), "that the suite does not have"),
    "a guess that is right": (
        lambda f: first(f, "guess", int(f.samples["label"][f.shards[FIRST]["rows"][0]])),
        "right",
    ),
    "a margin that is none": (lambda f: first(f, "margin", float("nan"), ROBUST), "margin is not a number"),
    "a margin above 0": (lambda f: first(f, "margin", 0.5), "not below 0"),
    "rows twice": (lambda f: f.shards[FIRST]["rows"].fill_(int(f.shards[FIRST]["rows"][0])), "rising rows"),
    "rows below 0": (lambda f: nudge_by(f, -100), "rising rows"),
    "rows beyond": (lambda f: f.shards[max(f.shards)]["rows"].add_(1 << 60), "rising rows"),
    "files swapped": (swapped, "rising rows"),
    "rows as floats": (lambda f: retype(f, "rows", torch.float32), "expected a list of rows"),
    "rows in two columns": (lambda f: reshape(f, "rows", (-1, 1)), "expected a list of rows"),
    "images as integers": (lambda f: retype(f, "images", torch.int64), "images in float32 or float64"),
    "images in half": (lambda f: retype(f, "images", torch.float16), "images in float32 or float64"),
    "images of two kinds": (lambda f: retype(f, "images", torch.float64), "of another kind"),
    "flat images": (lambda f: reshape(f, "images", (-1, 16)), "images in float32 or float64"),
    "no rows": (lambda f: f.shards[FIRST].pop("rows"), "expected rows and images"),
    "more than rows": (lambda f: f.shards[FIRST].update(more=torch.zeros(1)), "expected rows and images"),
    "a column missing": (lambda f: f.samples.pop("margin"), "rows of 'margin', got none"),
    "a column too short": (lambda f: f.samples.update(guess=f.samples["guess"][1:]), "rows of 'guess'"),
    "a column of floats": (lambda f: f.samples.update(label=f.samples["label"].double()), "rows of 'label'"),
}


@pytest.mark.parametrize("name", INCONSISTENT)
def test_what_contradicts_itself_is_noticed_without_the_model(bundle: Path, name: str) -> None:
    forge, expected = INCONSISTENT[name]
    forged = Forged(bundle)
    forge(forged)
    forged.write()
    with pytest.raises(DamagedError, match=expected):
        verify(bundle)


def test_images_of_another_type_or_shape_than_the_model_takes(bundle: Path) -> None:
    forged = Forged(bundle)
    held = copy.deepcopy(forged.shards)
    for shard in forged.shards.values():
        shard["images"] = shard["images"].double()
    forged.write()
    with pytest.raises(DamagedError, match=r"expected adversarial images in torch\.float32"):
        check(bundle)
    for name, shard in held.items():
        forged.shards[name]["images"] = shard["images"].reshape(-1, 1, 2, 8)
    forged.write()
    with pytest.raises(DamagedError, match=r"of shape \(1, 4, 4\), got \(1, 2, 8\)"):
        check(bundle)
