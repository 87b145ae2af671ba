"""Training text: files by kind, a tokenizer for them, and batches of documents to copy.

Each training sequence is [BOS] document [SEP] document [SEP] ...: what follows the first [SEP] can
be copied. Shapes: B sequences, T tokens of a sequence.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from model import BOS, SEP
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

SUFFIXES = {
    "code": (".py", ".pyi", ".c", ".h", ".hpp", ".cpp", ".cu", ".cuh", ".js", ".pyx", ".sh"),
    "prose": (".md", ".rst", ".txt", "METADATA", "LICENSE", "README", "copyright", "NEWS"),
    "tables": (".json", ".toml", ".yaml", ".yml", ".csv", ".html", ".cfg", ".ini", ".xml", ".css"),
}
KINDS = (*SUFFIXES, "scripts")  # scripts: text mostly in other alphabets, found or made up
READ = {"code": 1.0, "prose": 0.6, "tables": 0.25, "scripts": 0.5}  # how much of each, relative
LETTERS = (  # first and last code point of the alphabets that made-up text uses
    (0x00DF, 0x017F), (0x03B1, 0x03C9), (0x0430, 0x044F), (0x0561, 0x0586), (0x05D0, 0x05EA),
    (0x0627, 0x064A), (0x0905, 0x0939), (0x0E01, 0x0E2E), (0x3041, 0x3096), (0x30A1, 0x30FA),
    (0x4E00, 0x52FF), (0xAC00, 0xB0FF), (0x1F600, 0x1F64F),
)  # fmt: skip


# How often a training document is of each sort. "random" has no sense at all, "small" is random
# over few tokens, "rows" repeats a few short pieces of text with some tokens replaced, and "forms"
# repeats one or two long ones with the same places filled differently each time, like records.
SORTS = {
    "code": 0.26, "prose": 0.16, "tables": 0.14, "scripts": 0.07,
    "random": 0.08, "small": 0.06, "rows": 0.09, "forms": 0.14,
}  # fmt: skip
SORT_INDEX = {sort: index for index, sort in enumerate(SORTS)}


def kind_of(path: Path) -> str | None:
    """The kind of text that a file's name promises, or None for files that are not read."""
    for kind, suffixes in SUFFIXES.items():
        if path.name.endswith(suffixes):
            return kind
    return None


def held_out(path: Path) -> bool:
    """Whether a file is kept from training: one in fifty, by its name."""
    return hashlib.sha256(path.name.encode()).digest()[0] % 50 == 0


def read_texts(roots: Iterable[str], most_bytes: int, seed: int) -> Iterator[tuple[str, str]]:
    """Yield (kind, text) of distinct UTF-8 files under `roots`, up to `most_bytes` of code."""
    paths = sorted(
        Path(folder, name)
        for root in roots
        for folder, _, names in os.walk(root)
        for name in names
        if kind_of(Path(name)) and not held_out(Path(name))
    )
    random.Random(seed).shuffle(paths)
    seen: set[bytes] = set()
    room = {kind: most_bytes * share for kind, share in READ.items()}
    for path in paths:
        kind = kind_of(path)
        if kind is None or room[kind] <= 0 or not path.is_file():
            continue
        raw = path.read_bytes()[:200_000]
        digest = hashlib.sha256(raw).digest()
        if len(raw) < 400 or digest in seen:
            continue
        seen.add(digest)
        try:
            text = raw.decode()
        except UnicodeDecodeError:
            continue
        if len(text) < 0.9 * len(raw):
            kind = "scripts"
        room[kind] -= len(raw)
        yield kind, text


def made_up_text(characters: int, rng: random.Random) -> str:
    """Meaningless text in some alphabet: a small vocabulary, frequent words first."""
    first, last = rng.choice(LETTERS)
    letters = [chr(rng.randint(first, last)) for _ in range(rng.randint(12, 300))]
    words = ["".join(rng.choices(letters, k=rng.randint(1, 9))) for _ in range(400)]
    words += [str(rng.randint(0, 3000)) for _ in range(20)]
    gap = rng.choice((" ", " ", "", ", "))
    out: list[str] = []
    while sum(map(len, out)) < characters:
        sentence = [words[int(len(words) * rng.random() ** 3)] for _ in range(rng.randint(3, 14))]
        out.append(gap.join(sentence) + rng.choice((". ", "\n", "。", ": ")))
    return "".join(out)


def train_tokenizer(texts: Iterable[str], vocab: int) -> Tokenizer:
    """A byte-level BPE tokenizer of `vocab` ids, the first two being [BOS] and [SEP]."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=["[BOS]", "[SEP]"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


@dataclass
class Batch:
    """Sequences to train on."""

    tokens: Tensor  # (B, T)
    document_tokens: Tensor  # (B, 1): the first copied token is at position document_tokens + 2


class Batches:
    """Draws training sequences on a device from the token streams of several kinds of text."""

    def __init__(
        self, texts: Iterable[tuple[str, str]], tokenizer: Tokenizer, device: str, seed: int
    ) -> None:
        by_kind: dict[str, list[str]] = {kind: [] for kind in KINDS}
        for kind, text in texts:
            by_kind[kind].append(text)
        rng = random.Random(seed)
        by_kind["scripts"] += [made_up_text(3000, rng) for _ in range(600)]
        streams = [self._encode(by_kind[kind] or by_kind["code"], tokenizer) for kind in KINDS]
        self.stream_tokens = {kind: len(s) for kind, s in zip(KINDS, streams, strict=True)}
        ends = torch.tensor([len(s) for s in streams]).cumsum(0)
        self.stream = torch.cat(streams).to(device)
        self.starts = torch.cat((torch.zeros(1, dtype=torch.long), ends[:-1])).to(device)
        self.ends = ends.to(device)
        self.vocab = tokenizer.get_vocab_size()
        self.device = device
        self.generator = torch.Generator(device).manual_seed(seed)
        self.weights = torch.tensor(list(SORTS.values()), device=device)

    @staticmethod
    def _encode(texts: list[str], tokenizer: Tokenizer) -> Tensor:
        encoded = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return torch.cat([torch.tensor(e.ids, dtype=torch.int16) for e in encoded])

    def _integers(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, device=self.device, generator=self.generator)

    def _uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, device=self.device, generator=self.generator)

    def _pick(self, kinds: Tensor, tokens: int) -> Tensor:
        """Start indices (B, 1) of `tokens` tokens in the streams of `kinds` (B, 1)."""
        low, high = self.starts[kinds], self.ends[kinds] - tokens - 1
        return low + (self._uniform(*kinds.shape) * (high - low).clamp(min=1)).long()

    def _documents(self, rows: int, tokens: int) -> Tensor:
        """Documents (B, T) of all sorts, each to be cut to its length."""
        sort = torch.multinomial(self.weights, rows, True, generator=self.generator)[:, None]
        kind = torch.where(sort < len(KINDS), sort, self._integers(0, len(KINDS), rows, 1))
        start = self._pick(kind, tokens)
        at = torch.arange(tokens, device=self.device).expand(rows, tokens)

        # "rows" and "forms": pieces of one size in any order, then other tokens in some places
        rows_sort, forms_sort = sort == SORT_INDEX["rows"], sort == SORT_INDEX["forms"]
        size = torch.where(forms_sort, *(self._integers(*r, rows, 1) for r in ((20, 150), (6, 80))))
        pieces = torch.where(forms_sort, *(self._integers(1, n, rows, 1) for n in (3, 7)))
        order = (self._uniform(rows, tokens) * pieces).long()
        repeated = order.gather(1, at // size) * size + at % size
        source = torch.where(rows_sort | forms_sort, repeated, at)
        document = self.stream[(start + source).clamp(max=len(self.stream) - 1)].long()

        replaced = self._uniform(rows, tokens) < 0.03 + 0.3 * self._uniform(rows, 1)
        run = self._integers(1, 9, rows, 1)  # a form's places are filled by so many tokens or more
        place = replaced.gather(1, at % size // run)
        replaced = (rows_sort & replaced) | (forms_sort & place)
        filling = self.stream[self._pick(self._integers(0, 3, rows, 1), tokens) + at].long()
        document = torch.where(replaced, filling, document)

        alphabet = 2.0 ** (4 + 6 * self._uniform(rows, 1))  # "small": 16 to 1,024 tokens
        few = (self._uniform(rows, tokens) * alphabet).long() * 997 % (self.vocab - 2) + 2
        document = torch.where(sort == SORT_INDEX["small"], few, document)
        any_token = self._integers(2, self.vocab, rows, tokens)
        return torch.where(sort == SORT_INDEX["random"], any_token, document)

    def draw(self, rows: int, tokens: int, shortest: int, longest: int) -> Batch:
        """`rows` sequences of `tokens` tokens with documents of `shortest` to `longest` tokens.

        One copy in five starts somewhere inside its document instead of at its start.
        """
        document = self._documents(rows, longest)
        size = shortest + (self._uniform(rows, 1) * (longest - shortest + 1)).long()
        position = torch.arange(tokens, device=self.device).expand(rows, tokens)
        skip = (self._uniform(rows, 1) * size).long() * (self._uniform(rows, 1) < 0.2)
        at = (position - 1 + skip * (position > size + 1)) % (size + 1)
        x = document.gather(1, at.clamp(max=longest - 1))
        x = torch.where(at == size, SEP, x)
        x[:, 0] = BOS
        return Batch(x, size)
