"""The data sets vicinal knows by name: one entry each, read by the command line, the loaders and the docs.

Where a fact comes from: counts of PACS from its official lists; domain counts of the others as their authors
or DomainBed's maintainers state them; addresses and checksums as DomainBed, Dassl, torchvision and Zenodo
list them.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from vicinal.data import names
from vicinal.data.cifar import (
    CIFAR10_CLASSES,
    CORRUPTIONS,
    CifarOptions,
    find_cifar10,
    find_cifar10c,
    load_cifar10,
    load_cifar10c,
)
from vicinal.data.digits import ANGLES, load_digits_domains
from vicinal.data.domains import DomainSet
from vicinal.data.download import Download
from vicinal.data.entries import Arrays, BuiltIn, DatasetEntry, Request, Tree, TreeOptions
from vicinal.data.idx import FASHION_FOLDERS, MNIST_FOLDERS, find_idx, load_idx
from vicinal.data.layouts import Annotations, Layout
from vicinal.data.rotated import SIDE, RotatedOptions, load_rotated
from vicinal.data.splits import Lists, SplitRule
from vicinal.errors import DataError
from vicinal.registry import Registry

DATASETS: Registry[DatasetEntry] = Registry("dataset")

PLAIN = Layout("DomainBed")
BASE_IMAGES = (60000, 10000)  # of MNIST and its kin: training and test part
DIGITS = tuple(str(digit) for digit in range(10))
ROTATIONS = tuple(str(angle) for angle in ANGLES)
FASHION_CLASSES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
FAIR_USE = "fair use for non-commercial research, as its authors state; the pictures are their owners'"


def _add(entry: DatasetEntry) -> None:
    if isinstance(entry.source, Tree):
        entry = replace(entry, options=TreeOptions())
    DATASETS.register(entry.name)(entry)


# --- Photographs, paintings and drawings -----------------------------------------------------------------

_add(
    DatasetEntry(
        name="pacs",
        title="PACS: photos, art paintings, cartoons and sketches",
        classes=("dog", "elephant", "giraffe", "guitar", "horse", "house", "person"),
        domains=("art_painting", "cartoon", "photo", "sketch"),
        default_targets=("sketch",),
        channels=3,
        size=224,
        licence="not stated by its authors; used for research",
        home="dali-dl.github.io/project_iccv2017.html",
        source=Tree(
            folders=("PACS", "pacs_data", "kfold"),
            archives=("pacs-*.tar", "PACS.zip", "pacs.zip"),
            layouts=(PLAIN,),  # kfold/ of the original archive and images/ of Dassl come before it
            split=SplitRule(
                val_fraction=0.1,
                lists=Lists(
                    file="{domain}_{part}_kfold.txt",
                    parts={"train": "train", "crossval": "val", "test": "test"},
                    first_label=1,
                    folders=("pacs-splits", "splits", "files", "Train val splits and h5py files pre-read"),
                ),
            ),
        ),
        counts={"art_painting": 2048, "cartoon": 2344, "photo": 1670, "sketch": 3929},
        class_counts={
            "art_painting": (379, 255, 285, 184, 201, 295, 449),
            "cartoon": (389, 457, 346, 135, 324, 288, 405),
            "photo": (189, 202, 182, 186, 199, 280, 432),
            "sketch": (772, 740, 753, 608, 816, 80, 160),
        },
        downloads=(
            # The copy that Dassl offers: it has the official lists. DomainBed's has the images alone.
            Download("pacs.zip", ("gdrive:1m4X4fROCCXMO0lRLrr6Zz9Vb3974NWhE",), unpack=True),
        ),
        note="Dassl leaves out sketch/dog/n02103406_4068-1.png, which the official lists have; it stays.",
    )
)

_add(
    DatasetEntry(
        name="vlcs",
        title="VLCS: five classes in PASCAL VOC 2007, LabelMe, Caltech-101 and SUN09",
        classes=("bird", "car", "chair", "dog", "person"),
        domains=("Caltech101", "LabelMe", "SUN09", "VOC2007"),
        default_targets=("VOC2007",),
        channels=3,
        size=224,
        licence="not stated; each part is under the terms of the data set it comes from",
        home="github.com/facebookresearch/DomainBed",
        source=Tree(
            folders=("VLCS",),
            archives=("VLCS.zip", "vlcs.zip", "VLCS.tar"),
            layouts=(
                PLAIN,
                Layout("Dassl", "{domain}/train|crossval|test/{label}/{file}"),
                Layout("JiGen", "{domain}/full|test/{label}/{file}"),
            ),
            domain_folders={
                "Caltech101": ("CALTECH",),
                "LabelMe": ("LABELME",),
                "SUN09": ("SUN",),
                "VOC2007": ("PASCAL",),
            },
            class_folders={"bird": ("0",), "car": ("1",), "chair": ("2",), "dog": ("3",), "person": ("4",)},
        ),
        counts={"Caltech101": 1415, "LabelMe": 2656, "SUN09": 3282, "VOC2007": 3376},
        downloads=(
            Download(
                "VLCS.tar.gz",
                ("gdrive:1skwblH1_okBwxWxmRsp9_qi15hyPpxg8",),
                md5="8870171eba660927d9668f4e515928e4",
                unpack=True,
            ),
        ),
    )
)

_add(
    DatasetEntry(
        name="office_home",
        title="Office-Home: 65 everyday objects as art, clip art, product pictures and photos",
        classes=names.OFFICE_HOME,
        domains=("Art", "Clipart", "Product", "Real_World"),
        default_targets=("Art",),
        channels=3,
        size=224,
        licence=FAIR_USE,
        home="hemanthdv.org/officeHomeDataset.html",
        source=Tree(
            folders=("office_home", "OfficeHome", "OfficeHomeDataset_10072016", "office_home_dg"),
            archives=("office_home*.zip", "OfficeHome*.zip"),
            layouts=(PLAIN, Layout("Dassl", "{domain}/train|val/{label}/{file}")),
            domain_folders={"Real_World": ("RealWorld", "Real")},
        ),
        counts={"Art": 2427, "Clipart": 4365, "Product": 4439, "Real_World": 4357},
        downloads=(
            Download(
                "office_home.zip",
                ("gdrive:1uY0pj7oFsjMxRwaD3Sxy0jgel0fsYXLC",),
                md5="b1c14819770c4448fd5b6d931031c91c",
                unpack=True,
            ),
        ),
    )
)

_add(
    DatasetEntry(
        name="terra_incognita",
        title="TerraIncognita: animals before four camera traps",
        classes=(
            "bird",
            "bobcat",
            "cat",
            "coyote",
            "dog",
            "empty",
            "opossum",
            "rabbit",
            "raccoon",
            "squirrel",
        ),
        domains=("location_100", "location_38", "location_43", "location_46"),
        default_targets=("location_100",),
        channels=3,
        size=224,
        licence="Community Data License Agreement, permissive variant, as LILA states",
        home="lila.science/datasets/caltech-camera-traps",
        source=Tree(
            folders=("terra_incognita", "terra", "TerraIncognita"),
            layouts=(PLAIN,),
            annotations=Annotations(
                "original",
                sets=(
                    tuple(
                        f"{part}_annotations.json"
                        for part in ("cis_test", "cis_val", "train", "trans_test", "trans_val")
                    ),
                    ("caltech_images_20210113.json",),
                    ("caltech_camera_traps.json",),
                ),
                location={place: f"location_{place}" for place in ("100", "38", "43", "46")},
            ),
            domain_folders={f"location_{place}": (f"L{place}", place) for place in ("100", "38", "43", "46")},
            class_folders={"empty": ("landscape",)},
        ),
        counts={"location_100": 4879, "location_38": 9767, "location_43": 4020, "location_46": 6122},
        other_counts={
            "later download": {
                "location_100": 4741,
                "location_38": 9736,
                "location_43": 3970,
                "location_46": 5883,
            }
        },
        downloads=tuple(
            Download(
                file,
                (f"https://storage.googleapis.com/public-datasets-lila/caltechcameratraps/{file}",),
                unpack=True,
            )
            for file in ("eccv_18_annotations.tar.gz", "eccv_18_all_images_sm.tar.gz")
        ),
        note="Two versions are about: 24,788 images (DomainBed's figures) and 24,330 (later downloads).",
    )
)

DOMAINNET_FOLDERS = ("domain_net", "domainnet", "DomainNet")
DOMAINNET_HOST = "http://csr.bu.edu/ftp/visda/2019/multi-source"
DOMAINNET_ARCHIVES = {
    "clipart": "groundtruth/clipart.zip",
    "infograph": "infograph.zip",
    "painting": "groundtruth/painting.zip",
    "quickdraw": "quickdraw.zip",
    "real": "real.zip",
    "sketch": "sketch.zip",
}


def _domainnet_downloads(domains: tuple[str, ...]) -> tuple[Download, ...]:
    archives = [
        Download(f"{domain}.zip", (f"{DOMAINNET_HOST}/{DOMAINNET_ARCHIVES[domain]}",), unpack=True)
        for domain in domains
    ]
    lists = [
        Download(file, (f"{DOMAINNET_HOST}/domainnet/txt/{file}",), folder="splits")
        for domain in domains
        for file in (f"{domain}_train.txt", f"{domain}_test.txt")
    ]
    return (*archives, *lists)


_add(
    DatasetEntry(
        name="domainnet",
        title="DomainNet: 345 classes in six styles",
        classes=names.DOMAINNET,
        domains=tuple(DOMAINNET_ARCHIVES),
        default_targets=("sketch",),
        channels=3,
        size=224,
        licence=FAIR_USE,
        home="ai.bu.edu/M3SDA",
        source=Tree(
            folders=DOMAINNET_FOLDERS,
            layouts=(PLAIN,),
            split=SplitRule(
                lists=Lists(
                    file="{domain}_{part}.txt",
                    parts={"train": "", "test": ""},  # what belongs to the cleaned set; the split is seeded
                    first_label=0,
                    folders=("splits", "txt", "image_list"),
                    only=True,
                    needed=False,
                ),
            ),
        ),
        counts={
            "clipart": 48129,
            "infograph": 51605,
            "painting": 72266,
            "quickdraw": 172500,
            "real": 172947,
            "sketch": 69128,
        },
        downloads=_domainnet_downloads(tuple(DOMAINNET_ARCHIVES)),
        note="Counts are those of the cleaned lists; without the lists every image found is taken.",
    )
)

_add(
    DatasetEntry(
        name="mini_domainnet",
        title="mini-DomainNet: 126 classes and four styles of DomainNet",
        classes=names.MINI_DOMAINNET,
        domains=("clipart", "painting", "real", "sketch"),
        default_targets=("sketch",),
        channels=3,
        size=96,
        licence=FAIR_USE,
        home="github.com/KaiyangZhou/Dassl.pytorch (DATASETS.md)",
        source=Tree(
            folders=(*DOMAINNET_FOLDERS, "mini_domainnet", "MiniDomainNet"),
            layouts=(PLAIN,),
            split=SplitRule(
                lists=Lists(
                    file="{domain}_{part}.txt",
                    # As Dassl does: sources train on one list and validate on the other, a target is both.
                    parts={"train": "train", "test": "val"},
                    first_label=0,
                    folders=("splits_mini", "miniDomainNet_split"),
                    sorted_labels=False,
                    only=True,
                ),
            ),
        ),
        counts={"clipart": 18703, "painting": 31202, "real": 65609, "sketch": 24492},
        downloads=_domainnet_downloads(("clipart", "painting", "real", "sketch"))[:4],
        note="Its lists are a separate archive on the Dassl page: unpack it as splits_mini/.",
    )
)


# --- Rotated sets ------------------------------------------------------------------------------------------


def _idx_downloads(hosts: tuple[str, ...], md5: tuple[str, str, str, str]) -> tuple[Download, ...]:
    files = [
        f"{part}-{kind}-ubyte.gz" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")
    ]
    return tuple(
        Download(file, tuple(host + file for host in hosts), md5=checksum)
        for file, checksum in zip(files, md5, strict=True)
    )


def _base_lacks(places: Sequence[Path], folders: tuple[str, ...]) -> str | None:
    folder = find_idx(places, folders)
    base = None if folder is None else load_idx(folder)
    if base is None or (len(base.train_labels), len(base.test_labels)) == BASE_IMAGES:
        return None
    return (
        f"{len(base.train_labels):,} training and {len(base.test_labels):,} test images were found, "
        f"{BASE_IMAGES[0]:,} and {BASE_IMAGES[1]:,} expected: get the four files anew"
    )


def _load_rotated_set(
    request: Request, name: str, classes: tuple[str, ...], folders: tuple[str, ...]
) -> DomainSet:
    folder = find_idx(request.places, folders)
    if folder is None:
        raise DataError(f"the files of {name} are gone")
    base = load_idx(folder)
    return load_rotated(name, base, classes, request.options, request.size, request.channels, request.seed)


def _rotated(
    name: str,
    title: str,
    classes: tuple[str, ...],
    folders: tuple[str, ...],
    options: RotatedOptions,
    licence: str,
    home: str,
    downloads: tuple[Download, ...],
    elsewhere: tuple[str, ...] = (),
) -> DatasetEntry:
    per_domain = (options.train or 0) + (options.val or 0) + BASE_IMAGES[1]
    return DatasetEntry(
        name=name,
        title=title,
        classes=classes,
        domains=ROTATIONS,
        default_targets=("0", "90"),
        channels=1,
        size=SIDE,
        licence=licence,
        home=home,
        source=Arrays(
            folders=folders,
            files=("train-images-idx3-ubyte.gz and the three other idx files",),
            find=partial(find_idx, names=folders),
            load=partial(_load_rotated_set, name=name, classes=classes, folders=folders),
            elsewhere=elsewhere,
            lacks=partial(_base_lacks, folders=folders),
        ),
        counts=dict.fromkeys(ROTATIONS, per_domain),
        downloads=downloads,
        options=options,
        note=(
            f"The same {options.train} training images of the base in every source domain, as in Piratla et "
            f"al. (2020), {options.val} others to validate; a target is the base's whole test part."
        ),
    )


_add(
    _rotated(
        "rotated_mnist",
        "Rotated MNIST: handwritten digits at seven angles",
        DIGITS,
        MNIST_FOLDERS,
        RotatedOptions(train=2000, val=400),
        "not stated by its authors",
        "yann.lecun.com/exdb/mnist",
        _idx_downloads(
            ("https://ossci-datasets.s3.amazonaws.com/mnist/", "http://yann.lecun.com/exdb/mnist/"),
            (
                "f68b3c2dcbeaaa9fbdd348bbdeb94873",
                "d53e105ee54ea40749a09fcbcd1e9432",
                "9fb629c4189551a2d022fa330f9573f3",
                "ec29112dd5afa0611ce80d1b7f02629c",
            ),
        ),
    )
)
_add(
    _rotated(
        "rotated_fashion",
        "Rotated Fashion-MNIST: clothes at seven angles",
        FASHION_CLASSES,
        FASHION_FOLDERS,
        RotatedOptions(train=10000, val=2000),
        "MIT",
        "github.com/zalandoresearch/fashion-mnist",
        _idx_downloads(
            ("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",),
            (
                "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
                "25c81989df183df01b3e8a0aad5dffbe",
                "bef4ecab320f06d8554ea6380940ec79",
                "bb300cfdad3c16e7a12a480ee83cd310",
            ),
        ),
        # Where the Debian package dataset-fashion-mnist puts it.
        elsewhere=("/usr/share/datasets/fashion-mnist",),
    )
)


def _load_digits(request: Request) -> DomainSet:
    """Return the rotated digits, their one channel repeated when three are asked for."""
    data = load_digits_domains(request.size, request.seed)
    domains = {
        name: replace(domain, images=domain.images.expand(-1, request.channels, -1, -1))
        for name, domain in data.domains.items()
    }
    return replace(data, domains=domains)


_add(
    DatasetEntry(
        name="digits",
        title="Rotated digits: scikit-learn's 1,797 handwritten digits at seven angles",
        classes=DIGITS,
        domains=ROTATIONS,
        default_targets=("0", "90"),
        channels=1,
        size=16,
        licence=(
            "scikit-learn (BSD-3-Clause) bundles the test set of UCI's Optical Recognition of Handwritten "
            "Digits, which UCI states is CC BY 4.0"
        ),
        home="scikit-learn.org",
        source=BuiltIn(_load_digits),
        counts=dict.fromkeys(ROTATIONS, 1797),
    )
)


# --- Corruptions -------------------------------------------------------------------------------------------


def _load_cifar(request: Request) -> DomainSet:
    folder = find_cifar10(request.places)
    if folder is None:
        raise DataError("the files of cifar10_c are gone")
    arrays = None if request.options.regenerate else find_cifar10c(request.places)
    return load_cifar10c(
        load_cifar10(folder),
        arrays,
        request.options,
        request.size,
        request.channels,
        request.seed,
        cache=request.cache,
        progress=request.progress,
    )


def _corrupted_arrays_lack(places: Sequence[Path]) -> str | None:
    folder = find_cifar10c(places)
    missing = [name for name in CORRUPTIONS if folder is None or not (folder / f"{name}.npy").is_file()]
    if not missing:
        return None
    return (
        f"CIFAR-10 is there, {len(missing)} of 15 corrupted arrays are not: get CIFAR-10-C, "
        "or have them made from CIFAR-10 with --data-option regenerate=yes"
    )


WORST = tuple(f"{name}-5" for name in CORRUPTIONS)
_add(
    DatasetEntry(
        name="cifar10_c",
        title="CIFAR-10-C: CIFAR-10 under 15 corruptions and 5 severities",
        classes=CIFAR10_CLASSES,
        domains=("original", *WORST),
        default_targets=WORST,
        channels=3,
        size=32,
        licence="CC BY 4.0 (CIFAR-10-C, as Zenodo states); CIFAR-10 itself: not stated by its authors",
        home="zenodo.org/records/2535967 and www.cs.toronto.edu/~kriz/cifar.html",
        source=Arrays(
            folders=("CIFAR-10", "cifar10", "CIFAR-10-C", "cifar10_c", "cifar-10-batches-py"),
            files=("cifar-10-batches-py/ (or -bin/, or PNG sheets) and CIFAR-10-C/",),
            find=find_cifar10,
            load=_load_cifar,
            lacks=_corrupted_arrays_lack,
        ),
        counts={"original": 60000, **dict.fromkeys(WORST, 10000)},
        downloads=(
            Download(
                "cifar-10-python.tar.gz",
                ("https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",),
                md5="c58f30108f718f92721af3b95e74349a",
                unpack=True,
            ),
            Download(
                "CIFAR-10-C.tar",
                ("https://zenodo.org/records/2535967/files/CIFAR-10-C.tar?download=1",),
                size=2918471680,
                md5="56bf5dcef84df0e2308c6dcbcbbd8499",
                unpack=True,
            ),
        ),
        options=CifarOptions(),
        min_sources=1,
        note=(
            "One source domain: train with --algorithm erm --no-out-of-fold. Arrays made anew "
            "(regenerate=yes) have the stronger constants of ImageNet-C and are not comparable with the "
            "published ones; severity 1 is the nearest to them."
        ),
    )
)
