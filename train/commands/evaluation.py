"""The commands of `train eval`. What they do is imported when one of them runs."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

from manifests.errors import FailedWork, UserError
from train.config.evaluation import METHODS, DualEncoderEvaluation, Method, ProbeEvaluation
from train.tasks.caption.settings import DecodingSettings
from train.tasks.classify.settings import ClassEvaluation

evaluate = App(name="eval", help="Scores a trained run, and adds the result to its page.")

_AsJson = Annotated[bool, Parameter(name="--json", negative="")]


@evaluate.command
def retrieval(
    run: Path, *, shards: str | None = None, split: str = "val", clips: int = 1, as_json: _AsJson = False
) -> None:
    """Text-video retrieval of a run: R@1, R@5, R@10 and median rank, both ways, beside chance.

    Example:

        train eval retrieval runs/first --shards data

    Parameters
    ----------
    run
        Folder that train dual-encoder --out made.
    shards
        Data folder or tars; as in training when left out.
    split
        Split to score.
    clips
        Looks at each clip, at different moments; their embeddings are averaged.
    as_json
        Print one JSON object.
    """
    _evaluate(run, DualEncoderEvaluation(split=split), shards=shards, num_clips=clips, as_json=as_json)


@evaluate.command
def mir(
    run: Path,
    *,
    shards: str | None = None,
    split: str = "test",
    relevancy: Path | None = None,
    sentences: Path | None = None,
    clips: int = 1,
    as_json: _AsJson = False,
) -> None:
    """Multi-instance retrieval as EPIC-KITCHENS-100 scores it: graded mAP and nDCG, both ways and their mean.

    Example:

        train eval mir runs/ek100 --shards data --relevancy caption_relevancy_EPIC_100_retrieval_test.pkl

    Parameters
    ----------
    run
        Folder that train dual-encoder --out made.
    shards
        Data folder; as in training when left out.
    split
        Split to score.
    relevancy
        Table of clips by sentences, .npy or the published .pkl (read without running it); computed from verb and
        noun classes when left out.
    sentences
        CSV whose column `narration` has the sentences, in the order of the relevancy; when left out the captions'
        distinct texts in their order.
    clips
        Looks at each clip, at different moments; their embeddings are averaged.
    as_json
        Print one JSON object.
    """
    wanted = DualEncoderEvaluation(protocol="mir", split=split, relevancy=relevancy, sentences=sentences)
    _evaluate(run, wanted, shards=shards, num_clips=clips, as_json=as_json)


@evaluate.command
def zero_shot(
    run: Path,
    *,
    shards: str | None = None,
    split: str = "val",
    classes: Path | None = None,
    templates: Path | None = None,
    label: str | None = None,
    clips: int = 1,
    as_json: _AsJson = False,
) -> None:
    """Classification by prompts: the class whose texts are nearest; top-1, top-5 and mean class accuracy.

    Example:

        train eval zero-shot runs/first --shards data --classes classes.txt --templates templates.txt

    Parameters
    ----------
    run
        Folder that train dual-encoder --out made.
    shards
        Data folder; as in training when left out.
    split
        Split to score.
    classes
        Text file, one class a line, several names of it set apart by |; from the captions' labels when left out.
    templates
        Text file, one template a line, with {} for the name; the bare name when left out.
    label
        Label of the captions that is the class, such as verb; needed where there are several.
    clips
        Looks at each clip, at different moments; their embeddings are averaged.
    as_json
        Print one JSON object.
    """
    wanted = DualEncoderEvaluation(protocol="zero-shot", split=split, classes=classes, templates=templates, label=label)
    _evaluate(run, wanted, shards=shards, num_clips=clips, as_json=as_json)


@evaluate.command
def classification(
    run: Path,
    *,
    shards: str | None = None,
    split: str = "val",
    clips: int = 1,
    crops: int = 1,
    as_json: _AsJson = False,
) -> None:
    """Accuracies of a classifier: top-1, top-5 and mean over classes; of actions, verbs and nouns where labels are.

    Example:

        train eval classification runs/classes --shards data --clips 5 --crops 3

    Parameters
    ----------
    run
        Folder that train classify --out made.
    shards
        Data folder; as in training when left out.
    split
        Split to score.
    clips
        Looks at each clip, at different moments; probabilities are averaged over all views.
    crops
        Squares that each look is cut out as, along the longer side; 1 is the centre.
    as_json
        Print one JSON object.
    """
    from train.tasks.classify.commands import evaluate_classifier

    with _as_typed():
        wanted = ClassEvaluation(split=split, clips=clips, crops=crops)
    result = evaluate_classifier(run, wanted, shards=shards)
    _print(run, result, num_failed=len(result["failed"]), as_json=as_json)


@evaluate.command
def probe(
    run: Path,
    *,
    label: Annotated[tuple[str, ...], Parameter(negative="")] = (),
    method: Annotated[tuple[Method, ...], Parameter(negative="")] = METHODS,
    shards: str | None = None,
    split: str = "val",
    train_split: str = "train",
    neighbours: int = 20,
    as_json: _AsJson = False,
) -> None:
    """What frozen features tell of labels: accuracies of nearest neighbours and of a linear layer.

    Beside chance stands the same tower with random weights.

    Example:

        train eval probe runs/mae --shards data --label motion --label shape

    Parameters
    ----------
    run
        Folder that train mae, dual-encoder or classify --out made.
    label
        Label of the captions; one at least, several may be given.
    method
        knn or linear; both when left out.
    shards
        Data folder; as in training when left out.
    split
        Split to score.
    train_split
        Split that neighbours and the linear layer come from.
    neighbours
        How many vote.
    as_json
        Print one JSON object.
    """
    from train.evaluation.probe.commands import probe_run

    with _as_typed():
        wanted = ProbeEvaluation(split=split, labels=label, methods=method, neighbours=neighbours)
    result = probe_run(run, wanted, bank_split=train_split, shards=shards)
    _print(run, result, num_failed=len(result["failed"]), as_json=as_json)


@evaluate.command
def reconstruction(
    run: Path,
    *,
    shards: str | None = None,
    split: str = "val",
    max_samples: int = 1000,
    as_json: _AsJson = False,
) -> None:
    """What a masked autoencoder makes of hidden cubes: the loss on clips of a split, and pictures on the page.

    Example:

        train eval reconstruction runs/mae --shards data

    Parameters
    ----------
    run
        Folder that train mae --out made.
    shards
        Data folder; as in training when left out.
    split
        Split to reconstruct clips of.
    max_samples
        Clips at most: every k-th of the split, with the smallest k that is enough (12 of 52: every 5th, 11).
    as_json
        Print one JSON object, without the pictures.
    """
    from train.tasks.mae.commands import evaluate_reconstructions

    result = evaluate_reconstructions(run, split=split, max_samples=max_samples, shards=shards)
    _print(run, result, num_failed=len(result["failed"]), as_json=as_json)


@evaluate.command
def caption(
    run: Path,
    *,
    shards: str | None = None,
    split: str = "val",
    max_samples: int = 100_000,
    spice_jars: Path | None = None,
    decoding: Annotated[DecodingSettings | None, Parameter(group="Decoding")] = None,
    as_json: _AsJson = False,
) -> None:
    """What a captioner says of clips, beside all that people said: CIDEr-D, BLEU, ROUGE-L, METEOR, exact matches.

    Beside it stands the best caption that ignores the clip. Captions are also written in COCO's results format.

    Example:

        train eval caption runs/captions --shards data --decoding.method beam

    Parameters
    ----------
    run
        Folder that train caption --out made.
    shards
        Data folder; as in training when left out.
    split
        Split to caption.
    max_samples
        Clips at most: every k-th of the split, with the smallest k that is enough (12 of 52: every 5th, 11).
    spice_jars
        Folder of the two jars that SPICE needs; no SPICE when left out.
    decoding
        How captions are written; as the run says when left out.
    as_json
        Print one JSON object, without the pictures.
    """
    from train.tasks.caption.commands import evaluate_captions

    result = evaluate_captions(
        run, split=split, max_samples=max_samples, shards=shards, decoding=decoding, spice_jars=spice_jars
    )
    _print(run, result, num_failed=len(result["failed"]), as_json=as_json)


@contextmanager
def _as_typed() -> Iterator[None]:
    """Has mistakes in an evaluation's settings name the flags of `train eval`, not those of training."""
    try:
        yield
    except UserError as error:
        message = str(error)
        for flag, typed in (
            ("--evaluate.labels", "--label"),
            ("--evaluate.methods", "--method"),
            ("--evaluate.", "--"),
        ):
            message = message.replace(flag, typed)
        raise UserError(message, hint=error.hint) from error


def _evaluate(run: Path, wanted: DualEncoderEvaluation, *, shards: str | None, num_clips: int, as_json: bool) -> None:
    from train.tasks.dual_encoder.commands import evaluate_run

    result, num_failed = evaluate_run(run, wanted, shards=shards, num_clips=num_clips)
    _print(run, result, num_failed=num_failed, as_json=as_json)


def _print(run: Path, result: dict[str, Any], *, num_failed: int, as_json: bool) -> None:
    from train.evaluation.tables import describe

    if as_json:
        print(json.dumps(_without_pictures(result)))
    else:
        print(describe(result))
    if num_failed:
        raise FailedWork(f"{num_failed} samples could not be decoded; see `failed` in {run}/evaluations")


def _without_pictures(result: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in result.items() if name not in ("examples", "shown", "said")}
