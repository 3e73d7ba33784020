"""Comparing verdicts, on linear models for which it is known which samples are robust; and the tests' own figures."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from steelman.attacks import PGD
from steelman.errors import UserError
from steelman.evaluation.result import interval
from steelman.evaluation.stages import Stage, Suite
from steelman.evidence.bundle import DamagedError, seal_of
from steelman.evidence.compare import attacked_unlike, compare, holm, mcnemar
from steelman.threat import ThreatModel
from tests.evidence_helpers import evaluate
from tests.oracles import LinearClassifier

EPS, N = 0.05, 60
ATTACK = {"FGSM": PGD(steps=1, start="zero")}  # on a linear model of two classes there is none stronger


def direction(angle: float) -> Tensor:
    return torch.tensor([math.cos(angle), math.sin(angle), 0.3, -0.2])


def data(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Far enough from the box's sides that it never matters; labels as the direction of angle 0 has them."""
    x = 0.2 + 0.6 * torch.rand(N, 1, 2, 2, generator=torch.Generator().manual_seed(seed))
    return x, (x.flatten(1) @ direction(0) > direction(0).sum() / 2).long()


def model(angle: float) -> LinearClassifier:
    w = direction(angle)
    return LinearClassifier(torch.stack((-w / 2, w / 2)), torch.stack((w.sum() / 4, -w.sum() / 4)))


def withstands(angle: float, x: Tensor, y: Tensor, eps: float = EPS) -> Tensor:
    """On the right side by more than eps ||w||_1."""
    w = direction(angle)
    return (2 * y - 1) * (x.flatten(1) @ w - w.sum() / 2) > eps * w.abs().sum()


def measured(folder: Path, angle: float, x: Tensor, y: Tensor, eps: float = EPS, **options: object) -> Path:
    given = {"curve": False, "name": f"at {angle}", **options}
    evaluate(model(angle), x, y, ThreatModel(eps=eps), ATTACK, out=folder, **given)
    return folder


def exact(b: int, c: int) -> float:
    """Twice the smaller tail of Binomial(b + c, 1/2), by counting."""
    n = b + c
    return min(1.0, math.ldexp(2 * sum(math.comb(n, k) for k in range(min(b, c) + 1)), -n))


@pytest.mark.parametrize(("b", "c"), [(0, 1), (1, 0), (0, 6), (10, 2), (2, 10), (7, 7), (30, 51), (0, 40)])
def test_mcnemar_against_counting(b: int, c: int) -> None:
    assert mcnemar(b, c) == pytest.approx(exact(b, c), rel=1e-9)


def test_mcnemar_where_nothing_differs() -> None:
    assert mcnemar(0, 0) == 1.0


def test_holm_by_hand() -> None:
    # 4 x 0.01; 3 x 0.02; 2 x 0.02 would fall below, so it stays; 1 x 0.9
    assert holm([0.02, 0.9, 0.01, 0.02]) == pytest.approx([0.06, 0.9, 0.04, 0.06])
    assert holm([0.9, 0.7]) == [1.0, 1.0]
    assert holm([0.2]) == [0.2]
    assert holm([]) == []


def test_two_models_whose_answer_is_known(tmp_path: Path) -> None:
    x, y = data()
    folders = {f"m{angle}": measured(tmp_path / str(angle), angle, x, y) for angle in (0.0, 0.9)}
    found = compare(folders)
    first, second = withstands(0.0, x, y), withstands(0.9, x, y)
    (pair,) = found.pairs
    assert (pair.first, pair.second, pair.common) == ("m0.0", "m0.9", N)
    assert pair.only_first == int((first & ~second).sum()) > 5
    assert pair.only_second == int((second & ~first).sum())
    assert pair.both == int((first & second).sum()) > 5
    assert pair.p == pair.corrected == pytest.approx(exact(pair.only_first, pair.only_second))
    assert found.threat == ThreatModel(eps=EPS)
    for one, held in zip(found.models, (first, second)):
        assert (one.robust.correct, one.robust.total) == (int(held.sum()), N)
        assert one.robust.interval == interval(int(held.sum()), N)
        assert (one.trust, one.word) == ("sound", "upper bound"), "no suite of its own"
    assert found.models[0].clean.correct == N
    assert pair.p < 0.05, "or the sentence is not tested"
    assert dataclasses.replace(pair, but="").text.startswith(f"m0.0 is more robust than m0.9: of {N} samples in common")
    assert pair.text.startswith("more samples of m0.0 than of m0.9 are robust, but only given attacks were tried")
    assert found.notes == ()
    # The other way round it is the other way round.
    (turned,) = compare(dict(reversed(folders.items()))).pairs
    assert (turned.only_first, turned.only_second, turned.p) == (pair.only_second, pair.only_first, pair.p)
    assert turned.text.startswith("more samples of m0.0 than of m0.9")


def test_of_two_sound_verdicts_something_follows(tmp_path: Path) -> None:
    x, y = data()
    suite = Suite(name="one", stages=(Stage(name="pgd", attack=PGD(steps=20)),))
    folders = {f"m{angle}": tmp_path / str(angle) for angle in (0.0, 0.9)}
    for angle, folder in zip((0.0, 0.9), folders.values()):
        evaluate(model(angle), x, y, ThreatModel(eps=EPS), suite, out=folder, curve=False)
    found = compare(folders)
    assert [one.word for one in found.models] == ["sound", "sound"]
    assert found.pairs[0].text.startswith(f"m0.0 is more robust than m0.9: of {N} samples in common")


def test_samples_are_matched_by_content_and_not_by_place(tmp_path: Path) -> None:
    x, y = data()
    order = torch.randperm(N, generator=torch.Generator().manual_seed(1))
    some = order[: N // 2]
    measured(tmp_path / "a", 0.0, x, y)
    measured(tmp_path / "b", 0.9, x, y)
    measured(tmp_path / "shuffled", 0.9, x[order], y[order])
    measured(tmp_path / "half", 0.9, x[some], y[some])
    straight, mixed, half = (compare({"a": tmp_path / "a", "b": tmp_path / name}) for name in ("b", "shuffled", "half"))
    assert mixed.pairs == straight.pairs
    assert mixed.notes == ()
    first, second = withstands(0.0, x, y)[some], withstands(0.9, x, y)[some]
    (pair,) = half.pairs
    assert (pair.common, pair.only_first, pair.both) == (
        N // 2,
        int((first & ~second).sum()),
        int((first & second).sum()),
    )
    assert half.models[0].robust.total == N
    assert "have only 30 in common" in half.notes[0]


def test_a_sample_that_comes_twice_counts_twice(tmp_path: Path) -> None:
    x, y = data()
    twice = torch.cat((torch.arange(N), torch.arange(10)))
    measured(tmp_path / "a", 0.0, x[twice], y[twice])
    measured(tmp_path / "b", 0.9, x[twice], y[twice])
    measured(tmp_path / "once", 0.9, x, y)
    first, second = withstands(0.0, x, y)[twice], withstands(0.9, x, y)[twice]
    (pair,) = compare({"a": tmp_path / "a", "b": tmp_path / "b"}).pairs
    assert (pair.common, pair.only_first) == (N + 10, int((first & ~second).sum()))
    (pair,) = compare({"a": tmp_path / "a", "once": tmp_path / "once"}).pairs
    assert pair.common == N


def test_several_models_are_corrected_and_noted(tmp_path: Path) -> None:
    x, y = data()
    folders = {name: measured(tmp_path / name, angle, x, y) for name, angle in (("a", 0.0), ("b", 0.9), ("c", 0.0))}
    found = compare(folders)
    assert [(pair.first, pair.second) for pair in found.pairs] == [("a", "b"), ("a", "c"), ("b", "c")]
    assert [pair.corrected for pair in found.pairs] == holm([pair.p for pair in found.pairs])
    assert found.pairs[0].corrected == pytest.approx(3 * found.pairs[0].p)
    assert found.pairs[1].p == 1.0
    assert "do not settle which of a and c" in found.pairs[1].text
    assert "a and c have the same weights" in found.notes
    evaluate(model(0.0), x, y, ThreatModel(eps=EPS), {"PGD": PGD(steps=3)}, out=tmp_path / "d", curve=False)
    (note,) = compare({"b": folders["b"], "d": tmp_path / "d"}).notes
    assert note == "b and d were not attacked alike (stages FGSM and PGD): weaker attacks leave more samples robust"


def test_what_cannot_be_compared(tmp_path: Path) -> None:
    x, y = data()
    a = measured(tmp_path / "a", 0.0, x, y)
    with pytest.raises(UserError, match="at least two evaluations to compare, got 1"):
        compare({"a": a})
    wider = measured(tmp_path / "wider", 0.9, x, y, eps=0.06)
    with pytest.raises(UserError, match=r"a is for linf 0\.05 in 0 \.\. 1, and b for linf 0\.06"):
        compare({"a": a, "b": wider})
    other = measured(tmp_path / "other", 0.9, *data(seed=1))
    with pytest.raises(UserError, match="a and b have no sample in common"):
        compare({"a": a, "b": other})
    with pytest.raises(UserError, match=r"evidence\.json is missing"):
        compare({"a": a, "b": tmp_path})
    record = json.loads((other / "evidence.json").read_text())
    record["robust_correct"] += 1
    (other / "evidence.json").write_text(json.dumps(record))
    with pytest.raises(DamagedError):
        compare({"a": a, "b": other})


def test_nothing_is_concluded_where_something_stands_in_the_way(tmp_path: Path) -> None:
    """A model is not more robust than itself because it was attacked less."""
    x, y = data()
    weak = measured(tmp_path / "weak", 0.0, x, y)
    strong = measured(tmp_path / "strong", 0.9, x, y)
    (pair,) = compare({"weak": weak, "strong": strong}).pairs
    assert pair.corrected < 0.05
    assert pair.but.startswith("only given attacks were tried")
    for reason in ("they have the same weights", "they were not attacked alike", "the verdict on strong is suspect"):
        text = dataclasses.replace(pair, but=reason).text
        assert text.startswith("more samples of weak than of strong are robust, but " + reason)
        assert "more robust" not in text
    idle = tmp_path / "idle"
    nothing = {"FGSM": PGD(steps=1, start="zero", step_size=1e-9)}
    evaluate(model(0.9), x, y, ThreatModel(eps=EPS), nothing, out=idle, curve=False)
    (same,) = compare({"idle": idle, "strong": strong}).pairs
    assert same.corrected < 0.05
    assert same.but == "they have the same weights"
    (unlike,) = compare({"idle": idle, "weak": weak}).pairs
    assert unlike.but == "they were not attacked alike (FGSM: step_size 1e-09 and None)"
    (note,) = compare({"idle": idle, "weak": weak}).notes
    assert note.startswith("idle and weak were not attacked alike (FGSM: step_size 1e-09 and None)")


def test_seeds_do_not_matter_and_versions_and_names_of_data_are_told(tmp_path: Path) -> None:
    x, y = data()
    a = measured(tmp_path / "a", 0.0, x, y)
    b = measured(tmp_path / "b", 0.9, x, y, seed=3, data_name="the same images")
    forged = json.loads((b / "evidence.json").read_text())
    forged["versions"]["torch"] = "1.0"
    forged["seal"] = seal_of(forged)
    (b / "evidence.json").write_text(json.dumps(forged, indent=1))
    found = compare({"a": a, "b": b})
    assert found.pairs[0].but.startswith("only given attacks were tried"), "no other reason"
    (note,) = found.notes
    assert note == (
        f"a and b were not measured alike (data data and the same images; torch {torch.__version__} and 1.0)"
    )


def test_another_precision_of_a_stage_is_told() -> None:
    def suite(name: str, precision: str) -> dict[str, object]:
        stage = {"name": "coarse", "attack": {"attack": "PGD", "steps": 3}, "precision": precision}
        return {"suite": {"name": name, "protocol": False, "stages": [stage]}}

    assert attacked_unlike(suite("fast", "full"), suite("fast", "full")) == []
    assert attacked_unlike(suite("fast", "full"), suite("fast", "bfloat16")) == ["coarse: precision full and bfloat16"]
    assert attacked_unlike(suite("fast", "full"), suite("full", "full")) == ["suite fast and full"]
