"""The folder of an evaluation: one owner, no leftovers, nothing overwritten, and a sentence for all that goes wrong."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor, nn

from steelman.attacks import PGD
from steelman.errors import UserError
from steelman.evidence import bundle as bundles
from steelman.evidence import ledger
from steelman.evidence.bundle import bundle_at, read_bundle, weights_digest
from steelman.evidence.ledger import DONE, ROBUST, WRONG, Images, Ledger, Work, digests
from steelman.evidence.verify import verify
from steelman.threat import ThreatModel
from tests.evidence_helpers import EPS, a_model, evaluate, the_data

ATTACKS = {"one": PGD(steps=1, start="zero"), "two": PGD(steps=2, loss="margin")}


def run(out: Path, **changes: Any) -> Any:
    given: dict[str, Any] = {"batch_size": 20, "curve": False, "gallery": 2, "suite": ATTACKS, **changes}
    model, source = given.pop("model", None) or a_model(), given.pop("source", None) or the_data()
    threat, suite = given.pop("threat", None) or ThreatModel(eps=EPS), given.pop("suite")
    return evaluate(model, source, None, threat, suite, out=out, **given)


def contents(folder: Path) -> dict[str, bytes]:
    """The sealed files: all but the times."""
    return {
        path.name: path.read_bytes()
        for path in sorted(folder.iterdir())
        if path.name == "evidence.json" or path.suffix == ".safetensors"
    }


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_runs_verdict_comes_before_the_attacks_given_one_by_one(tmp_path: Path) -> None:
    run(tmp_path / "attacks")
    assert bundle_at(tmp_path) == tmp_path / "attacks"
    assert verify(tmp_path).seal == read_bundle(tmp_path / "attacks").seal
    run(tmp_path / "verdict", seed=1)
    assert bundle_at(tmp_path) == tmp_path / "verdict"
    assert verify(tmp_path).seal == read_bundle(tmp_path / "verdict").seal != read_bundle(tmp_path / "attacks").seal


# A row a sample.


def a_part(rows: list[int], broken: list[bool], margin: list[float], value: float = 0.5) -> dict[str, Tensor]:
    n = len(rows)
    return {
        "rows": torch.tensor(rows),
        "x_adv": torch.full((n, 1, 2, 2), value) + torch.tensor(rows).view(-1, 1, 1, 1) / 100,
        "broken": torch.tensor(broken),
        "guess": torch.ones(n, dtype=torch.int64),
        "margin": torch.tensor(margin, dtype=torch.float64),
        "lead": torch.tensor(margin, dtype=torch.float64),
        "forwards": torch.full((n,), 3),
        "backwards": torch.full((n,), 2),
        "unclear": torch.zeros(n, dtype=torch.bool),
    }


def test_the_smallest_margin_is_kept_and_the_first_break_is_final(tmp_path: Path) -> None:
    rows = Ledger(tmp_path, 5, (1, 2, 2), torch.float32)
    rows.margin[:] = 1.0
    rows.broken_by[4] = WRONG
    clean = torch.zeros(5, 1, 2, 2)
    assert torch.equal(rows.points(torch.arange(5), clean), clean)
    rows.record(0, a_part([0, 1, 2], [False, True, False], [0.5, -0.1, 2.0]))
    rows.record(1, a_part([0, 1, 2], [False, True, True], [0.7, -0.9, -0.2], value=0.7))
    assert rows.broken_by.tolist() == [ROBUST, 0, 1, ROBUST, WRONG]
    torch.testing.assert_close(rows.margin, torch.tensor([0.5, -0.1, -0.2, 1.0, 1.0], dtype=torch.float64))
    assert rows.forwards.tolist() == [6, 6, 6, 0, 0]
    assert rows.backwards.tolist() == [4, 4, 4, 0, 0]
    assert rows.passes.tolist() == [0, 3, 3, 0, 0]
    assert rows.tried.tolist() == [1, 0, 1, -1, -1]
    found = rows.points(torch.tensor([3, 2, 0, 1]), clean[:4])[:, 0, 0, 0]
    torch.testing.assert_close(found, torch.tensor([0.0, 0.72, 0.5, 0.51]))
    torch.testing.assert_close(rows.kept(torch.tensor([2, 1]))[:, 0, 1, 1], torch.tensor([0.72, 0.51]))
    assert rows.kept(torch.tensor([], dtype=torch.int64)).shape == (0, 1, 2, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_images_on_disk_are_exact_and_take_only_their_own_room(tmp_path: Path, dtype: torch.dtype) -> None:
    images = Images(tmp_path / "points.bin", (3, 64, 64), dtype)
    given = torch.rand(3, 3, 64, 64, dtype=dtype)
    where = torch.tensor([20_000, 3, 777])
    images[where] = given
    assert torch.equal(images[where], given)
    assert torch.equal(images[where.flip(0)], given.flip(0))
    images[torch.tensor([3])] = given[:1]
    assert torch.equal(images[torch.tensor([3, 777])], given[[0, 2]])
    there = (tmp_path / "points.bin").stat()
    assert there.st_size > 100 * 3 * 64 * 64 * 8, "a place for each sample"
    assert there.st_blocks * 512 < 10 * 3 * 64 * 64 * 8, "and room for those that were written"


def test_the_digest_of_a_sample_is_its_own() -> None:
    x, y = torch.rand(6, 1, 4, 4), torch.tensor([0, 1, 2, 0, 1, 2])
    found = digests(x, y)
    assert len(set(found.tolist())) == 6
    assert torch.equal(digests(x.flip(0), y.flip(0)), found.flip(0))
    assert torch.equal(digests(x.double(), y), found)
    assert int(digests(x[:1], y[:1] + 1)) != int(found[0])
    x[0, 0, 0, 0] = torch.nextafter(x[0, 0, 0, 0], torch.tensor(2.0))
    assert int(digests(x, y)[0]) != int(found[0])
    assert torch.equal(digests(x, y)[1:], found[1:])


def test_the_digest_of_weights_knows_every_bit_name_type_and_shape() -> None:
    class Kinds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.arange(4.0))
            self.register_buffer("b", torch.tensor(3))
            self.register_buffer("c", torch.tensor([True, False]))
            self.register_buffer("d", torch.zeros(0))
            self.register_buffer("e", torch.ones(2, dtype=torch.bfloat16))

    def changed(name: str, value: Tensor) -> str:
        model = Kinds()
        setattr(model, name, nn.Parameter(value) if name == "a" else value)
        return weights_digest(model)

    found = {
        weights_digest(Kinds()),
        changed("a", torch.nextafter(torch.arange(4.0), torch.full((4,), 9.0))),
        changed("a", torch.arange(4.0).view(2, 2)),
        changed("a", torch.arange(4.0).double()),
        changed("b", torch.tensor(4)),
        changed("c", torch.tensor([True, True])),
        changed("d", torch.zeros(0, 2)),
        changed("e", torch.ones(2)),
    }
    assert len(found) == 8
    assert weights_digest(Kinds()) in found
    assert weights_digest(Kinds().train()) == weights_digest(Kinds().eval())


# One owner.


def test_two_at_once_are_refused_and_the_folder_is_free_again(tmp_path: Path) -> None:
    with Work(tmp_path / "out" / "work", {"a": 1}):
        with pytest.raises(UserError, match=r"another process is evaluating into .*out; wait for it"):
            Work(tmp_path / "out" / "work", {"a": 1})
        with pytest.raises(UserError, match="another process"):
            run(tmp_path / "out")
    with pytest.raises(UserError, match="a was 1, is 2"):
        Work(tmp_path / "out" / "work", {"a": 2})
    with Work(tmp_path / "out" / "work", {"a": 1}):
        pass


def test_a_work_that_is_forgotten_lets_go(tmp_path: Path) -> None:
    forgotten = Work(tmp_path / "work", {})
    del forgotten
    with Work(tmp_path / "work", {}):
        pass


def test_a_process_forked_off_does_not_keep_the_folder(tmp_path: Path) -> None:
    """Such as one that reads images, and outlives a parent that was killed."""
    read, write = os.pipe()
    up, there = os.pipe()
    with Work(tmp_path / "work", {}):
        child = os.fork()
        if child == 0:
            os.close(write)
            os.write(there, b"x")
            os.read(read, 1)  # until the parent lets it go
            os._exit(0)
        os.read(up, 1)
    try:
        with Work(tmp_path / "work", {}):
            pass
    finally:
        os.close(write)
        os.waitpid(child, 0)
        for descriptor in (read, up, there):
            os.close(descriptor)


def test_an_attack_that_raises_leaves_the_folder_free_to_go_on(tmp_path: Path) -> None:
    def fails(*_: object, **__: object) -> NoReturn:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory") as held:
        run(tmp_path / "out", suite={"one": PGD(steps=1, start="zero"), "two": fails})
    assert held.value
    with pytest.raises(UserError, match=r"suite\.stages\.1\.attack"):
        run(tmp_path / "out")
    run(tmp_path / "again")


# Nothing half done, nothing overwritten.


def test_leftovers_of_a_killed_process_are_swept_and_other_files_are_not(tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / "work").mkdir(parents=True)
    (out / DONE).mkdir()
    (out / DONE / "00-00001.safetensors").write_bytes(b"x")
    for name in (
        ".evidence.json.a1b2c3d4",
        ".adversarial-0001.safetensors._bcdefgh",
        "work/.00-00002.batch.abcdefgh",
    ):
        (out / name).write_bytes(b"half")
    kept = [".gitignore", ".notes.json", "page.html"]
    for name in kept:
        (out / name).write_bytes(b"mine")
    run(out)
    assert names(out) == sorted(
        [
            *kept,
            "adversarial-0000.safetensors",
            "evidence.json",
            "gallery.safetensors",
            "samples.safetensors",
            "times.json",
        ]
    )
    verify(out, model=a_model(), source=the_data())


def test_the_same_run_gives_the_same_bytes_and_is_not_run_twice(tmp_path: Path) -> None:
    run(tmp_path / "a")
    run(tmp_path / "b")
    before = contents(tmp_path / "a")
    assert contents(tmp_path / "b") == before
    assert len(before) >= 3
    with pytest.raises(UserError, match="a holds this evaluation already, and it is finished"):
        run(tmp_path / "a")
    with pytest.raises(UserError, match=r"a holds another evaluation \(seed was 0, is 1\)"):
        run(tmp_path / "a", seed=1)
    assert contents(tmp_path / "a") == before
    assert "work" not in names(tmp_path / "a")
    (tmp_path / "a" / "evidence.json").unlink()
    with pytest.raises(UserError, match=r"holds adversarial-0000\.safetensors of another evaluation"):
        run(tmp_path / "a")
    assert names(tmp_path / "a")[0] == "adversarial-0000.safetensors"


def test_killed_after_the_bundle_was_written_and_before_the_work_was_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path / "whole")
    for name, moment in (("close", "before"), ("rmtree", "while")):
        out = tmp_path / moment

        def killed(*_: object) -> NoReturn:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(*((Work, "close", killed) if name == "close" else (shutil, "rmtree", killed)))
            with pytest.raises(KeyboardInterrupt):
                run(out)
        assert verify(out).samples == 48, "the bundle is whole"
        if name == "close":
            with pytest.raises(UserError, match="holds an unfinished evaluation of something else"):
                run(out, seed=3)
            run(out)  # nothing is left to compute, and the work is cleared away
        else:
            with pytest.raises(UserError, match="it is finished"):
                run(out)
        assert contents(out) == contents(tmp_path / "whole")
        assert names(out) == names(tmp_path / "whole")


# Another run is refused, with what differs.


@pytest.fixture
def unfinished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """All attacks done, and the bundle not written."""

    def killed(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("steelman.evaluation.evaluate.write_bundle", killed)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "out")
    return tmp_path / "out"


def other_model() -> nn.Module:
    model = a_model()
    with torch.no_grad():
        model.out.bias[0] += 1e-6
    return model


OTHER: dict[str, tuple[dict[str, Any], str]] = {
    "seed": ({"seed": 7}, "seed was 0, is 7"),
    "batch size": ({"batch_size": 10}, "batch_size was 20, is 10"),
    "radius": ({"threat": ThreatModel(eps=0.06)}, r"threat\.eps was 0\.05, is 0\.06"),
    "norm": ({"threat": ThreatModel(eps=EPS, norm="l2")}, r"threat\.norm was linf, is l2"),
    "model": ({"model": other_model()}, "weights differs"),
    "name": ({"name": "other"}, "model was model, is other"),
    "samples": ({"samples": 30}, "total was 48, is 30"),
    "steps": (
        {"suite": {**ATTACKS, "two": PGD(steps=3, loss="margin")}},
        r"suite\.stages\.1\.attack\.steps was 2, is 3",
    ),
    "suite": ({"suite": {"one": ATTACKS["one"]}}, r"suite\.stages differs"),
}


@pytest.mark.parametrize("name", OTHER)
def test_another_run_does_not_go_on_from_this_one(unfinished: Path, name: str) -> None:
    changes, expected = OTHER[name]
    with pytest.raises(UserError, match=rf"holds an unfinished evaluation of something else \(.*{expected}"):
        run(unfinished, **changes)
    run(unfinished)
    assert read_bundle(unfinished).record["seed"] == 0


def test_other_data_do_not_go_on_from_these(unfinished: Path) -> None:
    """Even where every batch is done, and nothing would be read again."""
    source = the_data()
    x, y = source.images(torch.arange(48)), source.labels
    moved, relabelled = x.clone(), y.clone()
    moved[41, 0, 0, 0] = 1 - moved[41, 0, 0, 0]
    relabelled[3] = (relabelled[3] + 1) % 3
    for images, labels, row in ((moved, y, 41), (x, relabelled, 3)):
        with pytest.raises(UserError, match=f"the data have changed since this evaluation began: sample {row} is"):
            run(unfinished, source=type(source)(images, labels, source.classes))


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff"])
def test_a_damaged_mark_is_named(unfinished: Path, content: bytes) -> None:
    (unfinished / "work" / "run.json").write_bytes(content)
    with pytest.raises(UserError, match=r"run\.json is damaged"):
        run(unfinished)


def test_a_damaged_batch_is_named_and_can_be_computed_again(unfinished: Path, tmp_path: Path) -> None:
    batch = sorted((unfinished / "work").glob("01-*"))[1]
    batch.write_bytes(batch.read_bytes()[:40])
    with pytest.raises(UserError, match=rf"{batch.name} does not fit its checksum; delete it"):
        run(unfinished)
    batch.unlink()
    run(unfinished)
    run(tmp_path / "whole")
    assert contents(unfinished) == contents(tmp_path / "whole")


# Disks.


@pytest.mark.parametrize("fails_at", [1, 3, 7, 10, 12, 13])
def test_a_full_disk_is_named_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    """The mark is the first file to be written; then batches; then the bundle."""
    out, real, written = tmp_path / "out", os.fsync, [0]

    def full(descriptor: int) -> None:
        written[0] += 1
        if (written[0] + 1) // 2 >= fails_at:  # a file is flushed, then its folder
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(UserError, match=r"cannot write .*: No space left on device\. What is finished is kept"):
            run(out)
    assert not (out / "evidence.json").exists() or fails_at == 13
    done = len(list((out / "work").glob("*.batch")))
    assert done == min(fails_at - 2, 9) if fails_at > 1 else done == 0
    run(out)
    run(tmp_path / "whole")
    assert contents(out) == contents(tmp_path / "whole")
    assert names(out) == names(tmp_path / "whole")


def test_a_full_disk_under_the_images(unfinished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written, not mapped: a mapped file would end the process with SIGBUS."""

    def full(*_: object) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(UserError, match=r"cannot write .*points\.bin: No space left on device"):
            run(unfinished)
    run(unfinished)
    verify(unfinished, model=a_model(), source=the_data())


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("x")
    for place in (tmp_path / "file", tmp_path / "file" / "out", Path("/proc/steelman/out")):
        with pytest.raises(UserError, match=f"cannot write {place}"):
            run(place)

    def refused(*_: object, **__: object) -> NoReturn:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    (tmp_path / "out").mkdir()
    monkeypatch.setattr(ledger, "write_atomic", refused)
    with pytest.raises(UserError, match=r"cannot write .*: Permission denied"):
        run(tmp_path / "out")


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object) -> NoReturn:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", unknown)
    run(tmp_path / "out")
    assert (tmp_path / "out" / "evidence.json").exists()


# The bundle.


def test_a_file_of_images_is_small_whatever_the_size_of_an_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundles, "SHARD_BYTES", 3 * 16 * 4)
    run(tmp_path / "out")
    bundle = read_bundle(tmp_path / "out")
    sizes = [len(rows) for rows, _ in bundle.images()]
    assert set(sizes[:-1]) == {3}
    assert sum(sizes) == int((bundle.samples["broken_by"] >= 0).sum()) > 3
    monkeypatch.setattr(bundles, "SHARD_BYTES", 1)
    run(tmp_path / "one")
    assert {len(rows) for rows, _ in read_bundle(tmp_path / "one").images()} == {1}


def test_a_model_that_nothing_breaks_leaves_no_images(tmp_path: Path) -> None:
    run(tmp_path / "out", threat=ThreatModel(eps=1e-9), tiny_eps=True)
    assert list(read_bundle(tmp_path / "out").images()) == []
    assert verify(tmp_path / "out", model=a_model(), source=the_data()).broken == 0


def test_the_record_holds_no_times_and_all_settings(tmp_path: Path) -> None:
    run(tmp_path / "out", seed=5)
    text = (tmp_path / "out" / "evidence.json").read_text()
    assert "seconds" not in text
    record = json.loads(text)
    assert record["seed"] == 5
    assert record["threat"] == {"norm": "linf", "eps": EPS, "low": 0.0, "high": 1.0}
    assert record["suite"]["stages"][1]["attack"]["steps"] == 2
    assert record["versions"]["torch"] == torch.__version__
    assert record["weights"] == weights_digest(a_model())
