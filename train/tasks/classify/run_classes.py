"""The classes that a run of `train classify` tells apart."""

from manifests.errors import UserError
from train.data.classes import ClassList
from train.run.folder import RunFolder


def read_run_classes(run: RunFolder) -> ClassList:
    """The classes that a run was trained on.

    Raises:
        UserError: it is no run of `train classify`.
    """
    try:
        facts = run.require_facts()
        return ClassList(facts["classes"]["label"], tuple(facts["classes"]["names"]))
    except (KeyError, TypeError) as error:
        raise UserError(
            f"{run.facts} names no classes: {run.path} is no run of train classify",
            hint="other runs are scored by other commands: train eval --help",
        ) from error
