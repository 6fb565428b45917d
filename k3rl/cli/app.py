"""The ``k3rl`` command. Heavy imports happen inside the subcommands, so that ``--help`` is quick."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import typer

app = typer.Typer(
    name="k3rl",
    help="Agentic RL post-training: train, fine-tune and evaluate policies that use tools.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)

ConfigPath = Annotated[Path, typer.Argument(help="YAML file of the run, e.g. configs/demo.yaml.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="Changes to it: key=value ..., e.g. seed=1 steps=30.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on from the last good checkpoint of the run's folder.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Show the resolved run, its objective and costs; start nothing.")
]


def _print_version(wanted: bool) -> None:
    if wanted:
        from k3rl import __version__

        typer.echo(f"k3rl {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@contextmanager
def _user_errors() -> Iterator[None]:
    """Turn our own errors into one clear line: exit code 2 for the user's input, 130 for Ctrl-C, 1 otherwise."""
    from k3rl.errors import ConfigError, K3rlError

    try:
        yield
    except ConfigError as error:
        typer.secho(f"error: {error}", fg="red", err=True)
        raise typer.Exit(2) from error
    except KeyboardInterrupt as error:
        typer.secho("interrupted; what is saved is whole, go on with --resume", fg="yellow", err=True)
        raise typer.Exit(130) from error
    except K3rlError as error:
        typer.secho(f"{type(error).__name__}: {error}", fg="red", err=True)
        raise typer.Exit(1) from error


@app.command()
def train(
    config_path: ConfigPath, overrides: Overrides = None, resume: Resume = False, dry_run: DryRun = False
) -> None:
    """Run a job: supervised fine-tuning if configured, then RL, then the final evaluation."""
    with _user_errors():
        from k3rl.config import load_config

        config = load_config(config_path, overrides or [])
        if dry_run:
            from k3rl.runtime.plan import print_plan

            print_plan(config)
            return
        from k3rl.runtime.job import run_job

        run_job(config, resume=resume)


@app.command()
def sft(config_path: ConfigPath, overrides: Overrides = None, resume: Resume = False, dry_run: DryRun = False) -> None:
    """Train on datasets, from scratch or on, in stages that share weights and optimiser."""
    with _user_errors():
        from k3rl.config import SftJobConfig, load_job

        config = load_job(SftJobConfig, config_path, overrides or [])
        if dry_run:
            from k3rl.runtime.stages import print_stages

            print_stages(config)
            return
        from k3rl.runtime.stages import run_sft

        run_sft(config, resume=resume)


@app.command("eval")
def evaluate(
    config_path: ConfigPath,
    overrides: Overrides = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Checkpoint folder; the last good one of the run's folder when left out.")
    ] = None,
) -> None:
    """Play held-out tasks with fixed seeds, sampled and greedy, and print success with its interval."""
    with _user_errors():
        from k3rl.config import load_config
        from k3rl.runtime.evaluate import evaluate_checkpoint

        evaluate_checkpoint(load_config(config_path, overrides or []), checkpoint)


@app.command()
def doctor(config_path: ConfigPath, overrides: Overrides = None) -> None:
    """Check that this machine, this configuration and its environment can work together."""
    with _user_errors():
        from k3rl.config import load_config
        from k3rl.runtime.doctor import examine

        if not examine(load_config(config_path, overrides or [])):
            raise typer.Exit(1)


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(help="Folder of a published checkpoint, or runs/NAME/checkpoints/step_...")],
    target: Annotated[Path, typer.Argument(help="New folder, in Hugging Face's layout.")],
    dtype: Annotated[Literal["float32", "bfloat16"] | None, typer.Option(help="Left out: as it is.")] = None,
    experts: Annotated[
        Literal["plain", "mxfp4"] | None, typer.Option(help="How experts are stored; left out: as it is.")
    ] = None,
    max_shard_gib: Annotated[float, typer.Option(min=0.001, help="Size of a file.")] = 5.0,
) -> None:
    """Write a checkpoint in another form, tensor by tensor: Kimi K3 or Kimi Linear, plain or MXFP4 experts."""
    with _user_errors():
        from k3rl.runtime.convert import convert_folder

        convert_folder(source, target, dtype=dtype, experts=experts, max_shard_gib=max_shard_gib)


@app.command()
def sizes(
    models: Annotated[list[Path], typer.Argument(help="Files of configs/model/, or folders of published checkpoints.")],
) -> None:
    """Print parameters, active parameters, and the bytes of a token's cache and of a sequence's state."""
    with _user_errors():
        from k3rl.runtime.convert import print_sizes

        print_sizes(models)


@app.command()
def documents(
    path: Annotated[Path, typer.Argument(help="New Parquet file.")],
    length: Annotated[int, typer.Option(help="Tokens of a document with its question and answer.")],
    count: Annotated[int, typer.Option(help="Number of documents.")],
    kind: Annotated[Literal["multi_hop", "permuted"], typer.Option(help="What its question needs.")] = "multi_hop",
    seed: Annotated[int, typer.Option(help="Equal seeds give equal documents.")] = 0,
    split: Annotated[Literal["train", "validation", "test"], typer.Option(help="Splits share no name.")] = "train",
    tokenizer: Annotated[Path | None, typer.Option(help="Folder of a published one; left out: bytes.")] = None,
) -> None:
    """Write long synthetic documents whose questions need evidence from across the window."""
    with _user_errors():
        from k3rl.model.bpe_tokenizer import load_tokenizer
        from k3rl.runtime.documents import write_documents

        encode = str.encode if tokenizer is None else load_tokenizer(tokenizer).encode
        write_documents(
            path,
            kind=kind,
            length=length,
            count=count,
            seed=seed,
            split=split,
            num_tokens=lambda text: len(encode(text)),
        )


@app.command()
def scan(
    source: Annotated[
        Path, typer.Argument(exists=True, help="Checkpoint of a run, published folder, or file of configs/model/.")
    ],
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option(help="What the model computes in.")] = "float32",
    lengths: Annotated[str, typer.Option(help="Tokens, ascending.")] = "32768,131072,524288",
    text: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="File whose bytes are the tokens; left out: random ones."),
    ] = None,
    out: Annotated[Path, typer.Option(help="File of the figures.")] = Path("scan.json"),
    seed: Annotated[int, typer.Option(help="Of the random tokens.")] = 0,
    chunk: Annotated[int, typer.Option(help="Tokens of a forward.")] = 1024,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; left out: cuda where there is one.")] = None,
) -> None:
    """Measure decay, its reciprocal in a tile, attention entropy and KDA state norms at several lengths."""
    with _user_errors():
        from k3rl.errors import ConfigError
        from k3rl.runtime.scan import scan_folder

        if not all(part.strip().isdecimal() for part in lengths.split(",")):
            raise ConfigError(f"lengths: must be numbers with commas between them, got {lengths!r}")
        tokens = [int(part) for part in lengths.split(",")]
        scan_folder(source, out, dtype=dtype, lengths=tokens, text=text, seed=seed, chunk=chunk, device=device)


@app.command()
def bench(subject: Annotated[str, typer.Argument(help="What to measure: demo or model_convert.")] = "demo") -> None:
    """Measure something and write the figures to benchmarks/results/ (from the repository's root)."""
    with _user_errors():
        from k3rl.runtime.bench import bench as run_benchmark

        run_benchmark(subject)
