"""Groups of flags in the help, and what else a flag says to the command line. Lower positions come first."""

from cyclopts import Group, Parameter


def help_group(title: str, position: int) -> Parameter:
    """A group of flags; those of a task alone take positions from 6 to 9."""
    return Parameter(group=Group(title, sort_key=position))


WHERE = help_group("Where", 1)
TRAINING = help_group("Training", 2)
CLIPS = help_group("Clips", 3)
MODEL = help_group("Model", 4)
TOWERS = help_group("Towers", 5)
EVALUATION = help_group("Evaluation", 10)
CAPTIONS = help_group("Captions", 11)
OPTIMIZER = help_group("Optimizer", 12)
AUGMENTATION = help_group("Augmentation", 13)
CHECKPOINTS = help_group("Checkpoints", 14)
PARALLEL = help_group("Parallelism", 15)
TRACKING = help_group("Tracking", 16)
MACHINE = help_group("Machine", 17)
HIDDEN = Parameter(show=False)
SEVERAL = Parameter(negative_iterable=(), consume_multiple=True)  # --flag A B, besides --flag A --flag B
FIRST_RUN = "a flag that a first run needs"  # --help shows those, --help-all every one
