"""The audit: honest evidence passes, and broken samples that were declared robust are found."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import hypergeom
from torch import Tensor, nn

from steelman.attacks import PGD
from steelman.data.source import ArraySource
from steelman.errors import UserError
from steelman.evaluation.stages import Stage, Suite
from steelman.evaluation.suites import SUITES
from steelman.evidence.audit import Audit, drawn_by, false_claims
from steelman.evidence.bundle import DamagedError, read_bundle
from steelman.evidence.ledger import ROBUST
from steelman.evidence.page import page_of
from steelman.evidence.verify import Checked, verify
from steelman.threat import ThreatModel
from tests.evidence_helpers import EPS, Forged, a_model, evaluate

TOTAL, FORGED = 200, 20


def data() -> ArraySource:
    x = torch.rand(TOTAL, 1, 4, 4, generator=torch.Generator().manual_seed(6))
    with torch.no_grad():
        return ArraySource(x, a_model()(x).argmax(dim=1), ["a", "b", "c"])


def quick(_: ThreatModel) -> Suite:
    stages = (
        Stage(name="two steps", attack=PGD(steps=2, step_size=EPS)),
        Stage(name="pgd", attack=PGD(steps=8, step_size=EPS / 2, loss="margin")),
    )
    return Suite(name="quick", stages=stages, curve=False)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SUITES, "quick", quick)


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("audit") / "e"
    threat = ThreatModel(eps=EPS)
    evaluate(a_model(), data(), None, threat, quick(threat), out=out, gallery=0)
    return out


def declare_robust(folder: Path, count: int) -> list[int]:
    """Broken samples declared robust, and all else made to fit: hashes, counts, draws, sentences, seal and page."""
    forged = Forged(folder)
    rows: list[int] = (forged.samples["broken_by"] >= 0).nonzero()[:count, 0].tolist()
    assert len(rows) == count
    for row in rows:
        forged.samples["broken_by"][row], forged.samples["guess"][row] = ROBUST, forged.samples["label"][row]
        forged.samples["margin"][row] = forged.samples["lead"][row] = 0.0
        forged.samples["passes"][row] = 0
        forged.drop(row)
    forged.recount()
    forged.signs["broken"].zero_()
    for done in forged.record["stages"]:
        done["witnessed"] = min(done["witnessed"], done["attacked"])
    forged.conclude()
    (folder / "report.html").write_text(page_of(folder))
    return rows


def audited(folder: Path, count: int, salt: str = "s", suite: str = "quick", model: nn.Module | None = None) -> Checked:
    return verify(folder, model=model or a_model(), source=data(), reattack=count, suite=suite, salt=salt)


def test_honest_evidence_passes(honest: Path) -> None:
    claimed = read_bundle(honest).record["robust_correct"]
    assert claimed > 90
    found = audited(honest, 80).audit
    assert found is not None
    assert (found.claimed, found.drawn, found.broken, found.trust, found.rejected) == (claimed, 80, (), "sound", False)
    assert found.text.startswith("suite quick, the evidence's own (salt s) broke none of 80: with 95% confidence less")
    assert found == audited(honest, 80).audit, "the same salt is the same audit"
    whole = audited(honest, 10**6).audit
    assert whole is not None
    assert (whole.drawn, whole.low, whole.high) == (claimed, 0, 0)
    assert f"these are all {claimed} samples that are claimed to be robust" in whole.text


def test_what_no_checksum_finds_the_audit_finds(honest: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(honest, tmp_path / "forged")
    rows = declare_robust(copy, FORGED)
    assert verify(copy, model=a_model(), source=data()).page == "", "nothing else contradicts it, not even its page"
    for salt in ("a", "b", "c"):
        with pytest.raises(DamagedError, match=r"broke \d+ of 100 \(samples") as caught:
            audited(copy, 100, salt)
        said = str(caught.value)
        broken = [
            int(word) for word in said.split("(samples ", 1)[1].split(")", 1)[0].replace(" and more", "").split(", ")
        ]
        assert broken
        assert set(broken) <= set(rows), "only forged samples are broken"
        assert f"(salt {salt})" in said
        assert "more than chance explains if 2% of the claims are false" in said


def test_one_false_claim_is_reported_and_not_enough_to_reject(honest: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(honest, tmp_path / "forged")
    rows = declare_robust(copy, 1)
    found = audited(copy, 10**6).audit
    assert found is not None
    assert found.broken == tuple(rows)
    assert not found.rejected
    assert "other noise may break a few samples of honest evidence" in found.text


def test_flags_that_were_forged_to_unraised(tmp_path: Path) -> None:
    """The pilot's measurements were changed, where only an attack could tell."""

    class Fuzzy(nn.Module):
        """Its gradient leads nowhere: it is that of another function."""

        def __init__(self) -> None:
            super().__init__()
            self.net = a_model()

        def forward(self, x: Tensor) -> Tensor:
            other = x.roll(2, dims=-1)
            out: Tensor = self.net(x.detach() + (other - other.detach()))
            return out

    threat, out = ThreatModel(eps=EPS), tmp_path / "e"
    found = evaluate(Fuzzy(), data(), None, threat, quick(threat), out=out, gallery=0)
    assert found.verdict is not None
    assert found.verdict.trust == "suspect"
    forged = Forged(out)
    for name, column in forged.signs.items():
        if name not in ("rows", "zero gradients") and not name.endswith(", of"):
            forged.signs[name] = torch.zeros_like(column)
    forged.conclude()
    assert forged.record["verdict"]["trust"] == "sound"
    verify(out, model=Fuzzy(), source=data())
    with pytest.raises(DamagedError, match="the evidence says sound, and the audit's own evaluation is suspect"):
        audited(out, 40, model=Fuzzy())


def test_the_draw_depends_on_seal_and_salt() -> None:
    rows = torch.arange(50, 150)
    one, two = drawn_by(b"a", rows), drawn_by(b"b", rows)
    assert torch.equal(one, drawn_by(b"a", rows))
    assert not torch.equal(one, two)
    assert torch.equal(one.sort().values, rows)


@pytest.mark.parametrize(
    ("broken", "drawn", "claimed"), [(0, 10, 30), (0, 1, 2), (3, 10, 30), (10, 10, 30), (1, 29, 30)]
)
def test_the_interval_is_exact(broken: int, drawn: int, claimed: int) -> None:
    """Compared with a search through every number of false claims."""
    tail = 0.05 if broken == 0 else 0.025
    fits = [
        false
        for false in range(broken, claimed - (drawn - broken) + 1)
        if hypergeom.cdf(broken, claimed, false, drawn) > tail
        and (broken == 0 or hypergeom.sf(broken - 1, claimed, false, drawn) > tail)
    ]
    assert false_claims(broken, drawn, claimed) == (min(fits), max(fits))
    assert false_claims(broken, claimed, claimed) == (broken, broken)


def an_audit(**changes: Any) -> Audit:
    given: dict[str, Any] = {
        "claimed": 1140,
        "drawn": 100,
        "broken": (),
        "suite": "standard",
        "own": False,
        "salt": "x",
    }
    given = {**given, "trust": "sound", "reasons": (), "contradicted": False, **changes}
    low, high = false_claims(len(given["broken"]), given["drawn"], given["claimed"])
    return Audit(**given, low=low, high=high)


def test_the_sentences() -> None:
    start = "suite standard, not the evidence's own (salt x) broke none of 100: "
    assert an_audit().text == start + "with 95% confidence less than 2.9% of the claimed 1,140 are false"
    few = an_audit(broken=(4, 9))
    assert not few.rejected
    assert "broke 2 of 100 (samples 4, 9)" in few.text
    assert few.text.endswith("another suite may break a few samples of honest evidence")
    many = an_audit(broken=tuple(range(6)))
    assert many.rejected
    assert not an_audit(broken=tuple(range(5))).rejected
    assert not an_audit(claimed=22, drawn=10, broken=(3,)).rejected, "one of few may be chance"
    assert an_audit(claimed=22, drawn=10, broken=(3, 4)).rejected
    doubted = an_audit(trust="suspect", reasons=("no gradient",), contradicted=True)
    assert doubted.rejected
    assert doubted.text.endswith("the evidence says sound, and the audit's own evaluation is suspect; no gradient")
    nothing = Audit(**{**vars(an_audit()), "claimed": 0, "drawn": 0, "high": 0})
    assert nothing.text == "no sample is claimed to be robust, so there is nothing to attack"


def test_mistakes(honest: Path) -> None:
    with pytest.raises(UserError, match="--reattack: expected the model and the data with it"):
        verify(honest, reattack=10)
    for count in (0, -1, True, 1.5):
        with pytest.raises(UserError, match="--reattack: expected a number of samples, at least 1"):
            audited(honest, count)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="unknown suite 'fats'"):
        audited(honest, 10, suite="fats")


def test_an_audit_leaves_the_model_as_it_was(honest: Path) -> None:
    model = a_model().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    audited(honest, 3, model=model.eval())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
