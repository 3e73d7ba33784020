"""Small sets: pilot and sentinel follow the size of the question, and the verdict says what they can miss."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from steelman.attacks import PGD
from steelman.data.source import ArraySource
from steelman.evaluation import evaluate as evaluating
from steelman.evaluation.masking import Pilot
from steelman.evaluation.stages import Stage, Suite
from steelman.evidence.bundle import DamagedError
from steelman.evidence.ledger import SMALL, sentinel_size
from steelman.evidence.verify import verify
from steelman.threat import ThreatModel
from tests.evidence_helpers import Forged, a_model, evaluate

THREAT = ThreatModel(eps=0.02)
QUICK = PGD(steps=2)
SUITE = Suite(
    name="watched",
    stages=(
        Stage(name="pilot", attack=Pilot(), role="pilot"),
        Stage(name="climb", attack=QUICK),
        Stage(name="sentinel", attack=QUICK, share=0.004, role="sentinel"),
    ),
)


@pytest.fixture(autouse=True)
def _no_self_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluating, "self_test", lambda *_: None)


def data(n: int) -> ArraySource:
    x = torch.rand(n, 1, 4, 4, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        return ArraySource(x, a_model()(x).argmax(dim=1))


@pytest.mark.parametrize(("n", "looked", "lie", "watched"), [(120, 16, "17%", 0), (700, 23, "12%", 2)])
def test_a_small_set_has_small_checks_and_says_so(n: int, looked: int, lie: str, watched: int, tmp_path: Path) -> None:
    found = evaluate(a_model(), data(n), None, THREAT, SUITE, out=tmp_path / "out", curve=False, gallery=0)
    stages = {stage.name: stage for stage in found.stages}
    robust = stages["climb"].left
    assert robust > n / 2
    assert stages["pilot"].attacked == looked
    assert stages["sentinel"].attacked == watched
    assert found.notes == (
        f"a small set: the pilot looked at {looked} samples, so it may miss a lie about under {lie}; "
        f"the sentinel attacked {watched} of {robust} robust samples",
    )
    assert verify(tmp_path / "out", model=a_model(), source=data(n)).robust == robust


def test_the_bound_is_exact() -> None:
    """A lie about this share of the samples is in none of those looked at with a chance of 5%."""
    assert pytest.approx(0.05, abs=0.002) == (1 - 0.17) ** 16
    assert pytest.approx(0.05, abs=0.004) == (1 - 0.12) ** 23


def test_from_a_thousand_on_nothing_is_weaker() -> None:
    source = data(SMALL)
    found = evaluate(a_model(), source, None, THREAT, SUITE, curve=False, gallery=0)
    stages = {stage.name: stage for stage in found.stages}
    assert stages["pilot"].attacked == 32
    assert stages["sentinel"].attacked == -(-stages["climb"].left // 250)
    assert found.notes == ()
    assert [sentinel_size(0.02, 1, n) for n in (SMALL - 1, SMALL)] == [0, 1]


def test_nobody_removes_the_note(tmp_path: Path) -> None:
    evaluate(a_model(), data(120), None, THREAT, SUITE, out=tmp_path / "out", curve=False, gallery=0)
    forged = Forged(tmp_path / "out")
    forged.record["notes"] = []
    forged.seal()
    with pytest.raises(DamagedError, match="the notes are not those"):
        verify(tmp_path / "out")
