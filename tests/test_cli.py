"""The command line: what it says, what it does, and that its examples work."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import nn

from steelman import __version__, cli
from steelman import recipe as recipes
from steelman.attacks import ATTACKS
from steelman.cli import listing
from steelman.cli.listing import Kind
from steelman.corruptions import CORRUPTIONS
from steelman.data import AUGMENTATIONS, DATASETS
from steelman.data.published import FETCHABLE
from steelman.evaluation.result import Evaluation
from steelman.evaluation.suites import SUITES
from steelman.heads import HEADS
from steelman.losses import LOSSES
from steelman.models import ACTIVATIONS, MODELS
from steelman.objectives import OBJECTIVES
from steelman.recipe_files import recipes as built_in
from steelman.schedules import SCHEDULES
from steelman.training import OPTIMIZERS, run

Command = Callable[..., tuple[int, str, str]]
TINY = (
    "training.epochs=1",
    "objective.attack.steps=1",
    "validation.samples=20",
    "evaluation.samples=20",
    "evaluation.suite=null",
    "evaluation.attacks={FGSM: fgsm}",
    "compute.accelerator=cpu",
)


def my_model(hidden: int = 8) -> nn.Module:
    """As factories make models: in train mode, where dropout makes their answers random."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.ReLU(), nn.Dropout(), nn.Linear(hidden, 10))


def my_trained_model() -> nn.Module:
    """As factories make models that read their weights: the random numbers drawn before are not seen."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))
    return net


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Run ``steelman ...`` in an empty folder: exit code, output, errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STEELMAN_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("COLUMNS", "140")

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["steelman", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        code = ended.value.code
        return (code if isinstance(code, int) else 0 if code is None else 1), out, err

    return call


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    source, origin = recipes.read("digits-pgd-at", TINY)
    run.train(source, folder, console=Console(quiet=True), origin=origin)
    return folder


COMMANDS = [
    ("train",),
    ("resume",),
    ("evaluate",),
    ("distance",),
    ("verify",),
    ("compare",),
    ("gate",),
    ("transfer",),
    ("list",),
    ("demo",),
    ("doctor",),
    ("data",),
    ("data", "list"),
    ("data", "get"),
]


@pytest.mark.parametrize("name", COMMANDS, ids=" ".join)
def test_help_of_every_command(name: tuple[str, ...], command: Command) -> None:
    code, out, err = command(*name, "--help")
    assert code == 0
    assert err == ""
    text = re.sub(r"[^\w\s/=.:,'\[\]()-]", " ", out)
    flat = " ".join(text.split())
    assert f"steelman {' '.join(name)} [OPTIONS]" in flat
    if name != ("data",):
        assert f"Example: steelman {' '.join(name)}" in flat
    assert len(out.splitlines()) < 60
    assert not re.search(r"\[/?(bold|dim|red|green|yellow|cyan)\]", out), "markup is not shown as text"


def test_help_shows_every_command_and_what_to_do_first(command: Command) -> None:
    code, out, _ = command("--help")
    assert code == 0
    assert "steelman demo" in out
    for name in (
        "train",
        "resume",
        "evaluate",
        "distance",
        "verify",
        "compare",
        "gate",
        "list",
        "data",
        "demo",
        "doctor",
    ):
        assert re.search(rf"\b{name}\b", out), name


def test_no_command_at_all_shows_help(command: Command) -> None:
    code, out, err = command()
    assert code in (0, 2)
    assert "Usage" in out + err


@pytest.mark.parametrize("name", ["train", "evaluate", "distance", "list"])
def test_the_example_in_the_help_is_right(name: str, command: Command, finished: Path) -> None:
    """The words of the example, made small, do what the help says."""
    _, out, _ = command(name, "--help")
    flat = " ".join(re.sub(r"[\u2500-\u257f]", " ", out).split())
    match = re.search(rf"Example: steelman ({name} .*?) (Arguments|Options|\*)", flat)
    assert match, flat
    words = shlex.split(match[1])
    expected = Path()
    if name == "train":
        words += TINY
        expected = Path("runs/mine/report.html")
    if name == "evaluate":
        assert words[1] == "runs/mine"
        words[1] = str(finished)
        words += ["--samples", "10", "--out", "out"]
        expected = Path("out/report.html")
    if name == "distance":
        assert words[1] == "runs/mine"
        words[1] = str(finished)
        words += ["--samples", "3", "--out", "out"]
        expected = Path("out/distances.json")
    code, _, err = command(*words)
    assert code == 0, err
    assert expected.exists()


def test_version(command: Command) -> None:
    assert command("--version")[:2] == (0, f"steelman {__version__}\n")


LISTS: dict[str, Any] = {
    "attacks": ATTACKS,
    "suites": SUITES,
    "corruptions": CORRUPTIONS,
    "objectives": OBJECTIVES,
    "models": MODELS,
    "heads": HEADS,
    "datasets": DATASETS,
    "augmentations": AUGMENTATIONS,
    "optimizers": OPTIMIZERS,
    "schedules": SCHEDULES,
    "losses": LOSSES,
    "activations": ACTIVATIONS,
    "recipes": built_in(),
}


def test_every_kind_is_listed_in_these_tests() -> None:
    assert {kind.value for kind in Kind} == LISTS.keys()


@pytest.mark.parametrize("kind", LISTS)
def test_lists_hold_every_entry_with_a_sentence(kind: str, command: Command) -> None:
    code, out, err = command("list", kind)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    for name in LISTS[kind]:
        (line,) = (line for line in lines if re.match(rf"{re.escape(name)}(\s|$)", line))
        assert len(line.split()) >= 3, f"{name} says what it is"


def test_lists_show_options_with_their_defaults(command: Command) -> None:
    _, out, _ = command("list", "attacks")
    assert "steps=20" in out
    _, out, _ = command("list", "optimizers")
    assert "momentum=0.9" in out
    _, out, _ = command("list", "augmentations")
    assert "pad=4" in out
    _, out, _ = command("list", "heads")
    assert "scale=15.0" in out
    assert "num_classes" not in out


def test_the_list_of_recipes_shows_papers_and_tables(command: Command) -> None:
    _, out, _ = command("list", "recipes")
    assert max(map(len, out.splitlines())) <= 140
    flat = {line.split()[0]: " ".join(line.split()) for line in out.splitlines() if not line.startswith(" ")}
    assert flat["he-cifar10-trades-he-s10-m0.2"].endswith("scale 10, margin 0.2. Pang et al. (2020), Table 9")
    assert flat["he-imagenet-resnet50-freeat-he"].endswith("Pang et al. (2020), Tables 4, 5")
    assert flat["rat-cifar10-at-1st-2nd"].endswith("Jin et al. (2023), Table 8")
    assert flat["pas-mnist-cosine"].endswith("Liu et al. (2020), rebuttal Table 1")
    assert flat["llr-cifar10-llr"].endswith("Qin et al. (2019), rebuttal")


def test_a_recipe_for_imagenet_says_that_it_needs_to_know_where_that_is(command: Command) -> None:
    code, _, err = command("train", "he-imagenet-resnet50-freeat-he")
    assert code == 2
    assert "data.root: dataset 'folder' needs root=PATH, where your images are: data.root=PATH" in err
    code, _, err = command("train", "he-imagenet-resnet50-freeat-he", "data.root=nowhere")
    assert code == 2
    assert "expected an existing root, got 'nowhere'" in err
    assert not Path("runs").exists()


def test_a_run_keeps_a_recipe_that_stands_alone(command: Command, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("name: mine\nbase: digits-pgd-at-he\nhead: {scale: 7}\n")
    code, _, err = command("train", "mine.yaml", *TINY)
    assert (code, err) == (0, "")
    (tmp_path / "mine.yaml").unlink()
    source, _ = recipes.read("runs/mine/recipe.yaml")
    assert "base" not in source
    assert source["head"] == {"name": "he", "scale": 7, "margin": 0.2}
    assert recipes.parse(source).training.epochs == 1


def test_an_unknown_kind_is_answered_with_the_kinds(command: Command) -> None:
    code, _, err = command("list", "atacks")
    assert code == 2
    assert "attacks" in err
    assert "Traceback" not in err


def test_data_list(command: Command) -> None:
    code, out, _ = command("data", "list")
    assert code == 0
    for name in ("digits", "mnist", "cifar10"):
        assert name in out


def test_train_then_evaluate_then_resume(command: Command, tmp_path: Path) -> None:
    code, out, err = command("train", "digits-pgd-at", *TINY, "training.seed=3")
    assert (code, err) == (0, "")
    folder = Path("runs/digits-pgd-at")
    assert f"report: {folder}/report.html" in out
    assert re.search(r"epoch +1 +loss \d\.\d+ +train \d+\.\d% +validation clean \d+\.\d% +robust \d+\.\d%", out)
    assert "worst case" in out
    assert json.loads((folder / "run.json").read_text())["status"] == "finished"
    assert Evaluation.load(folder / "attacks").seed == 3
    report = (folder / "report.html").read_bytes()

    code, out, err = command("evaluate", str(folder), "--samples", "30", "--attack", "pgd:steps=3,loss=margin")
    assert (code, err) == (0, "")
    first = folder / "evaluations" / "linf-0.15"
    assert f"report: {first}/report.html" in out
    found = Evaluation.load(first)
    assert (found.total, found.eps, found.norm) == (30, 0.15, "linf")
    assert [score.name for score in found.scores] == ["clean", "pgd:steps=3,loss=margin", "worst case"]
    # Another one does not overwrite it, nor the run's own.
    assert command("evaluate", str(folder), "--samples", "30", "--attack", "fgsm")[0] == 0
    assert Evaluation.load(first).scores == found.scores
    assert Evaluation.load(folder / "evaluations" / "linf-0.15-2").total == 30
    assert (folder / "report.html").read_bytes() == report

    code, _, err = command("resume", str(folder))
    assert code == 2
    assert err == f"error: {folder} is finished; its report is {folder}/report.html\n"


def test_evaluate_at_another_radius_and_norm(command: Command, finished: Path, tmp_path: Path) -> None:
    code, _, err = command(
        "evaluate", str(finished), "--norm", "l2", "--eps", "1/2", "--samples", "10", "--attack", "fgsm", "--out", "o"
    )
    assert code == 0, err
    found = Evaluation.load(tmp_path / "o")
    assert (found.norm, found.eps) == ("l2", 0.5)
    assert (tmp_path / "o" / "report.html").is_file()


def test_evaluate_a_model_from_an_import_path_with_and_without_weights(command: Command, tmp_path: Path) -> None:
    trained = my_model()
    with torch.no_grad():
        list(trained.parameters())[-1].copy_(torch.tensor([100.0] + [0.0] * 9))
    save_file(trained.state_dict(), tmp_path / "w.safetensors")
    torch.save(trained.state_dict(), tmp_path / "w.pt")
    common = ("--data", "digits", "--eps", "0.1", "--attack", "fgsm", "--samples", "50")
    for place, weights in enumerate(("w.safetensors", "w.pt")):
        code, _, err = command(
            "evaluate", "tests.test_cli:my_model", *common, "--weights", weights, "--out", f"with{place}"
        )
        assert code == 0, err
    assert command("evaluate", "tests.test_cli:my_model", *common, "--random-weights", "--out", "without")[0] == 0
    labels = DATASETS["digits"]().test.labels[:50]
    for folder in ("with0", "with1"):  # a bias of 100 for class 0: right for zeros, and unshakeable
        found = Evaluation.load(tmp_path / folder)
        assert found.score("clean").correct == found.score("worst case").correct == int((labels == 0).sum())
    assert Evaluation.load(tmp_path / "without").score("worst case").correct < 50


def test_evaluate_a_model_of_the_registry_with_a_runs_weights(command: Command, finished: Path, tmp_path: Path) -> None:
    """Same weights, same attack, same seed: same score as the run itself."""
    common = ("--attack", "pgd:steps=2", "--samples", "40", "--eps", "0.15")
    weights = str(finished / "model.safetensors")
    assert command("evaluate", str(finished), *common, "--out", "run")[0] == 0
    code, _, err = command(
        "evaluate", "digits-cnn", "--data", "digits", "--weights", weights, *common, "--out", "named"
    )
    assert code == 0, err
    one, two = Evaluation.load(tmp_path / "run"), Evaluation.load(tmp_path / "named")
    assert [score.correct for score in one.scores] == [score.correct for score in two.scores]
    assert one.score("clean").correct > 4


def test_weights_without_a_normalisation_of_their_own(command: Command, finished: Path, tmp_path: Path) -> None:
    state = {
        name: value for name, value in load_file(finished / "model.safetensors").items() if name not in ("mean", "std")
    }
    save_file(state, tmp_path / "w.safetensors")
    code, _, err = command(
        *("evaluate", "digits-cnn", "--data", "digits", "--weights", "w.safetensors", "--eps", "0.1"),
        *("--attack", "fgsm", "--samples", "10"),
    )
    assert code == 0, err
    assert Path("runs/evaluations/linf-0.1/report.html").is_file()


def test_train_from_a_recipe_file_of_ones_own(command: Command, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "name: my first run!\nmodel: 'tests.test_cli:my_model'\nthreat: {eps: 0.1}\nobjective: standard\n"
        "training: {epochs: 1, lr: 0.05}\nvalidation: {size: 100, samples: 20}\ncompute: {accelerator: cpu}\n"
        "evaluation: {samples: 10, attacks: {FGSM: fgsm}}\n"
    )
    code, _, err = command("train", "mine.yaml")
    assert code == 2
    assert "allow its module: --allow-import tests.test_cli on the command line" in err
    assert not (tmp_path / "runs").exists()
    code, _, err = command("train", "mine.yaml", "--allow-import", "tests.test_cli")
    assert (code, err) == (0, "")
    assert (tmp_path / "runs" / "my-first-run-" / "report.html").is_file()
    ask = ("evaluate", "runs/my-first-run-", "--samples", "5", "--attack", "fgsm")
    assert "--allow-import tests.test_cli" in command(*ask)[2]
    assert command(*ask, "--allow-import", "tests.test_cli")[0] == 0


@pytest.mark.timeout(240)
def test_the_installed_script(tmp_path: Path) -> None:
    """One run through the real entry point: a run of a model on PYTHONPATH, from a shell."""
    script = Path(sys.executable).with_name("steelman")
    root = Path(__file__).parent.parent
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    words = ["train", "digits-pgd-at", "model=tests.test_cli:my_model", *TINY, "--out", "here/run"]
    found = subprocess.run(
        [script, *words], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert found.returncode == 0, found.stderr
    assert "Traceback" not in found.stderr
    assert "report: here/run/report.html" in found.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here"], "nothing is written elsewhere"


FACTORY = (
    "evaluate",
    "tests.test_cli:my_model",
    "--data",
    "digits",
    "--eps",
    "0.1",
    "--attack",
    "fgsm",
    "--samples",
    "9",
)


def test_random_weights_are_measured_only_on_request(command: Command, tmp_path: Path) -> None:
    """Also where a factory sets a seed, which makes the numbers no less random."""
    before = torch.random.get_rng_state()
    code, out, err = command(*FACTORY)
    assert code == 2
    assert "tests.test_cli:my_model makes a model with new random weights" in err
    assert "--random-weights" in err
    assert not list(tmp_path.iterdir())
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(7)  # the seed is heeded again
    assert torch.random.initial_seed() == 7
    code, out, err = command(*FACTORY, "--random-weights")
    assert (code, err) == (0, "")
    assert "The weights are random: these are the numbers of an untrained model." in out


def test_a_factory_that_reads_its_weights_needs_no_flag(command: Command, finished: Path, tmp_path: Path) -> None:
    code, out, err = command("evaluate", "tests.test_cli:my_trained_model", *FACTORY[2:])
    assert (code, err) == (0, "")
    assert "random" not in out.split("report:")[0].split("evidence:")[0]
    assert "The weights are random" not in out
    for more, words in (
        (("tests.test_cli:my_model", "--weights", "w.pt"), "--weights names trained ones"),
        ((str(finished),), "is not one"),
        (("mlp",), "mlp is not one"),
    ):
        code, _, err = command("evaluate", *more, "--random-weights", "--data", "digits", "--eps", "0.1")
        assert code == 2
        assert "--random-weights: expected package.module:factory without --weights; " in err
        assert words in err


def test_a_radius_above_the_range_is_refused_with_a_hint(command: Command, finished: Path) -> None:
    hint = "expected a radius of at most 1 in a range of 0 .. 1, got 8; did you mean 8/255?"
    code, _, err = command("evaluate", str(finished), "--eps", "8")
    assert (code, err) == (2, f"error: threat model: eps: {hint}\n")
    code, _, err = command("train", "digits-pgd-at", "threat.eps=8", *TINY)
    assert code == 2
    assert f"threat.eps: {hint}" in err
    code, _, err = command("evaluate", str(finished), "--norm", "l2", "--eps", "20", "--attack", "fgsm")
    assert code == 2
    assert "eps: expected a radius of at most 8 in a range of 0 .. 1 for images of shape (1, 8, 8) in l2, got 20" in err
    assert "did you mean 20/255?" in err
    code, _, err = command("train", "digits-pgd-at", "threat={norm: l2, eps: 20}", *TINY)
    assert code == 2
    assert "did you mean 20/255?" in err


def test_a_schedule_that_would_go_beyond_its_cap_may_train(command: Command) -> None:
    schedule = "training.eps={name: cosine, start: 0, end: 0.225, cap: 0.15}"
    assert command("train", "digits-pgd-at", schedule, *TINY)[0] == 0
    for name in (name for name in built_in() if name.startswith("pas-")):
        recipes.parse(recipes.read(name)[0])


def test_distance(command: Command, finished: Path, tmp_path: Path) -> None:
    ask = ("distance", str(finished), "--attack", "rays:queries=200", "--samples", "20", "--out", "d")
    code, out, err = command(*ask)
    assert (code, err) == (0, "")
    record = json.loads((tmp_path / "d" / "distances.json").read_text())
    assert re.search(rf"mean \(ADBD\) +{record['mean']:.5g} +\[{record['mean_interval'][0]:.5g}, ", out)
    assert re.search(rf"median +{record['median']:.5g} ", out)
    assert re.search(rf"farther than eps = 0.15 +{5 * record['above_eps']:.1f}% ", out)
    assert record["total"] == len(record["values"]) == 20
    assert record["values"].count(0.0) == record["wrong"]
    assert record["eps"] == 0.15
    code, _, err = command(*ask)
    assert code == 2
    assert "d already holds distances" in err
    for attack in ("deepfool:steps=10", "fab:steps=5"):
        assert command("distance", str(finished), "--attack", attack, "--samples", "10")[0] == 0
    two = ("--norm", "l2", "--eps", "0.5", "--attack", "cw:steps=10,search_steps=2", "--samples", "5")
    assert command("distance", str(finished), *two)[0] == 0
    code, _, err = command("distance", str(finished), "--attack", "pgd")
    assert code == 2
    assert "expected one that looks for the nearest point, got PGD; choices: deepfool, fab, fab-t, cw, rays" in err
    code, _, err = command("distance", "tests.test_cli:my_model", *FACTORY[2:6], "--attack", "fab:steps=3")
    assert code == 2
    assert "random weights" in err


def completions(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], words: str) -> list[str]:
    """What bash is told to complete the last of `words` to."""
    monkeypatch.setenv("_STEELMAN_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split(" ")) - 1))
    with pytest.raises(SystemExit):
        cli.app(prog_name="steelman")
    return capfd.readouterr().out.split()


def test_names_complete(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits-mine.yaml").write_text("")
    (tmp_path / "digits.txt").write_text("")
    recipe_names = completions(monkeypatch, capfd, "steelman train digits-")
    assert recipe_names == ["digits-pgd-at", "digits-pgd-at-he", "digits-standard", "digits-mine.yaml"]
    assert set(completions(monkeypatch, capfd, "steelman train ")) >= built_in().keys()
    assert completions(monkeypatch, capfd, "steelman list op") == ["optimizers"]
    assert set(completions(monkeypatch, capfd, "steelman list ")) == {kind.value for kind in Kind}
    assert set(completions(monkeypatch, capfd, "steelman data get ")) == FETCHABLE.keys()
    assert completions(monkeypatch, capfd, "steelman data get fa") == ["fashion-mnist"]
    assert set(completions(monkeypatch, capfd, "steelman evaluate runs/mine --suite ")) == SUITES.keys()
    assert completions(monkeypatch, capfd, "steelman evaluate runs/mine --suite he-b") == ["he-blackbox"]


def test_completion_can_be_installed_and_knows_the_registries(command: Command) -> None:
    _, out, _ = command("--help")
    assert "--install-completion" in out
    assert "--show-completion" in out
    assert sorted(FETCHABLE) == list(listing.FETCHABLE)
    assert sorted(SUITES) == list(listing.SUITES)


@pytest.mark.parametrize("words", [("--help",), ("evaluate", "--help"), ("--version",)])
def test_help_imports_no_torch(words: tuple[str, ...]) -> None:
    """It takes a second and more, and help needs none of it; nor does a completion."""
    check = (
        "import sys; from steelman.cli import main\n"
        f"sys.argv = ['steelman', *{words!r}]\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'scipy', 'lightning_fabric'} & sys.modules.keys()\n"
        "assert not heavy, heavy"
    )
    found = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=60, check=False)
    assert found.returncode == 0, found.stderr


def test_completion_imports_no_torch(tmp_path: Path) -> None:
    script = Path(sys.executable).with_name("steelman")
    for words in ("steelman train d", "steelman evaluate x --suite f", "steelman data get m", "steelman list a"):
        environment = {
            **os.environ,
            "_STEELMAN_COMPLETE": "complete_bash",
            "COMP_WORDS": words,
            "COMP_CWORD": str(len(words.split(" ")) - 1),
            "PYTHONPROFILEIMPORTTIME": "1",
        }
        found = subprocess.run([script], env=environment, capture_output=True, text=True, timeout=60, check=False)
        assert found.stdout.strip(), words
        assert not re.search(r"\| +torch$", found.stderr, re.MULTILINE), words


def test_doctor(command: Command) -> None:
    code, out, err = command("doctor")
    assert (code, err) == (0, "")
    for words in (__version__, "GFLOP/s", "images per second", "tensorboard", "steelman data get mnist"):
        assert words in out
