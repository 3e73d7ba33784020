"""A Hugging Face image classifier, trained and judged."""

# Above the mark stand a model and data to run the example with. Below it is the example.
from sample import Digits
from transformers import ViTConfig, ViTForImageClassification

sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
vit = ViTForImageClassification(ViTConfig(image_size=16, patch_size=4, num_channels=1, num_labels=10, **sizes))
train, test = Digits(train=True), Digits(train=False)

# --- the example
import steelman

model = steelman.wrap(vit, mean=[0.3], std=[0.35], size=16)
threat = steelman.ThreatModel(eps=0.05)
run = steelman.fit(model, train, threat, steelman.FastAT(), epochs=8, batch_size=32, lr=3e-3, test=test)
print(run.verdict)
