"""``make tour``: the page's tour without a server, as one folder that a double click opens.

    python -m tools.tour.make --out tour [--pair MODEL DRAFT [--keep]]

The page's own JavaScript runs, its modules put into one script, as browsers load none from files.
In place of the module that asks the server stands one that reads recordings: what `ASKED` of
``tour/asked.js`` asks, answered beforehand by the default model, and by a pair of models. The
pair's recording is kept beside this file, as not everybody has its weights.
"""

from __future__ import annotations

import argparse
import itertools
import json
import lzma
import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from foredraft.llm import LLM
from foredraft.server.page_routes import PAGE
from foredraft.server.page_runs import Lanes, RunBody, run_lanes
from foredraft.system.machine import cpu_name
from foredraft.version import __version__

HERE = Path(__file__).parent
REPLACED = {"main.js": HERE / "main.js", "api.js": HERE / "api.js"}
KEPT = HERE / "pair.json.xz"
FORWARDS = (*range(1, 33), 64, 80)
_IMPORT = re.compile(r'^import \{ ([^}]+) \} from "([^"]+)";\n', re.MULTILINE)
_EXPORT = re.compile(
    r"^export (?=(?:const|let|class|function|async function\*?) (\w+))", re.MULTILINE
)


# ------------------------------------------------------------------------------------------- script


def bundled(entry: str = "main.js") -> str:
    """The page's modules as one classic script, each in a function of its own, imports first."""
    order: list[str] = []
    _visit(entry, order, ())
    return "".join(["(() => {\n", *map(_as_function, order), "})();\n"])


def _source(name: str) -> str:
    return REPLACED.get(name, PAGE / "js" / name).read_text(encoding="utf-8")


def _resolved(name: str, imported: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(name), imported))


def _visit(name: str, order: list[str], above: tuple[str, ...]) -> None:
    if name in above:
        raise ValueError(f"modules import each other: {' -> '.join((*above, name))}")
    if name in order:
        return
    for _, imported in _IMPORT.findall(_source(name)):
        _visit(_resolved(name, imported), order, (*above, name))
    order.append(name)


def _identifier(name: str) -> str:
    return "m_" + re.sub(r"\W", "_", name.removesuffix(".js"))


def _as_function(name: str) -> str:
    source = _source(name)
    found = _EXPORT.findall(source)
    for line in re.findall(r"^export const .+, .+$", source, re.MULTILINE):  # several in one line
        found += re.findall(r"[,;] ([A-Z]\w*) = ", line)
    source = _IMPORT.sub(
        lambda m: (
            f"const {{ {m[1].replace(' as ', ': ')} }} = {_identifier(_resolved(name, m[2]))};\n"
        ),
        source,
    )
    source = _EXPORT.sub("", source)
    if re.search(r"^(import|export) ", source, re.MULTILINE):
        raise ValueError(f"{name} imports or exports in a form that is not known here")
    exported = ", ".join(dict.fromkeys(found))
    return f"const {_identifier(name)} = (() => {{\n{source}return {{ {exported} }};\n}})();\n"


def index(recordings: Sequence[str]) -> str:
    """The page's index for files beside it: the tour alone, its script at the end."""
    text = (PAGE / "index.html").read_text(encoding="utf-8")
    text = re.sub(r"    <nav .*?</nav>\n", "", text, flags=re.DOTALL)
    text = re.sub(r"  <script .*?</script>\n", "", text)
    text = text.replace("/page/files/", "").replace('href="#chat"', 'href="#tour"')
    text = text.replace(
        "<title>foredraft</title>",
        "<title>foredraft: how to write faster without changing a word</title>\n"
        '  <meta property="og:title" content="How to write faster without changing a word">\n'
        '  <meta property="og:description" content="Guess first; then the model answers.">\n'
        '  <meta property="og:image" content="card.png">',
    )
    text = text.replace("runs the model from your browser, and ", "")
    scripts = "".join(f'  <script src="{name}"></script>\n' for name in (*recordings, "tour.js"))
    return text.replace("</body>", f"{scripts}</body>")


# ---------------------------------------------------------------------------------------- recording


def asked() -> dict[str, dict[str, Any]]:
    """What the tour asks: the JSON of ``tour/asked.js``."""
    text = (PAGE / "js/tour/asked.js").read_text(encoding="utf-8")
    found: dict[str, dict[str, Any]] = json.loads(text.split("ASKED =", 1)[1].rstrip().rstrip(";"))
    return found


def requests(drafters: Sequence[str], served: str) -> Iterator[tuple[dict[str, Any], bool]]:
    """Every request of the tour, and whether its steps are to say why.

    Args:
        drafters: those that can be had.
        served: the drafter that "served" stands for.
    """
    for body in asked().values():
        grid, shows_why = body.pop("recorded", {}), body.pop("shows_why", False)
        for values in itertools.product(*grid.values()):
            yield _request(body, dict(zip(grid, values, strict=True)), drafters, served), shows_why
        if "prompt" not in grid:
            yield _request(body, {}, drafters, served), shows_why


def _request(
    body: Mapping[str, Any], changes: dict[str, Any], drafters: Sequence[str], served: str
) -> dict[str, Any]:
    """As `asked` of ``tour/part.js`` makes it."""
    most, prompt = changes.pop("num_draft_tokens", None), changes.pop("prompt", None)
    lanes = [dict(lane) for lane in body["lanes"]]
    for lane in lanes:
        if "drafter" in lane:
            wanted = [served if name == "served" else name for name in lane["drafter"]]
            lane["drafter"] = next((name for name in wanted if name in drafters), served)
        if most is not None and "num_draft_tokens" in lane:
            lane["num_draft_tokens"] = most
    messages = {"messages": [{"role": "user", "content": prompt}]} if prompt else {}
    return {**body, "lanes": lanes, **messages, **changes}


def canonical(request: Mapping[str, Any]) -> str:
    """A request as the key of its recording; ``api.js`` writes the same."""
    return json.dumps(request, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def served_of(info: Mapping[str, Any]) -> str:
    """As `served` of ``tour/part.js``."""
    known = info["drafters"]
    wanted = ("draft_model", "self_draft", info["drafter"], "suffix", "ngram")
    return next(name for name in wanted if name != "none" and name in known)


def recording(llm: LLM, say: Any = print) -> dict[str, Any]:
    """Everything that the tour may ask of a model: forwards, runs, and about itself."""
    lanes = Lanes(llm)
    about = lanes.info() | {"version": __version__, "cpu": cpu_name(), "proof": None}
    forwards = {n: round(min(lanes.forward_ms(n) for _ in range(3)), 3) for n in FORWARDS}
    runs: dict[str, list[dict[str, Any]]] = {}
    for request, shows_why in requests(lanes.drafters, served_of(about)):
        key = canonical(request)
        if key not in runs:
            runs[key] = [_short(e, shows_why) for e in run_lanes(lanes, RunBody(**request))]
            say(f"{len(runs)} runs recorded", end="\r", flush=True)
    return {"info": about, "forwards": forwards, "runs": runs}


def keep(recorded: Mapping[str, Any], path: Path = KEPT) -> None:
    """Write a recording for tours that are made where its model is not."""
    said = json.dumps(recorded, separators=(",", ":"), ensure_ascii=False)
    path.write_bytes(lzma.compress(said.encode(), preset=9))


def kept(path: Path = KEPT) -> dict[str, Any]:
    """A recording that was kept.

    Raises:
        ValueError: the tour asks something else now.
    """
    recorded: dict[str, Any] = json.loads(lzma.decompress(path.read_bytes()))
    info = recorded["info"]
    wanted = {canonical(each) for each, _ in requests(info["drafters"], served_of(info))}
    if lacking := wanted - recorded["runs"].keys():
        raise ValueError(f"{path.name} lacks {len(lacking)} runs: record it again with --keep")
    return recorded


def _short(event: dict[str, Any], shows_why: bool) -> dict[str, Any]:
    """An event without what the tour does not show, figures in four digits."""
    if event["type"] == "step":
        event = event | {"controller": None}
        if not shows_why:
            event["row"] = event["row"] | {"why": None}
    found: dict[str, Any] = _rounded(event)
    return found


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    return [*map(_rounded, value)] if isinstance(value, list | tuple) else value


# ------------------------------------------------------------------------------------------- folder


def write(out: Path, recordings: Mapping[str, Mapping[str, Any]]) -> None:
    """The folder: index, script, style sheets, and a script for each recording."""
    (out / "css").mkdir(parents=True, exist_ok=True)
    for path in [*PAGE.glob("css/*.css"), PAGE / "icon.svg"]:
        (out / path.relative_to(PAGE)).write_bytes(path.read_bytes())
    (out / "tour.js").write_text(bundled(), encoding="utf-8")
    names = []
    for number, (name, recorded) in enumerate(recordings.items()):
        names.append(f"recording-{number}.js")
        said = json.dumps(recorded, separators=(",", ":"))
        text = f"(globalThis.FOREDRAFT ??= {{}})[{json.dumps(name)}] = {said};\n"
        (out / names[-1]).write_text(text, encoding="utf-8")
    picture = HERE.parents[1] / "docs/images/tour.png"  # for those who link to it
    (out / "card.png").write_bytes(picture.read_bytes())
    (out / "index.html").write_text(index(names), encoding="utf-8")


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("tour"))
    parser.add_argument(
        "--pair", nargs=2, metavar=("MODEL", "DRAFT"), help="record these, not the kept pair"
    )
    parser.add_argument("--keep", action="store_true", help="for tours made without the pair")
    asked_for = parser.parse_args()
    if asked_for.keep and not asked_for.pair:
        parser.error("--keep keeps what --pair records: name the pair")
    recordings = [recording(LLM.load())]
    if asked_for.pair:
        recordings.append(recording(LLM.load(asked_for.pair[0], draft_model=asked_for.pair[1])))
        if asked_for.keep:
            keep(recordings[-1])
    else:
        recordings.append(kept())
    write(asked_for.out, {each["info"]["model"]: each for each in recordings})
    print(f"\nopen {asked_for.out / 'index.html'}")  # noqa: T201


if __name__ == "__main__":
    main()
