"""The command about this machine: `doctor`."""

import typer


def doctor() -> None:
    """Say what is installed and what would run here.

    Versions, extras, devices, the solver that trains and the kernels that infer, with the reason why it is not a faster
    one, and where caches are. The first time ever it compiles the CPU kernels, as the first sparse model would. Exit
    code 1: something is wrong.
    """
    from spartan.app import doctor as examination

    raise typer.Exit(examination.doctor())


COMMANDS = (doctor,)
