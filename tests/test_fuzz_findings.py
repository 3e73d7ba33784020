"""What benchmarks/fuzz.py has found: each was a traceback, a hang or much memory, and is one sentence now."""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import io
import json
import pickle
import resource
import shutil
import struct
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load, save, save_file
from torch import nn

from steelman import cli, data
from steelman.attacks import PGD
from steelman.cli import commands
from steelman.cli.subjects import is_folder, models_named
from steelman.data.folder import FolderSource
from steelman.data.formats import PARTS, read_tar
from steelman.data.store import intact, read
from steelman.errors import LONGEST, UserError, shown
from steelman.evaluation.evaluate import evaluate
from steelman.evidence.bundle import read_bundle
from steelman.heads import build_head
from steelman.models.classifier import build_described, load_state
from steelman.objectives import OBJECTIVES
from steelman.recipe import parse
from steelman.recipe import read as read_recipe
from steelman.settings import SettingsError, options_from_texts
from steelman.threat import ThreatModel
from steelman.training import OPTIMIZERS
from steelman.training.asked import begin
from steelman.training.checkpoint import checkpoints, load_checkpoint
from steelman.training.described import restore_optimizer
from steelman.training.guard import StopRequest
from tests.evidence_helpers import EPS, Forged, a_model, the_data
from tests.training_helpers import a_trainer

# Sentences stay short, whatever came.


@pytest.mark.parametrize(
    "change",
    [
        f"model.mean={'a' * 5000}",
        f"{'a' * 5000}=1",
        f"training.lr={{name: piecewise, points: {[[1, 0]] * 500}}}".replace("[1, 0]", "[1]"),
        f"evaluation.suite=[{'a' * 3000}]",
        f"data={'[' * 40}{'a' * 1000}{']' * 40}",
    ],
)
def test_an_error_of_a_recipe_is_never_endless(change: str) -> None:
    with pytest.raises(UserError) as caught:
        parse(*read_recipe("digits-pgd-at", [change]))
    assert len(str(caught.value)) < 4000
    assert max(map(len, str(caught.value).splitlines())) < 700


def test_a_shown_value_is_one_short_line() -> None:
    for value in (
        ["x" * 10_000] * 100,
        {"a" * 500: [[["b" * 500] * 9] * 9] * 9},
        nn.Sequential(nn.Linear(2, 2)),
        torch.rand(99),
    ):
        assert len(shown(value)) <= LONGEST + 3
        assert "\n" not in shown(value)


def test_only_the_first_problems_are_listed() -> None:
    text = str(SettingsError([(("k" * 500, str(i)), "is wrong") for i in range(500)]))
    assert text.endswith("and 480 more")
    assert len(text) < 3000


def test_a_difference_of_long_settings_is_shown_where_it_begins(tmp_path: Path) -> None:
    long = ", ".join(f"Stage({i})" for i in range(1000))
    begin(tmp_path / "run", {"suite": long})
    with pytest.raises(
        UserError, match=r"\.\.\..*Stage\(501\).*, and that of this call is \.\.\..*Stage\(500\)"
    ) as caught:
        begin(tmp_path / "run", {"suite": long.replace("Stage(501)", "Other(7)").replace("Stage(500)", "Stage(500)")})
    assert len(str(caught.value)) < 900


def test_a_list_as_the_suite() -> None:
    source, origin = read_recipe("digits-pgd-at", ["evaluation.suite=[fast]"])
    with pytest.raises(UserError, match=r"evaluation\.suite: unknown suite \['fast'\]"):
        parse(source, origin)


def test_a_text_that_can_be_no_file_s_name() -> None:
    assert not is_folder("a" * 5000)
    assert not is_folder("a\0b")
    assert models_named([f"mine={'a' * 5000}"])["mine"] == "a" * 5000


def test_a_head_has_no_option_called_name() -> None:
    with pytest.raises(UserError, match="unknown option of head 'he' 'name'"):
        build_head("he", 4, 3, name="x")


def test_options_of_a_head_are_not_arguments_of_embed() -> None:
    name = "tests.training_helpers:digits_net"
    spec, head = (
        {"name": name, "options": {}, "mean": (0.0,), "std": (1.0,)},
        {"name": "he", "options": {"features": 3}},
    )
    with pytest.raises(UserError, match="features: expected options of the head"):
        build_described(spec, head, (1, 8, 8), 10, [name])


# Datasets.


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.float32])
def test_a_stored_dataset_has_eight_bits(dtype: torch.dtype, tmp_path: Path) -> None:
    path = tmp_path / "mnist" / "mnist.safetensors"
    path.parent.mkdir()
    names = ("train_images", "train_labels", "test_images", "test_labels")
    save_file({name: torch.zeros(4).to(dtype) for name in names}, path, {"steelman": "{}"})
    with pytest.raises(UserError, match="expected train_images in 8 bits"):
        read(path)
    assert not intact(path, {"train_images": "x"})
    with pytest.raises(UserError, match="8 bits"):
        data.load("mnist", root=tmp_path)


def test_a_damaged_npz_names_no_endless_member(tmp_path: Path) -> None:
    stream = io.BytesIO()
    np.savez(stream, **dict[str, Any]({"a" * 3000: np.zeros(3)}))
    (tmp_path / "x.npz").write_bytes(stream.getvalue().replace(b"PK\1\2", b"PK\1\3"))
    with pytest.raises(UserError) as caught:
        data.load("arrays", root=tmp_path / "x.npz")
    assert len(str(caught.value)) < 500


def test_a_long_thin_image_is_refused_before_it_is_enlarged(tmp_path: Path) -> None:
    """Its shorter side would become `resize` pixels, and its longer one a million."""
    (tmp_path / "a").mkdir()
    Image.new("L", (1, 9000)).save(tmp_path / "a" / "x.png")
    with pytest.raises(UserError, match=r"expected at most 50 times as long as wide, got \(1, 9000\)"):
        FolderSource(tmp_path, size=8, resize=8).images(torch.arange(1))


# Weights.


def test_a_pickle_that_asks_for_gigabytes_gets_none(tmp_path: Path) -> None:
    """The bytes are only set aside as they are read. The limit of the address space shows it."""
    hostile = pickle.dumps({"a": 1}, 2)[:-1] + b"B" + struct.pack("<I", 2**31 - 1) + b"."
    (tmp_path / "x.pt").write_bytes(hostile)
    kept = resource.getrlimit(resource.RLIMIT_AS)
    size = next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if "VmSize" in line)
    resource.setrlimit(resource.RLIMIT_AS, (1024 * size + (1 << 30), kept[1]))
    try:
        with pytest.raises(UserError, match="is not a plain state dict") as caught:
            load_state(tmp_path / "x.pt")
    finally:
        resource.setrlimit(resource.RLIMIT_AS, kept)
    assert "Memory" not in str(caught.value)


# Checkpoints.


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was interrupted after its first step, of an objective with a pool."""
    folder = tmp_path_factory.mktemp("saved")
    one = _tla(folder)
    one.recorder = None
    one.step(*next(iter(one.batches_left(StopRequest()))))
    one.save()
    return folder


def _tla(folder: Path) -> Any:
    objective = OBJECTIVES["tla"](attack=PGD(steps=1, keep="last"))
    return a_trainer(folder, objective=objective, training={"optimizer": OPTIMIZERS["adam"](), "lr": 0.01, "epochs": 1})


def _pool(tensors: dict[str, torch.Tensor], _: Any) -> None:
    name = next(name for name in tensors if "pool_x" in name)
    tensors[name] = tensors[name][..., :2].contiguous()


def _step(tensors: dict[str, torch.Tensor], _: Any) -> None:
    name = next(name for name in tensors if name.endswith(".step"))
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)


def _moment(_: Any, structure: Any) -> None:
    pair = next(pair for pair in structure["dict"] if pair[0] == "optimizer")
    state = next(one for one in pair[1]["dict"] if one[0] == "state")[1]["dict"]
    del state[0][1]["dict"][1]  # exp_avg of the first weight


def _mapping(_: Any, structure: Any) -> None:
    pair = next(pair for pair in structure["dict"] if pair[0] == "optimizer")
    state = next(one for one in pair[1]["dict"] if one[0] == "state")[1]["dict"]
    state[0][1]["dict"][1][1] = {"dict": []}


def _option(name: str, value: object) -> Callable[[Any, Any], None]:
    def change(_: Any, structure: Any) -> None:
        pair = next(pair for pair in structure["dict"] if pair[0] == "optimizer")
        groups = next(one for one in pair[1]["dict"] if one[0] == "param_groups")[1]
        (group,) = groups["list"]
        option = next(one for one in group["dict"] if one[0] == name)
        option[1] = {"value": value}

    return change


def _weights(_: Any, structure: Any) -> None:
    pair = next(pair for pair in structure["dict"] if pair[0] == "optimizer")
    (group,) = next(one for one in pair[1]["dict"] if one[0] == "param_groups")[1]["list"]
    next(one for one in group["dict"] if one[0] == "params")[1] = {"tensor": "state.rng"}


def _groups(_: Any, structure: Any) -> None:
    pair = next(pair for pair in structure["dict"] if pair[0] == "optimizer")
    next(one for one in pair[1]["dict"] if one[0] == "param_groups")[1] = {"value": 1}


def _best(_: Any, structure: Any) -> None:
    pair = next(pair for pair in structure["dict"] if pair[0] == "progress")
    next(one for one in pair[1]["dict"] if one[0] == "best_step")[1] = {"value": 3}


def _state(_: Any, structure: Any) -> None:
    pair = next(pair for pair in structure["dict"] if pair[0] == "optimizer")
    next(one for one in pair[1]["dict"] if one[0] == "state")[1]["dict"][0][0] = "a" * 10_000


def _name(_: Any, structure: Any) -> None:
    pair = next(pair for pair in structure["dict"] if pair[0] == "model")
    pair[1]["dict"][0][0] = "a" * 10_000


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        *(
            (_option(name, True), "has other options than the recipe's")
            for name in ("capturable", "maximize", "fused", "amsgrad", "differentiable")
        ),
        (_option("weight_decay", 1e30), "has other options than the recipe's"),
        (_weights, "its optimiser cannot be read"),
        (_groups, "checkpoint .* is damaged"),
        (_best, "expected the numbers of each finished epoch"),
        (_state, r"optimizer\.state\.a{150}\.\.\."),
        (_name, "belongs to another model.*aaa\\.\\.\\."),
        (_pool, "the objective cannot go on with what it carried"),
        (_step, "its optimiser is that of another model"),
        (_moment, "its optimiser is that of another model"),
        (_mapping, "its optimiser is that of another model"),
    ],
)
def test_a_checkpoint_whose_parts_do_not_fit(
    change: Callable[[Any, Any], None], expected: str, saved: Path, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(saved, tmp_path / "run"))
    place = checkpoints(run)[0]
    record = json.loads((place / "state.json").read_text().splitlines()[0])
    tensors = load((place / "tensors.safetensors").read_bytes())
    change(tensors, record["structure"])
    content = save(tensors)
    (place / "tensors.safetensors").write_bytes(content)
    record["sha256"] = hashlib.sha256(content).hexdigest()
    text = json.dumps(record)
    (place / "state.json").write_text(f"{text}\n{hashlib.sha256(text.encode()).hexdigest()}\n")
    assert load_checkpoint(place)
    with pytest.raises(UserError, match=expected):
        _tla(run).fit(resume=True)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_honest_optimiser_is_restored(name: str) -> None:
    for options in ({}, {"momentum": 0.0}) if name == "sgd" else ({},):
        made = []
        for _ in range(2):
            weight = nn.Parameter(torch.ones(3))
            made.append((weight, OPTIMIZERS[name](**options)([weight])))
        (weight, one), (_, other) = made
        weight.grad = torch.ones(3)
        one.step()
        restore_optimizer(other, one.state_dict(), "x")
        assert other.state_dict()["state"].keys() == one.state_dict()["state"].keys()


# Batches of an interrupted evaluation.


def _no_rows(part: dict[str, torch.Tensor]) -> None:
    part.pop("rows", None)
    part.pop("digest", None)


def _fewer(part: dict[str, torch.Tensor]) -> None:
    for name, value in part.items():
        part[name] = value[:2].contiguous() if value.dim() else value


def _huge_class(part: dict[str, torch.Tensor]) -> None:
    part["guess"] = torch.full_like(part["guess"], 2**62)


@pytest.mark.parametrize("change", [_no_rows, _fewer, _huge_class])
@pytest.mark.parametrize("which", ["clean-00000", "00-00000"])
def test_a_batch_of_another_shape(which: str, change: Callable[[Any], None], tmp_path: Path) -> None:
    """Its checksum fits, as a stranger's would."""
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Flatten(), nn.Linear(16, 3)).eval(), torch.rand(12, 1, 4, 4)
    y = net(x).argmax(dim=1)

    def call(minutes: float | None) -> None:
        suite = {"a": PGD(steps=1), "b": PGD(steps=2)}
        evaluate(net, x, y, ThreatModel(eps=0.05), suite, out=tmp_path / "out", batch_size=6, minutes=minutes)

    call(1e-9)
    path = tmp_path / "out" / "work" / f"{which}.batch"
    part = load(path.read_bytes().partition(b"\n")[2])
    change(part)
    content = save(part)
    path.write_bytes(hashlib.sha256(content).hexdigest().encode() + b"\n" + content)
    with pytest.raises(UserError, match=r"(Delete this folder|is damaged|the data have changed)"):
        call(None)


# The last line of defence.

COMMANDS = {
    "train": ("train", "digits-pgd-at"),
    "resume": ("resume", "."),
    "evaluate": ("evaluate", "mlp", "--data", "digits"),
    "transfer": ("transfer", "."),
    "distance": ("distance", "."),
    "corruptions": ("corruptions", "."),
    "verify": ("verify", "."),
    "compare": ("compare", "a", "b"),
    "gate": ("gate", ".", "--min-robust", "0.1"),
    "list": ("list", "heads"),
    "data list": ("data", "list"),
    "data get": ("data", "get", "mnist"),
    "demo": ("demo",),
    "doctor": ("doctor",),
}
# What each command calls first of its own.
FIRST = {
    "train": "steelman.recipe.read",
    "resume": "steelman.training.run.resume",
    "evaluate": "steelman.cli.measure.measure",
    "transfer": "steelman.cli.measure.cross",
    "distance": "steelman.cli.subjects.attack_from_text",
    "corruptions": "steelman.cli.subjects.models_named",
    "verify": "steelman.evidence.bundle.bundle_at",
    "compare": "steelman.evidence.compare.compare",
    "gate": "steelman.evidence.verify.verify",
    "list": "steelman.cli.commands.print_list",
    "data list": "steelman.data.available",
    "data get": "steelman.data.get",
    "demo": "steelman.cli.demo.run_demo",
    "doctor": "steelman.cli.doctor.examine",
}


def _broken(*_: object, **__: object) -> None:
    raise ZeroDivisionError("a mistake of ours")


def _call(arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["steelman", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_every_command_is_tried() -> None:
    import typer

    tree = typer.main.get_command(commands.app)
    names = {name for name in tree.commands if name != "data"}  # type: ignore[attr-defined]
    names |= {f"data {name}" for name in tree.commands["data"].commands}  # type: ignore[attr-defined]
    assert names == set(COMMANDS) == set(FIRST)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_mistake_of_ours_says_how_to_report_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(FIRST[name], _broken)
    monkeypatch.setattr(
        "steelman.evidence.bundle.read_bundle", lambda _: type("Bundle", (), {"record": {"model": "x"}})
    )
    assert _call(COMMANDS[name], monkeypatch) == 3
    said = capsys.readouterr().err
    assert said.startswith(
        "error: this is a mistake in steelman: ZeroDivisionError: a mistake of ours. Please report it"
    )
    assert "STEELMAN_TRACEBACK=1" in said
    assert "Traceback" not in said
    monkeypatch.setenv("STEELMAN_TRACEBACK", "1")
    assert _call(COMMANDS[name], monkeypatch) == 3
    said = capsys.readouterr().err
    assert "Traceback (most recent call last)" in said
    assert "in _broken" in said


@pytest.mark.parametrize(
    ("error", "code", "expected"),
    [
        (MemoryError(), 3, "there is not enough memory"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"), 3, "there is not enough memory"),
        (
            RuntimeError("[enforce] DefaultCPUAllocator: can't allocate memory: you tried"),
            3,
            "there is not enough memory",
        ),
        (RecursionError(), 3, "the input is nested too deeply, or this is a mistake in steelman"),
        (OSError(36, "File name too long", "a" * 5000), 2, "File name too long (aaa"),
        (UserError("expected a, got b"), 2, "expected a, got b"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_other_ends_of_a_command(
    error: BaseException,
    code: int,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr("steelman.cli.commands.print_list", fails)
    assert _call(("list", "heads"), monkeypatch) == code
    said = capsys.readouterr().err
    assert said.startswith(f"error: {expected}")
    assert len(said) < 600


def test_the_fuzzer_finds_a_crash_a_hang_and_a_glutton(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fuzzer that sees nothing would report zeros too."""
    place = Path(__file__).parent.parent / "benchmarks"
    monkeypatch.syspath_prepend(str(place))
    spec = importlib.util.spec_from_file_location("fuzz_worker_of_tests", place / "fuzz_worker.py")
    assert spec is not None
    assert spec.loader is not None
    worker = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = worker
    spec.loader.exec_module(worker)

    def reader(read: Callable[..., object]) -> Any:
        return type("Reader", (), {"read": staticmethod(read)})

    def asks(*_: object) -> None:
        raise MemoryError

    monkeypatch.chdir(tmp_path)
    kinds = [
        worker.attempt(reader(read), b"", tmp_path).kind
        for read in (lambda *_: None, lambda *_: build_head("x", 2, 2), lambda *_: [][0], asks)  # noqa: PLE0643 - on purpose
    ]
    assert kinds == ["accepted", "refused", "traceback", "memory"]


@pytest.mark.parametrize("root", ["x" * 5000, "~nobody-at-all/x"])
def test_a_root_that_cannot_be_a_path(root: str) -> None:
    with pytest.raises(UserError, match="root: expected a path, got"):
        data.load("arrays", root=root)


def test_an_option_called_name() -> None:
    with pytest.raises(UserError, match="name: unknown option of dataset 'digits' 'name'; choices: none"):
        data.load("digits", **dict.fromkeys(["name"], "x"))


def test_an_archive_whose_record_has_an_endless_length(tmp_path: Path) -> None:
    header = tarfile.TarInfo("pax")
    header.type, record = b"x", b"9" * 30 + b" path=x\n"
    header.size = len(record)
    content = header.tobuf() + record.ljust(512, b"\0") + bytes(1024)
    (tmp_path / "x.tar.gz").write_bytes(gzip.compress(content))
    with pytest.raises(UserError, match="damaged archive"):
        read_tar(tmp_path / "x.tar.gz", ["test.bin"])


def test_an_option_with_an_endless_name() -> None:
    with pytest.raises(UserError) as caught:
        options_from_texts([f"{'x' * 5000}=[1"])
    assert len(str(caught.value)) < 400


def test_a_setting_with_an_endless_name() -> None:
    from steelman.evidence.ledger import _differences

    (said,) = _differences({"[" * 5000: 1}, {}, "suite")
    assert len(said) < 300


def test_a_name_without_end_in_evidence(tmp_path: Path) -> None:
    evaluate(a_model(), the_data(), None, ThreatModel(eps=EPS), {"a": PGD(steps=1)}, out=tmp_path / "e")
    forged = Forged(tmp_path / "e")
    forged.record["suite"]["stages"][0]["name"] = "a" * 10_000
    forged.seal()
    with pytest.raises(UserError, match="at most 1000 characters") as caught:
        read_bundle(tmp_path / "e")
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("shape", "expected"),
    [([3, 0, 2, 1 << 62], "cannot be read"), ([1 << 40, 0, 1 << 20], "the impossible shape")],
)
def test_a_stored_array_of_endless_sizes(shape: list[int], expected: str, tmp_path: Path) -> None:
    """No byte of data, and more rows than a number can count."""
    parts = {name: {"dtype": "U8", "shape": shape, "data_offsets": [0, 0]} for name in PARTS}
    header = json.dumps({"__metadata__": {"steelman": "{}"}, **parts}).encode()
    (tmp_path / "mnist.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(UserError, match=expected):
        read(tmp_path / "mnist.safetensors")
    assert not intact(tmp_path / "mnist.safetensors", {"train_images": "0" * 64})
