"""The command line. Each command is a file; `main.py` names them."""
