"""Evaluation: attack a model, check every point that an attack gives, and count only the points that pass."""

from __future__ import annotations

import contextlib
import dataclasses
import platform
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn

import steelman
from steelman.arguments import check_printable, number_of, path_of, text_of
from steelman.attacks import PGD, Attack
from steelman.attacks.eot import EOT
from steelman.data.source import Source, knows_classes, name_of
from steelman.errors import UserError
from steelman.evaluation.bfloat16 import settled
from steelman.evaluation.checks import ContractError, check_contract, check_model, source_of, threat_of
from steelman.evaluation.conclude import examples, kept_of, scores
from steelman.evaluation.curve import measured_with, searched_in
from steelman.evaluation.findings import Findings
from steelman.evaluation.manners import Witness, check_manners
from steelman.evaluation.pilot import look_ahead
from steelman.evaluation.result import Evaluation
from steelman.evaluation.runner import Runner
from steelman.evaluation.selftest import self_test
from steelman.evaluation.stages import Suite, described, whole
from steelman.evaluation.suites import suite_of
from steelman.evaluation.verdict import doubtful, notes_of, verdict_of
from steelman.evidence.bundle import device_of, weights_digest, write_bundle
from steelman.evidence.ledger import Work
from steelman.evidence.rebuild import confusion_of, margins_of, right_of
from steelman.models.wrap import detected
from steelman.precision import full_precision
from steelman.progress import Ticker, note, say
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
    out: Path | str | None = None,
    name: str = "model",
    seed: int = 0,
    minutes: float | None = None,
    batch_size: int = 256,
) -> Evaluation:
    """Accuracy without an attack and under the attacks of a suite, with a verdict and its settings.

    `suite` is the name of a suite ("fast", "standard", "full", ...), a Suite, or attacks by label. With attacks by
    label, each attack gets every sample that the model gets right. Every point is checked in full precision: its range,
    its radius and the model's prediction. A point that breaks a rule does not count. The score "worst case" counts the
    samples that no attack broke. A model that answers with ``.logits``, a dict or a tuple is wrapped, with a message.

    Arguments: `x` and `y` are images and labels, or `x` is a source and `y` is None. `out` is the folder for the
    evidence; an interrupted evaluation continues from the same `out`. `name` is the model's name in the records.
    `minutes` is a time limit. When it is over, the attacks end, and the verdict says so. The model is attacked on its
    own device.

    Other options belong to the suite: precision, curve, gallery and surrogates. For example,
    ``suite_named("fast", threat, curve=False)`` has no curve. ``first(source, 1000)`` takes a part of a source. A block
    ``with showing(console)`` shows progress.

    >>> from steelman.heads import linear
    >>> net = nn.Sequential(nn.Flatten(), linear(16, 2)).eval()
    >>> x, y = torch.rand(16, 1, 4, 4), torch.randint(2, (16,))
    >>> found = evaluate(net, x, y, ThreatModel(eps=0.1), "fast")
    >>> found.verdict.correct <= found.score("clean").correct
    True
    """
    started = time.monotonic()
    threat_of(threat)
    chosen = suite_of(suite, threat)
    seed, batch_size = whole("seed", seed), whole("batch_size", batch_size, 1)
    if minutes is not None and not number_of("minutes", minutes, "a time above 0") > 0:
        raise UserError(f"minutes: expected a time above 0, got {minutes}")
    out, name = None if out is None else path_of("out", out), text_of("name", name)
    with contextlib.ExitStack() as stack:
        check_model(model)
        source, device = source_of(x, y, threat), device_of(model)
        _check_surrogates(chosen.surrogates, device)
        # The caller may be in autocast or inference mode. Points need full precision, and attacks need gradients.
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.autocast(device.type, enabled=False))
        stack.enter_context(full_precision())
        witness, bare = Witness(model), model  # before the first question
        model, sentence = detected(bare, source.images(torch.arange(min(2, len(source)))).to(device))
        if sentence:
            say(sentence)
        classes = check_contract(model, source, threat, device, tiny_eps=chosen.tiny_eps)
        if not chosen.more_outputs:
            check_outputs(source, classes)
        manners = check_manners(
            model, source, device, random=all(isinstance(s.attack, EOT) for s in chosen.stages), most=batch_size
        )
        chosen = settled(chosen, model, source, threat, device, batch_size)
        names = source.classes if len(source.classes) == classes else tuple(map(str, range(classes)))
        stages = [stage.name for stage in chosen.stages]
        for what, texts in {"name": [name], "classes": names, "data": [name_of(source)], "stages": stages}.items():
            for text in texts:
                check_printable(what, text)
        settings: dict[str, Any] = {
            "model": name,
            "weights": weights_digest(model),
            "data": name_of(source),
            "total": len(source),
            "threat": dataclasses.asdict(threat),
            "suite": described(chosen),
            "seed": seed,
            "batch_size": batch_size,
            "versions": versions(),
        }
        tell = stack.enter_context(Ticker(chosen.name))
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="steelman-"))) if out is None else out
        begun = " (begun before; going on where it stopped)" if (place / "work").exists() else ""
        work = stack.enter_context(Work(place / "work", settings))
        if out is not None:
            note(f"evidence: {place}{begun}")
        run = Runner(
            model=model,
            source=source,
            threat=threat,
            suite=chosen,
            key=Key(seed),
            device=device,
            batch_size=batch_size,
            work=work,
            tell=tell,
            # A random model contradicts its copy by chance.
            witness=None if manners.random else witness.dressed(bare, model),
            grain=manners.grain,
        )
        run.clean()
        deadline = started + 60 * minutes if minutes else None
        if chosen.protocol:  # the user asked for its attacks, so a time limit should cut the curve first
            run.stages(Findings(), deadline, lambda: False)
            findings = look_ahead(run, deadline)
        else:
            self_test(chosen, model, source, threat, classes, device)
            findings = look_ahead(run, deadline)
            run.stages(findings, deadline, lambda: doubtful(kept_of(run, findings)))
        kept, columns = kept_of(run, findings, names, random=manners.random), run.ledger.columns()
        found = Evaluation(
            model=name,
            data=settings["data"],
            classes=names,
            norm=threat.norm,
            eps=threat.eps,
            low=threat.low,
            high=threat.high,
            seed=seed,
            total=run.total,
            versions=settings["versions"],
            scores=scores(run),
            curve=findings.curve,
            curve_attack=measured_with(searched_in(chosen), protocol=chosen.protocol),
            gallery=examples(run, chosen.gallery if source.shape[0] in (1, 3) else 0),
            notes=notes_of(kept),
            verdict=verdict_of(kept),
            stages=tuple(run.records),
            right=right_of(columns, classes),
            confusion=confusion_of(columns, classes),
            margins=margins_of(columns),
        )
        if out is not None:
            write_bundle(out, settings, run.ledger, found, kept)
            if run.complete:  # if not complete, the same call with more time continues from this folder
                work.close()
    return found


def check_outputs(source: Source, classes: int) -> None:
    """Refuse a model with more outputs than the data have classes: its outputs may stand for other classes."""
    if knows_classes(source) and classes > len(source.classes):
        shown = ", ".join(source.classes[:4]) + (", ..." if len(source.classes) > 4 else "")
        raise ContractError(
            "outputs",
            f"the model has {classes} outputs, and the data have {len(source.classes)} classes ({shown}); if that is "
            'meant, say so: steelman.suite_named("fast", threat, more_outputs=True), or --more-outputs',
        )


def _check_surrogates(surrogates: Sequence[nn.Module], device: torch.device) -> None:
    for surrogate in surrogates:
        check_model(surrogate)
        if (place := device_of(surrogate)).type != device.type:
            raise UserError(f"surrogates: expected models on {device}, where the model is, got one on {place}")


def versions() -> dict[str, str]:
    """The versions of the software, and the platform. The results also depend on these."""
    return {
        "steelman": steelman.__version__,
        "torch": str(torch.__version__),
        "numpy": numpy.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
