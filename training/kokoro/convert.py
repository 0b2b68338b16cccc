"""The quantised graph of the teacher's package to named tensors, and its voices to one file.

    python -m training.kokoro.convert --package runs/teacher/package --out runs/teacher

Needs the package `onnx`. Every constant that feeds a product, a convolution, an LSTM or an
embedding is given the name that its node's scope has in `training.kokoro.network`.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from training.kokoro.packages import GRAPH, VOICES
from training.kokoro.weights import Quantised, pack

WEIGHTS_FILE, VOICES_FILE = "kokoro.npz.xz", "voices.npz"
GATES = (0, 2, 3, 1)  # ONNX orders an LSTM's gates i o f c, torch i f c o
FLOAT_NAMES = re.compile(
    r"\.(bias|gamma|beta|alpha[12]\.\d)$|LayerNorm\.weight$|layer_norm\.weight$"
)
# torch.onnx numbers constants that have lost their name; the source's merge of harmonics is one
MERGE = "/decoder/decoder/generator/m_source/l_linear/MatMul"


def module_of(node: str) -> str:
    """The module's name for a node's: /encoder/text_encoder/cnn.0/cnn.0.0/Conv_quant is
    text_encoder.cnn.0.0."""
    parts = node.strip("/").split("/")[1:-1]
    if re.match(r"(F0|N)(\.|_proj)|shared", parts[0]):
        parts.insert(0, "predictor")
    kept: list[str] = []
    for part in parts:
        if kept and part.startswith(kept[-1] + "."):
            kept.pop()  # a list's member repeats the list's name
        kept.append(part)
    if "bert" in kept:  # a layer that is used twelve times has a number for every use
        kept = [re.sub(r"(?<=[a-z])_\d+$", "", part) for part in kept]
    return ".".join(kept)


def without_side(name: str) -> str:
    """A constant's name without the graph's half that it is in."""
    return re.sub(r"^(encoder|decoder)\.", "", name)


class Graph:
    """Nodes and constants of an ONNX file."""

    def __init__(self, path: Path) -> None:
        import onnx
        from onnx import numpy_helper

        graph = onnx.load(path).graph
        self.nodes = list(graph.node)
        self.constants = {x.name: numpy_helper.to_array(x) for x in graph.initializer}
        self.makers = {output: node for node in graph.node for output in node.output}

    def of_type(self, *kinds: str) -> Iterator[Any]:
        return (node for node in self.nodes if node.op_type in kinds)


def convolutions(graph: Graph) -> Iterator[tuple[str, Quantised | np.ndarray]]:
    """Weights [out, in, kernel]; transposed ones [in, out, kernel]."""
    for node in graph.of_type("ConvInteger"):
        name = node.input[1]
        scale = graph.constants[name.removesuffix("_quantized") + "_scale"]
        zero = graph.constants[node.input[3]]
        shape = (-1, 1, 1) if scale.size > 1 else ()
        values = graph.constants[name]
        yield (
            f"{module_of(node.name)}.weight",
            Quantised(values, scale.reshape(shape), zero.reshape(shape)),
        )
    for node in graph.of_type("Conv", "ConvTranspose"):
        if "istft" not in node.name:
            module = module_of(node.name)
            yield f"{module}.weight", graph.constants[node.input[1]]
            yield f"{module}.bias", graph.constants[node.input[2]]


def products(graph: Graph) -> Iterator[tuple[str, Quantised | np.ndarray]]:
    """Weights of linear layers [out, in]; products of two activations have none."""
    for node in graph.of_type("MatMulInteger"):
        name = node.input[1]
        if name not in graph.constants:
            continue
        named = not name.startswith("onnx::")
        module = without_side(re.sub(r"\.weight_quantized$", "", name))
        scale = graph.constants[name.removesuffix("_quantized") + "_scale"]
        zero = graph.constants[node.input[3]]
        shape = (-1, 1) if scale.size > 1 else ()
        yield (
            f"{module if named else module_of(node.name)}.weight",
            Quantised(graph.constants[name].T.copy(), scale.reshape(shape), zero.reshape(shape)),
        )
    for node in graph.of_type("MatMul"):
        if node.name == MERGE:
            yield f"{module_of(node.name)}.weight", graph.constants[node.input[1]].T.copy()


def embeddings(graph: Graph) -> Iterator[tuple[str, Quantised]]:
    """Tables [symbols, dim]."""
    for node in graph.of_type("DequantizeLinear"):
        maker = graph.makers.get(node.input[0])
        if maker is not None and maker.op_type == "Gather":
            name = maker.input[0]
            scale, zero = (graph.constants[constant] for constant in node.input[1:3])
            table = Quantised(graph.constants[name], scale, zero)
            yield without_side(name.removesuffix("_quantized")), table


def recurrences(graph: Graph) -> Iterator[tuple[str, Quantised | np.ndarray]]:
    """Weights [4 x hidden, in] and biases of LSTMs, forward and backward."""
    for node in graph.of_type("DynamicQuantizeLSTM"):
        module, constants = module_of(node.name), graph.constants
        inputs = [constants.get(name) for name in node.input]
        for kind, at, scale, zero in (("ih", 1, 8, 9), ("hh", 2, 10, 11)):
            for side, suffix in enumerate(("", "_reverse")):
                values = _reorder(inputs[at][side].T)
                tensor = Quantised(values, inputs[scale][side], inputs[zero][side])
                yield f"{module}.weight_{kind}_l0{suffix}", tensor
        for side, suffix in enumerate(("", "_reverse")):
            for kind, bias in zip(("ih", "hh"), np.split(inputs[3][side], 2), strict=True):
                yield f"{module}.bias_{kind}_l0{suffix}", _reorder(bias)


def _reorder(gates: np.ndarray) -> np.ndarray:
    pieces = np.split(gates, 4)
    return np.concatenate([pieces[k] for k in GATES])


def plain(graph: Graph) -> Iterator[tuple[str, np.ndarray]]:
    """Biases, norms and the like, which keep their names."""
    for name, value in graph.constants.items():
        if FLOAT_NAMES.search(name):
            yield without_side(name), value


def tensors_of(path: Path) -> dict[str, np.ndarray | Quantised]:
    """All of the network's tensors, by the names of `training.kokoro.network`."""
    graph = Graph(path)
    tensors: dict[str, np.ndarray | Quantised] = dict(plain(graph))
    for source in (convolutions, products, embeddings, recurrences):
        tensors.update(source(graph))
    return tensors


def voices_of(folder: Path) -> dict[str, np.ndarray]:
    """Every voice's style rows, float16 [510, 256]."""
    paths = sorted(folder.glob("*.bin"))
    rows = {path.stem: np.fromfile(path, np.float32).reshape(-1, 256) for path in paths}
    return {name: value.astype(np.float16) for name, value in rows.items()}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--package", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    tensors = tensors_of(args.package / GRAPH)
    pack(tensors, args.out / WEIGHTS_FILE)
    voices = voices_of(args.package / VOICES)
    np.savez_compressed(args.out / VOICES_FILE, **voices)
    size = (args.out / WEIGHTS_FILE).stat().st_size / 2**20
    print(f"{len(tensors)} tensors, {size:.1f} MiB; {len(voices)} voices")


if __name__ == "__main__":
    main()
