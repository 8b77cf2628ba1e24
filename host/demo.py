"""The demonstration: handwritten digits, a small network, its matrix products on the core.

The network is trained with numpy on the spot. Its forward pass on images it has not seen runs with
BF16 operands on the simulated hardware and, for comparison, on the golden model and in binary32.
"""

import time
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from ..rtl.arch.config import CoreConfig, named_config
from ..rtl.arch.formats import BF16
from .device import open_device
from .lower import to_format
from .report import RunReport

__all__ = [
    "LAYERS", "QUICK_LAYERS", "TEST_IMAGES", "WIDE_LAYERS", "DemoResult", "Network", "digits",
    "run_demo", "train", "work_for",
]  # fmt: skip

WIDE_LAYERS = (64, 512, 512, 10)
"""For arrays of 64 rows and more, which smaller layers would leave empty."""
LAYERS = (64, 64, 32, 10)
QUICK_LAYERS = (64, 16, 10)
"""For simulators of about a hundred cycles per second."""
TEST_IMAGES = 397
"""Images that no network was trained on."""
EPOCHS, WIDE_EPOCHS = 20, 5
SEED = 7


def work_for(config, *, slow=False):
    """How many images, and which network, are worth the machine; ``slow`` is the simulator."""
    if slow:
        return 8, QUICK_LAYERS
    return (TEST_IMAGES, WIDE_LAYERS) if config.rows >= 64 else (256, LAYERS)


@dataclass
class Network:
    """A multi-layer perceptron with rectified linear units."""

    weights: list
    biases: list

    def forward(self, x, matmul=np.matmul, on_layer=None):
        """Logits; ``matmul`` makes every matrix product."""
        for i, (w, b) in enumerate(zip(self.weights, self.biases, strict=True)):
            x = matmul(x, w) + b
            if i + 1 < len(self.weights):
                x = np.maximum(x, 0)
            if on_layer is not None:
                on_layer(i, x)
        return x


def digits():
    """Images and labels of scikit-learn's handwritten digits: train and test, always the same."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(SEED).permutation(len(images))
    images = (images[order] / 16).astype(np.float32)
    labels = labels[order]
    cut = len(images) - TEST_IMAGES
    return (images[:cut], labels[:cut]), (images[cut:], labels[cut:])


def train(images, labels, *, layers=LAYERS, epochs=None, batch=50, rate=0.15, momentum=0.9):
    """Train a network by stochastic gradient descent; always the same result."""
    if epochs is None:
        epochs = WIDE_EPOCHS if max(layers) > 64 else EPOCHS
    rng = np.random.default_rng(SEED)
    weights = [
        (rng.standard_normal((m, n)) * np.sqrt(2 / m)).astype(np.float32)
        for m, n in pairwise(layers)
    ]
    biases = [np.zeros(n, np.float32) for n in layers[1:]]
    speed = [np.zeros_like(p) for p in (*weights, *biases)]
    count = len(weights)
    for epoch in range(epochs):
        step = np.float32(rate * (1 - epoch / epochs))
        order = rng.permutation(len(images))
        for start in range(0, len(images), batch):
            chosen = order[start : start + batch]
            values = [images[chosen]]
            for i in range(count):
                x = values[-1] @ weights[i] + biases[i]
                values.append(np.maximum(x, 0) if i + 1 < count else x)
            logits = values[-1] - values[-1].max(axis=1, keepdims=True)
            share = np.exp(logits)
            share /= share.sum(axis=1, keepdims=True)
            share[np.arange(len(chosen)), labels[chosen]] -= 1
            delta = share / len(chosen)
            for i in reversed(range(count)):
                grads = values[i].T @ delta, delta.sum(axis=0)
                if i:
                    delta = (delta @ weights[i].T) * (values[i] > 0)
                for which, parameter, gradient in (
                    (i, weights[i], grads[0]),
                    (count + i, biases[i], grads[1]),
                ):
                    speed[which] = np.float32(momentum) * speed[which] - step * gradient
                    parameter += speed[which]
    return Network(weights, biases)


@dataclass
class DemoResult:
    """What the demonstration measured.

    Attributes
    ----------
    images : :class:`int`
    accuracy, reference_accuracy : :class:`float`
        On the core (BF16 operands) and in numpy (binary32).
    same_bits : :class:`bool`
        Whether every layer's result equals the golden model's, bit for bit.
    max_abs_error : :class:`float`
        Of the logits, against binary32.
    report : :class:`RunReport`
        Of all matrix products together.
    train_s, total_s : :class:`float`, seconds
    """

    backend: str
    backend_reason: str
    images: int
    layers: tuple
    accuracy: float
    reference_accuracy: float
    same_bits: bool
    max_abs_error: float
    report: RunReport
    train_s: float
    total_s: float
    layer_reports: list = field(default_factory=list)

    def to_dict(self):
        """Every number, ready for JSON."""
        return {
            **self.report.to_dict(),
            "images": self.images,
            "layers": list(self.layers),
            "accuracy": self.accuracy,
            "reference_accuracy": self.reference_accuracy,
            "same_bits_as_golden": self.same_bits,
            "max_abs_error": self.max_abs_error,
            "train_s": self.train_s,
            "total_s": self.total_s,
        }


def run_demo(
    config: str | CoreConfig = "TRN",
    backend="auto",
    *,
    images=None,
    sizes=None,
    say=lambda text: None,
    progress=None,
    on_build=None,
):
    """Run the demonstration.

    Parameters
    ----------
    images : :class:`int` or ``None``
        Test images, at most :data:`TEST_IMAGES`; ``None`` is as many as :func:`work_for` says.
    sizes : tuple or ``None``
        Of the layers of the network, from 64 pixels to 10 digits; ``None`` as above.
    say : callable
        Told what happens next.
    progress : callable or ``None``
        Called with (layer, layers, instructions issued, instructions in all, cycles or ``None``).
    on_build : callable or ``None``
        As of :func:`~.device.open_device`.
    """
    began = time.perf_counter()
    machine = named_config(config) if isinstance(config, str) else config
    usual = work_for(machine)
    images, sizes = images or usual[0], sizes or usual[1]
    say("training a network on 1,400 handwritten digits (numpy)")
    (train_x, train_y), (test_x, test_y) = digits()
    network = train(train_x, train_y, layers=sizes)
    test_x, test_y = test_x[:images], test_y[:images]
    train_s = time.perf_counter() - began
    reference = network.forward(test_x)
    layers = len(network.weights)

    layer = 0
    reports, sums = [], []

    def tell(issued, total, cycles):
        if progress is not None:
            progress(layer, layers, issued, total, cycles)

    with open_device(config, backend, progress=tell, on_build=on_build) as dev:
        say(f"running {layers} layers on {dev.config.name}, {dev.backend}: {dev.backend_reason}")

        def on_core(x, w):
            out = dev.matmul(x, w, dtype=BF16)
            reports.append(dev.last_run)
            sums.append(out)
            return out

        def next_layer(i, _):
            nonlocal layer
            layer = i + 1

        logits = network.forward(test_x, on_core, next_layer)
        config, name, reason = dev.config, dev.backend, dev.backend_reason

    say("comparing with the golden model")
    same = True
    with open_device(config, "golden") as golden:
        x = test_x
        for i, (w, b) in enumerate(zip(network.weights, network.biases, strict=True)):
            expected = golden.matmul(to_format(x, BF16), to_format(w, BF16))
            same &= expected.tobytes() == sums[i].tobytes()
            x = sums[i] + b
            x = np.maximum(x, 0) if i + 1 < layers else x
    report = RunReport.from_dict(reports[0].to_dict())
    for other in reports[1:]:
        report.add(other)
    error = float(np.abs(logits - reference).max())
    report.max_abs_error = error
    return DemoResult(
        backend=name,
        backend_reason=reason,
        images=len(test_x),
        layers=tuple(sizes),
        accuracy=float((logits.argmax(axis=1) == test_y).mean()),
        reference_accuracy=float((reference.argmax(axis=1) == test_y).mean()),
        same_bits=bool(same),
        max_abs_error=error,
        report=report,
        train_s=train_s,
        total_s=time.perf_counter() - began,
        layer_reports=reports,
    )
