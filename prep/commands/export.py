"""`prep export KIND`: the columns in formats of other tools; `clipmill.prep.exports.kinds` has a row for each."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

from clipmill.manifests.help_text import OPTIONS
from clipmill.prep.core.request import Data, Json
from clipmill.prep.exports.kinds import KINDS, ExportKind

app = App(name="export", help="Write columns in a format that other tools read.", group_parameters=OPTIONS)


def _command(kind: ExportKind) -> Callable[..., None]:
    defaults = kind.flags()

    def command(destination: Path, *, flags: Any = defaults, data: Data = Path("data"), json: Json = False) -> None:
        from dataclasses import asdict

        from clipmill.manifests.formatting import count_noun
        from clipmill.manifests.progress import Activity
        from clipmill.prep.core.data_folder import require_data_folder
        from clipmill.prep.core.report import NOTHING_TO_DO, Report, show

        exporting = f"exporting to {destination}"
        with Activity(exporting) as now:
            found = kind.write(require_data_folder(data), destination, flags, now.counter(exporting))
        lines = [
            f"exported  {count_noun(found.num_written, found.noun)} to {destination}"
            if found.num_written
            else f"{NOTHING_TO_DO}: {destination} is up to date with {count_noun(found.num_samples, found.noun)}"
        ]
        lines += [f"left out  {num:,}: {reason}" for reason, num in found.left_out.items() if num]
        show(Report("\n".join(lines), asdict(found)), json=json)

    command.__annotations__["flags"] = Annotated[kind.flags, Parameter(name="*")]
    command.__doc__ = kind.text
    return command


for _kind in KINDS:
    app.command(_command(_kind), name=_kind.name)
