"""The signs of gradient masking: each with its limit, its words, and the trust that its flag leaves.

``masking.measure`` measures their figures on a few samples.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from steelman.attacks.shaped import SHAPES
from steelman.evaluation.result import Flag, Trust

STEPS, QUERIES = 20, 200  # of the pilot's gradient attacks, and of its attack by guesses

# For each sign: its limit, whether one more sample may pass, the trust that its flag leaves, and the flag's text.
# One more sample may pass where a sign compares attacks: a single sample out of a few could be chance.
SIGNS: dict[str, tuple[float, bool, Trust, str]] = {
    "zero gradients": (
        0.05,
        False,
        "suspect",
        "for {:.0%} of the samples tried the gradient with respect to the input is zero, so a gradient attack has "
        "nothing to climb",
    ),
    "loss does not rise": (
        0.05,
        True,
        "suspect",
        f"for {{:.0%}} of the samples tried {STEPS} steps found no point with a higher loss than the image itself",
    ),
    "one step stronger": (
        0.05,
        True,
        "suspect",
        f"one step breaks {{:.0%}} of the samples tried that {STEPS} steps do not: the loss is too rough to climb in "
        "small steps",
    ),
    "starts disagree": (
        0.2,
        True,
        "suspect",
        "for {:.0%} of the samples tried it depends on the random start whether the attack succeeds: more starts would "
        "break more",
    ),
    "black box stronger": (
        0.05,
        True,
        "suspect",
        f"{QUERIES} guesses without a gradient break {{:.0%}} of the samples tried that gradient attacks do not: the "
        "gradients mislead",
    ),
    "transfer stronger": (
        0.05,
        True,
        "suspect",
        "points made for another model break {:.0%} of the samples tried that gradient attacks on this one do not: its "
        "gradients mislead",
    ),
    "grey levels stronger": (
        0.05,
        True,
        "suspect",
        "points of whole grey levels, as a file holds them, break {:.0%} of the samples tried that other gradient "
        "attacks do not: the model answers the points between them otherwise",
    ),
    "few pixels stronger": (
        0.05,
        True,
        "suspect",
        "gradient attacks that move few pixels break {:.0%} of the samples tried that attacks on all pixels do not: "
        "the model answers otherwise where many pixels have moved",
    ),
    "small moves stronger": (
        0.05,
        True,
        "suspect",
        "gradient attacks within a smaller radius break {:.0%} of the samples tried that attacks within the whole "
        "radius do not: the model answers otherwise where pixels have moved far",
    ),
    "patches stronger": (
        0.05,
        True,
        "suspect",
        "gradient attacks that move whole patches break {:.0%} of the samples tried that attacks on single pixels do "
        "not: the model answers otherwise where neighbouring pixels differ",
    ),
    "company answers": (
        0,
        False,
        "suspect",
        "{:.0%} of the points tried get another answer in another batch: the answer depends on the other images there",
    ),
    "gradient answers": (
        0,
        False,
        "suspect",
        "{:.0%} of the points tried get another answer when a gradient is asked for: attacks climb another model than "
        "the one that is judged",
    ),
    "remembered answers": (
        0,
        False,
        "suspect",
        "{:.0%} of the points tried get another answer from a fresh copy of the model: it remembers what it was asked",
    ),
    "random answers": (
        0,
        False,
        "suspect",
        "{:.0%} of the points tried get another answer when asked again: the model is random near the images; attack "
        "its mean answer with eot",
    ),
    "undefined answers": (
        0,
        False,
        "invalid",
        "{:.2%} of the points tried inside the threat model have NaN or infinite logits: what the model answers there "
        "is not defined",
    ),
    "coarse answers": (
        0.05,
        False,
        "suspect",
        "at {:.0%} of the points tried the logits differ by less than the roundings of numbers of their size: which "
        "class leads there cannot be told",
    ),
}


# The sign of each shape of an attack: it broke samples that attacks without a shape did not.
SHAPED = dict(
    zip(
        SHAPES,
        ("grey levels stronger", "few pixels stronger", "small moves stronger", "patches stronger"),
        strict=True,
    )
)


# Without a gradient, these signs are not measured.
UPHILL = frozenset({"loss does not rise", "one step stronger", "starts disagree", *SHAPED.values()})
# These signs need other models, or a copy of the model.
SOMETIMES = frozenset({"transfer stronger", "remembered answers"})


def flags_of(parts: Sequence[dict[str, Tensor]]) -> list[Flag]:
    """A flag for each measured sign; `parts` are the results of ``measure``, one for each batch."""
    if not parts:
        return []
    columns = {name: torch.cat([part[name] for part in parts]).double() for name in parts[0]}
    one_more = 1 / len(columns["zero gradients"])
    found = []
    for name, (limit, one, trust, text) in SIGNS.items():
        if name in columns:
            hits, all_of_them = columns[name], columns.get(f"{name}, of")
            figure = float(hits.mean() if all_of_them is None else hits.sum() / all_of_them.sum().clamp(min=1))
            found.append(flag(name, figure, limit + one * one_more, trust, text.format(figure)))
    return found


def flag(name: str, figure: float, limit: float, trust: Trust, text: str) -> Flag:
    """A flag. It is raised if its figure is above the limit."""
    return Flag(name=name, figure=figure, limit=limit, raised=figure > limit, trust=trust, text=text)
