"""Training by one call, on a torch Dataset: TRADES, resumable, with a verdict, its evidence and a page."""

# Above the mark stand a model and data to run the example with. Below it is the example.
from sample import Digits, network

model, train, test = network(), Digits(train=True), Digits(train=False)

# --- the example
import steelman

threat = steelman.ThreatModel(eps=0.15)
run = steelman.fit(model, train, threat, steelman.TRADES(beta=6), epochs=5, test=test, out="runs/example")
print(run.verdict)
print(run.report)
again = steelman.load("runs/example", model)
