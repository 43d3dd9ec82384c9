"""Text: a corpus from files or texts, as windows of tokens."""

from __future__ import annotations

import codecs
import io
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from tqdm import tqdm

from fluvial.core.arguments import kind_of, whole_number
from fluvial.data.dataset import DataSet
from fluvial.data.format import Format, choices
from fluvial.data.packages import extra
from fluvial.data.store import Cache, Rows, as_tensor, cache_folder, digest, keep
from fluvial.data.tokenizer import LETTERS, Normalise, Tokenizer, code_points, normal

Source: TypeAlias = str | os.PathLike[str]

LENGTH = 64
"""Tokens of a window."""
VOCABULARY = 1_024
"""Tokens of byte-pair encoding that is learned from the text."""
LEARNED = 2**26
"""Bytes of text that byte-pair encoding is learned from, at most."""
CACHED = 2**25
"""Bytes of text beyond which its tokens are kept in the cache, and progress is shown."""
BLOCK = 2**22
"""Bytes that are read at a time."""
PIECE = 2**16
"""Characters that a tokenizer of `tokenizers` gets at a time, about."""
SUFFIX = ".txt"
"""Of the files of a folder."""
LONGEST = 255
"""Bytes of the name of a file, at most: what is longer is a text."""

_TABLES = (".csv", ".tsv", ".parquet", ".pq")
_HINTS = {
    **dict.fromkeys((".zip", ".tar", ".gz", ".tgz", ".7z", ".rar", ".xz"), "unpack it"),
    **dict.fromkeys((".pdf", ".doc", ".docx", ".odt", ".rtf", ".epub"), "save it as plain text"),
}
_SAMPLED_FILES, _SAMPLED_BYTES = 8, 2**16


@dataclass(frozen=True)
class _Corpus:
    """Documents and how they are read; ``documents`` are files (paths) and texts (str)."""

    name: str
    documents: tuple[Path | str, ...]
    encoding: str
    column: str
    progress: bool

    @property
    def size(self) -> int:
        """Bytes, about."""
        return sum(
            len(one) if isinstance(one, str) else one.stat().st_size for one in self.documents
        )

    def blocks(self, what: str, how: Normalise) -> Iterator[str]:
        """The text, normal, in blocks; a line break ends a document that does not end with one."""
        hide = not self.progress or self.size < CACHED
        bar = tqdm(total=self.size, desc=what, unit="B", unit_scale=True, disable=hide)
        ended = True  # is what came last a line break?
        spaced = False  # or a space?
        with bar:
            for document in self.documents:
                if not ended:
                    yield " " if how == "letters" else "\n"
                    ended, spaced = True, True
                for block in self._read(document, bar):
                    if not block:
                        continue
                    ended = block.endswith("\n")
                    text = normal(block, how)
                    if how == "letters":  # the runs that it makes one space of go over blocks
                        text = text[1:] if spaced and text.startswith(" ") else text
                        spaced = text.endswith(" ") or (spaced and not text)
                        ended = ended or spaced
                    if text:
                        yield text

    def _read(self, document: Path | str, bar: Any) -> Iterator[str]:
        if isinstance(document, str):
            _check_whole(document, self.name)
            for start in range(0, len(document), BLOCK):
                part = document[start : start + BLOCK]
                yield part
                bar.update(len(part))
            return
        suffix = document.suffix.lower()
        if suffix in _TABLES:
            rows = _column(document, self.column, self.encoding)
        elif suffix == ".jsonl":
            rows = _json_lines(document, self.column, self.encoding)
        else:
            yield from _plain(document, self.encoding, bar)
            return
        for text in rows:
            _check_whole(text, document)
            yield text if text.endswith("\n") else text + "\n"
        bar.update(document.stat().st_size)

    def signature(self) -> Iterator[bytes]:
        """What tells these documents from others."""
        files = [one for one in self.documents if isinstance(one, Path)]
        for one in self.documents:
            if isinstance(one, str):
                yield one.encode("utf-8", "surrogatepass")
                continue
            status = one.stat()
            yield os.fsencode(os.path.abspath(one))
            yield f"{status.st_size} {status.st_mtime_ns}".encode()
        for path in files[:: max(1, len(files) // _SAMPLED_FILES)]:
            with path.open("rb") as content:
                yield content.read(_SAMPLED_BYTES)


def read_text(
    source: Source | Sequence[Source],
    *,
    tokenizer: Source | Tokenizer = "characters",
    vocabulary: int | None = None,
    length: int = LENGTH,
    normalise: Normalise | None = None,
    encoding: str = "utf-8",
    column: str = "text",
    cache: Cache = "default",
    progress: bool = True,
) -> DataSet:
    """A corpus as windows of ``length`` tokens, one after the other, without overlap.

    Documents follow one another, each on a line of its own; the tokens after the last whole window
    are left out. Of a corpus of 32 MB or more the tokens are kept in the cache and memory-mapped:
    it is read in blocks, and never held in memory.

    Args:
        source: a file of text; a folder, of which all .txt files are read, in the order of their
            paths; a .jsonl, .csv, .tsv or .parquet file with a column of texts; or a list, in which
            a ``Path`` is a file and a ``str`` is a text itself (the name of a file is refused).
        tokenizer: "characters", those of the corpus; "bpe", byte-pair encoding learned from it (the
            package `tokenizers`); a place that `Tokenizer.load` reads; or a `Tokenizer`.
        vocabulary: tokens of "bpe", 1,024 by default.
        length: tokens of a window.
        normalise: "lower" for lower case, "letters" for the 27 symbols of Text8, "none" (default)
            for the text as it is. A `Tokenizer` has its own.
        encoding: of the files; a byte-order mark is passed over. Line breaks become "\\n".
        column: of texts, in .jsonl files and tables.
        cache: folder for the tokens of a large corpus, "default" as in `fluvial.data.read`; None to
            hold them in memory.
        progress: show progress bars for a corpus of 32 MB or more.

    Returns:
        The windows, (rows, length), of the smallest of uint8, int16 and int32 that holds the
        tokens: ``format.encode`` makes int64 of them, ``format.text`` texts. `DataSet.split` parts
        them into stretches of text.

    Raises:
        FileNotFoundError: there is no such file, folder or tokenizer.
        TypeError: a source or a tokenizer that is neither a place nor what else is taken, a number
            that is not whole.
        ValueError: a file holds bytes that are none of its encoding (file and offset are named),
            NUL, or half of a surrogate pair; there is no text, or less than a window; a `Tokenizer`
            meets a character that it does not know; there is no such column; an argument is out of
            its range.
        ModuleNotFoundError: the package `tokenizers`, `transformers`, `pandas` or `pyarrow` is
            missing where it is needed.
    """
    length = whole_number("length", length)
    if length < 1:
        raise ValueError(f"length must be at least 1, got {length}")
    if not isinstance(tokenizer, Tokenizer | str | os.PathLike):
        raise TypeError(
            f"tokenizer must be a Tokenizer, characters, bpe or a place, got {kind_of(tokenizer)}"
        )
    if vocabulary is not None and tokenizer != "bpe":
        raise ValueError(f"vocabulary is that of tokenizer='bpe', got {vocabulary}")
    if isinstance(tokenizer, Tokenizer) and normalise not in (None, tokenizer.normalise):
        raise ValueError(
            f"normalise is {tokenizer.normalise!r} of the tokenizer given, got {normalise!r}"
        )
    given: Tokenizer | str = tokenizer if isinstance(tokenizer, Tokenizer) else os.fspath(tokenizer)
    how: Normalise = normalise or "none"
    if isinstance(given, str):
        Tokenizer(alphabet=LETTERS, normalise=how)  # whose check speaks
        if given not in ("characters", "bpe"):
            given = Tokenizer.load(given, normalise=how)
    if isinstance(given, Tokenizer):
        how = given.normalise
    corpus = _corpus(source, encoding, column, progress)
    size = vocabulary or VOCABULARY
    chosen = {"tokenizer": given, "vocabulary": size, "normalise": how}
    folder = cache_folder(cache) if corpus.size > CACHED else None
    if folder is None:
        tokens, facts = _in_memory(_rows(corpus, given, size, how))
    else:
        if isinstance(given, Tokenizer):
            chosen["tokenizer"] = given.digest
        key = digest("text", chosen, encoding, column, corpus.signature())
        tokens, facts = keep(lambda: _rows(corpus, given, size, how), folder, key)
    known = Tokenizer(**facts["tokenizer"])
    rows = len(tokens) // length
    if not len(tokens):
        raise ValueError(f"{corpus.name} is empty: it holds no text")
    if not rows:
        raise ValueError(
            f"length: {corpus.name} holds {len(tokens)} tokens, fewer than one window of "
            f"length={length}; give more text, or a smaller length"
        )
    notes = []
    if left := len(tokens) - rows * length:
        noun = "token" + "s" * (left != 1)
        notes.append(f"the last {left} {noun}, less than a window, are left out")
    if tokenizer == "bpe" and known.size < size:
        notes.append(f"the text has pairs for {known.size} tokens, not for {size}")
    return DataSet(
        x=as_tensor(tokens[: rows * length].reshape(rows, length)),
        label=None,
        format=Format(
            "text",
            (length,),
            tokenizer=known,
            characters_per_token=facts["characters"] / len(tokens),
        ),
        name=corpus.name,
        licence="unknown",
        source="the user's files",
        notes=tuple(notes),
    )


def read_samples(path: Source) -> list[str]:
    """The texts that `fluvial sample` wrote: a .txt file of `write_texts`, or .jsonl.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no file of samples.
    """
    place = _path(path)
    if not place.is_file():
        raise FileNotFoundError(f"the file {place} is not there")
    if place.suffix.lower() == ".jsonl":
        return list(_json_lines(place, "text", "utf-8"))
    whole = "".join(_plain(place, "utf-8", _Silent()))
    heads = list(re.finditer(r"^--- (\d+) ---\n", whole, re.MULTILINE))
    if [int(head[1]) for head in heads] != list(range(1, len(heads) + 1)) or not heads:
        raise ValueError(
            f"{place} holds no samples, each below a line --- 1 ---, --- 2 --- and so on, as "
            "fluvial sample writes them; give those, or .jsonl"
        )
    ends = [head.start() for head in heads[1:]] + [len(whole)]
    bodies = (whole[head.end() : end] for head, end in zip(heads, ends, strict=True))
    return [re.sub(r"^\\", "", one.removesuffix("\n\n"), flags=re.MULTILINE) for one in bodies]


def _rows(corpus: _Corpus, given: Tokenizer | str, vocabulary: int, how: Normalise) -> Rows:
    """The tokens, in blocks; of ``facts`` "characters" is complete once the blocks are through."""
    if isinstance(given, Tokenizer):
        tokenizer = given
    elif given == "bpe":
        tokenizer = replace(
            Tokenizer.bpe(
                _spread(corpus, how),
                vocabulary,
                progress=corpus.progress and corpus.size >= CACHED,
            ),
            normalise=how,
        )
    else:
        tokenizer = Tokenizer(LETTERS if how == "letters" else _alphabet(corpus, how), "", how)
    dtype = np.dtype(
        np.uint8 if tokenizer.size <= 2**8 else np.int16 if tokenizer.size <= 2**15 else np.int32
    )
    facts: dict[str, Any] = {"tokenizer": asdict(tokenizer), "characters": 0}

    def blocks() -> Iterator[np.ndarray]:
        batch: list[str] = []
        for piece in _pieces(corpus.blocks("encoding", how)):
            facts["characters"] += len(piece)
            batch.append(piece)
            if len(batch) * PIECE >= BLOCK:
                yield _tokens(corpus, tokenizer, batch).astype(dtype)
                batch = []
        if batch:
            yield _tokens(corpus, tokenizer, batch).astype(dtype)

    # an upper bound, but for digits that are spelled out, by which the room on the disk is judged
    return Rows((corpus.size + 1024,), dtype, blocks(), facts)


def _tokens(corpus: _Corpus, tokenizer: Tokenizer, texts: Sequence[str]) -> np.ndarray:
    try:
        return tokenizer.encode_normal(texts)
    except ValueError as error:
        raise ValueError(f"{corpus.name}: {error}") from error


def _in_memory(rows: Rows) -> tuple[np.ndarray, dict[str, Any]]:
    parts = list(rows.blocks)
    return np.concatenate(parts or [np.empty(0, rows.dtype)]), rows.facts


def _alphabet(corpus: _Corpus, how: Normalise) -> str:
    """The characters of a corpus, in the order of their numbers."""
    seen = np.zeros(0x110000, dtype=bool)
    for block in corpus.blocks("characters", how):
        seen[code_points(block)] = True
    if not seen.any():
        raise ValueError(f"{corpus.name} is empty: it holds no text")
    return "".join(map(chr, np.flatnonzero(seen).tolist()))


def _spread(corpus: _Corpus, how: Normalise) -> Iterator[str]:
    """The text in pieces, or `LEARNED` bytes of it, spread evenly."""
    every = -(-corpus.size // LEARNED)
    for k, piece in enumerate(_pieces(corpus.blocks("vocabulary", how))):
        if not every or k % every == 0:
            yield piece


def _pieces(blocks: Iterable[str]) -> Iterator[str]:
    """The text in pieces of `PIECE` characters or more, cut before white space where there is some:
    a tokenizer of words finds there what it finds in the whole text."""
    rest = ""
    for block in blocks:
        rest += block
        start = 0
        while len(rest) - start >= 2 * PIECE:
            stop = start + 2 * PIECE
            cut = max(rest.rfind(" ", start + PIECE, stop), rest.rfind("\n", start + PIECE, stop))
            cut = stop if cut < 0 else cut
            yield rest[start:cut]
            start = cut
        rest = rest[start:]
    if rest:
        yield rest


def _corpus(
    source: Source | Sequence[Source], encoding: str, column: str, progress: bool
) -> _Corpus:
    """What there is to read; mistakes that can be seen without reading it."""
    try:
        codecs.lookup(encoding)
    except LookupError as error:
        raise ValueError(f"encoding: Python knows none called {encoding!r}") from error
    if isinstance(source, str | os.PathLike):
        path = _path(source)
        name = path.resolve().name or "text"
        files = _folder(path) if path.is_dir() else [path]
        documents: tuple[Path | str, ...] = tuple(files)
    else:
        given: Any = source
        if not isinstance(given, Iterable) or isinstance(given, bytes):
            raise TypeError(f"source must be a place, or a list of texts, got {kind_of(given)}")
        documents = tuple(_document(k, one) for k, one in enumerate(source))
        name = "texts" if any(isinstance(one, str) for one in documents) else "files"
        if not documents:
            raise ValueError("source is an empty list: it holds no text")
    for document in documents:
        if isinstance(document, str):
            continue
        if not document.is_file():
            what = "is a folder" if document.is_dir() else "is not there"
            raise FileNotFoundError(f"the file {document} {what}")
        hint = _HINTS.get(document.suffix.lower())
        if hint:
            raise ValueError(f"{document} is not a file of text: {hint}")
    return _Corpus(name, documents, encoding, column, progress)


def _path(source: Source) -> Path:
    """The place of a corpus; "" is none, though ``Path("")`` is the folder at hand."""
    text = os.fspath(source)
    if not text.strip():
        raise ValueError("the place of the text is empty; the folder at hand is '.'")
    if not _may_be_place(text):
        raise ValueError(
            f"a text is named by its place, got {text[:40]!r}...; a text itself goes into a list"
        )
    return Path(source).expanduser()


def _document(k: int, one: Source) -> Path | str:
    if not isinstance(one, str | os.PathLike):
        raise TypeError(f"source[{k}] must be a text or a Path, got {kind_of(one)}")
    if not isinstance(one, str):
        return Path(one)
    if _may_be_place(one) and Path(one).suffix and os.path.isfile(one):
        raise ValueError(
            f"source[{k}] is the text {one!r}, and a file has that name: give Path({one!r}) if it "
            "is meant"
        )
    return one


def _may_be_place(text: str) -> bool:
    """Whether a file can have this name."""
    names = text.encode("utf-8", "replace").split(os.fsencode(os.sep))
    return not {"\n", "\0"} & set(text) and max(map(len, names)) <= LONGEST


def _check_whole(text: str, place: Path | str) -> None:
    """Half of a surrogate pair, as JSON can hold, is no character, and no file can hold it."""
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{place}: a text holds U+{ord(text[error.start]):04X} (character {error.start + 1}), "
            "half of a surrogate pair and no character"
        ) from error


def _folder(folder: Path) -> list[Path]:
    files = sorted(
        path for path in folder.rglob("*") if path.is_file() and not _hidden(path, folder)
    )
    texts = [path for path in files if path.suffix.lower() == SUFFIX]
    if not texts:
        others = sorted({path.suffix or "without suffix" for path in files})[:5]
        held = f": it holds files {', '.join(others)}" if others else " at all"
        raise ValueError(f"the folder {folder} holds no {SUFFIX} file{held}")
    return texts


def _hidden(path: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(folder).parts)


def _plain(path: Path, encoding: str, bar: Any) -> Iterator[str]:
    """The text of a file in blocks, its line breaks all "\\n", without a byte-order mark."""
    decoder: Any = codecs.getincrementaldecoder(encoding)()
    lines = io.IncrementalNewlineDecoder(None, translate=True)
    first, offset = True, 0
    with path.open("rb") as file:
        while True:
            content = file.read(BLOCK)
            pending = len(decoder.getstate()[0]) if offset else 0
            try:
                text = decoder.decode(content, final=not content)
            except UnicodeDecodeError as error:
                if b"\0" in content and content[:2] not in _UTF16 and "utf-8" in encoding.lower():
                    raise ValueError(
                        f"{path} holds binary data, not {encoding} text: NUL bytes; if it is text, "
                        'say which encoding it has, encoding="utf-16-le" for instance'
                    ) from error
                place = offset - pending + error.start
                other = ' (try encoding="utf-16")' if content[:2] in _UTF16 and not offset else ""
                raise ValueError(
                    f"{path}: the byte at offset {place:,} is not {encoding}; say which encoding "
                    f'the text has, encoding="latin-1" for instance{other}'
                ) from error
            if "\0" in text:
                raise ValueError(f"{path} holds binary data, not text: a NUL character")
            if first:
                text, first = text.removeprefix("\N{BYTE ORDER MARK}"), not text
            text = lines.decode(text, final=not content)
            if text:
                yield text
            if not content:
                return
            offset += len(content)
            bar.update(len(content))


_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


class _Silent:
    """In place of a progress bar."""

    def update(self, amount: int) -> None:
        pass


def _json_lines(path: Path, column: str, encoding: str) -> Iterator[str]:
    rest, number = "", 0
    for block in chain(_plain(path, encoding, _Silent()), ["\n"]):
        lines = (rest + block).split("\n")
        rest = lines.pop()
        for line in lines:
            number += 1
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}: line {number} is not JSON: {error}") from error
            if not isinstance(row, dict) or not isinstance(row.get(column), str):
                there = choices(column, list(row)) if isinstance(row, dict) and row else ""
                raise ValueError(
                    f"column: line {number} of {path} has no text in {column!r}"
                    f"{there and f'; {there}'}"
                )
            yield row[column]


def _column(path: Path, column: str, encoding: str) -> Iterator[str]:
    """The texts in a column of a table; gaps are passed over."""
    parquet = path.suffix.lower() in (".parquet", ".pq")
    for texts in (_parquet if parquet else _csv)(path, column, encoding):
        for text in texts:
            if text is not None and not isinstance(text, str):
                raise ValueError(f"column: {column!r} of {path} holds {text!r}, which is no text")
            if text:
                yield text


def _parquet(path: Path, column: str, encoding: str) -> Iterator[list[Any]]:
    parquet = extra("pyarrow.parquet", "tabular", "Parquet files")
    try:
        file = parquet.ParquetFile(path)
    except (ValueError, OSError) as error:
        raise ValueError(f"{path} cannot be read as Parquet: {_line(error)}") from error
    _check_column(path, column, file.schema_arrow.names)
    for batch in file.iter_batches(columns=[column]):
        yield batch.column(0).to_pylist()


def _csv(path: Path, column: str, encoding: str) -> Iterator[list[Any]]:
    pandas = extra("pandas", "tabular", "tables")
    table = {
        "sep": "\t" if path.suffix.lower() == ".tsv" else ",",
        "encoding": "utf-8-sig" if encoding == "utf-8" else encoding,
        "dtype": str,
        "keep_default_na": False,
    }
    try:
        head = pandas.read_csv(path, nrows=0, **table)
        _check_column(path, column, [str(name) for name in head.columns])
        with pandas.read_csv(path, usecols=[column], chunksize=10_000, **table) as frames:
            for frame in frames:
                yield frame[column].tolist()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not {encoding}; say which encoding the text has, "
            'encoding="latin-1" for instance'
        ) from error
    except (pandas.errors.ParserError, pandas.errors.EmptyDataError) as error:
        raise ValueError(f"{path} cannot be read as a table: {_line(error)}") from error


def _check_column(path: Path, column: str, names: Sequence[str]) -> None:
    if column not in names:
        raise ValueError(f"column: {path} has none called {column!r}; {choices(column, names)}")


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
