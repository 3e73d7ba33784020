"""An objective of one's own: it passes the public contract, and trains."""

# Above the mark stand a model and data to run the example with. Below it is the example.
from sample import Digits, network

model, train, test = network(), Digits(train=True), Digits(train=False)

# --- the example
import steelman
from steelman.testing import check_objective


class Half(steelman.Objective):
    forwards = ("clean", "adversarial")

    def __call__(self, batch):
        clean, adversarial = batch.clean(), batch.adversarial(batch.attacked(steelman.PGD(steps=5, keep="last")))
        loss = (batch.cross_entropy(clean) + batch.cross_entropy(adversarial)) / 2
        return steelman.Outcome(loss.mean(), adversarial.detach())


check_objective(Half())
print(steelman.fit(model, train, steelman.ThreatModel(eps=0.15), Half(), epochs=8, test=test).verdict)
