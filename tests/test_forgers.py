"""A forger edits a verdict, and makes every hash, count and sentence fit again. The check finds it."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from torch import Tensor, nn

import steelman
from steelman.attacks import PGD
from steelman.data.source import ArraySource
from steelman.errors import UserError
from steelman.evaluation.masking import Pilot
from steelman.evaluation.result import Evaluation
from steelman.evaluation.stages import Stage, Suite
from steelman.evidence.bundle import SIGNS_FILE, DamagedError, read_bundle
from steelman.evidence.ledger import ROBUST, WRONG
from steelman.evidence.page import page_of
from steelman.evidence.verify import SealError, verify
from steelman.files import write_atomic
from steelman.threat import ThreatModel
from tests.evidence_helpers import EPS, Forged, N, a_model, check, evaluate, the_data

SUITE = Suite(
    name="watched",
    stages=(
        Stage(name="pilot", attack=Pilot(), role="pilot"),
        Stage(name="pgd", attack=PGD(steps=2, step_size=EPS)),
        Stage(name="near", attack=PGD(steps=4, step_size=EPS, loss="margin"), share=0.5),
        Stage(name="sentinel pgd", attack=PGD(steps=10, loss="margin"), share=0.3, role="sentinel"),
    ),
)


class Rounded(nn.Module):
    """Its input is rounded, so its gradient is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.net = a_model()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x + ((x * 8).round() / 8 - x).detach() - (x - x.detach()))
        return out


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Evidence with a pilot stage, a curve and a sentinel."""
    out = tmp_path_factory.mktemp("watched") / "e"
    evaluate(a_model(), the_data(), None, ThreatModel(eps=EPS), SUITE, out=out, gallery=2)
    return out


@pytest.fixture
def copy(watched: Path, tmp_path: Path) -> Path:
    return shutil.copytree(watched, tmp_path / "copy")


def masked_source() -> ArraySource:
    source = the_data()
    x = source.images(torch.arange(N))
    with torch.no_grad():
        return ArraySource(x, Rounded()(x).argmax(dim=1), ["a", "b", "c"])


@pytest.fixture
def masked(tmp_path: Path) -> Path:
    """Evidence of a model without a gradient: suspect, and rightly."""
    suite = Suite(name="one", stages=(Stage(name="pgd", attack=PGD(steps=3)),))
    found = evaluate(Rounded(), masked_source(), None, ThreatModel(eps=EPS), suite, out=tmp_path / "m", gallery=0)
    assert found.verdict is not None
    assert found.verdict.trust == "suspect"
    return tmp_path / "m"


def test_honest_evidence_is_accepted(watched: Path) -> None:
    found = check(watched)
    assert found.stranger == "the suite 'watched' is not one of steelman's"
    assert (found.version, found.page, found.unknown, found.audit) == ("", "", (), None)
    assert found.unmeasured == ("transfer stronger",), "no other model was given"


def test_a_suspect_verdict_called_sound(masked: Path) -> None:
    forged = Forged(masked)
    forged.record["verdict"].update(trust="sound", reasons=[])
    forged.write()
    with pytest.raises(DamagedError, match="the verdict is sound, and what follows from its flags is suspect"):
        verify(masked)
    for flag in forged.record["verdict"]["flags"]:
        flag.update(figure=0.0, raised=False)
    forged.write()
    with pytest.raises(
        DamagedError, match=r"the flag 'zero gradients' says figure 0\.0, and what was measured says 1\.0"
    ):
        verify(masked)


def test_a_limit_out_of_reach(masked: Path) -> None:
    forged = Forged(masked)
    for flag in forged.record["verdict"]["flags"]:
        flag.update(limit=2.0, raised=False)
    forged.record["verdict"].update(trust="sound", reasons=[])
    forged.write()
    with pytest.raises(DamagedError, match=r"the flag 'zero gradients' says limit 2\.0"):
        verify(masked)


def test_measurements_that_no_attack_is_needed_for_are_made_again(masked: Path) -> None:
    """A forger who changes what was measured, and lets verdict, reasons and notes follow from it."""
    forged = Forged(masked)
    for name, column in forged.signs.items():
        if name not in ("rows", "broken") and not name.endswith(", of"):
            forged.signs[name] = torch.zeros_like(column)
    n = len(forged.signs["rows"])
    for name in steelman.evaluation.signs.UPHILL:
        forged.signs[name] = torch.zeros(n, dtype=torch.bool)
    forged.signs["broken"] = torch.zeros(n, dtype=torch.bool)
    forged.record["curve"][-1]["correct"] = 0
    forged.conclude()
    assert verify(masked).robust == forged.record["robust_correct"]
    assert forged.record["verdict"]["trust"] == "sound"
    with pytest.raises(DamagedError, match=r"the gradients at samples .* are not what is claimed of them"):
        check(masked, Rounded(), masked_source())


def flag_of(f: Forged, name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(one for one in f.record["verdict"]["flags"] if one["name"] == name)
    return found


def stage(f: Forged, number: int, **changes: Any) -> None:
    f.record["stages"][number].update(changes)


def other_sentinel(f: Forged) -> None:
    """A robust sample that no draw chose, broken by the sentinel."""
    f.record["seed"] += 1
    f.recount()


def moved_draw(f: Forged) -> None:
    rows, chosen = (f.samples["broken_by"] != WRONG).nonzero()[:, 0], f.signs["rows"]
    other = next(row for row in rows.tolist() if row not in chosen.tolist())
    f.signs["rows"][0] = other
    f.signs["rows"] = f.signs["rows"].sort().values


EDITS: dict[str, tuple[Callable[[Forged], Any], str]] = {
    "the text of a flag": (lambda f: flag_of(f, "zero gradients").update(text="all is well"), "says text all is well"),
    "the trust of a flag": (lambda f: flag_of(f, "zero gradients").update(trust="sound"), "says trust sound"),
    "a flag raised": (lambda f: flag_of(f, "zero gradients").update(raised=True), "says raised True"),
    "a figure": (lambda f: flag_of(f, "zero gradients").update(figure=0.01), "says figure 0.01"),
    "flags in another order": (lambda f: f.record["verdict"]["flags"].reverse(), "does not follow"),
    "a reason": (lambda f: f.record["verdict"].update(reasons=["certified"]), "the reasons of the verdict"),
    "a note": (lambda f: f.record.update(notes=["approved"]), "the notes are not those"),
    "less trust": (lambda f: f.record["verdict"].update(trust="suspect"), "what follows from its flags is sound"),
    "random": (lambda f: f.record.update(random=True), "what follows from its flags is suspect"),
    "points outside": (lambda f: stage(f, 1, outside=5), "'points outside'|the notes"),
    "too many points outside": (lambda f: stage(f, 1, outside=10**6), "could not be counted than it had"),
    "refuted": (
        lambda f: stage(f, 1, refuted=f.record["stages"][1]["attacked"] - f.record["stages"][1]["broken"]),
        "ref",
    ),
    "not finite": (lambda f: stage(f, 1, nonfinite=1), "'logits not finite'"),
    "a copy that disagrees": (lambda f: stage(f, 1, contradicted=1), "'copy disagrees'"),
    "a copy that was not asked": (lambda f: stage(f, 1, contradicted=99), "more answers of the model's copy"),
    "cut short": (lambda f: f.record.update(cut={"pgd": [1, 2]}), "in a stage that is not the last"),
    "the last cut short": (lambda f: f.record.update(cut={"sentinel pgd": [1, 99]}), "its share was"),
    "the pilot cut short": (lambda f: f.record.update(look_cut=[1, 32]), "the pilot looked at"),
    "a radius": (lambda f: f.record["curve"][2].update(eps=0.9), "the radii of the curve"),
    "a point fewer": (lambda f: f.record["curve"].pop(), "the radii of the curve"),
    "no curve": (lambda f: f.record.update(curve=[]), "'accuracy levels off'|does not follow"),
    "a curve that rises": (lambda f: f.record["curve"][3].update(correct=32), "rises"),
    "a curve of fewer": (lambda f: [point.update(total=31) for point in f.record["curve"]], "were looked at"),
    "the curve's attack": (lambda f: f.record.update(curve_attack="PGD-1000"), "the curve's attack is claimed"),
    "the seed": (other_sentinel, "the seed draws|the seed does not draw|samples that the pilot"),
    "the draw": (moved_draw, "are not those that the seed draws|that the pilot broke"),
    "what the pilot broke": (lambda f: f.signs["broken"].logical_not_(), "the samples that the pilot broke"),
    "unknown sign": (lambda f: f.signs.update({"all well": torch.ones(1)}), "no sign is called 'all well'"),
    "a sign that is no number": (
        lambda f: f.signs.update({"random answers": torch.tensor([float("nan")])}),
        "expected a list of what was measured",
    ),
    "a sign below 0": (
        lambda f: f.signs.update({"starts disagree": torch.full((32,), -1.0)}),
        "list of what was measured",
    ),
    "more than there are": (lambda f: f.signs["undefined answers"].fill_(1 << 40), "more points than were tried"),
    "a sign left out": (lambda f: f.signs.pop("black box stronger"), "'black box stronger' was not measured"),
    "no signs": (lambda f: f.signs.clear(), "expected it for a cascade alone"),
    "rows as numbers": (lambda f: f.signs.update(rows=f.signs["rows"].double()), "expected a list of rows"),
    "unknown column": (lambda f: f.samples.update(better=torch.ones(N)), "no evidence has a column called 'better'"),
    "unclear where nothing was attacked": (
        lambda f: f.samples["unclear"].copy_(f.samples["broken_by"] == WRONG),
        "claimed to have been attacked",
    ),
    "a protocol": (lambda f: f.record["suite"].update(protocol=True), "do not add up|cascade alone"),
    "two classes of one name": (lambda f: f.record.update(classes=["a", "a", "c"]), "two of the classes"),
    "the shape": (lambda f: f.record.update(shape=[1, 2, 8]), r"of shape \(1, 2, 8\), got \(1, 4, 4\)"),
    "the shape of the gallery": (
        lambda f: f.gallery.update({name: f.gallery[name].reshape(-1, 1, 2, 8) for name in ("clean", "adversarial")}),
        r"of shape \(1, 4, 4\), got \(1, 2, 8\)",
    ),
    "complete": (lambda f: f.record["verdict"].update(complete=False), "complete or not"),
    "passes of a robust sample": (lambda f: f.samples["passes"].__setitem__(f.row(ROBUST), 1), "that no attack broke"),
}


@pytest.mark.parametrize("name", EDITS)
def test_what_follows_from_what_was_kept_is_computed_again(copy: Path, name: str) -> None:
    edit, expected = EDITS[name]
    forged = Forged(copy)
    edit(forged)
    forged.write()
    with pytest.raises(DamagedError, match=expected):
        verify(copy)


def test_classes_and_shape_are_those_of_the_data(copy: Path) -> None:
    forged = Forged(copy)
    forged.record["classes"] = ["b", "a", "c"]
    forged.write()
    verify(copy)
    with pytest.raises(DamagedError, match="the classes are not those of the data: expected a, b, c, got b, a, c"):
        check(copy)
    forged.record["classes"] = ["0", "1", "2"]
    forged.write()
    check(copy)


# The suite.


@pytest.fixture(scope="module")
def fast(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("fast") / "e"
    evaluate(a_model(), the_data(), None, ThreatModel(eps=EPS), "fast", out=out, gallery=0)
    return out


OTHER = {"full": "bfloat16", "bfloat16": "full"}


def test_the_stages_of_a_suite_follow_from_its_name(fast: Path, tmp_path: Path) -> None:
    assert verify(fast).stranger == ""
    copy = shutil.copytree(fast, tmp_path / "copy")
    changes: tuple[tuple[Callable[[Any], Any], str], ...] = (
        (
            lambda plan: plan["stages"][1]["attack"].update(steps=1),
            "the stage 'cross-entropy' is not that of the suite",
        ),
        (lambda plan: plan["stages"][2]["attack"].update(step_size=1e-9), "the stage 'margin' is not that"),
        (lambda plan: plan["stages"][1].update(precision=OTHER[plan["stages"][1]["precision"]]), "the stage"),
        (lambda plan: plan.update(name="standard"), "the stages are not those of the suite 'standard'"),
        (lambda plan: plan.update(name="pas"), "the stages are not those of the suite 'pas'"),
    )
    for change, expected in changes:
        forged = Forged(copy)
        change(forged.record["suite"])
        forged.write()
        with pytest.raises(DamagedError, match=expected):
            verify(copy)
        shutil.rmtree(copy)
        shutil.copytree(fast, copy)
    forged = Forged(copy)
    forged.record["threat"]["eps"] = EPS * 2  # the step sizes are those of the smaller radius
    forged.write()
    with pytest.raises(DamagedError, match="is not that of the suite 'fast' with this threat model"):
        verify(copy)


def test_another_version_is_named(fast: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(fast, tmp_path / "copy")
    forged = Forged(copy)
    forged.record["versions"]["steelman"] = "9.9"
    forged.record["suite"]["stages"][1]["attack"]["steps"] = 1
    forged.write()
    found = verify(copy)
    assert found.version == f"steelman 9.9 made the evidence, and this is {steelman.__version__}"
    assert found.stranger == f"the suite 'fast' of steelman 9.9 is not that of steelman {steelman.__version__}"
    forged.record["verdict"]["trust"] = "suspect"
    forged.write()
    with pytest.raises(DamagedError, match="what follows from its flags is sound"):
        verify(copy)


# Files.


def with_metadata(folder: Path) -> None:
    forged = Forged(folder)
    forged.write()
    content = save(forged.signs, metadata={"approved": "yes"})
    (folder / SIGNS_FILE).write_bytes(content)
    forged.record["files"][SIGNS_FILE] = hashlib.sha256(content).hexdigest()
    forged.seal()


def test_metadata_is_refused(copy: Path) -> None:
    with_metadata(copy)
    with pytest.raises(DamagedError, match="expected tensors alone, got metadata too"):
        verify(copy)


def test_a_key_twice_is_refused(copy: Path) -> None:
    path = copy / "evidence.json"
    path.write_text(path.read_text().replace('"seed": 0,', '"seed": 0,\n "seed": 0,'))
    with pytest.raises(DamagedError, match="twice"):
        verify(copy)


def test_a_page_is_that_of_the_evidence(copy: Path) -> None:
    page = page_of(copy)
    write_atomic(copy / "report.html", page.encode())
    check(copy)
    for edited in (page.replace("sound", "certified", 1), page + "<script>alert(1)</script>", ""):
        (copy / "report.html").write_text(edited)
        with pytest.raises(DamagedError, match=r"report\.html is not the page of this evidence"):
            verify(copy)


def test_the_page_that_an_evaluation_leaves_is_that_of_its_evidence(copy: Path) -> None:
    """In memory and read from the files, an evaluation gives the same page."""
    from steelman.report import Entry, html

    found = evaluate(a_model(), the_data(), None, ThreatModel(eps=EPS), SUITE, out=copy.parent / "again", gallery=2)
    page = html.render([Entry(name=found.model, evaluation=found)], title=f"{found.model} on {found.data}")
    assert page == page_of(copy.parent / "again")
    assert Evaluation.load(copy.parent / "again").verdict == found.verdict


def test_times_are_as_written_or_refused(copy: Path) -> None:
    path = copy / "times.json"
    times = json.loads(path.read_text())
    edits: tuple[Any, ...] = ({**times, "clean": -1}, {**times, "more": 1.0}, {**times, "clean": "<script>"}, [], {})
    for edited in edits:
        path.write_text(json.dumps(edited))
        with pytest.raises(DamagedError, match=r"times\.json: expected a time for each of"):
            verify(copy)
    path.unlink()
    verify(copy)


def test_the_published_seal(copy: Path) -> None:
    seal = read_bundle(copy).seal
    for given in (seal, seal[:32], f" {seal.upper()}\n"):
        assert verify(copy, seal=given).seal == seal
    with pytest.raises(SealError, match=f"the evidence has the seal {seal}, and the published one is {'0' * 32}"):
        verify(copy, seal="0" * 32)
    wrong: list[Any] = [seal[:31], "", "sound", seal + "0", 5]
    for given in wrong:
        with pytest.raises(UserError, match=r"expected 32 to 64 digits|seal: expected a text, got 5"):
            verify(copy, seal=given)


def test_text_that_steers_a_terminal_is_refused(copy: Path) -> None:
    """Such a text could print a line that no check has said."""
    for place, key, text in (
        ("versions", "torch", "2\n  checked: all"),
        ("", "model", "\x1b]0;title\x07"),
        ("versions", "a\x1b[31m", "b"),
    ):
        forged = Forged(copy)
        kept = (copy / "evidence.json").read_bytes()
        (forged.record[place] if place else forged.record)[key] = text
        forged.seal()
        with pytest.raises(DamagedError, match="expected texts of printable characters"):
            verify(copy)
        (copy / "evidence.json").write_bytes(kept)
    with pytest.raises(UserError, match="name: expected a text of printable characters"):
        evaluate(a_model(), the_data(), None, ThreatModel(eps=EPS), name="a\nb")


def test_a_public_name_of_other_data_is_refused(copy: Path) -> None:
    source = the_data()
    source.name = "digits test"
    forged = Forged(copy)
    forged.record["data"] = "cifar10 test"
    forged.conclude()
    with pytest.raises(DamagedError, match="the data are claimed to be 'cifar10 test', and these are 'digits test'"):
        verify(copy, model=a_model(), source=source)


@pytest.mark.parametrize("change", [{"robust_correct": 1}, {"seed": 12345}])
def test_a_verdict_that_does_not_follow_is_not_even_read(copy: Path, change: dict[str, Any]) -> None:
    forged = Forged(copy)
    forged.record.update(change)
    forged.seal()
    with pytest.raises(DamagedError):
        Evaluation.load(copy)


@pytest.mark.parametrize("name", ["norm", "low", "high"])
def test_a_threat_model_without_a_part(copy: Path, name: str) -> None:
    """Each of these parts has a default, which would be the one that was removed."""
    forged = Forged(copy)
    del forged.record["threat"][name]
    forged.seal()
    with pytest.raises(DamagedError, match=f"threat.{name} is missing"):
        verify(copy)


def test_a_radius_of_zero_and_a_sign_without_places(copy: Path) -> None:
    forged = Forged(copy)
    forged.record["threat"]["eps"] = 0.0
    forged.record["suite"]["name"] = "nobody's"
    forged.seal()
    with pytest.raises(DamagedError, match=r"expected a radius above 0, got 0\.0"):
        verify(copy)
    forged.record["threat"]["eps"] = EPS
    name = next(name for name in forged.signs if name not in ("rows", "broken"))
    forged.signs[name] = torch.tensor(True)
    forged.write()
    with pytest.raises(DamagedError, match="expected a list of what was measured"):
        verify(copy)
