"""The verdict from the command line: evaluate with suites, going on after an interruption, verify, compare, gate."""

from __future__ import annotations

import gc
import json
import math
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from steelman.attacks import PGD
from steelman.data import DATASETS
from steelman.errors import UserError
from steelman.evaluation.result import Evaluation, interval
from steelman.evaluation.stages import Stage, Suite
from steelman.evaluation.suites import SUITES
from steelman.evidence.bundle import read_bundle, seal_of
from steelman.evidence.ledger import Work
from steelman.threat import ThreatModel
from tests import test_bad_input, test_cli
from tests.test_bad_input import Fails
from tests.test_cli import Command
from tests.training_helpers import steelman, wait_for

command, fails = test_cli.command, test_bad_input.fails
HERE = "tests.test_cli_verdict"
SAMPLES = 40
COMMON = ("--data", "digits", "--eps", "0.05", "--samples", str(SAMPLES))
SUITE = ("--suite", "tiny", "--batch-size", "16")
STAGES = ["first", "second"]


def nearest_mean(noise: float = 0.0) -> nn.Module:
    """Linear: z_k = m_k . x - |m_k|^2 / 2, the class of the nearest mean; with `noise` on the means a worse one."""
    train = DATASETS["digits"]().train
    x, y = train.images(torch.arange(len(train))).flatten(1), train.labels
    means = torch.stack([x[y == k].mean(dim=0) for k in range(10)])
    means += noise * torch.rand(means.shape, generator=torch.Generator().manual_seed(0))
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    net.load_state_dict({"1.weight": means, "1.bias": -(means**2).sum(dim=1) / 2})
    return net


def noisy_mean() -> nn.Module:
    return nearest_mean(0.5)


def hidden_gradient() -> nn.Module:
    """Its input is rounded, so it has no gradient: nothing that climbs gets anywhere."""

    class Rounded(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x * 8).round() / 8

    return nn.Sequential(Rounded(), nearest_mean())


def tiny(_: ThreatModel) -> Suite:
    """Two quick stages."""
    stages = (
        Stage(name=STAGES[0], attack=PGD(steps=1, start="zero")),
        Stage(name=STAGES[1], attack=PGD(steps=3, loss="margin"), share=0.5),
    )
    return Suite(name="tiny", stages=stages)


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SUITES, "tiny", tiny)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Evidence on two models, made once."""
    from rich.console import Console

    from steelman.cli.measure import measure

    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SUITES, "tiny", tiny)
        for name in ("nearest_mean", "noisy_mean"):
            measure(
                f"{HERE}:{name}",
                data="digits",
                root=None,
                norm=None,
                eps="0.05",
                suite="tiny",
                attacks=[],
                weights=None,
                layout=None,
                head="linear",
                options=[],
                samples=SAMPLES,
                batch_size=16,
                seed=0,
                workers=0,
                out=folder / name,
                console=Console(quiet=True),
            )
    return folder


@pytest.fixture
def bundle(made: Path, tmp_path: Path) -> Path:
    """A copy, to be spoiled."""
    shutil.copytree(made / "nearest_mean", tmp_path / "bundle")
    return tmp_path / "bundle"


def files(folder: Path) -> dict[str, bytes]:
    """The evidence itself: what is sealed."""
    return {
        path.name: path.read_bytes()
        for path in folder.iterdir()
        if path.name.startswith(("evidence", "samples", "adversarial", "gallery"))
    }


def changed(folder: Path, key: str, value: object) -> None:
    """Claim something else, and seal it anew, as a forger would."""
    record = json.loads((folder / "evidence.json").read_text())
    part = record
    *path, last = key.split(".")
    for name in path:
        part = part[name]
    part[last] = value
    record["seal"] = seal_of(record)
    (folder / "evidence.json").write_text(json.dumps(record, indent=1, sort_keys=True))


def withstand(net: nn.Module, eps: float) -> tuple[int, int]:
    """(right, at least as many as withstand): no linf ball of radius eps reaches z_y = z_k for any k."""
    test = DATASETS["digits"]().test
    x, y = test.images(torch.arange(SAMPLES)).flatten(1), test.labels[:SAMPLES]
    state = net.state_dict()
    w, b = state["1.weight"], state["1.bias"]
    z = x @ w.T + b
    apart = (z.gather(1, y[:, None]) - z) - eps * (w[y][:, None, :] - w).abs().sum(dim=-1)
    apart[torch.arange(SAMPLES), y] = math.inf
    return int((z.argmax(dim=1) == y).sum()), int((apart.amin(dim=1) > 0).sum())


def test_a_verdict_with_its_evidence(command: Command, tmp_path: Path) -> None:
    code, out, err = command("evaluate", f"{HERE}:nearest_mean", *COMMON, *SUITE)
    assert (code, err) == (0, "")
    place = Path("runs/evaluations/linf-0.05")
    lines = out.splitlines()
    assert lines[0] == f"evidence: {place}", "where it is going to be is said first"
    assert lines[-1] == f"evidence: {place}, seal {read_bundle(place).seal}"
    assert f"report: {place}/report.html" in lines
    assert (place / "report.html").is_file()
    assert not (place / "work").exists()
    found = Evaluation.load(place)
    right, least = withstand(nearest_mean(), 0.05)
    verdict = found.verdict
    assert verdict is not None
    assert verdict.suite == "tiny"
    assert found.score("clean").correct == right > 30
    assert least <= verdict.correct < right - 3, "the attacks broke something, and nothing that cannot be broken"
    low, high = interval(verdict.correct, SAMPLES)
    shown = f"{100 * verdict.correct / SAMPLES:.1f}% [{100 * low:.1f}, {100 * high:.1f}]"
    assert re.search(rf"Robust accuracy {re.escape(shown)} .*n = {SAMPLES}", out)
    assert f"Trust: {verdict.trust}" in out
    for reason in verdict.reasons:
        assert reason in " ".join(out.split())
    for stage in found.stages:
        passes = [count / max(stage.attacked, 1) for count in (stage.forwards, stage.backwards)]
        (row,) = (line.split() for line in lines if line.split()[:1] == [stage.name])
        assert row[1:4] == [str(stage.attacked), str(stage.broken), str(stage.left)]
        assert [float(cell) for cell in row[4:6]] == [pytest.approx(count, abs=0.06) for count in passes]
        assert float(row[6]) >= 0
    assert [stage.name for stage in found.stages] == STAGES
    assert found.stages[0].broken > 3
    # A second time is a second evaluation: the first is finished, and stays.
    before = files(place)
    assert command("evaluate", f"{HERE}:nearest_mean", *COMMON, *SUITE)[0] == 0
    assert files(place) == before == files(place.with_name("linf-0.05-2"))


def test_attacks_by_label_are_each_run_on_every_sample(command: Command, tmp_path: Path) -> None:
    code, out, err = command(
        "evaluate", f"{HERE}:nearest_mean", *COMMON, "--attack", "fgsm", "--attack", "pgd:steps=2", "--out", "o"
    )
    assert (code, err) == (0, "")
    found = Evaluation.load(tmp_path / "o")
    assert [score.name for score in found.scores] == ["clean", "fgsm", "pgd:steps=2", "worst case"]
    assert {stage.attacked for stage in found.stages} == {found.score("clean").correct}
    assert read_bundle(tmp_path / "o").record["suite"]["protocol"]
    assert "upper bound" in out
    # Nobody asked whether these attacks work on this model, so a gate does not open for them.
    code, _, err = command("gate", "o", "--min-robust", "0")
    assert code == 1
    assert "only given attacks were run" in err
    assert command("gate", "o", "--min-robust", "0", "--allow-suspect")[0] == 0


def test_the_default_suite_is_standard(command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(SUITES, "standard", tiny)
    assert command("evaluate", f"{HERE}:nearest_mean", *COMMON, "--out", "o")[0] == 0
    assert [stage.name for stage in Evaluation.load(tmp_path / "o").stages] == STAGES


def stopping(monkeypatch: pytest.MonkeyPatch, after: int) -> list[str]:
    """Let `after` batches be computed, then interrupt; the list holds the names of those that are."""
    computed: list[str] = []
    batch = Work.batch

    def interrupting(self: Work, name: str, compute: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        def counted() -> dict[str, Tensor]:
            if len(computed) == after:
                raise KeyboardInterrupt
            computed.append(name)
            return compute()

        return batch(self, name, counted)

    monkeypatch.setattr(Work, "batch", interrupting)
    return computed


@pytest.mark.parametrize("out", [(), ("--out", "o")], ids=["default", "out"])
@pytest.mark.parametrize("after", [1, 4])
def test_the_same_command_goes_on(
    after: int, out: tuple[str, ...], command: Command, monkeypatch: pytest.MonkeyPatch, made: Path
) -> None:
    words = ("evaluate", f"{HERE}:nearest_mean", *COMMON, *SUITE, *out)
    place = Path(out[1]) if out else Path("runs/evaluations/linf-0.05")
    with monkeypatch.context() as patch:
        computed = stopping(patch, after)
        code, said, err = command(*words)
        assert (code, err) == (130, "error: interrupted\n")
        assert len(computed) == after
        assert f"the finished part is kept in {place}; the same command goes on from there" in said
    gc.collect()  # a process that ends lets go of the folder; here the frames of the interruption have to
    assert (place / "work").is_dir()
    assert not (place / "evidence.json").exists()
    with monkeypatch.context() as patch:
        rest = stopping(patch, 10**6)
        code, said, err = command(*words)
        assert (code, err) == (0, "")
        assert said.startswith(f"evidence: {place} (begun before; going on where it stopped)\n")
        assert not {*computed} & {*rest}, "nothing is computed twice"
    assert files(place) == files(made / "nearest_mean")
    assert [path.name for path in place.parent.iterdir() if path.name.startswith("linf")] == (
        [] if out else [place.name]
    )


@pytest.mark.parametrize("out", [(), ("--out", "o")], ids=["default", "out"])
def test_killed_before_the_page_it_is_only_the_page_that_is_made(
    out: tuple[str, ...], command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("evaluate", f"{HERE}:nearest_mean", *COMMON, *SUITE, *out)
    place = Path(out[1]) if out else Path("runs/evaluations/linf-0.05")
    _, first, _ = command(*words)
    page, evidence = (place / "report.html").read_bytes(), files(place)
    (place / "report.html").unlink()
    with monkeypatch.context() as patch:
        patch.setattr(Work, "batch", lambda *_: pytest.fail("computed again"))
        code, said, err = command(*words)
    assert (code, err) == (0, "")
    assert said == first.replace(f"evidence: {place}\n", f"evidence: {place} (finished before, without its report)\n")
    assert (place / "report.html").read_bytes() == page
    assert files(place) == evidence
    (place / "report.html").unlink()
    other = command(*words, "--seed", "1")
    if out:
        assert other[0] == 2
        assert "already holds a report (evidence.json)" in other[2]
    else:
        assert other[1].startswith(f"evidence: {place}-2\n")


@pytest.mark.timeout(240)
def test_a_process_that_is_killed(tmp_path: Path) -> None:
    """SIGKILL between two batches of a real process, then the same command in another."""
    words = ("evaluate", f"{HERE}:nearest_mean", *COMMON, "--batch-size", "4", "--attack", "pgd:steps=10,restarts=3")
    place = tmp_path / "runs" / "evaluations" / "linf-0.05"
    killed = steelman(tmp_path, *words, name="killed")
    wait_for(lambda: len(list(place.glob("work/00-*.batch"))) >= 2, [killed])
    killed.signal(signal.SIGKILL)
    assert killed.end() == 128 + signal.SIGKILL, killed.error
    assert list(place.glob("work/00-*.batch"))
    assert not (place / "evidence.json").exists()
    again = steelman(tmp_path, *words, name="again")
    assert again.end() == 0, again.error
    assert "going on where it stopped" in again.output
    whole = steelman(tmp_path, *words, "--out", "whole", name="whole")
    assert whole.end() == 0, whole.error
    assert files(place) == files(tmp_path / "whole")
    assert not place.with_name("linf-0.05-2").exists()


def test_an_unfinished_evaluation_of_something_else(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("evaluate", f"{HERE}:nearest_mean", *COMMON, *SUITE)
    with monkeypatch.context() as patch:
        stopping(patch, 2)
        assert command(*words)[0] == 130
    gc.collect()
    base = Path("runs/evaluations/linf-0.05")
    for place, other in enumerate((("--seed", "1"), ("--samples", "39"), ("--batch-size", "17")), 2):
        code, out, err = command(*words, *other)
        assert (code, err) == (0, "")
        assert out.startswith(f"evidence: {base}-{place}\n"), "its own place"
    code, _, err = command(*words, "--seed", "1", "--out", str(base))
    assert code == 2
    assert "holds an unfinished evaluation of something else (seed was 0, is 1)" in err
    assert (base / "work").is_dir()
    code, out, _ = command(*words)
    assert code == 0
    assert out.startswith(f"evidence: {base} (begun before")


def test_a_time_that_runs_out(command: Command, tmp_path: Path) -> None:
    code, out, err = command("evaluate", f"{HERE}:nearest_mean", *COMMON, *SUITE, "--minutes", "1e-9", "--out", "o")
    assert (code, err) == (0, "")
    found = Evaluation.load(tmp_path / "o")
    assert found.verdict is not None
    assert not found.verdict.complete
    assert "the time ran out" in out
    code, _, err = command("gate", "o", "--min-robust", "0")
    assert code == 1
    assert "the evaluation is not complete" in err


def twelve_outputs() -> nn.Module:
    """Two classes more than there are digits."""
    net = nearest_mean()
    return nn.Sequential(net, nn.ConstantPad1d((0, 2), -1e3))


def test_a_model_of_more_outputs_than_classes(command: Command, tmp_path: Path) -> None:
    words = ("evaluate", f"{HERE}:twelve_outputs", *COMMON, *SUITE, "--out", "o")
    code, _, err = command(*words)
    assert code == 2
    assert "the model has 12 outputs, and the data have 10 classes (0, 1, 2, 3, ...)" in err
    code, _, err = command(*words, "--more-outputs")
    assert (code, err) == (0, "")
    assert len(Evaluation.load(tmp_path / "o").classes) == 12


EVALUATING: dict[str, tuple[tuple[str, ...], str]] = {
    "a suite and attacks": (("--suite", "fast", "--attack", "fgsm"), "--suite and --attack: expected one of them"),
    "a misspelt suite": (("--suite", "standart"), "unknown suite 'standart' (did you mean 'standard'?)"),
    "no radius": (("--suite", "tiny", "--eps", "0"), "eps: expected a radius above 0, got 0"),
    "no time": (("--suite", "tiny", "--minutes", "0"), "minutes: expected a time above 0, got 0"),
    "negative time": (("--suite", "tiny", "--minutes", "-1"), "minutes: expected a time above 0"),
    "time that is none": (("--suite", "tiny", "--minutes", "nan"), "minutes: expected a time above 0"),
}


@pytest.mark.parametrize("name", EVALUATING)
def test_evaluations_that_cannot_start_leave_nothing(name: str, fails: Fails, tmp_path: Path) -> None:
    options, expected = EVALUATING[name]
    assert expected in fails("evaluate", f"{HERE}:nearest_mean", *COMMON, *options)
    assert list(tmp_path.iterdir()) == []


# verify


def test_verify_says_what_it_checked(command: Command, made: Path) -> None:
    place = str(made / "nearest_mean")
    seal, broken = read_bundle(Path(place)).seal, len(list(broken_rows(Path(place))))
    code, out, err = command("verify", place)
    assert (code, err) == (0, "")
    assert out.startswith(f"accepted: {place}, seal {seal}\n")
    assert re.search(r"not checked: .*give --data", out)
    assert re.search(r"not checked: .*give --model", out)
    code, out, _ = command("verify", place, "--data", "digits")
    assert code == 0
    assert re.search(r"  checked: .*within the radius", out)
    assert re.search(r"not checked: .*give --model", out)
    code, out, _ = command("verify", place, "--model", f"{HERE}:nearest_mean", "--data", "digits")
    assert code == 0
    assert re.search(r"  checked: .*the model answers each image as recorded", out)
    assert re.search(rf"\d+ of the {broken} samples stay broken when", out)
    assert "not checked: no other attack breaks one of the" in out
    assert "give --" not in out


def test_verify_compares_the_published_seal(command: Command, fails: Fails, made: Path) -> None:
    place = str(made / "nearest_mean")
    seal = read_bundle(Path(place)).seal
    code, out, _ = command("verify", place, "--seal", seal[:32])
    assert code == 0
    assert "  checked: the seal is the published one" in out
    assert "the seal is the published one" not in command("verify", place)[1]
    for words in (("verify", place), ("gate", place, "--min-robust", "0")):
        assert command(*words, "--seal", seal)[0] == 0
        code, out, err = command(*words, "--seal", "0" * 64)
        assert (code, out) == (1, "")
        assert f"the evidence has the seal {seal}, and the published one is {'0' * 64}" in err
        assert "--seal: expected 32 to 64 digits" in fails(*words, "--seal", "abc")


def test_verify_audits(command: Command, fails: Fails, made: Path) -> None:
    place = str(made / "nearest_mean")
    words = ("verify", place, "--model", f"{HERE}:nearest_mean", "--data", "digits")
    claimed = read_bundle(Path(place)).record["robust_correct"]
    code, out, err = command(*words, "--reattack", "5", "--suite", "tiny", "--salt", "mine")
    assert (code, err) == (0, "")
    assert "  audit: suite tiny, the evidence's own (salt mine) broke none of 5: with 95% confidence less than" in out
    assert "only an audit can show that" not in out
    salts = [re.search(r"\(salt (\w+)\)", command(*words, "--reattack", "5", "--suite", "tiny")[1]) for _ in range(2)]
    assert salts[0] is not None
    assert salts[1] is not None
    assert salts[0][1] != salts[1][1], "without a salt, it is random and printed"
    assert f"of the claimed {claimed} are false" in out
    assert "--suite and --salt: expected --reattack with them" in fails(*words, "--salt", "mine")
    assert "--reattack: expected the model and the data with it" in fails("verify", place, "--reattack", "5")
    assert "--reattack: expected a number of samples" in fails(*words, "--reattack", "0")


def test_a_suite_of_ones_own_is_named_and_does_not_pass_the_gate(
    command: Command, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = str(made / "nearest_mean")
    assert "note: the suite" not in command("verify", place)[1]
    monkeypatch.delitem(SUITES, "tiny")
    code, out, _ = command("verify", place)
    assert code == 0
    assert "  note: the suite 'tiny' is not one of steelman's" in out
    code, _, err = command("gate", place, "--min-robust", "0")
    assert code == 1
    assert "the suite 'tiny' is not one of steelman's, so nobody knows what it tries" in err
    assert command("gate", place, "--min-robust", "0", "--allow-suspect")[0] == 0


def test_the_pages_of_an_evaluation_and_of_a_run_are_checked(command: Command, bundle: Path, a_run: Path) -> None:
    for place in (bundle, a_run):
        page = place / "report.html"
        text = page.read_text()
        assert command("verify", str(place))[0] == 0
        page.write_text(text.replace("</body>", "<script>alert(1)</script></body>"))
        code, _, err = command("verify", str(place))
        page.write_text(text)
        assert code == 1
        assert "report.html is not the page of this evidence" in err
    (bundle / "read me.txt").write_text("x")
    assert "note: these files are no part of the evidence: read me.txt" in command("verify", str(bundle))[1]


def broken_rows(folder: Path) -> Tensor:
    rows: Tensor = load_file(folder / "adversarial-0000.safetensors")["rows"]
    return rows


def repaint(folder: Path) -> None:
    """Another pixel in one image, and everything sealed anew."""
    import hashlib

    path = folder / "adversarial-0000.safetensors"
    part = load_file(path)
    part["images"][0, 0, 3, 3] = 1 - part["images"][0, 0, 3, 3]
    save_file(part, path)
    record = json.loads((folder / "evidence.json").read_text())
    changed(folder, "files", {**record["files"], path.name: hashlib.sha256(path.read_bytes()).hexdigest()})


def cut(folder: Path) -> None:
    path = folder / "samples.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "an image": (repaint, "outside the threat model"),
    "a count": (lambda f: changed(f, "robust_correct", 40), "robust_correct is 40, and the samples say"),
    "the verdict": (lambda f: changed(f, "verdict.correct", 40), "verdict.correct is no key of this file"),
    "the weights": (lambda f: changed(f, "weights", "0" * 64), "the model's weights are not those"),
    "a text": (lambda f: (f / "evidence.json").write_text("{"), "evidence.json is damaged"),
    "the samples": (cut, "samples.safetensors was changed"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_verify_rejects(name: str, command: Command, bundle: Path) -> None:
    damage, expected = DAMAGES[name]
    damage(bundle)
    code, out, err = command("verify", "bundle", "--model", f"{HERE}:nearest_mean", "--data", "digits")
    assert (code, out) == (1, "")
    assert err.startswith("rejected: ")
    assert expected in err
    assert len(err.splitlines()) == 1


def test_verify_rejects_another_model_and_other_data(command: Command, bundle: Path) -> None:
    code, _, err = command("verify", "bundle", "--model", f"{HERE}:noisy_mean", "--data", "digits")
    assert code == 1
    assert "the model's weights are not those that were evaluated" in err


def test_verify_with_a_file_of_weights(command: Command, bundle: Path, tmp_path: Path) -> None:
    save_file(nearest_mean().state_dict(), tmp_path / "w.safetensors")
    words = ("verify", "bundle", "--model", f"{HERE}:noisy_mean", "--data", "digits", "--weights", "w.safetensors")
    assert command(*words)[0] == 0


@pytest.fixture(scope="module")
def a_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with its own verdict."""
    from rich.console import Console

    from steelman import recipe as recipes
    from steelman.training import run

    tiny_run = ("training.epochs=1", "validation.samples=20", "evaluation.samples=30", "objective=standard")
    how = ("evaluation.suite=fast", "compute.accelerator=cpu", "model={name: mlp, width: 16}")
    folder = tmp_path_factory.mktemp("runs") / "mine"
    source, origin = recipes.read("digits-pgd-at", (*tiny_run, *how))
    run.train(source, folder, console=Console(quiet=True), origin=origin, show=False)
    return folder


def test_a_runs_folder_stands_for_its_own_verdict(
    command: Command, a_run: Path, made: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    code, out, err = command("verify", str(a_run))
    assert (code, err) == (0, "")
    assert out.startswith(f"accepted: {a_run}/verdict, seal ")
    assert re.search(r"  checked: .*the model answers each image as recorded", out)
    assert "give --" not in out
    assert Evaluation.load(a_run).total == 30
    code, _, err = command("gate", str(a_run), "--min-robust", "0.99")
    assert code == 1
    assert err.startswith("failed: robust accuracy")
    shutil.copytree(a_run, tmp_path / "other")
    code, out, err = command("compare", f"a={a_run}", "b=other", "--out", "page.html")
    assert (code, err) == (0, "")
    assert "a and b have the same weights" in out
    # A verdict on a smaller radius than the run's own is no mistake, but it is said.
    described = json.loads((tmp_path / "other" / "model.json").read_text())
    told = "the run's model.json says"
    assert told not in command("verify", "other")[1]
    wider = {**described, "threat": {**described["threat"], "eps": 2 * described["threat"]["eps"]}}
    (tmp_path / "other" / "model.json").write_text(json.dumps(wider))
    assert told in command("verify", "other/verdict", "--model", "other")[1]
    # Where its data cannot be had, nothing is accepted: a stranger's folder could name data that nobody has.
    described["data"] = {"name": "mnist", "options": {"root": str(tmp_path / "nothing")}}
    (tmp_path / "other" / "model.json").write_text(json.dumps(described))
    code, out, err = command("verify", "other")
    assert (code, out) == (2, "")
    assert "the run's own model and data are needed: mnist is not on this machine" in err
    assert err.endswith("To check the evidence alone: steelman verify other/verdict\n")
    assert re.search(r"not checked: the weights are .*: give --model", command("verify", "other/verdict")[1])
    assert command("verify", "other", "--data", "mnist")[0] == 2, "what is asked for and cannot be had is a mistake"
    assert command("verify", "other", "--data", "digits")[0] == 0
    # Another model's verdict in its place is rejected by its own weights.
    shutil.rmtree(tmp_path / "other" / "verdict")
    shutil.copytree(made / "nearest_mean", tmp_path / "other" / "verdict")
    code, _, err = command("verify", "other", "--data", "digits")
    assert code == 1
    assert "is evidence of another model than other/model.safetensors" in err
    for words in (("gate", "other", "--min-robust", "0"), ("compare", f"a={a_run}", "b=other")):
        code, _, err = command(*words)
        assert code == 2
        assert "is evidence of another model than other/model.safetensors" in err
    with pytest.raises(UserError, match="is evidence of another model than"):
        Evaluation.load(tmp_path / "other")


def test_a_runs_folder_without_a_verdict_names_its_evaluations(fails: Fails, made: Path, tmp_path: Path) -> None:
    place = tmp_path / "run" / "evaluations" / "linf-0.05"
    place.parent.mkdir(parents=True)
    shutil.copytree(made / "nearest_mean", place)
    for words in (("verify", "run"), ("gate", "run", "--min-robust", "0"), ("compare", "run", str(place))):
        assert "it has these evaluations, name one: run/evaluations/linf-0.05" in fails(*words)


def test_mistakes_at_verify(fails: Fails, bundle: Path, tmp_path: Path) -> None:
    assert "no evidence in nowhere: evidence.json is missing there and in its folders 'verdict' and 'attacks'" in fails(
        "verify", "nowhere"
    )
    assert "expected --model with them" in fails("verify", "bundle", "--weights", "w.safetensors")
    assert "--root: expected --data with it" in fails("verify", "bundle", "--root", "here")
    assert "--data: expected a dataset" in fails("verify", "bundle", "--model", f"{HERE}:nearest_mean")
    assert "unknown dataset 'digit'" in fails("verify", "bundle", "--data", "digit")
    assert "no run at runs/none" in fails("verify", "bundle", "--model", "runs/none")
    (bundle / "evidence.json").write_text('{"format": 99}')
    assert "expected evidence of format 3, got 99" in fails("verify", "bundle")


# compare


def test_compare_prints_a_table_and_a_page(command: Command, made: Path, tmp_path: Path) -> None:
    one, other = made / "nearest_mean", made / "noisy_mean"
    code, out, err = command("compare", f"means={one}", str(other), "--out", "page.html")
    assert (code, err) == (0, "")
    samples = [read_bundle(place).samples["broken_by"] == -1 for place in (one, other)]
    first, second = int((samples[0] & ~samples[1]).sum()), int((samples[1] & ~samples[0]).sum())
    assert first > 5
    n = first + second
    p = min(1.0, 2 * sum(math.comb(n, k) for k in range(min(first, second) + 1)) / 2**n)
    rows = {line.split("  ")[0]: line for line in out.splitlines()}
    for name, held in (("means", samples[0]), (f"{HERE}:noisy_mean", samples[1])):
        low, high = interval(int(held.sum()), SAMPLES)
        assert f"{100 * held.double().mean():.1f}% [{100 * low:.1f}, {100 * high:.1f}]" in rows[name]
        assert rows[name].split()[-2:] == ["sound", "tiny"]
    cells = rows[f"means, {HERE}:noisy_mean"].split()[2:]
    assert cells[:3] == [str(SAMPLES), str(first), str(second)]
    assert float(cells[4]) == pytest.approx(p, rel=0.01)
    assert "corrected p" not in out
    page = (tmp_path / "page.html").read_text()
    assert f"of {SAMPLES} samples in common, {first} are robust for means alone" in page
    assert "report: page.html" in out
    # More than two, a folder, and a default place that is never taken twice.
    shutil.copytree(one, tmp_path / "again")
    code, out, _ = command("compare", f"a={one}", f"b={other}", "c=again", "--out", "folder")
    assert code == 0
    assert "corrected p" in out
    assert "note: a and c have the same weights" in out
    assert (tmp_path / "folder" / "report.html").is_file()
    for place in ("linf-0.05", "linf-0.05-2"):
        assert f"report: runs/comparisons/{place}/report.html" in command("compare", str(one), str(other))[1]
    # Two of one model go by their folders.
    code, out, _ = command("compare", str(one), "again")
    assert code == 0
    assert f"{one}, again" in out


def test_what_compare_refuses(fails: Fails, made: Path, bundle: Path, tmp_path: Path) -> None:
    one, other = str(made / "nearest_mean"), str(made / "noisy_mean")
    assert "at least two evaluations to compare, got 1" in fails("compare", one)
    assert "no evidence in nowhere" in fails("compare", one, "nowhere")
    assert "two evaluations have the name 'a'" in fails("compare", f"a={one}", f"a={other}")
    assert "two evaluations have the name" in fails("compare", one, one)
    assert "expected an evaluation as NAME=FOLDER, got '=x'" in fails("compare", one, "=x")
    (tmp_path / "page.html").write_text("mine")
    assert "page.html exists already" in fails("compare", one, other, "--out", "page.html")
    changed(bundle, "robust_correct", 40)
    assert "robust_correct is 40" in fails("compare", one, "bundle", "--out", "none.html")
    assert not (tmp_path / "none.html").exists()
    assert not (tmp_path / "runs").exists()


# gate


def test_gate_is_about_the_lower_end(command: Command, made: Path) -> None:
    place = made / "nearest_mean"
    record = read_bundle(place).record
    assert record["verdict"]["trust"] == "sound"
    low, high = interval(record["robust_correct"], SAMPLES)
    clean, _ = interval(record["clean_correct"], SAMPLES)
    code, out, err = command("gate", str(place), "--min-robust", str(low))
    assert (code, err) == (0, "")
    assert out.startswith(f"passed: robust accuracy {record['robust_correct'] / SAMPLES:.2%}, 95% interval {low:.2%}")
    for least in (low + 1e-9, record["robust_correct"] / SAMPLES, high):
        code, out, err = command("gate", str(place), "--min-robust", str(least))
        assert (code, out) == (1, "")
        assert err.startswith("failed: robust accuracy")
        assert len(err.splitlines()) == 1
    assert command("gate", str(place), "--min-robust", "0", "--min-clean", str(clean))[0] == 0
    code, _, err = command("gate", str(place), "--min-robust", "0", "--min-clean", str(clean + 1e-9))
    assert code == 1
    assert err.startswith("failed: clean accuracy")


def test_gate_is_about_trust(command: Command, made: Path, tmp_path: Path) -> None:
    """A model whose gradient is hidden stands well, and does not pass."""
    place = "masked"
    code, out, err = command("evaluate", f"{HERE}:hidden_gradient", *COMMON, *SUITE, "--out", place)
    assert (code, err) == (0, "")
    assert "Trust: suspect" in out
    honest, masked = (read_bundle(folder).record for folder in (made / "nearest_mean", tmp_path / place))
    assert masked["robust_correct"] > honest["robust_correct"], "it does look robust"
    code, _, err = command("gate", place, "--min-robust", "0")
    assert code == 1
    assert "the verdict is suspect" in err
    assert command("gate", place, "--min-robust", "0", "--allow-suspect")[0] == 0
    changed(tmp_path / place, "verdict.trust", "sound")
    code, _, err = command("gate", place, "--min-robust", "0")
    assert code == 2
    assert "the verdict is sound, and what follows from its flags is suspect" in err


def test_what_gate_cannot_read(fails: Fails, bundle: Path) -> None:
    assert "no evidence in nowhere" in fails("gate", "nowhere", "--min-robust", "0.5")
    for value in ("45", "-0.1", "nan"):
        assert "--min-robust: expected a share of the samples, 0 .. 1" in fails("gate", "bundle", "--min-robust", value)
    changed(bundle, "robust_correct", 40)
    assert "robust_correct is 40" in fails("gate", "bundle", "--min-robust", "0")
    (bundle / "evidence.json").write_text("{")
    assert "evidence.json is damaged" in fails("gate", "bundle", "--min-robust", "0")
