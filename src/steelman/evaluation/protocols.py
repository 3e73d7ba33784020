"""Protocols: the attacks of papers' tables, under the names of the tables' columns.

To add a protocol, write a function here, and add a line to PROTOCOLS.

Each attack gets every sample that the model gets right, as in the papers. A published step size belongs to a published
radius, and is scaled to other radii in proportion. A protocol gives a number to compare with a paper. For a number to
trust, use a cascade from ``suites``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

from torch import Tensor

from steelman.attacks import ATTACKS, Problem, Search
from steelman.errors import UserError
from steelman.evaluation.stages import Stage, Suite, protocol
from steelman.settings import settings
from steelman.threat import Norm, ThreatModel

# The radius and step size of Zhang et al. (2019). Pang et al. (2020) and the code of RAT use them too.
TRADES_EPS, TRADES_STEP = 0.031, 0.003
# A linf radius of at least this is taken for a radius on MNIST.
MNIST_LEAST = 0.1


def autoattack(threat: ThreatModel) -> tuple[Stage, ...]:
    """The attacks and budgets of AutoAttack standard.

    In l1, Square is left out, because it does not work there. APGD-CE has 5 restarts and APGD-T has 5 targets in l1.

    Croce and Hein (2020); for l1, Croce and Hein (2021), "Mind the box".
    """
    restarts, targets = (5, 5) if threat.norm == "l1" else (1, 9)
    stages = [
        Stage(name="APGD-CE", attack=ATTACKS["apgd"](steps=100, restarts=restarts)),
        Stage(name="APGD-T", attack=ATTACKS["apgd-t"](steps=100, targets=targets)),
        Stage(name="FAB-T", attack=ATTACKS["fab-t"](steps=100, targets=9)),
        Stage(name="Square", attack=ATTACKS["square"](queries=5000)),
    ]
    return tuple(stage for stage in stages if threat.norm in getattr(stage.attack, "norms", ()))


@settings
class InTurn(Search):
    """Several attacks in one column: each gets the samples that the attacks before it did not break.

    >>> import torch
    >>> net = torch.nn.Flatten()  # the pixels are the logits
    >>> x, y = torch.tensor([[[[0.6, 0.5], [0.3, 0.2]]]]), torch.tensor([0])
    >>> both = InTurn(attacks=(ATTACKS["fgsm"](), ATTACKS["fab"](steps=5)))
    >>> bool(both.run(net, x, y, ThreatModel(eps=0.1)).success)
    True
    """

    reduced: ClassVar[bool] = False

    attacks: tuple[Search, ...]

    @property
    def norms(self) -> tuple[Norm, ...]:  # type: ignore[override]
        """The norms in which all the attacks work."""
        return tuple(norm for norm in Search.norms if all(norm in attack.norms for attack in self.attacks))

    def search(self, problem: Problem) -> None:
        for turn, attack in enumerate(self.attacks):
            rows = problem.remaining()
            if len(rows) == 0:
                return
            part = _part(problem, rows, turn)
            if attack.minimum_norm:
                part.nearest = part.x.clone()
            attack.search(part)
            found = part.found()
            problem.forwards[rows] += found.forwards
            problem.backwards[rows] += found.backwards
            broken = rows[found.success]
            problem.best[broken], problem.success[broken] = found.x_adv[found.success], True


def _part(problem: Problem, rows: Tensor, turn: int) -> Problem:
    """The problem of the samples `rows` alone. Each turn has its own noise."""
    part = Problem(
        problem.model,
        problem.x[rows],
        problem.y[rows],
        problem.threat,
        index=problem.index[rows],
        key=problem.key.fold("turn", turn),
        target=None if problem.target is None else problem.target[rows],
    )
    part.memory_format, part.stop = problem.memory_format, problem.stop
    return part


def he_whitebox(threat: ThreatModel) -> Suite:
    """Hypersphere embedding under white-box attacks: Pang et al. (2020), Table 2 and, up to C&W, Table 10.

    The paper has eps 0.031 and step size 0.003. PGD starts uniformly in the ball. MIM (mu 1) and FGSM start at the
    image (Appendix B.2). As in the released evaluation, these three use the cross-entropy of logits without the head's
    scale. On an HE head this is a weak attack, so run ``he-adaptive`` too. For the other attacks, the scale makes no
    difference.

    Three columns differ from the paper. The published C&W column is only three points below clean accuracy. A working
    attack within the radius breaks more samples. Here, C&W is what the paper describes: steps on the margin within
    linf. The paper does not give the number of steps; here it is 20. The paper's FeaAtt moves towards the features of
    500 images. A suite has no images, so here the weights of the last layer stand for the classes. The paper ran FeaAtt
    and FAB at 8/255.

    Pang et al. (2020), "Boosting Adversarial Training with Hypersphere Embedding".
    """
    step = _scaled(TRADES_STEP, TRADES_EPS, threat)
    return _suite(
        "he-whitebox",
        threat,
        {
            "PGD-20": ATTACKS["pgd"](steps=20, step_size=step, head_scale=False),
            "PGD-500": ATTACKS["pgd"](steps=500, step_size=step, head_scale=False),
            "MIM-20": ATTACKS["mim"](steps=20, step_size=step, head_scale=False),
            "FGSM": ATTACKS["fgsm"](head_scale=False),
            "DeepFool": ATTACKS["deepfool"](steps=100),
            "C&W": ATTACKS["cw-linf"](steps=20, step_size=step),
            "FeaAtt": ATTACKS["feature"](steps=50, step_size=_scaled(1 / 255, 8 / 255, threat)),
            "FAB": ATTACKS["fab"](steps=20),
        },
    )


def he_adaptive(threat: ThreatModel) -> Suite:
    """Hypersphere embedding under adaptive attacks: PGD on the training loss, with the head's scale and margin.

    eps and step size are the same as in ``he-whitebox``.

    Pang et al. (2020), section 4.1, "Adaptive attacks".
    """
    step = _scaled(TRADES_STEP, TRADES_EPS, threat)
    attacks = {f"PGD-{steps}": ATTACKS["adaptive"](steps=steps, step_size=step) for steps in (20, 500)}
    return _suite("he-adaptive", threat, attacks)


def he_blackbox(threat: ThreatModel) -> Suite:
    """Hypersphere embedding under black-box attacks: Pang et al. (2020), Table 8.

    ZOO changes one random coordinate at a time, with differences over 1e-4 and 20,000 queries. SPSA and NES start from
    the image, and take 128 pairs a step at a distance of 0.001. The paper does not give their step size; here it is the
    white-box step size, 0.003 at eps 0.031. The rows of the table are columns here.
    """
    step = _scaled(TRADES_STEP, TRADES_EPS, threat)
    estimated = {
        f"{name.upper()}-{steps}": ATTACKS[name](steps=steps, step_size=step, pairs=128, sigma=0.001)
        for name in ("spsa", "nes")
        for steps in (20, 50, 80)
    }
    return _suite("he-blackbox", threat, {"ZOO": ATTACKS["zoo"](queries=20_000, sigma=1e-4), **estimated})


def pas(threat: ThreatModel) -> Suite:
    """Periodic adversarial scheduling: Liu et al. (2020), Table 1 of the authors' response.

    The table has errors; the scores here are accuracies, 1 - error. PGD has 10 restarts. Its step size is 1/255 at eps
    8/255 (CIFAR-10), and is scaled to other radii. At linf radii of 0.1 and above (MNIST), it is 0.01. Auto-PGD has 5
    restarts, as in the released code; the response only gives its 100 iterations. Square has 5,000 queries. PGD starts
    uniformly in the ball; the released code starts within one step of the image.

    Liu et al. (2020), "On the Loss Landscape of Adversarial Training: Identifying Challenges and How to Overcome Them".
    """
    mnist = threat.norm == "linf" and threat.eps >= MNIST_LEAST
    step = 0.01 if mnist else _scaled(1 / 255, 8 / 255, threat)
    return _suite(
        "pas",
        threat,
        {
            "PGD100": ATTACKS["pgd"](steps=100, step_size=step, restarts=10),
            "APGD100-CE": ATTACKS["apgd"](steps=100, restarts=5),
            "APGD100-DLR": ATTACKS["apgd-dlr"](steps=100, restarts=5),
            "Square5K": ATTACKS["square"](queries=5000),
        },
    )


def llr(threat: ThreatModel) -> Suite:
    """Local linearity regularisation: Qin et al. (2019), the attacks of the authors' response and released code.

    The response publishes the column DeepFool. It calls the other two attacks stronger: PGD on the difference of
    logits, and MultiTargeted towards every other class. Both have 50 steps, as in the released evaluation. The released
    evaluation steps with Adam at rate 0.1; the attacks here take sign steps of 2/255 at eps 8/255. The columns of the
    paper's own tables have attacks of other budgets, and are not here.

    Qin et al. (2019), "Adversarial Robustness through Local Linearization".
    """
    step = _scaled(2 / 255, 8 / 255, threat)
    return _suite(
        "llr",
        threat,
        {
            "PGD-50 margin": ATTACKS["pgd"](steps=50, step_size=step, loss="margin"),
            "MultiTargeted": ATTACKS["multi-targeted"](steps=50, step_size=step),
            "DeepFool": ATTACKS["deepfool"](),
        },
    )


def rat(threat: ThreatModel) -> Suite:
    """Randomised adversarial training: Jin et al. (2023), Tables 7 and 8 of the supplement.

    PGD-20 and CW-20 (PGD on the margin) take steps of 0.003 at eps 0.031, as in the released code. AA is AutoAttack
    standard; the paper ran it at 8/255. RayS acc is the accuracy under RayS with 10,000 queries. That is the default of
    its code; the supplement gives no number.

    The column ADBD of Table 7 is missing here: it is a mean distance, not an accuracy. ``steelman.attacks.rays.adbd``
    measures it.

    Jin et al. (2023), "Randomized Adversarial Training via Taylor Expansion".
    """
    step = _scaled(TRADES_STEP, TRADES_EPS, threat)
    return _suite(
        "rat",
        threat,
        {
            "PGD-20": ATTACKS["pgd"](steps=20, step_size=step),
            "CW-20": ATTACKS["cw-linf"](steps=20, step_size=step),
            "AA": InTurn(
                attacks=tuple(stage.attack for stage in autoattack(threat) if isinstance(stage.attack, Search))
            ),
            "RayS acc": ATTACKS["rays"](queries=10_000),
        },
    )


PROTOCOLS: dict[str, Callable[[ThreatModel], Suite]] = {
    "he-whitebox": he_whitebox,
    "he-adaptive": he_adaptive,
    "he-blackbox": he_blackbox,
    "pas": pas,
    "llr": llr,
    "rat": rat,
}


def _scaled(step: float, eps: float, threat: ThreatModel) -> float | None:
    """A step size published for `eps`, scaled to the threat model's radius. None at radius 0, where no attack steps."""
    return step * (threat.eps / eps) or None


def _suite(name: str, threat: ThreatModel, attacks: Mapping[str, Search]) -> Suite:
    """The attacks as a protocol. A norm in which one of them does not work is refused here, not hours later."""
    missing = [label for label, attack in attacks.items() if threat.norm not in attack.norms]
    if missing:
        raise UserError(f"protocol {name}: {', '.join(missing)} cannot attack in {threat.norm}; the table is of linf")
    return protocol(attacks, name)
