"""`python -m dspark_jax` is the `dspark` command."""

from dspark_jax.cli import main

main()
