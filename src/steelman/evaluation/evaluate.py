"""Evaluation: attack, then believe only what is checked here. No attack's word is taken for its own success."""

from __future__ import annotations

import contextlib
import dataclasses
import operator
import platform
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import numpy
import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn

import steelman
from steelman.attacks import PGD, Attack
from steelman.attacks.eot import EOT
from steelman.data.source import ArraySource, Source
from steelman.errors import UserError
from steelman.evaluation.bfloat16 import CHOICES, settled
from steelman.evaluation.checks import check_contract, check_manners, check_model
from steelman.evaluation.curve import measured_with
from steelman.evaluation.pilot import look_ahead
from steelman.evaluation.result import Evaluation, Flag, Trust, Verdict
from steelman.evaluation.runner import Runner
from steelman.evaluation.selftest import self_test
from steelman.evaluation.stages import Suite, protocol
from steelman.evaluation.suites import suite_named
from steelman.evaluation.verdict import doubts, examples, notes, scores
from steelman.evidence.bundle import weights_digest, write_bundle
from steelman.evidence.ledger import WRONG, Ledger, Work, writing
from steelman.precision import full_precision
from steelman.rng import Key
from steelman.threat import ThreatModel

DEFAULT_ATTACKS: dict[str, Attack] = {
    "FGSM": PGD(steps=1, start="zero"),
    "PGD-20": PGD(steps=20),
    "PGD-20 margin": PGD(steps=20, loss="margin"),
}


def evaluate(
    model: nn.Module,
    x: Tensor | Source,
    y: Tensor | None,
    threat: ThreatModel,
    suite: str | Suite | Mapping[str, Attack] = "standard",
    *,
    name: str = "model",
    data_name: str = "data",
    samples: int | None = None,
    batch_size: int = 256,
    seed: int = 0,
    minutes: float | None = None,
    out: Path | str | None = None,
    curve: bool = True,
    gallery: int = 8,
    surrogates: Sequence[nn.Module] = (),
    precision: str = "auto",
    workers: int = 0,
    device: torch.device | None = None,
    console: Console | None = None,
) -> Evaluation:
    """Accuracy, clean and under attack, with all that is needed to read it and, in `out`, to check it.

    `suite` is the name of one ("fast", "standard", "full", ...), a Suite, or attacks by label: then each attacks every
    sample that the model gets right. Every point is checked for range, radius and prediction in full precision, and one
    that breaks a rule does not count. "worst case" is a sample's worst fate.

    Arguments: `x` and `y` are images and labels, or `x` is a source and `y` None; `samples` takes only the first that
    many; `minutes` ends a cascade when they are over, with what is known by then; `out` is where evidence is kept, and
    where an evaluation that was interrupted goes on; `surrogates` are other models for the same task, whose adversarial
    points are tried on this one to see whether its gradients mislead; `precision` is what the first, coarse searches of
    a cascade run in: "auto" takes bfloat16 where machine and model are up to it, and the evidence says what it took.

    >>> from steelman.heads import linear
    >>> net = nn.Sequential(nn.Flatten(), linear(16, 2)).eval()
    >>> x, y = torch.rand(16, 1, 4, 4), torch.randint(2, (16,))
    >>> found = evaluate(net, x, y, ThreatModel(eps=0.1), "fast")
    >>> found.verdict.correct <= found.score("clean").correct
    True
    """
    started = time.monotonic()
    chosen = _chosen(suite, threat)
    seed, batch_size, gallery = _whole("seed", seed), _whole("batch_size", batch_size, 1), _whole("gallery", gallery, 0)
    samples = None if samples is None else _whole("samples", samples, 1)
    if minutes is not None and not minutes > 0:
        raise UserError(f"minutes: expected a time above 0, got {minutes}")
    if precision not in CHOICES:
        raise UserError(f"precision: expected one of {', '.join(CHOICES)}, got {precision!r}")
    out = None if out is None else Path(out)
    with contextlib.ExitStack() as stack:
        check_model(model)
        source = _source(x, y, threat)
        device = device or next((p.device for p in model.parameters()), torch.device("cpu"))
        _check_surrogates(surrogates, device)
        # Whatever the caller computes in, the answers are judged in full precision, and attacks need gradients.
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.autocast(device.type, enabled=False))
        stack.enter_context(full_precision())
        classes = check_contract(model, source, threat, device)
        random = check_manners(
            model, source, device, random=all(isinstance(s.attack, EOT) for s in chosen.stages), most=batch_size
        )
        chosen = settled(chosen, precision, model, source, threat, device, batch_size)
        total = len(source) if samples is None else min(samples, len(source))
        names = source.classes if len(source.classes) == classes else tuple(map(str, range(classes)))
        settings = {
            "model": name,
            "weights": weights_digest(model),
            "data": data_name,
            "total": total,
            "threat": dataclasses.asdict(threat),
            "suite": _described(chosen),
            "seed": seed,
            "batch_size": batch_size,
            "versions": versions(),
        }
        tell = stack.enter_context(progress(console, name))
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="steelman-"))) if out is None else out
        work = stack.enter_context(Work(place / "work", settings))
        run = Runner(
            model=model,
            source=source,
            threat=threat,
            suite=chosen,
            key=Key(seed),
            device=device,
            total=total,
            batch_size=batch_size,
            workers=workers,
            work=work,
            tell=tell,
        )
        run.clean()
        if not chosen.protocol:
            self_test(chosen, model, source, threat, classes, device)
        # The curve is PGD's, and whoever asks for black-box attacks alone may have no gradient.
        blind = all(getattr(stage.attack, "black_box", False) for stage in chosen.stages)
        deadline = started + 60 * minutes if minutes else None
        if chosen.protocol:  # what was asked for comes first
            run.stages([], deadline)
        flags, points = look_ahead(run, deadline, surrogates, curve=curve and not blind)
        if run.complete and not chosen.protocol:
            run.stages(flags, deadline)
        found = Evaluation(
            model=name,
            data=data_name,
            classes=names,
            norm=threat.norm,
            eps=threat.eps,
            low=threat.low,
            high=threat.high,
            seed=seed,
            total=total,
            versions=versions(),
            scores=scores(run),
            curve=points,
            curve_attack=measured_with(chosen),
            gallery=examples(run, gallery if source.shape[0] in (1, 3) else 0),
            notes=tuple(notes(run)),
            verdict=_verdict(run, [*flags, *doubts(run)], random=random),
            stages=tuple(run.records),
            right=tuple(torch.bincount(run.ledger.label[run.ledger.right], minlength=classes).tolist()),
            confusion=_confusion(run.ledger, classes),
            margins=tuple(round(value, 6) for value in run.ledger.margin[run.ledger.alive].sort().values.tolist()),
        )
        if out is not None:
            with writing(out):
                write_bundle(out, settings, run.ledger, found)
                found.save(out)
            if run.complete:  # else the same call, with more time, goes on from here
                work.close()
    return found


def _chosen(suite: str | Suite | Mapping[str, Attack], threat: ThreatModel) -> Suite:
    if isinstance(suite, Suite):
        return suite
    if not isinstance(suite, (str, Mapping)):
        raise UserError(f"suite: expected a name, a Suite or attacks by label, got {type(suite).__name__}")
    return suite_named(suite, threat) if isinstance(suite, str) else protocol(suite)


def _whole(name: str, value: int, least: int | None = None) -> int:
    """A whole number of any kind as Python's own, for it is written down."""
    try:
        number = operator.index(value)
    except TypeError:
        raise UserError(f"{name}: expected a whole number, got {value!r}") from None
    if least is not None and number < least:
        raise UserError(f"{name}: expected at least {least}, got {value}")
    return number


def _check_surrogates(surrogates: Sequence[nn.Module], device: torch.device) -> None:
    for surrogate in surrogates:
        check_model(surrogate)
        place = next((parameter.device for parameter in surrogate.parameters()), device)
        if place.type != device.type:
            raise UserError(f"surrogates: expected models on {device}, where the model is, got one on {place}")


def _source(x: Tensor | Source, y: Tensor | None, threat: ThreatModel) -> Source:
    if isinstance(x, Source):
        if y is not None:
            raise UserError("expected y None with a source, which has its own labels")
        return x
    if y is None:
        raise UserError("expected labels y with images x, got None")
    if isinstance(x, Tensor) and x.is_inference():
        with torch.inference_mode(False):
            x = x.clone()
    return ArraySource(x, y, bounds=(threat.low, threat.high))


def _verdict(run: Runner, flags: list[Flag], *, random: bool) -> Verdict:
    """What may be believed: the worst that any raised flag leaves."""
    order = list(get_args(Trust))
    raised = [one for one in flags if one.raised]
    unsure = random or not run.complete
    worst: list[Trust] = ["suspect" if unsure else "sound", *(one.trust for one in raised)]
    reasons = [one.text for one in raised]
    if random:
        reasons.append("the model is random: another draw of its noise may give another answer")
    if run.suite.protocol:
        reasons.append("a protocol of given attacks: an upper bound, which a stronger attack may lower")
    if not run.complete:
        reasons.append("the time ran out before all attacks had run: an upper bound, the tightest so far")
    return Verdict(
        correct=int(run.ledger.alive.sum()),
        total=run.total,
        suite=run.suite.name,
        trust=max(worst, key=order.index),
        reasons=tuple(reasons),
        flags=tuple(flags),
        complete=run.complete,
        escalated=run.escalated,
        protocol=run.suite.protocol,
    )


def _confusion(ledger: Ledger, classes: int) -> tuple[tuple[int, ...], ...]:
    """Rows are true classes, columns what the model says under attack (clean, where it was wrong already)."""
    said = torch.where(ledger.broken_by == WRONG, ledger.clean, ledger.guess)
    said = torch.where(ledger.alive, ledger.label, said)
    table = torch.zeros(classes, classes, dtype=torch.int64)
    table.index_put_((ledger.label, said), torch.ones(len(said), dtype=torch.int64), accumulate=True)
    return tuple(tuple(row) for row in table.tolist())


def _described(suite: Suite) -> dict[str, Any]:
    """A suite as plain values."""
    stages = [
        {**{f.name: getattr(s, f.name) for f in dataclasses.fields(s)}, "attack": s.described()} for s in suite.stages
    ]
    return {"name": suite.name, "protocol": suite.protocol, "stages": stages}


def versions() -> dict[str, str]:
    """What a number depends on besides settings."""
    return {
        "steelman": steelman.__version__,
        "torch": str(torch.__version__),
        "numpy": numpy.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }


@contextmanager
def progress(console: Console | None, name: str) -> Iterator[Callable[[str, int, int], None]]:
    """A line that says what is being done, where somebody can see it."""
    if console is None or not console.is_terminal:
        yield lambda *_: None
        return
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task(name)
        yield lambda what, done, total: bar.update(
            task, description=f"{name}: {what}", completed=done, total=max(total, 1)
        )
