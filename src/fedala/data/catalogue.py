"""The datasets that are known by name, and the paper's settings for them."""

from dataclasses import dataclass

LENGTH = 200  # tokens of a text: longer texts are cut, shorter ones padded


@dataclass(frozen=True)
class KnownDataset:
    """A dataset that `load` knows by name."""

    name: str
    description: str
    classes: int
    samples: int
    shape: tuple[int, ...]
    source: str
    lr: float
    model: str = "cnn"
    rounds: int = 2000
    hub: str = ""  # id on the Hugging Face hub
    parts: tuple[str, ...] = ("train", "test")  # merged in this order
    folders: tuple[str, ...] = ()  # the usual folders of a copy on disk
    pickles: tuple[str, ...] = ()  # files of the pickled version, which is never loaded
    class_names: tuple[str, ...] = ()
    images_of: str = ""  # the dataset whose images these are, with clients of their own


_DIGITS = tuple("0123456789")
_FASHION = (
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
_CIFAR10 = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
)
_ACTIVITIES = (
    "walking",
    "walking upstairs",
    "walking downstairs",
    "sitting",
    "standing",
    "lying",
)
_HUB = "Hugging Face hub, or --data-dir"

_DATASETS = (
    KnownDataset(
        "digits", "handwritten digits, 8×8 scaled up", 10, 1797, (1, 28, 28),
        "embedded (scikit-learn)", 0.1, rounds=30, class_names=_DIGITS,
    ),
    KnownDataset(
        "mnist", "handwritten digits", 10, 70_000, (1, 28, 28), _HUB, 0.1,
        hub="ylecun/mnist", folders=("mnist", "MNIST/raw"), class_names=_DIGITS,
    ),
    KnownDataset(
        "fashion-mnist", "clothes in grey", 10, 70_000, (1, 28, 28), _HUB, 0.1,
        hub="zalando-datasets/fashion_mnist", folders=("fashion_mnist", "FashionMNIST/raw"),
        class_names=_FASHION,
    ),
    KnownDataset(
        "cifar10", "small colour photographs", 10, 60_000, (3, 32, 32), _HUB, 0.005,
        hub="uoft-cs/cifar10", folders=("cifar-10-batches-bin", "plain_text"),
        pickles=("cifar-10-batches-py/data_batch_1", "data_batch_1"),
        class_names=_CIFAR10,
    ),
    KnownDataset(
        "cifar100", "small colour photographs", 100, 60_000, (3, 32, 32), _HUB, 0.005,
        hub="uoft-cs/cifar100", folders=("cifar-100-binary", "cifar100"),
        pickles=("cifar-100-python/train", "train"),
    ),
    KnownDataset(
        "tiny-imagenet", "photographs, its training part", 200, 100_000, (3, 64, 64), _HUB, 0.005,
        hub="zh-plus/tiny-imagenet", parts=("train",), folders=("tiny-imagenet-200",),
    ),
    KnownDataset(
        "ag_news", "news, titles and first lines", 4, 127_600, (LENGTH,), _HUB, 0.1,
        model="fasttext", hub="fancyzhx/ag_news", folders=("ag_news_csv", "AG_NEWS"),
        class_names=("World", "Sports", "Business", "Sci/Tech"),
    ),
    KnownDataset(
        "mnist-writers", "MNIST; its 836 writers are the clients", 10, 70_000, (1, 28, 28), _HUB,
        0.1, images_of="mnist", class_names=_DIGITS,
    ),
    KnownDataset(
        "heart-disease", "patients of 4 hospitals, which are the clients", 2, 740, (13,),
        "--data-dir (UCI's files)", 0.05, model="mlp", rounds=200,
        folders=("heart_disease", "heart+disease"), class_names=("no disease", "disease"),
    ),
    KnownDataset(
        "har", "motions of 30 people, who are the clients, as features", 6, 10_299, (561,),
        "--data-dir (UCI's files)", 0.05, model="mlp", rounds=200, folders=("UCI HAR Dataset",),
        class_names=_ACTIVITIES,
    ),
    KnownDataset(
        "har-signals", "the same motions as 9 signals of 128 steps", 6, 10_299, (9, 128),
        "--data-dir (UCI's files)", 0.05, model="cnn1d", rounds=200,
        folders=("UCI HAR Dataset",), class_names=_ACTIVITIES,
    ),
)  # fmt: skip


def known_datasets() -> list[KnownDataset]:
    """Return the datasets that `load` knows by name."""
    return list(_DATASETS)


def find_known(name: str) -> KnownDataset | None:
    """Return the dataset that `load` knows by this name; None if it knows none."""
    return next((dataset for dataset in _DATASETS if dataset.name == name), None)
