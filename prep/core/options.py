"""Options that every `prep` command shares."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

Data = Annotated[Path, Parameter(name="--data", env_var="CLIPMILL_DATA", help="Data folder.")]
Json = Annotated[bool, Parameter(name="--json", negative="", help="Print the result as JSON.")]
