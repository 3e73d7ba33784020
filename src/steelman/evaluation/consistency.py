"""Checking evidence against itself: what is claimed of all must follow from what is claimed of each sample."""

from __future__ import annotations

import math
from typing import Any, get_args

import torch

from steelman.errors import UserError
from steelman.evaluation.evidence import Bundle, DamagedError, claims, data_digest
from steelman.evaluation.ledger import ROBUST, WRONG, pilot_size
from steelman.evaluation.result import Evaluation, Trust

# The flags that every cascade measures, whatever the model.
MEASURED = ("zero gradients", "black box stronger", "random answers", "undefined answers", "coarse answers")


def check_consistency(bundle: Bundle) -> None:
    """Raise with the first claim that contradicts another."""
    _columns(bundle)
    _counts(bundle)
    _stages(bundle)
    _verdict(bundle)
    _copy(bundle)


def _columns(bundle: Bundle) -> None:
    """What is claimed of each sample must be possible."""
    samples, classes = bundle.samples, len(bundle.record["classes"])
    broken_by, label = samples["broken_by"], samples["label"]
    for name in ("label", "clean", "guess"):
        if bool(((samples[name] < 0) | (samples[name] >= classes)).any()):
            raise DamagedError(f"samples.safetensors: {name} is not always one of the {classes} classes")
    if bool(((broken_by < WRONG) | (broken_by >= len(bundle.record["suite"]["stages"]))).any()):
        raise DamagedError("a sample is claimed to be broken by a stage that the suite does not have")
    if bool(((samples["clean"] == label) != (broken_by != WRONG)).any()):
        raise DamagedError("a sample is counted as right or wrong against what the model said of it")
    fallen = broken_by >= 0
    if bool((fallen & (samples["guess"] == label)).any()):
        raise DamagedError("a sample is claimed to be broken by an image that the model gets right")
    for name in ("margin", "lead"):
        if not bool(samples[name].isfinite().all()) or bool((fallen & (samples[name] >= 0)).any()):
            raise DamagedError(f"samples.safetensors: {name} is not a number, or not below 0 where a sample is broken")
    counts = [samples[name] for name in ("passes", "forwards", "backwards")]
    if any(bool(((count < 0) | (count > 1 << 40)).any()) for count in counts) or bool((counts[0] > counts[1]).any()):
        raise DamagedError("samples.safetensors: the counts of passes cannot be")


def _counts(bundle: Bundle) -> None:
    """What is claimed of all must follow from what is claimed of each."""
    record, samples = bundle.record, bundle.samples
    classes, label = len(record["classes"]), samples["label"]
    said = torch.where(samples["broken_by"] == ROBUST, label, samples["guess"])
    said = torch.where(samples["broken_by"] == WRONG, samples["clean"], said)
    if [len(row) for row in record["confusion"]] != [classes] * classes:
        raise DamagedError(f"evidence.json: expected a confusion table of {classes} by {classes}")
    expected = {
        "clean_correct": int((samples["broken_by"] != WRONG).sum()),
        "robust_correct": int((samples["broken_by"] == ROBUST).sum()),
        "data_digest": data_digest(samples["digest"]),
        "right": torch.bincount(label[samples["broken_by"] != WRONG], minlength=classes).tolist(),
        "confusion": torch.bincount(label * classes + said, minlength=classes**2).view(classes, classes).tolist(),
    }
    for key, value in expected.items():
        if record[key] != value:
            got = "" if key in ("confusion", "right") else f" is {record[key]}, and the samples say {value}"
            raise DamagedError(f"evidence.json: {key}{got or ' is not that of the samples'}")


def _stages(bundle: Bundle) -> None:
    """Each stage that ran is one of the suite's, in its order; what it broke and left adds up."""
    record, samples = bundle.record, bundle.samples
    planned = {stage["name"]: (number, stage) for number, stage in enumerate(record["suite"]["stages"])}
    last, left, ran = -1, record["clean_correct"], record["stages"]
    for done in ran:
        name = done["name"]
        number, stage = planned.get(name, (-1, {}))
        if number <= last or done["settings"] != stage["attack"]:
            raise DamagedError(f"{name} is not a stage of the suite, not in its place, or had other settings")
        count = int((samples["broken_by"] == number).sum())
        if record["suite"]["protocol"]:  # each attacks all, and the first to break a sample has it
            fits = done["broken"] >= count and done["left"] == record["clean_correct"] - done["broken"]
            fits = fits and (number > 0 or done["broken"] == count)
        else:
            fits = done["broken"] == count and done["left"] == left - count
        if not fits or not count <= done["broken"] <= done["attacked"] <= left:
            said = ", ".join(f"{done[key]} {key}" for key in ("attacked", "broken", "left"))
            raise DamagedError(f"the counts of {name} do not add up: {said}, and {count} samples say it broke them")
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
    verdict = record["verdict"] or {"complete": False, "escalated": False}
    wanted = [name for name in idle if not planned[name][1]["escalation"] or verdict["escalated"]]
    if verdict["complete"] and wanted:
        raise DamagedError(f"the verdict is claimed to be complete, and {wanted[0]} did not run")
    if verdict["complete"] and not record["suite"]["protocol"]:
        _shares(bundle)


def _shares(bundle: Bundle) -> None:
    """Each stage of a whole cascade has attacked as many samples as were its share."""
    record, plan = bundle.record, {stage["name"]: stage for stage in bundle.record["suite"]["stages"]}
    left, watched = record["clean_correct"], None
    for done in record["stages"]:
        stage = plan[done["name"]]
        expected = math.ceil(stage["share"] * left) if stage["share"] < 1 else left
        if stage["pilot"]:
            expected = min(left, pilot_size(record["total"]))
        if stage["sentinel"]:  # one draw for all of them
            expected = expected if watched is None else watched
            watched = expected - done["broken"]
        if done["attacked"] != expected:
            raise DamagedError(f"{done['name']} attacked {done['attacked']} samples, and its share was {expected}")
        left = done["left"]


def _verdict(bundle: Bundle) -> None:
    """The verdict says what the counts and the flags say."""
    record, verdict = bundle.record, bundle.record["verdict"]
    if verdict is None:
        return
    if (verdict["correct"], verdict["total"]) != (record["robust_correct"], record["total"]):
        raise DamagedError("the verdict's counts are not those of the samples")
    if verdict["protocol"] != record["suite"]["protocol"]:
        raise DamagedError("the verdict is of a protocol and the suite is none, or the other way round")
    if verdict["suite"] != record["suite"]["name"]:
        raise DamagedError(f"the verdict is of suite {verdict['suite']!r}, the settings of {record['suite']['name']!r}")
    order = get_args(Trust)
    for flag in verdict["flags"]:
        if flag["raised"] != (flag["figure"] > flag["limit"]):
            raise DamagedError(f"flag {flag['name']!r} is raised or not against its own figure")
        if flag["raised"] and order.index(flag["trust"]) > order.index(verdict["trust"]):
            raise DamagedError(f"the verdict is {verdict['trust']} in spite of the flag {flag['name']!r}")
    if not verdict["complete"] and verdict["trust"] == "sound":
        raise DamagedError("the verdict is sound, though not complete")
    if verdict["complete"] and not verdict["protocol"]:
        _flags(bundle)


def _flags(bundle: Bundle) -> None:
    """A whole cascade has measured its flags, and drawn its consequences."""
    record, verdict, plan = bundle.record, bundle.record["verdict"], bundle.record["suite"]["stages"]
    figures = {flag["name"]: flag["figure"] for flag in verdict["flags"]}
    missing = [name for name in MEASURED if name not in figures]
    if missing and record["clean_correct"]:
        raise DamagedError(f"the verdict is claimed to be complete, and the flag {missing[0]!r} was not measured")
    sentinels = [stage["name"] for stage in plan if stage["sentinel"]]
    broken = sum(done["broken"] for done in record["stages"] if done["name"] in sentinels)
    if sentinels and figures.get("sentinel broken") != broken:
        raise DamagedError(f"the sentinel broke {broken} samples, and the flag says {figures.get('sentinel broken')}")
    climbs = [done["broken"] for done in record["stages"] if done["settings"]["attack"] == "MultiTargeted"]
    if climbs and figures.get("targeted ahead") != sum(climbs) / record["total"]:
        raise DamagedError("what the targeted stages broke is not what the flag 'targeted ahead' says")
    counts = [point["correct"] for point in record["curve"]]
    if counts and counts[0] and figures.get("accuracy levels off") != counts[-1] / counts[0]:
        raise DamagedError("where the curve ends is not what the flag 'accuracy levels off' says")
    doubt = any(flag["raised"] for flag in verdict["flags"]) and any(stage["escalation"] for stage in plan)
    if verdict["escalated"] != doubt:
        raise DamagedError("the verdict is escalated without a flag, or not in spite of one")


def _copy(bundle: Bundle) -> None:
    """evaluation.json, from which the report is made, says the same; it has times besides, and is not sealed."""
    path = bundle.folder / "evaluation.json"
    if not path.exists():
        return
    try:
        found = Evaluation.load(bundle.folder)
        said: dict[str, Any] = {**claims(found), "model": found.model, "data": found.data, "total": found.total}
        said |= {"seed": found.seed, "versions": found.versions}
        said["threat"] = {name: getattr(found, name) for name in bundle.record["threat"]}
        said["clean_correct"], said["robust_correct"] = (found.score(n).correct for n in ("clean", "worst case"))
        said["scores"] = [[s.name, s.correct, s.total, s.settings] for s in found.scores]
        said["margins"] = list(found.margins)
    except UserError as error:
        raise DamagedError(str(error)) from None
    except (TypeError, LookupError, AttributeError) as error:
        raise DamagedError(f"{path} is damaged: {error}") from None
    alive = bundle.samples["margin"][bundle.samples["broken_by"] == ROBUST].sort().values
    expected = {**bundle.record, "margins": [round(value, 6) for value in alive.tolist()]}
    record = bundle.record
    expected["scores"] = [
        ["clean", record["clean_correct"], record["total"], {}],
        *([s["name"], s["left"], record["total"], s["settings"]] for s in record["stages"]),
        ["worst case", record["robust_correct"], record["total"], {}],
    ]
    for key, value in said.items():
        if value != expected[key]:
            raise DamagedError(f"{path} was changed: its {key} is not that of the evidence")
