"""Results cell by cell, one JSON line each, so that an evaluation that was stopped goes on where it was.

A cell is one policy on one sample. The first line of a file says whose results it holds; a cell is identified by policy, task,
length and seed, and is only taken as done if the policy's settings and the sample's tokens are still the same.
"""
from __future__ import annotations

import hashlib
import json
import os
import pathlib
from dataclasses import asdict, dataclass, field

from .policies import Policy
from .samples import Sample

FORMAT = 1


@dataclass(frozen=True)
class AnswerScore:
    """One answer, teacher-forced unless `text` says what was generated.

    right, agreed: tokens of `tokens` whose argmax is the gold token, that of dense attention. kl: KL(dense || this) in nats,
    one a token. loss: mean negative log-likelihood of the gold tokens, in nats. A generated answer has a score from 0 to 1 and
    counts as one token, which has agreed if the text is that of dense attention and is never right; no kl and no loss.
    """

    name: str
    depth: float | None
    tokens: int
    right: int
    agreed: int
    kl: tuple[float, ...]
    loss: float | None
    score: float | None = None
    text: str | None = None

    @property
    def exact(self) -> bool:
        return self.right == self.tokens


@dataclass(frozen=True)
class Cell:
    """One policy on one sample.

    blocks_read, blocks_held: summed over tokens, KV heads and layers. hbm_fraction: bytes of digests, keys and values read over
    those of all keys and values. mass: histogram of the true share of the attention mass that was gathered, over layers, KV
    heads (mean of their query heads) and tokens: {bin: count}, MASS_BINS bins. layer_kv: share of blocks read in each layer;
    head_mass: mean share of the mass gathered by each KV head of each layer.
    layer_blocks: of each layer, histogram of the share of blocks read, in BLOCK_BINS bins. simulated: whether the figures are
    of a simulation; else the cache's own step has answered.
    """

    policy: str
    settings: dict
    task: str
    length: int
    seed: int
    sample: str
    context_tokens: int
    answers: tuple[AnswerScore, ...]
    blocks_read: float
    blocks_held: float
    hbm_fraction: float | None
    coverage: float | None
    mass: dict[int, int] = field(default_factory=dict)
    layer_kv: tuple[float, ...] = ()
    head_mass: tuple[tuple[float, ...], ...] = ()
    layer_blocks: tuple[dict[int, int], ...] = ()
    simulated: bool = True
    seconds: float = 0.0

    @property
    def place(self) -> tuple:
        return self.policy, self.task, self.length, self.seed

    def to_json(self) -> str:
        return json.dumps({"kind": "cell", **asdict(self)})

    @classmethod
    def from_dict(cls, values: dict) -> Cell:
        values = {name: value for name, value in values.items() if name != "kind"}
        numbered = lambda histogram: {int(key): count for key, count in histogram.items()}  # noqa: E731
        return cls(**{**values, "answers": tuple(AnswerScore(**{**a, "kl": tuple(a["kl"])}) for a in values["answers"]),
                      "mass": numbered(values["mass"]), "layer_kv": tuple(values["layer_kv"]),
                      "head_mass": tuple(map(tuple, values["head_mass"])),
                      "layer_blocks": tuple(numbered(part) for part in values["layer_blocks"])})


MASS_BINS, BLOCK_BINS = 1000, 50


def sample_id(sample: Sample) -> str:
    """Short hash of a sample's tokens and of how answers are scored: another text, tokenizer or version of a task gives
    another one."""
    text = json.dumps([sample.context, [asdict(question) for question in sample.questions]])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def model_id(model) -> dict:
    """What must be the same for results to belong together: kind, size and type of a model, and some of its weights."""
    digest = hashlib.sha256()
    count = 0
    for name, parameter in model.named_parameters():
        count += parameter.numel()
        if parameter.numel():
            part = parameter.detach().reshape(-1)
            digest.update(f"{name} {tuple(parameter.shape)}".encode())
            digest.update(part[:: max(1, part.numel() // 16)][:16].float().cpu().numpy().tobytes())
    return {"type": getattr(model.config, "model_type", "?"), "parameters": count,
            "dtype": str(model.dtype).removeprefix("torch."), "weights": digest.hexdigest()[:12]}


class CellFile:
    """A JSON-lines file of cells, to which finished ones are added at once.

    Args:
        path: where; None: results are kept in memory only.
        model: see `model_id`. about: further entries of the first line, for the reader.

    Raises:
        ValueError: the file is of another model, of another format, or holds lines that can't be read.
    """

    def __init__(self, path: str | os.PathLike | None, model: dict, about: dict | None = None):
        self.path = None if path is None else pathlib.Path(path)
        self.cells: dict[tuple, Cell] = {}
        self._mend: tuple[int, bytes] | None = None         # bytes of the file that stay, and the line feed that lacks
        self.about = {"kind": "run", "format": FORMAT, "model": model, **(about or {})}
        if self.path is not None and self.path.exists() and self.path.stat().st_size:
            self.about = self._read()
            if self.about.get("model") != model:
                raise ValueError(f"{self.path} holds results of another model "
                                 f"({_differences(self.about.get('model'), model)}); give another file, or delete it")
        elif self.path is not None:
            self._append(json.dumps(self.about))

    def done(self, policy: Policy, sample: Sample, length: int, simulated: bool = True) -> bool:
        """Whether the cell is finished.

        Raises:
            ValueError: it is, but with other settings, or on another text.
        """
        cell = self.cells.get((policy.name, sample.task, length, sample.seed))
        if cell is None:
            return False
        where = f"{self.path}: policy {policy.name!r}, task {sample.task}, length {length}, seed {sample.seed}"
        if cell.settings != json.loads(json.dumps(policy.to_dict())):
            raise ValueError(f"{where} was measured with other settings "
                             f"({_differences(cell.settings, policy.to_dict())}); give another file, or delete it")
        if cell.sample != sample_id(sample):
            raise ValueError(f"{where} was measured on another text, with another tokenizer, or by another version of the "
                             "task; give another file, or delete it")
        if cell.simulated != simulated:
            raise ValueError(f"{where} was {'simulated' if cell.simulated else 'answered by the cache itself'}; give another "
                             "file, or delete it")
        return True

    def add(self, cell: Cell) -> None:
        self.cells[cell.place] = cell
        if self.path is not None:
            self._append(cell.to_json())

    def _append(self, line: str) -> None:
        with open(self.path, "ab") as file:
            if self._mend is not None:
                keep, missing = self._mend
                file.truncate(keep)
                file.write(missing)
                self._mend = None
            file.write(line.encode() + b"\n")

    def _read(self) -> dict:
        """Fill `cells` from the file and return its first line; half a line at its end is passed over, and goes when the next
        one is added."""
        data, about, read = self.path.read_bytes(), None, 0
        for number, line in enumerate(data.splitlines(keepends=True), 1):
            try:
                values = json.loads(line) if line.strip() else None
                if about is None and values is not None:
                    if not isinstance(values, dict) or values.get("kind") != "run" or values.get("format") != FORMAT:
                        raise ValueError("it does not begin with the line of an evaluation")
                    about = values
                elif values is not None:
                    cell = Cell.from_dict(values)
                    self.cells[cell.place] = cell
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                if about is not None and not line.endswith(b"\n"):
                    break                                   # it was being written
                raise ValueError(f"{self.path}, line {number}: no result of this version of the evaluation ({error}); give "
                                 "another file, or delete it") from error
            read += len(line)
        if about is None:
            raise ValueError(f"{self.path} holds nothing but blank lines; give another file, or delete it")
        if not data.endswith(b"\n"):
            self._mend = read, b"\n" if read == len(data) else b""
        return about


def _differences(old, new) -> str:
    old, new = old or {}, new or {}
    names = [name for name in dict.fromkeys([*old, *new]) if old.get(name) != new.get(name)]
    return ", ".join(f"{name}: {old.get(name)} there, {new.get(name)} now" for name in names)
