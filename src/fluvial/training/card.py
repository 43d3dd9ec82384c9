"""Model cards: README.md in the folder of a run, with the metadata of the Hugging Face hub.

The front matter holds the statement of intended use again, under "fluvial_use". What a user writes
below `MARKER`, and keys of the front matter that are not the card's own, stay when it is rewritten.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fluvial.training.files import atomic, open_safetensors, read_header
from fluvial.training.use import DEFAULTS, NATURE, IntendedUse, digest, read_use

MODEL = "model.safetensors"
CARD = "README.md"
MARKER = "<!-- yours: kept when the card is rewritten -->"
"""The line of a card below which it is the user's."""

FORMAT = 1
"""Latest version of ``run.json`` and ``result.json`` that is understood."""

TASKS = {"images": "unconditional-image-generation", "text": "text-generation"}
"""Tasks of the hub by the kind of data; it has none for the generation of arrays and tables."""

SUFFIXES = {"images": "png", "arrays": "npz", "table": "csv", "text": "txt"}
DECODED = {
    "images": "levels 0 to 255",
    "arrays": "in the units of the data",
    "table": "in the units of the data",
}

_OURS = (
    "license",
    "license_name",
    "license_link",
    "library_name",
    "tags",
    "datasets",
    "metrics",
    "pipeline_tag",
    "model-index",
    "fluvial_use",
)


def write_training_card(
    folder: str | os.PathLike[str], about: Mapping[str, tuple[str, str]]
) -> Path:
    """Write the card of a training run; returns its path.

    It is made from ``run.json``, ``training.json``, ``metrics.jsonl``, ``result.json`` and the
    metadata of ``model.safetensors``. A run that was stopped lacks some of them, and the card says
    so.

    Args:
        folder: of the run.
        about: purpose and citation, in Markdown, of the systems, by name.

    Raises:
        FileNotFoundError: the folder has neither a model nor a ``run.json``.
        FileExistsError: it has a README.md that is not a card of fluvial's.
        ValueError: a file is damaged, or of a later format.
    """
    folder = Path(folder)
    run, loop, result = (_json(folder / f"{name}.json") for name in ("run", "training", "result"))
    if not run and not (folder / MODEL).is_file():
        raise FileNotFoundError(f"{folder} is not a run: it has neither {MODEL} nor run.json")
    use, header, size = _model(folder)
    system = str(header.get("system") or run.get("system") or "unknown")
    purpose, citation = about.get(system, (None, None))
    data = run.get("data") or {}
    format = header.get("data") or data.get("format") or {}
    name = str(data.get("name") or "data that are not named")
    metrics = [metric for metric in result.get("metrics") or () if metric.get("name")]
    body = [
        f"# {system}, trained on {name}",
        *_pictures(folder, {"loss curves and samples": "figure.png"}),
        "## Model description",
        _description(system, purpose, citation),
        _list(
            {
                "Network": _network(header),
                "Parameters": _count(run.get("parameters") or size),
                "Shape": _event(format),
            }
        ),
        *_uses(use),
        *_risks(data),
        *_how_to_use(folder, header, format),
        "## Training data",
        _list(
            {
                "Name": name,
                "Licence": data.get("licence") or "unknown",
                "Source": data.get("source") or "unknown",
                "Citation": data.get("citation"),
                "Rows": _rows(data.get("rows")),
                "Classes": _some(format.get("label_names") or ()),
                "Columns": _some(format.get("columns") or ()),
            }
        ),
        *_bullets(data.get("notes") or ()),
        "## Training procedure",
        _progress(folder, loop, result),
        _table(("hyper-parameter", "value"), _settings(run.get("recipe") or {}, loop)),
        _versions(run.get("versions") or {}),
        "## Evaluation",
        _evaluation(metrics),
        *_bullets(result.get("notes") or ()),
        *_reliability(use),
        "## Citation",
        citation or "The paper of the system is not known here.",
        *([f"Data: {data['citation']}"] if data.get("citation") else []),
    ]
    front = _front(
        use,
        system=system,
        data=data,
        task=TASKS.get(format.get("kind", "")),
        metrics=metrics,
    )
    return _write(folder, front, body)


def write_claim_card(
    folder: str | os.PathLike[str],
    *,
    system: str,
    preset: str,
    evaluation: str,
    data: Mapping[str, str],
    notes: Sequence[str],
    config: Mapping[str, Any],
    seconds: float,
    versions: Mapping[str, str],
    about: Mapping[str, tuple[str, str]],
) -> Path:
    """Write the card of a claim's run; returns its path.

    Args:
        folder: of the run, with its pictures and its model if there is one.
        system, preset: what was run.
        evaluation: claim, table and verdict, in Markdown.
        data, notes: what it was trained and measured on, and what has to be said beside the table.
        config: everything the run depended on.
        seconds: how long it took.
        versions: of fluvial, torch and Python.
        about: as for `write_training_card`.

    Raises:
        FileExistsError, ValueError: as `write_training_card`.
    """
    folder = Path(folder)
    use, header, size = _model(folder)
    purpose, citation = about.get(system, (None, None))
    format = header.get("data") or {}
    pictures = {
        "samples and distances": "figure.png",
        "samples in one evaluation, a class a row": "samples.png",
    }
    body = [
        f"# {system}, preset {preset}",
        *_pictures(folder, pictures),
        "## Model description",
        _description(system, purpose, citation),
        _list({"Network": _network(header), "Parameters": _count(size)}),
        *_uses(use),
        *_risks(data),
        *_how_to_use(folder, header, format),
        "## Training data",
        _list({name[:1].upper() + name[1:]: value for name, value in data.items()}),
        "## Training procedure",
        f"```json\n{json.dumps(config, indent=2, ensure_ascii=False)}\n```",
        f"The run took {_duration(seconds)}. {_versions(versions)}",
        "## Evaluation",
        evaluation,
        *_bullets(notes),
        *_reliability(use),
        "## Citation",
        citation or "The paper of the system is not known here.",
    ]
    front = _front(
        use,
        system=system,
        data=data,
        task=TASKS.get(format.get("kind", "")),
        metrics=[],
    )
    return _write(folder, front, body)


def read_card_use(folder: str | os.PathLike[str]) -> IntendedUse | None:
    """The statement in the card of a folder; None if there is no card, or no statement in it.

    Raises:
        ValueError, TypeError: the front matter is not YAML, or the statement is none.
    """
    found = _statement(Path(folder))
    return None if found is None else IntendedUse.from_json(found)


def card_digest(folder: str | os.PathLike[str]) -> str | None:
    """The digest of what `read_card_use` reads, without a look at its schema."""
    found = _statement(Path(folder))
    return None if found is None else digest(found)


def _statement(folder: Path) -> Any:
    path = folder / CARD
    if not path.is_file():
        return None
    found = _front_matter(path, path.read_text(encoding="utf-8-sig"))[0].get("fluvial_use")
    # edited without quotes, a text may have become a date; as text again it has another digest
    return json.loads(json.dumps(found, default=str))


# Front matter


def _front(
    use: IntendedUse | None,
    *,
    system: str,
    data: Mapping[str, Any],
    task: str | None,
    metrics: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Metadata as the hub wants it. The licence is that of the weights, where one is stated."""
    from huggingface_hub import EvalResult, ModelCardData

    name = str(data.get("name") or "unknown")
    # a name alone could be that of somebody else's data there
    source = re.match(r"Hugging Face, ([\w.-]+(?:/[\w.-]+)?)", str(data.get("source")))
    measured = [metric for metric in metrics if isinstance(metric.get("value"), int | float)]
    results = [
        EvalResult(
            task_type=task or "other",
            dataset_type=_slug(name),
            dataset_name=name,
            metric_type=_slug(metric["name"]).lower(),
            metric_name=metric["name"],
            metric_value=metric["value"],
        )
        for metric in measured
    ]
    content = ModelCardData(
        license=use.weights_license if use else None,
        license_name=use.license_name if use else None,
        license_link=use.license_link if use else None,
        library_name="fluvial",
        tags=["fluvial", system],
        datasets=[source[1]] if source else None,
        metrics=[_slug(metric["name"]).lower() for metric in measured] or None,
        pipeline_tag=task,
        model_name=f"{system}-{_slug(name)}" if results else None,
        eval_results=results or None,
        fluvial_use=use and use.as_json(),
    )
    return content.to_dict()


def _slug(name: str) -> str:
    """A name as the hub's identifiers are: letters, digits and ``- . _ /``."""
    plain = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode()
    return re.sub(r"[^\w./]+", "-", plain).strip("-./") or "unnamed"


def _front_matter(path: Path, content: str) -> tuple[dict[str, Any], str]:
    """(metadata, Markdown) of a card."""
    import yaml  # type: ignore[import-untyped]
    from huggingface_hub import ModelCard

    if not content.startswith("---"):
        return {}, content
    try:
        card = ModelCard(content)
    except (yaml.YAMLError, ValueError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"the front matter of {path} is not readable YAML: {reason}") from error
    return card.data.to_dict(), card.text


def _yaml(content: Mapping[str, Any]) -> str:
    """Block YAML with every text in quotes: ``no``, dates and version numbers stay texts."""
    import yaml

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

    def quoted(dumper: Any, text: str) -> Any:
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"')

    class Text(str):
        pass

    def texts(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: texts(part) for name, part in value.items()}
        if isinstance(value, list | tuple):
            return [texts(part) for part in value]
        return Text(value) if isinstance(value, str) else value

    Dumper.add_representer(Text, quoted)
    return yaml.dump(
        texts(content), Dumper=Dumper, sort_keys=False, allow_unicode=True, width=math.inf
    )


def _write(folder: Path, front: dict[str, Any], body: Sequence[str]) -> Path:
    path = folder / CARD
    own = "\n"
    if path.is_file():
        content = path.read_text(encoding="utf-8-sig")
        old = _front_matter(path, content)[0]
        if old.get("library_name") != "fluvial":
            raise FileExistsError(f"{path} is not a card of fluvial's; move it to write one")
        own = content.partition(MARKER)[2] or own
        front = _kept(front, old)
    text = "\n\n".join(part for part in body if part)
    with atomic(path) as temporary:
        temporary.write_text(
            f"---\n{_yaml(front)}---\n\n{text}\n\n{MARKER}{own}", encoding="utf-8", newline="\n"
        )
    return path


def _kept(front: dict[str, Any], old: Mapping[str, Any]) -> dict[str, Any]:
    """``front`` with the keys that a user has added to the old card."""
    kept = {name: value for name, value in old.items() if name not in _OURS}
    statement = old.get("fluvial_use")
    stated = statement.get("weights_license") if isinstance(statement, Mapping) else None
    # a licence that is not from the old statement was written by hand
    if "license" not in front and old.get("license") not in (None, stated):
        kept |= {name: old[name] for name in _OURS[:3] if name in old}
    return {**front, **kept}


# Sections


def _model(folder: Path) -> tuple[IntendedUse | None, dict[str, Any], int]:
    """(statement, header, number of weights) of the model in a folder."""
    path = folder / MODEL
    if not path.is_file():
        return None, {}, 0
    with open_safetensors(path) as file:
        size = sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    return read_use(path), read_header(path), size


def _description(system: str, purpose: str | None, citation: str | None) -> str:
    what = f"`{system}`: {purpose}." if purpose else f"A model of the system `{system}`."
    return f"{what} {citation}." if citation else what


def _uses(use: IntendedUse | None) -> Iterator[str]:
    yield "## Uses"
    if use is None:
        yield "The weights carry no statement of intended use."
        return
    yield f"The same statement is in the weights (digest `{use.digest}`). It is {NATURE}."
    if not use.known:
        yield f"Its schema, `{use.schema}`, is not known to this version; see the front matter."
        return
    if use.weights_license:
        name = use.license_name or use.weights_license
        link = f"[{name}]({use.license_link})" if use.license_link else f"`{name}`"
        yield f"Licence of the weights: {link}; what it allows and restricts is in its text."
    else:
        yield "No licence of the weights is stated."
    yield "### Direct use"
    yield from _bullets(use.intended)
    yield "### Out-of-scope use"
    lines = {
        entry.id: f"`{entry.id}`: {entry.text}" + (f" ({entry.source})" if entry.source else "")
        for entry in use.out_of_scope
    }
    lines |= {entry.id: f"`{entry.id}`: removed, because: {entry.reason}" for entry in use.removed}
    # what is removed is shown where it stood
    first = [entry.id for entry in DEFAULTS if entry.id in lines]
    yield from _bullets([lines[name] for name in dict.fromkeys([*first, *lines])])
    if use.base_model:
        parents = ", ".join(f"`{parent}`" for parent in use.base_model)
        yield f"Made from models whose statements have the digests {parents}."


def _risks(data: Mapping[str, Any]) -> Iterator[str]:
    yield "## Bias, risks and limitations"
    yield (
        "The output follows the training data, with their gaps and biases. Nothing is known of it "
        "but what is under Evaluation and Reliability, and that holds for data like those measured "
        "on. Whether it repeats training examples was not measured."
    )
    yield "### Recommendations"
    yield (
        "Check output independently before acting on it, and measure again on data of your own use."
    )
    if str(data.get("licence") or "unknown").startswith("unknown"):
        yield "The licence of the training data is not known: clear it before publishing."


def _how_to_use(
    folder: Path, header: Mapping[str, Any], format: Mapping[str, Any]
) -> Iterator[str]:
    yield "## How to use"
    if not (folder / MODEL).is_file():
        yield f"There is no {MODEL} yet; the run writes it when it ends."
        return
    if "rounds" in header:  # fills the gaps of a table
        lines = [
            "import fluvial",
            "",
            'imputer = fluvial.load(".")  # the folder of this card',
            "filled = imputer.transform(rows)  # gaps are NaN; sample(rows, m) draws m fillings",
        ]
        yield "\n".join(["```python", *lines, "```"])
        return
    if "network1" in header:  # joins two data sets
        lines = [
            "import fluvial",
            "",
            'model = fluvial.load(".")  # the folder of this card',
            "there = model.translate(x)  # of the data; direction='forward' takes the target back",
        ]
        yield "\n".join(["```python", *lines, "```"])
        if format:
            out = f"translated.{SUFFIXES[format['kind']]}"
            yield f"```sh\nfluvial translate . INPUT --out {out}\n```"
        return
    names = format.get("label_names") or ()
    label = f", label={names[0]!r}" if names else ""
    lines = [
        "import fluvial",
        "",
        'model = fluvial.load(".")  # the folder of this card',
        f"samples = model.sample(16, noise=fluvial.KeyedNoise(0){label})",
    ]
    if format and format["kind"] == "text":
        lines.append("texts = model.format.text(samples)")
    elif format:
        lines.append(f"samples = model.format.decode(samples)  # {DECODED[format['kind']]}")
    yield "\n".join(["```python", *lines, "```"])
    if format:
        name = f" --label {shlex.quote(names[0])}" if names else ""
        out = f"samples.{SUFFIXES[format['kind']]}"
        yield f"```sh\nfluvial sample . --n 16{name} --out {out}\n```"


def _progress(folder: Path, loop: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    if result.get("steps") is not None:
        text = f"{result['steps']:,} steps in {_duration(result.get('seconds') or 0)}."
        weights = result.get("weights")
        return f"{text} The model holds the weights `{weights}`." if weights else text
    step = 0
    if (folder / "metrics.jsonl").is_file():
        for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
            try:
                step = json.loads(line)["step"]
            except (ValueError, TypeError, KeyError):
                break  # the line that a crash cut short
    wanted = f" of {loop['steps']:,}" if isinstance(loop.get("steps"), int) else ""
    return f"The run is not finished: {step:,}{wanted} steps are logged."


def _settings(recipe: Mapping[str, Any], loop: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Hyper-parameters, then what else the loop was configured with."""
    beside = {"name", "rows", "data", "validation", "format"}  # shown elsewhere, or fingerprints
    settings = {**recipe, **{k: v for k, v in loop.items() if k not in {*recipe, *beside}}}
    return [
        (f"`{name}`", value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
        for name, value in settings.items()
    ]


def _evaluation(metrics: Sequence[Mapping[str, Any]]) -> str:
    if not metrics:
        return "Not measured."
    rows = [
        (m["name"], _number(m.get("value")), _number(m.get("floor")), m.get("what") or "")
        for m in metrics
    ]
    table = _table(("metric", "value", "floor", "measured on"), rows)
    if all(metric.get("floor") is None for metric in metrics):
        return table
    return f"{table}\n\nThe floor is what real data score against real data, in equal numbers."


def _reliability(use: IntendedUse | None) -> Iterator[str]:
    yield "## Reliability"
    measured = use and use.reliability
    yield f"{measured.summary} (report `{measured.digest}`)" if measured else "Not measured."


# Pieces


def _json(path: Path) -> dict[str, Any]:
    """A JSON object; empty if there is no such file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold an object, it holds a {type(content).__name__}")
    # of training.json it is that of the data
    if isinstance(version := content.get("format"), int) and version > FORMAT:
        raise ValueError(
            f"{path} has format {version}, this version of fluvial reads up to {FORMAT}"
        )
    return content


def _pictures(folder: Path, names: Mapping[str, str]) -> Iterator[str]:
    for text, name in names.items():
        if (folder / name).is_file():
            yield f"![{text}]({name})"


def _line(value: Any) -> str:
    return " ".join(str(value).split())


def _bullets(lines: Sequence[str]) -> Iterator[str]:
    if lines:
        yield "\n".join(f"- {_line(line)}" for line in lines)


def _list(facts: Mapping[str, Any]) -> str:
    return "\n".join(f"- {name}: {_line(value)}" for name, value in facts.items() if value)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    lines = [header, ["---"] * len(header), *rows]
    cells = [[_line(cell).replace("|", r"\|") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def _number(value: Any) -> str:
    return "not measured" if value is None else f"{value:.4g}"


def _count(value: int | None) -> str:
    return f"{value:,}" if value else ""


def _network(header: Mapping[str, Any]) -> str:
    network = header.get("network")
    return f"`{json.dumps(network, ensure_ascii=False)}`" if network else ""


def _event(format: Mapping[str, Any]) -> str:
    if not format:
        return ""
    sizes = " x ".join(map(str, format.get("shape") or ()))
    return f"{format.get('kind')}, {sizes}"


def _rows(rows: Mapping[str, int] | None) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in (rows or {}).items() if count)


def _some(names: Sequence[str], most: int = 20) -> str:
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.3g} s"


def _versions(versions: Mapping[str, str]) -> str:
    return f"Made with {', '.join(f'{k} {v}' for k, v in versions.items())}." if versions else ""
