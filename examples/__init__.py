"""Programs that use ringcoll, to be read and to be run; `pip install -e ".[examples]"`."""
