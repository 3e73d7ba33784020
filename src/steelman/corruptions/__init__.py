"""Corruptions by name. A new one needs a class in a file here, and a line in CORRUPTIONS."""

from __future__ import annotations

from collections.abc import Callable

from steelman.corruptions.base import Corruption
from steelman.corruptions.blur import DefocusBlur, GaussianBlur, GlassBlur, MotionBlur, ZoomBlur
from steelman.corruptions.digital import Contrast, ElasticTransform, JPEGCompression, Pixelate, Saturate
from steelman.corruptions.noise import GaussianNoise, ImpulseNoise, ShotNoise, SpeckleNoise
from steelman.corruptions.weather import Brightness, Fog, Frost, Snow, Spatter

CORRUPTIONS: dict[str, Callable[..., Corruption]] = {
    # The 15 of the benchmark, in its order.
    "gaussian-noise": GaussianNoise,
    "shot-noise": ShotNoise,
    "impulse-noise": ImpulseNoise,
    "defocus-blur": DefocusBlur,
    "glass-blur": GlassBlur,
    "motion-blur": MotionBlur,
    "zoom-blur": ZoomBlur,
    "snow": Snow,
    "frost": Frost,
    "fog": Fog,
    "brightness": Brightness,
    "contrast": Contrast,
    "elastic-transform": ElasticTransform,
    "pixelate": Pixelate,
    "jpeg-compression": JPEGCompression,
    # The four extra ones.
    "speckle-noise": SpeckleNoise,
    "gaussian-blur": GaussianBlur,
    "spatter": Spatter,
    "saturate": Saturate,
}
# The benchmark's 15, by what they are like. A mean over corruptions is over these.
KINDS: dict[str, tuple[str, ...]] = {
    "noise": ("gaussian-noise", "shot-noise", "impulse-noise"),
    "blur": ("defocus-blur", "glass-blur", "motion-blur", "zoom-blur"),
    "weather": ("snow", "frost", "fog", "brightness"),
    "digital": ("contrast", "elastic-transform", "pixelate", "jpeg-compression"),
}
STANDARD: tuple[str, ...] = tuple(name for names in KINDS.values() for name in names)
SEVERITIES = (1, 2, 3, 4, 5)

__all__ = ["CORRUPTIONS", "KINDS", "SEVERITIES", "STANDARD", "Corruption"]
