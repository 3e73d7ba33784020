"""An attack of one's own: it passes the public contract, and is used in an evaluation and in training."""

# Above the mark stand a model and data to run the example with. Below it is the example.
import torch
from sample import Digits, network

import steelman

model, (x, y) = network(), Digits(train=False).tensors
steelman.fit(model, Digits(train=True), steelman.ThreatModel(eps=0.05), steelman.PGDAT(), epochs=8)

# --- the example
from steelman.attacks import untouched
from steelman.testing import check_attack


def one_step(model, x, y, threat, *, index=None, key=None, target=None):
    """The step of FGSM, in any norm. `untouched` leaves the model as it was."""
    point = x.clone().requires_grad_()
    with untouched(model), torch.enable_grad():
        gradient = torch.autograd.grad(torch.nn.functional.cross_entropy(model(point), y, reduction="sum"), point)[0]
    return threat.project(x + threat.steepest(gradient, x, threat.eps), x)


check_attack(one_step)
print(steelman.evaluate(model, x, y, steelman.ThreatModel(eps=0.1), {"mine": one_step}).verdict)
