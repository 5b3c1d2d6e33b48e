"""Build the documentation site: `python -m scripts.site.build`, which `make docs` runs.

The pages, in the folder `build/docs/pages`, are the documents in `docs/`, the READMEs of the packages and benchmarks,
and a reference page for each command of both programs, which is generated from its flags.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from scripts.site.messages import messages_page
from scripts.site.reference import reference_pages

ROOT = Path(__file__).parents[2]
STAGE = ROOT / "build" / "docs"
_LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?![a-z]+:|#)([^)#\s]+)(#[^)\s]*)?\)")
_COMMENT = re.compile(r"^<!-- .*?-->\n", flags=re.MULTILINE | re.DOTALL)
# Documents by section of the site, in order. Each document appears once.
SECTIONS: dict[str, tuple[str, ...]] = {
    "Start": (
        "index.md",
        "docs/start.md",
        "docs/quickstart.md",
        "docs/thousand_videos.md",
        "docs/comparison.md",
    ),
    "Tutorials": (
        "docs/tutorials/first_try.md",
        "docs/tutorials/your_videos.md",
        "docs/tutorials/uncaptioned.md",
        "docs/tutorials/classes.md",
        "docs/tutorials/robot.md",
        "docs/tutorials/own_loop.md",
        "docs/tutorials/vatex.md",
        "docs/tutorials/ek100.md",
        "docs/tutorials/rerun.md",
        "docs/tutorials/latents.md",
        "docs/tutorials/video_latents.md",
        "docs/tutorials/cluster.md",
        "docs/tutorials/notebook.md",
    ),
    "How to": (
        "docs/datasets.md",
        "docs/data.md",
        "docs/weights.md",
        "docs/datacomp.md",
        "docs/search.md",
        "docs/python.md",
        "docs/cluster.md",
        "docs/operations.md",
        "docs/distributed.md",
        "docs/doctor.md",
    ),
    "Reference": ("docs/commands.md", "docs/data_folder.md", "docs/exports.md"),
    "Troubleshooting": ("docs/troubleshooting.md",),
    "Explanations": (
        "docs/chunks.md",
        "docs/encoding.md",
        "docs/columns.md",
        "docs/loading.md",
        "docs/models.md",
        "docs/gpu.md",
        "docs/losses.md",
        "docs/plugins.md",
        "docs/optimizers.md",
        "docs/evaluation.md",
        "docs/classification.md",
        "docs/mae.md",
        "docs/captions.md",
        "docs/reliability.md",
        "docs/figures.md",
        "docs/seeds.md",
        "benchmarks/README.md",
    ),
    "Code": ("docs/architecture.md", "CONTRIBUTING.md", "docs/releases.md", "SECURITY.md", "CHANGELOG.md"),
}
_PACKAGES = ("manifests", "shards", "prep", "train", "tests")


def page_of(document: Path) -> Path:
    """Return the path of the page for a document, both relative paths."""
    if document.parts[0] == "docs":
        return Path(*document.parts[1:])
    if document.name == "README.md":
        return Path("index.md") if len(document.parts) == 1 else Path("code", *document.parts[:-1], "index.md")
    return Path(document.name.lower())


def documents() -> list[Path]:
    """Return the documents that become pages, as paths relative to the repository."""
    found = [path for path in (ROOT / "docs").rglob("*.md") if path.name != "README.md"]
    found += [
        ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "benchmarks/README.md")
    ]
    found += [path for package in _PACKAGES for path in (ROOT / package).rglob("README.md")]
    return sorted(path.relative_to(ROOT) for path in found)


def pictures() -> list[Path]:
    """Return the pictures that documents show, as paths relative to the repository."""
    return sorted(path.relative_to(ROOT) for path in (ROOT / "docs" / "pictures").glob("*.png"))


def with_links(text: str, *, document: Path, pages: dict[Path, Path]) -> str:
    """Return the text of a document with links to other pages. A link to a file without a page becomes the file's name.

    Comments are removed, because mkdocs does not find the title of a page after a comment.
    """

    def replaced(found: re.Match[str]) -> str:
        label, target, anchor = found[1], found[2], found[3] or ""
        wanted = Path(os.path.normpath(document.parent / target))
        wanted = wanted / "README.md" if wanted / "README.md" in pages else wanted
        if wanted not in pages:
            return f"{label} (`{wanted}`)" if wanted.name not in label else label
        return f"[{label}]({os.path.relpath(pages[wanted], pages[document].parent)}{anchor})"

    return _LINK.sub(replaced, _COMMENT.sub("", text))


def write_pages(folder: Path) -> list[Any]:
    """Write all pages into a folder, and return the navigation of the site."""
    pages = {document: page_of(document) for document in [*documents(), *pictures()]}
    for document, page in pages.items():
        path = folder / page
        path.parent.mkdir(parents=True, exist_ok=True)
        if document.suffix == ".md":
            path.write_text(with_links((ROOT / document).read_text(), document=document, pages=pages))
        else:
            shutil.copyfile(ROOT / document, path)
    (folder / "messages.md").write_text(messages_page(ROOT))
    reference: list[Any] = []
    for program, commands in reference_pages().items():
        entries = []
        for name, text in commands.items():
            page = Path("reference", program, f"{name.replace(' ', '-')}.md")
            (folder / page).parent.mkdir(parents=True, exist_ok=True)
            (folder / page).write_text(text)
            entries.append({f"{program} {name}": page.as_posix()})
        reference.append({program: entries})
    generated: dict[str, list[Any]] = {"Reference": reference, "Troubleshooting": ["messages.md"]}
    navigation: list[Any] = []
    for title, names in SECTIONS.items():
        placed: list[Any] = [name if name == "index.md" else pages[Path(name)].as_posix() for name in names]
        navigation.append({title: placed + generated.get(title, [])})
    packages = [{str(document.parent): page.as_posix()} for document, page in pages.items() if page.parts[0] == "code"]
    navigation[-1]["Code"].append({"Packages": packages})
    return navigation


def main() -> None:
    """Build the site in `build/site`."""
    shutil.rmtree(STAGE, ignore_errors=True)
    STAGE.mkdir(parents=True)
    settings = yaml.safe_load((Path(__file__).parent / "mkdocs.yml").read_text())
    settings["nav"] = write_pages(STAGE / "pages")
    (STAGE / "mkdocs.yml").write_text(yaml.safe_dump(settings, sort_keys=False))
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--config-file", "mkdocs.yml"]
    built = subprocess.run(command, cwd=STAGE, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, check=False)
    if built.returncode:
        sys.exit(built.returncode)
    print("the site: build/site/index.html; to search it: python -m http.server --directory build/site")


if __name__ == "__main__":
    main()
