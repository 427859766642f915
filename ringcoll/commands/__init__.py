"""The commands of `python -m ringcoll`, each a module with `add_arguments` and `run`."""
