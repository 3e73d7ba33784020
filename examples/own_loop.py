"""Your own training loop on your own DataLoader: PGD-AT with a hypersphere head."""

# Above the mark stand a model and data to run the example with. Below it is the example.
import torch
from sample import Digits, network
from torch.utils.data import DataLoader

loader, model = DataLoader(Digits(train=True), batch_size=64, shuffle=True), network()

# --- the example
import steelman

threat = steelman.ThreatModel(eps=0.15)
steelman.embed(model, "he", scale=15, margin=0.2)
criterion = steelman.Criterion(steelman.PGDAT(), model, threat)
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
for epoch in range(5):
    for x, y in loader:
        optimizer.zero_grad()
        criterion(x, y).backward()
        optimizer.step()
x, y = Digits(train=False).tensors
print(steelman.evaluate(model.eval(), x, y, threat, "fast").verdict)
