from __future__ import annotations

import csv
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fluvial.data import DataSet, Format, Tokenizer, read, read_text
from fluvial.data import text as module
from fluvial.data.text import read_samples
from fluvial.data.tokenizer import LETTERS, MASK, normal
from fluvial.data.write import write_samples, write_texts

POEM = "Über allen Gipfeln ist Ruh,\nin allen Wipfeln spürest du\nkaum einen Hauch. 日本 😀\n"


@pytest.fixture
def poem(tmp_path: Path) -> Path:
    path = tmp_path / "poem.txt"
    path.write_text(POEM * 8, encoding="utf-8")
    return path


def whole(data: DataSet) -> str:
    return "".join(data.format.text(data.x))


# Tokenizers


def test_characters_are_the_alphabet_of_the_corpus(poem: Path) -> None:
    data = read_text(poem, length=10)
    known = data.format.tokenizer
    assert known is not None and known.alphabet == "".join(sorted(set(POEM)))
    assert known.size == len(set(POEM)) and data.x.dtype == torch.uint8
    assert whole(data) == (POEM * 8)[: data.x.numel()]
    assert len(data) == len(POEM * 8) // 10 and data.format.characters_per_token == 1
    assert known.decode(known.encode("Gipfel")) == "Gipfel"
    assert known.encode("").shape == (0,) and known.decode([]) == ""


def test_an_unknown_character_is_named() -> None:
    known = Tokenizer("abc")
    with pytest.raises(ValueError, match=r"holds 'x' \(U\+0078, character 3\), .* 3 characters"):
        known.encode("abxc")
    with pytest.raises(ValueError, match=r"holds '😀' \(U\+1F600, character 1\)"):
        known.encode("😀")
    with pytest.raises(ValueError, match=r"texts: the text holds 'd'"):
        read_text(["abcd" * 20], tokenizer=known, length=4)


def test_byte_pairs_hold_every_text_and_are_learned_alike(poem: Path) -> None:
    texts = [POEM * 8]
    known = Tokenizer.bpe(texts, 300)
    assert known.size == 300 and known == Tokenizer.bpe(texts, 300)
    for text in (POEM, "never seen: ¿qué? 👍🏽\t\r\n", ""):
        assert known.decode(known.encode(text)) == text
    assert len(known.encode(POEM)) < len(POEM.encode())
    # ids 0 .. 255 are bytes, and so the first pairs are the most frequent ones: "ll" or "en"
    assert any(known.decode([k]).strip() in ("en", "ll", "fe", "in") for k in range(256, 260))
    data = read_text(poem, tokenizer="bpe", vocabulary=300, length=7)
    assert data.format.tokenizer == known and data.x.dtype == torch.int16
    # not window by window: one may end within a character
    assert (POEM * 8).startswith(known.decode(data.x.flatten()).rstrip("\ufffd"))
    ratio = len(POEM * 8) / len(known.encode(POEM * 8))
    assert data.format.characters_per_token == pytest.approx(ratio)


def test_a_text_with_few_pairs_gives_fewer_tokens() -> None:
    data = read_text(["abab " * 40], tokenizer="bpe", length=4)
    assert data.format.tokenizer is not None and data.format.tokenizer.size < 300
    assert any("pairs for" in note and "not for 1024" in note for note in data.notes)


@pytest.mark.parametrize("folder", [False, True])
def test_tokenizers_of_hugging_face(folder: bool, tmp_path: Path) -> None:
    made = Tokenizer.bpe([POEM * 8], 280)
    place = tmp_path / "own"
    place.mkdir()
    (place / "tokenizer.json").write_text(made.model, encoding="utf-8")
    data = read_text([POEM * 8], tokenizer=place if folder else place / "tokenizer.json", length=6)
    assert data.format.tokenizer == made
    assert torch.equal(data.x, read_text([POEM * 8], tokenizer=made, length=6).x)


def test_a_tokenizer_that_pads_and_adds_marks_does_neither(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {"[CLS]": 0, "[PAD]": 1, "a": 2, "b": 3, "[UNK]": 9}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.enable_padding(length=8, pad_id=1, pad_token="[PAD]")
    made.enable_truncation(2)
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A", special_tokens=[("[CLS]", 0)]
    )
    made.save(str(tmp_path / "tokenizer.json"))
    known = Tokenizer.load(tmp_path)
    assert known.encode("a b a b").tolist() == [2, 3, 2, 3]
    assert known.size == 10  # ids may have holes


def test_places_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no bpee; it is characters, bpe, a token"):
        read_text(["abc" * 50], tokenizer="bpee")
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(ValueError, match="holds none that `tokenizers` reads"):
        Tokenizer.load(tmp_path)
    (tmp_path / "model.bin").write_bytes(b"1")
    with pytest.raises(ValueError, match=r"none can be made of .*: it is neither .json nor .gguf"):
        Tokenizer.load(tmp_path / "model.bin")
    with pytest.raises(ValueError, match="one of them and not both"):
        Tokenizer()
    with pytest.raises(ValueError, match="'a' occurs twice"):
        Tokenizer("aba")
    with pytest.raises(ValueError, match="vocabulary must exceed 256, .* got 256"):
        Tokenizer.bpe(["abc"], 256)


def test_the_27_symbols_of_text8() -> None:
    assert normal("Don't—STOP  café №7\n", "letters") == "don t stop cafe no seven "
    assert normal("10", "letters") == " one zero "
    assert normal("ÉTÉ 10", "lower") == "été 10"
    data = read_text(["It's 1 o'clock.\n" * 20], normalise="letters", length=5)
    assert data.format.tokenizer == Tokenizer(LETTERS, normalise="letters")
    assert whole(data).startswith("it s one o clock it s one")
    assert not re.search("  ", whole(data))
    # what is normalised once is not changed by doing it again: prompts go through it too
    for how in ("letters", "lower"):
        assert normal(normal(POEM, how), how) == normal(POEM, how)


def test_the_mask_symbol_is_shown() -> None:
    known = Tokenizer("ab")
    assert known.decode([0, 2, 1, 5]) == f"a{MASK}b{MASK}"
    bytes_ = Tokenizer.bpe(["abab" * 9], 257)
    ids = [*bytes_.encode("ab"), bytes_.size, *bytes_.encode("b")]
    assert bytes_.decode(ids) == f"ab{MASK}b"
    with pytest.raises(ValueError, match="none negative"):
        known.decode([-1])
    with pytest.raises(ValueError, match=r"tokens must be ids \(n,\)"):
        known.decode(torch.zeros(2, 2, dtype=torch.int64))


# Reading


def test_windows_follow_one_another() -> None:
    text = "".join(chr(97 + k % 26) for k in range(103))
    data = read_text([text], length=10)
    assert data.x.shape == (10, 10) and whole(data) == text[:100]
    assert data.notes == ("the last 3 tokens, less than a window, are left out",)
    assert (data.licence, data.name) == ("unknown", "texts")


@pytest.mark.parametrize("block", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("how", ["none", "letters"])
def test_blocks_of_any_size_give_the_same_tokens(
    block: int, how: str, poem: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a block ends within the bytes of a character, or a line break of two."""
    poem.write_bytes(b"\xef\xbb\xbf" + (POEM * 3).replace("\n", "\r\n").encode())
    expected = normal(POEM * 3, how)
    monkeypatch.setattr(module, "BLOCK", block)
    data = read_text(poem, length=1, normalise=how)
    assert whole(data) == expected


def test_pieces_are_cut_before_white_space(monkeypatch: pytest.MonkeyPatch, poem: Path) -> None:
    plain = read_text(poem, tokenizer="bpe", vocabulary=300, length=1)
    monkeypatch.setattr(module, "PIECE", 16)
    pieces = list(module._pieces([POEM, "x" * 100, " end"]))
    assert "".join(pieces) == POEM + "x" * 100 + " end"
    assert all(len(piece) <= 32 for piece in pieces)
    assert all(piece[0] in " \nx" for piece in pieces[1:])
    assert torch.equal(read_text(poem, tokenizer="bpe", vocabulary=300, length=1).x, plain.x)


def test_a_folder(tmp_path: Path) -> None:
    place = tmp_path / "books"
    (place / "b").mkdir(parents=True)
    (place / ".git").mkdir()
    (place / "a.txt").write_text("first")
    (place / "b" / "c.TXT").write_text("second\n")
    (place / "b" / "d.txt").write_text("")
    (place / "z.txt").write_text("third")
    (place / ".git" / "x.txt").write_text("hidden")
    (place / "picture.png").write_bytes(b"\0")
    data = read_text(place, length=1)
    assert whole(data) == "first\nsecond\nthird" and data.name == "books"
    files = [place / "z.txt", place / "a.txt"]
    assert whole(read_text(files, length=1)) == "third\nfirst"
    assert whole(read_text([place / "a.txt", "a.txt"], length=1)) == "first\na.txt"
    letters = read_text([place / "a.txt", "a.txt"], length=1, normalise="letters")
    assert whole(letters) == "first a txt"


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".tsv", ".parquet"])
def test_columns_of_texts(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"t{suffix}"
    rows = [{"text": t, "n": k} for k, t in enumerate(["one, two", "NA", 'three "3"\n', "vier ü"])]
    if suffix == ".jsonl":
        lines = [json.dumps(row, ensure_ascii=False) for row in rows]
        path.write_text("\n".join(lines[:2]) + "\n\n" + "\n".join(lines[2:]), encoding="utf-8")
    elif suffix == ".parquet":
        pyarrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.Table.from_pylist([*rows, {"text": None, "n": 7}]), path)
    else:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, ["n", "text"], delimiter="\t" if "t" in suffix else ",")
            writer.writeheader()
            writer.writerows(rows)
    assert whole(read_text(path, length=1)) == 'one, two\nNA\nthree "3"\nvier ü\n'
    with pytest.raises(ValueError, match=r"^column: .*'txt'.* did you mean text\?"):
        read_text(path, column="txt")


def test_columns_that_hold_no_texts(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "a"}\n{"text": 3}\n')
    with pytest.raises(ValueError, match=r"column: line 2 of .* has no text in 'text'"):
        read_text(path)
    path.write_text('{"text": "a"}\nhello\n')
    with pytest.raises(ValueError, match="line 2 is not JSON"):
        read_text(path)
    (tmp_path / "x.csv").write_bytes("text\ngrün\n".encode("latin-1"))
    with pytest.raises(ValueError, match='is not utf-8; say .* encoding="latin-1"'):
        read_text(tmp_path / "x.csv")


def test_encodings(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_bytes(b"abc\r\ngr\xfcn" + b"d" * 100)
    with pytest.raises(
        ValueError, match=r'x.txt: the byte at offset 7 is not utf-8; .* encoding="latin-1"'
    ):
        read_text(path)
    assert whole(read_text(path, encoding="latin-1", length=1)).startswith("abc\ngründ")
    path.write_bytes(b"abc" + "ü".encode()[:1])  # ends within a character
    with pytest.raises(ValueError, match="the byte at offset 3 is not utf-8"):
        read_text(path)
    path.write_text("grün " * 20, encoding="utf-16")
    with pytest.raises(ValueError, match=r'offset 0 is not utf-8.*\(try encoding="utf-16"\)'):
        read_text(path)
    assert whole(read_text(path, encoding="utf-16", length=5)) == "grün " * 20
    with pytest.raises(ValueError, match="encoding: Python knows none called 'utf8000'"):
        read_text(path, encoding="utf8000")


def test_the_offset_is_that_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK", 5)
    path = tmp_path / "x.txt"
    path.write_bytes(b"\xef\xbb\xbf" + "üüü".encode() + b"a" * 9 + b"\xe2\x82" + b"b")
    with pytest.raises(ValueError, match="the byte at offset 18 is"):
        read_text(path)


def test_sources_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere.txt is not there"):
        read_text(tmp_path / "nowhere.txt")
    (tmp_path / "empty.txt").write_text("")
    for tokenizer in ("characters", "bpe"):
        with pytest.raises(ValueError, match="empty.txt is empty: it holds no text"):
            read_text(tmp_path / "empty.txt", tokenizer=tokenizer)
    (tmp_path / "short.txt").write_text("abc")
    with pytest.raises(ValueError, match=r"^length: short.txt holds 3 tokens, .* length=64; give"):
        read_text(tmp_path / "short.txt")
    (tmp_path / "binary.txt").write_bytes(b"abc\0def")
    with pytest.raises(ValueError, match="binary.txt holds binary data, not text"):
        read_text(tmp_path / "binary.txt")
    (tmp_path / "book.pdf").write_bytes(b"%PDF")
    with pytest.raises(ValueError, match="book.pdf is not a file of text: save it as plain text"):
        read_text(tmp_path / "book.pdf")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match="holds no .txt file at all"):
        read_text(tmp_path / "folder")
    (tmp_path / "folder" / "a.md").write_text("a")
    with pytest.raises(ValueError, match="holds no .txt file: it holds files .md"):
        read_text(tmp_path / "folder")
    with pytest.raises(ValueError, match="an empty list"):
        read_text([])
    with pytest.raises(ValueError, match="text is read by read_text"):
        read(tmp_path / "short.txt")


def test_arguments_out_of_range() -> None:
    for changes, message in (
        ({"length": 0}, "length must be at least 1, got 0"),
        ({"vocabulary": 300}, "vocabulary is that of tokenizer='bpe', got 300"),
        ({"normalise": "upper"}, "normalise must be one of none, lower, letters, got 'upper'"),
        ({"tokenizer": Tokenizer("ab"), "normalise": "lower"}, "normalise is 'none' of the token"),
    ):
        with pytest.raises(ValueError, match=message):
            read_text(["abc" * 99], **changes)


def test_a_large_corpus_is_read_once_and_mapped(
    poem: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = read_text(poem, length=8)
    monkeypatch.setattr(module, "CACHED", 100)
    first = read_text(poem, length=8, progress=False)
    assert torch.equal(first.x, plain.x) and first.format == plain.format
    assert len(list(cache.glob("*/x.npy"))) == 1
    monkeypatch.setattr(module, "_plain", lambda *args: pytest.fail("it is read again"))
    again = read_text(poem, length=16, progress=False)  # of the same tokens
    assert torch.equal(again.x.flatten(), plain.x.flatten()[: again.x.numel()])
    assert again.format.characters_per_token == 1
    monkeypatch.undo()
    monkeypatch.setenv("FLUVIAL_CACHE", str(cache))
    poem.write_text("another text " * 50)
    monkeypatch.setattr(module, "CACHED", 100)
    assert whole(read_text(poem, length=13, progress=False)) == "another text " * 50


# Parts


@pytest.mark.parametrize("rows", [5, 40, 401])
@pytest.mark.parametrize("seed", [0, 3])
def test_parts_are_stretches_of_the_text(rows: int, seed: int) -> None:
    text = "".join(chr(0x4E00 + k) for k in range(4 * rows))  # no two windows alike
    data = read_text([text], length=4)
    parts = data.split(train=0.6, validation=0.2, test=0.2, seed=seed)
    windows = {name: [tuple(row) for row in part.x.tolist()] for name, part in parts.items()}
    every = [tuple(row) for row in data.x.tolist()]
    assert sorted(sum(windows.values(), [])) == every  # all of them, each once
    for name, share in (("train", 0.6), ("validation", 0.2), ("test", 0.2)):
        place = [every.index(row) for row in windows[name]]
        assert place == sorted(place) and abs(len(place) - share * rows) <= 8
        runs = 1 + sum(b - a != 1 for a, b in zip(place, place[1:], strict=False))
        assert runs <= 9  # 8 stretches, of which the end of the text may cut one
    again = data.split(train=0.6, validation=0.2, test=0.2, seed=seed)
    assert torch.equal(again["test"].x, parts["test"].x)
    other = data.split(train=0.6, validation=0.2, test=0.2, seed=seed + 1)
    assert rows == 5 or not torch.equal(other["test"].x, parts["test"].x)


def test_equal_windows_are_all_kept_and_held_out_rows_are_few() -> None:
    data = read_text(["ab" * 30_000], length=4)
    train, held = data.hold_out(0.1)
    assert held is not None and len(held) == 1_000 and len(train) == 14_000
    assert data.hold_out(0)[1] is None
    with pytest.raises(
        ValueError, match="leaves no window of texts, which has 1 to share out; hold"
    ):
        read_text(["abcde"], length=4).hold_out(0.1)


def test_large_parts_are_files(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    data = read_text(["".join(chr(97 + k % 25) for k in range(4_000))], length=4)
    plain = data.split(test=None)
    monkeypatch.setattr("fluvial.data.dataset.SMALL", 64)
    large = data.split(test=None)
    assert len(list(cache.glob("*/x.npy"))) == 2
    for name, part in plain.items():
        assert torch.equal(part.x, large[name].x)


# Format and files


def test_a_format_and_back() -> None:
    data = read_text([POEM * 8], tokenizer="bpe", vocabulary=300, length=7)
    form = data.format
    content = json.loads(json.dumps(form.as_json()))
    assert Format.from_json(content) == form
    x = form.encode(data.x)
    assert x.dtype == torch.int64 and torch.equal(x, data.x.long())
    assert torch.equal(form.decode(x), x)
    summary = form.summary()
    assert len(json.dumps(summary)) < 600 and summary["tokenizer"]["size"] == 300
    other = replace(form, tokenizer=Tokenizer.bpe([POEM[::-1] * 8], 300))
    assert other.summary() != summary
    assert "tokenizer" not in Format("arrays", (3,)).as_json()
    assert Format("arrays", (3,)).summary() == Format("arrays", (3,)).as_json()


def test_formats_that_are_none() -> None:
    known = Tokenizer("ab")
    form = Format("text", (4,), tokenizer=known)
    with pytest.raises(ValueError, match="tokenizer must be a Tokenizer for text alone, got None"):
        Format("text", (4,))
    with pytest.raises(ValueError, match="for text alone, got Tokenizer"):
        Format("arrays", (4,), tokenizer=known)
    with pytest.raises(ValueError, match=r"shape of text must be \(tokens,\), got \(2, 2\)"):
        Format("text", (2, 2), tokenizer=known)
    with pytest.raises(ValueError, match="scale of text is 1.0, got 2.0"):
        Format("text", (4,), scale=(2.0,), tokenizer=known)
    with pytest.raises(ValueError, match="characters_per_token must be positive, got 0"):
        Format("text", (4,), tokenizer=known, characters_per_token=0)
    with pytest.raises(TypeError, match="x must be integer tokens, got torch.float32"):
        form.encode(torch.zeros(2, 4))
    with pytest.raises(ValueError, match=r"x must have shape \(batch, 4\), got \(2, 5\)"):
        form.encode(torch.zeros(2, 5, dtype=torch.int64))
    with pytest.raises(ValueError, match="text: these data are arrays, not text"):
        Format("arrays", (4,)).text(torch.zeros(2, 4))


def test_texts_are_written(tmp_path: Path) -> None:
    known = Tokenizer("\n- \\ab")
    form = Format("text", (6,), tokenizer=known, label_names=("x", "y"))
    texts = ["ab\nab ", "---a\nb", "\\a\n---", "- --ab"]
    x = torch.from_numpy(np.stack([known.encode(text) for text in texts]))
    write_samples(tmp_path / "s.txt", x, None, form)
    content = (tmp_path / "s.txt").read_text(encoding="utf-8")
    assert content == (
        "--- 1 ---\nab\nab \n\n--- 2 ---\n\\---a\nb\n\n--- 3 ---\n\\\\a\n\\---\n\n"
        "--- 4 ---\n- --ab\n\n"
    )
    blocks = re.split(r"^--- \d+ ---\n", content, flags=re.MULTILINE)[1:]
    back = [re.sub(r"^\\", "", block[:-2], flags=re.MULTILINE) for block in blocks]
    assert back == texts
    write_samples(tmp_path / "s.jsonl", x, torch.tensor([0, 1, 0, 1]), form)
    rows = [json.loads(line) for line in (tmp_path / "s.jsonl").read_text().splitlines()]
    assert rows == [{"text": t, "label": "xy"[k % 2]} for k, t in enumerate(texts)]
    write_samples(tmp_path / "s.npy", x, None, form)
    assert np.array_equal(np.load(tmp_path / "s.npy"), x.numpy())
    before = (tmp_path / "s.txt").read_bytes()
    with pytest.raises(FileExistsError, match="s.txt exists"):
        write_samples(tmp_path / "s.txt", x[:1], None, form)
    assert (tmp_path / "s.txt").read_bytes() == before
    write_samples(tmp_path / "s.txt", x[:1], None, form, force=True)
    assert (tmp_path / "s.txt").read_text() == "--- 1 ---\nab\nab \n\n"
    assert sorted(p.suffix for p in tmp_path.iterdir() if p.is_file()) == [".jsonl", ".npy", ".txt"]
    with pytest.raises(ValueError, match="texts are written as .txt, .jsonl, .npz or .npy"):
        write_samples(tmp_path / "s.png", x, None, form)


# What is no text, and no place


def test_a_source_that_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("some text")
    for source, error, message in (
        ("", ValueError, "the place of the text is empty"),
        (
            "Once upon a time " * 30,
            ValueError,
            r"'Once upon.*\.\.\.; a text itself goes into a list",
        ),
        ("One line\nand another", ValueError, "a text itself goes into a list"),
        (b"a.txt", TypeError, "source must be a place, or a list of texts, got bytes"),
        (None, TypeError, "got NoneType"),
        ([3], TypeError, r"source\[0\] must be a text or a Path, got int"),
        (["a.txt"], ValueError, r"source\[0\] is the text 'a.txt', and a file has that name"),
        (["abc\ud800def"], ValueError, r"holds U\+D800 \(character 4\), half of a surrogate"),
    ):
        with pytest.raises(error, match=message):
            read_text(source, length=2)
    assert len(read_text(["b.txt", "two"], length=2)) == 4  # no such file: a text
    (tmp_path / "x.jsonl").write_text('{"text": "so \\ud83d"}')
    with pytest.raises(ValueError, match=r"x.jsonl: a text holds U\+D83D \(character 4\)"):
        read_text("x.jsonl", length=2)


def test_arguments_of_another_type() -> None:
    for length in ("4", 2.5, None):
        with pytest.raises(TypeError, match="length must be a whole number, got"):
            read_text(["abcdef"], length=length)
    with pytest.raises(TypeError, match="tokenizer must be .*, got the class Tokenizer"):
        read_text(["abcdef"], length=2, tokenizer=Tokenizer)
    with pytest.raises(TypeError, match="alphabet must be a str, got int"):
        Tokenizer(3)
    for model in ("{", "[1]"):
        with pytest.raises(ValueError, match="model is no JSON of a tokenizer"):
            Tokenizer(model=model)
    with pytest.raises(TypeError, match="texts must be several, got one str"):
        Tokenizer.bpe("one text", 300)
    abc = Tokenizer("abc")
    with pytest.raises(TypeError, match="text must be a str, got bytes"):
        abc.encode(b"abc")
    for ids in ([0.5, 1.0], ["a"]):
        with pytest.raises(TypeError, match="tokens must be whole numbers, got"):
            abc.decode(ids)
    with pytest.raises(ValueError, match=r"tokens must be ids \(n,\), none negative, got -1"):
        abc.decode([0, -1])
    assert abc.decode([]) == "" and abc.decode([2, 0]) == "ca"


def test_a_tokenizer_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no no/tokenizer.json"):
        Tokenizer.load("no/tokenizer.json")  # and the hub is not asked
    path = tmp_path / "tokenizer.json"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="tokenizer: .* is damaged: it is not UTF-8"):
        Tokenizer.load(path)
    path.unlink()
    with pytest.raises(ValueError, match="the folder holds no file of a tokenizer"):
        Tokenizer.load(tmp_path)


def test_binary_data_are_named(tmp_path: Path) -> None:
    path = tmp_path / "program"
    path.write_bytes(b"\x7fELF\x00\x00\xff\xff" * 9)
    with pytest.raises(ValueError, match="program holds binary data, not utf-8 text: NUL bytes"):
        read_text(path, length=2)


def test_samples_are_read_as_they_were_written(tmp_path: Path) -> None:
    texts = ["plain", "--- 2 ---\nlike a head", "\\ a backslash\n", "", "two\n\nparts\n\n"]
    write_texts(tmp_path / "s.txt", texts, "a title")
    assert read_samples(tmp_path / "s.txt") == texts
    (tmp_path / "s.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    assert read_samples(tmp_path / "s.jsonl") == texts
    (tmp_path / "other.txt").write_text("--- 1 ---\nthen\n--- 3 ---\n")
    with pytest.raises(ValueError, match=r"other.txt holds no samples, each below a line --- 1"):
        read_samples(tmp_path / "other.txt")
    with pytest.raises(FileNotFoundError, match="none.txt is not there"):
        read_samples(tmp_path / "none.txt")
