"""Checks the claims of evidence against each other, without the model and the data.

A claim that follows from other claims is computed again. Counts follow from samples, draws from the seed, the plan from
the suite's name, and flags from measurements. The verdict follows from all of these. No attack runs.
"""

from __future__ import annotations

import json
from typing import Any, get_args

import torch
from torch import Tensor

import steelman
from steelman.errors import UserError
from steelman.evaluation.curve import CURVE_SAMPLES, measured_with, radii_of
from steelman.evaluation.result import Trust
from steelman.evaluation.signs import SIGNS, SOMETIMES, UPHILL
from steelman.evaluation.stages import described
from steelman.evaluation.suites import SUITES, suite_named
from steelman.evaluation.verdict import Kept, notes_of, verdict_of
from steelman.evidence.bundle import GIVEN, OWN, Bundle, DamagedError, data_digest, digest_of
from steelman.evidence.ledger import ROBUST, WRONG, drawn, pilot_size, sentinel_size, share_size
from steelman.evidence.rebuild import kept_in
from steelman.rng import Key


def check_consistency(bundle: Bundle) -> Kept:
    """Raise an error at the first claim that contradicts another. Returns what the verdict follows from."""
    _columns(bundle)
    _counts(bundle)
    _stages(bundle)
    kept = kept_in(bundle)
    _pilot(bundle, kept)
    _planned(bundle, kept)
    _curve(bundle, kept)
    _verdict(bundle, kept)
    _around(bundle)
    return kept


def stranger(bundle: Bundle) -> str:
    """A sentence if the suite is not one of steelman's, else an empty text. A suite that only has the name is refused.

    Precision may be full in all stages: not every machine and model can do with less.
    """
    claimed, name = bundle.record["suite"], bundle.record["suite"]["name"]
    if name not in SUITES:
        return f"the suite {name!r} is not one of steelman's"
    try:
        suite = suite_named(name, bundle.threat)
    except UserError as error:
        raise DamagedError(f"no evidence of the suite {name} can be of this threat model: {error}") from None
    plain: dict[str, Any] = json.loads(json.dumps(described(suite)))
    if claimed in (plain, _in_full(plain)):
        return ""
    if bundle.version != steelman.__version__:
        return f"the suite {name!r} of steelman {bundle.version} is not that of steelman {steelman.__version__}"
    if claimed["protocol"] == plain["protocol"] and len(claimed["stages"]) == len(plain["stages"]):
        pairs = zip(claimed["stages"], plain["stages"], strict=True)
        other = next((one["name"] for one, own in pairs if one != own), "")
        raise DamagedError(f"the stage {other!r} is not that of the suite {name!r} with this threat model")
    raise DamagedError(f"the stages are not those of the suite {name!r} with this threat model")


def _in_full(plan: dict[str, Any]) -> dict[str, Any]:
    return {**plan, "stages": [{**stage, "precision": "full"} for stage in plan["stages"]]}


def _around(bundle: Bundle) -> None:
    """Raise if the evidence is in a run's folder, and of another model than the run's."""
    weights = bundle.folder.parent / "model.safetensors"
    if bundle.folder.name not in (OWN, GIVEN) or not weights.is_file():
        return
    from steelman.models.classifier import load_state  # models need attacks, and most checks need no model

    state = load_state(weights)
    # A wrapper around the model puts its own name before those of the weights.
    if bundle.record["weights"] not in (digest_of(state), digest_of({f"model.{key}": state[key] for key in state})):
        raise DamagedError(f"{bundle.folder} is evidence of another model than {weights}")


def _columns(bundle: Bundle) -> None:
    """Raise if a claim about a single sample is impossible."""
    samples, classes = bundle.samples, len(bundle.record["classes"])
    broken_by, label = samples["broken_by"], samples["label"]
    for name in ("label", "clean", "guess"):
        if bool(((samples[name] < 0) | (samples[name] >= classes)).any()):
            raise DamagedError(f"samples.safetensors: {name} is not always one of the {classes} classes")
    if bool(((broken_by < WRONG) | (broken_by >= len(bundle.record["suite"]["stages"]))).any()):
        raise DamagedError("a sample is claimed to be broken by a stage that the suite does not have")
    if bool(((samples["clean"] == label) != (broken_by != WRONG)).any()):
        raise DamagedError("a sample is counted as right or wrong against what the model said of it")
    broken, wrong = broken_by >= 0, broken_by == WRONG
    if bool((broken & (samples["guess"] == label)).any()):
        raise DamagedError("a sample is claimed to be broken by an image that the model gets right")
    if bool((wrong & (samples["unclear"] | (samples["guess"] != samples["clean"]))).any()):
        raise DamagedError("a sample that is wrong without an attack is claimed to have been attacked")
    for name in ("margin", "lead"):
        if not bool(samples[name].isfinite().all()) or bool((broken & (samples[name] >= 0)).any()):
            raise DamagedError(f"samples.safetensors: {name} is not a number, or not below 0 where a sample is broken")
    counts = [samples[name] for name in ("passes", "forwards", "backwards")]
    if any(bool(((count < 0) | (count > 1 << 40)).any()) for count in counts) or bool((counts[0] > counts[1]).any()):
        raise DamagedError("samples.safetensors: the counts of passes cannot be")
    if bool((~broken & (counts[0] != 0)).any()) or bool((wrong & ((counts[1] != 1) | (counts[2] != 0))).any()):
        raise DamagedError("samples.safetensors: passes are counted for a sample that no attack broke")


def _counts(bundle: Bundle) -> None:
    """Raise unless the total counts agree with the samples, and names are given once."""
    record, samples = bundle.record, bundle.samples
    expected = {
        "clean_correct": int((samples["broken_by"] != WRONG).sum()),
        "robust_correct": int((samples["broken_by"] == ROBUST).sum()),
        "data_digest": data_digest(samples["digest"]),
    }
    for key, value in expected.items():
        if record[key] != value:
            raise DamagedError(f"evidence.json: {key} is {record[key]}, and the samples say {value}")
    for what, names in (
        ("classes", record["classes"]),
        ("stages of the suite", [stage["name"] for stage in record["suite"]["stages"]]),
        ("stages", [stage["name"] for stage in record["stages"]]),
    ):
        if len(set(names)) != len(names):
            raise DamagedError(f"evidence.json: two of the {what} have one name")


def _stages(bundle: Bundle) -> None:
    """Raise unless the stages that ran are the suite's, in its order, and their counts agree with the samples."""
    record, samples = bundle.record, bundle.samples
    planned = {stage["name"]: (number, stage) for number, stage in enumerate(record["suite"]["stages"])}
    last, left, ran = -1, record["clean_correct"], record["stages"]
    for done in ran:
        name = done["name"]
        number, _ = planned.get(name, (-1, {}))
        if number <= last:
            raise DamagedError(f"{name} is not a stage of the suite, or not in its place")
        count = int((samples["broken_by"] == number).sum())
        if record["suite"]["protocol"]:  # each stage attacks all samples, and `broken_by` is the first that broke one
            fits = done["broken"] >= count and done["left"] == record["clean_correct"] - done["broken"]
            fits = fits and (number > 0 or done["broken"] == count)
        else:
            fits = done["broken"] == count and done["left"] == left - count
        if not fits or not count <= done["broken"] <= done["attacked"] <= left:
            said = ", ".join(f"{done[key]} {key}" for key in ("attacked", "broken", "left"))
            raise DamagedError(f"the counts of {name} do not add up: {said}, and {count} samples say it broke them")
        if max(done["outside"], done["nonfinite"], done["refuted"]) > done["attacked"] - done["broken"]:
            raise DamagedError(f"{name} counts more points that could not be counted than it had")
        if not done["contradicted"] <= done["witnessed"] <= done["attacked"]:
            raise DamagedError(f"{name} counts more answers of the model's copy than it asked for")
        last, left = number, record["clean_correct"] if record["suite"]["protocol"] else done["left"]
    numbers = {planned[done["name"]][0] for done in ran}
    idle = [name for name, (number, _) in planned.items() if number not in numbers]
    for name in idle:
        if bool((samples["broken_by"] == planned[name][0]).any()):
            raise DamagedError(f"samples are claimed to be broken by {name}, which did not run")
    for kind, clean in (("forwards", record["total"]), ("backwards", 0)):
        total = clean + sum(done[kind] for done in ran)
        if int(samples[kind].sum()) != total:
            raise DamagedError(f"the stages count {total} {kind}, and the samples {int(samples[kind].sum())}")
    verdict = record["verdict"]
    wanted = [name for name in idle if planned[name][1]["role"] != "escalation" or verdict["escalated"]]
    if verdict["complete"] and wanted:
        raise DamagedError(f"the verdict is claimed to be complete, and {wanted[0]} did not run")


def _pilot(bundle: Bundle, kept: Kept) -> None:
    """Raise unless the pilot looked at the samples that the seed draws, and measured each sign."""
    if kept.protocol:
        return
    samples, rows, done = bundle.samples, kept.signs["rows"], len(kept.signs["rows"])
    right = (samples["broken_by"] != WRONG).nonzero()[:, 0]
    order = drawn(Key(bundle.record["seed"]), samples["digest"], right, "pilot")
    expected = order[: pilot_size(kept.total)].sort().values
    if kept.look_cut != (None if done == len(expected) else (done, len(expected))):
        raise DamagedError(f"the pilot looked at {done} of {len(expected)} samples, and something else is claimed")
    if not torch.equal(rows, expected[:done]):
        raise DamagedError("the samples that the pilot looked at are not those that the seed draws")
    first = bundle.record["suite"]["stages"][0]
    broken = rows[kept.signs["broken"]]
    if first["role"] == "pilot" and not torch.equal(broken, (samples["broken_by"] == 0).nonzero()[:, 0]):
        raise DamagedError("the samples that the pilot broke are not those of its measurements")
    if not done:
        return
    zero = kept.signs.get("zero gradients", torch.zeros(0))
    if len(zero) != done or bool(((zero != 0) & (zero != 1)).any()):
        raise DamagedError("the flag 'zero gradients' was not measured")
    needed = SIGNS.keys() - SOMETIMES - (UPHILL if bool((zero == 1).all()) else set())
    if missing := sorted(needed - kept.signs.keys()):
        raise DamagedError(f"the flag {missing[0]!r} was not measured")
    for name in SIGNS.keys() & kept.signs.keys():
        of, count = kept.signs.get(f"{name}, of"), kept.signs[name].double()
        if bool((count > (1 if of is None else of.double().sum())).any()):
            raise DamagedError(f"the flag {name!r} counts more points than were tried")


def _planned(bundle: Bundle, kept: Kept) -> None:
    """Raise unless each stage attacked as many samples as its plan says, and what the time cut short is said."""
    record, samples = bundle.record, bundle.samples
    numbers = {stage["name"]: (number, stage) for number, stage in enumerate(record["suite"]["stages"])}
    watched: Tensor | None = None
    ran = record["stages"]
    if kept.cut and (list(kept.cut) != [ran[-1]["name"] if ran else ""]):
        raise DamagedError("the time is claimed to have run out in a stage that is not the last")
    if not kept.protocol and kept.look_cut is not None and (kept.cut or len(ran) > 1):
        raise DamagedError("the time is claimed to have run out in the pilot, and stages ran after it")
    for done in ran:
        number, stage = numbers[done["name"]]
        # Before this stage, the robust samples were those that it or a later stage broke, or none.
        robust = (samples["broken_by"] == ROBUST) | (samples["broken_by"] >= number)
        if kept.protocol:
            expected = record["clean_correct"]
        elif stage["role"] == "pilot":
            expected = len(kept.signs["rows"])
        elif stage["role"] == "sentinel":
            if watched is None:  # all sentinel stages use one draw of samples
                rows = robust.nonzero()[:, 0]
                order = drawn(Key(record["seed"]), samples["digest"], rows, "sentinel")
                watched = torch.zeros_like(robust)
                watched[order[: sentinel_size(stage["share"], len(rows), record["total"])]] = True
            if bool(((samples["broken_by"] == number) & ~watched).any()):
                raise DamagedError(f"{done['name']} broke a sample that the seed does not draw for it")
            expected = int((watched & robust).sum())
        else:
            expected = share_size(stage["share"], int(robust.sum()))
        cut = kept.cut.get(done["name"])
        if done["attacked"] != (expected if cut is None else cut[0]):
            raise DamagedError(f"{done['name']} attacked {done['attacked']} samples, and its share was {expected}")
        if cut is not None and not (cut[1] == expected and cut[0] < expected):
            raise DamagedError(f"{done['name']} is claimed to have been cut short, and its share was {expected}")


def _curve(bundle: Bundle, kept: Kept) -> None:
    """Raise unless the curve has the radii and the samples of its plan, and does not rise."""
    points, right = kept.curve, bundle.samples["broken_by"] != WRONG
    shape = (bundle.record["shape"][0], bundle.record["shape"][1], bundle.record["shape"][2])
    if kept.protocol:
        planned, done = min(kept.total, CURVE_SAMPLES), points[0].total if points else 0
        if kept.look_cut is not None and kept.look_cut != (done, planned):
            raise DamagedError("the curve is claimed to have been cut short, and its counts say something else")
        if points and kept.look_cut is None and done != planned:
            raise DamagedError(f"the curve counts {done} samples, and its plan was {planned}")
        first = int(right[:done].sum())
    else:
        done = first = len(kept.signs["rows"])
    if points and [point.eps for point in points] != radii_of(bundle.threat, shape, protocol=kept.protocol):
        raise DamagedError("the radii of the curve are not those that follow from eps and the range")
    counts = [point.correct for point in points]
    if points and (counts[0] != first or counts != sorted(counts, reverse=True)):
        raise DamagedError(
            f"the curve counts {points[0].correct} samples at radius 0, or rises; {first} are right there"
        )
    if any(point.total != done for point in points):
        raise DamagedError(f"the curve counts {points[0].total} samples, and {done} were looked at")
    precisions = {stage["precision"] for stage in bundle.record["suite"]["stages"]}
    attack = measured_with("bfloat16" if "bfloat16" in precisions else "full", protocol=kept.protocol)
    if bundle.record["curve_attack"] != attack and bundle.version == steelman.__version__:
        raise DamagedError(
            f"the curve's attack is claimed to be {bundle.record['curve_attack'][:80]!r}, not {attack!r}"
        )


def _verdict(bundle: Bundle, kept: Kept) -> None:
    """Raise unless flags, trust, reasons and notes follow from what was kept."""
    claimed, order = bundle.record["verdict"], list(get_args(Trust))
    made, ours = verdict_of(kept), bundle.version == steelman.__version__
    flags = list(claimed["flags"])
    if not ours:  # flags that this version does not know
        names = {one.name for one in made.flags}
        flags = [one for one in flags if one["name"] in names]
    for one, other in zip(flags, made.flags, strict=False):
        if one["name"] != other.name:
            raise DamagedError(
                f"the flag {one['name'][:40]!r} does not follow from what was measured, {other.name!r} does"
            )
        for key in ("figure", "limit", "raised", "trust", *(["text"] if ours else [])):
            if one[key] != getattr(other, key):
                raise DamagedError(
                    f"the flag {other.name!r} says {key} {str(one[key])[:80]}, and what was measured says "
                    f"{str(getattr(other, key))[:80]}"
                )
    if len(flags) != len(made.flags):
        name = made.flags[len(flags)].name if len(flags) < len(made.flags) else flags[len(made.flags)]["name"]
        raise DamagedError(f"the flag {name[:40]!r} does not follow from what was measured, or is missing")
    if claimed["complete"] != made.complete:
        raise DamagedError("the verdict is claimed to be complete or not, against what the time cut short")
    raised = [one["trust"] for one in claimed["flags"] if one["raised"]]
    if claimed["trust"] != max([made.trust, *raised], key=order.index):
        raise DamagedError(f"the verdict is {claimed['trust']}, and what follows from its flags is {made.trust}")
    if ours and tuple(claimed["reasons"]) != made.reasons:
        raise DamagedError("the reasons of the verdict are not those that follow from its flags")
    if ours and tuple(bundle.record["notes"]) != notes_of(kept):
        raise DamagedError("the notes are not those that follow from the counts of the stages")
    escalates = "escalation" in kept.roles.values() and not kept.protocol
    doubt = any(one.raised for one in made.flags) and escalates
    if (made.complete and made.escalated != doubt) or (made.escalated and not doubt):
        raise DamagedError("the verdict is escalated without a flag, or not in spite of one")
