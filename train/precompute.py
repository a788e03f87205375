"""`python -m train.precompute configs/RUN.py [--features DIR]`: the target's hidden states, before training."""

import sys

import tyro

from dspark_jax.checkpoints.target import load_target
from dspark_jax.cli.mistakes import told_in_one_line
from dspark_jax.sharding import make_mesh, placer
from train.__main__ import Options
from train.config import read_config
from train.data import RowReader, cached_documents
from train.distributed import Processes, is_main
from train.loop import check_rows
from train.target_pass import cached_features


def main() -> None:
    """Fills a run's directory of features; killed at any moment, it goes on where it stopped."""
    with told_in_one_line("precompute"):
        run, args = read_config("train.precompute")
        prog, default = f"python -m train.precompute {sys.argv[1]}", (run, Processes())
        run, processes = tyro.cli(Options, default=default, args=args, prog=prog)
        processes.join()
        mesh = make_mesh(run.mesh)
        check_rows(run, mesh)
        target = load_target(run.target, place=placer(mesh))
        reader = RowReader(target.tokenizer, target.config.num_tokens, run.chat)
        documents, _ = cached_documents(run.tokens_directory, run.data, reader)
        store = cached_features(run, target.model, documents, mesh)
        if is_main():
            each = store.note.token.itemsize
            print(
                f"features of {len(documents)} documents, {len(documents.tokens)} tokens of {each} bytes, "
                f"{len(documents.tokens) * each / 1e9:.2f} GB, are in {store.directory}"
            )


if __name__ == "__main__":
    main()
