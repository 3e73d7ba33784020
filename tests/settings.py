"""Small settings for every registry entry; the contract tests run over these tables.

A new entry without a line here fails the tests that compare the tables with the registries.
"""

from __future__ import annotations

from typing import Any

# Quick, and yet strong enough to find what there is to find on a linear model.
ATTACK_SETTINGS: dict[str, dict[str, Any]] = {
    "fgsm": {},
    "bim": {"steps": 10},
    "pgd": {"steps": 20},
    "mim": {"steps": 10},
    "cw-linf": {"steps": 20},
    "adaptive": {"steps": 20},
    "apgd": {"steps": 15},
    "apgd-dlr": {"steps": 15},
    "apgd-t": {"steps": 15},
    "multi-targeted": {"steps": 20},
    "feature": {"steps": 20, "copies": 3},
    "fn": {"steps": 20},
    "shaped": {"steps": 20},
    "deepfool": {},
    "fab": {"steps": 4},
    "fab-t": {"steps": 4},
    "cw": {"steps": 50, "search_steps": 4, "lr": 0.03, "c": 0.1},
    "square": {"queries": 200},
    "rays": {"queries": 300},
    "nes": {"steps": 10, "pairs": 64},
    "spsa": {"steps": 10, "pairs": 64},
    "zoo": {"queries": 400, "coordinates": 4},
    "eot": {"attack": {"name": "pgd", "steps": 20}, "draws": 2},
}

# Every attack on a linear model of two classes: settings, and the slack of radius within which it finds the boundary.
# With more classes some of them, as published, climb to another one than the nearest; their own tests say which.
ORACLE_ATTACKS: dict[str, tuple[dict[str, Any], dict[str, float]]] = {
    "fgsm": ({}, {"linf": 0.03, "l2": 0.03, "l1": 0.03}),
    "bim": ({"steps": 8}, {"linf": 0.03, "l2": 0.03, "l1": 0.03}),
    "pgd": ({"steps": 8, "step_size": 0.5}, {"linf": 0.03, "l2": 0.03, "l1": 0.03}),
    "mim": ({"steps": 8}, {"linf": 0.03, "l2": 0.03, "l1": 0.03}),
    "cw-linf": ({"steps": 8, "step_size": 0.5}, {"linf": 0.03, "l2": 0.03, "l1": 0.03}),
    "adaptive": ({"steps": 8, "step_size": 0.5}, {"linf": 0.03, "l2": 0.03, "l1": 0.03}),
    "apgd": ({"steps": 15}, {"linf": 0.03, "l2": 0.03, "l1": 0.03}),
    "apgd-dlr": ({"steps": 15}, {"linf": 0.03, "l2": 0.03, "l1": 0.03}),
    "apgd-t": ({"steps": 15}, {"linf": 0.03, "l2": 0.03, "l1": 0.03}),
    "multi-targeted": ({"steps": 12, "step_size": 0.5}, {"linf": 0.03, "l2": 0.03, "l1": 0.03}),
    "feature": ({"steps": 30, "copies": 1}, {"linf": 0.03, "l2": 0.03, "l1": 0.03}),
    "fn": ({"steps": 30, "step_size": 0.2}, {"linf": 0.03, "l2": 0.03, "l1": 0.03}),
    "shaped": ({"steps": 20}, {"linf": 0.03, "l2": 0.03, "l1": 0.03}),
    "deepfool": ({}, {"linf": 0.03, "l2": 0.03, "l1": 0.03}),
    "fab": ({"steps": 4}, {"linf": 0.01, "l2": 0.01, "l1": 0.01}),
    "fab-t": ({"steps": 4}, {"linf": 0.01, "l2": 0.01, "l1": 0.01}),
    "cw": ({"steps": 100, "search_steps": 5, "lr": 1e-4, "c": 0.1}, {"l2": 0.03}),
    "square": ({"queries": 300, "rescale": True}, {"linf": 0.03, "l2": 0.3}),
    "rays": ({"queries": 400}, {"linf": 0.2}),
    "nes": ({"steps": 10, "pairs": 64}, {"linf": 0.1, "l2": 0.1, "l1": 0.1}),
    "spsa": ({"steps": 10, "pairs": 64}, {"linf": 0.1, "l2": 0.1, "l1": 0.1}),
    "zoo": ({"queries": 400, "coordinates": 4}, {"linf": 0.1, "l2": 0.1}),
    "eot": (
        {"attack": {"name": "pgd", "steps": 8, "step_size": 0.5}, "draws": 2},
        {"linf": 0.03, "l2": 0.03, "l1": 0.03},
    ),
}

# Attacks whose success on a linear model is exactly the closed form's.
EXACT_ATTACKS: dict[str, dict[str, Any]] = {
    "fgsm": {},
    "bim": {"steps": 8},
    "pgd": {"steps": 8, "step_size": 0.5},  # long steps: a start on the far side has the whole ball to cross
    "mim": {"steps": 8},
    "adaptive": {"steps": 8, "step_size": 0.5},
}

# The same where pixels run into their bounds: one step cannot win back the radius it loses there, many can.
EXACT_ATTACKS_IN_BOX: dict[str, dict[str, Any]] = {
    "bim": {"steps": 40},
    "pgd": {"steps": 40},
    "mim": {"steps": 40},
    "adaptive": {"steps": 40},
}

SCHEDULE_SETTINGS: dict[str, dict[str, Any]] = {
    "constant": {"value": 0.1},
    "linear": {"start": 0.0, "end": 0.1},
    "cosine": {"start": 0.1, "end": 0.0},
    "multistep": {"start": 0.1, "drops": [0.5, 0.75]},
    "piecewise": {"points": [[0, 0.0], [0.4, 0.2], [1, 0.0]]},
    "cyclic": {"peak": 0.2},
    "resets": {"schedule": {"name": "linear", "start": 0.0, "end": 0.1}, "at": [0.5, 0.75]},
    "warmup": {"schedule": 0.1, "until": 0.2},
}

HEAD_SETTINGS: dict[str, dict[str, Any]] = {
    "linear": {},
    "fn": {"scale": 3.0},
    "wn": {"scale": 2.0},
    "he": {"scale": 15.0, "margin": 0.2},
    "m-he": {"scale": 15.0, "margin": 0.1},
}
