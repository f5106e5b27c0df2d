"""Keeps small images on the device, and crops, flips and cuts them out there, a batch at a time."""

import inspect
import warnings
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spartan import zoo
from spartan.app.train.config import Config, RecipeError, blaming_the_recipe
from spartan.app.train.data import Batch, Data, seed_of, source_path
from spartan.app.train.processes import Processes
from spartan.wording import nearest, one_line

NAMES = ("x_train", "y_train", "x_test", "y_test")

# torchvision's small data sets, and the arguments that pick the training and the test part
_FLAG = ({"train": True}, {"train": False})
_SPLIT = ({"split": "train"}, {"split": "test"})
TORCHVISION: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    **dict.fromkeys(("CIFAR10", "CIFAR100", "MNIST", "FashionMNIST", "KMNIST", "USPS"), _FLAG),
    **dict.fromkeys(("SVHN", "STL10"), _SPLIT),
    "EMNIST": ({"train": True, "split": "balanced"}, {"train": False, "split": "balanced"}),
}


class SmallImages(Data):
    """A data set as two tensors of images on the device, uint8 or float32."""

    def __init__(self, config: Config, device: torch.device, us: Processes) -> None:
        if config.data.randaugment is not None:
            raise RecipeError("data.randaugment: only large images (imagefolder, webdataset) get it; set it to null")
        x_train, y_train, x_test, y_test = _read(config)
        channels, height, width = x_train.shape[1:]
        labels = 1 + max((int(y.max()) for y in (y_train, y_test) if len(y)), default=0)
        classes = config.data.classes or labels
        if classes < labels:
            raise RecipeError(f"data.classes: {classes} is too few; the labels go up to {labels - 1}")
        super().__init__(config, device, us, classes, (channels, height, width), (len(x_train), len(x_test)))
        self.test_micro = max(self.micro, 1024)  # no gradients are kept, so more fits at once
        for key in ("pad", "cutout"):
            if (size := getattr(config.data, key)) >= min(height, width):
                raise RecipeError(f"data.{key}: {size} must be smaller than the images, which are {height}×{width}")
        mean, std = _moments(x_train)
        self.scale = (1 / std).float().to(device)[:, None, None]
        self.shift = (-mean / std).float().to(device)[:, None, None]
        self._train, self._train_labels = x_train.to(device), y_train.to(device)
        mine = slice(us.rank, None, us.world)
        self._test, self._test_labels = x_test[mine].to(device), y_test[mine].to(device)
        # Tables instead of arithmetic: few kernels, since at this size a step is bound by launching them. For every
        # crop's offset, where in the flattened image each of its rows and columns comes from; for every cutout's
        # centre, which rows and columns stay.
        rows, columns = _reflected(height, config.data.pad), _reflected(width, config.data.pad)
        self._rows = (rows * width).to(device)
        self._columns = (torch.cat([columns, columns.flip(1)]) if config.data.flip else columns).to(device)
        self._moves = config.data.pad > 0 or config.data.flip
        self._rows_stay, self._columns_stay = (_outside(s, config.data.cutout).to(device) for s in (height, width))

    def train(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """This process's micro-batches of an epoch, from its number `start` on; nothing waits for the device."""
        draws = self._draw(epoch)
        for i in range(start * self.us.world + self.us.rank, self.micro_batches, self.us.world):
            order, *chosen = draws[:, i * self.micro : (i + 1) * self.micro]
            yield self._augmented(order, *chosen), self._train_labels[order]

    def test(self) -> Iterator[Batch]:
        """Every test image of this process's share, once."""
        size = self.test_micro
        for x, y in zip(self._test.split(size), self._test_labels.split(size), strict=True):
            if len(y):  # there may be more processes than images
                yield x * self.scale + self.shift, y

    def _draw(self, epoch: int) -> Tensor:
        """Everything random about an epoch [5, n]: order, crop row, crop column and flip, cutout's row and column.

        Drawn at once and on the host, so that it is the same for every device, batch size and starting point.
        """
        generator, n = torch.Generator().manual_seed(seed_of(self.config.seed, epoch)), self.train_size
        choices = (len(self._rows), len(self._columns), *self.shape[1:])
        order = torch.randperm(n, generator=generator)
        table = torch.stack([order, *(torch.randint(count, (n,), generator=generator) for count in choices)])
        return (table.pin_memory() if self.device.type == "cuda" else table).to(self.device, non_blocking=True)

    def _augmented(self, order: Tensor, row: Tensor, column: Tensor, cut_row: Tensor, cut_column: Tensor) -> Tensor:
        images = self._train[order]
        if self._moves:
            place = (self._rows[row][:, :, None] + self._columns[column][:, None, :]).flatten(1)
            flat = images.flatten(2)
            images = flat.gather(2, place[:, None].expand(-1, flat.shape[1], -1)).view_as(images)
        x = images * self.scale + self.shift
        if self.config.data.cutout:
            stay = self._rows_stay[cut_row][:, None, :, None] | self._columns_stay[cut_column][:, None, None, :]
            x *= stay  # 0 is the mean
        return x


def _reflected(side: int, pad: int) -> Tensor:
    """[2·pad + 1, side]: for every offset into the reflect-padded image, where its pixels come from."""
    position = torch.arange(2 * pad + 1)[:, None] - pad + torch.arange(side)
    return (side - 1) - ((side - 1) - position.abs()).abs()


def _outside(side: int, size: int) -> Tensor:
    """[side, side]: for every centre, the pixels a cutout leaves; it may stick out, as in DeVries and Taylor (2017)."""
    distance = torch.arange(side) - torch.arange(side)[:, None] + size // 2
    return (distance < 0) | (distance >= size)


def _moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each channel, in float64; a constant channel is only shifted."""
    if x.dtype == torch.uint8:  # from histograms: exact, and without a float copy of the whole set
        counts = torch.stack([torch.bincount(c.flatten(), minlength=256) for c in x.unbind(1)]).double()
        values, total = torch.arange(256, dtype=torch.float64), counts.sum(1)
        mean = counts @ values / total
        std = ((counts * (values - mean[:, None]) ** 2).sum(1) / total).sqrt()
    else:
        pairs = [torch.std_mean(c.double(), correction=0) for c in x.unbind(1)]
        std, mean = (torch.stack(values) for values in zip(*pairs, strict=True))
    return mean, torch.where(std > 0, std, 1.0)


def _read(config: Config) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x_train, y_train, x_test, y_test, checked; images NCHW as uint8 or float32."""
    source, path = config.data.source, config.data.path
    if source in READERS:
        read = READERS[source]
    elif ":" in source:
        read = _from_function
    else:
        read = _from_npz if Path(path or "").suffix == ".npz" else _from_torchvision
    arrays = read(config)
    origin = f"data.path: {path}" if read is _from_npz and source != "npz" else f"data.source: {source}"
    x_train, x_test = (_images(f"{origin}: {NAMES[i]}", arrays[i]) for i in (0, 2))
    y_train = _labels(f"{origin}: y_train", arrays[1], len(x_train))
    y_test = _labels(f"{origin}: y_test", arrays[3], len(x_test))
    if x_train.shape[1:] != x_test.shape[1:] or x_train.dtype != x_test.dtype:
        shapes = " and ".join(f"{x.dtype} {tuple(x.shape[1:])}".removeprefix("torch.") for x in (x_train, x_test))
        raise RecipeError(f"{origin}: x_train and x_test differ: {shapes}")
    return x_train, y_train, x_test, y_test


def _digits(config: Config) -> Sequence[Any]:
    """The 1,797 images that come with scikit-learn: a fixed 80% to train on, whatever the seed."""
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ModuleNotFoundError:
        hint = "pip install 'spartan-sparsity[app]'"
        raise RecipeError(f"data.source: digits needs scikit-learn, which is not installed: {hint}") from None
    x, y = load_digits(return_X_y=True)
    x = (x / 16.0).astype(np.float32).reshape(-1, 1, 8, 8)
    x_train, x_test, y_train, y_test = train_test_split(x, y, test_size=0.2, stratify=y, random_state=0)
    return x_train, y_train, x_test, y_test


def _from_npz(config: Config) -> Sequence[Any]:
    path = source_path(config)
    if not path.is_file():
        raise RecipeError(f"data.path: there is no file {path}; it must be an .npz with {', '.join(NAMES)}")
    try:
        with open(path, "rb") as file:
            archive = np.load(file, allow_pickle=False)
            stored = {} if isinstance(archive, np.ndarray) else {n: archive[n] for n in archive.files if n in NAMES}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise RecipeError(f"data.path: {path} cannot be read as an .npz of arrays ({error})") from None
    missing = [name for name in NAMES if name not in stored]
    if missing:
        raise RecipeError(f"data.path: {path} lacks {', '.join(missing)}; it must have {', '.join(NAMES)}")
    return [stored[name] for name in NAMES]


READERS: dict[str, Callable[[Config], Sequence[Any]]] = {"digits": _digits, "npz": _from_npz}


def _from_function(config: Config) -> Sequence[Any]:
    source = config.data.source
    with blaming_the_recipe():
        function = zoo.load_function("data.source", source)
    arrays = function()
    if not isinstance(arrays, (tuple, list)) or len(arrays) != 4:
        raise RecipeError(f"data.source: {source} must return {', '.join(NAMES)}, not {type(arrays).__name__}")
    return arrays


def _from_torchvision(config: Config) -> Sequence[Any]:
    name = config.data.source.removeprefix("torchvision/")
    if name not in TORCHVISION:
        raise RecipeError(
            f"data.source: torchvision/{name} is unknown{nearest(name, TORCHVISION)}; other sets can be laid out for "
            f"data.source=imagefolder; accepted: {', '.join(TORCHVISION)}"
        )
    root, arrays = source_path(config), []
    with blaming_the_recipe():
        dataset = getattr(zoo.torchvision().datasets, name)
    options = {"download": config.data.download} if "download" in inspect.signature(dataset).parameters else {}
    for part in TORCHVISION[name]:
        try:
            with warnings.catch_warnings(action="ignore"):  # about old pickles and headers that these sets come in
                loaded = dataset(str(root), **part, **options)
        except (RuntimeError, OSError, ImportError) as error:  # not there, not reachable, or SVHN without scipy
            reason = one_line(error).rstrip(".")
            raise RecipeError(
                f"data.path: {name} could not be loaded from {root} ({reason}); set data.download=true to fetch it, or "
                "data.path to the folder that has it or to an .npz of its arrays"
            ) from None
        x = loaded.data
        channels_first = getattr(x, "ndim", 0) == 4 and x.shape[1] == 3 and x.shape[3] != 3  # SVHN, STL10
        labels = loaded.targets if hasattr(loaded, "targets") else loaded.labels
        arrays += [x.transpose(0, 2, 3, 1) if channels_first else x, labels]
    return arrays


def _images(what: str, array: Any) -> Tensor:
    """NCHW, uint8 or float32, from uint8 NHW or NHWC, or floats NHW or NCHW."""
    x = _tensor(what, array)
    accepted = "accepted: uint8 [N, H, W] or [N, H, W, C], or floats [N, H, W] or [N, C, H, W]"
    given = f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"
    if x.ndim not in (3, 4) or not (x.dtype == torch.uint8 or x.is_floating_point()):
        raise RecipeError(f"{what} is {given}; {accepted}")
    if x.ndim == 3:
        x = x[:, None]
    elif x.dtype == torch.uint8:
        x = x.permute(0, 3, 1, 2)
    if 0 in x.shape[1:] or x.shape[1] > 16:  # most likely the other order of axes
        raise RecipeError(f"{what} is {given}, which would be {x.shape[1]} channels; {accepted}")
    if x.dtype == torch.uint8:
        return x.contiguous()
    if not x.isfinite().all():
        raise RecipeError(f"{what} has values that are not finite")
    return x.float().contiguous()


def _labels(what: str, array: Any, count: int) -> Tensor:
    """int64 [N] from whole numbers [N] or [N, 1]."""
    y = _tensor(what, array)
    y = y[:, 0] if y.ndim == 2 and y.shape[1] == 1 else y
    if y.ndim != 1 or y.dtype.is_floating_point or y.dtype.is_complex or y.dtype == torch.bool:
        given = f"{str(y.dtype).removeprefix('torch.')} {list(y.shape)}"
        raise RecipeError(f"{what} is {given}; labels must be whole numbers [N]")
    if len(y) != count:
        raise RecipeError(f"{what} has {len(y):,} labels for {count:,} images")
    if len(y) and int(y.min()) < 0:
        raise RecipeError(f"{what} has negative labels; they must count from 0")
    return y.long()


def _tensor(what: str, array: Any) -> Tensor:
    try:
        return array.detach().cpu() if isinstance(array, Tensor) else torch.from_numpy(np.array(array))
    except (TypeError, ValueError) as error:
        raise RecipeError(f"{what} is no array of numbers ({error})") from None
