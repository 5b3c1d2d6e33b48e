"""`--install-completion` of both programs: completion of commands, flags and their values by the shell."""

from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from clipmill.manifests.errors import UserError

if TYPE_CHECKING:
    from cyclopts import App

Shell = Annotated[
    Literal["bash", "zsh", "fish"] | None, Parameter(help="Shell. Default: the one that runs this command.")
]


def register_completion(app: "App") -> None:
    """Add `--install-completion` to a program."""

    def install_completion(*, shell: Shell = None) -> None:
        """Install shell completion for bash, zsh or fish.

        It writes a file into the folder that the shell reads completions from, and for bash and zsh a line into
        ~/.bashrc or ~/.zshrc that loads it. Run it again after an update.
        """
        from cyclopts.completion.detect import ShellDetectionError

        try:
            path = app.install_completion(shell=shell)
        except ShellDetectionError as error:
            raise UserError(
                f"the shell is unknown: {error}", hint="name it: --install-completion --shell bash"
            ) from error
        except OSError as error:
            raise UserError(
                f"cannot write {error.filename}: {error.strerror}", hint="check $HOME and its permissions"
            ) from error
        words = f"completion of {app.name[0]}: {path}"
        if path.suffix != ".fish":
            # zsh names its files so; an earlier line of ~/.zshrc may have loaded all completions that there were.
            is_zsh = path.name.startswith("_")
            words += f", loaded by a line in {'~/.zshrc, which must stand before compinit' if is_zsh else '~/.bashrc'}"
        print(f"{words}; it works in new shells")

    app.command(install_completion, name="--install-completion")
