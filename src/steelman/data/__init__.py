"""Images in [0, 1]: datasets by name, your own folders and arrays, augmentation, and the batches of an epoch."""

from steelman.data.augment import AUGMENTATIONS, Augmentation, CropFlip, NoAugment
from steelman.data.datasets import DATASETS, Dataset, load
from steelman.data.fetch import available, data_root, get
from steelman.data.folder import FolderSource
from steelman.data.source import ArraySource, Source, Subset, batches, split, stream

__all__ = [
    "AUGMENTATIONS",
    "DATASETS",
    "ArraySource",
    "Augmentation",
    "CropFlip",
    "Dataset",
    "FolderSource",
    "NoAugment",
    "Source",
    "Subset",
    "available",
    "batches",
    "data_root",
    "get",
    "load",
    "split",
    "stream",
]
