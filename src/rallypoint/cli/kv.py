import typer

app = typer.Typer()


@app.command()
def get() -> None: ...
@app.command()
def set() -> None: ...
