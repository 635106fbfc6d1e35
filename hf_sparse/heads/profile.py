"""HeadProfile: how much each KV head of a model needs the whole context."""
from __future__ import annotations

import json
import os
import pathlib
from dataclasses import dataclass, field

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

PROFILE_NAME = "head_profile.safetensors"
_FORMAT, _VERSION = "hf_sparse head profile", "1"


@dataclass(frozen=True, eq=False)
class HeadProfile:
    """What streaming heads are chosen by: a number for each KV head of each full-attention layer.

    Args:
        gates: [layers, KV heads] in [0, 1]; 1: the head needs the whole context, 0: sink and window do. Kept as fp32 on a CPU.
        layers: index in the model of each row's layer, ascending. Sliding, chunked and linear layers have no row.
        about: where the gates come from, as JSON could hold it: model (its kind and size), method, sink, window, tokens, ...

    Raises:
        TypeError, ValueError: another shape or type, gates that are NaN or not in [0, 1], layers that do not fit the rows.
    """

    gates: Tensor
    layers: tuple[int, ...]
    about: dict = field(default_factory=dict)

    def __post_init__(self):
        gates = self.gates
        if not torch.is_tensor(gates) or not gates.is_floating_point():
            raise TypeError("gates must be a tensor of floating-point numbers, "
                            f"got {gates.dtype if torch.is_tensor(gates) else type(gates).__name__}.")
        if gates.dim() != 2 or gates.numel() == 0:
            raise ValueError(f"gates must be [layers, KV heads], got {list(gates.shape)}.")
        gates = gates.detach().to("cpu", torch.float32, copy=True).contiguous()
        wrong = (~((gates >= 0) & (gates <= 1))).nonzero().tolist()                         # NaN is in no range
        if wrong:
            row, head = wrong[0]
            raise ValueError(f"{len(wrong)} gate(s) are not in [0, 1]; the first is {gates[row, head].item():g}, row {row}, "
                             f"KV head {head}.")
        layers = tuple(self.layers)
        if any(isinstance(layer, bool) or not isinstance(layer, int) or layer < 0 for layer in layers) or \
                any(low >= high for low, high in zip(layers, layers[1:])):
            raise ValueError(f"layers must be ascending indices of the model's layers, got {layers}.")
        if len(layers) != len(gates):
            raise ValueError(f"gates have {len(gates)} rows but {len(layers)} layers are named.")
        if not isinstance(self.about, dict):
            raise TypeError(f"about must be a dict, got {type(self.about).__name__}.")
        object.__setattr__(self, "gates", gates)
        object.__setattr__(self, "layers", layers)
        object.__setattr__(self, "about", dict(self.about))

    def settings(self, *, sparsity: float | None = None, threshold: float | None = None) -> dict:
        """What a PSAConfig needs for the heads that may stream: `patch_model(model, **profile.settings(sparsity=0.5))`.

        Gates hold for the sink and window that they were measured with, so these come along.

        Args:
            sparsity: share of all heads, in [0, 1]: the `round(sparsity * heads)` with the lowest gates. Of equal gates, those
                of lower layers and heads come first.
            threshold: in [0, 1]: every head whose gate is below it. Exactly one of the two is given.

        Returns:
            `streaming_heads`, as (layer in the model, KV head), ascending; `streaming_sink` and `streaming_window`, as far as
            `about` knows them.

        Raises:
            TypeError: none or both are given. ValueError: not in [0, 1].
        """
        if (sparsity is None) == (threshold is None):
            raise TypeError("give either sparsity= (a share of all heads) or threshold= (a gate)")
        name, value = ("sparsity", sparsity) if threshold is None else ("threshold", threshold)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
            raise ValueError(f"{name} must be a number in [0, 1], got {value!r}.")
        gates = self.gates.flatten()
        if threshold is None:
            chosen = gates.sort(stable=True).indices[:round(sparsity * len(gates))]
        else:
            chosen = (gates.double() < threshold).nonzero().squeeze(1)
        heads = self.gates.shape[1]
        pairs = tuple((self.layers[place // heads], place % heads) for place in sorted(chosen.tolist()))
        sizes = {f"streaming_{name}": self.about[name] for name in ("sink", "window") if name in self.about}
        return {"streaming_heads": pairs, **sizes}

    def check(self, model_config) -> None:
        """Raise unless the profile fits a model.

        Args:
            model_config: `model.config`.

        Raises:
            ValueError: other layers, other KV heads, or gates that were measured on another kind or size of model.
        """
        layers, heads = full_attention_heads(model_config)
        rows, columns = self.gates.shape
        if (rows, columns) != (len(layers), heads):
            raise ValueError(f"This profile has gates of {rows} layers x {columns} KV heads, but the model has {len(layers)} "
                             f"full-attention layers x {heads} KV heads. Calibrate one for this model.")
        if self.layers != layers:
            raise ValueError(f"This profile is of layers {_listed(self.layers)}, but the full-attention layers of the model "
                             f"are {_listed(layers)}. Calibrate one for this model.")
        own, model = self.about.get("model"), fingerprint(model_config)
        if own is not None and own != model:
            raise ValueError(f"This profile was made for {own}, the model is {model}. Calibrate one for this model.")

    def save(self, path: str | os.PathLike) -> pathlib.Path:
        """Write the profile: gates as a tensor, everything else as JSON in the metadata of the file.

        Args:
            path: a name that ends with .safetensors, or a directory (made if need be) for `head_profile.safetensors`.

        Returns:
            The file's path.

        Raises:
            TypeError: something in `about` is not JSON; nothing is written then.
        """
        for name, value in self.about.items():
            try:
                json.dumps({name: value})
            except (TypeError, ValueError) as error:
                raise TypeError(f"about[{name!r}] can't be saved, as a profile holds it as JSON: {error}. Put numbers, text, "
                                "lists and dicts with names as keys there, tensor.tolist() or str(dtype) for example. "
                                "Nothing was written.") from error
        rest = json.dumps({"layers": self.layers, "about": self.about})
        file = _file(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        save_file({"gates": self.gates}, file, {"format": _FORMAT, "version": _VERSION, "profile": rest})
        return file

    @classmethod
    def load(cls, path: str | os.PathLike) -> HeadProfile:
        """Read what `save` has written. Nothing is unpickled, whatever the file is.

        Raises:
            FileNotFoundError: no such file. ValueError: not a safetensors file, or one that holds no profile.
        """
        file = _file(path)
        if not file.is_file():
            raise FileNotFoundError(f"There is no head profile at {str(file)!r}.")
        try:
            with safe_open(file, "pt") as opened:
                metadata = opened.metadata() or {}
                gates = opened.get_tensor("gates") if "gates" in opened.keys() else None
        except SafetensorError as error:
            raise ValueError(f"{str(file)!r} is not a safetensors file, the only kind that profiles are read from: "
                             f"{error}.") from error
        if metadata.get("format") != _FORMAT or gates is None:
            raise ValueError(f"{str(file)!r} is a safetensors file but holds no head profile.")
        if metadata.get("version") != _VERSION:
            raise ValueError(f"{str(file)!r} is a head profile of version {metadata.get('version')}; this release reads "
                             f"{_VERSION}.")
        try:
            rest = json.loads(metadata["profile"])
            return cls(gates, tuple(rest["layers"]), rest["about"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{str(file)!r} holds a head profile that makes no sense: {error}") from error

    @classmethod
    def from_duo_attention(cls, path: str | os.PathLike, model_config) -> HeadProfile:
        """Read a table of DuoAttention's: `full_attention_heads.tsv`, rows layers, columns KV heads.

        Args:
            path: the table, or the directory that holds it. A `config.json` beside it says which sink and window it was
                trained with.
            model_config: `model.config` of the model that the table is for.

        Raises:
            FileNotFoundError: no such table. ValueError: not a table of gates, or not of this model's shape.
        """
        from .duo_attention import read_table

        gates, about = read_table(path)
        layers, heads = full_attention_heads(model_config)
        if gates.shape != (len(layers), heads):
            raise ValueError(f"{os.fspath(path)!r} is a table of {gates.shape[0]} layers x {gates.shape[1]} KV heads, but the "
                             f"model has {len(layers)} full-attention layers x {heads} KV heads.")
        return cls(gates, layers, {"model": fingerprint(model_config), **about})


def full_attention_heads(model_config) -> tuple[tuple[int, ...], int]:
    """(indices of the full-attention layers of a model, KV heads of each).

    Raises:
        ValueError: there is no such layer, or the number of KV heads differs between them.
    """
    from ..compat import is_plain_layer, kv_heads, template_layers

    config = model_config.get_text_config(decoder=True)
    layers = tuple(index for index, layer in enumerate(template_layers(config)) if is_plain_layer(layer))
    if not layers:
        raise ValueError("This model has no full-attention layer, so it has no heads that could stream.")
    counts = {kv_heads(config, layer) for layer in layers}
    if len(counts) > 1:
        raise ValueError("The layers of this model differ in their KV heads "
                         f"({min(counts)} to {max(counts)}), which a profile can't say.")
    return layers, counts.pop()


def fingerprint(model_config) -> str:
    """Kind and size of a model."""
    from ..cache.psa_cache import model_fingerprint

    return model_fingerprint(model_config.get_text_config(decoder=True))


def _file(path: str | os.PathLike) -> pathlib.Path:
    path = pathlib.Path(path)
    return path if path.suffix == ".safetensors" and not path.is_dir() else path / PROFILE_NAME


def _listed(layers: tuple[int, ...]) -> str:
    return ", ".join(map(str, layers))
