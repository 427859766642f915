"""Example programs, to read and to run; `pip install -e ".[examples]"`."""
