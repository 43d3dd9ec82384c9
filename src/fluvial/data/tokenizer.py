"""Text as tokens and back: characters, byte-pair encoding, or any tokenizer of Hugging Face."""

from __future__ import annotations

import json
import os
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias, get_args

import numpy as np
from torch import Tensor

from fluvial.data.packages import extra

Normalise: TypeAlias = Literal["none", "lower", "letters"]

LETTERS = " abcdefghijklmnopqrstuvwxyz"
"""The 27 symbols of Text8."""
MASK = "\N{WHITE SQUARE}"
"""What the mask symbol, and any other id beyond the vocabulary, is shown as."""
BYTES = 256
"""Symbols that byte-pair encoding starts from."""

_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_PLAIN = bytes(k | 32 if chr(k | 32) in LETTERS else 32 for k in range(256))
_ACCENTS = re.compile("[\N{COMBINING GRAVE ACCENT}-\N{COMBINING LATIN SMALL LETTER X}]+")
_FILES = ("*token*", "vocab*", "merges*", "*.model", "*.gguf")
"""Of the tokenizers that `transformers` reads, in a folder."""
_HUB = re.compile(r"[\w.-]+/[\w.-]+(?<!\.json)(?<!\.gguf)(?<!\.txt)")
_WHAT = "tokenizers other than characters"


def normal(text: str, how: Normalise) -> str:
    """The text as it is ("none"), in lower case ("lower"), or in the 27 symbols of Text8
    ("letters": accents are dropped, digits spelled out, runs of all else become one space)."""
    if how == "none":
        return text
    if how == "lower":
        return text.lower()
    if not text.isascii():
        text = _ACCENTS.sub("", unicodedata.normalize("NFKD", text))
    for digit, word in enumerate(_WORDS):
        text = text.replace(str(digit), f" {word} ")
    content = np.frombuffer(text.encode("ascii", "replace").translate(_PLAIN), dtype=np.uint8)
    space = content == ord(" ")
    again = np.concatenate([[False], space[1:] & space[:-1]])[: len(content)]
    return content[~again].tobytes().decode("ascii")


@dataclass(frozen=True)
class Tokenizer:
    """Tokens 0 ... size - 1 of texts; one of ``alphabet`` and ``model`` says which.

    Args:
        alphabet: the characters that are tokens, in the order of their ids.
        model: a tokenizer of the package `tokenizers`, as its JSON (what ``tokenizer.json`` holds).
        normalise: what is done to a text first; see `normal`.

    Raises:
        ValueError: neither or both are given, a character occurs twice, the JSON is none of a
            tokenizer, or ``normalise`` is unknown.
    """

    alphabet: str = ""
    model: str = ""
    normalise: Normalise = "none"

    def __post_init__(self) -> None:
        if self.normalise not in get_args(Normalise):
            raise ValueError(
                f"normalise must be one of {', '.join(get_args(Normalise))}, got {self.normalise!r}"
            )
        for name in ("alphabet", "model"):
            if not isinstance(getattr(self, name), str):
                raise TypeError(f"{name} must be a str, got {type(getattr(self, name)).__name__}")
        if bool(self.alphabet) == bool(self.model):
            raise ValueError("a tokenizer needs an alphabet or a model, one of them and not both")
        if len(set(self.alphabet)) < len(self.alphabet):
            twice = next(c for c in self.alphabet if self.alphabet.count(c) > 1)
            raise ValueError(f"alphabet must hold different characters, {twice!r} occurs twice")
        if self.model:
            _check_json(self.model)

    # Making

    @classmethod
    def bpe(
        cls,
        texts: Iterable[str],
        vocabulary: int = 1_024,
        *,
        normalise: Normalise = "none",
        progress: bool = False,
    ) -> Self:
        """Byte-pair encoding learned from texts: tokens are runs of bytes, and every text has some.

        Sennrich, Haddow and Birch, ACL 2016, on bytes as in Radford et al., 2019. The same texts
        give the same tokens.

        Args:
            texts: gone through once; one text alone is a list of one.
            vocabulary: tokens, more than 256; fewer come of a text with too few pairs.
            normalise: see `normal`.
            progress: show a progress bar.

        Raises:
            TypeError: ``texts`` is one text.
            ValueError: ``vocabulary`` is no more than 256.
            ModuleNotFoundError: the package `tokenizers` is missing.
        """
        if isinstance(texts, str | bytes):  # its characters would be taken for texts
            raise TypeError(f"texts must be several, got one {type(texts).__name__}; list it")
        if vocabulary <= BYTES:
            raise ValueError(
                f"vocabulary must exceed {BYTES}, the bytes that byte-pair encoding starts from, "
                f"got {vocabulary}"
            )
        tokenizers = extra("tokenizers", "language", _WHAT)
        made = tokenizers.Tokenizer(tokenizers.models.BPE())
        made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=vocabulary,
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=progress,
        )
        made.train_from_iterator((normal(text, normalise) for text in texts), trainer)
        return cls(model=made.to_str(), normalise=normalise)

    @classmethod
    def load(cls, place: str | os.PathLike[str], *, normalise: Normalise = "none") -> Self:
        """A tokenizer of Hugging Face.

        Args:
            place: a ``tokenizer.json``, a folder with one, a folder or OWNER/NAME of the hub that
                `transformers` loads a fast tokenizer from, or a .gguf file.
            normalise: see `normal`.

        Raises:
            FileNotFoundError: there is no such file or folder, nor such a name on the hub.
            ValueError: it holds no tokenizer that can be used here.
            ModuleNotFoundError: the package `tokenizers` or `transformers` is missing.
        """
        path = Path(place).expanduser()
        if (path / "tokenizer.json").is_file():
            path = path / "tokenizer.json"
        if path.is_file() and path.suffix.lower() == ".json":
            try:
                text = path.read_text(encoding="utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(f"tokenizer: {path} is damaged: it is not UTF-8") from error
        elif path.exists() or _HUB.fullmatch(os.fspath(place)):
            text = _by_transformers(place, path)
        else:
            raise FileNotFoundError(
                f"tokenizer: there is no {place}; it is characters, bpe, a tokenizer.json, a "
                "folder, a .gguf file, or OWNER/NAME of Hugging Face"
            )
        try:
            made = cls(model=text, normalise=normalise)
            _ = made._made
        except ModuleNotFoundError:
            raise
        except Exception as error:  # the package raises nothing more precise
            raise ValueError(
                f"tokenizer: {path} holds none that `tokenizers` reads: {_line(error)}"
            ) from error
        return made

    # Using

    @cached_property
    def size(self) -> int:
        """Number of tokens V; the mask symbol of an absorbing source is V."""
        if self.alphabet:
            return len(self.alphabet)
        return 1 + max(self._made.get_vocab(with_added_tokens=True).values())

    def encode(self, text: str) -> np.ndarray:
        """int64, (n,): the tokens of a text, without those that open or close one.

        Raises:
            TypeError: it is no str.
            ValueError: it holds a character that the alphabet lacks.
        """
        if not isinstance(text, str):
            raise TypeError(f"text must be a str, got {type(text).__name__}")
        return self.encode_normal([normal(text, self.normalise)])

    def encode_normal(self, texts: Sequence[str]) -> np.ndarray:
        """int64, (n,): the tokens of texts that are normal already, one after the other."""
        if self.model:
            found = self._made.encode_batch_fast(list(texts), add_special_tokens=False)
            return np.fromiter((token for one in found for token in one.ids), dtype=np.int64)
        points = code_points("".join(texts))
        beyond = np.minimum(points, len(self._table) - 1)
        tokens = self._table[beyond].astype(np.int64)
        odd = np.flatnonzero(tokens < 0)
        if len(odd):
            character = chr(points[odd[0]])
            raise ValueError(
                f"the text holds {character!r} (U+{ord(character):04X}, character {odd[0] + 1}), "
                f"which is none of the {self.size} characters that the tokenizer knows"
            )
        return tokens

    def decode(self, tokens: Tensor | np.ndarray | Sequence[int]) -> str:
        """The text of tokens (n,); ids of V or more, as the mask symbol, become `MASK`.

        Raises:
            TypeError: ``tokens`` are no whole numbers.
            ValueError: an id is negative, or ``tokens`` has another number of dimensions.
        """
        given: Any = tokens
        ids = np.asarray(given.cpu() if isinstance(tokens, Tensor) else given)
        if ids.ndim != 1:
            raise ValueError(f"tokens must be ids (n,), none negative, got shape {ids.shape}")
        if ids.size and ids.dtype.kind not in "iu":
            raise TypeError(f"tokens must be whole numbers, got {ids.dtype}")
        ids = ids.astype(np.int64)
        if ids.size and ids.min() < 0:
            raise ValueError(f"tokens must be ids (n,), none negative, got {ids.min()}")
        if self.alphabet:
            points = code_points(self.alphabet + MASK)
            return points[np.minimum(ids, self.size)].tobytes().decode("utf-32-le")
        parts = []
        ends = [-1, *np.flatnonzero(ids >= self.size).tolist(), len(ids)]
        for before, after in zip(ends, ends[1:], strict=False):
            part = ids[before + 1 : after].tolist()
            parts.append(self._made.decode(part, skip_special_tokens=False) if part else "")
        return MASK.join(parts)

    # Files

    @property
    def digest(self) -> str:
        """Tells tokenizers apart."""
        text = json.dumps(asdict(self), sort_keys=True)
        return blake2b(text.encode(), digest_size=8).hexdigest()

    @cached_property
    def _made(self) -> Any:
        made = extra("tokenizers", "language", _WHAT).Tokenizer.from_str(self.model)
        made.no_padding()
        made.no_truncation()
        return made

    @cached_property
    def _table(self) -> np.ndarray:
        """The token of every code point, -1 for those that are none; the last entry is -1."""
        points = code_points(self.alphabet)
        table = np.full(int(points.max()) + 2, -1, dtype=np.int32)
        table[points] = np.arange(len(points))
        return table


def _check_json(model: str) -> None:
    try:
        whole = isinstance(json.loads(model), dict)
    except ValueError as error:
        raise ValueError(f"model is no JSON of a tokenizer: {error}") from error
    if not whole:
        raise ValueError(f"model is no JSON of a tokenizer, got {model[:40]!r}")


def code_points(text: str) -> np.ndarray:
    """uint32, (n,): the characters' numbers."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")


def _by_transformers(place: str | os.PathLike[str], path: Path) -> str:
    """The JSON of a fast tokenizer that `transformers` makes of other files."""
    auto = extra("transformers", "language", "tokenizers of this kind").AutoTokenizer
    try:
        if path.is_file() and path.suffix.lower() == ".gguf":
            loaded = auto.from_pretrained(str(path.parent), gguf_file=path.name)
        elif path.is_file():
            raise ValueError("it is neither .json nor .gguf")
        elif path.is_dir():
            if not any(any(path.glob(name)) for name in _FILES):
                raise ValueError("the folder holds no file of a tokenizer")
            loaded = auto.from_pretrained(str(path), local_files_only=True)
        else:
            loaded = auto.from_pretrained(os.fspath(place))
        return str(loaded.backend_tokenizer.to_str())
    except Exception as error:  # of many kinds: the files of others, read by a library
        absent = isinstance(error, OSError) and not path.exists()
        raise (FileNotFoundError if absent else ValueError)(
            f"tokenizer: none can be made of {place}: {_line(error)}"
        ) from error


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
